"""The measures of the critical batch of a study side by side, and where they disagree."""

from __future__ import annotations

import math

from lbopt.report import _page
from lbopt.report._agreement import WITHIN, disagrees
from lbopt.report._branches import Branched, columns_of_layers
from lbopt.report.study import _style
from lbopt.report.study._critical_batch import OVERHEAD, Ends
from lbopt.report.study._study import ArmResults, Noise, Study
from lbopt.report.study._three_term_law import (
    FEWEST_POINTS,
    FEWEST_VALUES,
    NoLaw,
    ThreeTermLaw,
    WhyNoLaw,
)
from lbopt.report.study._words import grouped, listed, quoted

_ABOUT = (
    "The critical batch is fitted to the median steps to the target: steps = S_min (1 + B_c / B). "
    f"The overhead point is the batch that needs {100 * OVERHEAD:g} % more examples than the "
    "smallest one that reached the target, by the same fit; beyond the largest batch it "
    "extrapolates. Intervals are of 95 %, by a bootstrap over the seeds. The noise scale is that "
    "at the smallest batch, the median over the probes of a run."
)
_ABOUT_BRANCHES = (
    "Branches of a single run (lbopt critical) bracket its critical batch at one step. They are "
    "compared with the arms of the run's data, model and optimizer, and with the last noise scale "
    "that the run had logged."
)
_HEADER = (
    "arm",
    "critical batch",
    "95 % interval",
    f"{100 * OVERHEAD:g} % overhead",
    "95 % interval",
    "noise scale",
    "critical batch / noise scale",
)
_WHY: dict[WhyNoLaw, str] = {
    "stops_at_target": "runs stop at their target, so their final losses are alike",
    "batch_grows": "the batch size changes within a run",
    "few_losses": (
        f"it takes {FEWEST_VALUES} batch sizes, {FEWEST_VALUES} numbers of steps and "
        f"{FEWEST_POINTS} pairs of them with finite losses"
    ),
    "same_examples": (
        "the steps follow from the batch size, as in runs of equal epochs, so the terms of batch "
        "and steps cannot be told apart"
    ),
    "undetermined": "the losses do not determine its exponents",
}


def critical(study: Study) -> _page.Section | None:
    """Return the section of the critical batch; None without a target and without a law."""
    fitted = any(isinstance(arm.law, ThreeTermLaw) for arm in study.measured)
    if not study.has_target and not fitted and not study.branched:
        return None
    paragraphs = [_ABOUT, _agreement(study)] if study.has_target else []
    if study.branched:
        paragraphs += [_ABOUT_BRANCHES, _agreement_of_branches(study)]
    if study.has_target or fitted:
        paragraphs.append(three_terms(study))

    arms = [_row(arm) for arm in study.measured] if study.has_target else []
    rows = [*arms, *map(_branched_row, study.branched)]
    names, columns = columns_of_layers([*[None] * len(arms), *study.branched])
    rows = [[*row, *more] for row, more in zip(rows, columns, strict=True)]
    header = (*_HEADER, *(f"noise scale {name}" for name in names)) if rows else ()

    colours = _style.colours(study.measured) if rows else {}
    return _page.Section("Critical batch", paragraphs, header=header, rows=rows, colours=colours)


def branches_apart(study: Study) -> list[str]:
    """Return a clause for each run whose branches disagree with an arm, or with its noise scale."""
    found = []
    for one in study.branched:
        others = [
            f"{_amount(fit.critical_batch_size)} of {quoted(arm.name)}"
            for arm in _arms_of(study, one)
            if (fit := arm.critical_batch)
            and disagrees(fit.critical_batch_size, one.least, one.most)
        ]
        others += [f"its noise scale of {one.scale_text}"] if one.disagrees else []
        if others:
            found.append(f"{one.between} of {_run_at(one)} and {listed(others)}")
    return found


def _arms_of(study: Study, one: Branched) -> list[ArmResults]:
    """Return the arms with a critical batch that a run with branches is compared with."""
    return [arm for arm in study.measured if arm.critical_batch and arm.name in one.line["arms"]]


