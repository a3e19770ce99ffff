"""A recipe on a pod: whether it fits, what a step costs, how long training takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from lbopt.config import TrainConfig
from lbopt.data import Dataset, EvalBatches
from lbopt.data.from_config import has_known_length, known_source
from lbopt.errors import require
from lbopt.plan import _count
from lbopt.plan._limits import Limits, limits
from lbopt.plan._step import Say, StepCost, cost_of, silent
from lbopt.plan._topology import Topology, memory_limit
from lbopt.recipes import build_run, make_problem
from lbopt.train import Run


@dataclasses.dataclass(frozen=True)
class EvaluationPlan:
    """The evaluation inside of training, on the validation split.

    Attributes:
      step: the cost of one batch.
      num_batches: of the split; None for a corpus of unknown size.
      times: how often it happens.
    """

    step: StepCost
    num_batches: int | None
    times: int

    @property
    def seconds(self) -> float:
        """Of all evaluations; 0 where the size is unknown."""
        return self.step.step_seconds * (self.num_batches or 0) * self.times


@dataclasses.dataclass(frozen=True)
class PhasePlan:
    """A phase of a run.

    Attributes:
      global_batch_size: examples of a step.
      num_steps: of the phase.
      step: the cost of one.
      model_flops: of a step on one device: three times the forward pass of the network as it was published, matrix
        products and convolutions only, nothing computed again.
      communication: how far the step is from what it has to send.
      input_bytes: of an example on its way to the devices.
      evaluation: see `EvaluationPlan`; None if it was not asked for or training does not fit.
    """

    global_batch_size: int
    num_steps: int
    step: StepCost
    model_flops: float
    communication: Limits
    input_bytes: int
    evaluation: EvaluationPlan | None

    @property
    def seconds(self) -> float:
        """Of training and evaluation."""
        return self.num_steps * self.step.step_seconds + (
            self.evaluation.seconds if self.evaluation else 0.0
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """A recipe on a pod.

    Attributes:
      config: of the recipe.
      recipe: how the user named it.
      topology: the pod.
      devices: that take part, in the order of the mesh.
      hbm_limit_bytes: that a program may use on one.
      phases: of the run.
    """

    config: TrainConfig
    recipe: str
    topology: Topology
    devices: tuple[Any, ...]
    hbm_limit_bytes: int
    phases: tuple[PhasePlan, ...]

    @property
    def num_devices(self) -> int:
        """How many take part."""
        return len(self.devices)

    @property
    def fits(self) -> bool:
        """Whether every step fits."""
        return all(step.fits for step in self.compiled)

    @property
    def compiled(self) -> list[StepCost]:
        """All steps that were compiled, or refused."""
        evaluations = [phase.evaluation.step for phase in self.phases if phase.evaluation]
        return [*(phase.step for phase in self.phases), *evaluations]

    @property
    def num_steps(self) -> int:
        """Of the whole run."""
        return sum(phase.num_steps for phase in self.phases)

    @property
    def seconds(self) -> float:
        """Of the whole run."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def num_hosts(self) -> int:
        """That feed the devices which take part."""
        return len({device.process_index for device in self.devices})

    def utilization_of(self, phase: PhasePlan) -> float:
        """Return the model FLOPs of a step over what the devices could do in its time, communication included."""
        return phase.model_flops / phase.step.step_seconds / self.topology.chip.device_flops

    def mean(self, of: Any) -> float:
        """Return the mean over all steps of the run of a figure of a phase."""
        return sum(phase.num_steps * of(phase) for phase in self.phases) / self.num_steps

    @property
    def utilization(self) -> float:
        """Model FLOPs over what the devices could do in the time of the steps, communication included; 0 if it does not fit."""
        seconds = self.mean(lambda phase: phase.step.step_seconds)
        return (
            self.mean(lambda phase: phase.model_flops) / seconds / self.topology.chip.device_flops
            if seconds
            else 0.0
        )


def make_plan(
    config: TrainConfig,
    recipe: str,
    topology: Topology,
    with_evaluation: bool = True,
    say: Say = silent,
) -> Plan:
    """Compile the steps of a run for a pod, and read them; nothing is run and no data are needed for published sets.

    Args:
      config: of the run.
      recipe: how the user named it.
      topology: the pod.
      with_evaluation: compile the evaluation too.
      say: gets a line before each compilation.

    Raises:
      UserError: if the config does not fit the pod, naming the field.
    """
    fix = "a plan compiles one program for all devices; use 'jit'"
    require(
        config.parallel.backend != "pmap", "config.parallel.backend", config.parallel.backend, fix
    )
    for phase in config.phases():
        fix = f"how many examples an epoch of config.data.builder = {phase.data.builder!r} has is not known without the corpus; say how many steps"
        require(
            phase.num_steps or has_known_length(phase.data),
            "config.num_steps",
            phase.num_steps,
            fix,
        )
    run = build_run(config, topology.devices, known_source)
    phases = []
    for number, (of, phase_run) in enumerate(zip(config.phases(), run.phases(), strict=True), 1):
        where = f"{topology.name}, phase {number}" if config.phase2 else topology.name

        def tell(what: str, where: str = where) -> None:
            say(f"compiling {what} for {where} ...")

        phases.append(_plan_phase(of, phase_run, topology, with_evaluation, tell))
    limit = memory_limit(topology.devices[0])
    return Plan(config, recipe, topology, tuple(run.mesh.devices.flat), limit, tuple(phases))


def _plan_phase(
    config: TrainConfig, run: Run, topology: Topology, with_evaluation: bool, say: Say
) -> PhasePlan:
    devices = list(run.mesh.devices.flat)
    say("the training step")
    step = cost_of(run.lower, topology, devices)
    forward = count_forward(config)
    one = run.batches.piece(0, 0, 1)
    return PhasePlan(
        run.global_batch_size,
        run.num_steps,
        step,
        3 * forward.flops * run.global_batch_size / run.mesh.size,
        limits(forward.layers, run.global_batch_size, len(devices), step.collectives),
        sum(array.nbytes for array in one.values() if isinstance(array, np.ndarray)),
        _plan_evaluation(config, run, topology, devices, say)
        if with_evaluation and step.fits
        else None,
    )


def _plan_evaluation(
    config: TrainConfig, run: Run, topology: Topology, devices: Sequence[Any], say: Say
) -> EvaluationPlan:
    say("the evaluation")
    times = math.ceil(run.num_steps / run.cadence.eval_every_steps)
    sized = has_known_length(config.data)
    num_batches = (
        _num_batches(run.validation, config.eval_global_batch_size, run.mesh.size)
        if sized
        else None
    )
    return EvaluationPlan(cost_of(run.lower_evaluation, topology, devices), num_batches, times)


def _num_batches(dataset: Dataset, size: int, num_devices: int) -> int:
    return len(EvalBatches(dataset, size, num_devices))


def count_forward(config: TrainConfig) -> _count.Count:
    """Count the forward pass of one example in the network as it was published: nothing folded, nothing computed again."""
    data = dataclasses.replace(config.data, space_to_depth=False)
    stem = "conv7" if config.model.stem == "space_to_depth" else config.model.stem
    model = dataclasses.replace(
        config.model,
        stem=stem,
        fold_columns=False,
        fold_examples=1,
        batch_norm_scope="global",
        remat="none",
    )
    problem = make_problem(data, model, config.loss, 1, None, known_source)
    batch = {**problem.splits.train.take(np.arange(1)), "mask": np.ones(1, bool)}
    shapes = jax.eval_shape(problem.init, jax.random.key(0))
    return _count.count(problem.metric_fn, shapes, batch)
