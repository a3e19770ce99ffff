"""Stall of the training loop at a change of batch, in steps of the new batch.

A run whose batch doubles is trained by `lbopt.train.train`, which blocks on every step here. The
stall is the time from the end of the last step of a batch to the end of the first step of the next
one, less the median step of the next one. The peer compiles the step when the batch changes.
"""

import dataclasses
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator

import jax
import pairs

from lbopt.config import (
    BatchScheduleConfig,
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)
from lbopt.recipes import build_run
from lbopt.train import train

AIM = ("lbopt", "<=", 1.0)
CASES = {
    "cnn": (DataConfig("digits"), ModelConfig("cnn"), 256, 800),
    "bert tiny": (
        DataConfig("pydoc_mlm"),
        ModelConfig("bert", size="tiny", max_length=64),
        64,
        300,
    ),
}
"""(data, model, batch at the start, steps there)."""


class Timed:
    """A training step that notes when each call ended."""

    def __init__(self, step, ends):
        self._step = step
        self._ends = ends

    def __call__(self, state, batch):
        found = jax.block_until_ready(self._step(state, batch))
        self._ends.append(time.perf_counter())
        return found

    def __getattr__(self, name):
        return getattr(self._step, name)


def run() -> Iterator[dict]:
    """Yield one row per network."""
    for name in CASES:
        yield _case(name)


def _case(name: str) -> dict:
    data, model, size, steps = CASES[name]
    growing = BatchScheduleConfig(
        "steps",
        unit="examples",
        changes=((float(size * steps), 2 * size), (3.0 * size * steps, 4 * size)),
    )
    config = TrainConfig(
        data=data,
        model=model,
        optimizer=OptimizerConfig("adamw"),
        schedule=ScheduleConfig(0.001, base_batch_size=size, warmup_rule="none"),
        global_batch_size=size,
        num_steps=4 * steps,
        batch_schedule=growing,
        log_every_steps=10**6,
        eval_every_steps=10**6,
        checkpoint=CheckpointConfig(every_steps=10**6),
    )

    ends: list[float] = []
    whole = build_run(config)
    phases = whole.phases()
    chain = None
    for phase in reversed(phases):
        chain = _linked(phase, ends, chain)
    with tempfile.TemporaryDirectory() as folder:
        train(chain, pathlib.Path(folder))

    stalls = []
    for phase in phases[1:]:
        first = phase.first_step
        took = [later - end for end, later in zip(ends[first:], ends[first + 1 :], strict=False)]
        step = statistics.median(took[: phase.num_steps - 1])
        stalls.append((ends[first] - ends[first - 1] - step) / step)
    ours = max(stalls)

    # Another learning rate makes another program, which no cache has.
    config.schedule.base_learning_rate *= 1.5
    later = build_run(config).phases()[-1]
    begin = time.perf_counter()
    later.lower().compile()
    peer = (time.perf_counter() - begin) / step
    title = f"{name}, batch {size} to {2 * size} to {4 * size}: the longer stall"
    ratio = peer / max(ours, 1e-9)
    return pairs.row(title, "steps", ours, peer, "compiling at the change", ratio, AIM)


def _linked(phase, ends, following):
    """Return a phase whose steps are timed, before the phase that follows."""
    timed = Timed(phase.train_step, ends)
    return dataclasses.replace(phase, train_step=timed, next_phase=following)
