"""The order of a run's checkpoints: the best one, and the latest with a finite network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

PHASE = "phase"
"""Among the metrics of a checkpoint: the number of its phase, if that is not the first one."""
BROKEN = "broken"
"""Among the metrics of a checkpoint: 1 if its network is not finite; left out otherwise."""
_PHASE_WEIGHT = 1e9
"""Makes a later phase, which has other examples, better than an earlier one by any metric."""
_LOWER_IS_BETTER = ("loss", "perplexity", "per_byte", "error", "mse", "mae")


def lower_is_better(metric: str) -> bool:
    """Return whether a metric is better the lower it is, which the end of its name tells.

    >>> lower_is_better("eval/mean_absolute_error"), lower_is_better("eval/accuracy")
    (True, False)
    """
    return metric.endswith(_LOWER_IS_BETTER)


class Ranking:
    """An order of the checkpoints of a run by one metric of their evaluations.

    Args:
      best_metric: Name of the metric; see `lower_is_better`.
      metrics: Metrics of checkpoints that were evaluated, by step.
    """

    def __init__(self, best_metric: str, metrics: Mapping[int, Mapping[str, float]]):
        self._best_metric = best_metric
        self._metrics = {step: dict(found) for step, found in metrics.items() if found}

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in a new checkpoint."""
        self._metrics[step] = dict(metrics)

    def forget(self, step: int) -> None:
        """Leave a checkpoint out from now on."""
        self._metrics.pop(step, None)

    def would_be_best(self, metrics: Mapping[str, float]) -> bool:
        """Return whether an evaluation is better than that of every checkpoint so far."""
        best = max(map(self._goodness, self._metrics.values()), default=-math.inf)
        return bool(metrics) and self._goodness(metrics) > best

    def best(self, steps: Iterable[int]) -> int | None:
        """Return the best of some steps, the later one of equals; None if none has the metric."""
        scored = {
            step: self._goodness(self._metrics[step]) for step in steps if step in self._metrics
        }
        scored = {step: goodness for step, goodness in scored.items() if goodness > -math.inf}
        return max(scored, key=lambda step: (scored[step], step), default=None)

    def latest_finite(self, steps: Iterable[int]) -> int | None:
        """Return the latest of some steps whose network is finite; None if there is none."""
        finite = (step for step in steps if not _is_broken(self._metrics.get(step, {})))
        return max(finite, default=None)

    def _goodness(self, metrics: Mapping[str, float]) -> float:
        """Return a number that is larger for a better checkpoint; -inf for one without a metric."""
        value = metrics.get(self._best_metric, math.nan)
        if _is_broken(metrics) or math.isnan(value):
            return -math.inf
        goodness = -value if lower_is_better(self._best_metric) else value
        return goodness + _PHASE_WEIGHT * metrics.get(PHASE, 0)


def _is_broken(metrics: Mapping[str, float]) -> bool:
    """Return whether a checkpoint's network is not finite.

    Earlier versions did not save `BROKEN`, and only the metrics tell.
    """
    return bool(metrics.get(BROKEN)) or not all(map(math.isfinite, metrics.values()))
