"""Gradual warmup and LEGW."""

from __future__ import annotations

import math
import numbers
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from lbopt.schedules import decay as decays, plan, scaling, units

DecayFrom = Literal["warmup_end", "start"]
DECAY_ORIGINS = ("warmup_end", "start")


def warmup_schedule(
    peak_learning_rate: float | jax.Array,
    warmup_steps: float | jax.Array,
    total_steps: int,
    decay: str | decays.DecayFn = "polynomial",
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

    With t = count + first_step, w = warmup_steps, T = total_steps, a = start_step and a decay f (see `make_decay`):

        lr(t) = warmup_from + (peak - warmup_from) * ((t - a) / w)^warmup_power      for t - a < w
        lr(t) = peak * f((t - a - w) / (T + first_step - a - w))                     after it, decay_from="warmup_end"
        lr(t) = peak * f(t / (T + first_step))                                       after it, decay_from="start"

    so the decay is complete one step after the last update, and no update is wasted on its end. With decay_from="start"
    the rate jumps down at the end of warmup, as in ALBERT's and MLPerf's BERT code.

    Args:
      peak_learning_rate: the rate at the end of warmup; may be a traced scalar.
      warmup_steps: optimizer steps of warmup, 0 for none; may be fractional or traced.
      total_steps: optimizer steps of the whole run.
      decay: "polynomial", "cosine", "constant", or a function: steps since the decay began -> factor of the peak, for
        instance `optax.exponential_decay(1.0, ...)` or `optax.piecewise_constant_schedule(1.0, ...)`.
      power: exponent of the polynomial.
      end_factor: what is left of the peak at the end.
      first_step: the number t of the first update. 0 as in You et al.'s code (the first update has rate 0); 1 counts
        as the papers do, and wastes no step of a very short run.
      warmup_power: exponent of the ramp; 2 in nvcaffe.
      warmup_from: the rate at the start of warmup.
      start_step: the step at which the ramp starts, also below 0: MLPerf's BERT starts it at -76, so that the first
        update is already some way up.
      decay_from: see above.
      decay_steps: length of the decay, instead of what the formulas above divide by.
      end_learning_rate: the rate at the end of the decay, instead of `end_factor`.

    Returns:
      A schedule: count of updates so far (0 at the first) -> fp32 learning rate.

    Raises:
      ValueError: naming the argument; in particular if warmup does not end before training does.

    >>> schedule = warmup_schedule(1.0, warmup_steps=2, total_steps=6)
    >>> [float(schedule(count)) for count in range(6)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]

    References:
      Goyal et al., arXiv 1706.02677, section 2.2 (gradual warmup).
    """
    _check(peak_learning_rate, warmup_steps, total_steps, first_step, start_step)
    _check_decay(warmup_power, warmup_from, decay_from, decay_steps, end_learning_rate, end_factor, decay)
    named = None if callable(decay) else decays.make_decay(decay, power, end_factor)

    def schedule(count: jax.Array) -> jax.Array:
        t = jnp.asarray(count, jnp.float32) + first_step
        w = jnp.asarray(warmup_steps, jnp.float32)
        climbed = jnp.clip((t - start_step) / jnp.maximum(w, jnp.finfo(jnp.float32).tiny), 0.0, 1.0)
        ramp = climbed if warmup_power == 1 else climbed**warmup_power
        rising = warmup_from + (peak_learning_rate - warmup_from) * ramp
        origin = start_step + w if decay_from == "warmup_end" else 0
        if named is None:
            falling = peak_learning_rate * decay(t - origin)  # type: ignore[operator]
        else:
            factor = named((t - origin) / (total_steps + first_step - origin if decay_steps is None else decay_steps))
            if end_learning_rate is None:
                falling = peak_learning_rate * factor
            else:
                falling = end_learning_rate + (peak_learning_rate - end_learning_rate) * factor
        return jnp.where(t - start_step < w, rising, falling)

    return schedule


def legw_schedule(
    base_learning_rate: float | jax.Array,
    base_batch_size: int,
    base_warmup_epochs: float,
    global_batch_size: int,
    num_examples: int,
    num_epochs: float,
    decay: str = "polynomial",
    rule: scaling.ScalingRule = "sqrt",
    power: float = 1.0,
    end_factor: float = 0.0,
    first_step: int = 0,
) -> optax.Schedule:
    r"""Build LEGW: with k = batch / base batch, learning rate * sqrt(k) and warmup *epochs* * k.

    Warmup epochs grow with the batch just as steps per epoch shrink, so the number of warmup *steps* is the same at
    every batch size: base_warmup_epochs * num_examples / base_batch_size, to the nearest whole step.

    Args:
      base_learning_rate: tuned at `base_batch_size`; may be a traced scalar.
      base_batch_size: the batch the base values belong to.
      base_warmup_epochs: warmup at the base batch.
      global_batch_size: the batch to train with.
      num_examples: size of the training set.
      num_epochs: length of the run.
      decay: see `warmup_schedule`, also for `power`, `end_factor` and `first_step`.
      rule: how the rate is scaled; LEGW's own is "sqrt".

    Returns:
      A schedule: count of updates so far -> fp32 learning rate.

    Raises:
      ValueError: naming the argument; in particular if the warmup does not end before training does.

    >>> schedule = legw_schedule(0.1, 256, 1.0, 1024, num_examples=2560, num_epochs=8)
    >>> [round(float(schedule(count)), 3) for count in (0, 5, 10, 15)]
    [0.0, 0.1, 0.2, 0.1]

    References:
      You et al., Large-Batch Training for LSTM and Beyond (LEGW), arXiv 1901.08256.
    """
    batch = plan.scale_batch(
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


def _check(peak_learning_rate, warmup_steps, total_steps: int, first_step: int, start_step: int) -> None:
    units.require_number("peak_learning_rate", peak_learning_rate, traced=True)
    units.require_number("warmup_steps", warmup_steps, traced=True)
    if not isinstance(total_steps, numbers.Integral) or total_steps < 1:
        raise ValueError(f"total_steps = {total_steps!r}: give a whole number >= 1")
    if first_step not in (0, 1):
        raise ValueError(f"first_step = {first_step!r}: use 0 or 1")
    if isinstance(warmup_steps, numbers.Real) and not start_step + float(warmup_steps) < total_steps:
        begun = "" if start_step == 0 else f" from step {start_step}"
        raise ValueError(
            f"warmup_steps = {float(warmup_steps):g}{begun} of {total_steps} steps: warmup must end before training does; "
            "warm up for less or train for longer"
        )


def _check_decay(warmup_power, warmup_from, decay_from, decay_steps, end_learning_rate, end_factor, decay) -> None:
    if not 0 < warmup_power < math.inf:
        raise ValueError(f"warmup_power = {warmup_power!r}: give a finite number > 0")
    units.require_number("warmup_from", warmup_from, traced=True)
    if decay_from not in DECAY_ORIGINS:
        raise ValueError(f"decay_from = {decay_from!r}: use one of {', '.join(DECAY_ORIGINS)}")
    if isinstance(decay_steps, numbers.Real) and not 0 < float(decay_steps) < math.inf:
        raise ValueError(f"decay_steps = {decay_steps!r}: give a finite number > 0, or None")
    if end_learning_rate is None:
        return
    if not 0 <= end_learning_rate < math.inf:
        raise ValueError(f"end_learning_rate = {end_learning_rate!r}: give a finite number >= 0, or None")
    if end_factor != 0 or callable(decay):
        other = "a decay function has an end of its own" if callable(decay) else f"end_factor = {end_factor!r}"
        raise ValueError(f"end_learning_rate = {end_learning_rate!r} and {other}: give one of the two")
