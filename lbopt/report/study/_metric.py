"""The measure by which a study judges a model: accuracy, perplexity, R^2, a loss or another."""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from typing import Literal

from lbopt.sweep import FinishedTrial, worst_score
from lbopt.train import lower_is_better


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
      text: Name in running text.
      scale: Scale of means, differences and the limit: "percent" (of 1, so that a difference is in
        points), "log" (a difference is a ratio, in percent) or "plain" (a difference is in percent
        of the score that it is compared with).
      lowest: Lowest score that is possible.
      highest: Highest score that is possible.
    """

    name: str
    text: str
    scale: Literal["percent", "log", "plain"] = "plain"
    lowest: float = -math.inf
    highest: float = math.inf

    @property
    def lower_is_better(self) -> bool:
        """Whether a lower score is better."""
        return lower_is_better(self.name)

    @property
    def is_share(self) -> bool:
        """Whether a score is a share from 0 to 1, so that 1 less it is an error."""
        return self.scale == "percent" and self.lowest == 0.0

    @property
    def label(self) -> str:
        """Label of an axis."""
        return f"{self.text}, %" if self.scale == "percent" else self.text

    @property
    def unit(self) -> str:
        """Unit of a difference."""
        return "point" if self.scale == "percent" else "percent"

    @property
    def units(self) -> str:
        """The unit in the plural."""
        return "points" if self.scale == "percent" else self.unit

    def scores(self, runs: Iterable[FinishedTrial], split: str) -> tuple[float, ...]:
        """Return the score of every run on "train", "validation" or "test".

        A run that diverged gets the worst possible score, as in the search: accuracy 0, perplexity
        infinity, R^2 minus infinity.
        """
        values = (None if run.diverged else run.score(split, self.name) for run in runs)
        worst = worst_score(self.name)
        return tuple(worst if value is None else value for value in values)

    def centre(self, scores: Sequence[float]) -> float:
        """Return the mean over seeds; of perplexities the exponential of the mean loss.

        >>> round(PERPLEXITY.centre([10.0, 40.0]), 9)
        20.0
        """
        if self.scale == "log":
            return math.exp(statistics.fmean(math.log(score) for score in scores))
        return statistics.fmean(scores)

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

        NaN for a `base` that is not finite, unless the unit is a point.

        >>> ACCURACY.worse_by(0.98, 0.95), PERPLEXITY.worse_by(100.0, 105.0)
        (3.0, 5.0)
        >>> metric_named("loss").worse_by(-2.0, -1.5), metric_named("auc").worse_by(0.5, 0.6)
        (25.0, -20.0)
        """
        if self.scale == "percent":
            return round(100 * (base - value), 9)
        if not math.isfinite(base):
            return math.nan
        if self.scale == "log":
            return round(100 * (value / base - 1), 9)
        worse = value - base if self.lower_is_better else base - value
        return round(100 * worse / _size(base), 9)

    def better_interval(self, low: float, high: float, base: float) -> tuple[float, float]:
        """Return an interval of a difference on `on_scale` as one of how much better that is.

        Args:
          low: Lower end.
          high: Upper end.
          base: Score that is compared with.

        Returns:
          (low, high) in `unit`; above 0 is better.

        >>> metric_named("loss").better_interval(-1.0, 0.5, 10.0)
        (-5.0, 10.0)
        """
        if self.scale == "percent":
            return low, high
        if self.scale == "log":
            return -100 * math.expm1(high), -100 * math.expm1(low)
        ends = 100 * low / _size(base), 100 * high / _size(base)
        return (0.0 - ends[1], 0.0 - ends[0]) if self.lower_is_better else ends

    def badness(self, score: float | None) -> float:
        """Return a number that is lower for a better score, and infinite for None."""
        if score is None:
            return math.inf
        return score if self.lower_is_better else -score

    def on_scale(self, scores: Iterable[float]) -> list[float]:
        """Return scores on the scale of their means: percent, the logarithm, or as they are."""
        if self.scale == "log":
            return [math.log(score) for score in scores]
        return [100 * score if self.scale == "percent" else score for score in scores]

    @property
    def ends_on_scale(self) -> tuple[float, float]:
        """Lowest and highest possible score on the scale of `on_scale`.

        >>> ACCURACY.ends_on_scale, PERPLEXITY.ends_on_scale
        ((0.0, 100.0), (0.0, inf))
        """
        low, high = self.on_scale([self.lowest, self.highest])
        return low, high

    def tolerance(self, difference: float, base: float) -> float:
        """Return a difference, given in `unit`, as one of the numbers that the limit is fitted to.

        These are logarithms where `scale` is "log".

        >>> metric_named("loss").tolerance(5.0, 10.0)
        0.5
        """
        if self.scale == "log":
            return math.log1p(difference / 100)
        return difference / 100 if self.scale == "percent" else difference / 100 * _size(base)

    def show(self, value: float | None) -> str:
        """Return the score as text; "diverged" if it is None or not finite.

        >>> ACCURACY.show(0.9866), PERPLEXITY.show(116.04), metric_named("loss").show(2987.654)
        ('98.66 %', '116.04', '2988')
        """
        if value is None or not math.isfinite(value):
            return "diverged"
        return self.digits(value) + " %" * (self.scale == "percent")

    def digits(self, value: float) -> str:
        """Return the digits of a finite score, of a percentage without its sign."""
        return f"{value:.4g}" if self.scale == "plain" else f"{self.shown(value):.2f}"

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
        return 100 * value if self.scale == "percent" else value


def middle_half(scores: Sequence[float]) -> tuple[float, float]:
    """Return the lower and the upper quartile of scores; NaN if one is infinite.

    One bad seed of five does not move them, as it would the range.

    >>> middle_half([0.1, 0.96, 0.97, 0.98, 0.99])
    (0.96, 0.98)
    """
    if not all(math.isfinite(score) for score in scores):
        return math.nan, math.nan
    if len(scores) == 1:
        return scores[0], scores[0]
    low, _, high = statistics.quantiles(scores, n=4, method="inclusive")
    return low, high


def _size(score: float) -> float:
    """Return the size of a score that another is compared with, above 0."""
    return max(abs(score), sys.float_info.min)


ACCURACY = Metric("accuracy", "accuracy", "percent", 0.0, 1.0)
PERPLEXITY = Metric("perplexity", "perplexity", "log", 1.0)
_KNOWN = {
    "accuracy": ACCURACY,
    "perplexity": PERPLEXITY,
    "exact_match": Metric("exact_match", "exact match", "percent", 0.0, 1.0),
    "r2": Metric("r2", "R^2", "percent", highest=1.0),
}


def metric_named(name: str) -> Metric:
    """Return the metric of this name; a metric that lbopt does not know is on its plain scale."""
    return _KNOWN.get(name, Metric(name, name.replace("_", " ")))


def trivial_loss(run: FinishedTrial) -> float | None:
    """Return the loss of outputs that do not look at the input; None if unknown.

    Lines of earlier versions have the number of classes instead, or nothing.
    """
    if run.metric is not None:
        return run.trivial_loss
    outputs = run.outputs or 0
    return math.log(outputs) if outputs > 1 else None


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean; None if a value is missing or not finite, or if there are none.

    >>> mean([1.0, 2.0]), mean([1.0, None]), mean([])
    (1.5, None, None)
    """
    found = list(values)
    known = [value for value in found if value is not None and math.isfinite(value)]
    return statistics.fmean(known) if known and len(known) == len(found) else None
