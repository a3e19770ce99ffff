"""Build a `Study` from its config and the lines of `results.jsonl`, once."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from lbopt import _typed_json
from lbopt.config import SearchConfig, SweepConfig, completed_json
from lbopt.report._colours import arm_colours, optimizer_look
from lbopt.report.study._arm_limit import from_smallest, with_limit
from lbopt.report.study._critical_batch import CriticalBatch, measure_critical_batch
from lbopt.report.study._critical_growth import CriticalGrowth, Evaluated, measure_growth
from lbopt.report.study._metric import ACCURACY, Metric, mean, metric_named, trivial_loss
from lbopt.report.study._statistics import advantage, can_be
from lbopt.report.study._steps_to_target import Scaling, measure_scaling
from lbopt.report.study._study import (
    ArmResults,
    Candidate,
    CellResults,
    Edges,
    MeanDiffusion,
    Means,
    Noise,
    Peak,
    Points,
    Study,
    TargetCost,
    Waterfall,
    WaterfallStep,
    factors_of,
)
from lbopt.report.study._three_term_law import LawEstimate, NoLaw, fit_three_term_law
from lbopt.sweep import (
    ExampleScores,
    FinishedTrial,
    Numbers,
    Probes,
    by_step,
    finished_trial,
    is_learned,
    metric_of,
    noise_scales,
    trial_identity,
)
from lbopt.sweep.search import can_widen, edge_of, is_beyond

_CUT = 0.99

ScoredRun: TypeAlias = tuple[FinishedTrial, ExampleScores | None]
"""A run and its scores on single test examples."""


def read_study(
    config: Mapping[str, Any],
    records: Iterable[Mapping[str, Any]],
    examples: Mapping[tuple, ExampleScores] | None = None,
) -> Study:
    """Return a study, complete or not.

    Args:
      config: The study's config as JSON data; an earlier version may have written it.
      records: Lines of `results.jsonl`, in any order.
      examples: Scores on single test examples, from `lbopt.sweep.read_examples`.
    """
    found = list(records)
    names = sorted({metric_of(record) for record in found}, reverse=True)
    metric = metric_named(names[0] if names else "accuracy")
    scored = examples or {}
    runs = [(finished_trial(record), scored.get(trial_identity(record))) for record in found]
    return _study(
        _typed_json.convert(completed_json(SweepConfig, config), SweepConfig), metric, runs
    )


def _study(config: SweepConfig, metric: Metric, runs: Sequence[ScoredRun]) -> Study:
    by_cell: dict[tuple[str, int], list[ScoredRun]] = {}
    for run, examples in runs:
        by_cell.setdefault((run.arm, run.global_batch_size), []).append((run, examples))

    arms = []
    colours = [
        optimizer_look(arm.optimizer.name, arm.optimizer.nesterov).colour for arm in config.arms
    ]
    shown = arm_colours(colours)
    for place, settings in enumerate(config.arms):
        search = config.arm_search(place)
        found = [
            (size, by_cell.get((settings.name, size), [])) for size in config.global_batch_sizes
        ]
        cells = tuple(
            _cell(size, runs, search, metric, bool(config.train.target_metric))
            for size, runs in found
            if any(run.is_final for run, _ in runs)
        )
        arm = ArmResults(place, settings, config.arm_train(place), search, cells, shown[place])
        twins = colours[:place].count(colours[place])
        arms.append(dataclasses.replace(arm, twins=twins))
    study = Study(config, metric, tuple(arms), None, tuple(run for run, _ in runs))
    judged = tuple(_judged(study, arm) for arm in arms)
    return dataclasses.replace(study, arms=judged, waterfall=_waterfall(study))


def _judged(study: Study, arm: ArmResults) -> ArmResults:
    """Return an arm with its limit, failure, scaling, critical batch, its growth, and the law."""
    return dataclasses.replace(
        with_limit(study, arm),
        scaling=_scaling(study, arm),
        critical_batch=_critical_batch(study, arm),
        growth=_growth(study, arm),
        law=_law(study, arm),
    )


def _scaling(study: Study, arm: ArmResults) -> Scaling | None:
    """Return the steps to the target over the batch sizes from the smallest to the first gap."""
    cells = from_smallest(study, arm)
    if not study.has_target or not cells:
        return None
    found = measure_scaling([cell.steps_of_seeds for cell in cells], seed=(1, arm.place))
    return dataclasses.replace(found, savings=(), perfect_until=None) if arm.grows else found


def _critical_batch(study: Study, arm: ArmResults) -> CriticalBatch | None:
    """Return the fit of the steps to the target, over the batch sizes that reached it."""
    if not study.has_target or not arm.cells or arm.grows:
        return None
    steps = [cell.steps_of_seeds for cell in arm.cells]
    return measure_critical_batch(steps, seed=(2, arm.place))


def _growth(study: Study, arm: ArmResults) -> CriticalGrowth | None:
    """Return the fits at easier targets, by the scores on validation during the runs."""
    if not study.has_target or arm.grows:
        return None
    name = study.config.train.target_metric.removeprefix("eval/")
    cells = [_evaluated(cell, name) for cell in arm.cells]
    if not all(cell.runs for cell in cells):
        return None
    return measure_growth(
        cells,
        study.config.train.target_value,
        lower_is_better=metric_named(name).lower_is_better,
        seed=(2, arm.place),
    )


def _evaluated(cell: CellResults, name: str) -> Evaluated:
    """Return the scores of a cell's runs; no runs if one that did not diverge has none."""
    column = f"validation_{name}"
    runs = []
    for run in cell.final:
        found = run.evaluations or {}
        if column not in found and not run.diverged:
            return Evaluated(cell.global_batch_size, ())
        steps, scores = (np.array(found.get(key, ()), float) for key in ("step", column))
        runs.append((steps[: len(scores)], scores))
    return Evaluated(cell.global_batch_size, tuple(runs))


