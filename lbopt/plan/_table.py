"""A plan as text for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from lbopt.plan import _document, _interconnect
from lbopt.plan._make import EvaluationPlan, PhasePlan, Plan
from lbopt.plan._step_cost import StepCost
from lbopt.plan._suggest import Suggestion

GIB = 2**30
_WIDTH = 118
NUM_OPERATIONS = 10
"""Number of operations in a breakdown."""


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the lines of one plan.

    Args:
      plan: The plan.

    >>> import lbopt
    >>> problem = lbopt.Problem("digits", "cnn")
    >>> plan = lbopt.run_plan(problem, topology="v5e:2x2", num_steps=10)  # doctest: +SKIP
    >>> next(plan_lines(plan))  # doctest: +SKIP
    'run_plan on v5e:2x2: 4 x TPU v5 lite, 1 hosts'
    """
    devices = f"{plan.num_devices} x {plan.topology.devices[0].device_kind}"
    yield f"{plan.recipe} on {plan.topology.name}: {devices}, {plan.num_hosts} hosts"
    for number, phase in enumerate(plan.phases, 1):
        if len(plan.phases) > 1:
            yield ""
            yield f"phase {number}: {phase.num_steps:,} steps of {phase.global_batch_size:,}"
        yield from _phase(plan, phase)
    yield ""
    yield from _whole(plan)
    yield ""
    yield "assumptions"
    for sentence in _document.assumptions(plan):
        yield from textwrap.wrap(
            f"- {sentence}", _WIDTH, subsequent_indent="  ", break_on_hyphens=False
        )


def _phase(plan: Plan, phase: PhasePlan) -> Iterator[str]:
    step = phase.step
    verdict = "fits" if step.fits else "DOES NOT FIT"
    memory = f"{verdict}: needs {_needs(step, plan)}"
    # The compiler gives nothing but the needed memory of a program that it refuses.
    if not step.fits:
        yield _line("memory", memory)
        return

    yield _line(
        "memory",
        f"{memory} (state and batch {step.argument_bytes / GIB:.2f}, temporaries "
        f"{step.temporary_bytes / GIB:.2f})",
    )

    roofline = f", roofline {_ms(step.roofline_seconds)}" if step.roofline_seconds else ""
    yield _line(
        "step",
        f"{_ms(step.step_seconds)} = compute {_ms(step.seconds)} (cycles{roofline}; optimizer "
        f"{_ms(step.update_seconds)}) + communication {_ms(step.collective_seconds)}",
    )

    yield _line(
        "FLOPs",
        f"{step.flops / 1e9:,.1f} G a device by the compiler, {phase.model_flops / 1e9:,.1f} G of "
        f"the model: {100 * plan.utilization_of(phase):.1f} % of peak",
    )
    yield _line("HBM traffic", f"{step.hbm_bytes_moved / 1e9:.2f} GB a device")

    rate = phase.global_batch_size / step.step_seconds / plan.num_hosts
    yield _line(
        "input", f"{rate:,.0f} examples/s a host, {rate * phase.input_bytes / 1e6:,.1f} MB/s"
    )

    yield from _bound(plan, phase)
    if phase.evaluation is not None:
        yield from _evaluation(plan, phase.evaluation)

    yield _line("exchanged", "bytes a device, in a step:")
    yield from _columns(
        ("", "", "dtype", "bytes", "count", "of", "for", "us"),
        [
            (
                "",
                one.op,
                one.dtype,
                f"{one.num_bytes:,}",
                f"{one.count:g}",
                f"{one.group_size}",
                one.source,
                f"{1e6 * _interconnect.seconds_of(plan.topology, plan.devices, one):,.0f}",
            )
            for one in step.collectives
        ],
    )


def _needs(step: StepCost, plan: Plan) -> str:
    return f"{step.hbm_bytes / GIB:.2f} GiB of {plan.hbm_limit_bytes / GIB:.2f} a device"


