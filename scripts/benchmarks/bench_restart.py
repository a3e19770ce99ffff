"""Cost of fault tolerance: saves, restarts and a second process.

Files are written to the disk of the temporary folder. Every restart is a new process, with an empty
and with a filled persistent compilation cache of JAX.
"""

import contextlib
import json
import operator
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import jax
import orbax.checkpoint as ocp
import pairs

from lbopt.cli import MIN_COMPILE_S, load_config
from lbopt.config import TrainConfig
from lbopt.parallel import put_batch
from lbopt.recipes import build_run
from lbopt.train import Checkpoints

ROOT = pathlib.Path(__file__).parents[2]
SAVED = ["digits_cnn.py:lamb-256", "digits_resnet.py:lamb-1024"]
SAVES = 7
SHARED = [("digits_cnn.py:lamb-1024", 60), ("digits_resnet.py:lamb-1024", 10)]
ROUNDS = 3

RESTART = """
import time
begin = time.perf_counter()
import json, pathlib, sys
import jax
from lbopt.cli import _train, load_config
from lbopt.config import TrainConfig
from lbopt.parallel import put_batch
from lbopt.recipes import build_run
from lbopt.train import Checkpoints
marks = {"import": time.perf_counter()}
run = build_run(load_config(sys.argv[1], [], TrainConfig))
marks["data and model"] = time.perf_counter()
run.lower()
marks["trace"] = time.perf_counter()
with Checkpoints(pathlib.Path(sys.argv[2])) as checkpoints:
    state = checkpoints.restore_newest(lambda step: run.shapes())
    marks["restore and check"] = time.perf_counter()
    if state is None:
        state = run.init()
    batch = put_batch(run.mesh, run.batches[int(state.step)])
    jax.block_until_ready(run.train_step(state, batch))
    marks["compile and first step"] = time.perf_counter()
    if len(checkpoints.steps()) == 0:
        checkpoints.save(run.init().replace(step=jax.numpy.int32(1)), {})
times = {}
last = begin
for name, mark in marks.items():
    times[name] = mark - last
    last = mark
print(json.dumps(times))
"""


def run() -> Iterator[dict]:
    """Yield the rows of saves, restarts and a second process."""
    for name in SAVED:
        yield from _saving(name)
    yield from _restarts(SAVED[0])
    for each in SHARED:
        yield _sharing(*each)


def _saving(name: str) -> list[dict]:
    """Compare a save with Orbax's asynchronous save of the same state; one step is allowed.

    The previous save has always ended when a save begins.
    """
    plan = build_run(load_config(str(ROOT / "configs" / name), [], TrainConfig))
    state = plan.init()
    batch = put_batch(plan.mesh, plan.batches[0])
    state = _train(plan, state, batch, 3)[0]
    _, seconds = _train(plan, state, batch, 10)
    step = statistics.median(seconds)

    ours = _blocked(plan, state, batch, step, _ours)
    peer = _blocked(plan, state, batch, step, _orbax)
    named = f"{name}: a save stops training for, in steps of {1e3 * step:.1f} ms"
    return [
        pairs.row(
            named,
            "steps",
            ours / step,
            peer / step,
            "orbax, asynchronous",
            peer / ours,
            ("lbopt", "<=", 1.0),
        )
    ]


def _train(plan, state, batch, steps):
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        state, metrics = plan.train_step(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - begin)
    return state, seconds


@contextlib.contextmanager
def _ours(folder, state):
    with Checkpoints(folder) as checkpoints:
        checkpoints.prepare(state)
        yield lambda state: checkpoints.save(state, {}), checkpoints.wait


@contextlib.contextmanager
def _orbax(folder, state):
    with ocp.CheckpointManager(
        folder, options=ocp.CheckpointManagerOptions(max_to_keep=3)
    ) as manager:
        yield (
            lambda state: manager.save(int(state.step), args=ocp.args.StandardSave(state)),
            manager.wait_until_finished,
        )


def _blocked(plan, state, batch, step, make) -> float:
    """Return the median seconds that a save blocks the loop, without the first save."""
    state = plan.init()
    seconds = []
    with tempfile.TemporaryDirectory() as folder, make(pathlib.Path(folder), state) as (save, wait):
        for _ in range(SAVES):
            state, _ = _train(plan, state, batch, max(2, int(0.5 / step)))
            begin = time.perf_counter()
            save(state)
            seconds.append(time.perf_counter() - begin)
            wait()
    return statistics.median(seconds[1:])


def _restarts(name: str) -> list[dict]:
    """Return a row for each phase of a restart, and one for their sum."""
    with tempfile.TemporaryDirectory() as folder:
        workdir = str(pathlib.Path(folder) / "workdir")
        _restart(name, workdir, f"{folder}/cache")  # saves the checkpoint and fills the cache
        cold = [_restart(name, workdir, f"{folder}/cold-{turn}") for turn in range(ROUNDS)]
        warm = [_restart(name, workdir, f"{folder}/cache") for _ in range(ROUNDS)]

    def row(what: str, seconds) -> dict:
        ours, peer = (statistics.median(map(seconds, turns)) for turns in (warm, cold))
        title = f"restart, {name}: {what}"
        ratio = peer / ours if ours else None
        return pairs.row(title, "s", ours, peer, "without compilation cache", ratio, None)

    phases = [row(phase, operator.itemgetter(phase)) for phase in cold[0]]
    return [*phases, row("in all", lambda times: sum(times.values()))]


def _restart(name: str, workdir: str, cache: str) -> dict[str, float]:
    """Start a run in a new process; return the seconds of its phases."""
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": str(MIN_COMPILE_S),
    }
    command = [sys.executable, "-c", RESTART, str(ROOT / "configs" / name), workdir]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _sharing(name: str, steps: int) -> dict:
    """Compare the step of two processes of two devices with that of one process of four devices."""
    times = [(_job(name, steps, 2), _job(name, steps, 1)) for _ in range(ROUNDS)]
    ours, peer = (statistics.median(each) for each in zip(*times, strict=True))
    ratio = peer / ours
    named = f"{name}: a step of 2 processes x 2 devices"
    return pairs.row(named, "ms", 1e3 * ours, 1e3 * peer, "1 process x 4 devices", ratio, None)


def _job(name: str, steps: int, count: int) -> float:
    """Return the seconds of a step, by the logged speed of the second half of the run."""
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        flags = [
            f"--config.num_steps={2 * steps}",
            f"--config.log_every_steps={steps}",
            f"--config.eval_every_steps={2 * steps}",
        ]
        places = [f"--config={ROOT / 'configs' / name}", f"--workdir={folder}/run"]
        command = [sys.executable, "-m", "lbopt", "train", *places, *flags]

        started = [
            subprocess.Popen(
                command,
                env=_environment(index, count, port),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for index in range(count)
        ]
        codes = [process.wait() for process in started]
        if any(codes):
            raise RuntimeError(f"{' '.join(command)}: exit codes {codes}")

        text = pathlib.Path(folder, "run", "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
    size = lines[-1]["examples_seen"] / lines[-1]["step"]
    return size / lines[-1]["perf/examples_per_s"]


def _environment(index: int, count: int, port: int) -> dict[str, str]:
    devices = {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // count}",
        "JAX_PLATFORMS": "cpu",
    }
    who = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(index),
    }
    return {**os.environ, **devices, **(who if count > 1 else {})}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
