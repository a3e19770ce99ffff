"""The learning rate over a run, as a rule over batch sizes."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lbopt import _user_code, errors
from lbopt.config._checks import LARGEST_INTEGER, MOST_STEPS, require_place_or_choice
from lbopt.config._fields import NOT_EMPTY, NOT_ZERO, Condition, When, only
from lbopt.errors import require
from lbopt.schedules import (
    Units,
    check_warmup_rule,
    exponential_factor,
    scale_batch,
    step_factor,
    stretch_schedule,
    warmup_schedule,
)

_ROUNDING = 1e-9
_WITH_END = ("polynomial", "cosine")
_IN_STAIRS = ("exponential", "step")
DECAYS = ("constant", *_WITH_END, *_IN_STAIRS)
_WARMS_UP: tuple[When, ...] = (
    {"warmup_steps": NOT_EMPTY},
    {
        "warmup_steps": (None,),
        "warmup_rule": ("epochs", "legw"),
        "base_warmup_epochs": NOT_ZERO,
    },
)
_DECAYING = Condition(
    "a decay", lambda name: name in (*_WITH_END, *_IN_STAIRS) or _user_code.is_place(name)
)
_CHANGES: tuple[When, ...] = ({"decay": _DECAYING}, *_WARMS_UP)
_TWO_ORIGINS: tuple[When, ...] = (
    {"decay": _DECAYING, "start_step": NOT_ZERO},
    *({"decay": _DECAYING, **warms_up} for warms_up in _WARMS_UP),
)
_SCALES: tuple[When, ...] = (
    {"scaling_rule": Condition("not 'none'", lambda rule: rule != "none")},
    {"warmup_steps": (None,), "warmup_rule": ("legw",), "base_warmup_epochs": NOT_ZERO},
)


@dataclasses.dataclass
class ScheduleConfig:
    """The learning rate, as a rule over batch sizes.

    Attributes:
      base_learning_rate: Peak learning rate at `base_batch_size`.
      base_batch_size: Batch size that the base values belong to.
      scaling_rule: Rule by which the learning rate follows the batch: "sqrt", "linear", "none",
        "legw", "sde" or another one of `lbopt.scale_recipe`; several joined by "+", if they change
        different numbers ("sqrt+token_half_life"). A rule for b1, b2, eps, the weight decay or the
        averaged parameters scales those of the optimizer, which then belong to `base_batch_size`.
      warmup_rule: "legw" (base_warmup_epochs * batch / base batch epochs, so a constant number of
        steps), "epochs" (base_warmup_epochs at every batch) or "none".
      base_warmup_epochs: Epochs of warmup at the base batch.
      decay: "polynomial", "cosine" or "constant", from the end of warmup to the end of the run;
        "exponential" or "step", in stairs; or a function of yours, "module:function" or
        "file.py:function": steps since the decay began -> factor of the peak.
      power: Exponent of the polynomial.
      end_factor: Fraction of the peak that is left at the end, in [0, 1].
      first_step: Number of the first update: 0 (learning rate 0 there) or 1.
      warmup_power: Exponent of the ramp.
      warmup_from: Learning rate at the start of the ramp, at any batch size.
      start_step: Step at which the ramp begins; may be below 0.
      decay_from: "warmup_end", or "start": the decay counts from step 0, so the rate jumps at the
        end of warmup.
      end_learning_rate: Learning rate at the end, instead of `end_factor`.
      warmup_steps: Optimizer steps of warmup, instead of the rule's; may be fractional (MLPerf's 18
        epochs of 39.25 steps).
      decay_steps: Optimizer steps of the decay, instead of those from its origin to the end of the
        run.
      decay_rate: Factor of a stair.
      stair_epochs: Epochs between two stairs, one number, for "exponential"; epoch of each stair,
        ascending, for "step". Stairs past the end of the run have no effect.

    >>> schedule = ScheduleConfig(base_learning_rate=0.01, base_batch_size=64)
    >>> found = resolve_schedule(schedule, 1024, num_examples=51_200, num_epochs=20)
    >>> found.learning_rate, found.warmup_steps, found.num_steps
    (0.04, 400, 1000)
    """

    base_learning_rate: float = 0.01
    base_batch_size: int = only(64, *_SCALES, may_stay=True)
    scaling_rule: str = "sqrt"
    warmup_rule: str = only("legw", unless="warmup_steps")
    base_warmup_epochs: float = only(0.5, warmup_rule=("epochs", "legw"), unless="warmup_steps")
    decay: str = "polynomial"
    power: float = only(1.0, decay=("polynomial",))
    end_factor: float = only(0.0, decay=_WITH_END)
    first_step: int = only(1, *_CHANGES)
    warmup_power: float = only(1.0, *_WARMS_UP)
    warmup_from: float = only(0.0, *_WARMS_UP)
    start_step: int = only(0, *_CHANGES)
    decay_from: str = only("warmup_end", *_TWO_ORIGINS)
    end_learning_rate: float | None = only(None, decay=_WITH_END)
    warmup_steps: float | None = None
    decay_steps: float | None = only(None, decay=_WITH_END)
    decay_rate: float = only(0.97, decay=_IN_STAIRS)
    stair_epochs: tuple[float, ...] = only((2.4,), decay=_IN_STAIRS)


def check_schedule(schedule: ScheduleConfig) -> None:
    """Raise `UserError` for a rule of which no schedule can be built at any batch size.

    `resolve_schedule` checks what depends on the batch size and on the length of the run.
    """
    with errors.under("", rule="scaling_rule"):
        scale_batch(
            schedule.base_batch_size,
            schedule.base_learning_rate,
            schedule.base_batch_size,
            schedule.base_warmup_epochs,
            num_examples=1,
            num_epochs=1.0,
            rule=schedule.scaling_rule,
            warmup_rule=schedule.warmup_rule,  # type: ignore[arg-type]
        )
        if _ramp(schedule) and schedule.warmup_steps is None:
            check_warmup_rule(schedule.scaling_rule, schedule.warmup_rule)
    if schedule.warmup_steps is not None:
        warmup_schedule(1.0, schedule.warmup_steps, 2 * LARGEST_INTEGER)

    # A peak above all other rates, and a run longer than its warmup, which begins after step 0.
    warmup_steps = 1 + max(0, -_steps(schedule).get("start_step", 0))
    resolved = ResolvedSchedule(LARGEST_INTEGER, warmup_steps, 2 * LARGEST_INTEGER, 1.0)
    make_schedule(schedule, resolved)


@dataclasses.dataclass(frozen=True)
class ResolvedSchedule:
    """A rule worked out for one batch size.

    Attributes:
      learning_rate: The peak.
      warmup_steps: Optimizer steps of warmup.
      num_steps: Optimizer steps of the whole run.
      steps_per_epoch: Optimizer steps of one epoch, not rounded.

    >>> resolve_schedule(ScheduleConfig(), 64, num_examples=640, num_epochs=2).steps_per_epoch
    10.0
    """

    learning_rate: float
    warmup_steps: float
    num_steps: int
    steps_per_epoch: float


def resolve_schedule(
    config: ScheduleConfig,
    global_batch_size: int,
    num_examples: int,
    num_epochs: float,
    num_steps: int | None = None,
) -> ResolvedSchedule:
    """Work out learning rate, warmup and length at one batch size.

    Args:
      config: The rule.
      global_batch_size: Examples per step.
      num_examples: Number of examples in the training set.
      num_epochs: Length of the run.
      num_steps: Length of the run, instead of `num_epochs`.

    Raises:
      UserError: If the run has not one whole step, or its warmup does not end before training does.

    >>> config = ScheduleConfig(base_learning_rate=0.01, base_batch_size=64)
    >>> resolved = resolve_schedule(config, 256, num_examples=2560, num_epochs=4)
    >>> resolved.learning_rate, resolved.warmup_steps, resolved.num_steps
    (0.02, 20, 40)
    """
    warms_up = config.warmup_steps is None and config.warmup_rule != "none"
    base_epochs = config.base_warmup_epochs if warms_up else 0.0
    scales = config.scaling_rule != "none" or (base_epochs and config.warmup_rule == "legw")
    scaled = scale_batch(
        global_batch_size,
        config.base_learning_rate,
        config.base_batch_size if scales else global_batch_size,
        base_epochs,
        num_examples,
        num_epochs if num_steps is None else 1.0,
        config.scaling_rule,
        config.warmup_rule if warms_up else "none",  # type: ignore[arg-type]
    )

    warmup_steps = scaled.warmup_steps if config.warmup_steps is None else config.warmup_steps
    field, length = ("num_epochs", num_epochs) if num_steps is None else ("num_steps", num_steps)
    if num_steps is None:
        _check_one_step(global_batch_size, num_examples, num_epochs)
    num_steps = scaled.total_steps if num_steps is None else num_steps
    fix = f"that is {num_steps} steps; train for fewer than 2^30"
    require(num_steps < MOST_STEPS, field, length, fix)

    _check_rate(config, global_batch_size, scaled.learning_rate)
    steps_per_epoch = Units(num_examples, global_batch_size).exact_steps(1)
    resolved = ResolvedSchedule(scaled.learning_rate, warmup_steps, num_steps, steps_per_epoch)
    _check_warmup(config, global_batch_size, resolved)
    return resolved


def _check_one_step(size: int, num_examples: int, num_epochs: float) -> None:
    """Check that a run has a whole step: one would see more examples than the run is given."""
    given = num_epochs * num_examples
    fix = (
        f"that is {given:.4g} examples, and one step at batch {size} has more; train for "
        f"{size / num_examples:.4g} epochs at least, or use a smaller batch"
    )
    fits = given >= size * (1 - _ROUNDING)
    require(fits, "num_epochs", num_epochs, fix, code="mismatch")


def _check_rate(config: ScheduleConfig, size: int, rate: float) -> None:
    base = config.base_learning_rate
    fix = f"scaled to batch {size} it is {rate!r}; use a smaller one"
    require(rate < LARGEST_INTEGER, "schedule.base_learning_rate", base, fix)
    floors = {**_ramp(config), **_decay(config, 1.0)}
    for name in ("warmup_from", "end_learning_rate"):
        floor: dict[str, Any] = {name: floors.get(name) or 0.0}
        with _blaming(f"schedule.{name}", floor[name], size):
            warmup_schedule(rate, 1, 2, **floor)


def _check_warmup(config: ScheduleConfig, size: int, resolved: ResolvedSchedule) -> None:
    name = "warmup_steps"
    if config.warmup_steps is None:
        name = "warmup_rule" if config.warmup_rule == "none" else "base_warmup_epochs"
    with _blaming(f"schedule.{name}", getattr(config, name), size):
        make_schedule(config, resolved)


@contextlib.contextmanager
def _blaming(field: str, value: Any, size: int) -> Iterator[None]:
    """Let a refusal of the schedule at a batch size be about a field of the config."""
    # `warmup_schedule` names the scaled rate or warmup. Only the config knows the field that was
    # scaled, and the batch size.
    with errors.about(field, value, code="conflict"), errors.under(f"at batch {size}: "):
        yield


def make_schedule(
    config: ScheduleConfig,
    resolved: ResolvedSchedule,
    learning_rate: float | jax.Array | None = None,
    warmup_steps: float | jax.Array | None = None,
    num_steps: int | jax.Array | None = None,
) -> optax.Schedule:
    """Build the schedule; rate and warmup may be given instead of the resolved ones, also traced.

    With `num_steps`, also traced, all of it is rescaled from the resolved length to that one.

    Args:
      config: The rule.
      resolved: The rule worked out for one batch size.
      learning_rate: Peak instead of the resolved one; may be traced.
      warmup_steps: Steps of warmup instead of the resolved ones; may be traced.
      num_steps: Length to which the whole schedule is rescaled; None for the resolved one.

    >>> config = ScheduleConfig(base_learning_rate=0.01, decay="constant", warmup_rule="none")
    >>> resolved = resolve_schedule(config, 256, num_examples=2560, num_epochs=2)
    >>> print(make_schedule(config, resolved)(0))  # 0.01 * sqrt(256 / 64)
    0.02
    """
    steps = _steps(config)
    whole = warmup_schedule(
        resolved.learning_rate if learning_rate is None else learning_rate,
        resolved.warmup_steps if warmup_steps is None else warmup_steps,
        resolved.num_steps,
        **steps,
        **_ramp(config),
        **_decay(config, resolved.steps_per_epoch),
    )
    if num_steps is None:
        return whole
    return stretch_schedule(whole, resolved.num_steps, num_steps, steps.get("first_step", 0))


def _steps(config: ScheduleConfig) -> dict[str, Any]:
    """Return the numbers of the first step and of the ramp's; none for a rate without change."""
    if config.decay == "constant" and not _ramp(config):
        return {}
    return {"first_step": config.first_step, "start_step": config.start_step}


