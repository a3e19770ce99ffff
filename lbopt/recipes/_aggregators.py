"""Aggregators by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from lbopt import errors, types
from lbopt.aggregators import (
    Aggregator,
    Compressor,
    agvm,
    aps,
    cast,
    econtrol,
    ef,
    ef21,
    identity,
    keep_finite,
    plain_mean,
    powersgd,
    randk,
    sign,
    topk,
)
from lbopt.config import AggregatorConfig, OptimizerConfig
from lbopt.errors import UserError, require
from lbopt.transforms import resolve_labels

_ELSEWHERE = {
    "adam_b2": "optimizer.b2",
    "adam_eps": "optimizer.eps",
    "clip": "aggregator.scale_bounds",
    "labels": "aggregator.modules",
    "start": "aggregator.start_step",
    "stop": "aggregator.stop_step",
}
"""Arguments of aggregators -> the fields of the config that have other names."""
ADAM_FAMILY = ("adam", "adamw", "lamb", "lans")


def make_aggregator(
    config: AggregatorConfig, optimizer: OptimizerConfig, stacked: types.Stacked = None
) -> Aggregator | None:
    """Build the aggregator of a config; None for the compiler's mean.

    Args:
      config: which one, and its constants.
      optimizer: behind it: AGVM divides by its second moment, and where updates are skipped so is what they would leave behind.
      stacked: which parameters are stacks of layers, each compressed for itself. Between slices devices have parts of
        leaves, and each part is; but for PowerSGD, which takes whole matrices.

    Raises:
      UserError: if fields contradict each other.
    """
    if config.name == "none":
        return None
    in_parts = config.over not in ("replicas", "1") and config.name != "powersgd"
    stacked = None if in_parts else stacked
    with errors.under("aggregator", **_ELSEWHERE):
        made = _BUILDERS[config.name](config, optimizer, stacked)
    return made if optimizer.skip_limit is None else keep_finite(made)


def group_of(config: AggregatorConfig) -> str | int:
    """Return `over` as `make_train_step` takes it."""
    return int(config.over) if config.over.isdecimal() else config.over


def check_replicas(config: AggregatorConfig, num_replicas: int) -> None:
    """Raise `UserError` if so many replicas are not for this aggregator."""
    fix = f"agvm compares two halves of the replicas, and there are {num_replicas}: use an even number of them"
    fits = config.name != "agvm" or num_replicas % 2 == 0
    place, count = "aggregator.replicas_per_device", config.replicas_per_device
    require(fits, place, count, fix, code="mismatch")


def scaled_modules(config: AggregatorConfig) -> dict[str, str] | None:
    """Return the modules whose updates are scaled; None if none are."""
    return dict(config.modules) if config.name == "agvm" else None


def check_modules(
    labels: Mapping[str, str] | None,
    init: Callable[[jax.Array], tuple[types.Params, types.ModelState]],
) -> None:
    """Raise `UserError` if modules do not fit the parameters that `init` makes."""
    if labels is None:
        return
    try:
        resolve_labels(labels, jax.eval_shape(init, jax.random.key(0))[0])
    except ValueError as error:
        modules = tuple(labels.items())
        raise UserError("aggregator.modules", modules, f"{error}", code="mismatch") from error


def _compressor(config: AggregatorConfig) -> Compressor:
    if config.compressor == "cast":
        return cast(config.exponent_bits, config.mantissa_bits)
    if config.compressor in ("topk", "randk"):
        return (topk if config.compressor == "topk" else randk)(config.fraction)
    return (sign if config.compressor == "sign" else identity)()


def _mean(
    config: AggregatorConfig, optimizer: OptimizerConfig, stacked: types.Stacked
) -> Aggregator:
    del config, optimizer, stacked
    return plain_mean()


def _agvm(
    config: AggregatorConfig, optimizer: OptimizerConfig, stacked: types.Stacked
) -> Aggregator:
    del stacked
    fix = (
        f"{optimizer.name} keeps no second moment of Adam's; use one of {', '.join(ADAM_FAMILY)}, "
        "or leave it False"
    )
    kept = not config.of_adam or optimizer.name in ADAM_FAMILY
    require(kept, "of_adam", config.of_adam, fix, code="conflict")
    of_adam: dict[str, Any] = (
        {"adam_b2": optimizer.b2, "adam_eps": optimizer.eps} if config.of_adam else {}
    )
    return agvm(
        dict(config.modules),
        config.anchor,
        config.interval_steps,
        stop=config.stop_step,
        alpha=config.alpha,
        clip=config.scale_bounds,
        **_start(config),
        **of_adam,
    )


def _aps(
    config: AggregatorConfig, optimizer: OptimizerConfig, stacked: types.Stacked
) -> Aggregator:
    del optimizer
    return aps(
        config.exponent_bits,
        config.mantissa_bits,
        config.accumulate,  # type: ignore[arg-type]
        config.shift,
        config.overflow,  # type: ignore[arg-type]
        config.rounding,  # type: ignore[arg-type]
        stacked,
    )


def _ef(config: AggregatorConfig, optimizer: OptimizerConfig, stacked: types.Stacked) -> Aggregator:
    del optimizer
    return ef(_compressor(config), stacked)


def _ef21(
    config: AggregatorConfig, optimizer: OptimizerConfig, stacked: types.Stacked
) -> Aggregator:
    del optimizer
    return ef21(_compressor(config), config.momentum, config.dense_start, stacked)


def _econtrol(
    config: AggregatorConfig, optimizer: OptimizerConfig, stacked: types.Stacked
) -> Aggregator:
    del optimizer
    return econtrol(_compressor(config), config.eta, config.dense_start, stacked)


def _powersgd(
    config: AggregatorConfig, optimizer: OptimizerConfig, stacked: types.Stacked
) -> Aggregator:
    del optimizer
    return powersgd(config.rank, min_rate=config.min_rate, stacked=stacked, **_start(config))


def _start(config: AggregatorConfig) -> dict[str, Any]:
    return {} if config.start_step is None else {"start": config.start_step}


_BUILDERS = {
    "agvm": _agvm,
    "aps": _aps,
    "econtrol": _econtrol,
    "ef": _ef,
    "ef21": _ef21,
    "mean": _mean,
    "powersgd": _powersgd,
}
