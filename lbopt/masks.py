"""Which leaves a transform touches: by role, by path, by callable, and combinations of these.

Masks are callables `params -> pytree of bools`, as Optax takes them, and combine by `&`, `|` and `~`:

    weights_only & ~select_paths("embed")     the default of lbopt, without embeddings
    all_leaves & exclude_paths("embed")       biases and normalization leaves too
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from lbopt import stacks, tree, types

Role = Literal["bias", "norm", "vector", "weight"]
ROLES: tuple[str, ...] = get_args(Role)

_SHIFTS = ("bias", "b", "beta", "offset")
_GAINS = ("scale", "gamma", "weight", "w", "kernel")
_NORM_NAMES = {"scale", "gamma"}
_WEIGHT_NAMES = {"kernel", "embedding"}
_FILTER_GAINS = {"g", "weight_g", "original0"}  # weight norm in Equinox, Haiku and PyTorch
_NORM_WORD = re.compile(r"(?<!de)(?<!un)norms?$|normali[sz]ations?$|^((bn|ln|gn|grn)s?|rms)$")
# What follows a norm's name in `norm_proj` and `adaLN_modulation` may be the layer that it feeds: a matrix there is a weight.
_LAYER_WORDS = {"proj", "projection", "linear", "dense", "fc", "modulation"}
_TABLE_WORDS = {"relative", "rel", "relpos", "table"}  # biases that are looked up by distance
_NORM_CLASS = re.compile(r"(Norm|Normalization)(\dd)?$")
_LAYER_CLASS = re.compile(
    r"(Linear|Dense|Conv|ConvTranspose|Embed|Embedding|Einsum|LinearGeneral|DenseGeneral)(\dd)?$"
)


def leaf_role(name: str, leaf: Any) -> Role:
    """Say what a leaf is to an optimizer, by its name and rank: `bias`, `norm`, `vector` or `weight`.

    A last part `scale` or `gamma`, or a direct parent that is a normalization module (`BatchNorm_0`, `layernorm_before`, `bn_init`, ...), makes
    it a norm; a last part `bias`, `b`, `beta`, `offset`, or one with the word bias in it (`gate_up_proj_bias`, `bias_ih`), is a bias, and so is `b1` beside `w1`; a matrix called
    `kernel` or `embedding` is a weight wherever it is. A leaf with fewer than two dimensions whose name says nothing is a `vector`: in practice a
    shift or a gain under another name. `select_roles` sees the whole tree and knows more: the classes of modules (Equinox, NNX), and that
    a gain and a shift of one shape belong to a norm, as in a list of layers.

    >>> import numpy as np
    >>> leaf_role("Dense_0/kernel", np.zeros((3, 3))), leaf_role("Dense_0/bias", np.zeros(3))
    ('weight', 'bias')
    >>> leaf_role("BatchNorm_0/scale", np.zeros(3)), leaf_role("prelu/slope", np.zeros(3))
    ('norm', 'vector')
    """
    return _role(_named_parts(name), jnp.shape(leaf), {}, None)


def tree_roles(params: types.Params) -> types.PyTree:
    """Return the role of every leaf, from names, ranks, neighbours and the classes of modules; see `leaf_role`."""
    leaves: list[tuple[Any, Any]]
    structure: Any
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    parts = [_named_parts(tree.path_name(path)) for path, _ in leaves]
    siblings: dict[tuple[str, ...], dict[str, tuple[int, ...]]] = {}
    for (*parents, last), (_, leaf) in zip(parts, leaves, strict=True):
        siblings.setdefault(tuple(parents), {})[last] = jnp.shape(leaf)
    return structure.unflatten(
        _role(part, jnp.shape(leaf), siblings[tuple(part[:-1])], _module_class(params, path))
        for part, (path, leaf) in zip(parts, leaves, strict=True)
    )


def _role(
    parts: list[str],
    shape: tuple[int, ...],
    siblings: Mapping[str, tuple[int, ...]],
    module: type | None,
) -> Role:
    """Return the role of a leaf beside `siblings`, the shapes of the arrays of its module."""
    *parents, last = parts
    is_matrix = len(shape) >= 2
    if last in _WEIGHT_NAMES and is_matrix:
        return "weight"
    if last in _NORM_NAMES or (last in _FILTER_GAINS and (not is_matrix or 1 in shape)):
        return "norm"
    if (
        last == "gain" and is_matrix and 1 in shape
    ):  # one per filter, in scaled weight standardization
        return "norm"
    if _in_norm(parents, last, shape, siblings, module):
        return "norm"
    if (last in _SHIFTS and not (is_matrix and _is_factor(parents, last, siblings))) or _is_bias(
        _words(last)
    ):
        return "bias"
    if (
        last.startswith("b") and {"w" + last[1:], "W" + last[1:]} & siblings.keys()
    ):  # w1 and b1, W_Q and b_Q
        return "bias"
    return "weight" if is_matrix else "vector"


def _in_norm(
    parents: list[str],
    last: str,
    shape: tuple[int, ...],
    siblings: Mapping[str, tuple[int, ...]],
    module: type | None,
) -> bool:
    """Return whether a leaf belongs to a normalization: by its module's class, else by its neighbours, else by its parent's name."""
    classes = [] if module is None else [kind.__name__ for kind in module.__mro__]
    if any(_NORM_CLASS.search(name) for name in classes):
        return not any(name in ("WeightNorm", "SpectralNorm") for name in classes)
    if any(_LAYER_CLASS.search(name) for name in classes):
        return False
    partners = _GAINS if last in _SHIFTS else _SHIFTS if last in _GAINS else ()
    beside = [siblings[name] for name in partners if name in siblings]
    if beside:
        return set(beside) == {shape}
    words = _words(next((part for part in reversed(parents) if not part.isdigit()), ""))
    norms = [place for place, word in enumerate(words) if _NORM_WORD.search(word)]
    return bool(norms) and not (len(shape) >= 2 and _LAYER_WORDS & set(words[norms[-1] :]))


def _is_bias(words: list[str]) -> bool:
    """Return whether a name says bias: at its end (`in_proj_bias`), or before an index in letters (`bias_ih_l0_reverse`, `pos_bias_u`)."""
    ends = {place for place, word in enumerate(words) if word in ("bias", "biases")}
    short = all(
        len(word) <= 2 or word == "reverse" for word in words[max(ends, default=len(words)) + 1 :]
    )
    return bool(ends) and short and not _TABLE_WORDS & set(words)


def _is_factor(parents: list[str], last: str, siblings: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether `b` is the second matrix of a low-rank pair (LoRA)."""
    return last == "b" and ("a" in siblings or any("lora" in _words(parent) for parent in parents))


