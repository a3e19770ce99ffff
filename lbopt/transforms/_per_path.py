"""States in any container: numbers of each leaf kept by path, and states found without types."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from lbopt import tree, types
from lbopt.errors import UserError

UNKNOWN_PARAMS: Any = 0
"""The state's dictionary when `init` gets a placeholder; see `is_placeholder`."""


def is_placeholder(params: Any) -> bool:
    """Return whether `params` is a placeholder, without leaves that have names.

    `optax.tree_utils.tree_map_params` calls `init` with one to learn which parts of a state are
    shaped like the parameters. Optax has no public name for its class.
    """
    return type(params).__name__ == "_ParamsPlaceholder"


def collect(params: types.Params, values: types.PyTree) -> dict[str, jax.Array]:
    """Return {path: value} of the leaves that have a value.

    Args:
      params: The parameters.
      values: A small array, or None, for each leaf. On a mesh with explicit axes arrays are
        replicated, so that their types are those of the initial state.
    """
    structure: Any = jax.tree.structure(params)
    named = zip(keys(params), structure.flatten_up_to(values), strict=True)
    return {name: replicated(value) for name, value in named if value is not None}


def keys(params: types.Params) -> list[str]:
    """Return a name for each leaf, in leaf order; a name that occurs again gets a number."""
    found: dict[str, None] = {}
    for name in tree.leaf_names(params):
        found[name if name not in found else f"{name}#{len(found)}"] = None
    return list(found)


def spread(params: types.Params, kept: Mapping[str, jax.Array], has_value: types.PyTree) -> Any:
    """Return what `collect` kept as a pytree like the parameters, with None for other leaves.

    Args:
      params: The parameters.
      kept: {path: value}, from `collect`.
      has_value: A bool for each leaf, whether it has a value.

    Raises:
      UserError: If a leaf has no value: the state is that of other parameters.
    """
    structure: Any = jax.tree.structure(params)
    values = []
    for name, has in zip(keys(params), jax.tree.leaves(has_value), strict=True):
        if has and name not in kept:
            fix = f"it has nothing for {name!r}; give the state of these parameters and masks"
            raise UserError("opt_state", reason=fix, code="type")
        values.append(kept[name] if has else None)
    return structure.unflatten(values)


def typed_spec(value: jax.Array) -> tuple[Any, ...]:
    """Return the axes of a mesh with explicit axes that split each dimension; () for none."""
    return tuple(getattr(jax.typeof(value).sharding, "spec", ()))


def replicated(value: jax.Array) -> jax.Array:
    """Return an array, replicated if it lies on a mesh with explicit axes."""
    if not any(typed_spec(value)):
        return value
    return jax.sharding.reshard(value, PartitionSpec(*[None] * value.ndim))


def find_states(opt_state: Any, kinds: Collection[type]) -> Iterator[Any]:
    """Yield the states of these types in an optimizer's state, without searching inside them.

    A dictionary with the fields of one of them is that state: `nnx.state`, and Orbax without a
    target, keep fields and drop types.

    Args:
      opt_state: Any optimizer state.
      kinds: NamedTuple classes.

    >>> import jax.numpy as jnp, lbopt, optax
    >>> from lbopt.transforms import LearningRateState
    >>> tx = optax.chain(optax.clip(1.0), lbopt.lars(0.1))
    >>> [state] = find_states(tx.init({"kernel": jnp.ones((2, 2))}), [LearningRateState])
    >>> int(state.schedule_count)
    0
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
    """Return the state of this type with these fields; None if they are not its fields."""
    # Empty fields have no entry in the dictionary.
    optional = {**kind._field_defaults, "inner": (), "skip_state": ()}
    needed = set(kind._fields) - set(optional)
    present = {name for name in fields if fields[name] is not None}
    if not needed <= present <= set(kind._fields):
        return None
    return kind(*(fields[name] if name in present else optional[name] for name in kind._fields))


def plain_arrays(state: Any) -> Any:
    """Return a state with the present values of variables of Flax NNX in place of these."""

    def is_variable(node: Any) -> bool:
        return hasattr(node, "get_value") and hasattr(node, "get_metadata")

    def value(node: Any) -> Any:
        return jax.tree.leaves(node)[0] if is_variable(node) else node

    return jax.tree.map(value, state, is_leaf=is_variable)
