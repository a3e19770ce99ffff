"""A plan as plain data, as `lbopt plan --output` writes it."""

from __future__ import annotations

import dataclasses
from typing import Any

from lbopt.config import TrainConfig
from lbopt.plan import _interconnect
from lbopt.plan._collectives import Collective
from lbopt.plan._hardware import HOP_SECONDS
from lbopt.plan._make import EvaluationPlan, PhasePlan, Plan
from lbopt.recipes import with_layout

_ROUND = 6
"""Decimal places of a time; the compiler's estimates are less precise."""


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain data, under names that scripts may rely on.

    Figures "per_step" are means over the steps of all phases, and memory is that of the largest
    compiled step. `phases` has the figures of each phase.

    Args:
      plan: The plan.

    >>> import lbopt
    >>> problem = lbopt.Problem("digits", "cnn")
    >>> plan = lbopt.run_plan(problem, topology="v5e:2x2", num_steps=10)  # doctest: +SKIP
    >>> found = plan_document(plan)  # doctest: +SKIP
    >>> found["num_devices"], found["fits"]  # doctest: +SKIP
    (4, True)
    """
    about = plan.config.about
    fits = plan.fits
    mean = plan.mean if fits else lambda figure: None

    return {
        "recipe": plan.recipe,
        "topology": plan.topology.name,
        "device_kind": plan.topology.devices[0].device_kind,
        "num_devices": plan.num_devices,
        "num_hosts": plan.num_hosts,
        "fits": fits,
        "hbm_bytes_per_device": max(step.hbm_bytes for step in plan.compiled),
        "hbm_limit_bytes": plan.hbm_limit_bytes,
        "flops_per_step_per_device": mean(lambda phase: phase.step.flops),
        "model_flops_per_step_per_device": mean(lambda phase: phase.model_flops),
        "hbm_bytes_moved_per_step": mean(lambda phase: phase.step.hbm_bytes_moved),
        "collectives": [
            {**_collective(plan, one), "phase": number}
            for number, phase in enumerate(plan.phases, 1)
            for one in phase.step.collectives
        ],
        "compute_seconds_per_step": _rounded(mean(lambda phase: phase.step.seconds)),
        "roofline_seconds_per_step": _roofline(plan) if fits else None,
        "collective_seconds_per_step": _rounded(mean(lambda phase: phase.step.collective_seconds)),
        "model_flops_utilization": _rounded(plan.utilization) if fits else None,
        "steps": plan.num_steps,
        "projected_seconds": _rounded(plan.seconds) if fits else None,
        "projected_from": "the sum of the compiler's cycles",
        "published_seconds": about.published_seconds,
        "published_source": published_source(plan),
        "compile_seconds": _rounded(sum(step.compile_seconds for step in plan.compiled), 1),
        "phases": [_phase(plan, phase) for phase in plan.phases],
        "assumptions": assumptions(plan),
        "config": settings(plan.config, "tpu", plan.num_devices),
    }


def settings(config: TrainConfig, platform: str, num_devices: int) -> dict[str, Any]:
    """Return the fields of the config that determine the plan, as chosen for these devices."""
    found = dataclasses.asdict(with_layout(config, platform, num_devices))
    del found["about"]
    return found


def published_source(plan: Plan) -> str | None:
    """Return the source of the published time; None if no time was published."""
    about = plan.config.about
    if about.published_seconds is None:
        return None
    return f"{about.paper}: {about.time} on {about.hardware}"


def _phase(plan: Plan, phase: PhasePlan) -> dict[str, Any]:
    step = phase.step
    found: dict[str, Any] = {
        "global_batch_size": phase.global_batch_size,
        "steps": phase.num_steps,
        "fits": step.fits,
        "hbm_bytes_per_device": step.hbm_bytes,
        "compile_seconds": _rounded(step.compile_seconds, 1),
    }
    if not step.fits:
        return found

    rate = phase.global_batch_size / step.step_seconds
    return {
        **found,
        "argument_bytes": step.argument_bytes,
        "temporary_bytes": step.temporary_bytes,
        "flops_per_step_per_device": step.flops,
        "matrix_flops_per_step_per_device": step.matrix_flops,
        "model_flops_per_step_per_device": phase.model_flops,
        "hbm_bytes_moved_per_step": step.hbm_bytes_moved,
        "compute_seconds_per_step": _rounded(step.seconds),
        "roofline_seconds_per_step": _rounded(step.roofline_seconds),
        "update_seconds_per_step": _rounded(step.update_seconds),
        "collective_seconds_per_step": _rounded(step.collective_seconds),
        "model_flops_utilization": _rounded(plan.utilization_of(phase)),
        "projected_seconds": _rounded(phase.seconds),
        "examples_per_second": round(rate),
        "examples_per_second_per_host": round(rate / plan.num_hosts),
        "input_bytes_per_second_per_host": round(rate / plan.num_hosts * phase.input_bytes),
        "communication": dataclasses.asdict(phase.communication),
        "evaluation": _evaluation(phase.evaluation),
    }


def _evaluation(evaluation: EvaluationPlan | None) -> dict[str, Any] | None:
    if evaluation is None:
        return None
    step = evaluation.step
    return {
        "fits": step.fits,
        "hbm_bytes_per_device": step.hbm_bytes,
        "seconds_per_batch": _rounded(step.step_seconds),
        "batches": evaluation.num_batches,
        "times": evaluation.times,
        "projected_seconds": _rounded(evaluation.seconds),
    }


def _collective(plan: Plan, one: Collective) -> dict[str, Any]:
    return {
        "op": one.op,
        "dtype": one.dtype,
        "bytes": one.num_bytes,
        "count": one.count,
        "group_size": one.group_size,
        "source": one.source,
        "seconds": _rounded(_interconnect.seconds_of(plan.topology, plan.devices, one), 9),
    }


def _roofline(plan: Plan) -> float | None:
    each = [phase.step.roofline_seconds for phase in plan.phases]
    if None in each:
        return None
    return _rounded(plan.mean(lambda phase: phase.step.roofline_seconds or 0.0))


def assumptions(plan: Plan) -> list[str]:
    """Return the assumptions and omissions of the projection, a sentence each."""
    chip = plan.topology.chip
    link = chip.link_bytes_per_second / 1e9
    found = [
        "compute is the sum of the compiler's cycle estimates, the more pessimistic of its two; "
        "the other is the roofline",
        f"a cycle lasts 1 / {chip.hertz / 1e6:.0f} MHz; peak is {chip.device_flops / 1e12:.1f} "
        f"TFLOP/s a device, bf16 ({chip.sources})",
        f"communication by a model, not measured: {link:.0f} GB/s a link and direction, all links "
        f"of the axes that a group spans, {HOP_SECONDS * 1e6:.0f} us a hop, nothing overlapped "
        "with computation",
        "left out: input, start-up and compilation, checkpoints, work of the host between steps",
    ]

    evaluations = [phase.evaluation for phase in plan.phases if phase.evaluation]
    if any(evaluation.num_batches is None for evaluation in evaluations):
        found.append("left out: evaluation, since the size of the corpus is not known")
    every = plan.config.diloco.every
    if every > 1:
        found.append(f"what workers exchange once in {every} steps counts by that share in a step")
    if plan.config.data.name == "squad":
        found.append(
            "SQuAD's questions are counted as one window each; long contexts make a few per cent "
            "more"
        )

    loops = sum(step.unknown_loops for step in plan.compiled)
    if loops:
        found.append(f"{loops} loops whose length could not be read are counted once")
    if plan.config.stop_at_target:
        found.append("all steps are counted, though the run stops when it reaches its target")
    return found


def _rounded(value: float | None, digits: int = _ROUND) -> float | None:
    return None if value is None else round(value, digits)
