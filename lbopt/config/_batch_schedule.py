"""The batch size over a run."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import contextlib
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import optax

from lbopt import errors
from lbopt.config._data import TEXT, DataConfig
from lbopt.config._fields import only
from lbopt.errors import require, require_choice
from lbopt.schedules import (
    BatchPhase,
    batch_phases,
    critical_changes,
    doubling_changes,
    ramp_changes,
    seesaw_changes,
)

if TYPE_CHECKING:
    from lbopt.config._train import TrainConfig

NOISE_SCALE = "noise_scale"
KINDS = ("critical", "doubling", NOISE_SCALE, "ramp", "seesaw", "steps")
UNITS = ("epochs", "examples", "tokens")
_WITH_END = tuple(kind for kind in KINDS if kind != "steps")
_PLACED = tuple(kind for kind in KINDS if kind != "seesaw")
_PLACES = {
    "critical": "measured",
    "doubling": "every",
    "ramp": "length",
    "seesaw": "kind",
    "steps": "changes",
}
"""Kind -> the field that says where the batch changes."""


@dataclasses.dataclass
class BatchScheduleConfig:
    """The batch size over a run, which starts with the run's `global_batch_size`.

    The learning rate is that of the run's schedule at the same number of examples, times what its
    `scaling_rule` makes of the larger batch; the optimizer's numbers follow the rule too.

    Attributes:
      kind: "steps" (at the places in `changes`), "ramp" (linear, by `increment` at a time over
        `length`), "doubling" (every `every`), "seesaw" (where the schedule has cut the rate by
        `factor`), "critical" (doubled where the critical batch of `measured` is twice as large) or
        "noise_scale" (doubled where the gradient noise scale of the run itself is
        `noise_scale_factor` times the doubled batch; asked every `every`).
      unit: Unit of the places: "epochs", "examples" or "tokens".
      changes: Pairs of a place and the batch size from there on, by place.
      final_batch_size: Largest batch size.
      increment: Examples by which the ramp grows at a time.
      length: Length of the ramp.
      every: Distance between two doublings; or between two looks at the noise scale, rounded to
        whole steps of the largest batch.
      factor: Factor of the batch where the rate is cut, > 1.
      multiple_of: Number of which every batch size is a multiple, for a factor that is not whole.
      noise_scale_factor: Smallest noise scale for a batch, as a multiple of that batch.
      measured: Pairs of a place and the critical batch size measured there, by place.
      microstep_size: Largest number of examples that a device takes at a time; larger batches are
        accumulated in the fewest equal microsteps. None for `parallel.num_microsteps` throughout,
        so that a device takes more examples at a time.

    >>> from lbopt.config import TrainConfig
    >>> growing = BatchScheduleConfig("steps", changes=((2.0, 128), (5.0, 256)))
    >>> config = TrainConfig(
    ...     data="digits", model="cnn", global_batch_size=64, batch_schedule=growing
    ... )
    >>> config.validate()
    """

    kind: str = "doubling"
    unit: str = only("epochs", kind=_PLACED)
    changes: tuple[tuple[float, int], ...] = only((), kind=("steps",))
    final_batch_size: int = only(1024, kind=_WITH_END)
    increment: int = only(64, kind=("ramp",))
    length: float = only(1.0, kind=("ramp",))
    every: float = only(1.0, kind=("doubling", NOISE_SCALE))
    factor: float = only(2.0, kind=("seesaw",))
    multiple_of: int = only(1, kind=("seesaw",))
    noise_scale_factor: float = only(1.0, kind=(NOISE_SCALE,))
    measured: tuple[tuple[float, float], ...] = only((), kind=("critical",))
    microstep_size: int | None = None


def check_batch_schedule_kind(config: BatchScheduleConfig) -> None:
    """Raise `UserError` for an unknown kind or unit: other fields depend on them."""
    require_choice("kind", config.kind, KINDS)
    require_choice("unit", config.unit, UNITS)


def check_batch_schedule(config: BatchScheduleConfig, global_batch_size: int) -> None:
    """Raise `UserError` for a batch schedule that fits no data and no length.

    Args:
      config: The batch schedule.
      global_batch_size: Examples per step at the start.
    """
    positive = {
        "length": config.length,
        "every": config.every,
        "factor": config.factor - 1,
        "noise_scale_factor": config.noise_scale_factor,
    }
    for field, value in positive.items():
        fix = f"give a number > {1 if field == 'factor' else 0}"
        require(value > 0, field, getattr(config, field), fix)
    whole = {"increment": config.increment, "multiple_of": config.multiple_of}
    if config.microstep_size is not None:
        whole["microstep_size"] = config.microstep_size
    for field, value in whole.items():
        require(value >= 1, field, value, "give a number >= 1")

    if config.kind == "steps":
        require(len(config.changes) > 0, "changes", (), "give at least one", code="missing")
    if config.kind == "critical":
        require(len(config.measured) > 0, "measured", (), "give at least one", code="missing")
        places = [place for place, _ in config.measured]
        ascend = min(places) > 0 and places == sorted(set(places))
        require(ascend, "measured", config.measured, "give places > 0 that ascend")
    if config.kind in _WITH_END:
        last = config.final_batch_size
        fix = f"it is not above {{global_batch_size}} = {global_batch_size}; give a larger one"
        also = {"global_batch_size": "global_batch_size"}
        larger = last > global_batch_size
        require(larger, "final_batch_size", last, fix, code="conflict", also=also)
    if config.kind == "seesaw":
        multiple = config.multiple_of
        fix = f"{{global_batch_size}} = {global_batch_size} is none; give a divisor of it"
        fits = global_batch_size % multiple == 0
        also = {"global_batch_size": "global_batch_size"}
        require(fits, "multiple_of", multiple, fix, code="mismatch", also=also)
    if config.kind in ("doubling", NOISE_SCALE):
        sizes = doubled_sizes(config, global_batch_size)
        fix = f"give {{global_batch_size}} = {global_batch_size} times a power of two"
        fits = sizes[-1] == config.final_batch_size
        also = {"global_batch_size": "global_batch_size"}
        last = config.final_batch_size
        require(fits, "final_batch_size", last, fix, code="mismatch", also=also)
    if config.kind not in ("seesaw", NOISE_SCALE):
        _changes(config, global_batch_size, 1.0, None, 0)


def check_unit(config: BatchScheduleConfig, data: DataConfig) -> None:
    """Raise `UserError` for places in tokens if the data have none.

    Args:
      config: The batch schedule.
      data: The data.
    """
    fix = f"{{data}} = {data.name!r} has no tokens; use 'epochs' or 'examples'"
    counts = config.unit != "tokens" or data.name in TEXT
    require(counts, "unit", config.unit, fix, code="conflict", also={"data": "data.name"})


def resolve_batch_schedule(
    config: BatchScheduleConfig,
    global_batch_size: int,
    examples_per_epoch: int,
    sequence_length: int,
    schedule: optax.Schedule,
    total: float,
) -> tuple[BatchPhase, ...]:
    """Return the phases of a run, one for each batch size.

    Args:
      config: The batch schedule, validated.
      global_batch_size: Examples per step at the start.
      examples_per_epoch: Examples of the training set.
      sequence_length: Tokens of an example.
      schedule: Learning rate as a function of steps at the first batch size.
      total: Length of the run in examples.

    Raises:
      UserError: Naming a field, for a change after the end, or a phase shorter than a step.
    """
    unit = examples_in(config, examples_per_epoch, sequence_length)
    steps = max(1, round(total / global_batch_size))
    changes = _changes(config, global_batch_size, unit, schedule, steps)
    field = _PLACES[config.kind]
    value = getattr(config, field)
    with errors.about(field, value, "changes"):
        # Seesaw's cuts come closer together as the rate falls; the last of a step counts.
        phases = batch_phases(global_batch_size, changes, total, strict=config.kind != "seesaw")
    fix = f"the batch stays {global_batch_size} to the end of the run; let it grow earlier, or "
    fix += "leave the batch schedule out"
    require(len(phases) > 1, field, value, fix, code="conflict")
    return phases


def doubled_sizes(config: BatchScheduleConfig, global_batch_size: int) -> list[int]:
    """Return the batch sizes that a doubling batch can have, ascending.

    Args:
      config: The batch schedule.
      global_batch_size: Examples per step at the start.
    """
    sizes = [global_batch_size]
    while 2 * sizes[-1] <= config.final_batch_size:
        sizes.append(2 * sizes[-1])
    return sizes


def examples_in(
    config: BatchScheduleConfig, examples_per_epoch: int, sequence_length: int
) -> float:
    """Return the examples in a unit of a batch schedule's places.

    Args:
      config: The batch schedule.
      examples_per_epoch: Examples of the training set.
      sequence_length: Tokens of an example.
    """
    return {"epochs": examples_per_epoch, "examples": 1, "tokens": 1 / sequence_length}[config.unit]


def at_batch_size(config: "TrainConfig", global_batch_size: int, num_devices: int) -> "TrainConfig":
    """Return the config of the phase of one batch size.

    Args:
      config: A run with a batch schedule.
      global_batch_size: Examples per step.
      num_devices: Number of devices that share a batch.

    Returns:
      The config, with the number of microsteps that `microstep_size` makes necessary.
    """
    schedule = config.batch_schedule
    assert schedule is not None
    parallel = config.parallel
    if schedule.microstep_size is not None:
        replicas = num_devices * config.aggregator.replicas_per_device
        largest = schedule.microstep_size
        microsteps = fewest_microsteps(global_batch_size, largest, replicas)
        each = global_batch_size / replicas / microsteps
        fix = f"batch {global_batch_size} would take {microsteps:,} microsteps of {each:g} examples"
        fix += " on each device; use batch sizes with more divisors"
        fits = 4 * each >= min(largest, global_batch_size / replicas)
        require(fits, "batch_schedule.microstep_size", largest, fix, code="mismatch")
        parallel = dataclasses.replace(parallel, num_microsteps=microsteps)
    return dataclasses.replace(config, global_batch_size=global_batch_size, parallel=parallel)


def naming_growth(
    config: BatchScheduleConfig, global_batch_size: int
) -> contextlib.AbstractContextManager[None]:
    """Let errors about a later batch size name the field of the batch schedule that has it.

    Args:
      config: The batch schedule.
      global_batch_size: The later batch size.
    """
    field = "changes" if config.kind == "steps" else "final_batch_size"
    return errors.about(f"batch_schedule.{field}", global_batch_size, "global_batch_size")


def fewest_microsteps(size: int, largest: int, num_devices: int) -> int:
    """Return the least number of equal microsteps of at most `largest` examples a device.

    >>> fewest_microsteps(1000, 300, 1), fewest_microsteps(1000, 300, 2)
    (4, 2)
    >>> fewest_microsteps(200, 300, 1)
    1
    """
    if size % num_devices:
        return 1  # refused where the devices are known
    share = size // num_devices
    return next(count for count in range(-(-share // largest), share + 1) if share % count == 0)


def _changes(
    config: BatchScheduleConfig,
    first: int,
    unit: float,
    schedule: optax.Schedule | None,
    num_steps: int,
) -> list[tuple[float, int]]:
    """Return the changes of a kind, at places in examples.

    Args:
      config: The batch schedule.
      first: Examples per step at the start.
      unit: Examples in a unit of the places.
      schedule: Learning rate as a function of steps at the first batch size, for Seesaw.
      num_steps: Length of the run in such steps, for Seesaw.
    """
    last = config.final_batch_size
    if config.kind == "ramp":
        return ramp_changes(first, last, config.increment, config.length * unit)
    if config.kind == "doubling":
        return doubling_changes(first, last, config.every * unit)
    if config.kind == "critical":
        measured = [(place * unit, critical) for place, critical in config.measured]
        return critical_changes(first, last, measured)
    if config.kind == "seesaw":
        assert schedule is not None
        return seesaw_changes(schedule, num_steps, first, last, config.factor, config.multiple_of)
    scaled: Sequence[tuple[float, int]] = [(place * unit, size) for place, size in config.changes]
    return list(scaled)
