"""Hyper-parameters found on a narrow network, for a wider or deeper one (muP, CompleteP)."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lbopt import _scalars, errors, masks, stacks, tree, types
from lbopt.errors import UserError, require, require_choice
from lbopt.transforms import _arguments, _per_path

Kind = Literal["fixed", "hidden", "input", "output", "vector"]
KINDS = ("fixed", "hidden", "input", "output", "vector")
_POWERS = {"constant": {"hidden": 0.5, "output": 1.0}, "fan_in": {"output": 0.5}}
"""Initializers -> kind -> power of 1 / width by which first values are scaled beside them."""
_LAYER_NUMBER = re.compile(r"\d+")
_ARRAY_NUMBER = re.compile(r"(/\d+)+$")
"""Number of an array inside a named leaf, such as a box."""


class LeafTransfer(NamedTuple):
    """What a leaf of a wider network gets, relative to the same leaf of the base network.

    Attributes:
      kind: "hidden" (a matrix of which inputs and outputs grow), "input" (only the outputs grow, an
        embedding for instance), "output" (only the inputs grow), "vector" (a bias or norm that
        grows), or "fixed" (does not grow).
      width: How many times as wide the leaf is: its inputs, or its outputs for "input" and
        "vector".
      learning_rate: Multiplier of the learning rate.
      eps: Multiplier of Adam's eps.
      weight_decay: Multiplier of a weight decay that the learning rate multiplies.

    >>> LeafTransfer("hidden", 4.0, 0.25, 0.25, 4.0).learning_rate
    0.25
    """

    kind: Kind
    width: float
    learning_rate: float
    eps: float
    weight_decay: float


def transfer_table(
    params: types.Params,
    base_params: types.Params,
    *,
    depth: float = 1.0,
    kinds: Mapping[str, Kind] | None = None,
    stacked: types.Stacked = None,
    known_roles: types.PyTree = None,
) -> dict[str, LeafTransfer]:
    r"""Return the multipliers of every leaf of a network, by comparing it with a narrower one.

    With m the width of a leaf and d the depth, each relative to the base network:

        kind     learning rate   eps         weight decay
        input    1               1 / m       1
        hidden   1 / m           1 / (m d)   m
        output   1 / m           1           m
        vector   1               1 / (m d)   1
        fixed    1               1           1

    Args:
      params: The parameters, or their shapes. Leaves that `optax.masked` took out are left out.
      base_params: The parameters of the base network, or their shapes: the same leaves, narrower.
        Leaves of layers that it does not have are compared with those of the same path and another
        layer's number.
      depth: How many times as many layers the network has. Its residual branches must then be
        multiplied by 1 / depth, which no optimizer can do; this is for networks that normalize
        before each branch.
      kinds: Regular expression -> kind of the leaves whose path it is found in; the first counts.
        None for what shapes and names tell. Name a last norm before the output layer as "fixed".
      stacked: Leaves that are stacks of layers, as in `lbopt.lamb`.
      known_roles: Roles that names need not tell, as in `lbopt.masks.with_known_roles`.

    Returns:
      {path: `LeafTransfer`} in leaf order.

    Raises:
      UserError: If a leaf is missing in the base network or has other dimensions there, or if it
        cannot be told whether its inputs or its outputs grow.

    >>> import numpy as np
    >>> def shapes(width):
    ...     return {
    ...         "first": {"kernel": np.zeros((8, width)), "bias": np.zeros(width)},
    ...         "second": {"kernel": np.zeros((width, width))},
    ...         "head": {"kernel": np.zeros((width, 3))},
    ...     }
    >>> for name, found in transfer_table(shapes(256), shapes(64)).items():
    ...     print(name, found.kind, found.learning_rate)
    first/bias vector 1.0
    first/kernel input 1.0
    head/kernel output 0.25
    second/kernel hidden 0.25

    References:
      Yang et al., Tensor Programs V, arXiv:2203.03466, Table 3 (Adam); Dey et al., CompleteP,
      arXiv:2505.01618, Table 1 with alpha = 1; eps of input and output leaves from Complete(d)P,
      arXiv:2512.22382v1, Table 1.
    """
    _scalars.require_above("depth", depth, 0)
    patterns = dict(kinds or {})
    with errors.about("kinds", kinds):
        tree.check_patterns(tuple(patterns) or ("",))
    for pattern, kind in patterns.items():
        require_choice(f"kinds[{pattern!r}]", kind, KINDS)

    given = tree.leaf_names(params)
    params, all_given = _filled(params, base_params)
    if not all_given and isinstance(stacked, stacks.StackedPaths):
        stacked = stacked.__call__  # does not compare their numbers of layers with the base's
    layer_axes = stacks.resolve_stacked(stacked, params)
    growths = _growths(params, base_params, tree.by_name(layer_axes))
    unused = [pattern for pattern in patterns if not any(re.search(pattern, n) for n in growths)]
    fix = f"{unused} is found in no path ({tree.some(list(growths))}); correct it"
    require(not unused, "kinds", kinds, fix, code="mismatch")
    same_width = all_given and all(not _grows(growth) for growth in growths.values())
    names_layers = bool({*patterns.values()} - {"fixed"})
    fix = "nothing is wider than in the base network, which would tell the layers; name them in "
    fix += "{kinds}"
    known = depth == 1 or not same_width or names_layers
    require(known, "depth", depth, fix, code="conflict", also=["kinds"])

    roles = masks.explain_roles(stacks.one_layer(params, layer_axes), known_roles)
    structure: Any = jax.tree.structure(params)
    axes = structure.flatten_up_to(masks.matrix_dimension_numbers(params, stacked, known_roles))
    found = {}
    for (name, growth), numbers in zip(growths.items(), axes, strict=True):
        told = next((kind for regex, kind in patterns.items() if re.search(regex, name)), None)
        kind, width = _kind_of(name, roles[name].role, growth, numbers, told)
        found[name] = _multipliers(kind, width, depth)
    return {name: found[name] for name in given}


def _filled(params: types.Params, base_params: types.Params) -> tuple[types.Params, bool]:
    """Return the parameters, with those of the base network where `optax.masked` took some out.

    Roles depend on the leaves beside a leaf, and patterns may be meant for leaves taken out.

    Returns:
      The parameters, and whether all of them were given.
    """
    base = tree.by_name(base_params)
    taken_out = []

    def is_taken_out(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    def filled(path: tuple[Any, ...], node: Any) -> Any:
        if not is_taken_out(node):
            return node
        name = tree.path_name(path)
        taken_out.append(name)
        return _counterpart(name, base)

    found = jax.tree_util.tree_map_with_path(filled, params, is_leaf=is_taken_out)
    return found, not taken_out


def _counterpart(name: str, base: Mapping[str, Any]) -> Any:
    """Return the base's leaf of a path, or {path below it: leaf}; {} for none.

    It is that of another layer's number if the base does not have this one.
    """
    parts = len(name.split("/")) if name else 0
    alike: dict[str, dict[str, Any]] = collections.defaultdict(dict)
    for key, leaf in base.items():
        path = key.split("/")
        start = "/".join(path[:parts])
        if _any_layer(start) == _any_layer(name):
            alike[start]["/".join(path[parts:])] = leaf
    found = alike.get(name) or next(iter(alike.values()), {})
    return found.get("", found)


def _any_layer(name: str) -> str:
    """Return a path without the layer's number in it."""
    return _LAYER_NUMBER.sub("#", name)


