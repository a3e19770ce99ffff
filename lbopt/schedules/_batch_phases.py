"""A run whose batch grows: the phases of one batch size each, counted in examples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lbopt import _scalars
from lbopt.errors import require

_SLACK = 3e-9
"""Steps by which a length in decimal fractions may exceed a whole number."""


@dataclasses.dataclass(frozen=True)
class BatchPhase:
    """Consecutive steps of one batch size.

    Attributes:
      global_batch_size: Examples per step.
      num_steps: Number of steps.
      first_step: Steps before the phase.
      first_example: Examples before the phase.

    >>> BatchPhase(64, num_steps=10, first_step=5, first_example=160).last_example
    800
    """

    global_batch_size: int
    num_steps: int
    first_step: int
    first_example: int

    @property
    def last_example(self) -> int:
        """Examples up to the end of the phase."""
        return self.first_example + self.num_steps * self.global_batch_size


def batch_phases(
    global_batch_size: int,
    changes: Sequence[tuple[float, int]],
    num_examples: float,
    strict: bool = True,
) -> tuple[BatchPhase, ...]:
    """Return the phases of a run whose batch changes at given numbers of examples.

    A batch changes with the first step that begins at or after its place, so every phase has whole
    steps, and the stream of examples has no gap.

    Args:
      global_batch_size: Examples per step at the start.
      changes: Pairs of a place, in examples from the start, and the batch from there on, by place.
      num_examples: Length of the run in examples; the last step may exceed it.
      strict: Whether to refuse a change that would leave a phase shorter than a step, or that
        comes after the end. If False, changes that leave a phase without a step are left out.

    Raises:
      UserError: Naming `changes`, for places that do not ascend, a batch size that is no whole
        number >= 1, or a change that `strict` refuses; or `num_examples`, if it is not positive.

    >>> [(one.global_batch_size, one.num_steps) for one in batch_phases(64, [(200, 128)], 1000)]
    [(64, 4), (128, 6)]
    """
    size = _scalars.whole("global_batch_size", global_batch_size)
    wanted = "a number of examples > 0"
    total = _scalars.checked("num_examples", num_examples, wanted, lambda number: number > 0)
    places = [place for place, _ in changes]
    ascend = all(0 < place < math.inf for place in places) and places == sorted(set(places))
    require(ascend, "changes", changes, "give places > 0 that ascend")
    whole = all(isinstance(one, int) and one >= 1 for _, one in changes)
    require(whole, "changes", changes, "give batch sizes that are whole numbers >= 1")

    found: list[BatchPhase] = []
    steps = 0
    examples = 0
    begun = 0.0
    for place, later in (*changes, (math.inf, size)):
        left = max(0, math.ceil((total - examples) / size - _SLACK))
        end = min(place, total)
        count = min(left, max(0, math.ceil((end - examples) / size - _SLACK)))
        if strict and changes:
            fix = f"the change to batch {later} at {place:g} examples comes at or after the end of "
            fix += "the run; let it come earlier, or leave it out"
            require(place == math.inf or count < left, "changes", changes, fix, code="conflict")
            fix = f"batch {size} has no whole step between {begun:g} and {end:g} examples; let it "
            fix += "last longer, or leave it out"
            has_step = count > 0 and end - begun >= size * (1 - _SLACK)
            require(has_step, "changes", changes, fix, code="conflict")
        begun = place
        if count:
            found.append(BatchPhase(size, count, steps, examples))
            steps += count
            examples += count * size
        size = later
    return tuple(_joined(found))


def _joined(phases: Iterable[BatchPhase]) -> list[BatchPhase]:
    """Return phases with neighbours of one batch size made one."""
    found: list[BatchPhase] = []
    for phase in phases:
        if found and found[-1].global_batch_size == phase.global_batch_size:
            last = found.pop()
            phase = dataclasses.replace(last, num_steps=last.num_steps + phase.num_steps)
        found.append(phase)
    return found


def phase_schedule(
    schedule: optax.Schedule, phase: BatchPhase, first_batch_size: int, scale: float
) -> optax.Schedule:
    """Return the learning rate of a phase: the run's at the same examples, scaled to its batch.

    Args:
      schedule: Learning rate of the run, as a function of steps at its first batch size.
      phase: The phase.
      first_batch_size: Batch size at the start of the run.
      scale: Learning rate at the phase's batch size over that at the first one.

    Returns:
      A schedule: count of updates since the start of the run -> fp32 learning rate.

    >>> whole = optax.linear_schedule(1.0, 0.0, 100)
    >>> later = BatchPhase(256, num_steps=10, first_step=20, first_example=20 * 64)
    >>> rate = phase_schedule(whole, later, 64, scale=2.0)
    >>> [round(float(rate(step)), 6) for step in (20, 21)]  # twice those of 20 and 24 at batch 64
    [1.6, 1.52]
    """
    start = phase.first_example / first_batch_size
    stride = phase.global_batch_size / first_batch_size

    def of_phase(count: jax.Array) -> jax.Array:
        return scale * schedule(start + (count - phase.first_step) * stride)

    return of_phase


def ramp_changes(first: int, last: int, increment: int, length: float) -> list[tuple[float, int]]:
    """Return the changes of a linear ramp, equal numbers of examples at each batch size before it.

    Args:
      first: Batch size at the start.
      last: Batch size at the end of the ramp.
      increment: Examples by which the batch grows at a time, a divisor of the difference.
      length: Length of the ramp in examples.

    >>> ramp_changes(64, 128, 32, 1000)
    [(500.0, 96), (1000.0, 128)]

    References:
      The form is that of Megatron-LM's `--rampup-batch-size START INCREMENT SAMPLES`.
    """
    fits = increment >= 1 and last > first and (last - first) % increment == 0
    fix = f"it does not divide the way from {first} to {last}; give a divisor of {last - first}"
    require(fits, "increment", increment, fix, code="mismatch")
    count = (last - first) // increment
    return [(length * k / count, first + k * increment) for k in range(1, count + 1)]


def doubling_changes(first: int, last: int, every: float) -> list[tuple[float, int]]:
    """Return the changes of a batch that doubles at equal distances in examples, up to a last size.

    Args:
      first: Batch size at the start.
      last: Largest batch size.
      every: Examples between two changes.

    >>> doubling_changes(64, 256, 1000)
    [(1000, 128), (2000, 256)]
    """
    times = range(1, max(0, int(math.log2(last / first) + 1e-9)) + 1)
    return [(every * k, first * 2**k) for k in times]


def critical_changes(
    first: int, last: int, measured: Sequence[tuple[float, float]]
) -> list[tuple[float, int]]:
    """Return the changes of a batch that doubles where the critical batch is twice as large.

    Args:
      first: Batch size at the start.
      last: Largest batch size.
      measured: Pairs of a place in examples and the critical batch that was measured there, by
        place.

    >>> critical_changes(64, 512, [(1000, 100), (5000, 300), (20_000, 900)])
    [(5000, 256), (20000, 512)]

    References:
      Merrill et al., Critical Batch Size Revisited, arXiv 2505.23971, batch-size warmup.
    """
    found = []
    size = first
    for place, critical in measured:
        later = size
        while 2 * later <= min(critical, last):
            later *= 2
        if later > size:
            found.append((place, later))
        size = later
    return found


def seesaw_changes(
    schedule: optax.Schedule,
    num_steps: int,
    first: int,
    last: int,
    factor: float = 2.0,
    multiple_of: int = 1,
) -> list[tuple[float, int]]:
    """Return the changes of Seesaw: the batch grows where a schedule would cut the learning rate.

    Where the rate has fallen to 1 / factor of its peak, 1 / factor^2 and so on, the batch is
    multiplied by the factor. With a scaling rule the rate then falls by less at each cut: by
    sqrt(factor) under "sqrt", and not at all under "linear".

    Args:
      schedule: The learning rate, as a function of steps at the first batch size.
      num_steps: Length of the run in steps at the first batch size.
      first: Batch size at the start.
      last: Largest batch size.
      factor: Factor of the batch at a cut, > 1.
      multiple_of: Number of which every batch size is a multiple.

    >>> schedule = optax.piecewise_constant_schedule(0.1, {10: 0.5, 20: 0.5})
    >>> seesaw_changes(schedule, 30, first=64, last=256)
    [(640, 128), (1280, 256)]

    References:
      Seesaw, arXiv 2510.14717: invariants rate x sqrt(batch) for Adam and rate x batch for SGD.
    """
    rates = np.asarray(schedule(jnp.arange(num_steps, dtype=jnp.float32)), np.float64)
    rates = np.broadcast_to(rates, (num_steps,))
    peak = int(np.argmax(rates))
    found: list[tuple[float, int]] = []
    cuts = 1
    while (size := round(first * factor**cuts / multiple_of) * multiple_of) <= last:
        # The schedule is in fp32: a half of the peak may come out a bit above one half.
        below = np.flatnonzero(rates[peak:] <= rates[peak] * factor**-cuts * (1 + 1e-6))
        if not len(below):
            break
        place = (peak + int(below[0])) * first
        # Of several cuts at one place the last counts.
        found = [change for change in found if change[0] < place]
        if size > (found[-1][1] if found else first):
            found.append((place, size))
        cuts += 1
    return found
