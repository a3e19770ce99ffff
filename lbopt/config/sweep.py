"""The configuration of a batch-size-limit study."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses

from lbopt.config import checks
from lbopt.config.checks import LARGEST
from lbopt.config.data import DRAWN_ANEW
from lbopt.config.optimizer import OptimizerConfig, validate_optimizer
from lbopt.config.schedule import ScheduleConfig, validate_schedule
from lbopt.config.train import STATUSES, About, TrainConfig, require_name, require_seed
from lbopt.errors import require, require_choice

TRIAL_BATCHINGS = ("auto", "map", "vmap")


@dataclasses.dataclass
class Arm:
    """One optimizer with its scaling and warmup rule: a line of the figure.

    Attributes:
      name: of the line, unique in the study.
      optimizer: the optimizer.
      schedule: the rule that gives the learning rate around which is searched, and the warmup.
    """

    name: str = "LAMB + LEGW"
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)


@dataclasses.dataclass
class SweepConfig:
    """How far does the batch size go, for several optimizers?

    For every arm and batch size, each learning rate of the grid is run with every search seed; the one with the best
    mean validation accuracy is run with the final seeds, and only those runs are tested.

    Attributes:
      name: of the study.
      about: what `lbopt recipes` says.
      train: data, model and length of every trial, each on one device; optimizer, schedule, batch size and seed are
        replaced.
      arms: what is compared.
      global_batch_sizes: ascending, from small to the whole training set.
      learning_rate_factors: the grid, as multiples of the arm's scaled learning rate; ascending.
      search_seeds: seeds of the runs that choose the learning rate.
      final_seeds: seeds of the runs that are tested; none of them is a search seed.
      limit_points: an arm is past its limit where it is more than so many percentage points below its accuracy at the
        smallest batch.
      trials_per_program: how many trials one call of a compiled program runs.
      trial_batching: "map" (one after another inside the program), "vmap" (batched), "auto" (by device).
      num_workers: cells compiled and run side by side; 0 for one per CPU core.
    """

    name: str = "unnamed"
    about: About = dataclasses.field(default_factory=About)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    arms: tuple[Arm, ...] = ()
    global_batch_sizes: tuple[int, ...] = ()
    learning_rate_factors: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    search_seeds: tuple[int, ...] = (0,)
    final_seeds: tuple[int, ...] = (100, 101, 102, 103, 104)
    limit_points: float = 1.0
    trials_per_program: int = 5
    trial_batching: str = "auto"
    num_workers: int = 0

    def validate(self) -> None:
        """Check every field that can be checked without data or devices.

        Raises:
          UserError: naming the field, its value and the fix.
        """
        checks.check_types(self)
        self.train.validate()
        require(
            self.train.data.name not in DRAWN_ANEW,
            "config.train.data.name",
            self.train.data.name,
            "its examples are drawn anew in every epoch, and a study needs all of them beforehand; use lbopt train, or other data",
        )
        require(
            not self.train.data.carry_state,
            "config.train.data.carry_state",
            True,
            "a study shuffles its examples; use lbopt train, or leave it False",
        )
        alone = self.train.parallel
        require(
            alone.backend in ("jit", "pjit") and alone.num_devices in (None, 1),
            "config.train.parallel",
            dataclasses.asdict(alone),
            "a trial of a sweep runs on one device; leave backend and num_devices as they are",
        )
        require_name("config.name", self.name)
        require_choice("config.about.status", self.about.status, STATUSES)
        names = [arm.name for arm in self.arms]
        require(len(names) > 0, "config.arms", names, "give at least one arm")
        require(len(set(names)) == len(names), "config.arms", names, "give every arm a name of its own")
        for index, arm in enumerate(self.arms):
            require_name(f"config.arms[{index}].name", arm.name)
            validate_optimizer(arm.optimizer, f"config.arms[{index}].optimizer")
            validate_schedule(arm.schedule, f"config.arms[{index}].schedule")
        _ascending("config.global_batch_sizes", self.global_batch_sizes)
        _ascending("config.learning_rate_factors", self.learning_rate_factors)
        _seeds("config.search_seeds", self.search_seeds)
        _seeds("config.final_seeds", self.final_seeds)
        both = sorted(set(self.search_seeds) & set(self.final_seeds))
        require(
            not both,
            "config.final_seeds",
            self.final_seeds,
            f"seeds {both} also choose the learning rate; use others, so that the test is fresh",
        )
        require(0 < self.limit_points <= 100, "config.limit_points", self.limit_points, "give a number in (0, 100]")
        require(
            self.trials_per_program >= 1, "config.trials_per_program", self.trials_per_program, "give a number >= 1"
        )
        require(self.num_workers >= 0, "config.num_workers", self.num_workers, "give a number >= 0")
        require_choice("config.trial_batching", self.trial_batching, TRIAL_BATCHINGS)


def _ascending(field: str, values: tuple) -> None:
    ok = len(values) > 0 and 0 < min(values) <= max(values) < LARGEST and list(values) == sorted(set(values))
    require(ok, field, values, "give at least one positive number, ascending, none twice")


def _seeds(field: str, values: tuple[int, ...]) -> None:
    require(len(values) > 0 and len(set(values)) == len(values), field, values, "give at least one seed, none twice")
    for seed in values:
        require_seed(field, seed)
