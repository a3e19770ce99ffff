"""The plan of a recipe on a pod: memory, the cost of a step, and the time of training."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from lbopt.config import NOISE_SCALE, TrainConfig, naming
from lbopt.data import Dataset, EvalBatches
from lbopt.data.from_config import has_known_length, known_source
from lbopt.errors import require
from lbopt.plan import _count
from lbopt.plan._limits import Limits, limits
from lbopt.plan._step_cost import Say, StepCost, cost_of, silent
from lbopt.plan._topology import Topology, memory_limit
from lbopt.recipes import build_run, make_problem
from lbopt.train import Run, count_multiples


@dataclasses.dataclass(frozen=True)
class EvaluationPlan:
    """The evaluation on the validation split during training.

    Attributes:
      step: The cost of one batch.
      num_batches: Number of batches in the split; None for a corpus of unknown size.
      times: Number of evaluations in the run.
    """

    step: StepCost
    num_batches: int | None
    times: int

    @property
    def seconds(self) -> float:
        """Seconds of all evaluations; 0 if the size of the split is unknown."""
        return self.step.step_seconds * (self.num_batches or 0) * self.times


@dataclasses.dataclass(frozen=True)
class PhasePlan:
    """The plan of one phase of a run.

    Attributes:
      global_batch_size: Number of examples in a step.
      num_steps: Number of steps in the phase.
      step: The cost of one step.
      model_flops: Operations of a step on one device by the usual count: three times the forward
        pass of the published network, matrix products and convolutions only, no rematerialisation.
      communication: The words that the step sends, compared with the bounds.
      input_bytes: Bytes of an example when it is sent to the devices.
      evaluation: The evaluation; None if it was not asked for, or training does not fit.
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
        """Seconds of training and evaluation."""
        training = self.num_steps * self.step.step_seconds
        return training + (self.evaluation.seconds if self.evaluation else 0.0)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of a recipe on a pod.

    Attributes:
      config: The config of the run.
      recipe: The name of the recipe, as the user gave it.
      topology: The pod.
      devices: The devices that the run uses, in the order of the mesh.
      hbm_limit_bytes: Bytes of HBM that a program may use on a device.
      phases: The plans of the run's phases.

    >>> import lbopt
    >>> problem = lbopt.Problem("digits", "cnn")
    >>> plan = lbopt.run_plan(problem, topology="v5e:2x2", num_steps=10)  # doctest: +SKIP
    >>> plan.fits, plan.num_steps  # doctest: +SKIP
    (True, 10)
    """

    config: TrainConfig
    recipe: str
    topology: Topology
    devices: tuple[Any, ...]
    hbm_limit_bytes: int
    phases: tuple[PhasePlan, ...]

    @property
    def num_devices(self) -> int:
        """Number of devices that the run uses."""
        return len(self.devices)

    @property
    def fits(self) -> bool:
        """Whether every compiled step fits into memory."""
        return all(step.fits for step in self.compiled)

    @property
    def compiled(self) -> list[StepCost]:
        """The costs of all steps of training and evaluation, those that do not fit included."""
        evaluations = [phase.evaluation.step for phase in self.phases if phase.evaluation]
        return [*(phase.step for phase in self.phases), *evaluations]

    @property
    def num_steps(self) -> int:
        """Number of steps in the run."""
        return sum(phase.num_steps for phase in self.phases)

    @property
    def seconds(self) -> float:
        """Seconds of the run."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def num_hosts(self) -> int:
        """Number of hosts that feed the devices."""
        return len({device.process_index for device in self.devices})

    def utilization_of(self, phase: PhasePlan) -> float:
        """Return the model FLOPs of a step, relative to the devices' peak.

        The step's time includes communication.
        """
        return phase.model_flops / phase.step.step_seconds / self.topology.chip.device_flops

    def mean(self, figure: Callable[[PhasePlan], float]) -> float:
        """Return the mean of a figure of the phases over all steps of the run."""
        return sum(phase.num_steps * figure(phase) for phase in self.phases) / self.num_steps

    @property
    def utilization(self) -> float:
        """Model FLOPs of all steps, relative to the devices' peak; 0 if the run does not fit.

        The steps' time includes communication.
        """
        seconds = self.mean(lambda phase: phase.step.step_seconds)
        if not seconds:
            return 0.0
        return (
            self.mean(lambda phase: phase.model_flops) / seconds / self.topology.chip.device_flops
        )

    def __str__(self) -> str:
        from lbopt.plan._table import plan_lines

        return "\n".join(plan_lines(self))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def make_plan(
    config: TrainConfig,
    recipe: str,
    topology: Topology,
    with_evaluation: bool = True,
    say: Say = silent,
) -> Plan:
    """Compile the steps of a run for a pod, and read their costs from the compiled programs.

    Nothing is run. Published data sets are not read: their sizes are known.

    Args:
      config: The config of the run.
      recipe: The name of the recipe, as the user gave it.
      topology: The pod.
      with_evaluation: Whether to compile the evaluation too.
      say: Function that gets a line before each compilation.

    Raises:
      UserError: If the config does not fit the pod, or leaves the number of steps unknown.
    """
    with naming("config", TrainConfig):
        _check(config)
        run = build_run(config, topology.devices, known_source)
        runs = run.phases()
        configs = config.phases() if config.batch_schedule is None else [config] * len(runs)
        phases = []
        for number, (phase, phase_run) in enumerate(zip(configs, runs, strict=True), 1):
            where = f"{topology.name}, phase {number}" if len(runs) > 1 else topology.name

            def tell(what: str, where: str = where) -> None:
                say(f"compiling {what} for {where} ...")

            # A batch schedule changes no evaluation: the last phase has those of the run.
            evaluates = with_evaluation and phase_run.is_end
            phases.append(_plan_phase(phase, phase_run, topology, evaluates, tell))

    limit = memory_limit(topology.devices[0])
    return Plan(config, recipe, topology, tuple(run.mesh.devices.flat), limit, tuple(phases))


