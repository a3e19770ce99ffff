"""Gradual warmup, and linear-epoch gradual warmup (LEGW)."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from lbopt import _scalars
from lbopt.errors import UserError, brief, require_choice
from lbopt.schedules import _decay, _scaling_plan

DecayFrom = Literal["warmup_end", "start"]
DECAY_ORIGINS = ("warmup_end", "start")


def warmup_schedule(
    peak_learning_rate: float | jax.Array,
    warmup_steps: float | jax.Array,
    total_steps: int,
    decay: str | _decay.DecayFn = "polynomial",
    power: float = 1.0,
    end_factor: float = 0.0,
    first_step: int = 0,
    *,
    warmup_power: float = 1.0,
    warmup_from: float | jax.Array = 0.0,
    start_step: int = 0,
    decay_from: DecayFrom = "warmup_end",
    decay_steps: float | jax.Array | None = None,
    end_learning_rate: float | None = None,
) -> optax.Schedule:
    r"""Build a schedule that rises to its peak and then decays until the end.

    With t = count + first_step, w = warmup_steps, T = total_steps, a = start_step and a decay f
    (see `make_decay`), the warmup is

        lr(t) = warmup_from + (peak - warmup_from) * ((t - a) / w)^warmup_power      for t - a < w

    and the decay that follows it

        lr(t) = peak * f((t - a - w) / (T + first_step - a - w))    if decay_from="warmup_end"
        lr(t) = peak * f(t / (T + first_step))                      if decay_from="start"

    The decay is complete one step after the last update, so no update is spent at its end value.
    With decay_from="start" the rate jumps down at the end of warmup, as in ALBERT's and MLPerf's
    BERT code.

    Args:
      peak_learning_rate: Learning rate at the end of warmup; may be a traced scalar.
      warmup_steps: Optimizer steps of warmup, 0 for none; may be fractional or traced.
      total_steps: Optimizer steps of the whole run.
      decay: "polynomial", "cosine", "constant", or a function: steps since the decay began ->
        factor of the peak, such as `optax.exponential_decay(1.0, ...)` or
        `optax.piecewise_constant_schedule(1.0, ...)`.
      power: Exponent of the polynomial.
      end_factor: Learning rate at the end of the decay as a factor of the peak.
      first_step: Number t of the first update. With 0 the first update has rate 0, as in You et
        al.'s code; with 1 steps are counted as in the papers, and a very short run wastes no step.
      warmup_power: Exponent of the ramp; 2 in nvcaffe.
      warmup_from: Learning rate at the start of warmup.
      start_step: Step at which the ramp starts; may be negative. MLPerf's BERT starts it at -76, so
        that the first update already has a rate above `warmup_from`.
      decay_from: Step from which the decay counts: "warmup_end", or "start" for step 0.
      decay_steps: Length of the decay in optimizer steps; None for the divisor in the formulas.
      end_learning_rate: Learning rate at the end of the decay, in place of `end_factor`.

    Returns:
      A schedule: count of updates so far (0 at the first) -> fp32 learning rate.

    Raises:
      UserError: If an argument is out of range, if warmup does not end before training does, if
        the peak is below `warmup_from` or `end_learning_rate`, or if an argument has no effect
        beside the others; names the argument.

    Note:
      A traced warmup cannot be checked. If it fills the run, the rate is the peak where the warmup
      ends and the end value afterwards.

    >>> schedule = warmup_schedule(1.0, warmup_steps=2, total_steps=6)
    >>> [float(schedule(count)) for count in range(6)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]

    References:
      Goyal et al., arXiv 1706.02677v2, section 2.2 (gradual warmup).
    """
    peak_learning_rate = _scalars.checked("peak_learning_rate", peak_learning_rate, traced=True)
    warmup_steps = _scalars.checked("warmup_steps", warmup_steps, traced=True)
    total_steps = _scalars.whole("total_steps", total_steps)
    first_step = _scalars.checked("first_step", first_step, "0 or 1", lambda n: n in (0, 1))
    start_step = _scalars.checked("start_step", start_step, "a step", lambda n: True)
    warmup_power = _scalars.checked(
        "warmup_power", warmup_power, "a finite number > 0", lambda n: n > 0
    )
    warmup_from = _scalars.checked("warmup_from", warmup_from, traced=True)

    if decay_steps is not None:
        wanted = "a finite number > 0, or None"
        decay_steps = _scalars.checked(
            "decay_steps", decay_steps, wanted, lambda n: n > 0, traced=True
        )
    if end_learning_rate is not None:
        wanted = "a finite number >= 0, or None"
        end_learning_rate = _scalars.checked("end_learning_rate", end_learning_rate, wanted)
    if not callable(decay):
        named = _decay.make_decay(decay, power, end_factor)

    _check_length(warmup_steps, total_steps, start_step)
    _check_decay(decay, power, end_factor, decay_from, decay_steps, end_learning_rate)
    _check_ramp(
        peak_learning_rate, warmup_steps, start_step, warmup_power, warmup_from, end_learning_rate
    )

    peak, lowest, begin = (
        _scalars.in_fp32(value) for value in (peak_learning_rate, warmup_from, start_step)
    )

    def schedule(count: jax.Array) -> jax.Array:
        t = jnp.asarray(count, jnp.float32) + first_step
        w = jnp.asarray(warmup_steps, jnp.float32)
        climbed = jnp.clip((t - begin) / jnp.maximum(w, jnp.finfo(jnp.float32).tiny), 0.0, 1.0)
        ramp = climbed if warmup_power == 1 else climbed**warmup_power
        rising = lowest + (peak - lowest) * ramp

        origin = begin + w if decay_from == "warmup_end" else 0.0
        if callable(decay):
            falling = peak * _factor(decay, t - origin)
        else:
            length = (
                float(total_steps) + first_step - origin
                if decay_steps is None
                else _scalars.in_fp32(decay_steps)
            )
            # A traced warmup may fill the run. The decay then has length 0, and dividing by a tiny
            # number instead avoids 0 / 0.
            factor = named((t - origin) / jnp.maximum(length, jnp.finfo(jnp.float32).tiny))
            end = 0.0 if end_learning_rate is None else float(end_learning_rate)
            falling = end + (peak - end) * factor
        return jnp.where(t - begin < w, rising, falling)

    return schedule


def _factor(decay: _decay.DecayFn, steps: jax.Array) -> jax.Array:
    """Return the result of a decay function in fp32.

    Raises:
      UserError: Unless the result is one number, or one number for each step.
    """
    found = decay(steps)
    try:
        factor = jnp.asarray(found).astype(jnp.float32)
    except (TypeError, ValueError):
        factor = None
    if factor is None or factor.shape not in ((), steps.shape):
        fix = f"it gives {brief(found)}; return a factor of the peak, one number"
        raise UserError("decay", decay, fix, code="type")
    return factor


def legw_schedule(
    base_learning_rate: float | jax.Array,
    base_batch_size: int,
    base_warmup_epochs: float,
    global_batch_size: int,
    num_examples: int,
    num_epochs: float,
    decay: str = "polynomial",
    rule: str = "sqrt",
    power: float = 1.0,
    end_factor: float = 0.0,
    first_step: int = 0,
) -> optax.Schedule:
    r"""Build LEGW: with k = batch / base batch, learning rate * sqrt(k) and warmup *epochs* * k.

    Warmup epochs grow as steps per epoch shrink, so the number of warmup *steps* is the same at
    every batch size: base_warmup_epochs * num_examples / base_batch_size, rounded to the nearest.

    Args:
      base_learning_rate: Peak rate tuned at `base_batch_size`; may be a traced scalar.
      base_batch_size: Batch size at which the base values were tuned.
      base_warmup_epochs: Length of the warmup at the base batch size, in epochs.
      global_batch_size: Batch size to train with.
      num_examples: Size of the training set.
      num_epochs: Length of the run.
      decay: "polynomial", "cosine" or "constant".
      rule: Scaling rule of the learning rate; LEGW's own is "sqrt". One that keeps the epochs of
        warmup contradicts LEGW.
      power: Exponent of the polynomial.
      end_factor: Learning rate at the end of the decay as a factor of the peak.
      first_step: Number of the first update, 0 or 1; see `warmup_schedule`.

    Returns:
      A schedule: count of updates so far -> fp32 learning rate.

    Raises:
      UserError: If an argument is out of range, or if the warmup does not end before training
        does; names the argument.

    >>> schedule = legw_schedule(0.1, 256, 1.0, 1024, num_examples=2560, num_epochs=8)
    >>> [round(float(schedule(count)), 3) for count in (0, 5, 10, 15)]
    [0.0, 0.1, 0.2, 0.1]

    References:
      You et al., Large-Batch Training for LSTM and Beyond (LEGW), arXiv 1901.08256v1.
    """
    _scaling_plan.check_warmup_rule(rule, "legw")
    batch = _scaling_plan.scale_batch(
        global_batch_size,
        base_learning_rate,  # type: ignore[arg-type]
        base_batch_size,
        base_warmup_epochs,
        num_examples,
        num_epochs,
        rule,
    )
    return warmup_schedule(
        batch.learning_rate,
        batch.warmup_steps,
        batch.total_steps,
        decay,
        power,
        end_factor,
        first_step,
    )


def _check_length(warmup_steps: Any, total_steps: int, start_step: Any) -> None:
    """Raise `UserError` unless the warmup ends before training does."""
    if _scalars.is_number(warmup_steps) and not start_step + float(warmup_steps) < total_steps:
        begun = "" if start_step == 0 else f" from step {start_step}"
        fix = (
            f"warmup{begun} must end before the {total_steps} steps of training do; warm up for "
            "less or train for longer"
        )
        raise UserError("warmup_steps", float(warmup_steps), fix, code="conflict")


def _check_decay(decay, power, end_factor, decay_from, decay_steps, end_learning_rate) -> None:
    """Raise `UserError` for arguments that conflict with the decay or that it does not use.

    `make_decay` checks its own arguments.
    """
    require_choice("decay_from", decay_from, DECAY_ORIGINS)
    if end_learning_rate is not None and (callable(decay) or end_factor != 0):
        own = "a decay function has an end of its own"
        other = own if callable(decay) else "there is {end_factor} too"
        fix = f"{other}; give one of the two"
        also = ["end_factor"]
        raise UserError("end_learning_rate", end_learning_rate, fix, code="conflict", also=also)

    # An argument without effect is refused, as a search over it would show nothing.
    unused: dict[str, tuple[Any, Any]] = {}
    if callable(decay) or decay == "constant":
        unused = {
            "decay_steps": (decay_steps, None),
            "end_learning_rate": (end_learning_rate, None),
        }
    if callable(decay):
        unused |= {
            "power": (_scalars.known(power), 1),
            "end_factor": (_scalars.known(end_factor), 0),
        }
    elif decay == "constant":
        unused["decay_from"] = (decay_from, "warmup_end")

    for name, (value, default) in unused.items():
        if not isinstance(value, (int, float, str, type(None))) or value != default:
            what = "a decay function" if callable(decay) else "decay = 'constant'"
            fix = f"it would have no effect with {what}; leave it {default!r}"
            raise UserError(name, value, fix, code="unused")


def _check_ramp(
    peak_learning_rate, warmup_steps, start_step, warmup_power, warmup_from, end_learning_rate
) -> None:
    """Raise `UserError` for options of a missing ramp, and for a peak below another given rate."""
    if _scalars.is_number(warmup_steps):
        end = start_step + warmup_steps
        # Without a step of warmup no power matters, but the rate holds `warmup_from` up to a start
        # after step 0.
        for name, value, default, steps in (
            ("warmup_power", warmup_power, 1, min(warmup_steps, end)),
            ("warmup_from", warmup_from, 0, end),
        ):
            if steps <= 0 and _scalars.is_number(value) and value != default:
                begun = "" if start_step == 0 else f" from step {start_step}"
                fix = (
                    f"there is no ramp with {{warmup_steps}} = {warmup_steps}{begun}; leave it "
                    f"{default}, or give more of them"
                )
                raise UserError(name, value, fix, code="unused", also=["warmup_steps"])

    for name, value in (("warmup_from", warmup_from), ("end_learning_rate", end_learning_rate)):
        if (
            _scalars.is_number(value)
            and _scalars.is_number(peak_learning_rate)
            and peak_learning_rate < value
        ):
            fix = f"it is below {{other}} = {value!r}; give a larger peak or a smaller {{other}}"
            also = {"other": name}
            rate = peak_learning_rate
            raise UserError("peak_learning_rate", rate, fix, code="conflict", also=also)
