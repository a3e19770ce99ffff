"""Checks of a transform's arguments other than plain numbers: schedules, dtypes, trees."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lbopt import tree, types
from lbopt._scalars import is_number
from lbopt.errors import UserError, brief


def rate_at(learning_rate: Any, count: Any) -> Any:
    """Return the learning rate of one update.

    Args:
      learning_rate: Number, or schedule: optimizer step -> rate.
      count: int32 scalar, number of updates so far.

    Raises:
      UserError: If a schedule gives anything but one real number.
    """
    if not callable(learning_rate):
        return learning_rate
    rate = learning_rate(count)
    dtype = getattr(rate, "dtype", jnp.float32 if is_number(rate) else None)
    real = dtype is not None and any(
        jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer)
    )
    if not real or jnp.shape(rate):
        fix = f"it gives {brief(rate)}; return one number"
        raise UserError("learning_rate", learning_rate, fix, code="type")
    return rate


def is_transformation(value: Any) -> bool:
    """Return whether a value has `init` and `update`, as Optax transformations do."""
    return all(callable(getattr(value, name, None)) for name in ("init", "update"))


def require_transformation(argument: str, value: Any) -> None:
    """Raise `UserError` unless a value is an Optax transformation."""
    if not is_transformation(value):
        raise UserError(argument, value, "give an Optax transformation", code="type")


def refuse_transformation(function: str, value: Any) -> None:
    """Raise `UserError` for an Optax transformation in the place of an option of a chain's link."""
    if is_transformation(value):
        fix = f"it stands beside the optimizer: optax.chain(optimizer, lbopt.{function}(...))"
        raise UserError(function, value, fix, code="type")


def require_float_dtype(argument: str, dtype: Any) -> None:
    """Raise `UserError` unless the value is None or a floating-point dtype of 16 bits or more."""
    if isinstance(dtype, (jax.Array, np.ndarray, np.generic)):
        fix = (
            "optax.inject_hyperparams called this dtype as a schedule; pass "
            f'static_args=("{argument}",), or give the name of the dtype, "bfloat16"'
        )
        raise UserError(argument, dtype, fix, code="type")
    try:
        is_float = dtype is None or (
            jnp.issubdtype(jnp.dtype(dtype), jnp.floating) and jnp.finfo(dtype).bits >= 16
        )
    except (TypeError, ValueError):
        is_float = False
    if not is_float:
        fix = "give a floating-point dtype of 16 bits or more (float32, bfloat16), or None for fp32"
        raise UserError(argument, dtype, fix)


def require_float_leaves(params: types.Params, **real: Any) -> None:
    """Raise `UserError` if a leaf is not a floating-point or complex array.

    Args:
      params: The parameters.
      **real: Options by name, each of which must be None if a leaf is complex.
    """
    tree.check_inexact(params, "params")
    given = [argument for argument, value in real.items() if value is not None]
    if not given:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            fix = (
                f"the parameter at {tree.path_name(path)!r} is {leaf.dtype}; pass None, or take it "
                "out with optax.masked"
            )
            raise UserError(given[0], real[given[0]], fix, code="conflict")


def require_arrays(params: types.Params, why: str) -> None:
    """Raise `UserError` if a leaf is a shape; `why` says what is made of its values."""
    tree.check_inexact(params, "params")
    for name, leaf in tree.by_name(params).items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            fix = (
                f"a shape, and {why}; call tx.init(params) with arrays, or "
                "jax.eval_shape(tx.init, shapes) for the shapes of the state"
            )
            raise UserError(f"params/{name}", reason=fix, code="type")


def require_real_leaves(params: types.Params, transform: str) -> None:
    """Raise `UserError` if a leaf is not a real floating-point array."""
    tree.check_inexact(params, "params")
    for name, leaf in tree.by_name(params).items():
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            fix = f"{leaf.dtype}, and {transform} takes real ones; take it out with optax.masked"
            raise UserError(f"params/{name}", reason=fix, code="type")


def warn_of_zeros(transform: str, name: str, norm: jax.Array) -> None:
    """Warn if a norm, one or one for each layer, is known to be 0 somewhere."""
    if not isinstance(norm, jax.core.Tracer) and not np.all(norm):
        warnings.warn(
            f"{transform}: {name!r}, or one of its layers, is zero and will stay zero; leave it "
            "out by the mask, or initialise it to other values.",
            stacklevel=2,
        )


def require_state(state: Any, kind: type) -> None:
    """Raise `UserError` unless a state is a `kind`: Orbax without a target restores dictionaries.

    Args:
      state: The state given to a transform's `update`.
      kind: Expected type of the state, a NamedTuple.
    """
    if not isinstance(state, kind):
        fix = (
            f"a {type(state).__name__}, not a {kind.__name__}; give what tx.init returned, or "
            "restore a checkpoint with jax.eval_shape(tx.init, params) as its target"
        )
        raise UserError("opt_state", reason=fix, code="type")


def require_params(params: Any, transform: str) -> None:
    """Raise `UserError` if `params` was not given to an update that needs it."""
    if params is None:
        fix = f"{transform} needs the parameters; call tx.update(grads, opt_state, params)"
        raise UserError("params", None, fix, code="missing")
