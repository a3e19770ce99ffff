"""Trackers: what a run writes to metrics.jsonl, in Weights & Biases, MLflow or the user's writer.

A tracker keeps one run for a workdir, whose id is in `trackers.json`, over all restarts. It gets
each step once: a line is sent if its step is after the last one that the tracker has. So a step
that a kill took back and that is trained again is not sent twice, and lines that the tracker does
not have, because it lost them or was added later, are sent from metrics.jsonl.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from lbopt import _typed_json, _user_code, paths
from lbopt.config import TRACKERS
from lbopt.errors import EXIT_PREEMPTED, EnvironmentProblem, LboptError, MissingPackage, UserError
from lbopt.job import Job
from lbopt.workdir import _bucket, _folder
from lbopt.workdir._hooks import MetricsHook, defined_in, metrics_hook
from lbopt.workdir._jsonl import read_json_lines

IDS_FILE = "trackers.json"
_PROJECT = "lbopt"
"""Project of Weights & Biases and experiment of MLflow, unless their own variables name another."""
_Line = tuple[int, dict[str, float]]


class _TrackedRun(Protocol):
    """A run in a tracker.

    Attributes:
      id: The tracker's name of the run.
      last_step: The last step that the tracker has; 0 for none.
    """

    id: str
    last_step: int

    def send(self, lines: Sequence[_Line]) -> None:
        """Send lines, whose steps ascend."""

    def close(self, exit_code: int) -> None:
        """Say that the process is done with the run; exit codes are those of the command."""


def check_trackers(trackers: Sequence[str]) -> None:
    """Check that the packages of trackers are installed, and that the user's functions are there.

    Raises:
      UserError: Naming `trackers`, if a function is not there.
      EnvironmentProblem: Naming `trackers`, if a package is not installed.
    """
    for name in trackers:
        if name not in TRACKERS:
            _user_code.load(name, "trackers")
        elif importlib.util.find_spec(name) is None:
            fix = f"it is not installed; run pip install 'lbopt[{name}]'"
            raise MissingPackage("trackers", name, fix)


@contextlib.contextmanager
def open_trackers(
    trackers: Sequence[str], workdir: pathlib.Path, config: dict[str, Any], job: Job
) -> Iterator[list[MetricsHook]]:
    """Open the trackers of a run while the context lasts, in the first process of its job.

    Args:
      trackers: Names of `TRACKERS`, and places of functions (workdir, config) that return a hook or
        a writer with `write_scalars(step, metrics)`. Its methods `flush` and `close` are called at
        the end, if it has them.
      workdir: The workdir, opened by `open_workdir`.
      config: The config of the run as JSON data.
      job: The job of this process.

    Yields:
      The hooks; none in other processes than the first.

    Raises:
      UserError: Naming `trackers`, if a function of the user fails.
      EnvironmentProblem: Naming `trackers`, if a tracker fails.
    """
    with contextlib.ExitStack() as stack:
        opened = []
        for name in trackers if job.index == 0 else ():
            opener = _tracker_run if name in TRACKERS else _writer_of_user
            opened.append(stack.enter_context(opener(name, workdir, config)))
        yield opened


@contextlib.contextmanager
def _writer_of_user(
    place: str, workdir: pathlib.Path, config: dict[str, Any]
) -> Iterator[MetricsHook]:
    make = _user_code.load(place, "trackers")
    naming = _user_code.naming_errors
    with naming("trackers", place, defined_in(make)):
        made = make(workdir, config)
    try:
        yield metrics_hook(made, "trackers", place)
    finally:
        for name in ("flush", "close"):
            with naming("trackers", place, defined_in(make)):
                getattr(made, name, _nothing)()


def _nothing() -> None:
    pass


@contextlib.contextmanager
def _tracker_run(name: str, workdir: pathlib.Path, config: dict[str, Any]) -> Iterator[MetricsHook]:
    ids = _read_ids(workdir / IDS_FILE)
    with _tracker_errors(name):
        run = _RUNS[name](workdir, config, ids.get(name))
    if ids.get(name) != run.id:
        _folder.write_json(workdir / IDS_FILE, {**ids, name: run.id})

    follower = _Follower(name, run, workdir / "metrics.jsonl")
    try:
        yield follower
    except BaseException as error:
        with contextlib.suppress(Exception):  # the first error counts
            run.close(getattr(error, "exit_code", 1))
        raise
    follower.catch_up()
    with _tracker_errors(name):
        run.close(0)


def _read_ids(file: pathlib.Path) -> dict[str, str]:
    """Return the tracker's run ids of a workdir, by the names of the trackers."""
    try:
        return _typed_json.read_file(file, dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        fix = f"it cannot be read ({error}); remove it, and trackers begin new runs"
        raise EnvironmentProblem(str(file), reason=fix, code="damaged") from error


@contextlib.contextmanager
def _tracker_errors(name: str) -> Iterator[None]:
    """Turn errors of a tracker, which has many classes of them, into one line."""
    try:
        yield
    except LboptError:
        raise
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300].rstrip(".")
        fix = f"{what}; mend that, or take it out, and run the same command again"
        raise EnvironmentProblem("trackers", name, fix, code="resource") from error


