"""The findings of a study, in sentences made from its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lbopt.report._agreement import WITHIN
from lbopt.report.study._arm_limit import (
    interval_text,
    of_seeds,
    on_scores,
    small_batches,
    why_unknown,
)
from lbopt.report.study._claim_batch_schedule import growing_batches_keep_the_score
from lbopt.report.study._claim_curvature import lipschitz_peak_stays
from lbopt.report.study._claim_diffusion import diffusion_is_logarithmic
from lbopt.report.study._claim_growth import critical_batch_grows
from lbopt.report.study._claim_half_life import half_life_of_b2_is_better
from lbopt.report.study._claim_limits import layerwise_legw_goes_further
from lbopt.report.study._claim_matrix import matrix_optimizers_use_larger_batches
from lbopt.report.study._claim_noise_scale import (
    noise_scale_predicts_critical_batch,
    noise_scale_predicts_limit,
)
from lbopt.report.study._claim_precision import aps_keeps_accuracy
from lbopt.report.study._claim_rule import rules_need_no_search
from lbopt.report.study._claim_warmup import constant_warmup_steps
from lbopt.report.study._critical_batch import OVERHEAD
from lbopt.report.study._critical_measures import branches_apart, disagreements, interval_words
from lbopt.report.study._decision import seeds_clause
from lbopt.report.study._finding_search import search_findings
from lbopt.report.study._limit import CannotTell, Limit
from lbopt.report.study._metric import ACCURACY, PERPLEXITY, Metric
from lbopt.report.study._statistics import Difference, ahead_of
from lbopt.report.study._steps_to_target import EXCESS
from lbopt.report.study._study import (
    ArmResults,
    CellResults,
    Failure,
    Study,
    WaterfallStep,
    comparable,
)
from lbopt.report.study._target_words import perfect_text, saving_text
from lbopt.report.study._words import Claim, listed, quoted, say


def claims_of(study: Study) -> list[Claim]:
    """Return the claims that the study can judge; none if it is unfinished."""
    if not study.complete:
        return []
    # The arms of a waterfall differ in more settings than the claim compares.
    compares = study.has_limits and not study.config.waterfall
    found = [
        *(layerwise_legw_goes_further(study) if compares else []),
        *matrix_optimizers_use_larger_batches(study),
        constant_warmup_steps(study),
        lipschitz_peak_stays(study),
        noise_scale_predicts_limit(study),
        noise_scale_predicts_critical_batch(study),
        critical_batch_grows(study),
        diffusion_is_logarithmic(study),
        aps_keeps_accuracy(study),
        *growing_batches_keep_the_score(study),
        *(rules_need_no_search(study) if compares else []),
        half_life_of_b2_is_better(study) if compares else None,
    ]
    return [claim for claim in found if claim is not None]


def findings_of(study: Study, claims: Sequence[Claim]) -> list[str]:
    """Return the findings: limits, target, the largest batch, claims, waterfall and search.

    If the study is unfinished, the first sentence says how complete it is; without a tested cell
    there is no other sentence.
    """
    if not study.measured:
        return _completeness(study)
    warmup, *searched = search_findings(study)
    found = [
        *_completeness(study),
        *([_limit(study, arm) for arm in study.measured] if study.has_limits else []),
        *_target(study),
        _branches(study),
        _at_largest(study) if study.has_limits else _steps_at_largest(study),
        *(claim.sentence for claim in claims),
        warmup,
        _waterfall(study),
        *searched,
    ]
    return [sentence for sentence in found if sentence]


_INCOMPLETE = """The study is not complete: {{ study.num_complete }} of {{ study.num_cells }}
    cells (arm and batch size) have all their final trials,
    with {{ study.runs | length }} trials so far."""


def _completeness(study: Study) -> list[str]:
    return [] if study.complete else [say(_INCOMPLETE, study=study)]


# ---- limits

_KEEPS = """{{ arm.name | name }} stays within {{ near }} of its score over small batches
    ({{ level }} at {{ small | listed }})
    {%- if reached %} up to batch {{ "%.0f" % arm.limit.global_batch_size }}
    {%- elif end == largest %} up to the largest batch, {{ end }}: its limit was not reached
    {%- else %} at every batch measured so far, up to {{ end }}
    {%- endif %}
    {%- if interval %} (95 % interval {{ interval }}){% endif %}"""


def _limit(study: Study, arm: ArmResults) -> str:
    if arm.limit is None:
        return f"{quoted(arm.name)} has no result at the smallest batch yet."

    if isinstance(arm.limit, CannotTell):
        kept = f"The limit of {quoted(arm.name)} cannot be told: {why_unknown(study, arm)}"
    else:
        fit = arm.limit.fit
        kept = say(
            _KEEPS,
            arm=arm,
            near=study.metric.amount(study.config.limit_points),
            level=study.metric.show(on_scores(study.metric, fit.reference)),
            small=small_batches(study),
            reached=isinstance(arm.limit, Limit),
            end=fit.global_batch_sizes[-1],
            largest=study.sizes[-1],
            interval=interval_text(arm.limit),
        )
    return f"{kept}{_past_limit(study, arm)}."


def _past_limit(study: Study, arm: ArmResults) -> str:
    """Return an arm's score and failure at the first batch past the limit, as a clause."""
    if arm.failure is None:
        return ""
    size = arm.failure.global_batch_size
    metric = study.metric
    (cell,) = (one for one in arm.cells if one.global_batch_size == size)
    score = metric.show(cell.test.mean)
    return f"; at {size} it has {score} and {_failed(arm.failure, metric)}"


