"""MuLoCo with one worker: a Nesterov step over the way that an inner optimizer has gone."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from lbopt import _scalars, masks, tree, types
from lbopt.transforms import _arguments, _matrix_view, _muon, _per_path, _precision


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


def muloco(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float | jax.Array = types.default(0.95),
    weight_decay: float | jax.Array = types.default(0.0),
    variant: Literal["keller", "moonlight", "polar", "optax"] = "keller",
    *,
    outer_learning_rate: float | jax.Array = 0.5,
    outer_momentum: float | jax.Array = 0.5,
    sync_steps: int | types.Default = types.default(30),
    products_dtype: DTypeLike | None = types.default("bfloat16"),
    weight_decay_mask: types.Mask = types.default(masks.weights_only),
    rest_learning_rate_ratio: float | jax.Array = types.default(0.015),
    dimension_numbers: _matrix_view.DimensionNumbers = None,
    stacked: types.Stacked = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Build MuLoCo with one worker (K = 1): a Nesterov step over every `sync_steps` of Muon.

    It is `nesterov_outer(muon(...), 0.5, 0.5, 30)`, which takes other inner optimizers and all
    options of `lbopt.muon`.

    Args:
      learning_rate: Number or schedule, the rate of Muon.
      momentum: Momentum of Muon, in [0, 1).
      weight_decay: Decoupled weight decay of Muon >= 0.
      variant: Public Muon code whose options are the defaults (see `lbopt.muon`).
      outer_learning_rate: Learning rate of the outer steps.
      outer_momentum: Momentum of the outer steps, in [0, 1).
      sync_steps: Number of inner updates for each outer step.
      products_dtype: Dtype of the products of the orthogonalization; None for fp32.
      weight_decay_mask: The leaves that are decayed (see `lbopt.types.Mask`).
      rest_learning_rate_ratio: Learning rate of the leaves that are no matrices, as a multiple of
        `learning_rate`.
      dimension_numbers: The axes of each matrix (see `scale_by_newton_schulz`).
      stacked: Leaves that are stacks of layers, each layer a matrix.

    Returns:
      A transform whose state is `OuterState` and whose `update` needs `params`.

    Raises:
      UserError: For an argument that is out of range.

    >>> import jax.numpy as jnp
    >>> params = {"dense": {"kernel": jnp.eye(4), "bias": jnp.zeros(4)}}
    >>> tx = muloco(0.02, sync_steps=10)
    >>> _, state = tx.update(params, tx.init(params), params)
    >>> int(state.count)
    1

    References:
      Therien et al., MuLoCo, arXiv:2505.23725v2, Algorithm 1. The defaults are those of
      KellerJordan/modded-nanogpt@370106ff:records/track_3_optimization/results/
      20260504_muloco_normuonh.
    """
    inner = _muon.muon(
        learning_rate,
        momentum,
        weight_decay,
        variant,
        products_dtype=products_dtype,
        weight_decay_mask=weight_decay_mask,
        rest_learning_rate_ratio=rest_learning_rate_ratio,
        dimension_numbers=dimension_numbers,
        stacked=stacked,
    )
    steps = sync_steps.value if isinstance(sync_steps, types.Default) else sync_steps
    return nesterov_outer(inner, outer_learning_rate, outer_momentum, steps)


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
