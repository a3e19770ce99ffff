"""Branches of a run: some steps from one of its states on, at another batch size."""

from __future__ import annotations

import dataclasses

from lbopt import errors
from lbopt.config import TrainConfig, at_batch_size, batch_ratios, make_schedule
from lbopt.data.from_config import load_source
from lbopt.errors import require
from lbopt.recipes import _layout
from lbopt.recipes._build import (
    build_mesh,
    build_one_batch,
    continuing,
    make_problem_of,
    naming_run,
    resolved_of,
)
from lbopt.schedules import BatchPhase, Units, phase_schedule
from lbopt.train import Run


def build_branch(
    config: TrainConfig, run: Run, step: int, global_batch_size: int, num_examples: int
) -> Run:
    """Return the run that continues from a step at another batch size, for some examples.

    It sees the examples that the run would have seen, in the same order. Its learning rate is that
    of the run at the same examples, times what the scaling rule makes of the batch, and the
    optimizer's numbers follow the rule. It has as many microsteps as keep the examples that a
    device takes at a time. Its first state is that of the run, by `enter`.

    Args:
      config: Config of the run.
      run: The run, from `build_run`.
      step: Step at which the branch begins.
      global_batch_size: Examples per step of the branch.
      num_examples: Length of the branch in examples: whole steps that end within the run, or
        within its phase if it has two. Past the end the learning rate of most schedules is 0.

    Raises:
      UserError: If the branch passes the end, or does not fit the data or the devices.
    """
    left = run.examples_left(step)
    what = "run" if config.phase2 is None else "phase"
    fix = f"the {what} has {left} examples left from step {step}; give at most {left}, or an "
    fix += "earlier step"
    require(num_examples <= left, "num_examples", num_examples, fix, code="mismatch")

    place = run.phases().index(run.phase_at(step))
    origin = run.phase_at(step)
    phase = config.phases()[place] if config.phase2 is not None else config.phases()[0]
    before = origin.global_batch_size
    steps, rest = divmod(num_examples, global_batch_size)
    fix = f"it is no multiple of batch {global_batch_size}; give a multiple of every batch"
    require(steps > 0 and not rest, "num_examples", num_examples, fix, code="mismatch")

    with naming_run():
        mesh = build_mesh(config.parallel, list(run.mesh.devices.flat))
        there = phase
        if config.batch_schedule is not None:
            there = at_batch_size(phase, before, mesh.size)
        microsteps = there.parallel.num_microsteps * global_batch_size // before
        parallel = dataclasses.replace(phase.parallel, num_microsteps=max(1, microsteps))
        here = dataclasses.replace(phase, global_batch_size=global_batch_size, parallel=parallel)
        here = _layout.with_layout(here, mesh.devices.flat[0].platform)
        problem = make_problem_of(here, load_source)
        first = phase.global_batch_size
        base = resolved_of(phase, problem)

        # The schedule counts the examples of its own phase; a batch schedule is one phase.
        beginning = run if origin.continues else origin
        first_example = origin.examples_seen(step)
        counted = BatchPhase(
            global_batch_size, steps, step, first_example - beginning.batches.first_example
        )
        scale = batch_ratios(phase, first, global_batch_size).learning_rate
        schedule = phase_schedule(make_schedule(phase.schedule, base), counted, first, scale)
        length = dataclasses.replace(
            base,
            num_steps=steps,
            steps_per_epoch=Units(len(problem.splits.train), global_batch_size).exact_steps(1),
        )
        with errors.about("global_batch_size", global_batch_size):
            branch = build_one_batch(here, problem, mesh, length, schedule, None, True)
        branch = continuing(branch, phase, before, problem)

    batches = branch.batches.moved(first_example, steps)
    return dataclasses.replace(branch, batches=batches, first_step=step)