def _grows(growth: Mapping[int, float]) -> bool:
    return any(times != 1 for times in growth.values())


def _growths(
    params: types.Params,
    base_params: types.Params,
    layer_axes: Mapping[str, stacks.LayerAxes],
) -> dict[str, dict[int, float]]:
    """Return {path: {axis: how many times as long it is}}, without axes that count layers."""
    base = {name: jnp.shape(leaf) for name, leaf in tree.by_name(base_params).items()}
    alike: dict[str, set[tuple[int, ...]]] = collections.defaultdict(set)
    for name, shape in base.items():
        alike[_any_layer(name)].add(shape)

    found = {}
    for name, leaf in tree.by_name(params).items():
        shape = jnp.shape(leaf)
        others = {base[name]} if name in base else alike[_any_layer(name)]
        fix = "the base network has no such leaf; build it by the same code with another width"
        require(others, f"params/{name}", shape, fix, code="mismatch")
        fix = f"the layers of the base network differ there ({others}); give it as many layers"
        require(len(others) == 1, f"params/{name}", shape, fix, code="mismatch")
        (narrow,) = others
        fix = f"it has the shape {narrow} in the base network; give the same network, narrower"
        fits = len(narrow) == len(shape) and 0 not in narrow
        require(fits, f"params/{name}", shape, fix, code="mismatch")
        own = [axis for axis in range(len(shape)) if axis not in layer_axes[name].axes]
        found[name] = {axis: shape[axis] / narrow[axis] for axis in own}
    return found


