"""The configuration of a batch-size-limit study."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import contextlib
import dataclasses

from lbopt import errors
from lbopt.config import _checks, _fields
from lbopt.config._aggregator import AggregatorConfig
from lbopt.config._batch_schedule import NOISE_SCALE, BatchScheduleConfig, fewest_microsteps
from lbopt.config._checks import at_least, require_name, require_seeds
from lbopt.config._data import DataConfig
from lbopt.config._fields import only
from lbopt.config._from_text import FromText
from lbopt.config._loss import LossConfig
from lbopt.config._measure import MeasureConfig, check_measure
from lbopt.config._model import ModelConfig
from lbopt.config._optimizer import OptimizerConfig
from lbopt.config._parallel import BY_COMPILER
from lbopt.config._scaling import check_scaling
from lbopt.config._schedule import ScheduleConfig
from lbopt.config._search import SearchConfig, check_search
from lbopt.config._train import (
    STATUSES,
    About,
    TrainConfig,
    check_batch_growth,
    check_epochs,
    check_metric,
)
from lbopt.errors import require, require_choice

TRIAL_BATCHINGS = ("auto", "none", "vmap")
TRIAL_DEVICES = ("one", "all")
_OVERRIDES = ("data", "model", "loss", "aggregator", "batch_schedule")
_ON_ONE_DEVICE = {
    "aggregator.over": ("replicas",),
    "parallel.backend": BY_COMPILER,
    "parallel.num_devices": (None, 1),
    "parallel.order": ("given",),
    "parallel.reduce_dtype": (None,),
    "parallel.shard_update": (False,),
}
"""Values of fields with which one device can run a trial."""
_BATCHED = ({"trial_devices": ("one",), "trial_batching": ("auto", "vmap")},)
_IN_ARMS = "every arm has its own; set that in the config file"
_NO_WORKDIR = "a trial has no workdir; it writes one line, when it ends"
_REPLACED = {
    "name": "the study has a name of its own; set name",
    "about": "the study has one of its own; set that in the config file",
    "optimizer": _IN_ARMS,
    "schedule": _IN_ARMS,
    "global_batch_size": "trials have those of the study; set global_batch_sizes",
    "seed": "trials have those of the study; set search.seeds and final_seeds",
    "checkpoint": _NO_WORKDIR,
    "log_every_steps": _NO_WORKDIR,
    "mllog": _NO_WORKDIR,
    "trackers": _NO_WORKDIR,
    "stop_at_nan": "a trial always ends at its first loss that is not finite",
}
"""Fields of `train` that no trial reads, and why."""


@dataclasses.dataclass
class Arm(FromText):
    """One optimizer with its scaling and warmup rule: a line of the figure.

    Attributes:
      name: Name of the arm, unique in the study.
      optimizer: The optimizer.
      schedule: Rule that gives the warmup and the learning rate at the centre of the search.
      data: Data instead of the study's; None for those.
      model: Model instead of the study's; None for that.
      loss: Loss instead of the study's; None for that.
      aggregator: Aggregator instead of the study's; None for that.
      batch_schedule: Batch schedule instead of the study's; None for that. The study's batch sizes
        are those at the start.
      search: Search instead of the study's; None for that. Arms whose searches differ are not
        compared on equal terms, and the report says so.

    >>> from lbopt.config import OptimizerConfig, ScheduleConfig
    >>> arm = Arm("LARS", OptimizerConfig("lars"), ScheduleConfig(base_learning_rate=0.1))
    >>> Arm("LAMB", "lamb", 0.01).schedule.scaling_rule  # groups as text, or as a number
    'none'
    """

    name: str = "LAMB + LEGW"
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    data: DataConfig | None = None
    model: ModelConfig | None = None
    loss: LossConfig | None = None
    aggregator: AggregatorConfig | None = None
    batch_schedule: BatchScheduleConfig | None = None
    search: SearchConfig | None = None


@dataclasses.dataclass
class SweepConfig:
    """A study of the largest batch size that several optimizers can use.

    For every arm and batch size candidates are searched, each with every search seed. The candidate
    with the best mean validation score over the whole length is run with the final seeds, and only
    those runs are tested.

    Attributes:
      name: Name of the study.
      about: Description of the study that `lbopt recipes` prints.
      train: Data, model, loss, length and target of every trial; optimizer, schedule, batch size
        and seed are replaced. The length is in epochs, or, with `num_steps`, in steps at every
        batch size. With `target_metric` every trial is evaluated on validation at
        `eval_every_steps` or `eval_every_epochs`, and the candidate is chosen that reaches the
        target in the fewest steps.
      arms: Arms that are compared.
      global_batch_sizes: Batch sizes, ascending, from small to the whole training set.
      search: Search of learning rate, warmup and weight decay, the same for every batch size, and
        for every arm that has none of its own.
      final_seeds: Seeds of the runs that are tested; none of them is a search seed.
      limit_points: Percentage points of accuracy by which an arm may fall below its mean over small
        batches, those of at most 4 times the smallest, before it is past its limit; of R^2 points
        of 0.01, of any other metric (perplexity, a loss) percent of that mean. In (0, 100].
      waterfall: Names of two or more arms, each of which adds one thing to the one before, for the
        figure that shows what each adds; () for none.
      measure: Measurements other than losses and accuracies.
      trial_devices: "one" (each trial on one device, many side by side) or "all" (data-parallel
        over all devices and processes, one trial after another).
      microstep_size: Largest number of examples that a device takes at a time: larger batches are
        accumulated in the fewest equal microsteps (batch norm sees a microstep). None for
        `train.parallel.num_microsteps` at every batch size.
      trials_per_program: Largest number of trials in one call of a batched program; fewer where a
        cell has fewer at a time, or where their batches together would be too large.
      trial_batching: "none" (one trial a call), "vmap" (batched, over all local devices) or "auto"
        ("none" on CPUs, else "vmap").
      num_workers: Number of threads, each of which compiles a program and runs trials of it; 0 for
        one per CPU core on CPUs, two elsewhere. With `trial_devices="all"` there is one.
      metric: Metric that judges the models, "eval/mean_absolute_error" for instance, or a metric
        that your own loss gives; whether lower is better, its name tells as for
        `train.checkpoint.best_metric`. "" for that of the task: accuracy of classes and labels,
        perplexity of a language model, R^2 of a regression, the loss of a loss of your own. Use
        "eval/bits_per_byte" instead of "eval/perplexity_per_byte", which has the same order.

    >>> arms = (Arm("LAMB", "lamb", 0.01), Arm("momentum", "momentum", 0.1))
    >>> train = TrainConfig(data="digits", model="cnn", num_epochs=5)
    >>> study = SweepConfig(train=train, arms=arms, global_batch_sizes=(64, 256, 1024))
    >>> study.validate()
    """

    name: str = "unnamed"
    about: About = dataclasses.field(default_factory=About)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    arms: tuple[Arm, ...] = ()
    global_batch_sizes: tuple[int, ...] = ()
    search: SearchConfig = dataclasses.field(default_factory=SearchConfig)
    final_seeds: tuple[int, ...] = (100, 101, 102, 103, 104)
    limit_points: float = only(1.0, {"train.stop_at_target": (False,)})
    waterfall: tuple[str, ...] = ()
    measure: MeasureConfig = dataclasses.field(default_factory=MeasureConfig)
    trial_devices: str = "one"
    microstep_size: int | None = None
    trials_per_program: int = only(64, *_BATCHED)
    trial_batching: str = only("auto", trial_devices=("one",))
    num_workers: int = only(0, trial_devices=("one",))
    metric: str = ""

    def validate(self) -> None:
        """Check every field that can be checked without data or devices.

        Raises:
          UserError: Naming the field, its value and the fix.
        """
        with _checks.naming("config", SweepConfig):
            self._check()

    def check_cells(self) -> None:
        """Check what a report needs to read a study: its arms, batch sizes, searches and epochs.

        A study that an earlier version of lbopt accepted and `validate` refuses can so be reported.

        Raises:
          UserError: Naming the field, its value and the fix.
        """
        with _checks.naming("config", SweepConfig):
            self._check_arms()
            with errors.under("train"):
                check_epochs(self.train)

    def why_unused(self, name: str) -> str | None:
        """Return why no trial reads a field, "train.seed" for instance; None if one may.

        A config file may set such fields, because its `train` may be the config of a recipe.
        """
        group, _, inner = name.partition(".")
        if group != "train":
            return None
        if inner.startswith("eval_every_") and not self.train.target_metric:
            return "a trial is evaluated on its way only for train.target_metric; set that too"
        return _REPLACED.get(inner.partition(".")[0])

    def _check(self) -> None:
        _checks.check_types(self)
        _checks.check_numbers(self)
        with _checks.naming("config.train", TrainConfig):
            self.train.check(of_arms=True)

        require_name("name", self.name)
        require_choice("about.status", self.about.status, STATUSES)
        if self.metric:
            check_metric("metric", self.metric)
            # Examples are compared by means, and this is no mean over examples or tokens.
            fix = (
                "a study judges by its logarithm, which has the same order; use eval/bits_per_byte"
            )
            refused = self.metric == "eval/perplexity_per_byte"
            require(not refused, "metric", self.metric, fix, code="choice")
        require_choice("trial_devices", self.trial_devices, TRIAL_DEVICES)
        require_choice("trial_batching", self.trial_batching, TRIAL_BATCHINGS)
        self._check_arms()
        for index, arm in enumerate(self.arms):
            require_name(f"arms[{index}].name", arm.name)
        with errors.under("measure"):
            check_measure(self.measure)

        # A field applies or not by the kinds above, so these must be known to be valid.
        _fields.check(self)
        _fields.check(self.measure, "measure")
        for place, search in self._searches():
            _fields.check(search, place)
        self._check_seeds()
        points = self.limit_points
        require(0 < points <= 100, "limit_points", points, "give a number in (0, 100]")
        at_least("trials_per_program", self.trials_per_program, 1)
        at_least("num_workers", self.num_workers, 0)

        self._check_microsteps()
        for index in range(len(self.arms)):
            self._check_trials(index)

    def _check_seeds(self) -> None:
        require_seeds("final_seeds", self.final_seeds)
        searches = [self.arm_search(index) for index in range(len(self.arms))]
        searched = {seed for search in searches for seed in search.seeds}
        both = sorted(searched & set(self.final_seeds))
        fix = f"seeds {both} also choose the candidate; use others, so that the test is fresh"
        require(not both, "final_seeds", self.final_seeds, fix, code="conflict")

    def _check_microsteps(self) -> None:
        if self.microstep_size is None:
            return
        at_least("microstep_size", self.microstep_size, 1)
        microsteps = self.train.parallel.num_microsteps
        fix = "{microstep_size} says how many; leave it 1"
        place = "train.parallel.num_microsteps"
        also = ["microstep_size"]
        require(microsteps == 1, place, microsteps, fix, code="conflict", also=also)

    def _check_arms(self) -> None:
        names = [arm.name for arm in self.arms]
        require(len(names) > 0, "arms", names, "give at least one arm", code="missing")
        different = len(set(names)) == len(names)
        require(different, "arms", names, "give every arm a name of its own")
        _check_ascending("global_batch_sizes", self.global_batch_sizes)
        for place, search in self._searches():
            with errors.under(place):
                check_search(search)
        with errors.about("waterfall", self.waterfall):
            for name in self.waterfall:
                require_choice("name", name, names)
        repeated = len(set(self.waterfall)) < len(self.waterfall)
        fits = not repeated and len(self.waterfall) != 1
        require(fits, "waterfall", self.waterfall, "name two or more arms once")

    def _searches(self) -> list[tuple[str, SearchConfig]]:
        """Return the study's search and those of arms with their own, after their fields' names."""
        own = [(f"arms[{index}].search", arm.search) for index, arm in enumerate(self.arms)]
        return [("search", self.search), *((place, one) for place, one in own if one is not None)]

    def _check_trials(self, index: int) -> None:
        """Check the config of an arm's trials as that of a run of its own."""
        first, *others = self.global_batch_sizes
        trained = dataclasses.replace(self.arm_train(index), global_batch_size=first)
        with self.naming_trials(index):
            trained.check()
            for size in others:
                check_scaling(trained.optimizer, trained.schedule, size)
                check_batch_growth(dataclasses.replace(trained, global_batch_size=size))

            fix = "a study shuffles its examples; use lbopt train, or leave it False"
            carried = trained.data.carry_state
            require(not carried, "data.carry_state", carried, fix, code="conflict")
            fix = "a trial ends at its first loss that is not finite; leave it None"
            limit = trained.optimizer.skip_limit
            require(limit is None, "optimizer.skip_limit", limit, fix, code="conflict")
            fix = "a trial's line has no such numbers; use lbopt train, or leave it False"
            for field in ("monitor_layers", "track_noise_scale"):
                value = getattr(trained.optimizer, field)
                require(not value, f"optimizer.{field}", value, fix, code="conflict")
            fix = "a trial is one phase from fresh parameters; leave it None"
            for field in ("phase2", "init_from"):
                value = getattr(trained, field)
                require(value is None, field, value, fix, code="conflict")
            every = trained.diloco.every
            fix = "a trial has one worker; use lbopt train, or leave it 1"
            require(every == 1, "diloco.every", every, fix, code="conflict")
            if self.trial_devices == "one":
                _check_alone(trained)
            if trained.batch_schedule is not None:
                self._check_growing(index)

    def _check_growing(self, index: int) -> None:
        """Check what a study cannot do in an arm whose batch grows."""
        fix = "an arm with a batch schedule trains on one device; use 'one'"
        alone = self.trial_devices == "one"
        place = "config.trial_devices"
        require(alone, place, self.trial_devices, fix, code="conflict")
        growing = self.arm_train(index).batch_schedule
        assert growing is not None
        fix = "a trial does not measure its noise scale; use lbopt train, or another kind"
        with self.naming_trials(index):
            known = growing.kind != NOISE_SCALE
            require(known, "batch_schedule.kind", growing.kind, fix, code="conflict")
        search = self.arm_search(index)
        fix = "an arm with a batch schedule has no shorter trials; use 'grid' or 'halton'"
        with self.naming_search(index):
            require(not search.has_rungs, "method", search.method, fix, code="conflict")

    def naming_trials(self, index: int) -> contextlib.AbstractContextManager[None]:
        """Let errors about the config of an arm's trials name the fields of the study."""
        arm = self.arms[index]
        own = [name for name in _OVERRIDES if getattr(arm, name) is not None]
        places = {name: f"config.arms[{index}].{name}" for name in ("optimizer", "schedule", *own)}
        return _checks.naming("config.train", TrainConfig, **places)

    def arm_search(self, index: int) -> SearchConfig:
        """Return the search of the arm at this place in `arms`: its own, or the study's."""
        return self.arms[index].search or self.search

    def naming_search(self, index: int) -> contextlib.AbstractContextManager[None]:
        """Let errors about the search of an arm name the fields of the study."""
        own = self.arms[index].search is not None
        return errors.under(f"config.arms[{index}].search" if own else "config.search")

    def arm_train(self, index: int) -> TrainConfig:
        """Return the config that the trials of the arm at this place in `arms` have in common.

        Its batch size, seed and searched numbers are the study's, not those of a trial.
        """
        arm = self.arms[index]
        changes = {name: value for name in _OVERRIDES if (value := getattr(arm, name)) is not None}
        return dataclasses.replace(
            self.train, optimizer=arm.optimizer, schedule=arm.schedule, **changes
        )

    def cell_train(self, index: int, global_batch_size: int, num_devices: int = 1) -> TrainConfig:
        """Return the config of an arm's runs at a batch size.

        Args:
          index: Place of the arm in `arms`.
          global_batch_size: Examples per step.
          num_devices: Number of devices that share a trial.

        Returns:
          The config, with the number of microsteps that `microstep_size` makes necessary; its seed
          is the study's, not a trial's.
        """
        train = dataclasses.replace(self.arm_train(index), global_batch_size=global_batch_size)
        if self.microstep_size is None:
            return train
        replicas = num_devices * train.aggregator.replicas_per_device
        microsteps = fewest_microsteps(global_batch_size, self.microstep_size, replicas)
        return dataclasses.replace(
            train, parallel=dataclasses.replace(train.parallel, num_microsteps=microsteps)
        )


def _check_alone(trained: TrainConfig) -> None:
    """Check that one device can run a trial."""
    fix = "a trial has one device; leave it at its default, or set {trial_devices}='all'"
    _checks.require_among(trained, _ON_ONE_DEVICE, fix, {"trial_devices": "config.trial_devices"})


def _check_ascending(field: str, values: tuple) -> None:
    ascending = len(values) > 0 and min(values) > 0 and list(values) == sorted(set(values))
    require(ascending, field, values, "give at least one positive number, ascending, none twice")
