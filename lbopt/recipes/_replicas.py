"""How an aggregator fits the replicas and the parameters of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax

from lbopt import types
from lbopt.config import AggregatorConfig
from lbopt.errors import UserError, require
from lbopt.transforms import resolve_labels


def check_replicas(config: AggregatorConfig, num_replicas: int) -> None:
    """Raise `UserError` if the aggregator cannot take this number of replicas."""
    fix = (
        f"agvm compares two halves of the replicas, and there are {num_replicas}: use an even "
        "number of them"
    )
    fits = config.name != "agvm" or num_replicas % 2 == 0
    field = "aggregator.replicas_per_device"
    require(fits, field, config.replicas_per_device, fix, code="mismatch")


def check_modules(
    labels: Mapping[str, str] | None,
    init: Callable[[jax.Array], tuple[types.Params, types.ModelState]],
) -> None:
    """Raise `UserError` if modules do not fit the parameters that `init` makes."""
    if labels is None:
        return
    try:
        resolve_labels(labels, jax.eval_shape(init, jax.random.key(0))[0])
    except UserError as error:
        modules = tuple(labels.items())
        raise UserError("aggregator.modules", modules, error.reason, code="mismatch") from error
