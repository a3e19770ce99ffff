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

from lbopt import _typed_json, _unfinished, _user_code, paths
from lbopt.config import SweepConfig, TrainConfig
from lbopt.errors import EnvironmentProblem, UserError, require
from lbopt.job import Job, SoloJob
from lbopt.workdir import _bucket, _data_files, _identity, _versions
from lbopt.workdir._lock import Shard, starting_lock

PROFILE_FOLDER = "profile"
"""Folder of a workdir for the trace of `lbopt train --profile`."""
CRITICAL_FILE = "critical.jsonl"
"""File of a workdir with a line for each measurement of `lbopt critical`."""
KINDS = {"train": "training run", "sweep": "sweep"}
_LEFTOVER = re.compile(r"\..+\.(json|jsonl|txt|csv|html|png)\.\d+|\.seen-by-all-[0-9a-f]{32}")
"""Names of unfinished files of `write_bytes`, and of the files of `check_shared_workdir`."""
_RESTORE = "restore it or use another folder"


class _Start(TypedDict):
    versions: dict[str, str | None]
    git_revision: str | None
    device_kind: str
    num_devices: int
    host: NotRequired[str]
    code_revision: NotRequired[str | None]
    sources: NotRequired[dict[str, str]]
    data: NotRequired[dict[str, _data_files.DataFiles]]


class _Named(TypedDict):
    name: str


class _SavedConfig(_Start):
    kind: Literal["train", "sweep"]
    config: _Named
    command: NotRequired[str]
    resumed: NotRequired[list[_Start]]
    code_folders: NotRequired[list[str]]
    folder: NotRequired[str]


class _SavedRun(TypedDict):
    config: TrainConfig


class _SavedStudy(TypedDict):
    config: SweepConfig


CompareConfigs = Callable[[dict[str, Any]], list[str]]
"""Function of a `config.json` that returns how its run differs from this one, in words."""


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
    own: _identity.OwnFiles | None = None,
) -> Iterator[pathlib.Path]:
    """Hold a workdir for this process or job: a new one, or one of the same config.

    The folder is locked before anything is written into it, until the context ends; the lock ends
    with the process. With a shard, others may hold other shards meanwhile. A restart under other
    versions, another revision or other devices is added to `config.json`. In a job the first
    process does all this, and the others wait for it.

    Args:
      path: The folder; parents are made.
      kind: "train" or "sweep".
      config: The resolved config as JSON data.
      compare: Function that compares a saved run with this one, see `CompareConfigs`.
      num_devices: Number of devices that the run uses.
      command: The command line of the user, for the report.
      job: The job that this process belongs to; None for a process alone.
      shard: The shard of the work that is done here; None for all of it.
      own: The user's own files; None for none.

    Yields:
      The absolute path.

    Raises:
      UserError: If the folder holds something else, another process holds it, or files of the user
        have changed.
      EnvironmentProblem: If it cannot be written.
    """
    job = SoloJob() if job is None else job
    own = _identity.OwnFiles({}, {}, {}) if own is None else own
    folder = absolute_workdir(path)
    if job.index > 0:
        job.together("workdir opened", True)
        yield folder
        return

    # Refuse before anything is written, and again under the lock.
    refuse_another_run(folder, kind, compare)
    make_writable_folder(folder)
    with _locked(folder, shard), shard.held(folder) if shard else contextlib.nullcontext():
        with starting_lock(folder) if shard else contextlib.nullcontext():
            remove_leftovers(folder)
            saved = refuse_another_run(folder, kind, compare)
            _identity.refuse_changes(folder, saved, own)
            if saved is None:
                _refuse_strangers(folder)
            run = {"kind": kind, "config": config, "command": command}
            _write_record(folder, saved, run, own, num_devices)
        job.together("workdir opened", True)
        yield folder


def _write_record(
    folder: pathlib.Path,
    saved: dict[str, Any] | None,
    run: dict[str, Any],
    own: _identity.OwnFiles,
    num_devices: int,
) -> None:
    """Write the `config.json` of a new run, or add a restart under other circumstances to it.

    Args:
      folder: The workdir.
      saved: Its `config.json`; None for a new run.
      run: What `config.json` says of a new run.
      own: The user's own files.
      num_devices: Number of devices that the run uses.
    """
    now = _versions.describe_environment(num_devices)
    now["versions"] = {**now["versions"], **own.packages}
    if saved is None:
        # Other commands look in these folders for code and data that the config names.
        places = {"folder": os.getcwd(), "code_folders": _user_code.code_folders()}
        record = {**run, **places, **now, **own.record()}
    else:
        changed = _identity.changed_record(folder, saved, own)
        record = saved
        if changed or _versions.different_versions(_versions.last_environment(saved), now):
            record = {**saved, "resumed": [*saved.get("resumed", []), {**now, **changed}]}

    # First config.json: a folder with another file alone is refused as a stranger's.
    if record is not saved:
        write_json(folder / "config.json", record)
    texts = _identity.texts_to_keep(folder, record, own)
    if texts is not None:
        write_json(folder / _identity.SOURCES_FILE, texts)


def check_shared_workdir(path: paths.GivenPath, job: Job) -> None:
    """Check that all processes of a job see a file that the first one writes into the workdir.

    Raises:
      UserError: Naming `workdir`, if one does not.
    """
    folder = absolute_workdir(path)
    if job.count == 1:
        return
    if job.index > 0:
        _look_for_first_ones(folder, job)
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


