"""trials/s of `lbopt sweep` beside the two ways people run sweeps by hand; compilation is counted on both sides.

Each case is two cells (momentum and AdamW at one batch size) of 18 trials: 6 learning rates x 2 search seeds + 6 final
seeds, as in a cell of configs/sweeps/digits_limit.py; some are run with five times the seeds too. The loop runs as many
trials with one compiled step per optimizer; the other peer starts a process per trial. That study itself, as the command
runs it, is held against processes too.
"""

import contextlib
import importlib.util
import io
import pathlib
import runpy
import statistics
import subprocess
import sys
import tempfile
import time

import hand_written
import jax
import large_study
import pairs
import sweep_on_tpu

from lbopt.config import (
    Arm,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    SearchConfig,
    SweepConfig,
    TrainConfig,
)
from lbopt.report.study import write_study_report
from lbopt.sweep import make_cells, make_problems, run_sweep

EPOCHS = 20
CASES = [
    *(("mlp", size) for size in (16, 64, 1024)),
    *(("cnn", size) for size in (16, 64, 256, 1024)),
    *(("lstm", size) for size in (64, 1024)),
]
BY_PROCESS = [("mlp", 64), ("mlp", 1024), ("cnn", 64), ("cnn", 1024)]
LARGE = 5
"""So many times the seeds has the large study that is held against processes."""
BY_VMAP = [("mlp", 64), ("cnn", 64), ("lstm", 64)]
OPTIMIZERS = ("momentum", "adamw")
MODELS = {"cnn": ModelConfig("cnn"), "lstm": ModelConfig("lstm"), "mlp": ModelConfig("mlp", (128,))}
TRIALS = 18 * len(OPTIMIZERS)
ROUNDS = 2
PROCESSES = 3
STUDY = pathlib.Path(__file__).parents[2] / "configs" / "sweeps" / "digits_limit.py"


def run() -> list[dict]:
    """Return a row per case against the loop, and some against processes, vmap, many trials, and one chip of a TPU."""
    return [
        *(row for case in CASES for row in _case(*case)),
        _whole_study(),
        _many(),
        _report(),
        *_on_tpu(),
    ]


def _case(model: str, batch_size: int) -> list[dict]:
    by_loop = pairs.in_turn(
        lambda: _ours(model, batch_size), lambda: _loop(model, batch_size), ROUNDS, discard=0
    )
    rows = [
        _row(
            f"{model} batch {batch_size}, {TRIALS} trials",
            by_loop,
            "loop over one compiled step",
            1.3,
        )
    ]
    if (model, batch_size) in BY_PROCESS:
        rows += _against_processes(model, batch_size, by_loop[0])
    if (model, batch_size) in BY_VMAP:
        by_vmap = pairs.in_turn(
            lambda: _ours(model, batch_size), lambda: _ours(model, batch_size, "vmap"), 1, discard=0
        )
        rows.append(
            _row(f"{model} batch {batch_size}, {TRIALS} trials", by_vmap, "lbopt with vmap", None)
        )
    return rows


def _row(name, timed, peer_name, limit):
    ours, peer, ratio = timed
    return pairs.row(name, "trials/s", TRIALS / ours, TRIALS / peer, peer_name, ratio, limit)


def _against_processes(model: str, batch_size: int, our_seconds: float) -> list[dict]:
    seconds = _of_a_process(model, batch_size)
    of_large = _timed(_study(model, batch_size, "auto", OPTIMIZERS, LARGE), LARGE * TRIALS)
    rows = []
    for trials_run, ours in ((TRIALS, our_seconds), (LARGE * TRIALS, of_large)):
        peer = trials_run * seconds
        name = f"{model} batch {batch_size}, {trials_run} trials"
        limits = (
            "trials/s",
            trials_run / ours,
            trials_run / peer,
            "one process per trial",
            peer / ours,
            20.0,
        )
        rows.append(pairs.row(name, *limits))
    return rows


def _of_a_process(model: str, batch_size: int) -> float:
    """Return the median seconds of one trial in a process of its own."""
    command = [
        sys.executable,
        str(pathlib.Path(hand_written.__file__)),
        model,
        str(batch_size),
        str(EPOCHS),
    ]
    return statistics.median(_of_command(command) for _ in range(PROCESSES))


