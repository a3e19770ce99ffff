"""The configuration of one training run."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import contextlib
import dataclasses
import math
import re
from typing import Any

from lbopt import errors, paths
from lbopt._user_code import is_place
from lbopt.config import _checks, _fields
from lbopt.config._aggregator import AggregatorConfig, check_aggregator_kind
from lbopt.config._batch_schedule import (
    NOISE_SCALE,
    BatchScheduleConfig,
    check_batch_schedule,
    check_batch_schedule_kind,
    check_unit,
)
from lbopt.config._checks import at_least, require_name, require_place_or_choice, require_seed
from lbopt.config._data import DataConfig, check_data, task_of
from lbopt.config._diloco import DilocoConfig, check_diloco
from lbopt.config._fields import NOT_EMPTY, only
from lbopt.config._from_text import FromText
from lbopt.config._loss import LossConfig, check_loss
from lbopt.config._model import AUTOMATIC_STEM, FAMILIES, ModelConfig, check_heads, check_model
from lbopt.config._optimizer import OptimizerConfig, check_optimizer, check_optimizer_kind
from lbopt.config._parallel import BY_COMPILER, ParallelConfig, check_parallel
from lbopt.config._phase import ELSEWHERE, PhaseConfig, check_phase
from lbopt.config._scaling import check_scaling
from lbopt.config._schedule import ScheduleConfig, check_schedule
from lbopt.config._step_options import step_options
from lbopt.errors import require, require_choice
from lbopt.schedules import rule_changes

_DURATION = re.compile(r"(\d[\d.]*)(?:-(\d[\d.]*))?(?:, \w+ [\d.-]+)? (s|min|h)\b")
_WHOLE_BATCH = {
    "parallel.backend": BY_COMPILER,
    "parallel.num_microsteps": (1,),
    "parallel.reduce_dtype": (None,),
    "parallel.reduce_scatter": (False,),
    "aggregator.name": ("none",),
    "optimizer.clip_stage": ("mean", "accumulated", "none"),
    "optimizer.track_noise_scale": (False,),
}
"""Values of fields with which a loss sees the whole batch of a step at once."""
TRANSFERRED = ("adam", "adamw")
"""Optimizers whose numbers can be taken from a narrower network."""
TRACKERS = ("mlflow", "wandb")
STATUSES = ("measured here", "planned by the TPU compiler", "not yet run")


@dataclasses.dataclass
class About:
    """The description of a config that `lbopt recipes` prints.

    Attributes:
      paper: Paper that the config follows, with the arXiv id.
      published_result: Number to reach, with its source; "-" if there is none.
      hardware: Hardware on which the published result was reached.
      time: Time in which the published result was reached.
      topology: The hardware as `lbopt plan` takes it, "v3:32x32"; "" if it was no TPU, or none is
        named.
      note: Numbers of the recipe that are recalled from memory, or our own choice.
      status: "measured here", "planned by the TPU compiler" or "not yet run".

    >>> about = About(paper="arXiv 1904.00962v5", hardware="1024 TPUv3 chips", time="76.19 min")
    >>> about.published_seconds
    4571.4
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
        """The first number of `time` that has a unit, in seconds; the middle of a range.

        None if there is none.

        >>> About(time="26.9-28.7 s").published_seconds, About(time="82.8 h").published_seconds
        (27.8, 298080.0)
        """
        found = _DURATION.search(self.time)
        if found is None:
            return None
        numbers = [float(number) for number in found.group(1, 2) if number]
        unit = {"s": 1, "min": 60, "h": 3600}[found[3]]
        return round(sum(numbers) / len(numbers) * unit, 3)


@dataclasses.dataclass
class CheckpointConfig:
    """The interval between checkpoints, and the checkpoints that are kept.

    Attributes:
      every_steps: Steps between two saves; the state is also saved at the end and on SIGTERM.
      keep: Number of latest checkpoints that are kept beside the best one.
      best_metric: Evaluation metric that says which is best. Higher is better unless its name ends
        in "loss", "perplexity", "per_byte", "error", "mse" or "mae". Where the evaluation has no
        accuracy, the default means the metric of the task: perplexity, R^2 or the loss.

    >>> checkpoint = CheckpointConfig(every_steps=50, best_metric="eval/loss")
    >>> TrainConfig(data="digits", model="cnn", checkpoint=checkpoint).validate()
    """

    every_steps: int = 100
    keep: int = 3
    best_metric: str = "eval/accuracy"


