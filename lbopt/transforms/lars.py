"""LARS as a chain."""

from __future__ import annotations

from typing import Any

import optax

from lbopt import tree, types
from lbopt.transforms import learning_rate as lr_transform, moments, trust_ratio, variants

VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {
        "weight_decay_mask": tree.weights_only,
        "trust_ratio_mask": tree.weights_only,
        "denominator": "sum_of_norms",
    },
    "optax": {"weight_decay_mask": None, "trust_ratio_mask": None, "denominator": "norm_of_sum"},
}


def lars(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float = 0.0,
    momentum: float = 0.9,
    trust_coefficient: float = 0.001,
    weight_decay_mask: types.Mask | types.Unset = types.UNSET,
    trust_ratio_mask: types.Mask | types.Unset = types.UNSET,
    variant: str = "paper",
    eps: float = 0.0,
    nesterov: bool = False,
    trust_ratio_bounds: tuple[float, float] | None = None,
    denominator: trust_ratio.Denominator | types.Unset = types.UNSET,
) -> optax.GradientTransformation:
    r"""Build LARS: momentum SGD whose layers each move in proportion to their own norm.

        ratio = trust_coefficient * ||w|| / (||g|| + wd ||w|| + eps)
        vel   = momentum * vel + lr * ratio * (g + wd w) ;   w <- w - vel

    The learning rate is inside the momentum. A chain of `scale_by_layerwise_trust_ratio`, `scale_by_learning_rate` and
    `scale_by_lars_momentum`, and no more. Leaves that are not adapted take plain momentum steps at the same rate.

    Args:
      learning_rate: a number or a schedule.
      weight_decay: wd; .0001 or .0002 is usual for ResNet-50.
      momentum: decay rate of the velocity.
      trust_coefficient: eta of the paper.
      weight_decay_mask: which leaves are decayed (see `lbopt.types.Mask`); the variant's if not given.
      trust_ratio_mask: which leaves are adapted; the variant's if not given.
      variant: "paper" (sum of norms; bias and normalization leaves neither decayed nor adapted) or "optax" (norm of
        the sum; every leaf both, as `optax.lars` without masks).
      eps: added to the denominator.
      nesterov: Nesterov momentum.
      trust_ratio_bounds: (low, high) for the ratio.
      denominator: "sum_of_norms" or "norm_of_sum"; the variant's if not given.

    Returns:
      An `optax.GradientTransformation` whose `update` needs `params`.

    Raises:
      ValueError: naming the argument that is out of range or the unknown variant.

    >>> import jax.numpy as jnp
    >>> tx = lars(1.0, momentum=0.0)
    >>> params = {"kernel": jnp.full((2, 2), 3.0)}
    >>> updates, _ = tx.update({"kernel": jnp.ones((2, 2))}, tx.init(params), params)
    >>> round(float(updates["kernel"][0, 0]), 6)
    -0.003

    References:
      You et al., Large Batch Training of Convolutional Networks, arXiv 1708.03888, Algorithm 1.

    Note:
      `optax.lars` divides by ||g + wd w||, which is never larger, so its ratio is never smaller.
    """
    row = variants.choose(
        VARIANTS,
        variant,
        weight_decay_mask=weight_decay_mask,
        trust_ratio_mask=trust_ratio_mask,
        denominator=denominator,
    )
    return optax.chain(
        trust_ratio.scale_by_layerwise_trust_ratio(
            trust_ratio_mask=row["trust_ratio_mask"],
            trust_coefficient=trust_coefficient,
            eps=eps,
            trust_ratio_bounds=trust_ratio_bounds,
            weight_decay=weight_decay,
            weight_decay_mask=row["weight_decay_mask"],
            denominator=row["denominator"],
        ),
        lr_transform.scale_by_learning_rate(learning_rate),
        moments.scale_by_lars_momentum(momentum, nesterov),
    )