def _law(study: Study, arm: ArmResults) -> LawEstimate | None:
    """Return the three-term law of the final losses on validation; None without a result."""
    if not arm.cells:
        return None
    if study.has_target and study.config.train.stop_at_target:
        return NoLaw("stops_at_target")
    if arm.grows:
        return NoLaw("batch_grows")
    points = [point for cell in arm.cells for point in _final_losses(cell)]
    return fit_three_term_law(*zip(*points, strict=True)) if points else NoLaw("few_losses")


def _final_losses(cell: CellResults) -> list[tuple[float, float, float]]:
    """Return (batch size, steps, mean validation loss) of a cell at each length of its runs.

    The full length has the final runs. A shorter one has the best candidate of the search, since
    each of its runs has the whole schedule.
    """
    losses: dict[float, list[float]] = {}
    full = cell.means.validation_loss
    if full is not None:
        losses[cell.first.steps] = [full]

    shorter: dict[tuple, list[FinishedTrial]] = {}
    for run in cell.search:
        if run.fidelity < 1:
            shorter.setdefault((run.steps, factors_of(run)), []).append(run)
    for (steps, _), runs in shorter.items():
        found = mean(None if run.diverged else run.validation_loss for run in runs)
        if found is not None and steps < cell.first.steps:
            losses.setdefault(steps, []).append(found)

    best = [(steps, min(each)) for steps, each in losses.items()]
    return [(cell.global_batch_size, steps, loss) for steps, loss in best if loss > 0]


# ---- cells


def _cell(
    size: int, runs: Sequence[ScoredRun], search: SearchConfig, metric: Metric, has_target: bool
) -> CellResults:
    searched = tuple(run for run, _ in runs if not run.is_final)
    # Sorted by seed: a bootstrap must not depend on the order in which trials ended.
    tested = sorted((pair for pair in runs if pair[0].is_final), key=lambda pair: pair[0].seed)
    final = tuple(run for run, _ in tested)

    tried = _candidates(searched, metric)
    scores = metric.scores(final, "test")
    cut = cut_warmups(tried)
    probes = [run.probes for run in final if run.probes]
    lipschitz = _means((one.step, one.lipschitz) for one in probes)
    peaks = [_peak(run.probes) for run in final if run.probes and not run.diverged]

    return CellResults(
        global_batch_size=size,
        search=searched,
        final=final,
        examples=tuple(examples for _, examples in tested),
        candidates=tried,
        scores=scores,
        test=metric.spread(scores),
        validation=metric.spread(metric.scores(final, "validation")).mean,
        means=_mean_scores(final, metric),
        learned=learned(final),
        edges=_edges(search, final[0], tried, cut),
        cut_warmups=cut,
        num_beyond=_num_beyond(search, tried),
        distance=mean(run.distance for run in final),
        diffusion=_diffusion(final),
        target=_target(final) if has_target else None,
        noise=_noise(probes),
        lipschitz=lipschitz,
        peaks=tuple(peak for peak in peaks if peak),
        phi=mean(value for _, value in _means((one.step, one.phi) for one in probes)),
    )


