"""A process's place in its job: given by flags or environment variables, or found by JAX."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from lbopt import _jax_internals
from lbopt.errors import NO_VALUE, EnvironmentProblem, require
from lbopt.job._local_devices import given_devices, local_devices

JOB_FLAGS = {
    "coordinator_address": "HOST:PORT of process 0 in a job of several processes; PORT+1 is used "
    "too (or JAX_COORDINATOR_ADDRESS)",
    "coordinator_bind_address": "HOST:PORT where process 0 listens, if not at "
    "--coordinator_address (or JAX_COORDINATOR_BIND_ADDRESS)",
    "num_processes": "number of processes in the job (or JAX_NUM_PROCESSES); not needed on Cloud "
    "TPU, GKE or Slurm, nor are --coordinator_address and --process_id",
    "process_id": "index of this process, from 0 (or JAX_PROCESS_ID)",
    "start_timeout_s": "seconds to wait for the other processes at the start (default 60, or "
    "LBOPT_START_TIMEOUT_S)",
    "hang_timeout_s": "seconds without progress in any process before the job is ended (default "
    "900, or LBOPT_HANG_TIMEOUT_S)",
    "job_secret_file": "file with the secret that all processes of the job share, readable by you "
    "alone (or LBOPT_JOB_SECRET_FILE, LBOPT_JOB_SECRET; default ~/.config/lbopt/job_secret, "
    "created if missing)",
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
_CLUSTER_VARIABLES = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "JOB_COMPLETION_INDEX")
"""Set by Slurm, Open MPI and indexed jobs of Kubernetes."""
_IDENTITY = ("coordinator_address", "num_processes", "process_id")
"""The flags that say which process this is: all of them are given, or none."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A process's place in a job.

    Attributes:
      host: Host of process 0.
      port: Port of the job's hub on that host. JAX's coordination service uses the next port.
      count: Number of processes in the job.
      index: Index of this process, from 0.
      local_device_ids: Devices of this host that this process uses; None for all of them.
      start_timeout_s: Seconds to wait for the other processes at the start.
      hang_timeout_s: Seconds without progress in any process before the job is ended.
      bind: (host, port) where process 0 listens; None for `host` and `port`.
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
        """The flag that says where process 0 listens, and the host and port in it.

        Only process 0 uses `bind`; the others connect to `host` and `port`.
        """
        if self.bind and self.index == 0:
            return ("coordinator_bind_address", *self.bind)
        return "coordinator_address", self.host, self.port

    @property
    def jax_address(self) -> str:
        """HOST:PORT to which the processes connect for JAX's coordination service."""
        return _joined(self.host, self.port + 1)

    @property
    def jax_bind_address(self) -> str:
        """HOST:PORT at which JAX's coordination service listens in process 0."""
        host, port = self.bind or (self.host, self.port)
        return _joined(host, port + 1)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_number(host: str) -> bool:
    """Return whether a host is given by a numeric IP address, and not by a name.

    >>> is_number("10.0.0.1"), is_number("::1"), is_number("host-0")
    (True, True, False)
    """
    try:
        ipaddress.ip_address(host.split("%")[0])
    except ValueError:
        return False
    return True


def given_job_flags(argv: Sequence[str]) -> dict[str, str]:
    """Return the flags of `JOB_FLAGS` that a command line contains, with their values.

    >>> given_job_flags(["--workdir=w", "--process_id=1", "--num_processes", "2"])
    {'process_id': '1', 'num_processes': '2'}
    """
    found = {}
    for position, argument in enumerate(argv):
        name, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name in JOB_FLAGS:
            found[name] = value if equals else next(iter(argv[position + 1 :]), "")
    return found


