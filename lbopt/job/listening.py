"""Where process 0 of a job listens: at the coordinator's addresses, and nowhere else."""

from __future__ import annotations

import errno
import ipaddress
import resource
import socket

from lbopt.errors import EnvironmentProblem
from lbopt.job.place import Place, is_number

_OTHER_FILES = 64


def listen(place: Place) -> tuple[list[socket.socket], bool]:
    """Listen at every address that the coordinator's name has on this host, and there only; return also whether it is everywhere.

    A name may stand for a loopback address on the host that has it, and there alone (Debian writes 127.0.1.1 into /etc/hosts): then
    the others look for process 0 at an address that cannot be known here.
    """
    flag, host, port = place.listens
    found = dict.fromkeys(
        (family, at) for family, *_, at in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    )
    named = not (
        place.bind
        or is_number(host)
        or host.split(".")[0] in ("localhost", "ip6-localhost", "ip6-loopback")
    )
    everywhere = named and all(
        ipaddress.ip_address(str(at[0]).split("%")[0]).is_loopback for _, at in found
    )
    listeners, problem = [], None
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
    if listeners and (problem is None or problem.errno != errno.EADDRINUSE):
        return listeners, everywhere
    for listener in listeners:
        listener.close()
    assert problem is not None
    if problem.errno == errno.EADDRNOTAVAIL:
        fix = (
            "give one that it has"
            if place.bind
            else "give all processes one that it has, or say where it listens with --coordinator_bind_address"
        )
        line = f"--{flag} = '{host}:{port}': this is process 0, and its host has no such address; {fix}"
        raise EnvironmentProblem(line) from problem
    raise EnvironmentProblem(
        f"--{flag}: process 0 cannot listen at port {port} ({problem.strerror}); "
        "end what uses it, or give all processes another port"
    ) from problem


def allow_connections(count: int) -> None:
    """Raise this process's limit of open files, if it is too low for so many."""
    needed = count + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise EnvironmentProblem(
                f"ulimit -n: process 0 may open {hard} files, and {needed} are needed for its job; raise it"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