def _candidates(search: Iterable[FinishedTrial], metric: Metric) -> tuple[Candidate, ...]:
    groups: dict[tuple, list[FinishedTrial]] = {}
    for run in search:
        groups.setdefault((factors_of(run), run.fidelity), []).append(run)
    return tuple(
        Candidate(
            factors,
            fidelity,
            runs[0].warmup_steps,
            len(runs),
            sum(run.diverged for run in runs),
            metric.spread(metric.scores(runs, "validation")).mean,
        )
        for (factors, fidelity), runs in sorted(groups.items(), key=lambda pair: pair[0])
    )


def _mean_scores(final: Sequence[FinishedTrial], metric: Metric) -> Means:
    """Return mean losses and accuracies.

    A run that diverged has no accuracy: outputs that are not numbers score as the first class.
    """
    kept = [None if run.diverged else run for run in final]
    means = Means(
        *(
            mean(None if run is None else getattr(run, f"{split}_{name}") for run in kept)
            for split in ("train", "validation", "test")
            for name in ("loss", "accuracy")
        )
    )
    if metric is not ACCURACY:
        return means
    validation, test = (
        metric.spread(metric.scores(final, split)).mean for split in ("validation", "test")
    )
    return dataclasses.replace(means, validation_accuracy=validation, test_accuracy=test)


def learned(final: Sequence[FinishedTrial]) -> bool | None:
    """Return whether the last epoch's loss is 5 % below the first step's and a trivial model's.

    The margin is larger than the differences between batches. A network whose gradients are all
    rounded to zero keeps its first loss, or weight decay reduces it to a uniform guess, or to the
    mean of the targets. Losses are means over the seeds; None if a seed has none.
    """
    curves = [run.curve.train_loss if run.curve else None for run in final]
    first = mean(curve[0] if curve else None for curve in curves)
    last = mean(run.last_epoch_loss for run in final)
    if first is None or last is None:
        return None
    trivial = trivial_loss(final[0])
    least = first if trivial is None else min(first, trivial)
    return is_learned(last, least)


def _target(final: Sequence[FinishedTrial]) -> TargetCost:
    def median(values: Iterable[float | None]) -> float | None:
        found = statistics.median(math.inf if value is None else value for value in values)
        return found if math.isfinite(found) else None

    return TargetCost(
        sum(run.steps_to_target is not None for run in final),
        median(run.steps_to_target for run in final),
        median(run.examples_to_target for run in final),
        max(run.steps_run for run in final),
    )


def _diffusion(final: Sequence[FinishedTrial]) -> MeanDiffusion | None:
    fits = [run.diffusion for run in final if run.diffusion]
    log_r2 = mean(fit.log.r2 for fit in fits)
    power_r2 = mean(fit.power.r2 for fit in fits)
    exponent = mean(fit.power.exponent for fit in fits)
    if log_r2 is None or power_r2 is None or exponent is None:
        return None
    return MeanDiffusion(log_r2, power_r2, exponent, len(fits))


# ---- edges of the search


def _edges(
    search: SearchConfig,
    chosen: FinishedTrial,
    tried: Iterable[Candidate],
    cut: Collection[float],
) -> Edges:
    """Return the chosen factors at an edge; factors of zero and warmups that are cut have none."""
    full = [one.factors for one in tried if one.fidelity == 1]
    rate, warmup, decay = (
        edge_of(search, name, factor, [getattr(one, name) for one in full]) != 0
        for name, factor in factors_of(chosen)._asdict().items()
    )
    warms = chosen.warmup_steps > 0 and chosen.warmup_factor not in cut
    return Edges(rate, warms and warmup, chosen.weight_decay > 0 and decay)