def _ramp(config: ScheduleConfig) -> dict[str, Any]:
    """Return the options of a warmup; none if there is no warmup by the config."""
    length = config.warmup_steps
    if length is None:
        length = config.warmup_rule != "none" and config.base_warmup_epochs
    if not length:
        return {}
    return {"warmup_power": config.warmup_power, "warmup_from": config.warmup_from}


def _decay(config: ScheduleConfig, steps_per_epoch: float) -> dict[str, Any]:
    """Return the options of the decay, those that it has."""
    require_place_or_choice("decay", config.decay, DECAYS, "config.schedule.decay")
    if config.decay == "constant":
        return {"decay": config.decay}
    options: dict[str, Any] = {"decay": config.decay}
    if _ramp(config) or config.start_step:
        options["decay_from"] = config.decay_from
    if _user_code.is_place(config.decay):
        return options | {"decay": _own_decay(config.decay)}
    if config.decay in _IN_STAIRS:
        return options | {"decay": _stairs(config, steps_per_epoch)}
    if config.decay == "polynomial":
        options["power"] = config.power
    return options | {
        "end_factor": config.end_factor,
        "decay_steps": config.decay_steps,
        "end_learning_rate": config.end_learning_rate,
    }


def _own_decay(place: str) -> Callable[[jax.Array], jax.Array]:
    """Return the user's factor of the peak, a function of optimizer steps."""
    function = _user_code.load(place, "decay")
    require(callable(function), "decay", place, "no function; give one of the step")

    def factor(steps: jax.Array) -> jax.Array:
        with _user_code.naming_errors("decay", place):
            return jnp.asarray(function(steps), jnp.float32)

    shape = jax.eval_shape(factor, jax.ShapeDtypeStruct((), jnp.float32)).shape
    fix = f"it returns an array {list(shape)} for one step; return a number"
    require(shape == (), "decay", place, fix, code="type")
    return factor


def _stairs(config: ScheduleConfig, steps_per_epoch: float) -> Callable[[jax.Array], jax.Array]:
    """Return the factor of a decay in stairs, a function of optimizer steps."""
    epochs = config.stair_epochs
    one = config.decay != "exponential" or len(epochs) == 1
    require(one, "stair_epochs", epochs, "give one number for an exponential decay")

    stairs = tuple(number * steps_per_epoch for number in epochs)
    found = errors.about("stair_epochs", epochs, "steps_per_decay", "boundaries")
    with found, errors.under("", factor="decay_rate"):
        if config.decay == "exponential":
            return exponential_factor(config.decay_rate, stairs[0])
        return step_factor(config.decay_rate, stairs)
