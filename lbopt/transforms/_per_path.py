"""States in other people's containers: numbers of each leaf kept by path, and states found again without their types."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from lbopt import tree, types

UNKNOWN_PARAMS: Any = 0
"""Stands for the dictionary where `optax.tree_utils.tree_map_params` asks which parts of a state are like the parameters."""


def is_placeholder(params: Any) -> bool:
    """Return whether `params` is what `optax.tree_utils.tree_map_params` initialises with: it has no leaves to name."""
    return type(params).__name__ == "_ParamsPlaceholder"  # Optax has no public name for it


def collect(params: types.Params, values: types.PyTree) -> dict[str, jax.Array]:
    """Return {path: value} of the leaves that have a value.

    Args:
      params: the parameters.
      values: a small array for each of their leaves, or None. On a mesh with explicit axes it is replicated: its type must
        be that of the initial state, whose layers nobody has split.
    """
    structure: Any = jax.tree.structure(params)
    kept: dict[str, jax.Array] = {}
    for name, value in zip(tree.leaf_names(params), structure.flatten_up_to(values), strict=True):
        if value is not None:
            kept[name if name not in kept else f"{name}#{len(kept)}"] = _replicated(value)
    return kept


def _replicated(value: jax.Array) -> jax.Array:
    spec = getattr(jax.typeof(value).sharding, "spec", ())
    return (
        value if not any(spec) else jax.sharding.reshard(value, PartitionSpec(*[None] * value.ndim))
    )


def find_states(opt_state: Any, kinds: Collection[type]) -> Iterator[Any]:
    """Yield the states of these NamedTuple types in an optimizer's state, outermost first; what is inside them is not searched.

    A dictionary with the fields of one of them is that state: `nnx.state` and Orbax without a target keep fields and drop types.
    """

    def found(node: Any) -> Any:
        if type(node) in kinds:
            return node
        if not isinstance(node, Mapping):
            return None
        return next((made for kind in kinds if (made := _typed(kind, node)) is not None), None)

    for node in jax.tree.leaves(opt_state, is_leaf=lambda node: found(node) is not None):
        state = found(node)
        if state is not None:
            yield state


def _typed(kind: Any, fields: Mapping[Any, Any]) -> Any:
    optional = {
        **kind._field_defaults,
        "inner": (),
        "skip_state": (),
    }  # what is empty has no entry there
    needed = set(kind._fields) - set(optional)
    present = {name for name in fields if fields[name] is not None}
    if not needed <= present <= set(kind._fields):
        return None
    return kind(
        **{name: fields[name] if name in present else optional[name] for name in kind._fields}
    )


def plain_arrays(state: Any) -> Any:
    """Return a state whose arrays are no variables of Flax NNX: their values of this moment."""
    is_variable = lambda node: hasattr(node, "get_value") and hasattr(node, "get_metadata")  # noqa: E731
    return jax.tree.map(
        lambda node: jax.tree.leaves(node)[0] if is_variable(node) else node,
        state,
        is_leaf=is_variable,
    )
