"""Regular expressions of a config, checked against the model's parameters."""

from __future__ import annotations

from lbopt import errors
from lbopt.config import TrainConfig, check_fits, scaled_modules
from lbopt.recipes._problem import LoadedProblem
from lbopt.transforms import resolve_labels


def check_patterns(config: TrainConfig, problem: LoadedProblem) -> None:
    """Raise `UserError` if the optimizer, its masks or modules do not fit the parameters."""
    check_fits(config.optimizer, problem.params, problem.stacked, problem.known_roles)
    labels = scaled_modules(config.aggregator)
    if labels is None:
        return
    place = "aggregator.modules"
    modules = config.aggregator.modules
    with errors.about(place, modules, code="mismatch"), errors.under("", labels=place):
        resolve_labels(labels, problem.params)
