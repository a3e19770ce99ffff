"""Losses per example, in fp32."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def softmax_cross_entropy(logits: jax.Array, labels: jax.Array, label_smoothing: float = 0.0) -> jax.Array:
    """Return the cross entropy of each example, computed in fp32 whatever the dtype of the logits.

    Args:
      logits: [batch, classes], or with more leading axes.
      labels: [batch] int class indices.
      label_smoothing: weight s of the uniform distribution: the target is (1 - s) one-hot + s / classes, the
        convention of Szegedy et al., arXiv 1512.00567, section 7.

    Returns:
      [batch] fp32, like the labels.

    >>> import jax.numpy as jnp
    >>> [round(float(loss), 4) for loss in softmax_cross_entropy(jnp.zeros((1, 4)), jnp.array([2]))]
    [1.3863]
    """
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    one_hot = jax.nn.one_hot(labels, logits.shape[-1], dtype=jnp.float32)
    target = one_hot * (1 - label_smoothing) + label_smoothing / logits.shape[-1]
    return -jnp.sum(target * log_p, axis=-1)
