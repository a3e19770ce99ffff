"""The environment of a run, besides its config: versions, revision, devices."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import os
import pathlib
import platform
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

from lbopt import _user_code
from lbopt._installed import is_of_user
from lbopt.parallel import available_devices
from lbopt.workdir import _identity

PACKAGES = (
    "lbopt",
    "jax",
    "jaxlib",
    "optax",
    "flax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "scipy",
    "optuna",
)
EXTRAS_OF_PACKAGES = {"optuna": "search"}
"""Optional packages, and the extra of lbopt that installs each."""
KEYS = ("versions", "git_revision", "code_revision", "device_kind", "num_devices", "host")
_VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2"}
"""Flags of a processor, the best first, and their names: CPU results depend on them."""


def describe_environment(num_devices: int) -> dict[str, Any]:
    """Return versions, revisions and devices for `config.json`."""
    return {
        **describe_software(),
        "device_kind": available_devices()[0].device_kind,
        "num_devices": num_devices,
        "host": _host(),
    }


def machine_text(saved: Mapping[str, Any]) -> str:
    """Return the devices and the host of a `config.json` in words.

    >>> saved = {"num_devices": 4, "device_kind": "TPU v4", "host": "240 cores, x86_64"}
    >>> machine_text(saved)
    '4 x TPU v4; host: 240 cores, x86_64'
    """
    devices = f"{saved['num_devices']} x {saved['device_kind']}"
    return f"{devices}; host: {saved['host']}" if saved.get("host") else devices


def _host() -> str:
    """Return the cores and the processor of this machine, and its vector instructions if known."""
    lines: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            lines.setdefault(name.strip(), value.strip())
    flags = lines.get("flags", "").split()
    vectors = [text for flag, text in _VECTORS.items() if flag in flags][:1]
    processor = lines.get("model name") or platform.processor()
    words = [f"{os.cpu_count()} cores", processor, platform.machine(), *vectors]
    return ", ".join(dict.fromkeys(filter(None, words)))


def describe_software() -> dict[str, Any]:
    """Return versions, and the git revisions of lbopt and of the config file's folder."""
    return {
        "versions": package_versions(),
        "git_revision": _own_revision(),
        "code_revision": _code_revision(),
    }


def package_versions() -> dict[str, str | None]:
    """Return the versions of Python and of `PACKAGES`; None for a package that is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def last_environment(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment of the last start that a `config.json` lists."""
    latest = [saved, *saved.get("resumed", [])][-1]
    return {key: latest[key] for key in KEYS if key in latest}


def environment_changes(saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each restart whose environment, or files of the user, differ."""
    resumed = saved.get("resumed", [])
    starts = [saved, *resumed]
    for number, (before, now) in enumerate(itertools.pairwise(starts)):
        files = _identity.last_record({**saved, "resumed": resumed[:number]})
        changes = [*different_versions(before, now), *_identity.record_changes(files, now)]
        if changes:
            yield ", ".join(changes)


def different_versions(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return how two environments differ; what only one of them records does not count."""
    old = _flat(before)
    new = _flat(now)
    return [f"{key} {old[key]} -> {new[key]}" for key in new if key in old and old[key] != new[key]]


def _flat(start: Mapping[str, Any]) -> dict[str, Any]:
    """Return an environment as one mapping, with a key for each package."""
    others = {key: start[key] for key in KEYS if key in start and key != "versions"}
    return {**start["versions"], **others}


def _own_revision() -> str | None:
    """Return the git revision of lbopt; None if it is installed without its repository.

    An environment may lie inside a repository of the user, whose revision is not that of lbopt.
    """
    file = pathlib.Path(__file__)
    folder = str(file.parent)
    if _git(folder, "ls-files", "--error-unmatch", "--", file.name) is None:
        return None
    return _git(folder, "rev-parse", "HEAD")


def _code_revision() -> str | None:
    """Return the git revision of the config file's folder, and whether it has changes.

    None without a config file, if its folder is in no repository, or if it was installed with
    lbopt: then the version of lbopt tells what it is.
    """
    folder = _user_code.config_folder()
    if folder is None or not is_of_user(str(pathlib.Path(folder, "config.py"))):
        return None
    revision = _git(folder, "rev-parse", "HEAD")
    if not revision:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return f"{revision} with changes" if changes else revision


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(folder: str, *command: str) -> str | None:
    """Return what a git command prints; None if it fails. It writes nothing."""
    words = ["git", "--no-optional-locks", "-C", folder, *command]
    try:
        return subprocess.run(
            words, capture_output=True, text=True, check=True, timeout=10, errors="replace"
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
