"""Checks of transform arguments, made when the transform is built and only on plain numbers.

Under `optax.inject_hyperparams`, and in a sweep that shares one compiled program, the same arguments are traced arrays
whose values nobody can look at yet.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lbopt import _scalars, tree, types
from lbopt._scalars import is_number
from lbopt.errors import UserError


def require_scalar(argument: str, value: Any) -> None:
    """Raise ValueError unless the value is a number or a (traced) real scalar array of fp32 or wider."""
    dtype = getattr(value, "dtype", None)
    narrow = (
        dtype is not None and jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    )
    if narrow or (
        dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating)
    ):  # of the parameters, if injected
        raise ValueError(
            f"{argument} has dtype {dtype}{', in which 0.999 is 1' if narrow else ''}: give a Python number or fp32; "
            "with optax.inject_hyperparams pass hyperparam_dtype=jnp.float32"
        )
    if not is_number(value) and not (
        dtype is not None
        and getattr(value, "ndim", 0) == 0
        and (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer))
    ):
        raise UserError(argument, value, "give a number")


def rate_at(learning_rate: Any, count: Any) -> Any:
    """Return the learning rate of an update; raise ValueError if a schedule gives anything but one real number."""
    if not callable(learning_rate):
        return learning_rate
    rate = learning_rate(count)
    dtype = getattr(rate, "dtype", jnp.float32 if is_number(rate) else None)
    real = dtype is not None and any(
        jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer)
    )
    if not real or jnp.shape(rate):
        fix = f"it gives {tree.said(rate)}; return one number"
        raise UserError("learning_rate", learning_rate, fix)
    return rate


def require_flag(argument: str, value: Any) -> bool:
    """Return a bool, or raise ValueError for anything else: what a flag says must be known when the transform is built."""
    if not isinstance(value, (bool, np.bool_)):
        raise UserError(argument, value, "give True or False")
    return bool(value)


def require_at_least(argument: str, value: Any, low: float) -> None:
    """Raise ValueError unless a plain number is finite and at least `low`."""
    require_scalar(argument, value)
    value = _scalars.known(value)
    if is_number(value) and not (abs(value) <= _scalars.LARGEST and value >= low):
        raise UserError(argument, value, f"give a finite number >= {low:g}")


def require_whole(argument: str, value: Any, low: int) -> None:
    """Raise ValueError unless the value is a whole number, known now, of at least `low`."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < low:
        raise UserError(argument, value, f"give a whole number >= {low}")


def require_above(argument: str, value: Any, low: float) -> None:
    """Raise ValueError unless a plain number is finite and above `low`."""
    require_scalar(argument, value)
    value = _scalars.known(value)
    if is_number(value) and not (abs(value) <= _scalars.LARGEST and value > low):
        raise UserError(argument, value, f"give a finite number > {low:g}")


def require_decay_rate(argument: str, value: Any) -> None:
    """Raise ValueError unless a plain number lies in [0, 1)."""
    require_scalar(argument, value)
    value = _scalars.known(value)
    if is_number(value) and not 0 <= value < 1:
        raise UserError(argument, value, "give a number in [0, 1)")


def require_bounds(
    argument: str, bounds: tuple[float, float] | None, low: float | None = 0.0
) -> None:
    """Raise ValueError unless bounds are None or a pair, the first at least `low` and not above the second."""
    if bounds is None:
        return
    if isinstance(bounds, (tuple, list)):
        bounds = tuple(_scalars.known(bound) for bound in bounds)
    least = "" if low is None else f"{low:g} <= "
    if (
        not isinstance(bounds, (tuple, list))
        or len(bounds) != 2
        or not all(is_number(bound) for bound in bounds)
        or not bounds[0] <= bounds[1]
        or (low is not None and not low <= bounds[0])
    ):
        fix = f"give (low, high) with {least}low <= high, or None for no bounds"
        raise UserError(argument, bounds, fix)


def require_choice(argument: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise ValueError unless the value is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        fix = f"use one of {', '.join(str(choice) for choice in choices)}"
        raise UserError(argument, value, fix, code="choice")


def require_transformation(argument: str, value: Any) -> None:
    """Raise ValueError unless it is what Optax chains: a pair of `init` and `update`."""
    if not all(callable(getattr(value, name, None)) for name in ("init", "update")):
        raise UserError(argument, value, "give an Optax transformation")


def require_float_dtype(argument: str, dtype: Any) -> None:
    """Raise ValueError unless the value is None or names a floating-point dtype of at least 16 bits."""
    if isinstance(dtype, (jax.Array, np.ndarray, np.generic)):
        raise ValueError(
            f"{argument} is an array and not a dtype: optax.inject_hyperparams calls a dtype as a schedule; "
            f'pass static_args=("{argument}",), or give its name, "bfloat16"'
        )
    try:
        known = dtype is None or (
            jnp.issubdtype(jnp.dtype(dtype), jnp.floating) and jnp.finfo(dtype).bits >= 16
        )
    except (TypeError, ValueError):
        known = False
    if not known:
        fix = "give a floating-point dtype of 16 bits or more (float32, bfloat16), or None for fp32"
        raise UserError(argument, dtype, fix)


def require_float_leaves(params: types.Params, transform: str, **real: Any) -> None:
    """Raise ValueError if a leaf is not a floating-point or complex array.

    Args:
      params: the parameters.
      transform: its name, for the message.
      real: argument -> value, of which a complex leaf allows none but None.
    """

    tree.check_inexact(params, f"{transform}: the parameter")
    given = [argument for argument, value in real.items() if value is not None]

    def check(name: str, leaf: Any) -> None:
        if given and jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            fix = (
                f"the parameter at {name!r} is {leaf.dtype}; pass None, or take it out with "
                "optax.masked"
            )
            raise UserError(given[0], real[given[0]], fix)

    tree.map_with_name(check, params)


def require_state(state: Any, kind: type, transform: str) -> None:
    """Raise ValueError unless a state has its own type: Orbax without a target restores dictionaries."""
    if not isinstance(state, kind):
        raise ValueError(
            f"{transform}: its state is a {type(state).__name__}, not {kind.__name__}: give what tx.init returned, or restore "
            "a checkpoint with jax.eval_shape(tx.init, params) as its target"
        )


def require_params(params: Any, transform: str) -> None:
    """Raise ValueError if `params` was not given to an update that needs it."""
    if params is None:
        raise ValueError(
            f"{transform} needs the parameters: call tx.update(grads, opt_state, params)"
        )
