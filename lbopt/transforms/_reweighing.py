"""The moments of an optimizer whose decays change while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lbopt import tree
from lbopt.transforms import _moments, _per_path
from lbopt.transforms._compressed_state import CompressedState

MomentDecays = Mapping[str, tuple[float, float]]
"""Name of a decay -> its values before and after, of moments whose bias is corrected.

The names are those of options: "b1" and "b2"; "rest_b1" and "rest_b2" of the leaves that a matrix
optimizer leaves to Adam, "adam_b2" where it is Optax's; "graft_b2".
"""


class _MomentFields(NamedTuple):
    """How a state keeps moments.

    Attributes:
      decays: Field of moments -> names of their decay, of which the first that there is counts.
      updates: Field of the number of updates.
      late: Number of first updates that do not enter the moments.
    """

    decays: Mapping[str, tuple[str, ...]]
    updates: str = "count"
    late: int = 0


_B1 = ("rest_b1", "b1")
_B2 = ("rest_b2", "adam_b2", "b2")
_OF_ADAM = _MomentFields({"mu": _B1, "nu": _B2})

# By name, as Optax exports not all of the classes.
_FIELDS_OF: dict[str, _MomentFields] = {
    "LambMomentsState": _OF_ADAM,
    "ScaleByAdamState": _OF_ADAM,
    "ScaleByAdanState": _MomentFields({"m": _B1, "n": _B2}, "t"),
    "ScaleByAdemamixState": _MomentFields({"m1": _B1, "nu": _B2}),
    "ScaleByAmsgradState": _OF_ADAM,  # the maximum is one of corrected moments
    "ScaleByBeliefState": _OF_ADAM,
    "ScaleByRStdDevWithCountState": _MomentFields({"mu": _B2, "nu": _B2}),
    "ScaleByRmsWithCountState": _MomentFields({"nu": _B2}),
    "ScaleBySimplifiedAdEMAMixState": _MomentFields({"n": _B2}, "t"),
    "MomoAdamState": _MomentFields({"exp_avg": _B1, "exp_avg_sq": _B2, "barf": _B1, "gamma": _B1}),
    "SophiaState": _MomentFields({"mu": _B1}),
    # The states of matrices.
    "KronState": _MomentFields({"mu": ("b1",)}),
    "MuownState": _MomentFields({"mu": ("b1",), "nu": ("b2",)}),
    "ShampooState": _MomentFields({"mu": ("b1",), "nu": ("graft_b2",), "factors": ("b2",)}),
    # Its factors need none: a multiple of them has the same eigenvectors.
    "SoapState": _MomentFields({"mu": ("b1",), "nu": ("b2",)}, late=1),
}
_UNCORRECTED = (
    *("EmaState", "LarsMomentumState", "OuterState"),
    *("MultiStepsState", "MuonState", "ScheduleFreeState"),
    *("ScaleByLionState", "ScaleByNovogradState"),
)
"""States with a count and arrays that have no decay named b1 or b2, or no bias correction."""


def reweigh_moments(opt_state: Any, decays: MomentDecays | None) -> Any:
    """Return an optimizer's state whose moments suit the bias correction under other decays.

    A moment m of decay b has the weight 1 - b^count, by which it is divided. Under another decay b'
    it becomes m (1 - b'^count) / (1 - b^count), so that the quotient stays.

    Args:
      opt_state: State of an optimizer; traceable.
      decays: The decays of its moments; None if they stay.
    """
    if decays is None:
        return opt_state

    def is_known(node: Any) -> bool:
        return isinstance(node, CompressedState) or _fields_of(node) is not None

    def of_node(node: Any) -> Any:
        if isinstance(node, CompressedState):
            return _reweighed_codes(node, decays)
        fields = _fields_of(node)
        return node if fields is None else _reweighed(node, fields, decays)

    return jax.tree.map(of_node, opt_state, is_leaf=is_known)


def _fields_of(node: Any) -> _MomentFields | None:
    """Return how a node of a state keeps moments; None if it is no state with moments."""
    known = _FIELDS_OF.get(type(node).__name__)
    own = {*getattr(node, "_fields", ())}
    return known if known is not None and {*known.decays, known.updates} <= own else None


def _reweighed(node: Any, fields: _MomentFields, decays: MomentDecays) -> Any:
    count = jnp.maximum(getattr(node, fields.updates) - fields.late, 0)
    changed = {}
    for field, names in fields.decays.items():
        before, after = next((decays[name] for name in names if name in decays), (0.0, 0.0))
        if before == after:
            continue
        weights = [_moments.one_minus_power(b, count, jnp.float32) for b in (before, after)]
        factor = jnp.where(count > 0, weights[1] / weights[0], 1.0)
        moment = getattr(node, field)
        changed[field] = jax.tree.map(lambda x, by=factor: _times(x, by), moment)
    return node._replace(**changed)


def _times(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Return x times a factor for each entry of its leading axes, in the dtype of x."""
    spread = factor.reshape(factor.shape + (1,) * (x.ndim - factor.ndim))
    wide = tree.wide_dtype(x.dtype)
    return (x.astype(wide) * spread.astype(wide)).astype(x.dtype)


def _reweighed_codes(state: CompressedState, decays: MomentDecays) -> CompressedState:
    """Return the state with other moments: of codes, the largest magnitudes are multiplied."""
    names = _per_path.keys(state.inner)
    leaves = jax.tree.leaves(state.inner)
    structure: Any = jax.tree.structure(state.inner)
    factors = [state.largest.get(name, leaf) for name, leaf in zip(names, leaves, strict=True)]
    new = jax.tree.leaves(reweigh_moments(structure.unflatten(factors), decays))

    largest = {name: x for name, x in zip(names, new, strict=True) if name in state.largest}
    inner = [
        leaf if name in largest else x for name, leaf, x in zip(names, leaves, new, strict=True)
    ]
    return state._replace(inner=structure.unflatten(inner), largest=largest)


def unknown_moments(opt_state: Any) -> str | None:
    """Return the class of a state with a count and unknown moments; None if all are known.

    Whether the bias of these moments is corrected, and with which decay, cannot be told.

    Args:
      opt_state: State of an optimizer, or its shapes.

    >>> import optax
    >>> state = optax.adamw(0.1).init(jnp.ones(2))
    >>> unknown_moments(state), unknown_moments(tuple(state[0]))
    (None, 'tuple')
    """
    name = type(opt_state).__name__
    if hasattr(opt_state, "dtype") or _fields_of(opt_state) is not None:
        return None
    children = jax.tree.leaves(opt_state, is_leaf=lambda node: node is not opt_state)
    is_counted = any(map(_is_count, children)) and name not in _UNCORRECTED
    if is_counted and any(map(_is_moment, children)):
        return name
    return next(filter(None, map(unknown_moments, children)), None)


def _is_count(node: Any) -> bool:
    return hasattr(node, "dtype") and node.ndim == 0 and jnp.issubdtype(node.dtype, jnp.integer)


def _is_moment(node: Any) -> bool:
    """Return whether a node has arrays of numbers, and no count of its own."""
    leaves = jax.tree.leaves(node)
    return any(leaf.ndim > 0 for leaf in leaves) and not any(map(_is_count, leaves))
