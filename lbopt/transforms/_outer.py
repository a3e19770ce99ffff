"""MuLoCo with one worker: a Nesterov step over the way that an inner optimizer has gone."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lbopt import _scalars, tree, types
from lbopt.transforms import _arguments, _per_path, _precision


class OuterState(NamedTuple):
    """The last outer step.

    Attributes:
      count: int32 scalar, number of inner updates since the last outer step.
      start: Parameters after the last outer step, fp32 or wider.
      velocity: Velocity of the outer steps, a pytree shaped like the parameters.
      inner: State of the inner optimizer.
    """

    count: jax.Array  # type: ignore[assignment]
    start: types.PyTree
    velocity: types.PyTree
    inner: Any


def nesterov_outer(
    inner: optax.GradientTransformation,
    outer_learning_rate: float | jax.Array = 0.5,
    outer_momentum: float | jax.Array = 0.5,
    sync_steps: int = 30,
) -> optax.GradientTransformation:
    r"""Take a Nesterov step along the way of an inner optimizer once in `sync_steps` updates.

        d = w_0 - w ;   u = b u + a d ;   w <- w_0 - b u - a d ;   w_0 <- w

    w_0 are the parameters after the last outer step, a and b the outer learning rate and momentum.
    With `lbopt.muon` inside it is MuLoCo with one worker (K = 1), and SNOO or a lookahead with
    momentum for other optimizers. Between outer steps the updates are those of `inner`.

    Args:
      inner: A finished optimizer.
      outer_learning_rate: Outer learning rate a >= 0; 1 with momentum 0 changes nothing.
      outer_momentum: Decay rate b of the outer velocity, in [0, 1).
      sync_steps: Number of inner updates for each outer step.

    Returns:
      A transform whose state is `OuterState`, whose `update` needs `params`, and whose `init` needs
      parameters that are arrays.

    Raises:
      UserError: For an argument that is out of range.

    >>> import jax.numpy as jnp
    >>> tx = nesterov_outer(optax.sgd(1.0), 0.5, 0.0, sync_steps=2)
    >>> params = {"w": jnp.zeros(1)}
    >>> state = tx.init(params)
    >>> for _ in range(2):
    ...     updates, state = tx.update({"w": jnp.ones(1)}, state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> float(params["w"][0])
    -1.0

    References:
      Therien et al., MuLoCo: Muon is a practical inner optimizer for DiLoCo, arXiv:2505.23725v2,
      Algorithm 1; KellerJordan/modded-nanogpt@370106ff:records/track_3_optimization/results/
      20260504_muloco_normuonh.
    """
    _arguments.require_transformation("inner", inner)
    _scalars.require_at_least("outer_learning_rate", outer_learning_rate, 0)
    _scalars.require_decay_rate("outer_momentum", outer_momentum)
    sync_steps = _scalars.whole("sync_steps", sync_steps)
    through = optax.with_extra_args_support(inner)

    def init_fn(params: types.Params) -> OuterState:
        count = jnp.zeros((), jnp.int32)
        if _per_path.is_placeholder(params):
            return OuterState(count, params, params, inner.init(params))
        _arguments.require_arrays(params, "the outer step starts at the parameters")
        start = jax.tree.map(lambda p: jnp.array(p, tree.wide_dtype(p.dtype), copy=True), params)
        return OuterState(count, start, jax.tree.map(jnp.zeros_like, start), inner.init(params))

    def update_fn(
        updates: optax.Updates,
        state: OuterState,
        params: types.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, OuterState]:
        _arguments.require_params(params, "nesterov_outer")
        _arguments.require_state(state, OuterState)
        tree.check_updates(updates, state.start)
        updates, inner_state = through.update(updates, state.inner, params, **extra_args)
        count = state.count + 1
        is_due = count >= sync_steps

        def outer(u: jax.Array, p: jax.Array, start: jax.Array, velocity: jax.Array):
            wide = start.dtype
            way = tree.scaled(start - _precision.applied(p, u).astype(wide), outer_learning_rate)
            new = tree.scaled(velocity, outer_momentum) + way
            end = start - tree.scaled(new, outer_momentum) - way
            step = (end - p.astype(wide)).astype(u.dtype)
            return (
                jnp.where(is_due, step, u),
                jnp.where(is_due, end, start),
                jnp.where(is_due, new, velocity),
            )

        triples = jax.tree.map(outer, updates, params, state.start, state.velocity)
        structure: Any = jax.tree.structure(updates)
        steps, starts, velocities = (
            structure.unflatten(part)
            for part in zip(*structure.flatten_up_to(triples), strict=True)
        )
        return steps, OuterState(jnp.where(is_due, 0, count), starts, velocities, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