def find_place(flags: Mapping[str, str], environ: Mapping[str, str]) -> Place | None:
    """Return this process's place in its job; None if it is the only process.

    Args:
      flags: The flags of the job, from `given_job_flags`. A flag overrides its environment
        variable.
      environ: The environment variables, `os.environ`.

    Raises:
      UserError: If a flag or variable has a wrong value, or only some of `_IDENTITY` are given.
      EnvironmentProblem: If JAX recognizes a cluster but cannot find this process's place in it, or
        `JAX_LOCAL_DEVICE_IDS` has no numbers.
    """
    # An error names what the user set: the flag if it is given, or else the variable.
    shown = {name: f"--{name}" if name in flags else VARIABLES[name] for name in JOB_FLAGS}
    given = {
        name: environ[variable] for name, variable in VARIABLES.items() if environ.get(variable)
    } | dict(flags)

    own = given_devices(environ)
    options: dict[str, Any] = {
        name: _seconds(shown[name], given[name])
        for name in ("start_timeout_s", "hang_timeout_s")
        if name in given
    }
    if "coordinator_bind_address" in given:
        options["bind"] = _address(
            shown["coordinator_bind_address"], given["coordinator_bind_address"]
        )

    identity = [name for name in _IDENTITY if name in given]
    if not identity:
        return _detected(options, environ, own) if _may_be_in_a_cluster(environ) else None
    for name in _IDENTITY:
        require(
            name in given,
            shown[name],
            None,
            f"{shown[identity[0]]} is given too; give all of {', '.join(_IDENTITY)} or none",
            code="missing",
        )

    host, port = _address(shown["coordinator_address"], given["coordinator_address"])
    count = _number(shown["num_processes"], given["num_processes"], 1, 1 << 20)
    index = _number(shown["process_id"], given["process_id"], 0, count - 1)
    return Place(host, port, count, index, own, **options) if count > 1 else None


def _may_be_in_a_cluster(environ: Mapping[str, str]) -> bool:
    """Return whether JAX's cluster detection may be asked.

    It fails, instead of answering "no", in a single container of Kubernetes for instance.
    """
    in_cluster = any(name in environ for name in _CLUSTER_VARIABLES)
    return in_cluster or _jax_internals.runs_on_cloud_tpu()


def _detected(
    options: Mapping[str, Any], environ: Mapping[str, str], own: tuple[int, ...] | None
) -> Place | None:
    """Return the place that JAX finds in a Cloud TPU slice, a GKE or Slurm job, or MPI; or None.

    `own` has the devices that the user has named for this process; None if they are not named.
    """
    seconds = int(options.get("start_timeout_s", 60))
    try:
        address, count, index, local = _jax_internals.find_in_cluster(seconds)
    except Exception as error:  # whatever metadata servers and schedulers answer
        raise EnvironmentProblem(
            "--coordinator_address",
            NO_VALUE,
            f"JAX cannot find it in this cluster ({' '.join(str(error).split())}); give it, "
            "--num_processes and --process_id",
            code="resource",
        ) from error
    if address is None or count is None or index is None or count == 1:
        return None

    host, port = _address("--coordinator_address", address)
    # JAX finds a process's rank on its host under Slurm and MPI only.
    devices = own or (None if local is None else local_devices(environ))
    return Place(host, port, count, index, devices, **options)


def _address(field: str, value: str) -> tuple[str, int]:
    host, _, port_text = value.rpartition(":")
    host = host.strip("[]")
    port = _whole(port_text)
    require(
        host and _may_be_looked_up(host) and 0 < port < 65535,
        field,
        value,
        "give HOST:PORT of process 0, PORT from 1 to 65534",
    )
    return host, port


def _may_be_looked_up(host: str) -> bool:
    """Return whether `socket` can encode a host's name; it cannot encode `a..b`, for instance."""
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False


def _number(field: str, value: str, least: int, most: int) -> int:
    number = _whole(value)
    require(least <= number <= most, field, value, f"give a whole number from {least} to {most}")
    return number


def _whole(value: str) -> int:
    """Return a non-negative whole number, or -1 if the text is not one.

    Numbers of 20 and more digits count as wrong: Python refuses to read more than 4300 digits.
    """
    return int(value) if value.isdecimal() and len(value) < 20 else -1


def _seconds(field: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    require(0 < seconds < 1e7, field, value, "give a number of seconds > 0 and < 1e7")
    return seconds
