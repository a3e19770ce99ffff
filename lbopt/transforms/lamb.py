"""LAMB as a chain."""

from __future__ import annotations

from typing import Any

import optax

from lbopt import tree, types
from lbopt.transforms import clipping, learning_rate as lr_transform, moments, trust_ratio, variants

VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {"weight_decay_mask": tree.weights_only, "trust_ratio_mask": tree.weights_only},
    "optax": {"weight_decay_mask": None, "trust_ratio_mask": None},
}


def lamb(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    weight_decay_mask: types.Mask | types.Unset = types.UNSET,
    trust_ratio_mask: types.Mask | types.Unset = types.UNSET,
    trust_ratio_bounds: tuple[float, float] | None = None,
    max_grad_norm: float | None = None,
    variant: str = "paper",
    weight_norm_bounds: tuple[float, float] | None = None,
    debias: bool = True,
) -> optax.GradientTransformation:
    r"""Build LAMB: Adam's direction plus decay, each layer scaled to a step of lr * ||w||.

        r = m' / (sqrt(v') + eps) ;   u = r + wd w ;   w <- w - lr * phi(||w||) / ||u|| * u

    A chain of `clip_by_global_norm` (if asked), `scale_by_lamb_moments`, `scale_by_layerwise_trust_ratio` and
    `scale_by_learning_rate`, and no more.

    Args:
      learning_rate: a number or a schedule.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      eps: outside the root.
      weight_decay: decoupled decay wd, inside the direction and its norm. There is no good common default: .01 for BERT,
        1.5 for You's ResNet-50.
      weight_decay_mask: which leaves are decayed (see `lbopt.types.Mask`); the variant's if not given.
      trust_ratio_mask: which leaves are adapted; the variant's if not given.
      trust_ratio_bounds: (low, high) for the ratio.
      max_grad_norm: clip the global norm of the incoming gradients to this first; None for no clipping.
      variant: "paper" (bias and normalization leaves neither decayed nor adapted) or "optax" (every leaf both decayed
        and adapted, as `optax.lamb` without a mask).
      weight_norm_bounds: the paper's phi, bounds on ||w||; None for the identity.
      debias: bias correction of both moments.

    Returns:
      An `optax.GradientTransformation` whose `update` needs `params`.

    Raises:
      ValueError: naming the argument that is out of range or the unknown variant.

    >>> import jax.numpy as jnp, optax
    >>> tx = lamb(1e-2, weight_decay=0.01)
    >>> params = {"kernel": jnp.ones((2, 2)), "bias": jnp.zeros(2)}
    >>> updates, state = tx.update({"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}, tx.init(params), params)
    >>> round(float(updates["kernel"][0, 0]), 6), round(float(updates["bias"][0]), 6)
    (-0.01, -0.01)

    References:
      You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 Minutes, arXiv 1904.00962, Algorithm 2.
    """
    row = variants.choose(VARIANTS, variant, weight_decay_mask=weight_decay_mask, trust_ratio_mask=trust_ratio_mask)
    clip = [] if max_grad_norm is None else [clipping.clip_by_global_norm(max_grad_norm)]
    return optax.chain(
        *clip,
        moments.scale_by_lamb_moments(b1, b2, eps, debias=debias),
        trust_ratio.scale_by_layerwise_trust_ratio(
            trust_ratio_mask=row["trust_ratio_mask"],
            trust_ratio_bounds=trust_ratio_bounds,
            weight_norm_bounds=weight_norm_bounds,
            weight_decay=weight_decay,
            weight_decay_mask=row["weight_decay_mask"],
        ),
        lr_transform.scale_by_learning_rate(learning_rate),
    )
