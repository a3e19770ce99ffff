"""The configuration of one training run."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses
import re

from lbopt import paths
from lbopt.config import _checks
from lbopt.config._aggregator import AggregatorConfig, validate_aggregator
from lbopt.config._checks import LARGEST_INTEGER, at_least
from lbopt.config._data import TASKS, DataConfig, validate_data
from lbopt.config._loss import LossConfig, validate_loss
from lbopt.config._model import FAMILIES, ModelConfig, validate_model
from lbopt.config._optimizer import OptimizerConfig, validate_optimizer
from lbopt.config._parallel import ParallelConfig, validate_parallel
from lbopt.config._phase import PhaseConfig, as_of_phase2, validate_phase
from lbopt.config._schedule import ScheduleConfig, validate_schedule
from lbopt.errors import UserError, require, require_choice

_DURATION = re.compile(r"(\d[\d.]*)(?:-(\d[\d.]*))?(?:, \w+ [\d.-]+)? (s|min|h)\b")
STATUSES = ("measured here", "planned by the TPU compiler", "not yet run")


@dataclasses.dataclass
class About:
    """What `lbopt recipes` says of a config.

    Attributes:
      paper: what it follows, with the arXiv id.
      published_result: the number to reach, with its source; "-" if there is none.
      hardware: on which it was reached.
      time: in which.
      topology: what `lbopt plan` takes for that hardware, "v3:32x32"; "" if it was no TPU, or none is named.
      note: what of the row is recalled or our own choice.
      status: "measured here", "planned by the TPU compiler" or "not yet run".
    """

    paper: str = "-"
    published_result: str = "-"
    hardware: str = "-"
    time: str = "-"
    topology: str = ""
    note: str = ""
    status: str = "not yet run"

    @property
    def published_seconds(self) -> float | None:
        """The first number of `time` that has a unit, in seconds, of a range its middle; None if there is none.

        >>> About(time="26.9-28.7 s").published_seconds, About(time="82.8 h").published_seconds, About().published_seconds
        (27.8, 298080.0, None)
        """
        found = _DURATION.search(self.time)
        if found is None:
            return None
        numbers = [float(number) for number in found.group(1, 2) if number]
        unit = {"s": 1, "min": 60, "h": 3600}[found[3]]
        return round(sum(numbers) / len(numbers) * unit, 3)


@dataclasses.dataclass
class CheckpointConfig:
    """When state is saved and what is kept.

    Attributes:
      every_steps: save so often (and at the end, and on SIGTERM).
      keep: the latest so many are kept, and the best one.
      best_metric: the evaluation metric that says which is best; higher is better unless it ends in "loss".
    """

    every_steps: int = 100
    keep: int = 3
    best_metric: str = "eval/accuracy"


@dataclasses.dataclass
class TrainConfig:
    """One training run.

    Attributes:
      name: of the recipe.
      about: what `lbopt recipes` says.
      seed: of initialisation, shuffle and dropout.
      global_batch_size: examples per optimizer step over all devices and microsteps.
      num_epochs: length of the run; steps are rounded up.
      num_steps: length of the run (of its first phase, if it has two) in optimizer steps, instead of `num_epochs`.
      eval_global_batch_size: any size; evaluation is exact.
      log_every_steps: a line in metrics.jsonl so often.
      eval_every_steps: evaluate on the validation split so often, and at the end.
      eval_every_epochs: so often instead, in epochs.
      target_metric: "eval/accuracy", ...: when an evaluation first reaches `target_value`, the metrics say after how many
        steps and seconds of training; "" for no target. At most `target_value` if the name ends in "loss" or "perplexity".
      target_value: see above.
      stop_at_target: end the run there.
      stop_at_nan: end the run, with exit code 2, where a logged loss is not finite, and never save a network that is not. Otherwise
        such a run says so and goes on; the last checkpoint of a finite network is kept in either case,
        and a study's trials always end there.
      mllog: print MLPerf's `:::MLLOG` lines, and keep them in mllog.txt of the workdir.
      init_from: start from the parameters of a workdir of lbopt train (gs://BUCKET/FOLDER too), of a file of
        lbopt export --format=safetensors, or of a folder of Transformers; heads that it does not have start fresh.
        None for fresh parameters.
      aggregator: what is made of the replicas' gradients; their mean by default.
      phase2: what changes after the first `num_steps`; None for a run of one phase.
    """

    name: str = "unnamed"
    about: About = dataclasses.field(default_factory=About)
    seed: int = 0
    global_batch_size: int = 256
    num_epochs: float = 20.0
    num_steps: int | None = None
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    aggregator: AggregatorConfig = dataclasses.field(default_factory=AggregatorConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    eval_global_batch_size: int = 256
    log_every_steps: int = 10
    eval_every_steps: int = 50
    eval_every_epochs: float | None = None
    target_metric: str = ""
    target_value: float = 0.0
    stop_at_target: bool = False
    stop_at_nan: bool = False
    mllog: bool = False
    init_from: str | None = None
    phase2: PhaseConfig | None = None

    def validate(self) -> None:
        """Check every field that can be checked without data or devices.

        Raises:
          UserError: naming the field, its value and the fix.
        """
        _checks.check_types(self)
        for field in (
            "global_batch_size",
            "eval_global_batch_size",
            "log_every_steps",
            "eval_every_steps",
        ):
            at_least(f"config.{field}", getattr(self, field), 1)
        require_seed("config.seed", self.seed)
        require_name("config.name", self.name)
        require(
            0 < self.num_epochs < LARGEST_INTEGER,
            "config.num_epochs",
            self.num_epochs,
            "give a number > 0 (and below 2^31)",
        )
        if self.num_steps is not None:
            at_least("config.num_steps", self.num_steps, 1)
        if self.eval_every_epochs is not None:
            require(
                0 < self.eval_every_epochs < LARGEST_INTEGER,
                "config.eval_every_epochs",
                self.eval_every_epochs,
                "give a number > 0, or None",
            )
        if self.init_from is not None:
            paths.local_or_bucket(self.init_from, "config.init_from")
        _validate_target(self)
        require_choice("config.about.status", self.about.status, STATUSES)
        validate_data(self.data, "config.data")
        validate_model(self.model, "config.model")
        _validate_fit(self.data, self.model)
        validate_loss(self.loss, "config.loss")
        validate_optimizer(self.optimizer, "config.optimizer")
        validate_schedule(self.schedule, "config.schedule")
        validate_parallel(self.parallel)
        validate_aggregator(self.aggregator, "config.aggregator")
        _validate_aggregated(self)
        _validate_checkpoint(self.checkpoint)
        _validate_state(self)
        if self.phase2 is not None:
            _validate_second_phase(self)

    def phases(self) -> "list[TrainConfig]":
        """Return each phase as a config of its own; a run of one phase is its only one."""
        first, second = dataclasses.replace(self, phase2=None), self.phase2
        if second is None:
            return [first]
        changed = dataclasses.replace(
            first,
            init_from=None,
            num_steps=second.num_steps,
            global_batch_size=second.global_batch_size,
            eval_global_batch_size=second.eval_global_batch_size,
            data=dataclasses.replace(
                self.data,
                sequence_length=second.sequence_length,
                max_predictions=second.max_predictions,
            ),
            model=dataclasses.replace(self.model, remat=second.remat),
            schedule=second.schedule,
            parallel=dataclasses.replace(self.parallel, num_microsteps=second.num_microsteps),
        )
        return [first, changed]


def _validate_second_phase(config: TrainConfig) -> None:
    assert config.phase2 is not None
    require(
        config.num_steps,
        "config.num_steps",
        config.num_steps,
        "say how many steps the first of two phases has",
    )
    validate_phase(config.phase2, "config.phase2")
    try:
        config.phases()[1].validate()
    except UserError as error:
        raise UserError(as_of_phase2(str(error))) from error


def _validate_aggregated(config: TrainConfig) -> None:
    """Check that the step can take the aggregator."""
    name = config.aggregator.name
    if name == "none":
        return
    parallel = config.parallel
    fix = f"config.aggregator.name = {name!r} chooses how gradients are summed; leave it at its default"
    for field in ("reduce_dtype", "reduce_scatter"):
        value = getattr(parallel, field)
        require(not value, f"config.parallel.{field}", value, fix)
    stage = config.optimizer.clip_stage
    fix = "an aggregator takes the mean once a step; use 'accumulated' or 'replica'"
    require(stage != "mean", "config.optimizer.clip_stage", stage, fix)
    if config.aggregator.of_adam and name == "agvm":
        fix = "AGVM needs the second moment whole; leave it False"
        require(
            not parallel.shard_update, "config.parallel.shard_update", parallel.shard_update, fix
        )
    if parallel.backend == "pmap":
        for field, value in (("replicas_per_device", 1), ("over", "replicas")):
            given = getattr(config.aggregator, field)
            require(
                given == value,
                f"config.aggregator.{field}",
                given,
                "use config.parallel.backend='jit'",
            )


def _validate_target(config: TrainConfig) -> None:
    name = config.target_metric
    known = not name or name.startswith("eval/")
    require(
        known,
        "config.target_metric",
        name,
        "name a metric of the evaluation, for instance 'eval/accuracy'",
    )
    stop = config.stop_at_target
    require(
        name or not stop, "config.stop_at_target", stop, "set target_metric and target_value too"
    )


def _validate_state(config: TrainConfig) -> None:
    """Check that a state that goes from batch to batch can."""
    if not config.data.carry_state:
        return
    two = config.phase2
    require(
        two is None,
        "config.phase2",
        two,
        "the state of text belongs to one batch size; leave it None",
    )
    parallel = config.parallel
    fix = "the state of text goes from step to step, and only a whole batch under 'jit' has it; leave it at its default"
    require(parallel.backend in ("jit", "pjit"), "config.parallel.backend", parallel.backend, fix)
    require(
        parallel.num_microsteps == 1, "config.parallel.num_microsteps", parallel.num_microsteps, fix
    )
    for field in ("reduce_dtype", "reduce_scatter"):
        value = getattr(parallel, field)
        require(not value, f"config.parallel.{field}", value, fix)
    name = config.aggregator.name
    require(name == "none", "config.aggregator.name", name, fix)
    stage = config.optimizer.clip_stage
    require(stage != "replica", "config.optimizer.clip_stage", stage, fix)
    noise = config.optimizer.track_noise_scale
    require(not noise, "config.optimizer.track_noise_scale", noise, fix)


def _validate_fit(data: DataConfig, model: ModelConfig) -> None:
    """Check that the model is for such data."""
    fitting = FAMILIES[TASKS[data.name]]
    require(
        model.name in fitting,
        "config.model.name",
        model.name,
        f"config.data.name = {data.name!r} is for {' or '.join(fitting)}; change one of the two",
    )
    folded = data.space_to_depth
    fits = model.name == "resnet" and model.stem == "space_to_depth"
    fix = "only config.model.stem = 'space_to_depth' of resnet takes folded images; set one or the other"
    require(fits or not folded, "config.data.space_to_depth", folded, fix)


def _validate_checkpoint(checkpoint: CheckpointConfig) -> None:
    at_least("config.checkpoint.every_steps", checkpoint.every_steps, 1)
    at_least("config.checkpoint.keep", checkpoint.keep, 1)
    require_choice(
        "config.checkpoint.best_metric",
        checkpoint.best_metric,
        ("eval/accuracy", "eval/exact_match", "eval/f1", "eval/loss"),
    )


def require_name(field: str, name: str) -> None:
    """Check that a name can be shown."""
    require(name.strip(), field, name, "give a name")


def require_seed(field: str, seed: int) -> None:
    """Check that a seed is a number that a JAX key tells apart from all others."""
    require(0 <= seed < LARGEST_INTEGER, field, seed, "give a number in [0, 2147483648)")