def _words(name: str) -> list[str]:
    """Split a name where its case, its digits or its underscores do.

    >>> _words("SyncBatchNorm2d_3"), _words("layernorm_before"), _words("ln1")
    (['sync', 'batch', 'norm', '2', 'd', '3'], ['layernorm', 'before'], ['ln', '1'])
    """
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def _named_parts(name: str) -> list[str]:
    """Split a path, also one in PyTorch's spelling (`layer.0.weight`), and cut off what only numbers the arrays inside a named leaf (`weight/0`)."""
    parts = re.split(r"[/.]", name)
    named = len(parts)
    while named > 1 and parts[named - 1].isdigit():
        named -= 1
    return parts[:named] if not parts[named - 1].isdigit() else parts


def _module_class(params: types.Params, path: tuple[Any, ...]) -> type | None:
    """Return the class of the object that has the leaf as an attribute (an Equinox, Haliax or NNX module); None without one."""
    node, found = params, None
    for key in path[:-1] if tree.path_name(path) == tree.path_name(path[:-1]) else path:
        if isinstance(key, jax.tree_util.GetAttrKey):
            found, node = type(node), getattr(node, key.name, None)
        elif isinstance(key, (jax.tree_util.DictKey, jax.tree_util.SequenceKey)):
            found = None if isinstance(key, jax.tree_util.DictKey) else found
            try:
                node = node[key.key if isinstance(key, jax.tree_util.DictKey) else key.idx]
            except (KeyError, IndexError, TypeError):
                return None
        else:
            break
    return found


