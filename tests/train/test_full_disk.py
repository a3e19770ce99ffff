"""A full or failing disk ends a run with exit code 3 and one line, and damages nothing."""

import concurrent.futures
import contextlib
import errno
import json
import os
import pathlib
import re
import resource
import shutil
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from forked import Forked
from refusal import troubled

from lbopt.errors import NO_VALUE
from lbopt.sweep import read_results
from lbopt.sweep._results import Results
from lbopt.train import Checkpoints, _orbax
from lbopt.workdir import MetricsWriter, _folder, read_json_lines

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "digits_cnn.py"
TRAIN = [
    "train",
    f"--config={CONFIG}:smoke",
    "--config.num_epochs=1.0",
    "--config.checkpoint.keep=1",
    "--config.model.widths=(4,)",
    "--config.model.hidden=8",
    "--config.parallel.num_devices=1",
]
ON_A_FULL_DISK = """
import resource, sys
from lbopt.cli import main

resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, resource.RLIM_INFINITY))
sys.exit(main(sys.argv[1:]))
"""


@contextlib.contextmanager
def files_up_to(num_bytes):
    """Make the operating system refuse writes that enlarge a file beyond this size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.process
def test_a_run_on_a_full_disk_ends_with_one_line(tmp_path):
    workdir = tmp_path / "run"
    rare = [f"--config.{name}=100000" for name in ("eval_every_steps", "checkpoint.every_steps")]
    command = [*TRAIN, f"--workdir={workdir}", "--config.log_every_steps=1", *rare]

    # No checkpoint can be kept.
    process = Forked(
        [sys.executable, "-c", ON_A_FULL_DISK, *command, "--config.num_epochs=20.0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # The limit would cut programs short in the folder that all tests share.
        env={**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs")},
    )

    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 3, stderr
    assert "Traceback" not in stderr

    last = stderr.strip().splitlines()[-1]
    assert last.startswith("lbopt train: ")
    assert "(File too large)" in last
    assert [
        line for line in stderr.splitlines() if not line.startswith(("starting at ", "step "))
    ] == [last]
    assert len(read_json_lines(workdir / "metrics.jsonl")) > 10


def test_two_that_write_one_file_at_once_do_not_meet(tmp_path, monkeypatch):
    """Processes in containers share a pid, so partial files must not be named by it."""

    def fsync(descriptor):
        monkeypatch.setattr(_folder.os, "fsync", before)
        _folder.write_bytes(tmp_path / "file.json", b"other")

    before = os.fsync
    monkeypatch.setattr(_folder.os, "fsync", fsync)
    _folder.write_bytes(tmp_path / "file.json", b"one")
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [
        ("file.json", "one")
    ]


# The first file that exceeds the limit: a line has one long number, an event a frame per scalar.
FIRST = {"metrics.jsonl": (10**80, "a"), "tensorboard": (1, "abcdefghijklmnopqrstuvwxyz")}


@pytest.mark.parametrize("full", FIRST)
def test_metrics_that_cannot_be_written_are_said(tmp_path, full):
    examples_seen, names = FIRST[full]
    writer = MetricsWriter(tmp_path)

    def write_many():
        for step in range(1, 200):
            writer.write(step, examples_seen, dict.fromkeys(names, 1.0))
            writer.sync()

    with files_up_to(4000), troubled(str(tmp_path / full), NO_VALUE, "resource"):
        write_many()


@pytest.mark.parametrize("name", ["metrics.jsonl", "tensorboard"])
def test_what_cannot_be_opened_is_said(tmp_path, name):
    if name == "tensorboard":
        (tmp_path / name).write_text("")
    else:
        (tmp_path / name).mkdir()
    with troubled(str(tmp_path / name), NO_VALUE, "resource"):
        MetricsWriter(tmp_path)


def row(seed):
    numbers = (
        "global_batch_size",
        "steps",
        "warmup_steps",
        "learning_rate",
        "learning_rate_factor",
        "seed",
    )
    scores = ("train_accuracy", "validation_accuracy", "validation_loss", "test_accuracy")
    numbers = (*numbers, "fidelity", "warmup_factor", "weight_decay_factor")
    return {
        "arm": "a",
        "phase": "final",
        "diverged": False,
        **dict.fromkeys((*numbers, *scores), 1.0),
        "global_batch_size": 64,
        "seed": seed,
    }


def test_rows_that_do_not_fit_leave_no_part(tmp_path):
    results = Results(tmp_path)
    results.add([row(0)])
    size = (tmp_path / "results.jsonl").stat().st_size
    with (
        files_up_to(2 * size + 20),
        troubled(str(tmp_path / "results.jsonl"), NO_VALUE, "resource"),
    ):
        results.add([row(1), row(2)])
    assert (tmp_path / "results.jsonl").stat().st_size == size
    assert [kept["seed"] for kept in results.records] == [0]
    results.add([row(3)])  # of another thread, or after space was made
    assert [kept["seed"] for kept in read_results(tmp_path)] == [0, 3]


class State(NamedTuple):
    step: jax.Array
    params: jax.Array


def test_a_checkpoint_that_does_not_fit_is_not_begun(tmp_path, monkeypatch):
    state = State(jnp.asarray(7), jnp.ones(1 << 18))
    usage = shutil.disk_usage(tmp_path)
    with Checkpoints(tmp_path) as checkpoints:
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1 << 20))
        with troubled(str(tmp_path / "checkpoints"), NO_VALUE, "resource") as caught:
            checkpoints.save(state, None)
        assert re.search(r"\b1\.1 MiB .*\b1\.0 MiB", caught.value.reason)  # needed, free
        assert not list((tmp_path / "checkpoints").iterdir())
        assert checkpoints.steps() == []


def test_a_process_whose_save_has_failed_waits_for_nobody(monkeypatch):
    """The others wait for it, so none would end: Orbax synchronises them in a `finally`."""
    waited = []
    monkeypatch.setattr(_orbax.jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        _orbax.ocp.multihost,
        "get_barrier_sync_fn",
        lambda processes: lambda **key: waited.append(key),
    )
    wait = _orbax._async_options().barrier_sync_fn

    def finalize(error):
        try:
            if error:
                raise error
        finally:
            wait(key="saved", timeout_ms=1000)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        pool.submit(finalize, None).result()
        with pytest.raises(OSError, match="full"):
            pool.submit(finalize, OSError("full")).result()
    assert len(waited) == 1


FAILING_DISK = pathlib.Path(__file__).with_name("failing_disk.py")
SHIM = pathlib.Path(__file__).parents[1] / "oracles" / "failing_disk.c"
WORST = [
    [1, errno.ENOSPC, True, "mkdir /checkpoints/4.orbax-checkpoint-tmp"],
    [1, errno.EROFS, False, "open /checkpoints/4.orbax-checkpoint-tmp/_CHECKPOINT_METADATA"],
    [1, errno.EDQUOT, True, "8.orbax-checkpoint-tmp/seal.orbax-checkpoint-tmp"],
    [1, errno.EIO, False, "manifest.ocdbt.__lock"],
]
STUDY = """import pathlib, sys