def _of_command(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begin


def _whole_study() -> dict:
    """Time a study by its command, start, probes and report included; its peer's trials only train and score, by momentum."""
    config = runpy.run_path(str(STUDY))["get_config"]()
    assert (config.train.num_epochs, config.train.model.name) == (EPOCHS, "cnn")
    sizes = config.global_batch_sizes
    by_size = statistics.mean(_of_a_process("cnn", size) for size in sizes)
    with tempfile.TemporaryDirectory() as workdir:
        command = [
            sys.executable,
            "-m",
            "lbopt",
            "sweep",
            f"--config={STUDY}",
            f"--workdir={workdir}",
        ]
        ours = _of_command(command)
        trials_run = len(pathlib.Path(workdir, "results.jsonl").read_text().splitlines())
    name = f"configs/sweeps/digits_limit.py, {trials_run} trials"
    limits = (
        "trials/s",
        trials_run / ours,
        1 / by_size,
        "one process per trial",
        trials_run * by_size / ours,
        20.0,
    )
    return pairs.row(name, *limits)


def _many() -> dict:
    """Compare what each further trial of a large study costs: start and compilation, which all share, do not count."""
    first, half, whole = (_seconds_of_tiny(count) for count in (100, 550, 1000))
    early = (half - first) / 450
    late = (whole - half) / 450
    name = "mlp batch 1024, one step, trials 551 to 1000"
    return pairs.row(name, "trials/s", 1 / late, 1 / early, "trials 101 to 550", early / late, 0.8)


def _seconds_of_tiny(count: int) -> float:
    config = _study("mlp", 1024, "auto", ("momentum",))
    config.train.num_steps = 1
    config.search = SearchConfig("log_uniform", num_candidates=count - 1)
    config.final_seeds = (9,)
    return _timed(config, count)


def _report() -> dict:
    """Time the report of 5,000 trials."""
    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(folder)
        saved, count = large_study.save(workdir)
        begin = time.perf_counter()
        write_study_report(workdir, saved)
        seconds = time.perf_counter() - begin
    return pairs.row(f"report of {count} trials", "s", seconds, None, None, None, 20.0)


def _on_tpu() -> list[dict]:
    if importlib.util.find_spec("libtpu") is None:
        return []
    unit = "Mcycles a step"
    peer = "one v5e chip, 64 trials in turn"
    return [
        pairs.row(
            f"{name}, 64 trials on 4 chips", unit, ours / 1e6, alone / 1e6, peer, alone / ours, 10.0
        )
        for name, ours, alone in sweep_on_tpu.run()
    ]


def _ours(model: str, batch_size: int, batching: str = "auto") -> None:
    _timed(_study(model, batch_size, batching, OPTIMIZERS), TRIALS)


def _study(model: str, batch_size: int, batching: str, optimizers, times: int = 1) -> SweepConfig:
    schedule = ScheduleConfig(0.05, scaling_rule="none", warmup_rule="none")
    return SweepConfig(
        train=TrainConfig(num_epochs=EPOCHS, model=MODELS[model]),
        arms=tuple(
            Arm(name, OptimizerConfig(name, weight_decay=0.01 * (name == "adamw")), schedule)
            for name in optimizers
        ),
        global_batch_sizes=(batch_size,),
        search=SearchConfig(
            learning_rate_factors=(0.1, 0.2, 0.4, 0.8, 1.0, 2.0), seeds=tuple(range(2 * times))
        ),
        final_seeds=tuple(range(100, 100 + 6 * times)),
        trials_per_program=6,
        trial_batching=batching,
    )


def _timed(config: SweepConfig, expected: int) -> float:
    """Run a study in a folder of its own; return its seconds."""
    jax.clear_caches()
    config.validate()
    begin = time.perf_counter()
    cells = make_cells(config, make_problems(config))
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        rows = run_sweep(config, cells, pathlib.Path(folder))
    assert len(rows) == expected
    return time.perf_counter() - begin


def _loop(model: str, batch_size: int) -> None:
    jax.clear_caches()
    for optimizer in OPTIMIZERS:
        peer = hand_written.HandWritten(model, optimizer, batch_size, EPOCHS)
        for number in range(TRIALS // len(OPTIMIZERS)):
            peer.trial(0.01 * (1 + number), number)