class LeafMask(abc.ABC):
    """A mask that combines with others: `&`, `|` and `~`, also with functions of the parameters."""

    @abc.abstractmethod
    def __call__(self, params: types.Params) -> types.PyTree:
        """Return a bool per leaf."""

    @abc.abstractmethod
    def __invert__(self) -> LeafMask:
        """Return the mask of all other leaves."""

    @property
    def only_excludes(self) -> bool:
        """Whether the mask names nothing but leaves to leave out: it then selects every other one."""
        return False

    def __and__(self, other: MaskFn) -> LeafMask:
        return _combined(all, self, other)

    def __rand__(self, other: MaskFn) -> LeafMask:
        return _combined(all, other, self)

    def __or__(self, other: MaskFn) -> LeafMask:
        return _combined(any, self, other)

    def __ror__(self, other: MaskFn) -> LeafMask:
        return _combined(any, other, self)


MaskFn = LeafMask | Callable[[types.Params], types.PyTree]
"""(params) -> a bool per leaf."""


def _combined(rule: Callable[[Iterable[bool]], bool], *masks: MaskFn) -> LeafMask:
    if not all(callable(mask) for mask in masks):
        return NotImplemented
    named = (mask if isinstance(mask, LeafMask) else FunctionMask(mask) for mask in masks)
    return CombinedMask(rule, tuple(named))


@dataclasses.dataclass(frozen=True, repr=False)
class CombinedMask(LeafMask):
    """The leaves that all of several masks select (`&`), or any of them (`|`).

    Attributes:
      rule: `all` or `any`.
      masks: two masks, which may be combinations themselves.
    """

    rule: Callable[[Iterable[bool]], bool]
    masks: tuple[LeafMask, ...]

    def __call__(self, params: types.Params) -> types.PyTree:
        """Return a bool per leaf."""
        choices = (tree.spread(mask(params), params, repr(mask)) for mask in self.masks)
        return jax.tree.map(lambda *chosen: self.rule(map(bool, chosen)), *choices)

    def __invert__(self) -> LeafMask:
        """Return the mask of all other leaves: ~(a & b) = ~a | ~b, ~(a | b) = ~a & ~b."""
        return CombinedMask(any if self.rule is all else all, tuple(~mask for mask in self.masks))

    @property
    def only_excludes(self) -> bool:
        """Whether the mask names nothing but leaves to leave out."""
        return self.rule(mask.only_excludes for mask in self.masks)

    def __repr__(self) -> str:
        sign = " & " if self.rule is all else " | "
        return sign.join(
            f"({mask!r})"
            if isinstance(mask, CombinedMask) and mask.rule is not self.rule
            else repr(mask)
            for mask in self.masks
        )


@dataclasses.dataclass(frozen=True, repr=False)
class FunctionMask(LeafMask):
    """A function of the parameters in a combination of masks.

    Attributes:
      function: (params) -> a bool per leaf or per subtree.
      chosen: False for the leaves that the function does not select.
    """

    function: Callable[[types.Params], types.PyTree]
    chosen: bool = True

    def __call__(self, params: types.Params) -> types.PyTree:
        """Return a bool per leaf."""
        selected = self.function(params)
        tree.map_with_name(lambda name, hit: _check_bool(name, hit, repr(self)), selected)
        return jax.tree.map(lambda hit: bool(hit) == self.chosen, selected)

    def __invert__(self) -> LeafMask:
        """Return the mask of all other leaves."""
        return FunctionMask(self.function, not self.chosen)

    def __repr__(self) -> str:
        name = getattr(self.function, "__name__", repr(self.function))
        return name if self.chosen else f"~{name}"


@dataclasses.dataclass(frozen=True, repr=False)
class RoleMask(LeafMask):
    """A mask by role; see `select_roles`, `exclude_roles` and `weights_only`."""

    roles: tuple[str, ...]

    def __call__(self, params: types.Params) -> types.PyTree:
        """Return a bool per leaf."""
        _require_names(self, params)
        return jax.tree.map(lambda role: role in self.roles, tree_roles(params))

    def __invert__(self) -> RoleMask:
        """Return the mask of the other roles."""
        return RoleMask(tuple(role for role in ROLES if role not in self.roles))

    def __repr__(self) -> str:
        if self.roles in (("weight",), ROLES):
            return "all_leaves" if self.roles == ROLES else "weights_only"
        return f"select_roles({', '.join(repr(role) for role in self.roles)})"