def _check(config: TrainConfig) -> None:
    """Raise `UserError` for a run that no plan describes."""
    backend = config.parallel.backend
    fix = "a plan compiles one program for all devices; use 'jit'"
    require(backend != "pmap", "parallel.backend", backend, fix)
    for phase in config.phases():
        fix = (
            f"an epoch of {{builder}} = {phase.data.builder!r} has an unknown size without the "
            "corpus; give a number of steps"
        )
        known = phase.num_steps or has_known_length(phase.data)
        also = {"builder": "data.builder"}
        require(known, "num_steps", phase.num_steps, fix, code="missing", also=also)
    growing = config.batch_schedule
    fix = "the run decides how long each batch lasts; plan it as 'doubling' or 'steps'"
    decided = growing is None or growing.kind != NOISE_SCALE
    require(decided, "batch_schedule.kind", growing and growing.kind, fix, code="conflict")
    if growing is not None and growing.unit == "epochs" and growing.kind != "seesaw":
        fix = "an epoch has an unknown size without the corpus; count in 'examples' or 'tokens'"
        known = has_known_length(config.data)
        require(known, "batch_schedule.unit", growing.unit, fix, code="missing")


def _plan_phase(
    config: TrainConfig, run: Run, topology: Topology, with_evaluation: bool, say: Say
) -> PhasePlan:
    devices = list(run.mesh.devices.flat)
    say("the training step")
    step = cost_of(run.lower, topology, devices, run.train_step.exchanges)
    forward = count_forward(config)
    size = run.global_batch_size
    example = run.batches.slice(0, 0, 1)

    evaluation = None
    if with_evaluation and step.fits:
        evaluation = _plan_evaluation(config, run, topology, devices, say)

    # Backward takes twice the products of forward: for gradients of the inputs and of the weights.
    return PhasePlan(
        global_batch_size=size,
        num_steps=run.num_steps,
        step=step,
        model_flops=3 * forward.flops * size / run.mesh.size,
        communication=limits(forward.layers, size, len(devices), step.collectives),
        input_bytes=sum(
            array.nbytes for array in example.values() if isinstance(array, np.ndarray)
        ),
        evaluation=evaluation,
    )


def _plan_evaluation(
    config: TrainConfig, run: Run, topology: Topology, devices: Sequence[Any], say: Say
) -> EvaluationPlan:
    say("the evaluation")
    before = run.last_step - 1  # the last step always evaluates
    if run.cadence.eval_every_examples is None:
        times = count_multiples(before - run.counts_from, run.cadence.eval_every_steps) + 1
    else:
        times = count_multiples(run.examples_seen(before), run.cadence.eval_every_examples) + 1
    num_batches = None
    if has_known_length(config.data):
        num_batches = _num_batches(
            run.splits.validation, config.eval_global_batch_size, run.mesh.size
        )
    return EvaluationPlan(cost_of(run.lower_evaluation, topology, devices), num_batches, times)


def _num_batches(dataset: Dataset, size: int, num_devices: int) -> int:
    return len(EvalBatches(dataset, size, num_devices))


def count_forward(config: TrainConfig) -> _count.OperationCount:
    """Count the operations of the forward pass of one example in the published network.

    Options that compute more to run faster (folding, space to depth, rematerialisation) are off.
    """
    data = dataclasses.replace(config.data, space_to_depth=False)
    stem = "conv3" if config.model.stem == "conv3" else "conv7"
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
