"""A plan on the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from lbopt.plan import _document, _interconnect
from lbopt.plan._make import PhasePlan, Plan
from lbopt.plan._suggest import Suggestion

GIB = 2**30
_WIDTH = 118
NUM_OPERATIONS = 10
"""That a breakdown names."""


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the table of one plan."""
    kind = plan.topology.devices[0].device_kind
    yield f"{plan.recipe} on {plan.topology.name}: {plan.num_devices} x {kind}, {plan.num_hosts} hosts"
    for number, phase in enumerate(plan.phases, 1):
        if len(plan.phases) > 1:
            yield f"\nphase {number}: {phase.num_steps:,} steps of {phase.global_batch_size:,}"
        yield from _phase(plan, phase)
    yield ""
    yield from _whole(plan)
    yield "\nassumptions"
    for said in _document.assumptions(plan):
        yield from textwrap.wrap(
            f"- {said}", _WIDTH, subsequent_indent="  ", break_on_hyphens=False
        )


def _phase(plan: Plan, phase: PhasePlan) -> Iterator[str]:
    step = phase.step
    verdict = "fits" if step.fits else "DOES NOT FIT"
    held = f"{verdict}: needs {step.hbm_bytes / GIB:.2f} GiB of {plan.hbm_limit_bytes / GIB:.2f} a device"
    if not step.fits:
        yield _row("memory", held)
        return
    yield _row(
        "memory",
        f"{held} (state and batch {step.argument_bytes / GIB:.2f}, temporaries {step.temporary_bytes / GIB:.2f})",
    )
    least = f", roofline {_ms(step.roofline_seconds)}" if step.roofline_seconds else ""
    yield _row(
        "step",
        f"{_ms(step.step_seconds)} = compute {_ms(step.seconds)} (cycles{least}; optimizer {_ms(step.update_seconds)}) "
        f"+ communication {_ms(step.collective_seconds)}",
    )
    used = plan.utilization_of(phase)
    yield _row(
        "FLOPs",
        f"{step.flops / 1e9:,.1f} G a device by the compiler, {phase.model_flops / 1e9:,.1f} G of the model: {100 * used:.1f} % of peak",
    )
    yield _row("HBM traffic", f"{step.hbm_bytes_moved / 1e9:.2f} GB a device")
    rate = phase.global_batch_size / step.step_seconds / plan.num_hosts
    yield _row(
        "input", f"{rate:,.0f} examples/s a host, {rate * phase.input_bytes / 1e6:,.1f} MB/s"
    )
    yield from _bound(plan, phase)
    if phase.evaluation is not None:
        yield from _evaluation(plan, phase)
    yield _row("exchanged", "bytes a device, in a step:")
    yield from _columns(
        ("", "", "dtype", "bytes", "count", "of", "for", "us"),
        [
            (
                "",
                one.op,
                one.dtype,
                f"{one.num_bytes:,}",
                f"{one.count}",
                f"{one.group_size}",
                one.source,
                f"{1e6 * _interconnect.seconds_of(plan.topology, plan.devices, one):,.0f}",
            )
            for one in step.collectives
        ],
    )


def _evaluation(plan: Plan, phase: PhasePlan) -> Iterator[str]:
    evaluation = phase.evaluation
    assert evaluation is not None
    step = evaluation.step
    if not step.fits:
        yield _row(
            "evaluation",
            f"DOES NOT FIT: needs {step.hbm_bytes / GIB:.2f} GiB of {plan.hbm_limit_bytes / GIB:.2f} a device",
        )
        return
    batches = "?" if evaluation.num_batches is None else f"{evaluation.num_batches}"
    yield _row(
        "evaluation",
        f"{evaluation.times} times {batches} batches of {_ms(step.step_seconds)}: {duration_text(evaluation.seconds)}; {step.hbm_bytes / GIB:.2f} GiB",
    )


def _bound(plan: Plan, phase: PhasePlan) -> Iterator[str]:
    found = phase.communication
    narrowest = next(
        (part for part in reversed(found.narrowest.split("/")) if part and "->" not in part),
        "the rest",
    )
    where = "within" if plan.num_devices <= found.dp_limit_of_half else "beyond"
    yield _row(
        "cutting the batch",
        f"sends the fewest words up to {found.dp_limit_of_half:,} devices for half of the weights ({found.dp_limit:,} for "
        f"{narrowest}): {plan.num_devices} is {where}",
    )
    yield _row(
        "",
        f"words received: {found.moved_words / 1e6:,.1f} M by this step, {found.data_parallel_words / 1e6:,.1f} M by the batch alone, "
        f"{found.bound_words / 1e6:,.1f} M at least ({found.moved_words / max(found.bound_words, 1):.2f} of the bound)",
    )


def _whole(plan: Plan) -> Iterator[str]:
    if not plan.fits:
        yield _row("training", f"{plan.num_steps:,} steps: not as it is")
        return
    yield _row(
        "training",
        f"{plan.num_steps:,} steps, {duration_text(plan.seconds)} projected, {100 * plan.utilization:.1f} % of peak",
    )
    source = _document.published_source(plan)
    if source:
        assert plan.config.about.published_seconds is not None
        yield _row("published", f"{duration_text(plan.config.about.published_seconds)} ({source})")


def breakdown_lines(plan: Plan) -> Iterator[str]:
    """Yield the ten costliest operations of each phase with the paths of their modules."""
    for number, phase in enumerate(plan.phases, 1):
        if not phase.step.fits:
            continue
        yield f"\nten costliest operations of a step{f' of phase {number}' if len(plan.phases) > 1 else ''}"
        for operation in phase.step.operations[:NUM_OPERATIONS]:
            share = 100 * operation.seconds / phase.step.seconds
            yield f"  {_ms(operation.seconds):>10}  {share:5.1f} %  {operation.op:<12}  {operation.path or '(made by the compiler)'}"


def suggestion_lines(found: Sequence[Suggestion], limit_bytes: int) -> Iterator[str]:
    """Yield what makes a step fit."""
    for one in found:
        yield (
            f"  {one.name}: {one.step.hbm_bytes / GIB:.2f} of {limit_bytes / GIB:.2f} GiB, {_ms(one.step.step_seconds)} a step"
            f"  ({' '.join(one.flags)})"
        )


def comparison_lines(plans: Sequence[Plan], labels: Sequence[str]) -> Iterator[str]:
    """Yield plans side by side, one a line."""
    header = (
        "",
        "devices",
        "fits",
        "GiB",
        "step",
        "compute",
        "communication",
        "of peak",
        "training",
        "device hours",
    )
    yield from _columns(
        header, [_compared(plan, label) for plan, label in zip(plans, labels, strict=True)]
    )


def _compared(plan: Plan, label: str) -> tuple[str, ...]:
    held = f"{max(step.hbm_bytes for step in plan.compiled) / GIB:.2f}"
    if not plan.fits:
        return label, f"{plan.num_devices}", "no", held, *["-"] * 6
    return (
        label,
        f"{plan.num_devices}",
        "yes",
        held,
        _ms(plan.mean(lambda phase: phase.step.step_seconds)),
        _ms(plan.mean(lambda phase: phase.step.seconds)),
        _ms(plan.mean(lambda phase: phase.step.collective_seconds)),
        f"{100 * plan.utilization:.1f} %",
        duration_text(plan.seconds),
        f"{plan.seconds * plan.num_devices / 3600:,.1f}",
    )


def _row(name: str, text: str) -> str:
    return f"{name:<18}{text}"


def _columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    cells = [header, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for row in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f} ms"


def duration_text(seconds: float) -> str:
    """Return a time in the unit that people use for it."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
