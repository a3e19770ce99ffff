"""What a study is judged by: accuracy, or the perplexity of a language model."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]


class Metric(NamedTuple):
    """A measure of a trained model.

    Attributes:
      name: of the field, after the split's.
      label: of an axis.
      unit: of a loss: percentage points of accuracy, percent of the perplexity.
    """

    name: str
    label: str
    unit: str

    def scores(self, rows: Iterable[Row], split: str) -> list[float]:
        """Return the measure of every row; a trial that diverged counts as the worst there is, as it does in the search.

        Args:
          rows: of `results.jsonl`.
          split: "train", "validation" or "test"; for the last one rows of final trials.

        Returns:
          Accuracies in [0, 1], 0 where it diverged; or perplexities, infinite there.
        """
        worst = 0.0 if self is ACCURACY else math.inf
        values = (None if row["diverged"] else row[f"{split}_{self.name}"] for row in rows)
        return [worst if value is None else value for value in values]

    def centre(self, scores: Sequence[float]) -> float:
        """Return the mean over seeds; of perplexities the geometric one, which is the exponential of the mean loss.

        Args:
          scores: as from `scores`, at least one.

        >>> round(PERPLEXITY.centre([10.0, 40.0]), 9)
        20.0
        """
        if self is ACCURACY:
            return statistics.fmean(scores)
        return math.exp(statistics.fmean(math.log(score) for score in scores))

    def worse_by(self, base: float, value: float) -> float:
        """Return how much worse `value` is than `base`, in `unit`.

        Args:
          base: accuracy in [0, 1] or perplexity.
          value: likewise.

        Returns:
          Points or percent, below 0 where `value` is better; NaN for a perplexity `base` that is not finite.

        >>> ACCURACY.worse_by(0.98, 0.95), PERPLEXITY.worse_by(100.0, 105.0)
        (3.0, 5.0)
        """
        if self is ACCURACY:
            return round(100 * (base - value), 9)
        return round(100 * (value / base - 1), 9) if math.isfinite(base) else math.nan

    def show(self, value: float | None) -> str:
        """Return the measure as text; "diverged" for None, and for what is not finite.

        >>> ACCURACY.show(0.9866), PERPLEXITY.show(116.04)
        ('98.66%', '116.04')
        """
        if value is None or not math.isfinite(value):
            return "diverged"
        return f"{100 * value:.2f}%" if self is ACCURACY else f"{value:.2f}"

    def amount(self, loss: float) -> str:
        """Return a loss in words, given in `unit`.

        >>> ACCURACY.amount(1.0), ACCURACY.amount(2.5), PERPLEXITY.amount(5.0)
        ('1 point', '2.5 points', '5 percent')
        """
        return f"{loss:.3g} {self.unit}{'s' * (self is ACCURACY and f'{loss:.3g}' != '1')}"

    def shown(self, value: float | None) -> float:
        """Return the measure as a figure shows it: accuracy in percent; NaN leaves a gap."""
        if value is None or not math.isfinite(value):
            return math.nan
        return 100 * value if self is ACCURACY else value


ACCURACY = Metric("accuracy", "accuracy, %", "point")
PERPLEXITY = Metric("perplexity", "perplexity", "percent")


def metric_of(rows: Sequence[Row]) -> Metric:
    """Return what a study is judged by: perplexity if a row of `results.jsonl` has one, else accuracy."""
    return PERPLEXITY if any("validation_perplexity" in row for row in rows) else ACCURACY


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean, None if a value is missing or not finite, or if there are none.

    >>> mean([1.0, 2.0]), mean([1.0, None]), mean([])
    (1.5, None, None)
    """
    found = list(values)
    if not found or any(value is None or not math.isfinite(value) for value in found):
        return None
    return statistics.fmean(value for value in found if value is not None)


def spread(metric: Metric, scores: Sequence[float]) -> dict[str, float | None]:
    """Return mean, std, min and max over seeds; None for all four if a score is not finite.

    Args:
      metric: what the scores are.
      scores: one for each seed, at least one; accuracies in [0, 1] or perplexities.

    Returns:
      Numbers in the unit of the scores; the mean is `Metric.centre`, the std that of a sample, 0 for a single seed.

    >>> spread(ACCURACY, [0.25, 0.75])
    {'mean': 0.5, 'std': 0.3535533905932738, 'min': 0.25, 'max': 0.75}
    """
    if not all(math.isfinite(score) for score in scores):
        return {"mean": None, "std": None, "min": None, "max": None}
    std = statistics.stdev(scores) if len(scores) > 1 else 0.0
    return {"mean": metric.centre(scores), "std": std, "min": min(scores), "max": max(scores)}
