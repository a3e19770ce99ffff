"""Gradual warmup and LEGW."""

from __future__ import annotations

import math
import numbers

import jax
import jax.numpy as jnp
import optax

from lbopt.schedules import decay as decays, scaling, units


def warmup_schedule(
    peak_learning_rate: float | jax.Array,
    warmup_steps: float | jax.Array,
    total_steps: int,
    decay: str = "polynomial",
    power: float = 1.0,
    end_factor: float = 0.0,
    first_step: int = 0,
) -> optax.Schedule:
    r"""Build a schedule that rises linearly to its peak and then decays until the end.

    With t = count + first_step, w = warmup_steps, T = total_steps and a decay f (see `make_decay`):

        lr(t) = peak * t / w                     for t < w
        lr(t) = peak * f((t - w) / (T + first_step - w))      for t >= w

    so the decay is complete one step after the last update, and no update is wasted on its end.

    Args:
      peak_learning_rate: the rate at the end of warmup; may be a traced scalar.
      warmup_steps: optimizer steps of warmup, 0 for none; may be fractional or traced.
      total_steps: optimizer steps of the whole run.
      decay: "polynomial", "cosine" or "constant".
      power: exponent of the polynomial.
      end_factor: what is left of the peak at the end.
      first_step: the number t of the first update. 0 as in You et al.'s code (the first update has rate 0); 1 counts
        as the papers do, and wastes no step of a very short run.

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
    _check(peak_learning_rate, warmup_steps, total_steps, first_step)
    factor = decays.make_decay(decay, power, end_factor)

    def schedule(count: jax.Array) -> jax.Array:
        t = jnp.asarray(count, jnp.float32) + first_step
        w = jnp.asarray(warmup_steps, jnp.float32)
        rising = t / jnp.maximum(w, jnp.finfo(jnp.float32).tiny)
        falling = factor((t - w) / (total_steps + first_step - w))
        return peak_learning_rate * jnp.where(t < w, rising, falling)

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
    for name, value in (("base_learning_rate", base_learning_rate), ("base_warmup_epochs", base_warmup_epochs)):
        if isinstance(value, numbers.Real) and not 0 <= float(value) < math.inf:
            raise ValueError(f"{name} = {value!r}: give a finite number >= 0")
    for name, size in (("base_batch_size", base_batch_size), ("num_epochs", num_epochs)):
        if not 0 < size < math.inf:
            raise ValueError(f"{name} = {size!r}: give a finite number > 0")
    warmup_steps = units.Units(num_examples, base_batch_size).warmup_steps(base_warmup_epochs)
    return warmup_schedule(
        scaling.scale_learning_rate(base_learning_rate, base_batch_size, global_batch_size, rule),  # type: ignore[type-var]
        warmup_steps,
        units.Units(num_examples, global_batch_size).steps(num_epochs),
        decay,
        power,
        end_factor,
        first_step,
    )


def _check(peak_learning_rate, warmup_steps, total_steps: int, first_step: int) -> None:
    if isinstance(peak_learning_rate, numbers.Real) and not 0 <= float(peak_learning_rate) < math.inf:
        raise ValueError(f"peak_learning_rate = {peak_learning_rate!r}: give a finite number >= 0")
    if total_steps < 1:
        raise ValueError(f"total_steps = {total_steps!r}: give a number >= 1")
    if first_step not in (0, 1):
        raise ValueError(f"first_step = {first_step!r}: use 0 or 1")
    if isinstance(warmup_steps, numbers.Real) and not 0 <= float(warmup_steps) < total_steps:
        raise ValueError(
            f"warmup_steps = {float(warmup_steps):g} of {total_steps} steps: warmup must end before training does; warm up for less or train for longer"
        )
