"""Findings about the search: its budget, its choice, and the cost of the rules' own warmup."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from lbopt.config import SearchConfig
from lbopt.report.study._metric import Metric
from lbopt.report.study._study import ArmResults, CellResults, Study
from lbopt.report.study._words import grouped, listed, quoted, say, span
from lbopt.sweep.search import can_widen

_KEPT = """Had every arm kept its own rule's warmup, the best validation {{ metric.text }}
    of the search would have been worse by: {{ parts | join(", ") }}."""
_SAME = """
    {%- if differ %}The arms did not get the same search: each got {{ each }}, but of different
    candidates ({{ differ | join(", ") }} differ{{ "s" if differ | length == 1 }}).
    {%- else %}Every arm got the same search: {{ each }}{{ beyond }}.{% endif %}"""
_UNEQUAL = """The arms did not get the same search: trials at each batch size were {{ counts }};
    they are worth from {{ least | number }} to {{ most | number }} runs of full length."""
_RATES = """Over the batch sizes, the chosen learning rate was this many times the one
    the scaling rule gives: {{ rates }}."""
_EDGE = """The best {{ what }} lies at the edge of the search for {{ arms | join("; ") }}
    {{- beyond }}: a wider one might do better."""
_BEYOND = """, and up to {{ budget | count("candidate") }} more beyond an edge ({% if used %}used
    by {{ used | join("; ") }}{% else %}none was needed{% endif %})"""
_EVEN = ", even after the search beyond it, of up to {} a cell"


def search_findings(study: Study) -> list[str]:
    """Return the sentences about the search of a study with a tested cell.

    The first is about the cost of keeping the rules' own warmups, "" if it is not known.
    """
    measured = study.measured
    rates = [(span(cell.chosen.learning_rate for cell in arm.cells), arm.name) for arm in measured]
    edges = [
        say(_EDGE, what=field.name.replace("_", " "), arms=arms, beyond=_even_after(measured))
        for field in dataclasses.fields(measured[0].cells[0].edges)
        if (arms := _at_edges(measured, field.name))
    ]
    return [_kept_warmup(study), _same_search(measured), say(_RATES, rates=grouped(rates)), *edges]


def _at_edges(arms: Sequence[ArmResults], name: str) -> list[str]:
    found = [(arm, [c for c in arm.cells if getattr(c.edges, name)]) for arm in arms]
    return [
        f"{quoted(arm.name)} at {', '.join(str(cell.global_batch_size) for cell in cells)}"
        for arm, cells in found
        if cells
    ]


def _even_after(arms: Sequence[ArmResults]) -> str:
    """Return the budget beyond the edges as a clause; "" where there is none."""
    budgets = sorted({arm.search.widen_candidates for arm in arms if can_widen(arm.search)})
    return _EVEN.format(f"{listed(budgets, 'or')} candidates") if budgets else ""


# ---- the rule's own warmup


def _kept_warmup(study: Study) -> str:
    """Return the cost on validation of keeping the rule's own warmup, in grid searches."""
    if study.has_target:
        return ""
    parts = []
    for arm in study.measured:
        search = arm.search
        if search.method == "grid" and {1.0} < set(search.warmup_factors):
            losses = [
                (_kept_loss(cell, study.metric), cell.global_batch_size) for cell in arm.cells
            ]
            found = [(loss, size) for loss, size in losses if loss is not None]
            parts += [f"{quoted(arm.name)} {_kept_part(found, study.metric)}"] if found else []
    return say(_KEPT, metric=study.metric, parts=parts) if parts else ""


def _kept_part(found: Sequence[tuple[float, int]], metric: Metric) -> str:
    """Return the worst loss of an arm, and where the rule's own warmup diverged instead."""
    finite = [pair for pair in found if math.isfinite(pair[0])]
    broken = [size for loss, size in found if not math.isfinite(loss)]
    words = []
    if finite:
        worst, size = max(finite)
        words.append(f"up to {metric.amount(worst)}" + f" (at batch {size})" * (worst > 0))
    if broken:
        words.append(f"diverged at batch {listed(broken)}")
    return " and ".join(words)


def _kept_loss(cell: CellResults, metric: Metric) -> float | None:
    """Return how much worse the best candidate with the rule's own warmup is than the best of all.

    Infinite if every candidate with the rule's own warmup diverged (unless accuracy judges); None
    if none was tried or all candidates diverged. Only runs of full length count.
    """
    best = min((one.score for one in cell.full), key=metric.badness, default=None)
    tried = [one.score for one in cell.full if one.factors.warmup == 1]
    if not tried or best is None:
        return None
    kept = min(tried, key=metric.badness)
    return math.inf if kept is None else metric.worse_by(best, kept)


# ---- budgets


def _same_search(arms: Sequence[ArmResults]) -> str:
    """Return whether every arm got the same search, by its configs and its counted trials."""
    # The search beyond an edge has the same budget in all cells, and those at no edge leave theirs.
    beyond = [[cell.num_beyond * len(arm.search.seeds) for cell in arm.cells] for arm in arms]
    trials = {
        arm.name: {len(cell.search) - runs for cell, runs in zip(arm.cells, of_arm, strict=True)}
        for arm, of_arm in zip(arms, beyond, strict=True)
    }
    lengths = {
        round(cell.full_runs - runs, 9)
        for arm, of_arm in zip(arms, beyond, strict=True)
        for cell, runs in zip(arm.cells, of_arm, strict=True)
    }

    counts = set().union(*trials.values())
    if len(counts) > 1 or len(lengths) > 1:
        spans = grouped((span(found, "{}"), name) for name, found in trials.items())
        return say(_UNEQUAL, counts=spans, least=min(lengths), most=max(lengths))

    (count,) = counts
    (length,) = lengths
    full = f" ({length:.3g} runs of full length)" * (length != count)
    each = f"{count} trial{'s' * (count != 1)} at each batch size{full}"
    differ = _differences([arm.search for arm in arms])
    return say(_SAME, each=each, differ=differ, beyond=_beyond(arms))


def _beyond(arms: Sequence[ArmResults]) -> str:
    """Return what arms of one search spent beyond its edges, as a clause; "" without a budget."""
    if not can_widen(arms[0].search):
        return ""
    used = [
        f"{quoted(arm.name)}, {', '.join(spent)}"
        for arm in arms
        if (
            spent := [f"{c.num_beyond} at {c.global_batch_size}" for c in arm.cells if c.num_beyond]
        )
    ]
    return say(_BEYOND, budget=arms[0].search.widen_candidates, used=used)


def _differences(searches: Sequence[SearchConfig]) -> list[str]:
    """Return the fields in which searches differ."""
    names = [field.name for field in dataclasses.fields(SearchConfig)]
    first = searches[0]
    return [
        name
        for name in names
        if any(getattr(one, name) != getattr(first, name) for one in searches)
    ]
