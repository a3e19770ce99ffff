"""`lbopt doctor`: whether this machine can run lbopt."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence

from lbopt._shown import one_line, show
from lbopt.cli import _flags
from lbopt.cli._extras import EXTRAS
from lbopt.errors import EnvironmentProblem, MissingPackage
from lbopt.job import JOB_FLAGS, Job
from lbopt.parallel import connect_processes

_ENOUGH_DISK_BYTES = 1 << 30


def run(argv: Sequence[str], job: Job) -> None:
    """Check the requirements of a run, and print each fault with its fix.

    Packages of lbopt's extras are optional: those that are not installed are listed, each extra
    with its purpose, and are no fault.

    Args:
      argv: Arguments after the command: those that describe a job.
      job: The job that this process is part of.

    Raises:
      EnvironmentProblem: If a check failed.
    """
    _flags.parse("doctor", argv, JOB_FLAGS)
    connect_processes(job)
    job.doing("checking")
    failed = 0
    for name, check in CHECKS.items():
        try:
            show(f"ok    {name:<12}{check()}")
        except MissingPackage as error:
            show(f"--    {name:<12}optional, {one_line(str(error))}")
        except Exception as error:  # any failure is a finding
            failed += 1
            show(f"WRONG {name:<12}{one_line(str(error))}")
    for name, extra in EXTRAS.items():
        if extra.missing():
            what = f"optional, not installed: {extra.purpose}; pip install 'lbopt[{name}]'"
            show(f"--    {name:<12}{what}")
    if failed:
        fix = f"{failed} of {len(CHECKS)} failed; follow the lines marked WRONG above"
        raise EnvironmentProblem("checks", reason=fix, code="resource")


def _python() -> str:
    if sys.prefix == sys.base_prefix:
        return f"{sys.version.split()[0]} (no virtual environment)"
    return sys.version.split()[0]


def _versions() -> str:
    from lbopt.workdir import EXTRAS_OF_PACKAGES, package_versions

    versions = package_versions()
    absent = [name for name, version in versions.items() if version is None]
    missing = [name for name in absent if name not in EXTRAS_OF_PACKAGES]
    if missing:
        fix = "not installed; run pip install lbopt, or pip install -e . in a checkout"
        raise EnvironmentProblem(", ".join(missing), reason=fix, code="installation")
    present = [name for name in versions if name not in ("python", *absent)]
    return ", ".join(f"{name} {versions[name]}" for name in present)


def _devices() -> str:
    import jax

    devices = jax.devices()
    kind = f"{devices[0].device_kind} ({devices[0].platform})"
    return f"{len(devices)} x {kind}, process {jax.process_index()} of {jax.process_count()}"


def _collectives() -> str:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from lbopt.parallel import batch_sharding, make_mesh, replicated_sharding

    mesh = make_mesh()
    ones = jax.device_put(np.ones(mesh.size, np.float32), batch_sharding(mesh))
    total = float(jax.jit(jnp.sum, out_shardings=replicated_sharding(mesh))(ones))
    if total != mesh.size:
        fix = f"the sum of 1 over {mesh.size} devices must be {mesh.size}; restart their runtime"
        raise EnvironmentProblem("sum", total, fix, code="mismatch")
    return f"sum over {mesh.size} devices is right"


def _data() -> str:
    from lbopt import paths
    from lbopt.data import data_dir_or_bucket, default_data_dir, load_digits

    sizes = "/".join(str(len(split)) for split in load_digits())
    embedded = f"digits {sizes} examples (train/validation/test)"

    place, field = data_dir_or_bucket()
    if paths.is_address(place):
        return f"{embedded}; {field} is {place}, from which data sets are copied"
    root = default_data_dir()
    patterns = ("*/*/dataset_info.json", "*/*/*/dataset_info.json", "lbopt_text/*/store.json")
    files = [file for pattern in patterns for file in root.glob(pattern)]
    found = sorted(str(file.parent.relative_to(root)) for file in files)
    prepared = ", ".join(found) or "nothing prepared yet (lbopt prepare --help)"
    return f"{embedded}; in {root}: {prepared}"


def _figures() -> str:
    from lbopt.report import new_figure

    new_figure()
    return "matplotlib draws"


def _disk() -> str:
    free = shutil.disk_usage(os.getcwd()).free
    if free < _ENOUGH_DISK_BYTES:
        fix = f"only {free / 2**30:.1f} GiB free; free some for checkpoints"
        raise EnvironmentProblem(os.getcwd(), reason=fix, code="resource")
    return f"{free / 2**30:.0f} GiB free here"


CHECKS: dict[str, Callable[[], str]] = {
    "python": _python,
    "versions": _versions,
    "devices": _devices,
    "collectives": _collectives,
    "data": _data,
    "figures": _figures,
    "disk": _disk,
}
