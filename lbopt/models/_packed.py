"""Packing of vmapped trials into the channel axis.

`jax.vmap` gives every operation a separate axis of trials. A TPU's compiler then moves data between
operations that need trials and channels in one axis, such as grouped convolutions, and the others,
and misses fusions. With the channels of all trials in the last axis, trials slowest, a function
that treats every channel separately and in the same way needs no change to run many trials.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def batched_by(alone: Callable[..., Any], together: Callable[..., Any]) -> Callable[..., Any]:
    """Return `alone` with `together` as its batching rule under `jax.vmap`.

    Reverse mode differentiates `alone` for one trial and `together` under vmap, to any order and in
    any nesting with vmap. The backward pass keeps only the arguments and recomputes the forward
    pass, which the compiler merges with the original within one program.

    Args:
      alone: Differentiable function of pytrees of floating-point arrays.
      together: The same function for many trials; all arguments and results have a leading trial
        axis.

    Returns:
      A function of the same pytrees as `alone`.

    Note:
      JAX cannot differentiate a function with a custom batching rule. The backward pass is
      therefore a second such function, created on demand, and its own backward pass, for a second
      derivative, a third.
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
    """Reshape [trials, ..., channels] to [..., trials * channels], trials slowest."""
    return jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1)


def unpack(x: jax.Array, trials: int) -> jax.Array:
    """Undo `pack`: reshape [..., trials * channels] to [trials, ..., channels]."""
    return jnp.moveaxis(x.reshape(*x.shape[:-1], trials, -1), -2, 0)