def _require_names(mask: LeafMask, params: types.Params) -> None:
    if tree.leaf_names(params) == [""]:
        raise ValueError(
            f"{mask!r} needs a tree of named parameters; inside optax.inject_hyperparams, name the mask in "
            "static_args, or it is taken for a schedule"
        )


def select_roles(*roles: Role) -> RoleMask:
    """Return a mask that selects leaves by what they are to an optimizer (see `leaf_role`).

    Args:
      *roles: of "weight", "bias", "norm", "vector".

    Raises:
      ValueError: for an unknown role or none.

    >>> import numpy as np
    >>> select_roles("weight", "bias")({"kernel": np.zeros((2, 2)), "bias": np.zeros(2), "scale": np.zeros(2)})
    {'bias': True, 'kernel': True, 'scale': False}
    """
    if not roles or not all(isinstance(role, str) and role in ROLES for role in roles):
        raise ValueError(f"roles = {tree.said(roles)}: give one or more of {', '.join(ROLES)}")
    return RoleMask(tuple(role for role in ROLES if role in roles))


def exclude_roles(*roles: Role) -> RoleMask:
    """Return a mask that selects all leaves but those of these roles; see `select_roles`."""
    select_roles(*roles)
    return select_roles(*(role for role in ROLES if role not in roles))  # type: ignore[arg-type]


weights_only = RoleMask(("weight",))
"""The default mask of lbopt: True on weights, False on biases, normalization leaves and vectors.

It is the rule of the LAMB and LARS codes that exclude by role (ALBERT, TFA, MLPerf): what is not decayed is not adapted
either.

>>> import numpy as np
>>> weights_only({"kernel": np.zeros((2, 2)), "bias": np.zeros(2)})
{'bias': False, 'kernel': True}
"""


all_leaves = RoleMask(ROLES)
"""Every leaf. `all_leaves & exclude_paths("embed")` says that biases and norms are meant too."""


@dataclasses.dataclass(frozen=True, repr=False)
class PathMask(LeafMask):
    """A mask by regular expressions on paths; see `select_paths` and `exclude_paths`."""

    patterns: tuple[str, ...]
    chosen: bool

    def __call__(self, params: types.Params) -> types.PyTree:
        """Return a bool per leaf."""
        _require_names(self, params)
        names = tree.leaf_names(params)
        for pattern in self.patterns:
            if not any(re.search(pattern, name) for name in names):
                raise ValueError(
                    f"{self!r}: {pattern!r} matches none of the {len(names)} parameters ({tree.some(names)})"
                )
        hit = tree.map_with_name(
            lambda name, _: (
                any(re.search(pattern, name) for pattern in self.patterns) == self.chosen
            ),
            params,
        )
        if len(set(jax.tree.leaves(hit))) == 1:
            raise ValueError(
                f"{self!r} selects {'every' if jax.tree.leaves(hit)[0] else 'no'} parameter of {tree.some(names)}: "
                "pass None for every leaf, False for none, if that is meant"
            )
        return hit

    def __invert__(self) -> PathMask:
        """Return the mask of the leaves whose path does not match, or does."""
        return PathMask(self.patterns, not self.chosen)

    @property
    def only_excludes(self) -> bool:
        """Whether the patterns name leaves to leave out."""
        return not self.chosen

    def __repr__(self) -> str:
        name = "select_paths" if self.chosen else "exclude_paths"
        return f"{name}({', '.join(repr(pattern) for pattern in self.patterns)})"


