"""Regular expressions of a config, checked against the model's parameters."""

from __future__ import annotations

from lbopt.config import TrainConfig, check_masks, scaled_modules
from lbopt.errors import UserError
from lbopt.recipes._problem import Problem
from lbopt.transforms import resolve_labels


def check_patterns(config: TrainConfig, problem: Problem) -> None:
    """Raise `UserError` if modules or masks do not fit the parameters of the problem."""
    check_masks(config.optimizer, problem.params, problem.stacked)
    labels = scaled_modules(config.aggregator)
    if labels is None:
        return
    try:
        resolve_labels(labels, problem.params)
    except UserError as error:
        modules = config.aggregator.modules
        raise UserError("aggregator.modules", modules, error.reason, code="mismatch") from error
