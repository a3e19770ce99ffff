"""The environment of a run, besides its config: versions, revision, devices."""

from __future__ import annotations

import importlib.metadata
import itertools
import pathlib
import platform
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

from lbopt.parallel import available_devices

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
KEYS = ("versions", "git_revision", "device_kind", "num_devices")


def describe_environment(num_devices: int) -> dict[str, Any]:
    """Return versions, revision and devices for `config.json`."""
    return {
        "versions": package_versions(),
        "git_revision": _git_revision(),
        "device_kind": available_devices()[0].device_kind,
        "num_devices": num_devices,
    }


def package_versions() -> dict[str, str | None]:
    """Return the versions of Python and of `PACKAGES`; None for a package that is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def last_environment(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment of the last start that a `config.json` lists."""
    latest = [saved, *saved.get("resumed", [])][-1]
    return {key: latest.get(key) for key in KEYS}


def environment_changes(saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each restart whose environment differs from the previous start's."""
    starts = [_flat(start) for start in (saved, *saved.get("resumed", []))]
    for before, now in itertools.pairwise(starts):
        yield ", ".join(
            f"{key} {before.get(key)} -> {now[key]}" for key in now if before.get(key) != now[key]
        )


def _flat(start: Mapping[str, Any]) -> dict[str, Any]:
    """Return an environment as one mapping, with a key for each package."""
    return {**start["versions"], **{key: start.get(key) for key in KEYS if key != "versions"}}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    command = ["git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
