"""A workdir belongs to one config: opened, checked, and never overwritten by another."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import jax

from lbopt.errors import EnvironmentProblem, UserError

KINDS = {"train": "training run", "sweep": "sweep"}
PACKAGES = ("lbopt", "jax", "jaxlib", "optax", "flax", "orbax-checkpoint", "grain", "numpy")


def open_workdir(
    path: str | os.PathLike[str],
    kind: str,
    config: dict[str, Any],
    differences: list[str] | None = None,
    command: str = "",
) -> pathlib.Path:
    """Create a workdir, or check that an existing one holds the same config.

    Args:
      path: the folder; parents are made.
      kind: "train" or "sweep".
      config: the resolved config as JSON data.
      differences: if the caller compared the config already (see `read_config`), what differs.
      command: what the user typed, for the report.

    Returns:
      The absolute path.

    Raises:
      UserError: if it holds something else.
      EnvironmentProblem: if it cannot be written.
    """
    folder = pathlib.Path(path).expanduser().absolute()
    if differences:
        raise UserError(
            f"--workdir = {str(folder)!r}: it holds a {KINDS[kind]} of another config ({'; '.join(differences[:3])}); use another --workdir"
        )
    make_writable(folder)
    if not (folder / "config.json").exists():
        if any(folder.iterdir()):
            raise UserError(
                f"--workdir = {str(folder)!r}: it is not empty and holds no config.json; use a new or empty folder"
            )
        write_json(folder / "config.json", {"kind": kind, "config": config, "command": command, **environment()})
    return folder


def read_config(path: str | os.PathLike[str], kind: str | None = None) -> dict[str, Any] | None:
    """Return what `config.json` of a workdir says, or None if there is none.

    Raises:
      UserError: if the workdir is of another kind.
      EnvironmentProblem: if the file cannot be read.
    """
    file = pathlib.Path(path).expanduser().absolute() / "config.json"
    try:
        saved = json.loads(file.read_text())
        found = saved["kind"]
        damaged = found not in KINDS or not {"config", "versions"} <= set(saved)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise EnvironmentProblem(
            f"--workdir: {file} cannot be read ({error.strerror}); mend its permissions"
        ) from error
    except (ValueError, KeyError, TypeError):
        damaged = True
    if damaged:
        raise EnvironmentProblem(
            f"--workdir: {file} is not a config.json of lbopt; restore it or use another --workdir"
        )
    if kind is not None and found != kind:
        raise UserError(
            f"--workdir = {str(file.parent)!r}: it holds a {KINDS[found]}, not a {KINDS[kind]}; use another --workdir"
        )
    return saved


def make_writable(folder: pathlib.Path) -> None:
    """Create a folder and write into it, or raise `EnvironmentProblem`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise EnvironmentProblem(
            f"--workdir = {str(folder)!r}: cannot be written ({error.strerror}); choose another folder or mend its permissions"
        ) from error


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Hold a workdir for this process; the lock goes with the process, however it ends.

    Raises:
      UserError: if another process holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: pathlib.Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(
            f"--workdir = {str(folder)!r}: another process is at work there; wait for it or use another --workdir"
        ) from error


def write_json(file: pathlib.Path, data: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part."""
    write_text(file, json.dumps(data, indent=2) + "\n")


def write_text(file: pathlib.Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    with open(partial, "w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, file)


def environment() -> dict[str, Any]:
    """Return what a result depends on besides its config."""
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "git_revision": _git_revision(),
        "device_kind": jax.devices()[0].device_kind,
        "num_devices": jax.device_count(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    command = ["git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
