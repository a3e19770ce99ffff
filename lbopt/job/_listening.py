"""The sockets of a job's hub: they listen at the coordinator's addresses, and nowhere else."""

from __future__ import annotations

import errno
import ipaddress
import resource
import socket

from lbopt.errors import EnvironmentProblem
from lbopt.job._place import Place, is_number

_OTHER_FILES = 64
"""Files that process 0 may have open beside its connections."""


def listen(place: Place) -> tuple[list[socket.socket], bool]:
    """Listen at every address that the coordinator's host name has on this host.

    If the name has loopback addresses only, listen on every interface: Debian's /etc/hosts gives a
    host's own name the address 127.0.1.1, and the address at which the other hosts look for
    process 0 cannot be known here.

    Returns:
      The listening sockets, and whether they listen on every interface.

    Raises:
      socket.gaierror: If the host name cannot be resolved.
      EnvironmentProblem: If this host does not have the address, or the port is in use.
    """
    _, host, port = place.listens
    found = dict.fromkeys(
        (family, at) for family, *_, at in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    )

    # A loopback address that is given by its number or usual name is intended.
    is_host_name = not (
        place.bind
        or is_number(host)
        or host.split(".")[0] in ("localhost", "ip6-localhost", "ip6-loopback")
    )
    everywhere = is_host_name and all(
        ipaddress.ip_address(str(at[0]).split("%")[0]).is_loopback for _, at in found
    )

    listeners = []
    problem = None
    for family, at in {(socket.AF_INET, ("", port)): None} if everywhere else found:
        try:
            both = family == socket.AF_INET6 and at[0] == "::"
            listeners.append(
                socket.create_server(
                    at, family=family, backlog=max(place.count, 128), dualstack_ipv6=both
                )
            )
        except OSError as error:
            problem = error
            if error.errno == errno.EADDRINUSE:
                break

    # One address is enough, but a port in use at any of them belongs to another process 0.
    if listeners and (problem is None or problem.errno != errno.EADDRINUSE):
        return listeners, everywhere
    for listener in listeners:
        listener.close()
    assert problem is not None
    raise _cannot_listen(place, problem) from problem


def _cannot_listen(place: Place, problem: OSError) -> EnvironmentProblem:
    flag, host, port = place.listens
    if problem.errno != errno.EADDRNOTAVAIL:
        reason = f"process 0 cannot listen at this port ({problem.strerror}); "
        fix = "end the program that uses it, or give all processes another port"
    else:
        reason = "process 0 runs here, and this host has no such address; "
        if place.bind:
            fix = "give an address of this host"
        else:
            fix = (
                "give all processes an address of this host, or say where process 0 listens with "
                "--coordinator_bind_address"
            )
    return EnvironmentProblem(f"--{flag}", f"{host}:{port}", reason + fix, code="resource")


def allow_connections(count: int) -> None:
    """Raise this process's limit of open files, if it is too low for this number of connections.

    Raises:
      EnvironmentProblem: If the limit may not be raised that far.
    """
    needed = count + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise EnvironmentProblem(
                "ulimit -n",
                hard,
                f"process 0 opens up to {needed} files for its job; raise it to that",
                code="resource",
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