def _failed(failure: Failure, metric: Metric) -> str:
    """Return the kind of failure at the first batch past the limit, as a clause."""
    test = failure.test_lost
    train = failure.train_lost
    if failure.kind is None:
        return (
            "whether training failed too cannot be told, as training has no finite score at both "
            "batch sizes"
        )
    if train is None or test is None:
        why = f"training diverged{of_seeds(failure)}"
    elif failure.train_share is None:
        training = "training loss did" if train > 0 else "training loss did not either"
        why = f"its mean test loss did not rise, its {training}"
    elif metric is ACCURACY:
        why = f"test accuracy lost {test:.2f} points, training accuracy {train + 0.0:.2f}"
    elif metric is PERPLEXITY:
        why = f"the test loss rose by {test:.3f}, the training loss by {train:.3f}"
    else:
        why = f"the test loss rose by {test:.3g}, the training loss by {train:.3g}"
    return f"fails to {failure.kind}: {why}"


# ---- the largest batch

_RANKING = (
    """At batch {{ size }}: {{ order }}{% for clause in clauses %}; {{ clause }}{% endfor %}."""
)
_SAME = "the seeds do not tell {{ best | name }} apart from {{ behind | join(', ') }}{{ how }}"
_APART = """the seeds tell {{ best | name }} apart from {{ names | map("name") | listed }}
    {{- ", the nearest of them " ~ (names[0] | name) if names | length > 1 }}
    ({{ interval }}){{ how }}"""
_UNKNOWN = """whether {{ best | name }} and {{ names | map("name") | join(" or ") }} differ
    cannot be told from these seeds"""
_ONE = ", its 95 % interval by Welch"
_SEVERAL = ", intervals by Welch at Holm's levels, 95 % for the {} comparisons together"


def _at_largest(study: Study) -> str:
    """Return the ranking at the largest batch, and the arms that differ from the best."""
    metric = study.metric
    size = study.sizes[-1]
    found = [(arm, cell) for arm in study.arms if (cell := arm.cell(size))]
    if len(found) < 2:
        return ""
    ranked = sorted(found, key=lambda pair: metric.worse_by(1.0, metric.centre(pair[1].scores)))
    order = ", ".join(f"{quoted(arm.name)} {_score(cell, metric)}" for arm, cell in ranked)
    return say(
        _RANKING, size=size, order=order, clauses=_told(ranked, metric, study.config.limit_points)
    )