def disagreements(study: Study) -> list[str]:
    """Return a clause for each arm whose noise scale and critical batch disagree."""
    found = []
    for arm in study.measured:
        fit = arm.critical_batch
        noise = _noise(arm)
        if fit is None or noise is None:
            continue
        size = fit.critical_batch_size
        if disagrees(noise.scale, size, size):
            found.append(f"{_amount(size)} and {_amount(noise.scale)} for {quoted(arm.name)}")
    return found


def interval_words(ends: Ends) -> str:
    """Return an interval of batch sizes as text.

    >>> interval_words((80.4, 130.0)), interval_words((80.4, math.inf)), interval_words((0.0, 9.0))
    ('80 to 130', '80 to infinity', '0 to 9')
    """
    low, high = ends
    return f"{_amount(low)} to {'infinity' if math.isinf(high) else _amount(high)}"


def three_terms(study: Study) -> str:
    """Return the three-term law of each arm, or why it cannot be fitted, as a sentence."""
    texts = [(_law_words(arm.law), arm.name) for arm in study.measured if arm.law]
    return (
        "The three-term law, validation loss = floor + a / batch^b + c / steps^d (Schaipp, arXiv "
        f"2607.01487): {grouped(texts)}."
    )


def _law_words(law: ThreeTermLaw | NoLaw) -> str:
    if isinstance(law, NoLaw):
        return f"not fitted ({_WHY[law.reason]})"
    return (
        f"{law.floor:.3g} + {law.batch_coefficient:.3g} / batch^{law.batch_exponent:.2f} + "
        f"{law.step_coefficient:.3g} / steps^{law.step_exponent:.2f} (exponents within "
        f"{law.batch_exponent_error:.2g} and {law.step_exponent_error:.2g} at 95 %, "
        f"{law.points} points, R^2 {law.r2:.3f})"
    )


def _agreement(study: Study) -> str:
    """Return a sentence on the arms whose noise scale and critical batch disagree."""
    both = [arm for arm in study.measured if arm.critical_batch and _noise(arm)]
    if not both:
        return "No arm has both a critical batch and a noise scale, so they cannot be compared."
    found = disagreements(study)
    if found:
        return (
            f"Critical batch and noise scale disagree by more than a factor of {WITHIN:g}: "
            f"{'; '.join(found)}."
        )
    infinite = sum(math.isinf(noise.scale) for arm in both if (noise := _noise(arm)))
    but = f", but for {infinite} that cannot be told from infinity" if infinite else ""
    return f"Where both were measured, they agree within a factor of {WITHIN:g}{but}."


def _agreement_of_branches(study: Study) -> str:
    found = branches_apart(study)
    compared = [
        one for one in study.branched if one.noise_scale is not None or _arms_of(study, one)
    ]
    if not compared:
        return (
            "There is nothing to compare them with: no arm of the run's kind has a critical batch, "
            "and the run logged no noise scale."
        )
    if not found:
        return f"None is off by more than a factor of {WITHIN:g} from what it is compared with."
    return f"Branches disagree by more than a factor of {WITHIN:g}: {'; '.join(found)}."


def _branched_row(one: Branched) -> list[str]:
    return [_run_at(one), one.between, "", "", "", one.scale_text, ""]


def _run_at(one: Branched) -> str:
    return f"{one.line['run']} at step {one.line['step']:,}"


def _row(arm: ArmResults) -> list[str]:
    noise = _noise(arm)
    scale = None if noise is None else noise.scale
    told = "" if scale is None else "infinite" if math.isinf(scale) else _amount(scale)
    fit = arm.critical_batch
    if fit is None:
        return [arm.name, "not told", "", "", "", told, ""]

    ends = fit.intervals
    ratio = fit.critical_batch_size / scale if scale and math.isfinite(scale) else None
    return [
        arm.name,
        _amount(fit.critical_batch_size),
        interval_words(ends.critical_batch_size) if ends else "",
        _amount(fit.overhead_batch_size),
        interval_words(ends.overhead_batch_size) if ends else "",
        told,
        "" if ratio is None else f"{ratio:.3g}",
    ]


def _noise(arm: ArmResults) -> Noise | None:
    return arm.cells[0].noise


def _amount(size: float) -> str:
    return f"{size:,.0f}" if size >= 10 or size == 0 else f"{size:.2g}"
