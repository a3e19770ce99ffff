"""The configuration of a batch-size-limit study."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses
import re

from lbopt.config import _checks
from lbopt.config._aggregator import AggregatorConfig
from lbopt.config._checks import LARGEST_INTEGER
from lbopt.config._data import DataConfig
from lbopt.config._loss import LossConfig
from lbopt.config._measure import MeasureConfig, validate_measure
from lbopt.config._model import ModelConfig
from lbopt.config._optimizer import OptimizerConfig, validate_optimizer
from lbopt.config._schedule import ScheduleConfig, validate_schedule
from lbopt.config._search import SearchConfig, require_seeds, validate_search
from lbopt.config._train import STATUSES, About, TrainConfig, require_name
from lbopt.errors import UserError, require, require_choice

TRIAL_BATCHINGS = ("auto", "none", "vmap")
TRIAL_DEVICES = ("one", "all")
_OVERRIDES = ("data", "model", "loss", "aggregator")


@dataclasses.dataclass
class Arm:
    """One optimizer with its scaling and warmup rule: a line of the figure.

    Attributes:
      name: of the line, unique in the study.
      optimizer: the optimizer.
      schedule: the rule that gives the learning rate around which is searched, and the warmup.
      data: instead of the study's; None for those.
      model: likewise.
      loss: likewise.
      aggregator: likewise.
      search: likewise. Arms whose searches differ are not compared on equal terms, and the report says so.
    """

    name: str = "LAMB + LEGW"
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    data: DataConfig | None = None
    model: ModelConfig | None = None
    loss: LossConfig | None = None
    aggregator: AggregatorConfig | None = None
    search: SearchConfig | None = None


@dataclasses.dataclass
class SweepConfig:
    """How far does the batch size go, for several optimizers?

    For every arm and batch size candidates are searched, each with every search seed; the one with the best mean validation
    score over the whole length is run with the final seeds, and only those runs are tested.

    Attributes:
      name: of the study.
      about: what `lbopt recipes` says.
      train: data, model, loss, length and target of every trial; optimizer, schedule, batch size and seed are replaced. The length
        is in epochs, or, with `num_steps`, in steps at every batch size. With `target_metric` every trial is evaluated on
        validation at `eval_every_steps` or `eval_every_epochs`, and the candidate is chosen that gets to the target in the fewest steps.
      arms: what is compared.
      global_batch_sizes: ascending, from small to the whole training set.
      search: of learning rate, warmup and weight decay, the same for every batch size, and for every arm that has none of its own.
      final_seeds: seeds of the runs that are tested; none of them is a search seed.
      limit_points: an arm is past its limit where it is more than so many percentage points below its accuracy at the
        smallest batch; of language models so many percent above its perplexity. In (0, 100].
      waterfall: names of two or more arms, each of which adds one thing to the one before, for the figure that shows what each
        adds; () for none.
      measure: what is measured beside losses and accuracies.
      trial_devices: "one" (each trial on one device, many side by side) or "all" (data-parallel over all devices and
        processes, one trial after another).
      microstep_size: examples that a device takes at a time, at most: larger batches are accumulated in the fewest equal parts
        (batch norm sees a part). None: as `train.parallel.num_microsteps` says at every batch size.
      trials_per_program: how many trials one call of a batched program runs, at most: fewer where a cell has fewer at a time,
        or where their batches together would be too large.
      trial_batching: "none" (one trial a call), "vmap" (batched, over all local devices), "auto" ("none" on CPUs, else "vmap").
      num_workers: threads, each of which compiles a program and runs trials of it; 0 for one per CPU core on CPUs, two elsewhere.
        With `trial_devices="all"` there is one.
    """

    name: str = "unnamed"
    about: About = dataclasses.field(default_factory=About)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    arms: tuple[Arm, ...] = ()
    global_batch_sizes: tuple[int, ...] = ()
    search: SearchConfig = dataclasses.field(default_factory=SearchConfig)
    final_seeds: tuple[int, ...] = (100, 101, 102, 103, 104)
    limit_points: float = 1.0
    waterfall: tuple[str, ...] = ()
    measure: MeasureConfig = dataclasses.field(default_factory=MeasureConfig)
    trial_devices: str = "one"
    microstep_size: int | None = None
    trials_per_program: int = 64
    trial_batching: str = "auto"
    num_workers: int = 0

    def validate(self) -> None:
        """Check every field that can be checked without data or devices.

        Raises:
          UserError: naming the field, its value and the fix.
        """
        _checks.check_types(self)
        try:
            self.train.validate()
        except UserError as error:
            raise UserError(_as_of_study(str(error), {})) from error
        require_name("config.name", self.name)
        require_choice("config.about.status", self.about.status, STATUSES)
        require_choice("config.trial_devices", self.trial_devices, TRIAL_DEVICES)
        require_choice("config.trial_batching", self.trial_batching, TRIAL_BATCHINGS)
        self._validate_arms()
        _ascending("config.global_batch_sizes", self.global_batch_sizes)
        validate_search(self.search, "config.search")
        validate_measure(self.measure, "config.measure")
        require_seeds("config.final_seeds", self.final_seeds)
        searched = {
            seed for index in range(len(self.arms)) for seed in self.arm_search(index).seeds
        }
        both = sorted(searched & set(self.final_seeds))
        fix = f"seeds {both} also choose the candidate; use others, so that the test is fresh"
        require(not both, "config.final_seeds", self.final_seeds, fix)
        require(
            0 < self.limit_points <= 100,
            "config.limit_points",
            self.limit_points,
            "give a number in (0, 100]",
        )
        for field, low in (("trials_per_program", 1), ("num_workers", 0)):
            require(
                getattr(self, field) >= low,
                f"config.{field}",
                getattr(self, field),
                f"give a number >= {low}",
            )
        if self.microstep_size is not None:
            _checks.at_least("config.microstep_size", self.microstep_size, 1)
            parts, fix = (
                self.train.parallel.num_microsteps,
                "config.microstep_size says how many; leave it 1",
            )
            require(parts == 1, "config.train.parallel.num_microsteps", parts, fix)
        for index in range(len(self.arms)):
            self._validate_trials(index)

    def _validate_arms(self) -> None:
        names = [arm.name for arm in self.arms]
        require(len(names) > 0, "config.arms", names, "give at least one arm")
        require(
            len(set(names)) == len(names), "config.arms", names, "give every arm a name of its own"
        )
        for index, arm in enumerate(self.arms):
            require_name(f"config.arms[{index}].name", arm.name)
            validate_optimizer(arm.optimizer, f"config.arms[{index}].optimizer")
            validate_schedule(arm.schedule, f"config.arms[{index}].schedule")
            if arm.search is not None:
                validate_search(arm.search, f"config.arms[{index}].search")
        for name in self.waterfall:
            require(
                name in names,
                "config.waterfall",
                self.waterfall,
                f"there is no arm {name!r}; use {names}",
            )
        repeated = len(set(self.waterfall)) < len(self.waterfall)
        require(
            not repeated and len(self.waterfall) != 1,
            "config.waterfall",
            self.waterfall,
            "name two or more arms once",
        )

    def _validate_trials(self, index: int) -> None:
        """Check what the trials of an arm train, as a run of its own."""
        arm, trained = self.arms[index], self.arm_train(index)
        own = (
            "optimizer",
            "schedule",
            *(name for name in _OVERRIDES if getattr(arm, name) is not None),
        )
        changed = {name: f"config.arms[{index}].{name}" for name in own}
        try:
            trained.validate()
        except UserError as error:
            raise UserError(_as_of_study(str(error), changed)) from error
        fix = "a study shuffles its examples; use lbopt train, or leave it False"
        require(not trained.data.carry_state, "config.train.data.carry_state", True, fix)
        fix = "a trial ends at its first loss that is not finite; leave it None"
        limit = arm.optimizer.skip_limit
        require(limit is None, f"config.arms[{index}].optimizer.skip_limit", limit, fix)
        for field in ("phase2", "init_from"):
            fix = "a trial is one phase from fresh parameters; leave it None"
            require(
                getattr(trained, field) is None,
                f"config.train.{field}",
                getattr(trained, field),
                fix,
            )
        if self.trial_devices == "all":
            return
        over, fix = (
            trained.aggregator.over,
            "a trial has one device; leave it 'replicas', or set config.trial_devices='all'",
        )
        require(over == "replicas", "config.train.aggregator.over", over, fix)
        alone = trained.parallel
        require(
            alone.backend in ("jit", "pjit")
            and alone.num_devices in (None, 1)
            and not alone.shard_update,
            "config.train.parallel",
            dataclasses.asdict(alone),
            "a trial has one device; leave it at its defaults, or set config.trial_devices='all'",
        )

    def arm_search(self, index: int) -> SearchConfig:
        """Return how the candidates of the arm at this place in `arms` are searched."""
        return self.arms[index].search or self.search

    def arm_train(self, index: int) -> TrainConfig:
        """Return what the trials of the arm at this place in `arms` train, but for batch size, seed and what is searched."""
        arm = self.arms[index]
        changes = {name: value for name in _OVERRIDES if (value := getattr(arm, name)) is not None}
        return dataclasses.replace(
            self.train, optimizer=arm.optimizer, schedule=arm.schedule, **changes
        )

    def cell_train(self, index: int, global_batch_size: int, num_devices: int = 1) -> TrainConfig:
        """Return the config of an arm's runs at a batch size, at the rate and with the warmup that its rules give.

        Args:
          index: of the arm.
          global_batch_size: examples per step.
          num_devices: that share a trial.

        Returns:
          The config, with as many microsteps as `microstep_size` makes necessary; its seed is the study's, not a trial's.
        """
        train = dataclasses.replace(self.arm_train(index), global_batch_size=global_batch_size)
        if self.microstep_size is None:
            return train
        replicas = num_devices * train.aggregator.replicas_per_device
        parts = _fewest_parts(global_batch_size, self.microstep_size, replicas)
        return dataclasses.replace(
            train, parallel=dataclasses.replace(train.parallel, num_microsteps=parts)
        )


def _fewest_parts(size: int, largest: int, num_devices: int) -> int:
    """Return the least number of equal parts of at most `largest` examples a device.

    >>> _fewest_parts(1000, 300, 1), _fewest_parts(1000, 300, 2), _fewest_parts(200, 300, 1)
    (4, 2, 1)
    """
    if size % num_devices:
        return 1  # refused where the devices are known
    share = size // num_devices
    return next(parts for parts in range(-(-share // largest), share + 1) if share % parts == 0)


def _as_of_study(message: str, changed: dict[str, str]) -> str:
    """Say in which field of the study a field of a trial's config is."""

    def place(found: re.Match[str]) -> str:
        return changed.get(found[1], f"config.train.{found[1]}")

    return re.sub(r"\bconfig\.(\w+)", place, message)


def _ascending(field: str, values: tuple) -> None:
    ok = (
        len(values) > 0
        and 0 < min(values) <= max(values) < LARGEST_INTEGER
        and list(values) == sorted(set(values))
    )
    require(ok, field, values, "give at least one positive number, ascending, none twice")