class _Follower:
    """A hook that sends to a tracker what it does not have, from metrics.jsonl and as it comes."""

    def __init__(self, name: str, run: _TrackedRun, file: pathlib.Path):
        self._name = name
        self._run = run
        self._file = file
        self._last = run.last_step
        self._caught_up = False

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        if not self._caught_up:
            self.catch_up()  # the line of this step is in the file
        else:
            self._send([(step, metrics)])

    def catch_up(self) -> None:
        """Send the lines of the file that the tracker does not have."""
        self._send([(line.pop("step"), _numbers(line)) for line in read_json_lines(self._file)])
        self._caught_up = True

    def _send(self, lines: Sequence[_Line]) -> None:
        new = [(step, metrics) for step, metrics in lines if step > self._last]
        if new:
            with _tracker_errors(self._name):
                self._run.send(new)
            self._last = new[-1][0]


def _numbers(line: Mapping[str, float | None]) -> dict[str, float]:
    """Return scalars of a line of metrics.jsonl, where None was not finite."""
    return {name: math.nan if value is None else float(value) for name, value in line.items()}


class _WandbRun:
    """A run of Weights & Biases; `WANDB_MODE`, `WANDB_PROJECT` and the like hold.

    Offline, nothing tells what an earlier start has written: each start writes all lines, into a
    folder of its own with the same run id.
    """

    def __init__(self, workdir: pathlib.Path, config: dict[str, Any], run_id: str | None):
        import wandb

        self._run = wandb.init(
            id=run_id,
            resume="allow",
            dir=paths.local(os.environ.get("WANDB_DIR", workdir), "WANDB_DIR"),
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=os.environ.get("WANDB_NAME", _name_of(workdir)),
            config=config,
            allow_val_change=True,
            # Their copy of the terminal would stand between a progress bar and the terminal.
            settings={
                "console": os.environ.get("WANDB_CONSOLE", "off"),
                "silent": os.environ.get("WANDB_SILENT", "true") == "true",
            },
        )
        self.id = str(self._run.id)
        # Of a resumed run, its summary comes from the server.
        self.last_step = int(self._run.summary.get("step") or 0)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def send(self, lines: Sequence[_Line]) -> None:
        for step, metrics in lines:
            # With a step of its own, W&B would wait for the next one before it writes.
            self._run.log({**metrics, "step": step}, step=step, commit=True)

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


_STEP_TAG = "lbopt.step"
"""Tag of a run in MLflow with the last step that was sent."""
_NOT_IN_KEYS = re.compile(r"[^-\w. :/]", re.ASCII)
"""Characters that MLflow does not accept in the name of a metric."""
_LONGEST_KEY = 250
_MOST_PARAMS = 100
"""Parameters that MLflow takes in one call."""


class _MlflowRun:
    """A run of MLflow; `MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME` and the like hold.

    Without an address, the store is a SQLite file in the workdir.
    """

    def __init__(self, workdir: pathlib.Path, config: dict[str, Any], run_id: str | None):
        import mlflow

        store = None if mlflow.tracking.is_tracking_uri_set() else _local_store(workdir)
        self._client = mlflow.MlflowClient(store)
        if run_id is None:
            run = self._create(workdir, config)
        else:
            run = self._client.get_run(run_id)
            self._client.update_run(run_id, status="RUNNING")
        self.id = str(run.info.run_id)
        self.last_step = int(run.data.tags.get(_STEP_TAG, 0))

    def _create(self, workdir: pathlib.Path, config: dict[str, Any]) -> Any:
        from mlflow.entities import Param

        tags = {"lbopt.recipe": config["name"]}
        run = self._client.create_run(self._experiment(), run_name=_name_of(workdir), tags=tags)
        fields = [Param(_key(name), str(value)) for name, value in _flat(config)]
        for first in range(0, len(fields), _MOST_PARAMS):
            batch = fields[first : first + _MOST_PARAMS]
            self._client.log_batch(run.info.run_id, params=batch)
        return run

    def _experiment(self) -> str:
        if os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return os.environ["MLFLOW_EXPERIMENT_ID"]
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        found = self._client.get_experiment_by_name(name)
        return found.experiment_id if found else self._client.create_experiment(name)

    def send(self, lines: Sequence[_Line]) -> None:
        from mlflow.entities import Metric, RunTag

        now = int(time.time() * 1000)
        points = [
            Metric(_key(name), value, now, step)
            for step, metrics in lines
            for name, value in metrics.items()
        ]
        last = RunTag(_STEP_TAG, str(lines[-1][0]))
        self._client.log_batch(self.id, metrics=points, tags=[last])

    def close(self, exit_code: int) -> None:
        status = {0: "FINISHED", EXIT_PREEMPTED: "KILLED"}.get(exit_code, "FAILED")
        self._client.set_terminated(self.id, status)


_OpenRun = Callable[[pathlib.Path, dict[str, Any], str | None], _TrackedRun]
_RUNS: dict[str, _OpenRun] = {"wandb": _WandbRun, "mlflow": _MlflowRun}


def _name_of(workdir: pathlib.Path) -> str:
    """Return the name of a workdir, in a bucket too, as the name of a run."""
    return _bucket.shown_path(workdir).rstrip("/").rpartition("/")[2]


def _local_store(workdir: pathlib.Path) -> str:
    """Return the address of a store in the workdir."""
    if _bucket.checkpoint_root(workdir) != workdir:
        fix = "a store cannot be in a bucket; set MLFLOW_TRACKING_URI to another one"
        raise UserError("trackers", "mlflow", fix, code="missing")
    return f"sqlite:///{workdir / 'mlflow.db'}"


def _key(name: str) -> str:
    return _NOT_IN_KEYS.sub("_", name)[:_LONGEST_KEY]


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted names of the fields of a config, and their values."""
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
