"""Hooks and trackers get what metrics.jsonl has, each step once, also after a kill."""

import contextlib
import json
import pathlib
import signal
import sqlite3
import struct
import sys

import pytest
from refusal import refused, troubled

from lbopt.job import SoloJob
from lbopt.train import _loop
from lbopt.workdir import check_trackers, open_trackers, read_json_lines

KILLED_RUN = pathlib.Path(__file__).with_name("killed_run.py")
WRITER = """
import json


class Writer:
    def __init__(self, file):
        self.file = open(file, "a")

    def write_scalars(self, step, scalars):
        self.file.write(json.dumps([step, scalars["train/loss"]]) + "\\n")

    def flush(self):
        self.file.flush()


def make_writer(workdir, config):
    return Writer(workdir / "own.jsonl")


def make_nothing(workdir, config):
    return None
"""


def hook_that_fails(step, metrics):
    if step == 2:
        raise ValueError("no loss of mine")


def test_hooks_get_the_lines_of_metrics_jsonl(plan_of, tmp_path):
    got = []

    class Writer:
        def write_scalars(self, step, scalars):
            got.append({"step": step, **scalars})

    hooks = [lambda step, metrics: metrics.clear(), Writer()]
    _loop.train(plan_of(), tmp_path, on_metrics=hooks)
    assert got == read_json_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in got] == list(range(1, 21))


def test_an_error_in_a_hook_names_its_line(plan_of, tmp_path):
    line = hook_that_fails.__code__.co_firstlineno + 2
    with refused("on_metrics", "hook_that_fails", "damaged") as error:
        _loop.train(plan_of(), tmp_path, on_metrics=[hook_that_fails])
    assert f"test_hooks.py, line {line}: ValueError: no loss of mine" in str(error.value)
    assert [line["step"] for line in read_json_lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_what_is_no_hook_is_refused_before_the_first_step(plan_of, tmp_path):
    with refused("on_metrics", "int", "type"):
        _loop.train(plan_of(), tmp_path, on_metrics=[3])
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_package_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with troubled("trackers", "wandb", "installation") as error:
        check_trackers(("wandb",))
    assert "pip install 'lbopt[wandb]'" in str(error.value)


@pytest.mark.parametrize(
    ("name", "code"), [("make_nothing", "type"), ("Writer", "damaged"), ("absent", "missing")]
)
def test_functions_that_make_no_writer(name, code, place, tmp_path):
    place = place.replace("make_writer", name)
    with refused("trackers", place, code), open_trackers((place,), tmp_path, {}, SoloJob()):
        pass


def test_the_first_process_of_a_job_tracks_alone(place, tmp_path):
    other = SoloJob()
    other.index = 1
    with open_trackers((place,), tmp_path, {}, other) as hooks:
        assert hooks == []


@pytest.fixture
def offline(monkeypatch):
    """Trackers write into the workdir, and nothing else."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID", "WANDB_DIR", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def place(tmp_path):
    """Return the place of a function that makes a writer of (step, loss) into own.jsonl."""
    (tmp_path / "writer.py").write_text(WRITER)
    return f"{tmp_path / 'writer.py'}:make_writer"


def read_ids(workdir):
    """Return the ids of the runs at W&B and MLflow, by name."""
    file = workdir / "trackers.json"
    return json.loads(file.read_text()) if file.exists() else {}


def in_own(workdir):
    return [tuple(json.loads(line)) for line in (workdir / "own.jsonl").open()]


def records(file):
    """Yield the records of a W&B file: blocks of 32 KiB, in them pieces of records with headers."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = file.read_bytes()
    at = 7
    record = b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield Record.FromString(record)
            record = b""


def in_wandb(workdir):
    """Return (step, loss) of the points in the last file of W&B, and its run's id."""
    found = list(records(sorted((workdir / "wandb").glob("offline-run-*/*.wandb"))[-1]))
    (run,) = [record.run for record in found if record.HasField("run")]
    points = [
        {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in one.item}
        for one in (record.history for record in found if record.HasField("history"))
    ]
    assert all(point["step"] == point["_step"] for point in points)
    return [(point["step"], point["train/loss"]) for point in points], run.run_id


def in_mlflow(workdir):
    """Return (step, loss) of the points in the store of MLflow, and its run's id and state."""
    with contextlib.closing(sqlite3.connect(workdir / "mlflow.db")) as store:
        points = store.execute("select step, value from metrics where key = 'train/loss'")
        (run,) = store.execute("select run_uuid, status from runs")
        return sorted(points), *run


@pytest.mark.everyday("own")
@pytest.mark.process
@pytest.mark.parametrize("name", ["own", "wandb", "mlflow"])
def test_a_killed_and_resumed_run_has_each_step_once(
    name, command, start_process, reference, logged, offline, place, tmp_path
):
    """The kill takes back steps that MLflow has, and takes with it what W&B has not written yet."""
    workdir = tmp_path / "run"
    trackers = (place,) if name == "own" else (name, place)
    tracked = command(workdir, f"--config.trackers={trackers}")
    killed = start_process(KILLED_RUN, "step", 10, *tracked)
    _, said = killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL, said
    ids = read_ids(workdir)

    resumed = start_process("-m", "lbopt", *tracked)
    _, said = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, said
    assert "resuming at step" in said
    assert read_ids(workdir) == ids

    assert logged(workdir) == logged(reference())
    points = [(line["step"], line["train/loss"]) for line in logged(workdir)]
    if name == "wandb":
        assert in_wandb(workdir) == (points, ids["wandb"])
    elif name == "mlflow":
        assert in_mlflow(workdir) == (points, ids["mlflow"], "FINISHED")
    assert in_own(workdir)[-10:] == points[-10:]


def test_mlflow_gets_what_it_does_not_have(offline, tmp_path):
    """It had steps 2 to 4 when a kill took 3 and 4 back; an error then ended the run after 6."""

    def line(step):
        return {"step": step, "examples_seen": 8 * step, "train/loss": step / 4}

    def train(*steps):
        with open_trackers(("mlflow",), tmp_path, {"name": "a", "b": {"c": 1}}, SoloJob()) as hooks:
            for step in steps:
                with open(tmp_path / "metrics.jsonl", "a") as file:
                    file.write(json.dumps(line(step)) + "\n")
                metrics = line(step)
                hooks[0](metrics.pop("step"), metrics)
            if steps[-1] == 6:
                raise KeyboardInterrupt

    train(2, 3, 4)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line(2)) + "\n")
    with pytest.raises(KeyboardInterrupt):
        train(3, 4, 5, 6)
    points, _, status = in_mlflow(tmp_path)
    assert (points, status) == ([(step, step / 4) for step in range(2, 7)], "FAILED")
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as store:
        params = list(store.execute("select key, value from params order by key"))
    assert params == [("b.c", "1"), ("name", "a")]
