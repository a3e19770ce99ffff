"""The seam to Equinox."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from lbopt import replicas, tree, types
from lbopt.errors import MissingPackage, UserError, require
from lbopt.models._seam import MODES, Model, call_arguments, signature

Path = tuple[str, ...]


def from_equinox(build: Callable[[jax.Array], Any], *, batched: bool = False) -> Model:
    """Wrap the Equinox module that `build(key)` makes, called with one example.

    It is called as `module(x)`, with `key=` and `state=` if it has these arguments, and mapped over
    the batch by `jax.vmap`. The mapped axis has the name that its `equinox.nn.BatchNorm` layers
    give it, else "batch": their statistics are those of the global batch under `jit`, and of one
    replica's under `pmap`. Inputs may be a dict, and the call may have another argument for the
    mode, as in `from_linen`.

    Parameters are the arrays for which `equinox.is_inexact_array` holds, NumPy's too, as in
    Equinox's own training loops: a dict by path, `{"layers": {"0": {"weight": ...}}}`. The model's
    state has two entries. "state" holds the values of `equinox.nn.StateIndex` by the path of the
    index; if there are some, the call takes `state` and returns (outputs, state). "arrays" holds
    the other arrays of the module, which stay as they are.

    Each example has a random key of its own, from the step's key and the example's number in the
    global batch, so results do not depend on the number of devices. In evaluation the module is in
    `equinox.nn.inference_mode`, and its key is None, or a fixed one if the argument has no default.
    In training, layers built with `inference=True` stay so. To compute in bf16 with BatchNorm, give
    it `mode="batch"`: the running statistics are fp32, and its mode "ema" mixes no dtypes.

    Args:
      build: Function of a random key that returns the module, or the pair (module, state) of
        `equinox.nn.make_with_state`. It is called anew for every initialization.
      batched: Whether the module takes a batch, and one key for it.

    Raises:
      UserError: If `build` makes something else, or the call needs an argument that is not given.
      EnvironmentProblem: If Equinox is not installed.

    >>> import equinox as eqx, jax, jax.numpy as jnp  # doctest: +SKIP
    >>> model = from_equinox(lambda key: eqx.nn.MLP(3, 2, 16, 1, key=key))  # doctest: +SKIP
    >>> params, state = model.init(jax.random.key(0), jnp.ones((4, 3)))  # doctest: +SKIP
    >>> model.apply(params, state, jnp.ones((4, 3)), train=False)[0].shape  # doctest: +SKIP
    (4, 2)
    """
    eqx = _equinox()
    if isinstance(build, eqx.Module):
        fix = f"{type(build).__name__}(...) is a module; give what makes it, lambda key: ..."
        raise UserError("build", reason=fix, code="type")

    def make(key: jax.Array) -> tuple[Any, Any]:
        return _with_state(eqx, build(key))

    module, blank_state = eqx.filter_eval_shape(make, jax.random.key(0))
    structure: Any = jax.tree.structure(module)
    state_structure: Any = jax.tree.structure(blank_state)
    leaves = _by_path(module)
    arrays = {path: leaf for path, leaf in leaves.items() if _is_shape(leaf)}
    trained = [path for path, leaf in arrays.items() if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    others = [path for path in arrays if path not in trained]
    state_paths = _state_paths(eqx, module, blank_state)
    call = _Call(eqx, module, bool(state_paths), batched)

    def of_state(state: Any) -> types.PyTree:
        return unflatten_dict(dict(zip(state_paths, jax.tree.leaves(state), strict=True)))

    def init(key: jax.Array, inputs: Any) -> tuple[types.Params, types.ModelState]:
        del inputs  # Equinox modules get their shapes when they are built.
        made, state = make(key)
        found = _by_path(made)
        chosen = [{path: jnp.asarray(found[path]) for path in paths} for paths in (trained, others)]
        params, rest = map(unflatten_dict, chosen)
        model_state = {"arrays": rest, "state": of_state(state)}
        return params, {name: entry for name, entry in model_state.items() if entry}

    def apply(
        params: types.Params,
        model_state: types.ModelState,
        inputs: Any,
        train: bool,
        rng: jax.Array | None = None,
    ):
        values = {**leaves, **_flat(params), **_flat(model_state.get("arrays", {}))}
        merged = jax.tree.unflatten(structure, [values[path] for path in leaves])
        of_path = _flat(model_state.get("state", {}))
        state = jax.tree.unflatten(state_structure, [of_path[path] for path in state_paths])

        outputs, state = call(merged, state, inputs, train, rng)
        if not (train and state_paths):
            return outputs, model_state
        return outputs, {**model_state, "state": of_state(state)}

    return Model(init, apply, module)


def _equinox() -> Any:
    try:
        import equinox
    except ImportError as error:
        fix = "the model needs it, and it is not installed: pip install 'lbopt[models]'"
        raise MissingPackage("equinox", reason=fix) from error
    return equinox


def _with_state(eqx: Any, made: Any) -> tuple[Any, Any]:
    """Return a module and its initial state."""
    is_pair = isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], eqx.nn.State)
    module = made[0] if is_pair else made
    fix = f"it takes a key and makes a {type(module).__name__}; make an equinox.Module"
    if not isinstance(module, eqx.Module):
        raise UserError("model", reason=fix, code="type")
    return made if is_pair else eqx.nn.make_with_state(lambda: module)()


def _path(keys: tuple[Any, ...]) -> Path:
    # Key by key: a path's last attribute `value` is no box here.
    return tuple(tree.path_name((key,)) for key in keys)


def _by_path(module: Any) -> dict[Path, Any]:
    found = jax.tree_util.tree_leaves_with_path(module)
    leaves = {_path(keys): leaf for keys, leaf in found}
    require(len(leaves) == len(found), "model", module, "two of its leaves have one path")
    return leaves


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _flat(nested: Mapping[str, Any]) -> dict[Path, Any]:
    return flatten_dict(dict(nested))


def _state_paths(eqx: Any, module: Any, state: Any) -> list[Path]:
    """Return the paths of a state's leaves: that of the module's index, then within its value."""

    def is_index(node: Any) -> bool:
        return isinstance(node, eqx.nn.StateIndex)

    leaves, structure = jax.tree.flatten(state)
    numbered: Any = jax.tree.unflatten(structure, range(len(leaves)))
    paths: dict[int, Path] = {}
    for keys, index in jax.tree_util.tree_leaves_with_path(module, is_leaf=is_index):
        if is_index(index):
            inside = jax.tree_util.tree_leaves_with_path(numbered.get(index))
            paths.update((number, _path((*keys, *inner))) for inner, number in inside)
    return [paths.get(number, (str(number),)) for number in range(len(leaves))]


class _Call:
    """The call of a module with a batch.

    Attributes:
      taken: Arguments of the module's call, without `**kwargs`, and without a mode whose default is
        None: that is how Equinox's layers say that their attribute decides.
      given: Those of `key` and `state` that it gets.
      axis_name: Name of the axis of examples.
    """

    def __init__(self, eqx: Any, module: Any, has_state: bool, batched: bool):
        self.eqx = eqx
        self.batched = batched
        self.taken = {
            name: one
            for name, one in signature(module.__call__).items()
            if one.kind is not one.VAR_KEYWORD and not (name in MODES and one.default is None)
        }
        wanted = {"key": True, "state": has_state or self._needs("state")}
        self.given = [name for name, gets in wanted.items() if gets and name in self.taken]
        self.axis_name = _axis_name(eqx, module)

    def _needs(self, name: str) -> bool:
        return name in self.taken and self.taken[name].default is inspect.Parameter.empty

    def __call__(
        self, module: Any, state: Any, inputs: Any, train: bool, rng: jax.Array | None
    ) -> tuple[Any, Any]:
        """Return the outputs of a batch, and the new state."""
        if not train:
            module = self.eqx.nn.inference_mode(module)
            rng = jax.random.key(0) if self._needs("key") else None
        positional, named, modes = call_arguments(self.taken, inputs, train, ["key", "state"])

        def one(positional: Any, named: Any, key: jax.Array | None) -> tuple[Any, Any]:
            offered = {"key": key, "state": state}
            options = {name: offered[name] for name in self.given}
            return self._split(module(*positional, **named, **modes, **options), state)

        if self.batched:
            return one(positional, named, rng)
        keys = None if rng is None else _key_of_each(rng, inputs)
        mapped = jax.vmap(one, out_axes=(0, None), axis_name=self.axis_name)
        try:
            return mapped(positional, named, keys)
        except ValueError as error:
            if "out_axes" not in str(error):
                raise
            fix = f"its state differs between examples; average it, lax.pmean(.., {self.axis_name})"
            raise UserError("model", reason=fix, code="mismatch") from error

    def _split(self, result: Any, state: Any) -> tuple[Any, Any]:
        """Return the outputs of a call, and the state: the new one if it returns one."""
        if "state" not in self.given:
            return result, state
        is_pair = isinstance(result, tuple) and len(result) == 2
        if is_pair and isinstance(result[1], self.eqx.nn.State):
            return result
        fix = "its call takes state, and does not return one; return (outputs, state)"
        raise UserError("model", reason=fix, code="type")


def _axis_name(eqx: Any, module: Any) -> str:
    """Return the name of the axis over which batch norm takes statistics."""

    def is_norm(node: Any) -> bool:
        return isinstance(node, eqx.nn.BatchNorm)

    norms = filter(is_norm, jax.tree.leaves(module, is_leaf=is_norm))
    names = {norm.axis_name for norm in norms if isinstance(norm.axis_name, str)}
    return names.pop() if len(names) == 1 else "batch"


def _key_of_each(rng: jax.Array, inputs: Any) -> jax.Array:
    """Return a random key for each example, from its number in the batch that shares `rng`."""
    numbers = replicas.example_numbers(len(jax.tree.leaves(inputs)[0]))
    return jax.vmap(jax.random.fold_in, (None, 0))(rng, numbers)