def _score(cell: CellResults, metric: Metric) -> str:
    """Return the mean test score, and the number of seeds whose training diverged."""
    mean = metric.centre(cell.scores)
    if not math.isfinite(mean):
        return metric.show(mean) + of_seeds(cell)
    broken = f" ({cell.diverged} of {cell.seeds} seeds diverged and count as 0)"
    return metric.show(mean) + broken * bool(cell.diverged)


def _told(
    ranked: Sequence[tuple[ArmResults, CellResults]], metric: Metric, margin: float
) -> list[str]:
    """Return the clauses that compare the best arm with the others of its group.

    Where seeds do not tell them apart, the last one says how many seeds show a difference of
    `margin`. A cell with a diverged seed has no spread from which that follows.
    """
    best, top = ranked[0]
    groups = comparable([arm for arm, _ in ranked])
    (same,) = (group for group in groups if best in group)
    others = [
        (arm, cell)
        for arm, cell in ranked[1:]
        if arm in same and math.isfinite(metric.centre(cell.scores))
    ]
    if not others or not math.isfinite(metric.centre(top.scores)):
        return []

    found = ahead_of(metric, top.scores, [cell.scores for _, cell in others])
    clauses = _clauses(best.name, [arm.name for arm, _ in others], found, metric)

    same_pairs = [
        (top.scores, cell.scores)
        for (_, cell), one in zip(others, found, strict=True)
        if one.apart is False and not (top.diverged or cell.diverged)
    ]
    tests = sum(one.apart is not None for one in found)
    needed = [clause] if (clause := seeds_clause(metric, margin, same_pairs, tests)) else []
    only = ["compared are only arms with the same data, model and loss"] * (len(groups) > 1)
    return clauses + needed + only


def _clauses(
    best: str, names: Sequence[str], found: Sequence[Difference], metric: Metric
) -> list[str]:
    apart, same, unknown = (
        [(name, one) for name, one in zip(names, found, strict=True) if one.apart is kind]
        for kind in (True, False, None)
    )
    tests = len(apart) + len(same)
    how = _ONE if tests == 1 else _SEVERAL.format(tests)
    clauses = []
    if same:
        behind = [f"{quoted(name)} ({_interval(one, metric)})" for name, one in same]
        clauses.append(say(_SAME, best=best, behind=behind, how="" if apart else how))
    if apart:
        told = [name for name, _ in apart]
        nearest = _interval(apart[0][1], metric)
        clauses.append(say(_APART, best=best, names=told, interval=nearest, how=how))
    if unknown:
        clauses.append(say(_UNKNOWN, best=best, names=[name for name, _ in unknown]))
    return clauses


def _interval(one: Difference, metric: Metric) -> str:
    if one.low is None or one.high is None:
        return "too few seeds for an interval"
    return f"{one.low:+.2f} to {one.high:+.2f} {metric.units}"


def _steps_at_largest(study: Study) -> str:
    """Return the median steps of each arm, for runs that stop at the target."""
    size = study.sizes[-1]
    found = [
        (quoted(arm.name), cell.target.steps_median if cell.target else None)
        for arm in study.arms
        if (cell := arm.cell(size))
    ]
    if len(found) < 2:
        return ""
    ranked = sorted(found, key=lambda pair: math.inf if pair[1] is None else pair[1])
    order = [
        f"{name} {'not reached' if steps is None else f'{steps:,.0f}'}" for name, steps in ranked
    ]
    return f"Median steps to the target at batch {size}: {', '.join(order)}."


# ---- target, waterfall

_COST = """{{ arm.name | name }} at least {{ "{:,.0f}".format(fit.min_steps) }} steps and
    {{ "{:,.0f}".format(fit.min_examples) }} examples, so a critical batch of
    {{ "{:,.0f}".format(fit.critical_batch_size) }}
    {%- if interval %} (95 % interval {{ interval }}){% endif %}"""
_OVERHEAD = """batch {{ "{:,.0f}".format(fit.overhead_batch_size) }}
    {%- if interval %} (95 % interval {{ interval }}){% endif %} for {{ arm.name | name }}"""


