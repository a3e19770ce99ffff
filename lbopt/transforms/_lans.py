"""LANS: LAMB with normalised gradients and a Nesterov step, each part with a trust ratio of its own."""

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
    """Adam's moments of the normalised gradients, and the ratios of the two parts of the step.

    Attributes:
      moments: `LambMomentsState`.
      of_momentum: `TrustRatioState` of the part that follows the first moment.
      of_gradient: `TrustRatioState` of the part that follows the gradient.
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
    r"""Replace each (normalised) gradient by the LANS direction.

        r = mh / (sqrt(vh) + eps) ;   c = g / (sqrt(vh) + eps)
        out = b1 * ratio(r + wd w) * (r + wd w) + (1 - b1) * ratio(c + wd w) * (c + wd w)

    Args:
      b1: decay rate of the first moment, and the share of its part of the step, in [0, 1).
      b2: decay rate of the second moment, in [0, 1).
      eps: outside the root, >= 0.
      weight_decay: as in `scale_by_layerwise_trust_ratio`, for both parts; also the masks, the bounds and the next three.
      weight_decay_mask: see above.
      trust_ratio_mask: see above.
      trust_ratio_bounds: see above.
      weight_norm_bounds: see above.
      stacked: see above.
      axis_name: see above.
      sharded_mask: see above.
      mu_dtype: of the kept first moment; None for fp32.
      nu_dtype: of the kept second moment; None for fp32.

    Returns:
      A transform whose state is `LansState`.

    Raises:
      ValueError: naming the argument that is out of range.
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
        start = _moments.init_moments(params, "scale_by_lans", mu_dtype, nu_dtype)
        return LansState(start, ratio.init(params), ratio.init(params))

    def update_fn(
        updates: optax.Updates, state: LansState, params: types.Params | None = None
    ) -> tuple[optax.Updates, LansState]:
        _arguments.require_params(params, "scale_by_lans")
        tree.check_updates(updates, params)
        _arguments.require_state(state, LansState, "scale_by_lans")
        tree.check_updates(updates, state.moments.mu)
        count = optax.safe_increment(state.moments.count)
        mu, nu = _moments.next_moments(updates, state.moments, b1, b2, count)

        def directions(g: jax.Array, m: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
            m, v = _moments.debiased(m, v, b1, b2, count, True)
            below = jnp.sqrt(v) + eps
            return _moments.divided(m, below).astype(g.dtype), _moments.divided(
                g.astype(m.dtype), below
            ).astype(g.dtype)

        follow, look = tree.unzip_pairs(updates, jax.tree.map(directions, updates, mu, nu))
        follow, of_momentum = ratio.update(follow, state.of_momentum, params)
        look, of_gradient = ratio.update(look, state.of_gradient, params)
        out = jax.tree.map(
            lambda f, k: (tree.scaled(f, b1) + tree.scaled(k, 1 - b1)).astype(f.dtype), follow, look
        )
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
        w <- w - lr * [b1 * phi(||w||)/||r + wd w|| * (r + wd w) + (1 - b1) * phi(||w||)/||c + wd w|| * (c + wd w)]

    Args:
      learning_rate: a number or a schedule.
      b1: decay rate of the first moment, and the share of its part of the step.
      b2: decay rate of the second moment.
      eps: outside the root.
      weight_decay: wd, inside both directions and their norms.
      weight_decay_mask: which leaves are decayed; `lbopt.weights_only` if not given.
      trust_ratio_mask: which leaves are adapted; likewise.
      trust_ratio_bounds: (low, high) for both ratios, or None.
      weight_norm_bounds: phi, bounds on ||w||; None for the identity.
      stacked: as in `lamb`, also for `axis_name`, `sharded_mask`, `mu_dtype` and `nu_dtype`.
      axis_name: see above.
      sharded_mask: see above.
      mu_dtype: see above.
      nu_dtype: see above.

    Returns:
      An `optax.GradientTransformation` whose `update` needs `params`.

    Raises:
      ValueError: naming the argument that is out of range.

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.ones((2, 2))}
    >>> tx = lans(1e-2)
    >>> updates, _ = tx.update({"kernel": jnp.full((2, 2), 1e-3)}, tx.init(params), params)
    >>> round(float(updates["kernel"][0, 0]), 6)
    -0.01

    References:
      Zheng et al., Accelerated Large Batch Optimization of BERT Pretraining in 54 minutes, arXiv 2006.13484,
      Algorithm 2; the equations as apache/mxnet, python/mxnet/optimizer/lans.py, has them.

    Note:
      All gradients are normalised, also those of leaves that are not adapted.
    """
    spread: dict[str, Any] = {
        "stacked": stacked,
        "axis_name": axis_name,
        "sharded_mask": sharded_mask,
    }
    return _precision.chain_in_wide_precision(
        _normalization.normalize_gradients("layer", **spread),
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
            **spread,
        ),
        _learning_rate.scale_by_learning_rate(learning_rate),
    )
