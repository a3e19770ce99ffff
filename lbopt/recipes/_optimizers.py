"""Optimizers by name. Every value that a sweep varies may be traced."""

from __future__ import annotations

import contextlib
from typing import Any, cast

import jax
import optax

from lbopt import errors, masks, types
from lbopt.config import OptimizerConfig, resolve_clip
from lbopt.transforms import (
    VARIANTS,
    Labels,
    LambVariant,
    LarsVariant,
    clip_by_global_norm,
    lamb,
    lans,
    lars,
    monitor_layers,
    scale_by_agvm,
    scale_by_learning_rate,
    skip_bad_updates,
    squarable,
    track_ema,
    track_noise_scale,
)


def make_optimizer(
    config: OptimizerConfig,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float | jax.Array | None = None,
    global_batch_size: int | None = None,
    stacked: types.Stacked = None,
    module_labels: Labels | None = None,
) -> optax.GradientTransformation:
    """Build the optimizer of a config: what is measured first, the optimizer, what is watched last; guarded if asked.

    Args:
      config: which one, and its constants.
      learning_rate: a number or a schedule.
      weight_decay: instead of the config's; may be traced.
      global_batch_size: of the gradients, for `track_noise_scale`.
      stacked: which parameters are stacks of layers, each with a trust ratio of its own.
      module_labels: of the modules whose updates AGVM scales; None for none.

    Raises:
      UserError: if fields contradict each other.
    """
    links = []
    if config.track_noise_scale:
        assert global_batch_size is not None, "track_noise_scale needs the batch size"
        links.append(track_noise_scale(global_batch_size))
    max_norm = resolve_clip(config)
    if max_norm is not None and config.clip_stage == "accumulated":
        links.append(clip_by_global_norm(max_norm, _clip_eps(config)))
    with _naming(config.name):
        links.append(_BUILDERS[config.name](config, learning_rate, weight_decay, stacked))
    if module_labels is not None:
        links.append(scale_by_agvm(module_labels))
    if config.monitor_layers:
        links.append(monitor_layers(stacked))
    if config.ema_decay is not None:
        links.append(track_ema(config.ema_decay, config.ema_ramp))
    tx = optax.chain(*links)
    if config.skip_limit is None:
        return tx
    return skip_bad_updates(tx, config.skip_limit, config.spike_factor)


def _naming(name: str) -> contextlib.AbstractContextManager[None]:
    """Let errors about the arguments of an optimizer name the fields of its config."""
    if name != "lars":
        return errors.under("optimizer")
    return errors.under(
        "optimizer",
        clip_mode="optimizer.trust_ratio_clip_mode",
        eps="optimizer.trust_ratio_eps",
        momentum_dtype="optimizer.mu_dtype",
    )


def _clip_eps(config: OptimizerConfig) -> float:
    if config.name not in VARIANTS:
        return 0.0
    return getattr(VARIANTS[config.name][config.variant].options, "max_grad_norm_eps", 0.0)


def _decay(config: OptimizerConfig, weight_decay: float | jax.Array | None) -> Any:
    return config.weight_decay if weight_decay is None else weight_decay


def _given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None: the others are the variant's."""
    return {name: value for name, value in options.items() if value is not None}


def _lamb(
    config: OptimizerConfig, learning_rate, weight_decay, stacked
) -> optax.GradientTransformation:
    return lamb(
        learning_rate,
        config.b1,
        config.b2,
        config.eps,
        _decay(config, weight_decay),
        max_grad_norm=None,  # make_optimizer or the step clips
        variant=cast(LambVariant, config.variant),
        stacked=stacked,
        mu_dtype=config.mu_dtype,
        nu_dtype=config.nu_dtype,
        **_given(trust_ratio_bounds=config.trust_ratio_bounds),
    )


def _lans(
    config: OptimizerConfig, learning_rate, weight_decay, stacked
) -> optax.GradientTransformation:
    return lans(
        learning_rate,
        config.b1,
        config.b2,
        config.eps,
        _decay(config, weight_decay),
        trust_ratio_bounds=config.trust_ratio_bounds,
        stacked=stacked,
        mu_dtype=config.mu_dtype,
        nu_dtype=config.nu_dtype,
    )


def _lars(
    config: OptimizerConfig, learning_rate, weight_decay, stacked
) -> optax.GradientTransformation:
    return lars(
        learning_rate,
        _decay(config, weight_decay),
        config.momentum,
        variant=cast(LarsVariant, config.variant),
        nesterov=config.nesterov,
        stacked=stacked,
        momentum_dtype=config.mu_dtype,
        **_given(
            trust_coefficient=config.trust_coefficient,
            eps=config.trust_ratio_eps,
            clip_mode=config.trust_ratio_clip_mode,
            trust_ratio_bounds=config.trust_ratio_bounds,
        ),
    )


def _momentum(
    config: OptimizerConfig, learning_rate, weight_decay, stacked
) -> optax.GradientTransformation:
    del stacked
    return optax.chain(
        optax.add_decayed_weights(_decay(config, weight_decay), mask=masks.weights_only),
        optax.trace(config.momentum, config.nesterov),
        scale_by_learning_rate(learning_rate),
    )


def _with_squares(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return a transform that keeps squares of what comes in, which get no numbers whose squares are infinite."""

    def update_fn(
        updates: optax.Updates, state: Any, params: types.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        return inner.update(
            jax.tree.map(lambda u: squarable(u).astype(u.dtype), updates), state, params
        )

    return optax.GradientTransformation(inner.init, update_fn)


def _adam(
    config: OptimizerConfig, learning_rate, weight_decay, stacked
) -> optax.GradientTransformation:
    del weight_decay, stacked
    return optax.chain(
        _with_squares(optax.scale_by_adam(config.b1, config.b2, config.eps)),
        scale_by_learning_rate(learning_rate),
    )


def _adamw(
    config: OptimizerConfig, learning_rate, weight_decay, stacked
) -> optax.GradientTransformation:
    del stacked
    return optax.chain(
        _with_squares(optax.scale_by_adam(config.b1, config.b2, config.eps)),
        optax.add_decayed_weights(_decay(config, weight_decay), mask=masks.weights_only),
        scale_by_learning_rate(learning_rate),
    )


def _rmsprop(
    config: OptimizerConfig, learning_rate, weight_decay, stacked
) -> optax.GradientTransformation:
    """TensorFlow's: means of squares begin at 1, eps is under the root, the learning rate is inside the momentum."""
    del stacked
    return optax.chain(
        optax.add_decayed_weights(_decay(config, weight_decay), mask=masks.weights_only),
        _with_squares(
            optax.scale_by_rms(
                config.rmsprop_decay, config.eps, initial_scale=1.0, eps_in_sqrt=True
            )
        ),
        scale_by_learning_rate(learning_rate),
        optax.trace(config.momentum, config.nesterov),
    )


_BUILDERS = {
    "adam": _adam,
    "adamw": _adamw,
    "lamb": _lamb,
    "lans": _lans,
    "lars": _lars,
    "momentum": _momentum,
    "rmsprop": _rmsprop,
}
