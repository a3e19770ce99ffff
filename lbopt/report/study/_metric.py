"""The measure by which a study judges a model: accuracy, or perplexity of a language model."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

from lbopt.sweep import FinishedTrial


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """Mean, standard deviation, minimum and maximum over seeds; None if one is not finite."""

    mean: float | None
    std: float | None
    min: float | None
    max: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """A measure of a trained model.

    Attributes:
      name: Name of the field of `FinishedTrial`, after that of the split.
      label: Label of an axis.
      unit: Unit of a difference: percentage point of accuracy, percent of the perplexity.
    """

    name: str
    label: str
    unit: str

    @property
    def units(self) -> str:
        """The unit in the plural."""
        return "points" if self is ACCURACY else self.unit

    def scores(self, runs: Iterable[FinishedTrial], split: str) -> tuple[float, ...]:
        """Return the score of every run on "train", "validation" or "test".

        A run that diverged gets the worst possible score, as in the search: accuracy 0, perplexity
        infinity.
        """
        worst = 0.0 if self is ACCURACY else math.inf
        values = (None if run.diverged else getattr(run, f"{split}_{self.name}") for run in runs)
        return tuple(worst if value is None else value for value in values)

    def centre(self, scores: Sequence[float]) -> float:
        """Return the mean over seeds; of perplexities the exponential of the mean loss.

        >>> round(PERPLEXITY.centre([10.0, 40.0]), 9)
        20.0
        """
        if self is ACCURACY:
            return statistics.fmean(scores)
        return math.exp(statistics.fmean(math.log(score) for score in scores))

    def spread(self, scores: Sequence[float]) -> Spread:
        """Return the spread over seeds, at least one; the mean is `centre`.

        >>> ACCURACY.spread([0.25, 0.75])
        Spread(mean=0.5, std=0.3535533905932738, min=0.25, max=0.75)
        """
        if not all(math.isfinite(score) for score in scores):
            return Spread(None, None, None, None)
        std = statistics.stdev(scores) if len(scores) > 1 else 0.0
        return Spread(self.centre(scores), std, min(scores), max(scores))

    def worse_by(self, base: float, value: float) -> float:
        """Return how much worse `value` is than `base`, in `unit`; negative where it is better.

        NaN for a perplexity `base` that is not finite.

        >>> ACCURACY.worse_by(0.98, 0.95), PERPLEXITY.worse_by(100.0, 105.0)
        (3.0, 5.0)
        """
        if self is ACCURACY:
            return round(100 * (base - value), 9)
        return round(100 * (value / base - 1), 9) if math.isfinite(base) else math.nan

    def badness(self, score: float | None) -> float:
        """Return a number that is lower for a better score, and infinite for None."""
        if score is None:
            return math.inf
        return -score if self is ACCURACY else score

    def on_scale(self, scores: Iterable[float]) -> list[float]:
        """Return scores on the scale of their means: percent, or the logarithm of a perplexity."""
        return [100 * score if self is ACCURACY else math.log(score) for score in scores]

    def show(self, value: float | None) -> str:
        """Return the score as text; "diverged" if it is None or not finite.

        >>> ACCURACY.show(0.9866), PERPLEXITY.show(116.04)
        ('98.66%', '116.04')
        """
        if value is None or not math.isfinite(value):
            return "diverged"
        return f"{100 * value:.2f}%" if self is ACCURACY else f"{value:.2f}"

    def amount(self, difference: float) -> str:
        """Return a difference, given in `unit`, as text.

        >>> ACCURACY.amount(1.0), ACCURACY.amount(2.5), PERPLEXITY.amount(5.0)
        ('1 point', '2.5 points', '5 percent')
        """
        number = f"{difference:.3g}"
        return f"{number} {self.unit if number == '1' else self.units}"

    def shown(self, value: float | None) -> float:
        """Return the score as a figure shows it: accuracy in percent; NaN leaves a gap."""
        if value is None or not math.isfinite(value):
            return math.nan
        return 100 * value if self is ACCURACY else value


ACCURACY = Metric("accuracy", "accuracy, %", "point")
PERPLEXITY = Metric("perplexity", "perplexity", "percent")


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean; None if a value is missing or not finite, or if there are none.

    >>> mean([1.0, 2.0]), mean([1.0, None]), mean([])
    (1.5, None, None)
    """
    found = list(values)
    known = [value for value in found if value is not None and math.isfinite(value)]
    return statistics.fmean(known) if known and len(known) == len(found) else None
