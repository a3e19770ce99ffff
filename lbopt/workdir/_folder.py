"""A workdir belongs to one config: opened, checked, and never overwritten by another."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import re
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Literal, NotRequired, TypedDict

from lbopt import _typed_json, _unfinished, paths
from lbopt.config import SweepConfig, TrainConfig
from lbopt.errors import EnvironmentProblem, UserError
from lbopt.job import Job, SoloJob
from lbopt.workdir import _bucket, _versions
from lbopt.workdir._lock import Shard, starting_lock

KINDS = {"train": "training run", "sweep": "sweep"}


_LEFTOVER = re.compile(r"\..+\.(json|jsonl|txt|csv|html|png)\.\d+|\.seen-by-all-[0-9a-f]{32}")
"""Names of files that `write_bytes` has not finished, and that `check_shared_workdir` looks at."""
_RESTORE = "restore it or use another folder"


class _Start(TypedDict):
    versions: dict[str, str | None]
    git_revision: str | None
    device_kind: str
    num_devices: int


class _Named(TypedDict):
    name: str


class _Saved(_Start):
    kind: Literal["train", "sweep"]
    config: _Named
    command: NotRequired[str]
    resumed: NotRequired[list[_Start]]


class _SavedRun(TypedDict):
    config: TrainConfig


class _SavedStudy(TypedDict):
    config: SweepConfig


CompareConfigs = Callable[[dict[str, Any]], list[str]]
"""What `config.json` says -> how that run differs from this one, in words; empty if it is the same."""


@contextlib.contextmanager
def open_workdir(
    path: paths.GivenPath,
    kind: str,
    config: dict[str, Any],
    compare: CompareConfigs,
    num_devices: int = 1,
    command: str = "",
    job: Job | None = None,
    shard: Shard | None = None,
) -> Iterator[pathlib.Path]:
    """Hold a workdir for this process, or this job: a new one, or one that holds the same config.

    The folder is locked until the context ends, and before anything is written into it; the lock goes with the process,
    however that ends. With a shard others may hold other shards of it meanwhile. A restart under other versions, another revision or other devices is added to `config.json`.
    Of several processes the first one does that, and the others wait for it.

    Args:
      path: the folder; parents are made.
      kind: "train" or "sweep".
      config: the resolved config as JSON data.
      compare: see `CompareConfigs`.
      num_devices: how many devices the run uses.
      command: what the user typed, for the report.
      job: of which this process is one; None if it is alone.
      shard: the part of the work that is done here; None for all of it.

    Yields:
      The absolute path.

    Raises:
      UserError: if it holds something else, or if another process holds it.
      EnvironmentProblem: if it cannot be written.
    """
    job = SoloJob() if job is None else job
    folder = absolute_workdir(path)
    if job.index > 0:
        job.together("workdir opened", True)
        yield folder
        return
    refuse_another_run(folder, kind, compare)
    make_writable_folder(folder)
    with _locked(folder, shard), shard.held(folder) if shard else contextlib.nullcontext():
        with starting_lock(folder) if shard else contextlib.nullcontext():
            remove_leftovers(folder)
            saved = refuse_another_run(folder, kind, compare)
            now = _versions.describe_environment(num_devices)
            if saved is None:
                _refuse_strangers(folder)
                write_json(
                    folder / "config.json",
                    {"kind": kind, "config": config, "command": command, **now},
                )
            elif now != _versions.last_environment(saved):
                write_json(
                    folder / "config.json", {**saved, "resumed": [*saved.get("resumed", []), now]}
                )
        job.together("workdir opened", True)
        yield folder


def check_shared_workdir(path: paths.GivenPath, job: Job) -> None:
    """Raise `UserError` unless all processes of a job see a file that the first one writes into the workdir."""
    folder = absolute_workdir(path)
    if job.count == 1:
        return
    if job.index > 0:
        _see_the_first_ones(folder, job)
        return
    make_writable_folder(folder)
    file = _bucket.checkpoint_root(folder) / f".seen-by-all-{uuid.uuid4().hex}"
    with file_errors(file):
        file.write_text("")
        try:
            job.together("workdir", file.name)
            job.together("workdir seen", True)
        finally:
            file.unlink()


def _see_the_first_ones(folder: pathlib.Path, job: Job) -> None:
    name = job.together("workdir", None)[0]
    if not (_bucket.checkpoint_root(folder) / name).exists():
        raise UserError(
            f"--workdir = {str(folder)!r}: process {job.index} of {job.count} ({socket.gethostname()}) does not see what process 0 "
            "writes there; use a folder that all hosts share"
        )
    job.together("workdir seen", True)


def _refuse_strangers(folder: pathlib.Path) -> None:
    if any(not entry.name.startswith(".") for entry in folder.iterdir()):
        raise UserError(
            f"--workdir = {str(folder)!r}: it is not empty and holds no config.json; use a new or empty folder"
        )


def refuse_another_run(
    folder: pathlib.Path, kind: str, compare: CompareConfigs
) -> dict[str, Any] | None:
    """Return the config.json of a workdir, None if there is none.

    Raises:
      UserError: if it is of another run.
    """
    saved = read_config(folder, kind)
    differences = compare(saved) if saved else []
    if differences:
        raise UserError(
            f"--workdir = {str(folder)!r}: it holds a {KINDS[kind]} of another config ({'; '.join(differences[:3])}); use another --workdir"
        )
    return saved


def absolute_workdir(path: paths.GivenPath) -> pathlib.Path:
    """Return the path that a --workdir means."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise UserError("--workdir", str(path), "it is not UTF-8; use another name") from error
    return paths.local(path, "--workdir").absolute()


