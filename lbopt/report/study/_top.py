"""The top of a study's page: a sentence on what was trained and what came out, and one table."""

from __future__ import annotations

import math
from collections.abc import Collection

from lbopt.report import _page
from lbopt.report.study import _style
from lbopt.report.study._arm_limit import limit_with_interval
from lbopt.report.study._limit import CannotTell, Limit, LimitEstimate
from lbopt.report.study._study import ArmResults, CellResults, Study, comparable
from lbopt.report.study._words import count, listed, quoted, say, span

_MOST_NAMED = 6
"""Largest number of arms that the sentence names."""
_TRAINED = """The model{{ "s" if models | length > 1 }} {{ models | listed }}
    {{ "were" if models | length > 1 else "was" }} trained on {{ data | listed }} with {{ arms }},
    {{ length }} {{ sizes }} ({{ trials }}{{ so_far }}): {{ result }}."""
_LIMIT = "the largest limit, batch {{ limit }}, is that of {{ arm | name }}"
_BEST = "the best mean test {{ text }} at batch {{ size }} is {{ score }}, of {{ arm | name }}"
_STEPS = """at batch {{ size }} the mean test {{ text }} goes from {{ first }}, of
    {{ steps[0].arm | name }}, to {{ last }}, of {{ steps[-1].arm | name }}"""
_INTERVAL = "95 % interval "
_FEWEST = """at batch {{ size }} the fewest steps to the target, a median of {{ steps }},
    are those of {{ arms | listed }}"""


def lead(study: Study) -> str:
    """Return the first sentence of the page."""
    config = study.config
    trained = [arm.train for arm in study.arms]
    named = [arm.name for arm in study.arms]
    few = len(named) <= _MOST_NAMED
    sizes = study.sizes
    return say(
        _TRAINED,
        trials=count(len(study.runs), "trial"),
        so_far="" if study.complete else " so far",
        arms=listed(map(quoted, named)) if few else f"{len(named)} arms",
        models=dict.fromkeys(train.model.name for train in trained),
        data=dict.fromkeys(train.data.name for train in trained),
        length=_style.length_text(config),
        sizes=f"from {sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"({sizes[0]})",
        result="; ".join(_results(study)) or "no cell is tested yet",
    )


def _results(study: Study) -> list[str]:
    """Return what came out, as clauses."""
    size = study.sizes[-1]
    found = [(arm, cell) for arm in study.arms if (cell := arm.cell(size))]
    if not study.has_limits:
        told = [(steps, arm.name) for arm, cell in found if (steps := _steps(cell)) is not None]
        if not told:
            return [f"no median run reached the target at batch {size}"] if found else []
        least = min(steps for steps, _ in told)
        names = [quoted(name) for steps, name in told if steps == least]
        return [say(_FEWEST, size=size, steps=least, arms=names)]

    metric = study.metric
    if study.waterfall:
        gains = study.waterfall.steps
        first, last = (metric.show(one.mean) for one in (gains[0], gains[-1]))
        return [say(_STEPS, size=size, text=metric.text, first=first, last=last, steps=gains)]
    means = [(metric.badness(cell.test.mean), cell, arm.name) for arm, cell in found]
    best = min(means, key=lambda one: one[0], default=None)
    clauses = [_limits(study)] if study.measured else []
    if best and math.isfinite(best[0]) and len(comparable([arm for arm, _ in found])) == 1:
        score = metric.show(best[1].test.mean)
        clauses.append(say(_BEST, text=metric.text, size=size, score=score, arm=best[2]))
    return clauses


def _limits(study: Study) -> str:
    """Return the largest limit, or the arms whose limits were not reached, as a clause.

    While the limit of an arm is unknown, no other is the largest: those that are known are named.
    """
    known = [arm for arm in study.measured if arm.limit and not isinstance(arm.limit, CannotTell)]
    beyond = [quoted(arm.name) for arm in known if not isinstance(arm.limit, Limit)]
    near = study.metric.amount(study.config.limit_points)
    if beyond:
        within = f"within {near} of the small batches"
        return f"{listed(beyond)} stay{'s' * (len(beyond) == 1)} {within} up to the largest batch"
    if not known:
        return "no limit can be told"
    unknown = [quoted(arm.name) for arm in study.arms if arm not in known]
    if unknown and len(study.arms) > _MOST_NAMED:
        sizes = span(map(_limit_size, known), "{:.0f}")
        return f"the limits of {len(known)} of {len(study.arms)} arms are known, batch {sizes}"
    if unknown:
        limits = [(quoted(arm.name), _shown_limit(arm.limit, _INTERVAL)) for arm in known]
        told = [f"batch {limit} for {name}" for name, limit in limits]
        return f"the limit is {listed([*told, f'unknown for {listed(unknown)}'])}"
    arm = max(known, key=_limit_size)
    assert isinstance(arm.limit, Limit)
    return say(_LIMIT, limit=_shown_limit(arm.limit, _INTERVAL), arm=arm.name)


