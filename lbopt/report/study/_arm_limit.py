"""The limit of an arm of a study, and the failure past it: to optimise or to generalise."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lbopt.report.study._limit import (
    COARSEST_FACTOR,
    FEWEST_SEEDS,
    REFERENCE_FACTOR,
    CannotTell,
    CellScores,
    Fit,
    Limit,
    LimitEstimate,
    NotReached,
    Reason,
    estimate_limit,
    resample_limits,
)
from lbopt.report.study._metric import ACCURACY, PERPLEXITY, Metric, mean, trivial_loss
from lbopt.report.study._study import ArmResults, CellResults, Failure, Study
from lbopt.report.study._words import quoted, say
from lbopt.sweep import ExampleScores

OPTIMISE = "optimise"
GENERALISE = "generalise"
_MOST = 0.5


def with_limit(study: Study, arm: ArmResults) -> ArmResults:
    """Return the arm with its limit and the failure past it.

    Both stay None if the study has no limits, or the smallest batch has no result yet.
    """
    cells = from_smallest(study, arm)
    if not study.has_limits or not cells:
        return arm

    first = cells[0]
    scores = _scores(cells, study.metric)
    # Without a level to compare with, the mean of the other seeds would be that of the lucky ones.
    if scores is None or first.diverged or not math.isfinite(study.metric.centre(first.scores)):
        return dataclasses.replace(arm, limit=CannotTell("diverged"))
    if first.learned is False:
        return dataclasses.replace(arm, limit=CannotTell("not_learned"))

    limit = estimate_limit(scores, **_options(study, arm, scores))
    failed = None if limit.fit is None else _failure(cells, limit.fit, study.metric)
    return dataclasses.replace(
        arm, limit=limit, limit_over_examples=scores[0].values.ndim == 2, failure=failed
    )


def resampled(study: Study, arm: ArmResults) -> np.ndarray:
    """Return the bootstrap limits [resamples] of an arm whose limit has a fit."""
    scores = _scores(from_smallest(study, arm), study.metric)
    assert scores is not None
    return resample_limits(scores, **_options(study, arm, scores))


def _options(study: Study, arm: ArmResults, scores: Sequence[CellScores]) -> dict[str, Any]:
    """Return the arguments of the estimate; arms that are compared need different seeds."""
    metric = study.metric
    small = [np.mean(one.scores) for one in scores if one.global_batch_size <= _most_small(study)]
    return {
        "tolerance": metric.tolerance(study.config.limit_points, float(np.mean(small))),
        "higher_is_better": not metric.lower_is_better,
        "seed": (0, arm.place),
    }


def on_scores(metric: Metric, value: float) -> float:
    """Return a value of the fit as a score: itself, or the perplexity of a mean loss."""
    return math.exp(value) if metric.scale == "log" else value


def small_batch_score(study: Study, arm: ArmResults) -> float | None:
    """Return the score of an arm over small batches; None without a fit."""
    fit = arm.limit.fit if arm.limit else None
    return None if fit is None else on_scores(study.metric, fit.reference)


def small_batches(study: Study) -> list[int]:
    """Return the batch sizes whose mean score is the reference."""
    return [size for size in study.sizes if size <= _most_small(study)]


def _most_small(study: Study) -> float:
    return REFERENCE_FACTOR * study.sizes[0]


def from_smallest(study: Study, arm: ArmResults) -> list[CellResults]:
    """Return the cells up to the first gap that an unfinished study has."""
    pairs = zip(arm.cells, study.sizes, strict=False)
    return [
        cell for cell, _ in itertools.takewhile(lambda p: p[0].global_batch_size == p[1], pairs)
    ]


# ---- scores


def _scores(cells: Sequence[CellResults], metric: Metric) -> list[CellScores] | None:
    """Return scores, mean losses instead of perplexities; `_worst` is that of a diverged run.

    The scores are per test example if every run that did not diverge has these.

    Returns:
      The scores; None if a run diverged and the worst score is not known.
    """
    worst = _worst(cells, metric)

    counts = {len(one.values) if one else 0 for cell in cells for one in _examples(cell)}
    by_example = len(counts) == 1 and counts != {0} and _weighted_alike(cells)
    shape = tuple(counts) if by_example else ()
    weights = next((one.weights for cell in cells for one in _examples(cell) if one), None)

    found = []
    for cell in cells:
        known = _examples(cell) if by_example else _seed_scores(cell, metric)
        each = iter(one.values if isinstance(one, ExampleScores) else one for one in known)
        values = [worst if broken else next(each) for broken in _broken(cell)]
        stacked = np.stack([np.broadcast_to(np.asarray(one, float), shape) for one in values])
        if not np.isfinite(stacked).all():
            return None
        found.append(CellScores(cell.global_batch_size, stacked, weights if by_example else None))
    return found


def _worst(cells: Sequence[CellResults], metric: Metric) -> float:
    """Return the score of a diverged run: that of outputs that do not look at the input.

    It is 0 for a metric that is better the higher it is. For perplexity and the loss it is the loss
    of equal odds, or of the mean target; where that is not known, the loss of the first step. It is
    never better than the score of a run that did not diverge, except for perplexity. Infinite if it
    is not known, as for other metrics that are better the lower they are.
    """
    runs = [run for cell in cells for run in cell.final]
    if metric is PERPLEXITY:
        outputs = max(run.outputs or 0 for run in runs)
        return math.log(outputs) if outputs > 1 else math.inf
    known = [score for cell in cells for score in _seed_scores(cell, metric)]
    if not metric.lower_is_better:
        return min([0.0, *known])
    if metric.name != "loss":
        return math.inf
    curves = [run.curve.train_loss for run in runs if run.curve and run.curve.train_loss]
    first = mean(curve[0] for curve in curves if curve[0] is not None)
    trivial = trivial_loss(runs[0])
    trivial = first if trivial is None else trivial
    return math.inf if trivial is None else max([trivial, *known])


def _weighted_alike(cells: Sequence[CellResults]) -> bool:
    """Return whether all runs weight the test examples alike: a model may decide what counts."""
    found = [one.weights for cell in cells for one in _examples(cell) if one]
    return all(np.array_equal(one, found[0]) for one in found)


def _broken(cell: CellResults) -> list[bool]:
    """Return for every final run whether it diverged or its score is not finite."""
    pairs = zip(cell.final, cell.scores, strict=True)
    return [bool(run.diverged) or not math.isfinite(score) for run, score in pairs]


def _seed_scores(cell: CellResults, metric: Metric) -> list[float]:
    """Return the scores, or mean losses, of the runs that are not broken."""
    pairs = zip(cell.scores, _broken(cell), strict=True)
    kept = [score for score, broken in pairs if not broken]
    return [math.log(score) for score in kept] if metric.scale == "log" else kept


def _examples(cell: CellResults) -> list[ExampleScores | None]:
    """Return the scores of the test examples of the runs that are not broken."""
    pairs = zip(cell.examples, _broken(cell), strict=True)
    return [one for one, broken in pairs if not broken]


# ---- failures


def _failure(cells: Sequence[CellResults], fit: Fit, metric: Metric) -> Failure | None:
    """Tell a failure to optimise from one to generalise, at the first batch size past the limit.

    The loss of test score against the small batches of the reference is compared with that of
    training score, in percentage points of accuracy or else in the mean loss. If
    training lost more than half as much as the test, the model failed to optimise; otherwise it
    failed to generalise.
    """
    if fit.first_past is None:
        return None
    (past,) = (cell for cell in cells if cell.global_batch_size == fit.first_past)
    most = REFERENCE_FACTOR * cells[0].global_batch_size
    small = [cell for cell in cells if cell.global_batch_size <= most]
    # If the score falls among the small batches themselves, only those before the fall count.
    before = [cell for cell in small if cell.global_batch_size < fit.first_past]
    return failure(before, past, metric)


def failure(small: Sequence[CellResults], past: CellResults, metric: Metric) -> Failure:
    """Return the failure at `past` in comparison with the cells of small batches."""
    test, train = (_lost(small, past, split, metric) for split in ("test", "train"))
    share = train / test if test is not None and train is not None and test > 0 else None
    kind = _kind(past, train, share)
    return Failure(past.global_batch_size, kind, past.diverged, past.seeds, test, train, share)


def _kind(past: CellResults, train: float | None, share: float | None) -> str | None:
    """Return the kind of failure; without training means, divergence alone decides."""
    if train is None:
        return OPTIMISE if past.diverged else None
    if share is None:  # the mean test score did not fall
        return OPTIMISE if train > 0 else GENERALISE
    return OPTIMISE if share > _MOST else GENERALISE


def _lost(
    small: Sequence[CellResults], past: CellResults, split: str, metric: Metric
) -> float | None:
    name = "accuracy" if metric is ACCURACY else "loss"
    before = mean(cell.means.of(split, name) for cell in small)
    after = past.means.of(split, name)
    if before is None or after is None:
        return None
    return 100 * (before - after) if metric is ACCURACY else after - before


# ---- words

_WHY: dict[Reason, str] = {
    "few_batch_sizes": "no batch of more than {{ factor }} times the smallest has a result",
    "few_seeds": "there are too few seeds; it takes {{ fewest }} at every batch size",
    "no_plateau": """its score falls by more than {{ near }} among the small batches themselves, of
        up to {{ small }}; smaller ones have to be tried""",
    "coarse_batch_sizes": """its score falls between batch sizes that differ by more than a factor
        of {{ coarsest }}; those between them have to be tried""",
    "wide_interval": """its 95 % interval goes from the small batches to beyond the largest; more
        seeds are needed""",
    "not_learned": "it did not learn at the smallest batch, {{ first.global_batch_size }}",
    "diverged": """{% if broken.diverged %}it diverged{{ seeds }}{% else %}its score is not finite
        {%- endif %} at {{ "the smallest batch, " if broken is sameas first }}
        {{- broken.global_batch_size }}""",
}


def why_unknown(study: Study, arm: ArmResults) -> str:
    """Return why the limit of an arm cannot be told, as a clause."""
    assert isinstance(arm.limit, CannotTell)
    broken = next((cell for cell in arm.cells if any(_broken(cell))), arm.cells[0])
    return say(
        _WHY[arm.limit.reason],
        factor=f"{REFERENCE_FACTOR:g}",
        coarsest=f"{COARSEST_FACTOR:g}",
        fewest=FEWEST_SEEDS,
        near=study.metric.amount(study.config.limit_points),
        small=small_batches(study)[-1],
        first=arm.cells[0],
        broken=broken,
        seeds=of_seeds(broken),
    )


def limit_text(limit: LimitEstimate) -> str:
    """Return a limit as a table shows it."""
    if isinstance(limit, CannotTell):
        return "unknown"
    return f"{limit.global_batch_size:.0f}" if isinstance(limit, Limit) else f"> {_largest(limit)}"


def limit_with_interval(limit: LimitEstimate) -> str:
    """Return a limit and its interval as a legend shows them."""
    known = "" if isinstance(limit, CannotTell) else interval_text(limit)
    return limit_text(limit) + (f", {known}" if known else "")


def interval_text(limit: Limit | NotReached) -> str:
    """Return the interval of a limit; "" if even its lower end is beyond the largest batch."""
    high = limit.high if isinstance(limit, Limit) else math.inf
    return "" if math.isinf(limit.low) else range_text(limit.low, high, _largest(limit))


def range_text(low: float, high: float, largest: int) -> str:
    """Return a range of batch sizes as text; an infinite end is beyond the largest batch.

    >>> range_text(30, 60, 64), range_text(30, math.inf, 64), range_text(math.inf, math.inf, 64)
    ('30 to 60', '30 to beyond 64', 'beyond 64')
    """
    if math.isinf(low):
        return f"beyond {largest}"
    return f"{low:.0f} to " + (f"beyond {largest}" if math.isinf(high) else f"{high:.0f}")


def _largest(limit: Limit | NotReached) -> int:
    return limit.fit.global_batch_sizes[-1]


def of_seeds(counted: CellResults | Failure) -> str:
    """Return the number of seeds whose training diverged, as a clause; "" if all diverged."""
    if counted.diverged == counted.seeds:
        return ""
    return f" with {counted.diverged} of {counted.seeds} seeds"


def unknown_limits(study: Study, arms: Sequence[ArmResults]) -> list[str]:
    """Return a clause for each arm whose limit cannot be told, with the reason."""
    return [
        f"the limit of {quoted(arm.name)} cannot be told: {why_unknown(study, arm)}"
        for arm in arms
        if isinstance(arm.limit, CannotTell)
    ]