def read_config(path: paths.GivenPath, kind: str | None = None) -> dict[str, Any] | None:
    """Return what `config.json` of a workdir says, or None if there is none.

    Raises:
      UserError: if the workdir is of another kind.
      EnvironmentProblem: if the file cannot be read.
    """
    file = absolute_workdir(path) / "config.json"
    try:
        saved = _parse_config(_typed_json.read_bytes(file, _typed_json.MOST_BYTES), str(file))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        fix = f"{file} cannot be read ({error.strerror}); use another folder or mend it"
        raise EnvironmentProblem("--workdir", reason=fix, code="resource") from error
    except ValueError as error:
        raise _no_config(str(file), error) from error
    if kind is not None and saved["kind"] != kind:
        fix = f"it holds a {KINDS[saved['kind']]}, not a {KINDS[kind]}; use another folder"
        raise UserError("--workdir", str(file.parent), fix, code="mismatch")
    return saved


def read_study_config(file: Any) -> dict[str, Any]:
    """Return the `config.json` of a shard of a study.

    Args:
      file: A path of a folder or of a bucket.

    Raises:
      OSError: If it cannot be read.
      EnvironmentProblem: If it is none of ours.
    """
    try:
        return _typed_json.records(_typed_json.read_file(file, _SavedStudy), str(file), _RESTORE)
    except ValueError as error:
        raise _no_config(str(file), error) from error


def _parse_config(data: bytes, file: str) -> dict[str, Any]:
    try:
        saved = _typed_json.decode(data, _Saved)
        _typed_json.convert(saved, {"train": _SavedRun, "sweep": _SavedStudy}[saved["kind"]])
        for start in (saved, *saved.get("resumed", ())):
            if start["versions"].get("jax") is None:
                raise ValueError("versions: there is no jax")
    except ValueError as error:
        raise _no_config(file, error) from error
    return _typed_json.records(saved, file, _RESTORE)


def _no_config(file: str, error: ValueError) -> EnvironmentProblem:
    fix = f"{file} is not a config.json of lbopt ({error}); {_RESTORE}"
    return EnvironmentProblem("--workdir", reason=fix, code="damaged")


def make_writable_folder(folder: pathlib.Path) -> None:
    """Create a folder and write into it, or raise `EnvironmentProblem`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise EnvironmentProblem(
            f"--workdir = {str(folder)!r}: cannot be written ({error.strerror}); choose another folder, or mend what is said there"
        ) from error


@contextlib.contextmanager
def _locked(folder: pathlib.Path, shard: Shard | None = None) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, folder, fcntl.LOCK_SH if shard else fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: pathlib.Path, kind: int) -> None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(
            f"--workdir = {str(folder)!r}: another process is at work there; wait for it or use another --workdir"
        ) from error
    except OSError as error:
        raise EnvironmentProblem(
            f"--workdir = {str(folder)!r}: cannot be locked ({error.strerror}); use a folder on another file system"
        ) from error


def write_json(file: pathlib.Path, data: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part."""
    write_text(file, json.dumps(data, indent=2) + "\n")


def write_text(file: pathlib.Path, text: str) -> None:
    """Write a file whole or not at all."""
    write_bytes(
        file, text.encode("utf-8", "backslashreplace")
    )  # a name on a command line may be no text


def write_bytes(file: pathlib.Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    partial = _unfinished.beside(file)
    with file_errors(file):
        try:
            with open(partial, "wb") as stream:
                _unfinished.lock(stream.fileno())
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
                os.replace(partial, file)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


def remove_leftovers(folder: pathlib.Path) -> None:
    """Remove the partial files that killed processes have left in a workdir."""
    _unfinished.remove(folder, _LEFTOVER)


@contextlib.contextmanager
def file_errors(file: pathlib.Path) -> Iterator[None]:
    """Turn what the operating system refuses into an `EnvironmentProblem` that names the file."""
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(
            f"{file} cannot be written ({error.strerror or error}); free space or mend it, then run the same command again"
        ) from error