@dataclasses.dataclass
class TrainConfig(FromText):
    """One training run. Groups can be given as one text, or as an object, see `FromText`.

    Attributes:
      name: Name of the recipe.
      about: Description of the recipe that `lbopt recipes` prints.
      seed: Seed of initialisation, shuffle and dropout.
      global_batch_size: Examples per optimizer step over all devices and microsteps.
      num_epochs: Length of the run; steps are rounded up.
      num_steps: Length of the run in optimizer steps, instead of `num_epochs`; with two phases,
        that of the first. With a batch schedule the run has the examples of as many steps at
        `global_batch_size`, in fewer steps.
      eval_global_batch_size: Examples per step of evaluation; any size, evaluation is exact.
      log_every_steps: Steps between two lines of metrics.jsonl.
      eval_every_steps: Steps between two evaluations on the validation split; there is one at the
        end too.
      eval_every_epochs: Epochs between two evaluations, instead of `eval_every_steps`.
      target_metric: Metric, "eval/accuracy" for instance, of which the log says after how many
        steps and seconds of training an evaluation first reaches `target_value`; "" for none.
      target_value: Smallest value of the target; the largest where lower is better, which the
        metric's name tells as for `checkpoint.best_metric`.
      stop_at_target: Whether the run ends at the target.
      stop_at_nan: Whether the run ends, with exit code 2, where a logged loss is not finite, and
        never saves a network that is not. Otherwise such a run says so and continues; the last
        checkpoint of a finite network is kept in either case, and a study's trials always end
        there.
      mllog: Whether MLPerf's `:::MLLOG` lines are printed, and kept in mllog.txt of the workdir.
      init_from: Place of the parameters to start from: a workdir of lbopt train, a file of lbopt
        export --format=safetensors, or a folder of Transformers, here or in a bucket
        (gs://BUCKET/PATH); heads that it does not have start fresh. None for fresh parameters.
      aggregator: Aggregator in place of the mean of the replicas' gradients.
      diloco: Local steps of each worker, with an outer step between them.
      batch_schedule: Batch size over the run, which then starts with `global_batch_size`; None for
        the same batch throughout.
      phase2: Settings that change after the first `num_steps`; None for a run of one phase.
      trackers: Trackers that get the lines of metrics.jsonl: "wandb" (Weights & Biases), "mlflow",
        or `module:name` or `file.py:name` of a function (workdir, config) that returns a function
        (step, metrics), or a writer with `write_scalars(step, metrics)` like those of CLU.

    >>> config = TrainConfig(data="digits", model="cnn", optimizer="lamb", global_batch_size=1024)
    >>> config.validate()
    >>> config.optimizer.name, config.schedule.scaling_rule
    ('lamb', 'sqrt')
    """

    name: str = "unnamed"
    about: About = dataclasses.field(default_factory=About)
    seed: int = 0
    global_batch_size: int = 256
    num_epochs: float = only(20.0, unless="num_steps")
    num_steps: int | None = None
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    aggregator: AggregatorConfig = dataclasses.field(default_factory=AggregatorConfig)
    diloco: DilocoConfig = dataclasses.field(default_factory=DilocoConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    eval_global_batch_size: int = 256
    log_every_steps: int = 10
    eval_every_steps: int = only(50, unless="eval_every_epochs")
    eval_every_epochs: float | None = None
    target_metric: str = ""
    target_value: float = only(0.0, target_metric=NOT_EMPTY)
    stop_at_target: bool = only(False, target_metric=NOT_EMPTY)
    stop_at_nan: bool = False
    mllog: bool = False
    init_from: str | None = None
    batch_schedule: BatchScheduleConfig | None = None
    phase2: PhaseConfig | None = None
    trackers: tuple[str, ...] = ()

    def validate(self) -> None:
        """Check every field that can be checked without data or devices.

        Raises:
          UserError: Naming the field, its value and the fix.
        """
        with _checks.naming("config", TrainConfig):
            self.check()

    def check(self, of_arms: bool = False) -> None:
        """Do what `validate` does, naming fields without "config.".

        Args:
          of_arms: Whether the arms of a study bring their own optimizers.
        """
        _checks.check_types(self)
        _checks.check_numbers(self)
        _check_length(self)
        require_seed("seed", self.seed)
        require_name("name", self.name)
        if self.init_from is not None:
            paths.local_or_bucket(self.init_from, "init_from")
        with errors.about("trackers", self.trackers):
            for name in self.trackers:
                require_place_or_choice("name", name, TRACKERS, "config.trackers")
        once = len(set(self.trackers)) == len(self.trackers)
        require(once, "trackers", self.trackers, "name each once")
        if self.target_metric:
            check_metric("target_metric", self.target_metric)
        if self.target_metric == "eval/accuracy":
            fix = "an accuracy is a share; give a number above 0 and at most 1"
            require(0 < self.target_value <= 1, "target_value", self.target_value, fix)
        require_choice("about.status", self.about.status, STATUSES)
        for name, check in (
            ("data", check_data),
            ("model", check_model),
            ("loss", check_loss),
            ("schedule", check_schedule),
            ("optimizer", check_optimizer_kind),
            ("aggregator", check_aggregator_kind),
            ("parallel", check_parallel),
            ("checkpoint", _check_checkpoint),
        ):
            with errors.under(name):
                check(getattr(self, name))
        if self.phase2 is not None:
            with errors.under("phase2"):
                check_phase(self.phase2)
        if self.batch_schedule is not None:
            with errors.under("batch_schedule"):
                check_batch_schedule_kind(self.batch_schedule)
        _check_model_fits_data(self)
        # A field applies or not by the kinds above, so these must be known to be valid.
        _fields.check_all(self)

        with errors.under("model"):
            check_heads(self.model)
        check_optimizer(self.optimizer)
        check_scaling(self.optimizer, self.schedule, self.global_batch_size)
        step_options(self)
        _check_carried_state(self)
        check_batch_growth(self)
        check_diloco(self)
        if not of_arms:
            _check_transfer(self)
        if self.phase2 is not None:
            _check_second_phase(self)

    def steps_between_evaluations(self, steps_per_epoch: float) -> float:
        """Return the steps between two evaluations, which may be a fraction."""
        if self.eval_every_epochs is None:
            return self.eval_every_steps
        return self.eval_every_epochs * steps_per_epoch

    def examples_between_evaluations(self, num_examples: int) -> float | None:
        """Return the examples between two evaluations of a run whose batch changes.

        Args:
          num_examples: Number of examples in the training set.

        Returns:
          The examples, which may be a fraction; None if the evaluations count steps.
        """
        if self.batch_schedule is None or self.eval_every_epochs is None:
            return None
        return self.eval_every_epochs * num_examples

    def phases(self) -> "list[TrainConfig]":
        """Return each phase as a config of its own; a run of one phase is its only one."""
        first = dataclasses.replace(self, phase2=None)
        second = self.phase2
        if second is None:
            return [first]
        changed = dataclasses.replace(
            first,
            init_from=None,
            num_steps=second.num_steps,
            global_batch_size=second.global_batch_size,
            eval_global_batch_size=second.eval_global_batch_size,
            data=_changed(self.data, second, ("sequence_length", "max_predictions")),
            model=_changed(self.model, second, ("remat",)),
            schedule=second.schedule,
            parallel=dataclasses.replace(self.parallel, num_microsteps=second.num_microsteps),
        )
        return [first, changed]


def _changed(group: Any, second: PhaseConfig, names: tuple[str, ...]) -> Any:
    """Return a group with the second phase's values of the named fields, where they apply."""
    changed = dataclasses.replace(group, **{name: getattr(second, name) for name in names})
    # Without rematerialisation there is no number of rematerialised layers, for instance.
    idle = (field for field in dataclasses.fields(group) if not _fields.applies(field, changed))
    defaults = {field.name: _fields.default_of(field) for field in idle}
    return dataclasses.replace(changed, **defaults)


def _check_length(config: TrainConfig) -> None:
    sizes = ("global_batch_size", "eval_global_batch_size")
    for field in (*sizes, "log_every_steps", "eval_every_steps"):
        at_least(field, getattr(config, field), 1)
    check_epochs(config)
    every = config.eval_every_epochs
    steps = config.num_steps
    some = every is None or every > 0
    require(some, "eval_every_epochs", every, "give a number > 0, or None")
    if steps is not None:
        at_least("num_steps", steps, 1)
    fix = "say how many steps the first of two phases has"
    given = config.phase2 is None or steps is not None
    require(given, "num_steps", steps, fix, code="missing")


def check_epochs(config: TrainConfig) -> None:
    """Check the length in epochs."""
    epochs = config.num_epochs
    require(0 < epochs < math.inf, "num_epochs", epochs, "give a finite number > 0")


def _check_second_phase(config: TrainConfig) -> None:
    with naming_phase2():
        config.phases()[1].check()


def naming_phase2() -> contextlib.AbstractContextManager[None]:
    """Let errors about the second phase as a run of its own name the fields of the whole config."""
    return errors.under("", **ELSEWHERE)


def check_metric(field: str, name: str) -> None:
    """Check the form of a metric's name; the data decide later whether there is such a metric."""
    fix = "name a metric of the evaluation, for instance 'eval/accuracy'"
    require(name.startswith("eval/"), field, name, fix, code="choice")


def _check_carried_state(config: TrainConfig) -> None:
    """Check that nothing stands in the way of a state that is carried from batch to batch."""
    if not config.data.carry_state:
        return
    two = config.phase2
    fix = "the state of text belongs to one batch size; leave it None"
    require(two is None, "phase2", two, fix, code="conflict")
    fix = "{carry_state} needs a network of lbopt that gives its state; use lstm_lm"
    also = {"carry_state": "data.carry_state"}
    gives = config.model.name == "lstm_lm"
    require(gives, "model.name", config.model.name, fix, code="conflict", also=also)

    fix = (
        "{carry_state} needs the whole batch of a step in one program, under 'jit'; leave this at "
        "its default"
    )
    _checks.require_among(config, _WHOLE_BATCH, fix, {"carry_state": "data.carry_state"})


def check_batch_growth(config: TrainConfig) -> None:
    """Check a batch schedule, if there is one, against the fields beside it."""
    changes = config.batch_schedule
    if changes is None:
        return
    beside = ("batch_schedule", "data", "global_batch_size", "optimizer", "parallel", "schedule")
    with errors.under("batch_schedule", **{place: place for place in beside}):
        check_batch_schedule(changes, config.global_batch_size)
        check_unit(changes, config.data)
        fix = "a change of batch is a phase of its own; give one of the two"
        alone = config.phase2 is None
        require(alone, "kind", changes.kind, fix, code="conflict")

        rule = config.schedule.scaling_rule
        fix = "it cuts the rate less where the batch grows, and {rule} = "
        fix += f"{rule!r} does not scale the rate; use 'sqrt', or another rule that does"
        scales = changes.kind != "seesaw" or "learning_rate" in rule_changes(rule)
        also = {"rule": "schedule.scaling_rule"}
        require(scales, "kind", changes.kind, fix, code="conflict", also=also)

        by_noise = changes.kind == NOISE_SCALE
        fix = "it needs the run's noise scale; set {track_noise_scale} = True"
        measured = config.optimizer.track_noise_scale or not by_noise
        also = {"track_noise_scale": "optimizer.track_noise_scale"}
        require(measured, "kind", changes.kind, fix, code="conflict", also=also)
        fix = "skipped updates would leave the learning rate behind the examples; leave it None"
        limit = config.optimizer.skip_limit
        skips = by_noise and limit is not None
        place = "optimizer.skip_limit"
        require(not skips, place, limit, fix, code="conflict")

        fix = "the state of text belongs to one batch size; leave {batch_schedule} None"
        carried = config.data.carry_state
        also = {"batch_schedule": "batch_schedule"}
        require(not carried, "data.carry_state", carried, fix, code="conflict", also=also)

        microsteps = config.parallel.num_microsteps
        free = changes.microstep_size is None or microsteps == 1
        fix = "{num_microsteps} says how many; leave one of the two at its default"
        also = {"num_microsteps": "parallel.num_microsteps"}
        require(free, "microstep_size", changes.microstep_size, fix, code="conflict", also=also)


def _check_transfer(config: TrainConfig) -> None:
    """Check that the optimizer can take the numbers of a narrower network, if it shall."""
    model = config.model
    field = "base_size" if model.base_size else "base_widths"
    base = getattr(model, field)
    name = config.optimizer.name
    fix = f"how {{optimizer}} = {name!r} follows the width is not known; use one of "
    fix += f"{', '.join(TRANSFERRED)}, or leave it out"
    known = not base or name in TRANSFERRED
    also = {"optimizer": "optimizer.name"}
    require(known, f"model.{field}", base, fix, code="conflict", also=also)
    fix = "it compares gradients by a second moment that the width has scaled; leave it out"
    unscaled = not base or not config.aggregator.of_adam
    require(unscaled, "aggregator.of_adam", True, fix, code="conflict")


def _check_model_fits_data(config: TrainConfig) -> None:
    data = config.data
    model = config.model
    task = task_of(data.name, data.task)
    fitting = FAMILIES.get(task, ())
    fix = f"{{data}} = {data.name!r} is for {' or '.join(fitting) or 'a model of your own'}; "
    fix += "change one of the two"
    # The task of your own data may be known only when they are read.
    unknown = task in ("", "multi_label", "regression") and model.name in FAMILIES["classification"]
    fits = is_place(model.name) or model.name in fitting or unknown
    also = {"data": "data.name"}
    require(fits, "model.name", model.name, fix, code="conflict", also=also)
    folded = data.space_to_depth
    stems = ("space_to_depth", AUTOMATIC_STEM)
    fits = not folded or (model.name == "resnet" and model.stem in stems)
    fix = "only {stem} = 'space_to_depth' of resnet takes folded images; set one or the other"
    also = {"stem": "model.stem"}
    require(fits, "data.space_to_depth", folded, fix, code="conflict", also=also)


def _check_checkpoint(checkpoint: CheckpointConfig) -> None:
    at_least("every_steps", checkpoint.every_steps, 1)
    at_least("keep", checkpoint.keep, 1)
    check_metric("best_metric", checkpoint.best_metric)