sys.path.insert(0, {!r})
from tiny_study import make_config

ROWS = ("smoke",)


def get_config(row="smoke"):
    return make_config(final_seeds=(7,))
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("command", "cases"),
    [
        pytest.param("train", WORST[:1], id="train-worst"),
        pytest.param("train", WORST[1:], marks=pytest.mark.slow, id="train-worst-later"),
        pytest.param("train", "kinds", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        pytest.param("sweep", "kinds", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs LD_PRELOAD and /proc")
def test_calls_that_fail_end_the_run_with_one_line(tmp_path, command, cases):
    """The worst calls make a checkpoint's folders: Orbax makes them in a thread by default."""
    library = tmp_path / "failing_disk.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, SHIM, "-ldl"], check=True)
    (tmp_path / "study.py").write_text(STUDY.format(str(SHIM.parent)))

    arguments = (
        TRAIN
        if command == "train"
        else ["sweep", f"--config={tmp_path / 'study.py'}", "--shard=1/1"]
    )

    done = subprocess.run(
        [sys.executable, str(FAILING_DISK), str(tmp_path), json.dumps(cases), *arguments],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=7200,
    )
    assert done.returncode == 0, done.stderr

    whole, *found = [json.loads(line) for line in done.stdout.splitlines()]
    assert whole["code"] == 0
    assert len(found) >= (len(WORST) if cases == "kinds" else len(cases))

    for case in found:
        assert (case["again"], case["equal"]) == (0, True), case
        if case["code"] == 0 and cases == "kinds":
            continue  # the call was not made, or its failure did not matter
        assert case["failed"], case
        assert case["code"] == 3, case
        assert len(case["said"]) == 1, case
        assert case["said"][0].startswith(f"lbopt {command}: "), case
        assert case["equal"], case
