"""Schedules of published code; each is `warmup_schedule` with the options of its source."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import optax

from lbopt import _scalars, errors
from lbopt.errors import UserError
from lbopt.schedules import _decay
from lbopt.schedules._warmup import warmup_schedule


def mlperf_schedule(
    base_learning_rate: float | jax.Array,
    warmup_steps: float | jax.Array,
    train_steps: int,
    end_learning_rate: float = 1e-4,
    power: float = 2.0,
) -> optax.Schedule:
    r"""Build the polynomial schedule of MLPerf's ResNet-50.

        lr(t) = base * t / w                                               for t <= w
        lr(t) = end + (base - end) (1 - (t - w) / (T - w + 1))^power       afterwards

    with w = warmup_steps, T = train_steps and t = 0 at the first update, whose rate is 0.

    Args:
      base_learning_rate: Peak learning rate; may be a traced scalar.
      warmup_steps: Optimizer steps of warmup. May be fractional, as in MLPerf, where 33 epochs of
        19.75 steps make 651.75.
      train_steps: Optimizer steps of the whole run.
      end_learning_rate: 1e-4 in MLPerf, the default of TensorFlow's polynomial_decay; 0.1 in the
        released EfficientNet code, tensorflow/tpu@4b544d49d4ce5de5066a6631184c25cd29bdf9b6:
        models/official/efficientnet/utils.py.
      power: Exponent of the decay.

    Raises:
      UserError: For the same reasons as `warmup_schedule`.

    >>> schedule = mlperf_schedule(29.0, warmup_steps=706.5, train_steps=2512)
    >>> float(schedule(0)), round(float(schedule(2511)), 4)
    (0.0, 0.0001)

    References:
      mlcommons/training_results_v0.7@c66406115bb3c60cb9c49889b076727ccecba31e:Google/benchmarks/
      resnet/implementations/resnet-research-JAX-tpu-v3-8192/train.py.
    """
    warmup_steps = _scalars.checked("warmup_steps", warmup_steps, traced=True)
    train_steps = _scalars.whole("train_steps", train_steps)
    with _naming(total_steps="train_steps"):
        return warmup_schedule(
            base_learning_rate,
            warmup_steps,
            train_steps,
            power=power,
            decay_steps=train_steps - warmup_steps + 1,
            end_learning_rate=end_learning_rate,
        )


def albert_schedule(
    base_learning_rate: float | jax.Array,
    warmup_steps: float | jax.Array,
    total_steps: int,
    start_warmup_step: int = 0,
    power: float = 1.0,
    end_learning_rate: float = 0.0,
) -> optax.Schedule:
    r"""Build the schedule of ALBERT's and MLPerf's BERT code.

        lr(t) = base * (t - start) / w                          while t - start < w
        lr(t) = end + (base - end) (1 - t / T)^power            afterwards

    with w = warmup_steps, T = total_steps and t = 0 at the first update. The decay counts from step
    0, so the rate jumps down at the end of warmup.

    Args:
      base_learning_rate: Learning rate at which the ramp ends; may be a traced scalar.
      warmup_steps: Optimizer steps of the ramp.
      total_steps: Optimizer steps of the whole run.
      start_warmup_step: Step at which the ramp begins; -76 in MLPerf's BERT at batch 8192.
      power: Exponent of the decay.
      end_learning_rate: Learning rate at step T.

    Raises:
      UserError: For the same reasons as `warmup_schedule`.

    >>> schedule = albert_schedule(1.0, warmup_steps=287, total_steps=560, start_warmup_step=-76)
    >>> round(float(schedule(210)), 4), round(float(schedule(211)), 4)
    (0.9965, 0.6232)

    References:
      google-research/albert@6ca4dfd0d13495a0a0ed7931f452018e08f93ced:optimization.py and
      mlcommons/training_results_v0.7@c66406115bb3c60cb9c49889b076727ccecba31e:Google/benchmarks/
      bert/implementations/bert-research-JAX-tpu-v3-8192/run_pretraining.py.
    """
    with _naming(start_step="start_warmup_step"):
        return warmup_schedule(
            base_learning_rate,
            warmup_steps,
            total_steps,
            power=power,
            start_step=start_warmup_step,
            decay_from="start",
            end_learning_rate=end_learning_rate,
        )


def exponential_schedule(
    base_learning_rate: float | jax.Array,
    steps_per_decay: float,
    total_steps: int,
    decay_rate: float = 0.97,
    warmup_steps: float | jax.Array = 0,
    staircase: bool = True,
) -> optax.Schedule:
    r"""Build the staircase of EfficientNet's RMSProp recipes.

        lr(t) = base * t / w                                   for t < w
        lr(t) = base * decay_rate^floor(t / steps_per_decay)   afterwards

    with t = 0 at the first update and w = warmup_steps. Stairs count from step 0, so those that lie
    within the warmup have taken effect when it ends.

    Args:
      base_learning_rate: Learning rate at which the ramp ends; may be a traced scalar.
      steps_per_decay: Optimizer steps between two stairs; may be fractional. 2.4 epochs in
        EfficientNet: `lbopt.schedules.Units(num_examples, batch_size).exact_steps(2.4)`.
      total_steps: Optimizer steps of the whole run.
      decay_rate: Factor of each stair, in (0, 1].
      warmup_steps: Optimizer steps of the ramp; 5 epochs in EfficientNet.
      staircase: True for stairs, False for a smooth decay.

    Raises:
      UserError: If an argument is out of range or has no effect; names the argument.

    >>> schedule = exponential_schedule(1.0, 2.5, total_steps=100, decay_rate=0.5)
    >>> [float(schedule(count)) for count in (0, 2, 3, 5)]
    [1.0, 1.0, 0.5, 0.25]

    References:
      tensorflow/tpu@4b544d49d4ce5de5066a6631184c25cd29bdf9b6:models/official/efficientnet/utils.py.
    """
    stairs = _decay.exponential_factor(decay_rate, steps_per_decay, staircase)
    if staircase and decay_rate != 1:
        _check_reached("steps_per_decay", steps_per_decay, steps_per_decay, total_steps)
    with _naming():
        return warmup_schedule(
            base_learning_rate, warmup_steps, total_steps, decay=stairs, decay_from="start"
        )


def step_schedule(
    base_learning_rate: float | jax.Array,
    boundaries: tuple[float, ...],
    total_steps: int,
    factor: float = 0.1,
    warmup_steps: float | jax.Array = 0,
) -> optax.Schedule:
    """Build a schedule that is multiplied by `factor` at each boundary, counted from step 0.

    Args:
      base_learning_rate: Learning rate before the first boundary; may be a traced scalar.
      boundaries: Optimizer steps at which the rate is multiplied by `factor`, > 0, ascending and
        within the run.
      total_steps: Optimizer steps of the whole run.
      factor: Factor of each boundary, in (0, 1].
      warmup_steps: Optimizer steps of a linear warmup from 0.

    Raises:
      UserError: If an argument is out of range or has no effect; names the argument.

    >>> schedule = step_schedule(1.0, (2, 4), total_steps=6)
    >>> [round(float(schedule(count)), 4) for count in range(6)]
    [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
    """
    stairs = _decay.step_factor(factor, boundaries)
    if factor != 1:
        _check_reached("boundaries", boundaries, boundaries[-1], total_steps)
    with _naming():
        return warmup_schedule(
            base_learning_rate, warmup_steps, total_steps, decay=stairs, decay_from="start"
        )


def mixed_batch_schedule(*phases: tuple[optax.Schedule, int]) -> optax.Schedule:
    """Join the schedules of a run whose batch size changes: each phase counts its own steps from 0.

    A warmup in the second phase therefore ramps up from zero again, as the LAMB paper's 64K/32K
    BERT is said to do (source not confirmed: arXiv:1904.00962v5, section on mixed-batch training).
    It is `optax.join_schedules` given lengths instead of boundaries.

    Args:
      *phases: (schedule, optimizer steps) of each phase. The last phase never ends.

    Raises:
      UserError: If there is no phase or a length is below 1.

    >>> ramp = warmup_schedule(1.0, warmup_steps=2, total_steps=4)
    >>> schedule = mixed_batch_schedule((ramp, 4), (ramp, 4))
    >>> [float(schedule(count)) for count in range(8)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.5, 1.0, 0.5]
    """
    if not phases:
        raise UserError("phases", (), "give at least one (schedule, steps)")
    for index, phase in enumerate(phases):
        if not isinstance(phase, tuple) or len(phase) != 2 or not callable(phase[0]):
            raise UserError(f"phases[{index}]", phase, "give (schedule, steps)", code="type")

    lengths = [_scalars.whole(f"phases[{index}]", steps) for index, (_, steps) in enumerate(phases)]
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths) - 1)]
    return optax.join_schedules([schedule for schedule, _ in phases], ends)


def _check_reached(argument: str, value: Any, stair: Any, total_steps: int) -> None:
    """Raise `UserError` for a stair that the run does not reach."""
    if _scalars.known(stair) >= _scalars.whole("total_steps", total_steps):
        fix = (
            f"step {_scalars.known(stair):g} is not one of the {total_steps} of the run, so it "
            "would have no effect; leave it out, or train for longer"
        )
        raise UserError(argument, value, fix, code="unused")


def _naming(**names: str) -> contextlib.AbstractContextManager[None]:
    """Let errors name the arguments of a published schedule, not those of `warmup_schedule`."""
    return errors.under("", peak_learning_rate="base_learning_rate", **names)
