"""Optimizers by name. Every value that a sweep varies may be traced."""

from __future__ import annotations

import jax
import optax

from lbopt import masks
from lbopt.config.train import OptimizerConfig
from lbopt.transforms import clipping, lamb, lars, learning_rate as lr_transform


def make_optimizer(
    config: OptimizerConfig, learning_rate: optax.ScalarOrSchedule, weight_decay: float | jax.Array | None = None
) -> optax.GradientTransformation:
    """Build the optimizer of a config.

    Args:
      config: which one, and its constants.
      learning_rate: a number or a schedule.
      weight_decay: instead of the config's; may be traced.
    """
    decay = config.weight_decay if weight_decay is None else weight_decay
    clip = [] if config.max_grad_norm is None else [clipping.clip_by_global_norm(config.max_grad_norm)]
    return optax.chain(*clip, _BUILDERS[config.name](config, learning_rate, decay))


def _lamb(config: OptimizerConfig, learning_rate, decay) -> optax.GradientTransformation:
    return lamb.lamb(
        learning_rate, config.b1, config.b2, config.eps, decay, trust_ratio_bounds=config.trust_ratio_bounds
    )


def _lars(config: OptimizerConfig, learning_rate, decay) -> optax.GradientTransformation:
    bounds = config.trust_ratio_bounds
    return lars.lars(
        learning_rate,
        decay,
        config.momentum,
        config.trust_coefficient,
        nesterov=config.nesterov,
        trust_ratio_bounds=bounds,
    )


def _momentum(config: OptimizerConfig, learning_rate, decay) -> optax.GradientTransformation:
    return optax.chain(
        optax.add_decayed_weights(decay, mask=masks.weights_only),
        optax.trace(config.momentum, config.nesterov),
        lr_transform.scale_by_learning_rate(learning_rate),
    )


def _adam(config: OptimizerConfig, learning_rate, decay) -> optax.GradientTransformation:
    del decay
    return optax.chain(
        optax.scale_by_adam(config.b1, config.b2, config.eps), lr_transform.scale_by_learning_rate(learning_rate)
    )


def _adamw(config: OptimizerConfig, learning_rate, decay) -> optax.GradientTransformation:
    return optax.chain(
        optax.scale_by_adam(config.b1, config.b2, config.eps),
        optax.add_decayed_weights(decay, mask=masks.weights_only),
        lr_transform.scale_by_learning_rate(learning_rate),
    )


_BUILDERS = {"adam": _adam, "adamw": _adamw, "lamb": _lamb, "lars": _lars, "momentum": _momentum}