def select_paths(*patterns: str) -> PathMask:
    r"""Return a mask that selects the leaves whose path matches one of the regular expressions.

    Args:
      *patterns: searched (`re.search`) in the full path, `encoder/layer_0/Dense_0/kernel`.

    Returns:
      A mask. Applied to parameters it raises ValueError if a pattern matches nothing, or if all leaves or none are
      selected: a renamed module must not silently change what is decayed or adapted.

    Raises:
      ValueError: if no pattern is given or one is not a regular expression.

    >>> import numpy as np
    >>> select_paths(r"^head/")({"head": {"kernel": np.zeros((2, 2))}, "body": {"kernel": np.zeros((2, 2))}})
    {'body': {'kernel': False}, 'head': {'kernel': True}}
    """
    return PathMask(tree.check_patterns(patterns), True)


def exclude_paths(*patterns: str) -> PathMask:
    """Return `~select_paths(*patterns)`: the leaves whose path matches none of the expressions.

    Alone it selects biases and normalization leaves too. Where lbopt's default leaves those out,
    write `weights_only & exclude_paths(...)`, or `all_leaves & exclude_paths(...)` if they are
    meant; `weight_decay_mask` and `trust_ratio_mask` warn of an exclusion alone.

    >>> import numpy as np
    >>> params = {"embed": {"kernel": np.zeros((2, 2))}, "head": {"kernel": np.zeros((2, 2)), "bias": np.zeros(2)}}
    >>> (weights_only & exclude_paths("embed"))(params)
    {'embed': {'kernel': False}, 'head': {'bias': False, 'kernel': True}}
    """
    return PathMask(tree.check_patterns(patterns), False)


def without(*patterns: str, default: types.Mask = weights_only) -> types.Mask:
    """Return a default mask minus the leaves whose path matches a pattern, as a config lists them.

    Args:
      *patterns: regular expressions, as in `select_paths`; none gives the default itself.
      default: `weights_only`, or the mask of a variant: a mask, a function, None or True (every
        leaf), False (no leaf).

    Raises:
      ValueError: for a pattern that is no regular expression, or a default that is a tree.

    >>> without(), without("embed", "^head/"), without("embed", default=None)
    (weights_only, weights_only & exclude_paths('embed', '^head/'), all_leaves & exclude_paths('embed'))
    """
    if not patterns or default is False:
        return default
    if default is None or default is True:
        default = all_leaves
    if not tree.is_function(default):
        raise ValueError(f"default = {tree.said(default)}: give a mask that is called, or None")
    return default & exclude_paths(*patterns)


def resolve_mask(
    mask: types.Mask,
    params: types.Params,
    argument: str,
    stacked: types.PyTree = None,
) -> types.PyTree:
    """Turn a mask in any accepted form into a pytree of bools shaped like `params`.

    Args:
      mask: None or True (every leaf), False (no leaf), a pytree with a bool per leaf or per subtree (see `tree.spread`), or a
        function `params -> pytree of bools`. Leaves that `optax.masked` took out (`optax.MaskedNode`) stay out.
      params: the parameters.
      argument: the name of the argument, for messages.
      stacked: from `stacks.resolve_stacked`: a callable mask is shown one layer of each stack, as shapes, so that a stack
        of biases is not taken for a matrix.

    Returns:
      A pytree of Python bools with the structure of `params`.

    Raises:
      ValueError: if a tree or callable selects no leaf at all (say False if that is meant), if its structure differs
        from `params`, or if a leaf of it is not a bool.
    """
    if isinstance(mask, str):
        raise ValueError(f"{argument} = {tree.said(mask)}: {_meant(mask)}")
    if isinstance(mask, (int, float)) and not isinstance(mask, bool):
        raise ValueError(
            f"{argument} = {tree.said(mask)}: give True, False, None, a pytree of bools, or a callable"
        )
    if isinstance(mask, types.Default):
        mask = mask.value
    if isinstance(mask, LeafMask) and tree.leaf_names(params) == [""]:
        raise ValueError(
            f"{argument} = {tree.said(mask)}: params are one array of shape {jnp.shape(params)} without a name: put it into a dict, "
            f'{{"kernel": array}}, or pass {argument}=None (touch it) or {argument}=False (leave it)'
        )
    if mask is None or isinstance(mask, bool):
        selected = jax.tree.map(lambda _: mask is not False, params)
    else:
        selected = mask
        if tree.is_function(mask):
            tree.check_takes(
                mask,
                1,
                argument,
                "the parameters and returns a pytree of bools (by path: lbopt.select_paths)",
            )
            selected = mask(stacks.one_layer(params, stacked))
        selected = tree.spread(selected, params, argument)
        tree.map_with_name(lambda name, chosen: _check_bool(name, chosen, argument), selected)
        if argument in _WEIGHTS_BY_DEFAULT and isinstance(mask, LeafMask) and mask.only_excludes:
            _warn_of_lost_default(mask, argument, selected, stacks.one_layer(params, stacked))
        names = tree.leaf_names(params)
        if names and not any(jax.tree.leaves(selected)):
            raise ValueError(
                f"{argument} selects none of the {len(names)} parameters ({tree.some(names)}): "
                f"pass {argument}=False if no leaf is meant, or {argument}=None for every leaf"
            )
    return selected