def _kind_of(
    name: str, role: str, growth: dict[int, float], numbers: Any, told: Kind | None
) -> tuple[Kind, float]:
    """Return the kind of a leaf and how many times as wide it is.

    Args:
      name: Path of the leaf.
      role: Its role.
      growth: {axis: how many times as long it is}, without axes that count layers.
      numbers: The axes of a hidden weight, as `optax.contrib.MuonDimensionNumbers`; None for other
        leaves.
      told: The kind that the caller gave; None for none.
    """
    all_times = list(growth.values())
    if told == "fixed" or not _grows(growth):
        return told or "fixed", 1.0
    if role in ("bias", "norm", "vector"):
        return told or "vector", math.prod(all_times)
    if role == "embedding":
        return told or "input", math.prod(all_times)
    if len(all_times) == 2 and all_times[0] == all_times[1]:
        return told or "hidden", all_times[0]

    # A `weight` (PyTorch, Equinox) has its outputs first, a `kernel` (Flax) last; Flax's queries
    # have more than one axis of outputs, which only their names tell.
    path = _ARRAY_NUMBER.sub("", name)
    last = path.rpartition("/")[2]
    output = {"kernel": max(growth), "w": max(growth), "weight": min(growth)}.get(last)
    if output is None and told is None:
        fix = "its name does not tell which axis is the output; name its kind in {kinds}"
        raise UserError(f"params/{name}", all_times, fix, code="missing", also=["kinds"])
    outputs: set[Any] = {output} if numbers is None else {*numbers.output_axis}
    if numbers is not None and len(outputs) == 1 and not _is_sure(path, growth, outputs):
        if told is None:
            fix = "it cannot be told which axes are the outputs; name its kind in {kinds}"
            raise UserError(f"params/{name}", all_times, fix, code="missing", also=["kinds"])
        inputs_first = all_times[::-1] if last == "weight" else all_times
        return told, _split(inputs_first) if told == "hidden" else math.prod(all_times)

    width = math.prod(times for axis, times in growth.items() if axis not in outputs)
    wide = math.prod(times for axis, times in growth.items() if axis in outputs)
    if width == 1:
        return told or "input", wide
    return told or ("output" if wide == 1 else "hidden"), width


def _is_sure(path: str, growth: Mapping[int, float], outputs: set[int]) -> bool:
    """Return whether the axes of a hidden weight, as its name tells them, agree with its growth.

    A kernel may be [heads, dim, out] or, under a name that does not tell, [in, heads, dim].
    """
    inputs = [times for axis, times in growth.items() if axis not in outputs]
    wide = math.prod(times for axis, times in growth.items() if axis in outputs)
    if sum(times != 1 for times in inputs) > 1:
        return math.isclose(math.prod(inputs), wide)

    # The middle axis alone is the inputs of a convolution, or the heads of a query.
    module, _, last = path.rpartition("/")
    middle = [times != 1 for times in growth.values()] == [False, True, False]
    return last == "weight" or not middle or "conv" in module.rpartition("/")[2].lower()


