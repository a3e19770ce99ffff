"""Read back what an optimizer did from its state."""

from __future__ import annotations

from typing import Any

import jax

from lbopt import tree
from lbopt.transforms.learning_rate import LearningRateState
from lbopt.transforms.trust_ratio import TrustRatioState


def optimizer_metrics(opt_state: Any) -> dict[str, jax.Array]:
    """Return the learning rate and every layer's trust ratio of the last update.

    Args:
      opt_state: the state of any chain, `multi_transform`, `masked`, `MultiSteps` or `inject_hyperparams` around
        lbopt's transforms.

    Returns:
      `{"learning_rate": scalar, "trust_ratio/<parameter path>": scalar, ...}`. A second learning rate in the same state
      is called `learning_rate_1`, and so on.

    >>> import jax.numpy as jnp, lbopt
    >>> params = {"kernel": jnp.ones((2, 2))}
    >>> tx = lbopt.lamb(0.5)
    >>> _, opt_state = tx.update(params, tx.init(params), params)
    >>> {name: round(float(value), 3) for name, value in optimizer_metrics(opt_state).items()}
    {'trust_ratio/kernel': 1.0, 'learning_rate': 0.5}
    """
    metrics: dict[str, jax.Array] = {}
    rates = 0
    for node in jax.tree.leaves(opt_state, is_leaf=_is_monitored):
        if isinstance(node, LearningRateState):
            metrics["learning_rate" if rates == 0 else f"learning_rate_{rates}"] = node.learning_rate
            rates += 1
        elif isinstance(node, TrustRatioState):
            ratios = jax.tree_util.tree_leaves_with_path(node.trust_ratio)
            metrics.update({f"trust_ratio/{tree.path_name(path)}": ratio for path, ratio in ratios})
    return metrics


def _is_monitored(node: Any) -> bool:
    return isinstance(node, (LearningRateState, TrustRatioState))
