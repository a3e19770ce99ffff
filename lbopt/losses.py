"""Losses per example, in fp32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from lbopt import masks, tree, types
from lbopt.errors import NO_VALUE, require, require_choice

SMOOTHING_RULES = ("all_classes", "other_classes")


def softmax_cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    label_smoothing: float = 0.0,
    smoothing_rule: str = "all_classes",
) -> jax.Array:
    """Return the cross entropy of each example, computed in fp32 whatever the dtype of the logits.

    Args:
      logits: [batch, classes], or with more leading axes.
      labels: [batch] int class indices. A number that is no class aims at none: without smoothing
        its loss is 0.
      label_smoothing: Amount e in [0, 1). The target is 1 - e on the right class, and e spread over
        classes by the rule.
      smoothing_rule: "all_classes" adds e / C to each of C classes, the right one too (Szegedy et
        al., arXiv:1512.00567v3, section 7; TensorFlow and MLPerf). "other_classes" gives
        e / (C - 1) to each of the others (NUS-HPC-AI-Lab's pytorch-lamb and LARS-ImageNet-PyTorch).
        "other_classes" at e is "all_classes" at e C / (C - 1).

    Returns:
      The losses, [batch] fp32, shaped like the labels.

    Raises:
      UserError: For an unknown rule, or logits that do not fit the labels.

    >>> import jax.numpy as jnp
    >>> [round(float(loss), 4) for loss in softmax_cross_entropy(jnp.zeros((1, 4)), jnp.array([2]))]
    [1.3863]
    """
    check_smoothing_rule(smoothing_rule)
    shape = (*labels.shape, logits.shape[-1])
    fix = (
        f"of shape {logits.shape} for labels of shape {labels.shape}; give logits of shape {shape}"
    )
    require(logits.shape == shape, "logits", NO_VALUE, fix, code="mismatch")

    logits = logits.astype(jnp.float32)
    if isinstance(label_smoothing, int | float) and label_smoothing == 0:
        # No array of log probabilities, which of many classes would be the step's largest. Optax
        # has this too, but subtracts the largest logit last, which a small loss does not survive.
        largest = jax.lax.stop_gradient(jnp.max(logits, -1))
        total = jnp.sum(jnp.exp(logits - largest[..., None]), -1)
        right = jnp.take_along_axis(logits, labels[..., None], -1, mode="clip")[..., 0]
        is_class = (labels >= 0) & (labels < logits.shape[-1])
        return jnp.where(is_class, jnp.log(total) - (right - largest), 0.0)

    log_p = jax.nn.log_softmax(logits)
    classes = logits.shape[-1]
    one_hot = jax.nn.one_hot(labels, classes, dtype=jnp.float32)
    uniform = label_smoothing
    if smoothing_rule == "other_classes":
        uniform = label_smoothing * classes / (classes - 1)
    target = one_hot * (1 - uniform) + uniform / classes
    return -jnp.sum(target * log_p, axis=-1)


def check_smoothing_rule(smoothing_rule: str) -> None:
    """Raise `UserError` unless `softmax_cross_entropy` takes this rule."""
    require_choice("smoothing_rule", smoothing_rule, SMOOTHING_RULES)


def l2_penalty(params: types.Params, weight: float) -> jax.Array:
    """Return weight / 2 times the sum of squares of all parameters except normalization layers'.

    Biases of other layers count, as in
    tensorflow/tpu@e380f765021a8853abfbfd53af727604039a7d8c:
    models/official/resnet/resnet_main.py and models/official/efficientnet/main.py, which leave out
    variables with "batch_normalization" in their names.

    Args:
      params: The parameters.
      weight: Coefficient of the penalty.

    Returns:
      An fp32 scalar.

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.array([[3.0, 4.0]]), "norm": {"scale": jnp.ones(2)}}
    >>> float(l2_penalty(params, weight=0.1))
    1.25
    """
    counted = masks.exclude_roles("norm")(params)
    squares = [
        tree.square_norm(leaf).astype(jnp.float32)
        for leaf, counts in zip(jax.tree.leaves(params), jax.tree.leaves(counted), strict=True)
        if counts
    ]
    return weight / 2 * sum(squares, start=jnp.zeros((), jnp.float32))
