"""The guard of a process: it starts the process that computes, ends it when the job ends, and says why in one line.

It is a process of its own because what it watches can be past helping itself: aborted by JAX's runtime, killed for its memory,
stuck in a collective that a dead peer will never join.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from lbopt.errors import EXIT_ENVIRONMENT, EXIT_PREEMPTED, EXIT_USER, EnvironmentProblem, UserError
from lbopt.job import member
from lbopt.job.hub import BEAT_S, SILENT_S, Hub
from lbopt.job.place import Place
from lbopt.job.wire import Wire
from lbopt.shown import one_line

_RETRY_S = 0.2
_FIRST_WORD_S = 10.0
_SELF_S = 5.0
_TRACEBACK_S = 3.0
_LEAVING_S = 3.0
_PR_SET_PDEATHSIG = 1
_INTERRUPTED, _STOPPED = 128 + signal.SIGINT, 128 + signal.SIGTERM


def run(place: Place, arguments: Sequence[str], saves: bool) -> int:
    """Run a command as one process of a job and return its exit code.

    Args:
      place: of this process.
      arguments: of `lbopt`, the command first.
      saves: the command ends by itself when it is asked to stop, with its state saved; any other is ended.

    Raises:
      UserError, EnvironmentProblem: if the job does not come together.
    """
    hub = _open_hub(place) if place.index == 0 else None
    with _Signals() as signals:
        wire = _connect(place, signals)
        code = _Guard(place, wire, arguments, saves, signals).watch()
    if hub is not None:
        hub.join(SILENT_S)
    return code


def _open_hub(place: Place) -> Hub:
    """Listen; if somebody does already, and is process 0 too, let all who wait there know that there are two."""
    try:
        return Hub(place)
    except EnvironmentProblem:
        with contextlib.suppress(OSError):
            wire = Wire(socket.create_connection((place.host, place.port), timeout=1))
            _introduce(wire, place)
            wire.receive()
            wire.close()
        raise


class _Signals:
    """Remember SIGTERM and SIGHUP; pass SIGINT on, which a terminal sends to this process group only."""

    def __init__(self) -> None:
        self.stop = self.interrupt = False

    def __enter__(self) -> _Signals:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: setattr(self, "stop", True))
        signal.signal(signal.SIGINT, lambda *_: setattr(self, "interrupt", True))
        return self

    def __exit__(self, *exception: object) -> None:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)


def _connect(place: Place, signals: _Signals) -> Wire:
    """Answer the roll call: connect to the hub, trying until the time to start is over; process 0's own hub listens already."""
    address = f"{place.host}:{place.port}"
    to_itself = place.index == 0 and _is_number(place.host)
    patience_s = min(_SELF_S, place.start_timeout_s) if to_itself else place.start_timeout_s
    until, said = time.monotonic() + patience_s, time.monotonic() + 5
    while True:
        try:
            wire = Wire(socket.create_connection((place.host, place.port), timeout=5))
            break
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN:
                raise UserError(
                    f"--coordinator_address = {address!r}: there is no host of that name; give HOST:PORT of process 0"
                ) from error
            reason: OSError = error
        except OSError as error:
            reason = error
        if signals.stop or signals.interrupt or time.monotonic() > until:
            why = "stopped" if signals.stop or signals.interrupt else f"{patience_s:.0f} s"
            why += f"; {reason.strerror or reason}"
            if to_itself:
                line = f"this is process 0, and it does not reach itself there ({why}); give all processes an address that this host has"
            else:
                line = (
                    f"process 0 does not answer there ({why}); start it on that host, or give the address that it has"
                )
            raise EnvironmentProblem(f"--coordinator_address = {address!r}: {line}") from reason
        if time.monotonic() > said:
            said = float("inf")
            print(f"waiting for process 0 at {address}", file=sys.stderr, flush=True)
        time.sleep(_RETRY_S)
    wire.settimeout(None)
    _introduce(wire, place)
    return wire