def _num_beyond(search: SearchConfig, tried: Iterable[Candidate]) -> int:
    if not can_widen(search):
        return 0
    return sum(one.fidelity == 1 and is_beyond(search, one.factors) for one in tried)


def cut_warmups(tried: Iterable[Candidate]) -> frozenset[float]:
    """Return the factors whose warmups would outlast the run, and so end one step before it."""
    full = [one for one in tried if one.fidelity == 1 and one.factors.warmup > 0]
    own = max((one.warmup_steps / one.factors.warmup for one in full), default=0.0)
    return frozenset(
        one.factors.warmup for one in full if one.warmup_steps < _CUT * own * one.factors.warmup
    )


# ---- probes


def _noise(probes: Sequence[Probes]) -> Noise | None:
    found = noise_scales(probes)
    if not found:
        return None
    steps, scales = zip(*found, strict=True)
    return Noise(statistics.median(scales), steps, scales)


def _peak(probes: Probes) -> Peak | None:
    pairs = zip(probes.step, probes.lipschitz or (), strict=False)
    curve = [(int(step), value) for step, value in pairs if value is not None]
    if len(curve) < 2:
        return None
    step, _ = max(curve, key=lambda pair: pair[1])
    return Peak(step, step in (curve[0][0], curve[-1][0]))


def _means(series: Iterable[tuple[Sequence[float], Numbers | None]]) -> Points:
    """Return the mean over the seeds that have a number, at every step."""
    return tuple((step, statistics.fmean(values)) for step, values in by_step(series).items())


# ---- the waterfall


def _waterfall(study: Study) -> Waterfall | None:
    """Return the waterfall at the largest batch; None if an arm has no finite result there."""
    largest = study.sizes[-1]
    metric = study.metric
    arms = {arm.name: arm for arm in study.arms}
    cells = [arms[name].cell(largest) for name in study.config.waterfall if name in arms]
    found = [cell for cell in cells if cell is not None and cell.test.mean is not None]
    if len(cells) < 2 or len(found) < len(cells):
        return None

    steps = []
    for before, name, cell in zip([None, *found], study.config.waterfall, found, strict=False):
        gain = () if before is None else _gain(metric, before.scores, cell.scores)
        steps.append(WaterfallStep(name, cell.test.mean or 0.0, cell.test.std or 0.0, *gain))
    return Waterfall(largest, tuple(steps))


def _gain(
    metric: Metric, before: Sequence[float], after: Sequence[float]
) -> tuple[float, float | None, float | None, float | None, bool | None]:
    """Return the gain, its interval, its spread over single seeds, and its significance."""
    base = metric.centre(before)
    noise = None
    if min(len(before), len(after)) > 1:
        both = math.hypot(statistics.stdev(before), statistics.stdev(after))
        noise = abs(metric.worse_by(base, base - both))
    gain = 0.0 - metric.worse_by(base, metric.centre(after))
    interval = advantage(metric, after, before)
    if interval is None:
        return gain, None, None, noise, None
    low, high = interval
    told_apart = low > 0 or high < 0
    if not can_be(metric, after, before):
        return gain, None, None, noise, told_apart
    return gain, low, high, noise, told_apart


# ---- curves of figures


def mean_curve(series: Iterable[tuple[Sequence[float], Numbers | None]]) -> Points:
    """Return the mean over seeds at the steps at which every one of them has a number.

    Runs that stop at a target or diverge differ in length, and a mean over the remaining runs would
    jump at the end of each. A seed whose column is empty or missing does not count.

    >>> mean_curve([([1, 2, 3], [1.0, 2.0, 9.0]), ([1, 2], [3.0, 4.0])])
    ((1, 2.0), (2, 3.0))
    """
    kept = [(steps, column) for steps, column in series if column]
    return tuple(
        (step, statistics.fmean(values))
        for step, values in by_step(kept).items()
        if len(values) == len(kept)
    )


def positive(curve: Points) -> Points:
    """Return the part of a curve that a logarithmic axis can show."""
    return tuple((step, value) for step, value in curve if value > 0)
