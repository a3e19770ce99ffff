"""trials/s of `lbopt sweep` beside the two ways people run sweeps by hand; compilation is counted on both sides.

Each case is two cells (momentum and AdamW at one batch size) of 18 trials: 6 learning rates x 2 search seeds + 6 final
seeds. The loop runs as many trials with one compiled step per optimizer; the other peer starts a process per trial.
"""

import contextlib
import io
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import hand_written
import jax
import pairs

from lbopt.config import Arm, ModelConfig, OptimizerConfig, ScheduleConfig, SearchConfig, SweepConfig, TrainConfig
from lbopt.sweep import runner, trials

EPOCHS = 20
CASES = [("cnn", 16), ("cnn", 64), ("cnn", 256), ("cnn", 1024), ("lstm", 64), ("lstm", 1024)]
BY_PROCESS = [("cnn", 64), ("cnn", 1024)]
BY_VMAP = [("cnn", 16), ("cnn", 64), ("cnn", 1024), ("lstm", 64)]
OPTIMIZERS = ("momentum", "adamw")
MODELS = {"cnn": ModelConfig("cnn"), "lstm": ModelConfig("lstm"), "mlp": ModelConfig("mlp", (128,))}
TRIALS = 18 * len(OPTIMIZERS)
ROUNDS = 2
PROCESSES = 3


def run() -> list[dict]:
    """Return a row per case against the loop, and one against processes."""
    return [row for case in CASES for row in _case(*case)]


def _case(model: str, batch_size: int) -> list[dict]:
    by_loop = pairs.in_turn(lambda: _ours(model, batch_size), lambda: _loop(model, batch_size), ROUNDS, discard=0)
    rows = [_row(f"{model} batch {batch_size}, {TRIALS} trials", by_loop, "loop over one compiled step", 1.0)]
    if (model, batch_size) in BY_PROCESS:
        rows.append(_against_processes(batch_size, by_loop[0]))
    if (model, batch_size) in BY_VMAP:
        by_vmap = pairs.in_turn(
            lambda: _ours(model, batch_size), lambda: _ours(model, batch_size, "vmap"), 1, discard=0
        )
        rows.append(_row(f"{model} batch {batch_size}, {TRIALS} trials", by_vmap, "lbopt with vmap, not map", None))
    return rows


def _row(name, timed, peer_name, limit):
    ours, peer, ratio = timed
    return pairs.row(name, "trials/s", TRIALS / ours, TRIALS / peer, peer_name, ratio, limit)


def _against_processes(batch_size: int, our_seconds: float) -> dict:
    script = str(pathlib.Path(hand_written.__file__))
    seconds = []
    for _ in range(PROCESSES):
        begin = time.perf_counter()
        subprocess.run([sys.executable, script, str(batch_size), str(EPOCHS)], check=True, capture_output=True)
        seconds.append(time.perf_counter() - begin)
    peer = TRIALS * statistics.median(seconds)
    return _row(
        f"cnn batch {batch_size}, {TRIALS} trials",
        (our_seconds, peer, peer / our_seconds),
        "one process per trial",
        10.0,
    )


def _ours(model: str, batch_size: int, batching: str = "auto") -> None:
    jax.clear_caches()
    schedule = ScheduleConfig(0.05, scaling_rule="none", warmup_rule="none")
    config = SweepConfig(
        train=TrainConfig(num_epochs=EPOCHS, model=MODELS[model]),
        arms=tuple(
            Arm(name, OptimizerConfig(name, weight_decay=0.01 * (name == "adamw")), schedule) for name in OPTIMIZERS
        ),
        global_batch_sizes=(batch_size,),
        search=SearchConfig(learning_rate_factors=(0.1, 0.2, 0.4, 0.8, 1.0, 2.0), seeds=(0, 1)),
        final_seeds=(2, 3, 4, 5, 6, 7),
        trials_per_program=6,
        trial_batching=batching,
    )
    config.validate()
    cells = trials.make_cells(config, trials.make_problems(config))
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        rows = runner.run_sweep(config, cells, pathlib.Path(folder))
    assert len(rows) == TRIALS


def _loop(model: str, batch_size: int) -> None:
    jax.clear_caches()
    for optimizer in OPTIMIZERS:
        peer = hand_written.HandWritten(model, optimizer, batch_size, EPOCHS)
        for number in range(TRIALS // len(OPTIMIZERS)):
            peer.trial(0.01 * (1 + number), number)