def _split(growth: list[float]) -> float:
    """Return how much the inputs of a hidden weight grow that has its inputs first.

    It is split where inputs and outputs grow most alike.
    """
    splits = range(len(growth) - 1, 0, -1)
    halves = [(math.prod(growth[:split]), math.prod(growth[split:])) for split in splits]
    return min(halves, key=lambda half: abs(math.log(half[0] / half[1])))[0]


def _multipliers(kind: Kind, m: float, depth: float) -> LeafTransfer:
    rate = 1 / m if kind in ("hidden", "output") else 1.0
    eps = {"fixed": 1.0, "output": 1.0, "input": 1 / m}.get(kind, 1 / (m * depth))
    return LeafTransfer(kind, m, rate, eps, 1 / rate)


def _by_multipliers(table: Mapping[str, LeafTransfer]) -> dict[LeafTransfer, list[str]]:
    found: dict[LeafTransfer, list[str]] = {}
    for name, each in table.items():
        found.setdefault(each, []).append(name)
    return found


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A network whose numbers a wider one takes, for recipes.

    Attributes:
      base_params: Shapes of its parameters.
      kinds: As in `transfer_table`.
      init: As in `transfer_init`.
      stacked: As in `transfer_table`.
      depth: As in `transfer_table`.
    """

    base_params: types.Params
    kinds: Mapping[str, Kind]
    init: Literal["fan_in", "constant"] = "fan_in"
    stacked: types.Stacked = None
    depth: float = 1.0

    def lines(self, params: types.Params) -> list[str]:
        """Return the multipliers of each kind of parameter, as lines of a table.

        Args:
          params: Shapes of the wide network's parameters.
        """
        table = transfer_table(params, self.base_params, **self._options())
        power = _POWERS[self.init]
        lines = []
        for found, names in _by_multipliers(table).items():
            std = found.width ** -power.get(found.kind, 0.0)
            lines.append(
                f"{found.kind}, {found.width:g} x as wide: "
                f"learning rate x {found.learning_rate:.4g}, eps x {found.eps:.4g}, "
                f"weight decay x {found.weight_decay:.4g}, first values x {std:.4g}: "
                f"{tree.some(names)}"
            )
        return lines

    def scaled(self, params: types.Params) -> types.Params:
        """Return fresh parameters of the wide network, scaled by `transfer_init`."""
        return transfer_init(
            params, self.base_params, self.init, kinds=self.kinds, stacked=self.stacked
        )

    def around(self, inner: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return a direction, scaled by `scale_by_transfer`."""
        return scale_by_transfer(self.base_params, inner, **self._options())

    def _options(self) -> dict[str, Any]:
        return {"depth": self.depth, "kinds": self.kinds, "stacked": self.stacked}