def _evaluation(plan: Plan, evaluation: EvaluationPlan) -> Iterator[str]:
    step = evaluation.step
    if not step.fits:
        yield _line("evaluation", f"DOES NOT FIT: needs {_needs(step, plan)}")
        return
    batches = "?" if evaluation.num_batches is None else f"{evaluation.num_batches}"
    yield _line(
        "evaluation",
        f"{evaluation.times} times {batches} batches of {_ms(step.step_seconds)}: "
        f"{duration_text(evaluation.seconds)}; {step.hbm_bytes / GIB:.2f} GiB",
    )


def _bound(plan: Plan, phase: PhasePlan) -> Iterator[str]:
    found = phase.communication
    modules = [name for name in found.narrowest.split("/") if name and "->" not in name]
    narrowest = modules[-1] if modules else "the rest"
    where = "within" if plan.num_devices <= found.dp_limit_of_half else "beyond"
    yield _line(
        "cutting the batch",
        f"sends the fewest words up to {found.dp_limit_of_half:,} devices for half of the weights "
        f"({found.dp_limit:,} for {narrowest}): {plan.num_devices} is {where}",
    )
    ratio = found.moved_words / max(found.bound_words, 1)
    yield _line(
        "",
        f"words received: {found.moved_words / 1e6:,.1f} M by this step, "
        f"{found.data_parallel_words / 1e6:,.1f} M by the batch alone, "
        f"{found.bound_words / 1e6:,.1f} M at least ({ratio:.2f} of the bound)",
    )


def _whole(plan: Plan) -> Iterator[str]:
    if not plan.fits:
        yield _line("training", f"{plan.num_steps:,} steps: a step does not fit into memory")
        return
    yield _line(
        "training",
        f"{plan.num_steps:,} steps, {duration_text(plan.seconds)} projected, "
        f"{100 * plan.utilization:.1f} % of peak",
    )
    source = _document.published_source(plan)
    if source:
        assert plan.config.about.published_seconds is not None
        yield _line("published", f"{duration_text(plan.config.about.published_seconds)} ({source})")


def breakdown_lines(plan: Plan) -> Iterator[str]:
    """Yield the most expensive operations of each phase with the paths of their modules."""
    for number, phase in enumerate(plan.phases, 1):
        if not phase.step.fits:
            continue
        of_phase = f" of phase {number}" if len(plan.phases) > 1 else ""
        yield f"\nten costliest operations of a step{of_phase}"
        for operation in phase.step.operations[:NUM_OPERATIONS]:
            share = 100 * operation.seconds / phase.step.seconds
            path = operation.path or "(made by the compiler)"
            yield f"  {_ms(operation.seconds):>10}  {share:5.1f} %  {operation.op:<12}  {path}"


def suggestion_lines(found: Sequence[Suggestion], limit_bytes: int) -> Iterator[str]:
    """Yield a line for each change with which a step fits.

    Args:
      found: The changes.
      limit_bytes: HBM that a program may use on a device.
    """
    for one in found:
        memory = f"{one.step.hbm_bytes / GIB:.2f} of {limit_bytes / GIB:.2f} GiB"
        flags = " ".join(one.flags)
        yield f"  {one.name}: {memory}, {_ms(one.step.step_seconds)} a step  ({flags})"


def comparison_lines(plans: Sequence[Plan], labels: Sequence[str]) -> Iterator[str]:
    """Yield a table with one line for each plan."""
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


def _line(name: str, text: str) -> str:
    return f"{name:<18}{text}"


def _columns(header: Sequence[str], body: Sequence[Sequence[str]]) -> Iterator[str]:
    lines = [header, *body]
    widths = [max(len(cells[column]) for cells in lines) for column in range(len(header))]
    for cells in lines:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        yield "  ".join(padded).rstrip()


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f} ms"


def duration_text(seconds: float) -> str:
    """Return a time in seconds, minutes or hours, by its length.

    Args:
      seconds: The time in seconds.

    >>> duration_text(4571), duration_text(90_000)
    ('76.2 min', '25.0 h')
    """
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
