"""Which accelerators of its host a process uses, if a scheduler starts several on one host."""

from __future__ import annotations

import re
from collections.abc import Mapping

from lbopt.errors import EnvironmentProblem, UserError

VARIABLE = "JAX_LOCAL_DEVICE_IDS"
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_RANKS = ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


def given_devices(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """Return the device numbers in `JAX_LOCAL_DEVICE_IDS`; None if it is not set.

    >>> given_devices({"JAX_LOCAL_DEVICE_IDS": "0,1"})
    (0, 1)

    Raises:
      EnvironmentProblem: If the variable is not a list of numbers.
    """
    text = environ.get(VARIABLE, "")
    if not text:
        return None
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", text):
        fix = "give numbers of this host's devices with commas, '0,1' for instance, or unset it"
        raise EnvironmentProblem(VARIABLE, text, fix)
    return tuple(map(int, text.split(",")))


def local_devices(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """Return the devices for this process on Slurm or under Open MPI; None for all that it sees.

    A process that is alone on its host uses all GPUs. Several share them evenly: with one process
    a GPU, each has one. If the scheduler shows each process its own GPUs, it uses all of those.
    Where no number of GPUs is known, each process has one.

    Note:
      JAX gives each process one device, the one with its rank on the host, even if the process is
      alone there.

    >>> local_devices({"SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "2"})
    >>> eight = {"SLURM_GPUS_ON_NODE": "8", "SLURM_NTASKS": "16", "SLURM_STEP_NUM_NODES": "2"}
    >>> local_devices({"SLURM_LOCALID": "3", **eight})
    (3,)

    Raises:
      UserError: If the processes cannot share the GPUs evenly.
    """
    rank = next((int(environ[name]) for name in _RANKS if environ.get(name, "").isdecimal()), 0)
    processes = _processes_here(environ)
    if processes == 1:
        return None

    visible = next((len(environ[name].split(",")) for name in _VISIBLE if environ.get(name)), 0)
    there = _number(environ, "SLURM_GPUS_ON_NODE")
    # With --gpu-bind=none, each process sees those of the others too.
    own = _number(environ, "SLURM_GPUS_PER_TASK")
    if 0 < visible < (there or processes) or (own and visible in (0, own)):
        return None

    devices = visible or there or processes
    share = devices // processes
    if devices % processes:
        fix = f"they cannot share {devices} GPUs evenly; start one, or as many as GPUs, or give "
        raise UserError("processes of a host", processes, f"{fix}each its own in {VARIABLE}")
    return tuple(range(rank * share, (rank + 1) * share))


def _processes_here(environ: Mapping[str, str]) -> int:
    """Return how many processes of the job run on this host."""
    if "SLURM_LOCALID" not in environ:
        return _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE") or 1
    counts: list[int] = []
    for count, _, times in re.findall(
        r"(\d+)(\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    ):
        counts += [int(count)] * int(times or 1)
    node = _number(environ, "SLURM_NODEID")
    if node < len(counts):
        return counts[node]
    return -(-_number(environ, "SLURM_NTASKS") // (_number(environ, "SLURM_STEP_NUM_NODES") or 1))


def _number(environ: Mapping[str, str], name: str) -> int:
    """Return the number in a variable, N or KIND:N; 0 if it has none."""
    text = environ.get(name, "").rpartition(":")[2]
    return int(text) if re.fullmatch(r"\d{1,9}", text) else 0
