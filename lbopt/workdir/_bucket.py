"""A workdir in a bucket: checkpoints are written there, other files to a local mirror and copied.

An object of a bucket can be replaced, not appended to. So `metrics.jsonl` and other small files are
in a local folder, the mirror. It is copied before every checkpoint, twice a minute, a few seconds
after a study's trial has finished, and at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any, TypedDict

from lbopt import _bucket_files, _typed_json, paths
from lbopt.data.text import SETTINGS_FILE, VOCABULARY_FILE
from lbopt.errors import EnvironmentProblem, LboptError
from lbopt.job import Job, SoloJob
from lbopt.workdir._identity import SOURCES_FILE

_KEPT = (
    "config.json",
    SOURCES_FILE,
    "metrics.jsonl",
    "results.jsonl",
    "test_examples.jsonl",
    "summary.json",
    SETTINGS_FILE,
    VOCABULARY_FILE,
    "mllog.txt",
    "trackers.json",
)
"""Files of an earlier start that a mirror begins with."""
_LEASE = ".lease.json"
_RENEW_S = 15.0
"""Seconds between two renewals of a lease."""
_SOON_S = 5.0
"""Seconds until changes are copied "soon"."""
_SETTLE_S = 1.0
"""Seconds until a process looks whether it has the lease: of two at once the later one has it."""
_COMPLETE = "commit_success.txt"
"""The file that Orbax writes last into a checkpoint in a bucket."""
_MIRRORS: dict[pathlib.Path, _Mirror] = {}


@contextlib.contextmanager
def local_workdir(
    workdir: paths.GivenPath, job: Job | None = None, write: bool = True, hold: bool = True
) -> Iterator[str]:
    """Give the local folder of a workdir: the workdir itself, or the mirror of one in a bucket.

    Args:
      workdir: The workdir as the user gave it.
      job: The job that this process belongs to; None for a process alone. Only the first process
        writes to the bucket.
      write: Whether changes are copied into the bucket.
      hold: Whether other processes are kept from writing there meanwhile.

    Yields:
      A local path.

    Raises:
      UserError: For an address of another kind.
      EnvironmentProblem: If the bucket cannot be read or written, or another process is at work
        there.
    """
    workdir = paths.local_or_bucket(workdir, "workdir")
    if not paths.is_address(workdir):
        yield workdir
        return

    job = SoloJob() if job is None else job
    root = bucket_path(workdir)
    with tempfile.TemporaryDirectory(prefix="lbopt-workdir-") as folder:
        mirror = _Mirror(pathlib.Path(folder), root, write and job.index == 0, hold)
        _MIRRORS[mirror.folder] = mirror
        try:
            with mirror.held():
                mirror.download()
                yield folder
        except LboptError as error:
            # The user knows the folder in the bucket, not the mirror.
            error.field = _moved(error.field, folder, workdir)
            error.value = _moved(error.value, folder, workdir)
            for name, path in error.files.items():
                error.files[name] = _moved(path, folder, workdir)
            raise
        finally:
            del _MIRRORS[mirror.folder]


def _moved(place: Any, folder: str, workdir: str) -> Any:
    """Return a path in a folder as the path in another; anything else as it is."""
    if isinstance(place, str) and place.startswith(folder):
        return workdir + place.removeprefix(folder)
    return place


def checkpoint_root(workdir: pathlib.Path) -> Any:
    """Return the folder above `checkpoints/`: the workdir, or the folder in the bucket of a mirror.

    The folder in the bucket is an `epath.Path`.
    """
    return _MIRRORS[workdir].root if workdir in _MIRRORS else workdir


def copy_changes(workdir: pathlib.Path) -> None:
    """Copy changes of a mirror into the bucket; does nothing for a folder."""
    if workdir in _MIRRORS:
        _MIRRORS[workdir].upload()


def copy_changes_soon(workdir: pathlib.Path) -> None:
    """Copy changes of a mirror within seconds, in a thread; see `copy_changes`.

    Raises:
      EnvironmentProblem: The error of the last such copy.
    """
    if workdir in _MIRRORS:
        _MIRRORS[workdir].upload_soon()


def shown_path(file: pathlib.Path) -> str:
    """Return the path of a workdir's file as the user knows it: that in the bucket for a mirror.

    >>> shown_path(pathlib.Path("runs/a/metrics.jsonl"))
    'runs/a/metrics.jsonl'
    """
    found = [mirror for folder, mirror in _MIRRORS.items() if file.is_relative_to(folder)]
    return str(found[0].root / str(file.relative_to(found[0].folder))) if found else str(file)


def is_whole_checkpoint(folder: Any) -> bool:
    """Return whether a folder with the number of a step is a complete checkpoint.

    On disk Orbax gives a checkpoint its name last, so every one is.
    """
    return isinstance(folder, pathlib.Path) or (folder / _COMPLETE).exists()


def move_checkpoint(folder: Any, target: Any) -> None:
    """Move a checkpoint; from the start of the move it does not count as one."""
    if isinstance(folder, pathlib.Path):
        target.parent.mkdir(exist_ok=True)
        folder.rename(target)
        return
    import fsspec

    (folder / _COMPLETE).unlink(missing_ok=True)
    # With the options of epath, so that both share one cache of listings.
    files = fsspec.filesystem("gcs", finalize_on_close=True)
    files.copy(str(folder), str(target), recursive=True)
    files.rm(str(folder), recursive=True)


def is_folder_held(root: Any) -> bool:
    """Return whether a process is at work in a folder of a bucket, if both clocks are right."""
    try:
        found = _typed_json.read_file(root / _LEASE, _LeaseFile)
        return time.time() < found["renewed"] + 3 * _RENEW_S and not _is_dead_here(found)
    except (FileNotFoundError, ValueError):
        return False


def bucket_path(workdir: str) -> Any:
    """Return a folder in a bucket as an `epath.Path`.

    Args:
      workdir: The workdir as the user gave it.

    Raises:
      UserError: For an address of another kind.
      EnvironmentProblem: If the package for buckets is not installed.
    """
    workdir = paths.local_or_bucket(workdir, "workdir")
    _bucket_files.import_client("workdir", workdir)
    from etils import epath

    return epath.Path(workdir)


@contextlib.contextmanager
def bucket_errors(root: Any, doing: str) -> Iterator[None]:
    """Turn errors of the bucket's client into an `EnvironmentProblem` of one line.

    Args:
      root: The folder, for the message.
      doing: "read" or "written", for the message.
    """
    with _bucket_files.client_errors("workdir", str(root), doing):
        yield


@dataclasses.dataclass(eq=False)
class _Mirror:
    """A local folder whose files are copied into a folder of a bucket.

    Attributes:
      folder: The local folder.
      root: The folder in the bucket.
      writes: Whether changes are copied.
      holds: Whether other processes are kept from writing there.
    """

    folder: pathlib.Path
    root: Any
    writes: bool
    holds: bool
    _lease: _Lease | None = None
    _copied: dict[pathlib.Path, tuple[int, int]] = dataclasses.field(default_factory=dict)
    _lock: Any = dataclasses.field(default_factory=threading.Lock)
    _soon: threading.Timer | None = None
    _failed: EnvironmentProblem | None = None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder in the bucket while the context lasts, and copy changes at the end."""
        if self.writes and self.holds:
            with bucket_errors(self.root, "written"):
                self._lease = _Lease(self.root)
        try:
            yield
        finally:
            try:
                self._end_soon()
                self.upload()
            finally:
                if self._lease is not None:
                    self._lease.release()

    def download(self) -> None:
        """Copy the files of an earlier start from the bucket."""
        with bucket_errors(self.root, "read"):
            for name in _KEPT:
                with contextlib.suppress(FileNotFoundError):
                    data = (self.root / name).read_bytes()
                    file = self.folder / name
                    file.write_bytes(data)
                    self._copied[file] = _state(file)

    def upload(self) -> None:
        """Copy the files that have changed into the bucket."""
        if not self.writes:
            return
        with self._lock, bucket_errors(self.root, "written"):
            if self._lease is not None:
                self._lease.check()
            for file in sorted(self.folder.rglob("*")):
                inside = file.relative_to(self.folder)
                if not file.is_file() or any(part.startswith(".") for part in inside.parts):
                    continue
                state = _state(file)
                if self._copied.get(file) != state:
                    (self.root / str(inside)).write_bytes(file.read_bytes())
                    self._copied[file] = state

    def upload_soon(self) -> None:
        """Upload in `_SOON_S`, unless an upload is waiting already."""
        if self._failed is not None:
            raise self._failed
        if self._soon is None and self.writes:
            self._soon = threading.Timer(_SOON_S, self._upload_now)
            self._soon.daemon = True
            self._soon.start()

    def _upload_now(self) -> None:
        self._soon = None  # first, because later changes need another upload
        try:
            self.upload()
        except EnvironmentProblem as error:
            self._failed = error

    def _end_soon(self) -> None:
        timer = self._soon
        if timer is not None:
            timer.cancel()
            timer.join()