def transfer_init(
    params: types.Params,
    base_params: types.Params,
    init: Literal["fan_in", "constant"] = "fan_in",
    *,
    kinds: Mapping[str, Kind] | None = None,
    stacked: types.Stacked = None,
    known_roles: types.PyTree = None,
) -> types.Params:
    r"""Scale fresh parameters of a wide network so that its activations are the base network's.

    The variance of a hidden matrix becomes 1 / m of the base network's, that of an output matrix
    1 / m^2; the others keep it. m is the width of the leaf relative to the base network.

    Args:
      params: Fresh parameters.
      base_params: The base network's, or their shapes; see `transfer_table`.
      init: How the initializers of matrices depend on the width: "fan_in" (variance 1 / inputs, as
        He's, LeCun's and PyTorch's) or "constant" (the same at every width, 0.02 for instance).
      kinds: As in `transfer_table`.
      stacked: As in `transfer_table`.
      known_roles: As in `transfer_table`.

    Returns:
      The parameters in their dtypes.

    Raises:
      UserError: As `transfer_table`, and for an unknown `init`.

    >>> import jax.numpy as jnp
    >>> wide = {"head": {"kernel": jnp.ones((16, 2))}}
    >>> narrow = {"head": {"kernel": jnp.ones((4, 2))}}
    >>> float(transfer_init(wide, narrow)["head"]["kernel"][0, 0])
    0.5

    References:
      As for `transfer_table`.
    """
    require_choice("init", init, _POWERS)
    table = transfer_table(
        params, base_params, kinds=kinds, stacked=stacked, known_roles=known_roles
    )
    power = _POWERS[init]

    def scaled(name: str, leaf: jax.Array) -> jax.Array:
        found = table[name]
        return tree.scaled(leaf, found.width ** -power.get(found.kind, 0.0))

    return tree.map_with_name(scaled, params)


def scale_by_transfer(
    base_params: types.Params,
    inner: optax.GradientTransformation | None = None,
    *,
    depth: float = 1.0,
    kinds: Mapping[str, Kind] | None = None,
    stacked: types.Stacked = None,
    known_roles: types.PyTree = None,
) -> optax.GradientTransformation:
    r"""Scale Adam's direction leaf by leaf, so that a narrow network's learning rate stays right.

    Each leaf's direction is multiplied by its multiplier of the learning rate, and its gradient is
    divided by the multiplier of eps beforehand, which is the same as another eps. Put it where
    `optax.scale_by_adam` stands, with the decoupled weight decay after it: the decay of hidden and
    output leaves is then multiplied by m relative to their learning rate, as it has to be.

    Args:
      base_params: Parameters, or shapes, of the network on which the numbers were found; see
        `transfer_table`.
      inner: A direction whose size does not depend on that of the gradient, such as Adam's; None
        for `optax.scale_by_adam()`.
      depth: As in `transfer_table`.
      kinds: As in `transfer_table`.
      stacked: As in `transfer_table`.
      known_roles: As in `transfer_table`.

    Returns:
      A transformation with the state of `inner`. Its `update` needs `params`.

    Raises:
      UserError: As `transfer_table`.

    >>> import jax.numpy as jnp, optax
    >>> narrow = {"head": {"kernel": jnp.ones((4, 2))}}
    >>> wide = {"head": {"kernel": jnp.ones((16, 2))}}
    >>> tx = optax.chain(
    ...     scale_by_transfer(narrow), optax.add_decayed_weights(0.1), optax.scale(-0.01)
    ... )
    >>> updates, _ = tx.update(wide, tx.init(wide), wide)
    >>> print(f"{updates['head']['kernel'][0, 0]:.4f}")  # -0.01 (1 / 4 + 0.1)
    -0.0035

    References:
      As for `transfer_table`.
    """
    chosen = optax.scale_by_adam() if inner is None else inner
    _arguments.require_transformation("inner", chosen)
    through = optax.with_extra_args_support(chosen)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), base_params)

    def table(params: types.Params) -> dict[str, LeafTransfer]:
        return transfer_table(
            params, shapes, depth=depth, kinds=kinds, stacked=stacked, known_roles=known_roles
        )

    def init_fn(params: types.Params) -> Any:
        if not _per_path.is_placeholder(params):
            table(params)
        return chosen.init(params)

    def update_fn(updates, state, params=None, **extra_args):
        _arguments.require_params(params, "scale_by_transfer")
        tree.check_inexact(updates, "updates")
        found = table(params)
        grads = tree.map_with_name(lambda name, g: tree.scaled(g, 1 / found[name].eps), updates)
        direction, state = through.update(grads, state, params, **extra_args)
        scaled = tree.map_with_name(
            lambda name, u: tree.scaled(u, found[name].learning_rate), direction
        )
        return scaled, state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