def _is_number(host: str) -> bool:
    """Return whether it is an address of numbers; what a name stands for may become right with time."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _introduce(wire: Wire, place: Place) -> None:
    wire.send(index=place.index, count=place.count, where=f"{socket.gethostname()}, pid {os.getpid()}")


class _Guard:
    def __init__(self, place: Place, wire: Wire, arguments: Sequence[str], saves: bool, signals: _Signals):
        self._place, self._hub, self._arguments, self._signals = place, wire, arguments, signals
        self._saves = saves
        self._child: subprocess.Popen[bytes] | None = None
        self._member: Wire | None = None
        self._state: dict[str, Any] = {"beat": 0, "doing": "starting", "patience": member.STARTING}
        self._failed: int | None = None
        self._has_spoken = self._asked = self._forwarded = False
        self._silent = True
        self._begun = self._heard = self._beaten = self._spoke = time.monotonic()

    def watch(self) -> int:
        """Serve child and hub until one of them ends."""
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._hub, selectors.EVENT_READ)
            try:
                while True:
                    code = self._turn()
                    if code is not None:
                        return code
            finally:
                self._kill()
                self._hub.close()

    def _turn(self) -> int | None:
        """Hear what has come, look at the clock and the child; the exit code, if it is over."""
        for key, _ in self._selector.select(_RETRY_S):
            wire = key.fileobj
            messages = _received(wire)
            if wire is self._hub:
                if messages is None and self._silent:
                    self._begun = 0.0
                    self._selector.unregister(wire)
                    continue
                if messages is None:
                    return self._hub_is_gone("it was killed, or its machine ended")
                self._heard, self._silent = time.monotonic(), False
                for message in messages:
                    code = self._from_hub(message)
                    if code is not None:
                        return code
            elif messages is None:
                self._selector.unregister(wire)
            else:
                for message in messages:
                    self._from_member(message)
        return self._look(time.monotonic())

    def _look(self, now: float) -> int | None:
        if self._silent and now - self._begun > _FIRST_WORD_S:
            self._say(
                f"--coordinator_address: what listens at {self._place.host}:{self._place.port} is no process 0 of lbopt; "
                "start process 0 there, or give another port"
            )
            return EXIT_ENVIRONMENT
        if now - self._heard > SILENT_S:
            return self._hub_is_gone(f"it has not been heard of for {SILENT_S:.0f} s")
        if now - self._beaten > BEAT_S:
            self._beaten = now
            self._hub.send(**self._state, silent_s=now - self._spoke if self._child else 0.0)
        if self._signals.stop and not self._asked:
            self._asked = True
            if not self._saves:
                self._fail(_STOPPED, "was stopped", "said")
            elif self._child is None:
                line = "was stopped before the start; run the same command again"
                self._fail(EXIT_PREEMPTED, line, "said")
            else:
                self._hub.send(stop=True)
        if self._signals.interrupt and not self._forwarded:
            self._forwarded = True
            if self._child is None:
                self._fail(_INTERRUPTED, "was interrupted", "said")
            else:
                self._child.send_signal(signal.SIGINT)
        if self._child is not None and self._child.poll() is not None and self._failed is None:
            return self._child_ended(self._child.returncode)
        return None

    def _from_hub(self, message: dict[str, Any]) -> int | None:
        if "started" in message:
            self._start()
        elif "end" in message:
            return self._told_to_end(**message["end"])
        elif "beat" not in message and self._member is not None:
            self._member.send(**message)
        return None

    def _from_member(self, message: dict[str, Any]) -> None:
        if "beat" in message:
            self._state, self._spoke = message, time.monotonic()
        elif "failed" in message:
            self._has_spoken = True
            code = message["failed"]
            self._fail(code, message["line"], "said" if code in (EXIT_USER, EXIT_ENVIRONMENT) else "bug")
        else:
            self._hub.send(**message)

    def _fail(self, code: int, line: str, kind: str) -> None:
        """Report a failure; the hub knows whether it is the cause of others or their consequence, and tells when to end."""
        self._failed = code
        self._hub.send(failed=code, line=line, kind=kind)

    def _start(self) -> None:
        self._spoke = time.monotonic()
        ours, theirs = socket.socketpair()
        self._member = Wire(ours)
        self._selector.register(self._member, selectors.EVENT_READ)
        environment = {**os.environ, member.VARIABLE: member.describe(self._place, theirs.fileno())}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "lbopt", *self._arguments],
            env=environment,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        theirs.close()

    def _child_ended(self, code: int) -> int | None:
        self._hear_the_rest()
        if code in (0, EXIT_PREEMPTED):
            self._hub.send(done=True)
            return code
        if self._failed is None and code == -signal.SIGTERM and not self._saves:
            self._fail(_STOPPED, "was stopped", "said")
        elif self._failed is None and code < 0:
            self._fail(EXIT_ENVIRONMENT, _killed_by(-code), "aborted" if code == -signal.SIGABRT else "died")
        elif self._failed is None:
            self._fail(code, f"ended with exit code {code}", "bug")
        return None

    def _hear_the_rest(self) -> None:
        """Hear what the child said before it ended."""
        if self._member is not None:
            self._member.settimeout(0)
            while (messages := _received(self._member)) is not None:
                for message in messages:
                    self._from_member(message)

    def _told_to_end(self, code: int, line: str, kind: str) -> int:
        if self._member is not None and self._child is not None and self._has_spoken:
            self._member.send(release=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_LEAVING_S)
        if not self._has_spoken or kind == "died":  # of what came of a death the child may have spoken
            self._say(line)
        elif self._failed is not None:
            code = self._failed
        self._kill(with_traceback=kind == "hung")
        self._hub.send(down=True)
        return code

    def _hub_is_gone(self, why: str) -> int:
        self._kill()
        self._say(f"process 0 of {self._place.count} ({self._place.host}:{self._place.port}) is gone: {why}")
        return EXIT_ENVIRONMENT

    def _say(self, line: str) -> None:
        print(f"lbopt {self._arguments[0]}: {one_line(line)}", file=sys.stderr, flush=True)

    def _kill(self, with_traceback: bool = False) -> None:
        """End the child and what it has started; after a hang let it say first where it stands."""
        child, self._child = self._child, None
        if child is None:
            return
        if with_traceback and child.poll() is None:
            child.send_signal(signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_TRACEBACK_S)
        with contextlib.suppress(
            ProcessLookupError, PermissionError
        ):  # it has a session of its own, whose number is its id
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _received(wire: Any) -> list[dict[str, Any]] | None:
    try:
        return wire.receive()
    except ValueError:
        return None


def _killed_by(number: int) -> str:
    name = signal.Signals(number).name
    hints = {
        "SIGKILL": "was killed by SIGKILL: by somebody, or for want of memory",
        "SIGABRT": "was aborted: a library gave up, and said why above",
    }
    return hints.get(name, f"was ended by {name}")


def _die_with_parent() -> None:
    """Let the kernel end the child when its guard is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