def _state(file: pathlib.Path) -> tuple[int, int]:
    """Return the time of a file's last change and its size, which tell whether to copy it."""
    found = file.stat()
    return found.st_mtime_ns, found.st_size


class _LeaseFile(TypedDict):
    renewed: float


class _Lease:
    """An object in a bucket that says which process is at work there.

    The process renews it; another one may take it when it is not renewed any more. A process that
    has lost it, because its machine stood still, learns that before the next checkpoint.

    Args:
      root: The folder in the bucket.

    Raises:
      EnvironmentProblem: If another process holds it.
    """

    def __init__(self, root: Any):
        self._file = root / _LEASE
        self._ours = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "space": _pid_namespace(),
            "id": uuid.uuid4().hex,
        }
        self._taken_by: dict[str, Any] = {}
        self._wait_for_last_holder()
        self._write()
        time.sleep(_SETTLE_S)
        if not self._is_ours():
            raise self._held_by(self._taken_by)
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lbopt lease", daemon=True)
        self._thread.start()

    def _wait_for_last_holder(self) -> None:
        """Wait until an earlier lease is given up or not renewed; raise if it is renewed."""
        found = self._read()
        if not found or _is_dead_here(found):
            return
        until = time.monotonic() + 2.5 * _RENEW_S
        while time.monotonic() < until:
            time.sleep(_RENEW_S / 10)
            now = self._read()
            if now and now != found:
                raise self._held_by(now)
            if not now:
                return

    def _is_ours(self) -> bool:
        """Return whether the object in the bucket is this process's lease."""
        found = self._read()
        if found.get("id") != self._ours["id"]:
            self._taken_by = found or {"host": "unknown host", "pid": "unknown"}
        return not self._taken_by

    def check(self) -> None:
        """Raise `EnvironmentProblem` if another process has taken it."""
        if self._taken_by or (time.time() > self._renewed + 2 * _RENEW_S and not self._is_ours()):
            raise self._held_by(self._taken_by)

    def _held_by(self, found: dict[str, Any]) -> EnvironmentProblem:
        fix = (
            f"another process is at work there ({found.get('host')}, pid {found.get('pid')}); "
            "wait for it or use another workdir"
        )
        return EnvironmentProblem("workdir", str(self._file.parent), fix, code="conflict")

    def _read(self) -> dict[str, Any]:
        try:
            return _typed_json.read_file(self._file, dict[str, Any])
        except (FileNotFoundError, ValueError):
            return {}

    def _write(self) -> None:
        self._renewed = time.time()  # unlike a monotonic clock, it counts while a machine sleeps
        self._file.write_text(json.dumps({**self._ours, "renewed": self._renewed}))

    def _renew(self) -> None:
        while not self._released.wait(_RENEW_S):
            with contextlib.suppress(Exception):  # a bucket that does not answer now may do later
                if not self._is_ours():
                    return
                self._write()

    def release(self) -> None:
        """Give the lease up."""
        self._released.set()
        self._thread.join()
        with contextlib.suppress(Exception):  # otherwise the next process waits until it is stale
            if self._is_ours():
                self._file.unlink()


def _is_dead_here(found: dict[str, Any]) -> bool:
    """Return whether a lease is that of a process of this machine that has ended."""
    if found.get("space") != _pid_namespace() or not isinstance(found.get("pid"), int):
        return False
    return not pathlib.Path(f"/proc/{found['pid']}").exists()


def _pid_namespace() -> str:
    """Return the namespace of process ids: this boot of this machine, and this container."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return uuid.uuid4().hex