def _look_for_first_ones(folder: pathlib.Path, job: Job) -> None:
    """Check that this process sees the file of the first one."""
    name = job.together("workdir", None)[0]
    fix = (
        f"process {job.index} of {job.count} ({socket.gethostname()}) does not see what process 0 "
        "writes there; use a folder that all hosts share"
    )
    is_seen = (_bucket.checkpoint_root(folder) / name).exists()
    require(is_seen, "workdir", str(folder), fix, code="mismatch")
    job.together("workdir seen", True)


def _refuse_strangers(folder: pathlib.Path) -> None:
    """Raise `UserError` if a folder without a config.json has other files than hidden ones."""
    is_empty = all(entry.name.startswith(".") for entry in folder.iterdir())
    fix = "it is not empty and holds no config.json; use a new or empty folder"
    require(is_empty, "workdir", str(folder), fix, code="exists")


def refuse_another_run(
    folder: pathlib.Path, kind: str, compare: CompareConfigs
) -> dict[str, Any] | None:
    """Return the config.json of a workdir; None if there is none.

    Raises:
      UserError: If it is of another run.
    """
    saved = read_config(folder, kind)
    differences = compare(saved) if saved else []
    few = "; ".join(differences[:3])
    fix = f"it holds a {KINDS[kind]} of another config ({few}); use another workdir"
    require(not differences, "workdir", str(folder), fix, code="exists")
    return saved


def absolute_workdir(path: paths.GivenPath) -> pathlib.Path:
    """Return the absolute path of a `workdir`."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise UserError("workdir", str(path), "it is not UTF-8; use another name") from error
    return paths.local(path, "workdir").absolute()


def read_config(path: paths.GivenPath, kind: str | None = None) -> dict[str, Any] | None:
    """Return the content of a workdir's `config.json`; None if there is none.

    Args:
      path: The workdir.
      kind: "train" or "sweep"; None for either.

    Raises:
      UserError: If the workdir is of another kind.
      EnvironmentProblem: If the file cannot be read.
    """
    file = absolute_workdir(path) / "config.json"
    try:
        saved = _parse_config(_typed_json.read_bytes(file, _typed_json.MOST_BYTES), str(file))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        fix = f"{{file}} cannot be read ({error.strerror}); make it readable or use another folder"
        raise EnvironmentProblem(
            "workdir", reason=fix, code="resource", files={"file": file}
        ) from error
    except ValueError as error:
        raise _no_config(str(file), error) from error
    if kind is not None and saved["kind"] != kind:
        fix = f"it holds a {KINDS[saved['kind']]}, not a {KINDS[kind]}; use another folder"
        raise UserError("workdir", str(file.parent), fix, code="mismatch")
    return saved


def read_study_config(file: Any) -> dict[str, Any]:
    """Return the `config.json` of a shard of a study.

    Args:
      file: A path of a folder or of a bucket.

    Raises:
      OSError: If it cannot be read.
      EnvironmentProblem: If lbopt did not write it.
    """
    try:
        return _typed_json.records(_typed_json.read_file(file, _SavedStudy), str(file), _RESTORE)
    except ValueError as error:
        raise _no_config(str(file), error) from error


def _parse_config(data: bytes, file: str) -> dict[str, Any]:
    """Return the content of a `config.json`, whose types are checked."""
    try:
        saved = _typed_json.decode(data, _SavedConfig)
        _typed_json.convert(saved, {"train": _SavedRun, "sweep": _SavedStudy}[saved["kind"]])
        for start in (saved, *saved.get("resumed", ())):
            if start["versions"].get("jax") is None:
                raise ValueError("versions: there is no jax")
    except ValueError as error:
        raise _no_config(file, error) from error
    return _typed_json.records(saved, file, _RESTORE)


def _no_config(file: str, error: ValueError) -> EnvironmentProblem:
    fix = f"{{file}} is not a config.json of lbopt ({error}); {_RESTORE}"
    return EnvironmentProblem("workdir", reason=fix, code="damaged", files={"file": file})


def make_writable_folder(folder: pathlib.Path) -> None:
    """Create a folder and write into it, or raise `EnvironmentProblem`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        fix = f"cannot be written ({error.strerror}); make it writable or use another folder"
        raise EnvironmentProblem("workdir", str(folder), fix, code="resource") from error


@contextlib.contextmanager
def _locked(folder: pathlib.Path, shard: Shard | None = None) -> Iterator[None]:
    """Lock a folder while the context lasts: for this process alone, or shared with a shard."""
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
        fix = "another process is at work there; wait for it or use another workdir"
        raise UserError("workdir", str(folder), fix, code="conflict") from error
    except OSError as error:
        fix = f"cannot be locked ({error.strerror}); use a folder on another file system"
        raise EnvironmentProblem("workdir", str(folder), fix, code="resource") from error


def write_json(file: pathlib.Path, data: Any) -> None:
    """Write JSON data to a file, atomically."""
    write_text(file, json.dumps(data, indent=2) + "\n")


def write_text(file: pathlib.Path, text: str) -> None:
    """Write a file atomically; half of a surrogate pair is written as an escape."""
    write_bytes(file, text.encode("utf-8", "backslashreplace"))


def write_bytes(file: pathlib.Path, data: bytes) -> None:
    """Write a file atomically: a reader sees the old content or the new one."""
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
    """Turn the system's refusal to write into an `EnvironmentProblem` that names the file."""
    try:
        yield
    except OSError as error:
        fix = (
            f"cannot be written ({error.strerror or error}); free space or make it writable, then "
            "run the same command again"
        )
        raise EnvironmentProblem(str(file), reason=fix, code="resource") from error
