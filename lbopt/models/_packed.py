"""Trials under `jax.vmap` side by side in the channels, where what is alike for all channels is computed for all trials at once.

`jax.vmap` gives every operation an axis of trials of its own. A TPU's compiler then moves data between operations that
want trials and channels in one axis, such as grouped convolutions, and others that do not, and keeps apart what it could
compute in one go. With channels of all trials in the last axis, trials slowest, a function that treats channels alike
and apart is the same for one trial and for many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def batched_by(alone: Callable[..., Any], together: Callable[..., Any]) -> Callable[..., Any]:
    """Return `alone`, which `jax.vmap` turns into `together` instead of taking it operation by operation.

    Reverse mode differentiates `alone` for one trial and `together` under vmap, however often and in whatever order it
    is nested with vmap. The backward pass begins from the arguments: within one program the compiler finds that what
    it computes again is there already.

    Args:
      alone: a differentiable function of pytrees of floating-point arrays.
      together: the same for many trials; all arrays, given and returned, have a leading trial axis.

    Returns:
      A function of the same pytrees as `alone`.

    Note:
      JAX differentiates no function with a batching rule of its own. So the backward pass is another function with such
      a rule, made when it is asked for: that of a backward pass, for a second derivative, is the third of them.
    """
    batchable = jax.custom_batching.custom_vmap(lambda *given: alone(*given))

    @batchable.def_vmap
    def rule(size: int, batched: Any, *given: Any) -> tuple[Any, Any]:
        def with_trials(x: jax.Array, has_trials: bool) -> jax.Array:
            return x if has_trials else jnp.broadcast_to(x, (size, *x.shape))

        out = together(*jax.tree.map(with_trials, given, tuple(batched)))
        return out, jax.tree.map(lambda _: True, out)

    def forward(*given: Any) -> tuple[Any, Any]:
        return differentiable(*given), given

    def backward(given: Any, cotangents: Any) -> Any:
        return batched_by(_pullback(alone), _pullback(together))(given, cotangents)

    differentiable = jax.custom_vjp(lambda *given: batchable(*given))
    differentiable.defvjp(forward, backward)
    return differentiable


def _pullback(fn: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    return lambda given, cotangents: jax.vjp(fn, *given)[1](cotangents)


def pack(x: jax.Array) -> jax.Array:
    """Return [..., trials * channels] of [trials, ..., channels], trials slowest."""
    return jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1)


def unpack(x: jax.Array, trials: int) -> jax.Array:
    """Undo `pack`: return [trials, ..., channels] of [..., trials * channels]."""
    return jnp.moveaxis(x.reshape(*x.shape[:-1], trials, -1), -2, 0)
