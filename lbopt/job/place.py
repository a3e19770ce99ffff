"""Which process of a job this one is: told by flags or the environment, or found out by JAX."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from lbopt.errors import EnvironmentProblem, UserError, require

FLAGS = {
    "coordinator_address": "of several processes: HOST:PORT of process 0; HOST:PORT+1 is used too (or JAX_COORDINATOR_ADDRESS)",
    "coordinator_bind_address": "where process 0 listens, if not at that address: HOST:PORT (or JAX_COORDINATOR_BIND_ADDRESS)",
    "num_processes": "how many there are (or JAX_NUM_PROCESSES); none of the three on Cloud TPU, GKE, Slurm",
    "process_id": "which one this is, from 0 (or JAX_PROCESS_ID)",
    "start_timeout_s": "how long to wait for the others at the start (default 60, or LBOPT_START_TIMEOUT_S)",
    "hang_timeout_s": "end the job when no process has gone on for so long (default 900, or LBOPT_HANG_TIMEOUT_S)",
    "job_secret_file": "a file that only you can read, with what all processes know and nobody else (or LBOPT_JOB_SECRET_FILE, "
    "LBOPT_JOB_SECRET; default ~/.config/lbopt/job_secret, made where it is missing)",
}
VARIABLES = {
    "coordinator_address": "JAX_COORDINATOR_ADDRESS",
    "coordinator_bind_address": "JAX_COORDINATOR_BIND_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
    "start_timeout_s": "LBOPT_START_TIMEOUT_S",
    "hang_timeout_s": "LBOPT_HANG_TIMEOUT_S",
    "job_secret_file": "LBOPT_JOB_SECRET_FILE",
}
_SIGNS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "JOB_COMPLETION_INDEX")
"""Set by Slurm, Open MPI and indexed jobs of Kubernetes."""
_WHO = ("coordinator_address", "num_processes", "process_id")


@dataclasses.dataclass(frozen=True)
class Place:
    """A process's place in a job.

    Attributes:
      host: on which process 0 runs.
      port: at which its hub listens; JAX's coordination service has the next one.
      count: of processes.
      index: of this one.
      local_device_ids: which of the host's devices are this process's; None for all.
      start_timeout_s: how long the others may take to come.
      hang_timeout_s: how long the job may stand still.
      bind: (host, port) at which process 0 listens; None for what `host` stands for, and `port`.
    """

    host: str
    port: int
    count: int
    index: int
    local_device_ids: tuple[int, ...] | None = None
    start_timeout_s: float = 60.0
    hang_timeout_s: float = 900.0
    bind: tuple[str, int] | None = None

    @property
    def listens(self) -> tuple[str, str, int]:
        """Which flag says where process 0 listens, and its host and port. Of another process: whom it looks for."""
        if self.bind and self.index == 0:
            return ("coordinator_bind_address", *self.bind)
        return "coordinator_address", self.host, self.port

    @property
    def jax_address(self) -> str:
        """Where JAX's coordination service is found."""
        return _joined(self.host, self.port + 1)

    @property
    def jax_bind_address(self) -> str:
        """Where it listens."""
        host, port = self.bind or (self.host, self.port)
        return _joined(host, port + 1)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_number(host: str) -> bool:
    """Return whether it is an address of numbers, and no name.

    >>> is_number("10.0.0.1"), is_number("::1"), is_number("host-0")
    (True, True, False)
    """
    try:
        ipaddress.ip_address(host.split("%")[0])
    except ValueError:
        return False
    return True


def given_flags(argv: Sequence[str]) -> dict[str, str]:
    """Return those of `FLAGS` that a command line has.

    >>> given_flags(["--workdir=w", "--process_id=1", "--num_processes", "2"])
    {'process_id': '1', 'num_processes': '2'}
    """
    found = {}
    for position, argument in enumerate(argv):
        name, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name in FLAGS:
            found[name] = value if equals else next(iter(argv[position + 1 :]), "")
    return found


def find(flags: Mapping[str, str], environ: Mapping[str, str]) -> Place | None:
    """Return this process's place; None if it is alone.

    Args:
      flags: from `given_flags`; they come before the environment.
      environ: `os.environ`.

    Raises:
      UserError: if what is given is no place.
      EnvironmentProblem: if JAX knows the cluster and fails to find the place out.
    """
    shown = {name: f"--{name}" if name in flags else VARIABLES[name] for name in FLAGS}
    told = {
        name: environ[variable] for name, variable in VARIABLES.items() if environ.get(variable)
    } | dict(flags)
    rest: dict[str, Any] = {
        name: _seconds(shown[name], told[name])
        for name in ("start_timeout_s", "hang_timeout_s")
        if name in told
    }
    if "coordinator_bind_address" in told:
        rest["bind"] = _address(shown["coordinator_bind_address"], told["coordinator_bind_address"])
    who = [name for name in _WHO if name in told]
    if not who:
        return _detected(rest) if _may_be_one_of_many(environ) else None
    for name in _WHO:
        require(
            name in told,
            shown[name],
            None,
            f"{shown[who[0]]} is given too; give all of {', '.join(_WHO)} or none",
        )
    host, port = _address(shown["coordinator_address"], told["coordinator_address"])
    count = _number(shown["num_processes"], told["num_processes"], 1, 1 << 20)
    index = _number(shown["process_id"], told["process_id"], 0, count - 1)
    return Place(host, port, count, index, None, **rest) if count > 1 else None


def _may_be_one_of_many(environ: Mapping[str, str]) -> bool:
    """Return whether to ask at all: in a lone container of Kubernetes, for instance, JAX's question would fail."""
    from jax._src import cloud_tpu_init

    return cloud_tpu_init.running_in_cloud_tpu_vm or any(name in environ for name in _SIGNS)


def _detected(rest: Mapping[str, Any]) -> Place | None:
    """Ask JAX whether this is a process of a Cloud TPU slice, of a GKE or Slurm job, or of MPI."""
    from jax._src import clusters  # there is no public way to ask without starting

    seconds = int(rest.get("start_timeout_s", 60))
    try:
        address, count, index, local = clusters.ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, seconds
        )
    except Exception as error:  # whatever metadata servers and schedulers answer
        raise EnvironmentProblem(
            f"this process's place in its job cannot be found out ({' '.join(str(error).split())}); "
            f"give {', '.join(f'--{name}' for name in _WHO)}"
        ) from error
    if address is None or count is None or index is None or count == 1:
        return None
    host, port = _address("the coordinator's address that JAX found", address)
    return Place(host, port, count, index, None if local is None else tuple(local), **rest)


def _address(field: str, value: str) -> tuple[str, int]:
    host, _, port = value.rpartition(":")
    host, number = host.strip("[]"), _whole(port)
    if not (host and _may_be_asked_for(host) and 0 < number < 65535):
        raise UserError(f"{field} = {value!r}: give HOST:PORT of process 0, PORT from 1 to 65534")
    return host, number


def _may_be_asked_for(host: str) -> bool:
    """Return whether `socket` takes it for a name: `a..b` it does not."""
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False


def _number(field: str, value: str, least: int, most: int) -> int:
    number = _whole(value)
    if not least <= number <= most:
        raise UserError(f"{field} = {value!r}: give a whole number from {least} to {most}")
    return number


def _whole(value: str) -> int:
    """Return a whole number, or -1 if it is none; Python reads no longer ones than 4300 digits."""
    return int(value) if value.isdecimal() and len(value) < 20 else -1


def _seconds(field: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e7:
        raise UserError(f"{field} = {value!r}: give a number of seconds > 0")
    return seconds