def _target(study: Study) -> list[str]:
    """Return sentences on the scaling and cost of the target, and the arms that missed it."""
    if not study.has_target:
        return []

    scaled = [
        (arm, arm.scaling) for arm in study.measured if arm.scaling and arm.scaling.perfect_until
    ]
    fitted = [arm for arm in study.measured if arm.critical_batch]
    costs = [_of_fit(_COST, arm, "critical_batch_size") for arm in fitted]
    overheads = [_of_fit(_OVERHEAD, arm, "overhead_batch_size") for arm in fitted]
    missed = [
        f"{quoted(arm.name)} at {_missed_at(arm, sizes)}"
        for arm in study.measured
        if (sizes := arm.missed_sizes)
    ]
    small = listed(small_batches(study))

    found = [
        (
            f"Examples to the target are at most {100 * EXCESS:g} % more than at batch {small}",
            [f"{perfect_text(one)} for {quoted(arm.name)}" for arm, one in scaled],
        ),
        (
            "Between the two largest batches the median steps to the target fall like batch^-a",
            [
                f"a = {saving_text(one.savings[-1])} for {quoted(arm.name)}"
                for arm, one in scaled
                if one.savings
            ],
        ),
        ("To the target need, by the fit of steps against batch", costs),
        (
            f"By that fit {100 * OVERHEAD:g} % more examples than at the smallest batch are needed "
            "at",
            overheads,
        ),
        (
            f"Critical batch and noise scale disagree by more than a factor of {WITHIN:g}",
            disagreements(study),
        ),
        ("The median run did not reach the target", missed),
    ]
    return [f"{what}: {'; '.join(texts)}." for what, texts in found if texts]


def _missed_at(arm: ArmResults, sizes: Sequence[int]) -> str:
    """Return the batch sizes at which an arm missed the target, and what all of them mean."""
    if len(sizes) < len(arm.cells):
        return ", ".join(map(str, sizes))
    return "any batch size, so that it has no steps to compare"


def _branches(study: Study) -> str:
    """Return a sentence on the runs whose branches disagree with the study, if there are some."""
    apart = "; ".join(branches_apart(study))
    return f"Branches disagree by more than a factor of {WITHIN:g}: {apart}." if apart else ""


def _of_fit(template: str, arm: ArmResults, name: str) -> str:
    """Return a clause on the fit of an arm, with the interval of one of its batch sizes."""
    fit = arm.critical_batch
    assert fit is not None
    interval = interval_words(getattr(fit.intervals, name)) if fit.intervals else ""
    return say(template, arm=arm, fit=fit, interval=interval)


_GAINS = """At batch {{ size }}, from {{ first | name }} with {{ score }}, in {{ unit }}:
    {{ gains | join(", ") }}; {{ doubts | join("; ") }}."""


def _waterfall(study: Study) -> str:
    if study.waterfall is None:
        return ""
    first, *others = study.waterfall.steps
    gains = [f"{quoted(one.arm)} {round(one.gain or 0.0, 2) + 0.0:+.2f}" for one in others]
    return say(
        _GAINS,
        size=study.waterfall.global_batch_size,
        first=first.arm,
        score=study.metric.show(first.mean),
        unit=study.metric.units,
        gains=gains,
        doubts=_doubts(others),
    )


def _doubts(steps: Sequence[WaterfallStep]) -> list[str]:
    """Return the gains that may be seed noise, each by its own 95 % interval."""
    noise, unknown = (
        ", ".join(quoted(one.arm) for one in steps if one.told_apart is kind)
        for kind in (False, None)
    )
    doubts = [f"not told apart from seed noise: {noise}"] if noise else []
    doubts += [f"cannot be told from these seeds: {unknown}"] if unknown else []
    doubts = doubts or ["each is told apart from seed noise"]
    if all(one.told_apart is None for one in steps):
        return doubts
    return [f"{doubts[0]} (95 % interval of each gain)", *doubts[1:]]
