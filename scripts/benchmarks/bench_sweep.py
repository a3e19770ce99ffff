"""trials/s of `lbopt sweep` beside two ways to run sweeps by hand; both sides count compilation.

Each case has two cells, momentum and AdamW at one batch size, of 18 trials each: 6 learning rates x
2 search seeds + 6 final seeds, as in a cell of configs/sweeps/digits_limit.py. Some cases are also
run with five times the seeds. One peer is a loop over the same number of trials with one compiled
step per optimizer; the other starts a process per trial. The whole study digits_limit, run by its
command, is also compared with processes.

Networks of the size of Fashion-MNIST and of a small language model are compared with loops in
PyTorch, which have as many threads as there are cores, with a process per trial, and with the speed
of a large product of matrices.

A problem of the user's own, and optimizers of Optax by name, are compared with the built-in ones of
the same maths: both sides are lbopt.
"""

import contextlib
import importlib.util
import io
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import hand_written
import jax
import jax.numpy as jnp
import large_study
import own_digits
import pairs
import shapes
import sweep_on_tpu
import torch_loops

from lbopt.cli import load_config
from lbopt.config import (
    Arm,
    DataConfig,
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
"""Factor of the seeds in the large study that is compared with processes."""
BY_VMAP = [("mlp", 64), ("cnn", 64), ("lstm", 64)]
OPTIMIZERS = ("momentum", "adamw")
OF_OPTAX = {"adamw": "optax.adamw", "momentum": "optax.sgd"}
OWN_CASES = [("mlp", 64), ("cnn", 256)]
OWN_ROUNDS = 5
OWN_AIM = ("ratio", ">=", 0.98)
MODELS = {"cnn": ModelConfig("cnn"), "lstm": ModelConfig("lstm"), "mlp": ModelConfig("mlp", (128,))}
TRIALS = 18 * len(OPTIMIZERS)
ROUNDS = 2
PROCESSES = 3
PROCESS_AIM = ("ratio", ">=", 20.0)
BY_TORCH = [
    ("mlp", 256, 40),
    ("mlp", 1024, 40),
    ("cnn", 256, 4),
    ("cnn", 1024, 4),
    ("lm", 256, 1),
    ("lm", 1024, 1),
]
"""Network, examples per step, and epochs of a trial."""
TORCH_MODELS = {
    "cnn": ModelConfig("simple_cnn", width_coefficient=0.25),
    "lm": ModelConfig("decoder_lm", size="1m", max_length=shapes.LENGTH),
    "mlp": MODELS["mlp"],
}
TORCH_TRIALS = 6
STUDY = pathlib.Path(__file__).parents[2] / "configs" / "sweeps" / "digits_limit.py"


def run() -> Iterator[dict]:
    """Yield a row per case against the loop, and the rows of the other comparisons."""
    for case in CASES:
        yield from _case(*case)
    for case in OWN_CASES:
        yield from _own_case(*case)
    for case in BY_TORCH:
        yield from _torch_case(*case)
    yield _whole_study()
    yield _many()
    yield _report()
    yield from _on_tpu()


def _case(model: str, batch_size: int) -> list[dict]:
    name = f"{model} batch {batch_size}, {TRIALS} trials"
    by_loop = pairs.in_turn(
        lambda: _ours(model, batch_size), lambda: _loop(model, batch_size), ROUNDS, discard=0
    )
    rows = [_row(name, by_loop, "loop over one compiled step", ("ratio", ">=", 1.3))]

    if (model, batch_size) in BY_PROCESS:
        rows += _against_processes(model, batch_size, by_loop[0])
    if (model, batch_size) in BY_VMAP:
        by_vmap = pairs.in_turn(
            lambda: _ours(model, batch_size), lambda: _ours(model, batch_size, "vmap"), 1, discard=0
        )
        rows.append(_row(name, by_vmap, "lbopt with vmap", None))
    return rows


def _own_case(model: str, batch_size: int) -> list[dict]:
    """Compare own data and an own model, and optimizers of Optax, with the built-in ones."""
    built_in = _study(MODELS[model], batch_size, "auto", OPTIMIZERS)
    own = _study(MODELS[model], batch_size, "auto", OPTIMIZERS)
    own.train.data = own_digits.data()
    own.train.model = own_digits.model(model)
    of_optax = _study(MODELS[model], batch_size, "auto", [OF_OPTAX[name] for name in OPTIMIZERS])

    rows = []
    for what, study in (("own data and model", own), ("optimizers of Optax", of_optax)):
        timed = pairs.in_turn(
            lambda study=study: _timed(study, TRIALS), lambda: _timed(built_in, TRIALS), OWN_ROUNDS
        )
        name = f"{model} batch {batch_size}, {what}, {TRIALS} trials"
        rows.append(_row(name, timed, "the same, built-in", OWN_AIM))
    return rows


def _torch_case(model: str, batch_size: int, epochs: int) -> list[dict]:
    """Compare a study of one optimizer with a loop in PyTorch, and with the machine's peak."""
    study = _study(TORCH_MODELS[model], batch_size, "auto", ("momentum",))
    study.train.num_epochs = float(epochs)
    study.train.data = DataConfig(f"{shapes.__file__}:load_images")
    if model == "lm":
        study.train.data = DataConfig(
            f"{shapes.__file__}:load_text",
            task="language_model",
            outputs=shapes.VOCABULARY,
        )
        study.microstep_size = 16  # as in configs/sweeps/lm_critical.py
    study.search = SearchConfig(
        learning_rate_factors=(0.5, 1.0, 2.0), seeds=(0,), widen_candidates=0
    )
    study.final_seeds = (100, 101, 102)

    count = (shapes.WINDOWS if model == "lm" else shapes.IMAGES)["train"]
    loop = torch_loops.TorchLoop(model, batch_size, epochs * count // batch_size)
    ours, peer, ratio = pairs.in_turn(
        lambda: _timed(study, TORCH_TRIALS),
        lambda: [loop.trial(0.05, seed) for seed in range(TORCH_TRIALS)],
        ROUNDS,
        discard=0,
    )
    name = f"Fashion-MNIST's shapes, {model} batch {batch_size}, {TORCH_TRIALS} trials"
    if model == "lm":
        name = f"language model of 1 M parameters, batch {batch_size}, {TORCH_TRIALS} trials"
    unit = "trials/s"
    trained = 6.0 * shapes.multiplications(model) * epochs * count * TORCH_TRIALS
    return [
        pairs.row(
            name,
            unit,
            TORCH_TRIALS / ours,
            TORCH_TRIALS / peer,
            "loop in PyTorch",
            ratio,
            ("ratio", ">=", 1.0),
        ),
        _process_row(
            name, TORCH_TRIALS, ours, _process_seconds(f"large_{model}", batch_size, epochs), None
        ),
        pairs.row(
            f"{name}: multiplications of training per second of the whole study",
            "GFLOP/s",
            trained / ours / 1e9,
            (peak := _peak()) / 1e9,
            "a product of 2048 x 2048 matrices",
            trained / ours / peak,
            None,
        ),
    ]


def _peak() -> float:
    """Return the FLOP/s of the product of two large matrices, the best of five."""
    matrix = jnp.ones((2048, 2048))
    product = jax.jit(jnp.matmul)
    product(matrix, matrix).block_until_ready()
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        product(matrix, matrix).block_until_ready()
        seconds.append(time.perf_counter() - begin)
    return 2 * 2048**3 / min(seconds)


def _row(name, timed, peer_name, aim):
    ours, peer, ratio = timed
    return pairs.row(name, "trials/s", TRIALS / ours, TRIALS / peer, peer_name, ratio, aim)


def _against_processes(model: str, batch_size: int, our_seconds: float) -> list[dict]:
    each = _process_seconds(model, batch_size)
    large_seconds = _timed(
        _study(MODELS[model], batch_size, "auto", OPTIMIZERS, LARGE), LARGE * TRIALS
    )
    return [
        _process_row(f"{model} batch {batch_size}, {trials_run} trials", trials_run, ours, each)
        for trials_run, ours in ((TRIALS, our_seconds), (LARGE * TRIALS, large_seconds))
    ]


def _process_row(
    name: str, trials_run: int, ours: float, each: float, aim: tuple | None = PROCESS_AIM
) -> dict:
    """Return a row of a study of `ours` seconds beside processes of `each` seconds per trial."""
    return pairs.row(
        name,
        "trials/s",
        trials_run / ours,
        1 / each,
        "one process per trial",
        trials_run * each / ours,
        aim,
    )


def _process_seconds(model: str, batch_size: int, epochs: int = EPOCHS) -> float:
    """Return the median seconds of a process that runs one trial."""
    arguments = (hand_written.__file__, model, batch_size, epochs)
    command = [sys.executable, *map(str, arguments)]
    return statistics.median(_command_seconds(command) for _ in range(PROCESSES))


def _command_seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begin


def _whole_study() -> dict:
    """Time a study by its command, including start, probes and report.

    The peer's trials only train with momentum and evaluate.
    """
    config = load_config(str(STUDY), [], SweepConfig)
    assert (config.train.num_epochs, config.train.model.name) == (EPOCHS, "cnn")
    sizes = config.global_batch_sizes
    each = statistics.mean(_process_seconds("cnn", size) for size in sizes)

    with tempfile.TemporaryDirectory() as workdir:
        flags = [f"--config={STUDY}", f"--workdir={workdir}"]
        ours = _command_seconds([sys.executable, "-m", "lbopt", "sweep", *flags])
        trials_run = len(pathlib.Path(workdir, "results.jsonl").read_text().splitlines())
    name = f"configs/sweeps/digits_limit.py, {trials_run} trials"
    return _process_row(name, trials_run, ours, each)


def _many() -> dict:
    """Compare the time of a late trial of a large study with that of an early one.

    Start and compilation, which all trials share, cancel in the differences.
    """
    first, half, whole = (_seconds_of_tiny(count) for count in (100, 550, 1000))
    early = (half - first) / 450
    late = (whole - half) / 450
    name = "mlp batch 1024, one step, trials 551 to 1000"
    aim = ("ratio", ">=", 0.8)
    return pairs.row(name, "trials/s", 1 / late, 1 / early, "trials 101 to 550", early / late, aim)


def _seconds_of_tiny(count: int) -> float:
    config = _study(MODELS["mlp"], 1024, "auto", ("momentum",))
    config.train.num_steps = 1
    config.search = SearchConfig("log_uniform", num_candidates=count - 1, widen_candidates=0)
    config.final_seeds = (9,)
    return _timed(config, count)


def _report() -> dict:
    """Time the report of a study of 5,000 trials."""
    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(folder)
        saved, count = large_study.save(workdir)
        begin = time.perf_counter()
        write_study_report(workdir, saved)
        seconds = time.perf_counter() - begin
    aim = ("lbopt", "<=", 20.0)
    return pairs.row(f"report of {count} trials", "s", seconds, None, None, None, aim)


def _on_tpu() -> list[dict]:
    if importlib.util.find_spec("libtpu") is None:
        return []
    unit = "Mcycles a step"
    peer = "one v5e chip, 64 trials in turn"
    aim = ("ratio", ">=", 10.0)
    return [
        pairs.row(
            f"{name}, 64 trials on 4 chips", unit, ours / 1e6, alone / 1e6, peer, alone / ours, aim
        )
        for name, ours, alone in sweep_on_tpu.run()
    ]


def _ours(model: str, batch_size: int, batching: str = "auto") -> None:
    _timed(_study(MODELS[model], batch_size, batching, OPTIMIZERS), TRIALS)


def _study(
    model: ModelConfig, batch_size: int, batching: str, optimizers, times: int = 1
) -> SweepConfig:
    schedule = ScheduleConfig(0.05, scaling_rule="none", warmup_rule="none")
    return SweepConfig(
        train=TrainConfig(num_epochs=EPOCHS, model=model),
        arms=tuple(Arm(name.replace(".", " "), _optimizer(name), schedule) for name in optimizers),
        global_batch_sizes=(batch_size,),
        search=SearchConfig(
            learning_rate_factors=(0.1, 0.2, 0.4, 0.8, 1.0, 2.0),
            seeds=tuple(range(2 * times)),
            widen_candidates=0,
        ),
        final_seeds=tuple(range(100, 100 + 6 * times)),
        trials_per_program=6,
        trial_batching=batching,
    )


def _optimizer(name: str) -> OptimizerConfig:
    options = {"momentum": 0.9} if name == "optax.sgd" else {}
    return OptimizerConfig(name, weight_decay=0.01 * name.endswith("adamw"), options=options)


def _timed(config: SweepConfig, expected: int) -> float:
    """Run a study in a new folder; return its seconds."""
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
