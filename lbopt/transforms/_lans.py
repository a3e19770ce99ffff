"""LANS: LAMB (layerwise adaptive moments for batch training) with normalized gradients.

Its Nesterov step has two parts with a trust ratio each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from lbopt import masks, tree, types
from lbopt.transforms import (
    _arguments,
    _learning_rate,
    _moments,
    _normalization,
    _precision,
    _trust_ratio,
)


class LansState(NamedTuple):
    """Adam's moments of the normalized gradients, and the ratios of the two parts of the step.

    Attributes:
      moments: Moments of the gradients.
      of_momentum: Ratios of the part that follows the first moment.
      of_gradient: Ratios of the part that follows the gradient itself.
    """

    moments: _moments.LambMomentsState
    of_momentum: _trust_ratio.TrustRatioState
    of_gradient: _trust_ratio.TrustRatioState


def scale_by_lans(
    b1: float | jax.Array = 0.9,
    b2: float | jax.Array = 0.999,
    eps: float | jax.Array = 1e-6,
    weight_decay: float | jax.Array = 0.0,
    weight_decay_mask: types.Mask = types.default(masks.weights_only),
    trust_ratio_mask: types.Mask = types.default(masks.weights_only),
    trust_ratio_bounds: tuple[float, float] | None = None,
    weight_norm_bounds: tuple[float, float] | None = None,
    *,
    stacked: types.Stacked = None,
    axis_name: types.AxisName = None,
    sharded_mask: types.Mask = None,
    mu_dtype: DTypeLike | None = None,
    nu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    r"""Replace each (normalized) gradient g by the LANS direction.

        r = mh / (sqrt(vh) + eps) ;   c = g / (sqrt(vh) + eps)
        out = b1 * ratio(r + wd w) * (r + wd w) + (1 - b1) * ratio(c + wd w) * (c + wd w)

    Here mh and vh are Adam's moments with bias correction, and ratio(u) = phi(||w||) / ||u||.

    Args:
      b1: Decay rate of the first moment, and weight of its part of the step, in [0, 1).
      b2: Decay rate of the second moment, in [0, 1).
      eps: Constant >= 0 added to the root of the second moment.
      weight_decay: Coefficient wd >= 0 in both parts; may be a traced scalar.
      weight_decay_mask: The leaves that are decayed (see `lbopt.types.Mask`).
      trust_ratio_mask: The leaves that are adapted.
      trust_ratio_bounds: (low, high) for both ratios, or None.
      weight_norm_bounds: phi, (low, high) for ||w||; None for the identity.
      stacked: Leaves that are stacks of layers, each layer with ratios of its own (see
        `scale_by_layerwise_trust_ratio`).
      axis_name: Inside `shard_map`, the axis over which leaves are split; norms are summed over it.
      sharded_mask: Mask of the leaves that are split over `axis_name`; None for all.
      mu_dtype: Dtype in which the first moment is kept; None for fp32.
      nu_dtype: Dtype in which the second moment is kept; None for fp32.

    Returns:
      A transform whose state is `LansState` and whose `update` needs `params`.

    Raises:
      UserError: For an argument that is out of range.

    >>> import jax, jax.numpy as jnp, optax
    >>> tx = optax.chain(scale_by_lans(weight_decay=0.01), optax.scale(-0.1))
    >>> params = {"kernel": jnp.full((2, 2), 2.0)}
    >>> updates, _ = jax.jit(tx.update)({"kernel": jnp.ones((2, 2))}, tx.init(params), params)
    >>> print(updates["kernel"][0])  # a step of 0.1 times the norm of the weights
    [-0.2 -0.2]
    """
    _moments.check_moments(b1, b2, eps, 0.0, mu_dtype, nu_dtype)
    ratio = _trust_ratio.scale_by_layerwise_trust_ratio(
        trust_ratio_mask,
        trust_ratio_bounds=trust_ratio_bounds,
        weight_norm_bounds=weight_norm_bounds,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
        stacked=stacked,
        axis_name=axis_name,
        sharded_mask=sharded_mask,
        _near_one=True,
    )

    def init_fn(params: types.Params) -> LansState:
        start = _moments.init_moments(params, mu_dtype, nu_dtype)
        return LansState(start, ratio.init(params), ratio.init(params))

    def update_fn(
        updates: optax.Updates, state: LansState, params: types.Params | None = None
    ) -> tuple[optax.Updates, LansState]:
        _arguments.require_params(params, "scale_by_lans")
        tree.check_updates(updates, params)
        _arguments.require_state(state, LansState)
        tree.check_updates(updates, state.moments.mu)

        count = optax.safe_increment(state.moments.count)
        mu, nu = _moments.next_moments(updates, state.moments, b1, b2, count)

        def directions(g: jax.Array, m: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
            m, v = _moments.debiased(m, v, b1, b2, count, True)
            below = jnp.sqrt(v) + eps
            r = _moments.divided(m, below)
            c = _moments.divided(g.astype(m.dtype), below)
            return r.astype(g.dtype), c.astype(g.dtype)

        pairs = jax.tree.map(directions, updates, mu, nu)
        momentum_part, gradient_part = tree.unzip_pairs(updates, pairs)
        # Each part is scaled by a ratio of its own norm, so one ratio for their sum would not do.
        momentum_part, of_momentum = ratio.update(momentum_part, state.of_momentum, params)
        gradient_part, of_gradient = ratio.update(gradient_part, state.of_gradient, params)

        def mixed(r: jax.Array, c: jax.Array) -> jax.Array:
            return (tree.scaled(r, b1) + tree.scaled(c, 1 - b1)).astype(r.dtype)

        out = jax.tree.map(mixed, momentum_part, gradient_part)
        return out, LansState(_moments.LambMomentsState(count, mu, nu), of_momentum, of_gradient)

    return optax.GradientTransformation(init_fn, update_fn)


def lans(
    learning_rate: optax.ScalarOrSchedule,
    b1: float | jax.Array = 0.9,
    b2: float | jax.Array = 0.999,
    eps: float | jax.Array = 1e-6,
    weight_decay: float | jax.Array = 0.0,
    weight_decay_mask: types.Mask = types.default(masks.weights_only),
    trust_ratio_mask: types.Mask = types.default(masks.weights_only),
    trust_ratio_bounds: tuple[float, float] | None = None,
    weight_norm_bounds: tuple[float, float] | None = None,
    *,
    stacked: types.Stacked = None,
    axis_name: types.AxisName = None,
    sharded_mask: types.Mask = None,
    mu_dtype: DTypeLike | None = None,
    nu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    r"""Build LANS: `normalize_gradients` per layer, `scale_by_lans`, `scale_by_learning_rate`.

        g <- g / ||g||   per layer
        w <- w - lr * (     b1  * phi(||w||) / ||r + wd w|| * (r + wd w)
                      + (1 - b1) * phi(||w||) / ||c + wd w|| * (c + wd w))

    The directions r and c are those of `scale_by_lans`, which takes the other options; their
    defaults are the same.

    Args:
      learning_rate: Number or schedule.
      b1: Decay rate of the first moment, and weight of its part of the step, in [0, 1).
      b2: Decay rate of the second moment, in [0, 1).
      eps: Constant >= 0 added to the root of the second moment.
      weight_decay: Coefficient wd >= 0, inside both directions and their norms.
      weight_decay_mask: The leaves that are decayed (see `lbopt.types.Mask`).
      trust_ratio_mask: The leaves that are adapted.
      trust_ratio_bounds: (low, high) for both ratios, or None.
      weight_norm_bounds: phi, (low, high) for ||w||; None for the identity.
      stacked: Leaves that are stacks of layers (see `scale_by_layerwise_trust_ratio`).
      axis_name: Inside `shard_map`, the axis over which leaves are split; norms are summed over it.
      sharded_mask: Mask of the leaves that are split over `axis_name`; None for all.
      mu_dtype: Dtype in which the first moment is kept; None for fp32.
      nu_dtype: Dtype in which the second moment is kept; None for fp32.

    Returns:
      An `optax.GradientTransformation` whose `update` needs `params`.

    Raises:
      UserError: For an argument that is out of range.

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.ones((2, 2))}
    >>> tx = lans(1e-2)
    >>> updates, _ = tx.update({"kernel": jnp.full((2, 2), 1e-3)}, tx.init(params), params)
    >>> round(float(updates["kernel"][0, 0]), 6)
    -0.01

    References:
      Zheng et al., Accelerated Large Batch Optimization of BERT Pretraining in 54 minutes,
      arXiv:2006.13484v2, Algorithm 2; the equations follow the authors' code in apache/mxnet,
      python/mxnet/optimizer/lans.py.

    Note:
      All gradients are normalized, also those of leaves that are not adapted.
    """
    options: dict[str, Any] = {
        "stacked": stacked,
        "axis_name": axis_name,
        "sharded_mask": sharded_mask,
    }

    return _precision.chain_in_wide_precision(
        _normalization.normalize_gradients("layer", **options),
        scale_by_lans(
            b1,
            b2,
            eps,
            weight_decay,
            weight_decay_mask,
            trust_ratio_mask,
            trust_ratio_bounds,
            weight_norm_bounds,
            mu_dtype=mu_dtype,
            nu_dtype=nu_dtype,
            **options,
        ),
        _learning_rate.scale_by_learning_rate(learning_rate),
    )
