"""What a batch that changes costs, and what it costs to measure how far it may grow.

The stall of the training loop at a change of batch is in steps of the new batch.
A run whose batch doubles is trained by `lbopt.train.train`, which blocks on every step here. The
stall is the time from the end of the last step of a batch to the end of the first step of the next
one, less the median step of the next one. The peer compiles the step when the batch changes.

The critical batch is measured in three ways, which the study's report shows together: by the
study's steps to a target, by noise scales (that of its final runs, and those of each layer of one
run), and by branches of that run. The peer is the study alone.
"""

import dataclasses
import os
import pathlib
import statistics
import subprocess
import sys
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
STUDY = "sweeps/digits_limit:target"
STUDY_FLAG = f"--config={STUDY}"
RUN = (
    "--config=digits_cnn:adamw-64",
    "--config.schedule.decay=constant",
    "--config.optimizer.track_noise_scale=True",
    "--config.optimizer.noise_scale_per_layer=True",
    "--config.parallel.num_microsteps=2",
    "--config.checkpoint.every_steps=50",
    "--config.checkpoint.keep=10",
)
BRANCHES = ("--factors=1,2,4,8", "--examples=8192")
MEASURES_AIM = ("ratio", ">=", 1 / 1.3)


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
    """Yield one row per network, and one for the measures."""
    for name in CASES:
        yield _case(name)
    yield _measures()


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


def _measures() -> dict:
    with tempfile.TemporaryDirectory() as folder:

        def plain() -> None:
            study = f"--workdir={folder}/plain"
            _lbopt(
                f"{folder}/of_plain", "sweep", STUDY_FLAG, study, "--config.measure.num_probes=0"
            )

        def measured() -> None:
            cache = f"{folder}/of_measured"
            study = f"{folder}/measured"
            _lbopt(cache, "sweep", STUDY_FLAG, f"--workdir={study}")
            _lbopt(cache, "train", *RUN, f"--workdir={folder}/run")
            _lbopt(cache, "critical", f"--workdir={folder}/run", *BRANCHES, f"--study={study}")
            _lbopt(cache, "report", f"--workdir={study}")

        ours, peer, ratio = pairs.in_turn(measured, plain, 1, discard=0)
    title = f"{STUDY} with noise scales, and a run with branches"
    return pairs.row(title, "s", ours, peer, "the study alone", ratio, MEASURES_AIM)


def _lbopt(cache: str, *arguments: str) -> None:
    """Run a command with a cache of compiled programs of its own."""
    command = [sys.executable, "-m", "lbopt", *arguments]
    here = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache}
    subprocess.run(command, check=True, capture_output=True, env=here)


def _linked(phase, ends, following):
    """Return a phase whose steps are timed, before the phase that follows."""
    timed = Timed(phase.train_step, ends)
    return dataclasses.replace(phase, train_step=timed, next_phase=following)