_WEIGHTS_BY_DEFAULT = ("weight_decay_mask", "trust_ratio_mask")
"""Arguments whose default leaves out biases, normalization leaves and vectors."""


def _warn_of_lost_default(
    mask: LeafMask, argument: str, selected: types.PyTree, params: types.Params
) -> None:
    """Warn if a mask that only excludes selects leaves that the default would leave out."""
    new = jax.tree.map(lambda chosen, usual: chosen and not usual, selected, weights_only(params))
    names = [name for name, is_new in tree.by_name(new).items() if is_new]
    if names:
        warnings.warn(
            f"{argument} = {mask!r} replaces the default and selects biases, norms or vectors "
            f"({tree.some(names)}): keep the default by weights_only & {mask!r}, or say that they "
            f"are meant by all_leaves & {mask!r}",
            stacklevel=3,
        )


def _meant(mask: str) -> str:
    if mask == "as_weight_decay":
        return "only lbopt.lamb and lbopt.lars know it; pass the mask of the decay again"
    return f"for a pattern say lbopt.select_paths({tree.said(mask)})"


def resolve_split(
    sharded_mask: types.Mask, axis_name: types.AxisName, params: types.Params
) -> Split:
    """Return which leaves are split over `axis_name`; none without one.

    Raises:
      ValueError: as `resolve_mask`, or if there is a `sharded_mask` but no `axis_name`.
    """
    if axis_name is None:
        if sharded_mask is not None:
            raise ValueError(
                "sharded_mask without axis_name: name the mapped axis over which those leaves are split"
            )
        return Split(jax.tree.map(lambda _: False, params), None)
    return Split(resolve_mask(sharded_mask, params, "sharded_mask"), axis_name)


class Split(NamedTuple):
    """Which leaves are split over a mapped axis.

    Attributes:
      leaves: a pytree of bools.
      axis_name: the axis.
    """

    leaves: types.PyTree
    axis_name: types.AxisName

    def axis_of(self, split: bool) -> types.AxisName:
        """Return the axis to sum over for a leaf that is split, or not."""
        return self.axis_name if split else None


def _check_bool(name: str, chosen: Any, argument: str) -> None:
    if not isinstance(chosen, (bool, np.bool_)):
        raise ValueError(f"{argument} at {name!r} is {tree.said(chosen)}: give True or False")


class Choices(list[tuple[str, types.PyTree]]):
    """Pairs (argument, its choice per leaf) that transforms made in `init`; equal to itself only."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


# JAX keys its caches by the value, and every recording has a `Choices` of its own. So `init` is traced
# anew inside a recording, with all that is jitted in it. Elsewhere the value is None, always the same.
_RECORDING = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def recorded_choices() -> Iterator[Choices]:
    """Collect, in this thread, what transforms choose while their `init` runs inside the block.

    `lbopt.summarize_masks` asks so. Outside such a block, and in every update, nothing is recorded.
    """
    choices = Choices()
    with _RECORDING(choices):
        yield choices


def record_choice(argument: str, choice: types.PyTree) -> None:
    """Add one choice to the recording around this `init`, if there is one."""
    choices = _RECORDING.value
    if choices is not None:
        choices.append((argument, choice))