def _limit_size(arm: ArmResults) -> float:
    return arm.limit.global_batch_size if isinstance(arm.limit, Limit) else math.inf


def _shown_limit(limit: LimitEstimate | None, what: str = "") -> str:
    """Return a limit with `what` and its interval in brackets; "unknown" if it cannot be told."""
    if limit is None:
        return ""
    number, _, interval = limit_with_interval(limit).partition(", ")
    return f"{number} ({what}{interval})" if interval else number


def _steps(cell: CellResults) -> int | None:
    """Return the median steps to the target as shown, rounded: a median may lie between steps."""
    median = cell.target.steps_median if cell.target else None
    return None if median is None else round(median)


# ---- the table


def table(study: Study) -> _page.Section:
    """Return the table of arms and batch sizes, the best of each batch in bold, with the limits."""
    arms = study.measured
    metric = study.metric
    sizes = [size for size in study.sizes if any(arm.cell(size) for arm in arms)]
    limits = [arm.limit if study.has_limits else _perfect(arm) for arm in arms]
    rows = [
        [
            arm.name,
            *(_cell(study, arm.cell(size)) for size in sizes),
            _shown_limit(limit),
        ]
        for arm, limit in zip(arms, limits, strict=True)
    ]

    what = f"Mean test {metric.label}, over {count(len(study.config.final_seeds), 'seed')}"
    if not study.has_limits:
        what = "Median optimizer steps to the target"
    groups = len(comparable(arms)) > 1
    among = " among arms with the same data, model and loss" * groups
    unknown = any(isinstance(limit, CannotTell) for limit in limits)
    reasons = ' "unknown" cannot be told, for the reason under "What was found".' * unknown

    return _page.Section(
        "Results of every arm at every batch size",
        header=["arm", *map(str, sizes), "limit" if study.has_limits else "perfect to"],
        rows=rows,
        note=(
            f"{what}, by global batch size; the best of each in bold{among}, which seeds need not "
            f"tell apart. In brackets 95 % bootstrap intervals.{reasons}"
        ),
        best=_best(study, arms, sizes) | _best_limits(limits, 1 + len(sizes)),
        colours=_style.colours(arms),
    )


def _perfect(arm: ArmResults) -> LimitEstimate | None:
    return arm.scaling.perfect_until if arm.scaling else None


def _cell(study: Study, cell: CellResults | None) -> str:
    if cell is None:
        return ""
    if not study.has_limits:
        steps = _steps(cell)
        return "never" if steps is None else str(steps)
    return "diverged" if cell.test.mean is None else study.metric.digits(cell.test.mean)


def _best(
    study: Study, arms: Collection[ArmResults], sizes: Collection[int]
) -> set[tuple[int, int]]:
    """Return the places of the best cells of every column, among arms that can be compared."""
    rows = {arm.name: row for row, arm in enumerate(arms)}
    places = set()
    for group in comparable(list(arms)):
        for column, size in enumerate(sizes, 1):
            found = [(arm, cell) for arm in group if (cell := arm.cell(size))]
            best = min(
                (cell for _, cell in found), key=lambda one: _badness(study, one), default=None
            )
            if best and math.isfinite(_badness(study, best)) and len(found) > 1:
                # Scores that are shown alike are equally good.
                text = _cell(study, best)
                places |= {
                    (rows[a.name], column) for a, cell in found if _cell(study, cell) == text
                }
    return places


def _badness(study: Study, cell: CellResults) -> float:
    if study.has_limits:
        return study.metric.badness(cell.test.mean)
    steps = _steps(cell)
    return math.inf if steps is None else steps


def _best_limits(limits: list[LimitEstimate | None], column: int) -> set[tuple[int, int]]:
    """Return the places of the largest limits; one beyond the largest batch is the largest.

    No limit is the largest while another one is unknown.
    """
    known = [limit for limit in limits if limit and not isinstance(limit, CannotTell)]
    if len(known) < len(limits) or len(known) < 2:
        return set()
    sizes = [one.global_batch_size if isinstance(one, Limit) else math.inf for one in known]
    return {(row, column) for row, size in enumerate(sizes) if size == max(sizes)}
