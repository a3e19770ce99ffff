"""The guard of a process: it starts the process that computes, ends it when the job ends, and says why in one line.

It is a process of its own because what it watches can be past helping itself: aborted by JAX's runtime, killed for its memory,
stuck in a collective that a dead peer will never join.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
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
from lbopt.job import member, secret as secrets
from lbopt.job.hub import BEAT_S, SILENT_S, Hub
from lbopt.job.place import Place, given_flags
from lbopt.job.wire import CHANGED, MOST_HELLO_BYTES, Wire
from lbopt.shown import one_line

_RETRY_S = 0.2
_FIRST_WORD_S = 10.0
_SENDING_S = SILENT_S / 2
"""How long hub and child may leave unread what they are told: who waits for longer hears nobody."""
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
    secret = secrets.find(given_flags(arguments[1:]), os.environ)
    with _Signals() as signals:
        hub = _open_hub(place, secret, signals) if place.index == 0 else None
        if hub is not None and hub.everywhere:
            line = f"{place.host} is a loopback address here, so process 0 listens on every interface; --coordinator_bind_address names one"
            _say(arguments[0], f"--coordinator_address = '{place.host}:{place.port}': {line}")
        wire = _connect(place, secret, hub, signals)
        code = _Guard(
            place, wire, arguments, saves, signals, hub is not None and hub.everywhere
        ).watch()
    if hub is not None:
        hub.join(SILENT_S)
        if closed := hub.strangers():
            _say(arguments[0], closed)
    return code


def _open_hub(place: Place, secret: bytes, signals: _Signals) -> Hub:
    """Listen; if somebody does already, and is process 0 too, let all who wait there know that there are two."""
    until = time.monotonic() + place.start_timeout_s
    while True:
        try:
            return Hub(place, secret)
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN or time.monotonic() > until or signals.any():
                raise _no_such_host(place) from error
            time.sleep(_RETRY_S)
        except EnvironmentProblem:
            with contextlib.suppress(OSError, EnvironmentProblem):
                wire = _greeted(
                    socket.create_connection((place.host, place.port), timeout=1),
                    place,
                    secret,
                    signals,
                )
                _next(wire, signals)
                wire.close()
            raise


def _no_such_host(place: Place) -> UserError:
    flag, host, port = place.listens
    return UserError(
        f"--{flag} = '{host}:{port}': there is no host of that name; give HOST:PORT of process 0"
    )


def _say(command: str, line: str) -> None:
    print(one_line(f"lbopt {command}: {line}"), file=sys.stderr, flush=True)


class _Signals:
    """Remember SIGTERM and SIGHUP (not if nohup has it ignored); pass SIGINT on, which a terminal sends to this process group only."""

    def __init__(self) -> None:
        self.stop = self.interrupt = False
        self._ends = [signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            self._ends.append(signal.SIGHUP)

    def any(self) -> bool:
        """Return whether one has come."""
        return self.stop or self.interrupt

    def __enter__(self) -> _Signals:
        for number in self._ends:
            signal.signal(number, lambda *_: setattr(self, "stop", True))
        signal.signal(signal.SIGINT, lambda *_: setattr(self, "interrupt", True))
        return self

    def __exit__(self, *exception: object) -> None:
        for number in (*self._ends, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)


def _connect(place: Place, secret: bytes, hub: Hub | None, signals: _Signals) -> Wire:
    """Answer the roll call: connect to the hub, trying until the time to start is over; process 0 asks its own."""
    address = f"{place.host}:{place.port}"
    until, said = time.monotonic() + place.start_timeout_s, time.monotonic() + 5
    while True:
        try:
            connection = socket.create_connection(
                hub.address if hub else (place.host, place.port), timeout=5
            )
            return _greeted(connection, place, secret, signals)
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN:
                raise _no_such_host(place) from error
            reason: OSError = error
        except OSError as error:
            reason = error
        if signals.any() or time.monotonic() > until:
            why = "stopped" if signals.any() else f"{place.start_timeout_s:.0f} s"
            raise EnvironmentProblem(
                f"--coordinator_address = {address!r}: process 0 does not answer there ({why}; {reason.strerror or reason}); "
                "start it on that host, or give the address that it has"
            ) from reason
        if time.monotonic() > said:
            said = float("inf")
            print(one_line(f"waiting for process 0 at {address}"), file=sys.stderr, flush=True)
        time.sleep(_RETRY_S)


def _greeted(connection: socket.socket, place: Place, secret: bytes, signals: _Signals) -> Wire:
    """Prove to the hub, and let it prove, that both know the job's secret.

    Raises:
      EnvironmentProblem: if what listens there does not.
      OSError: if it closes the connection: it may have had too many.
    """
    at = f"--coordinator_address: what listens at {place.host}:{place.port}"
    nobody = EnvironmentProblem(
        f"{at} is no process 0 of lbopt; start process 0 there, or give another port"
    )
    wire = Wire(connection, MOST_HELLO_BYTES)
    try:
        asked = _next(wire, signals)
        if (
            asked is not None
            and type(asked.get("lbopt")) is int
            and asked["lbopt"] != secrets.PROTOCOL
        ):
            raise EnvironmentProblem(
                f"{at} has another version of lbopt than this process; install one version on all hosts"
            )
        if asked is None or not secrets.is_challenge(asked):
            raise nobody
        where = f"{socket.gethostname()}, pid {os.getpid()}"
        nonce, hello = secrets.answer(secret, asked["nonce"], place.index, place.count, where)
        wire.send(**hello)
        proof = _next(wire, signals)
        if proof is None:
            raise nobody
        if "refused" in proof:
            raise EnvironmentProblem(
                f"{at} has another secret than this process; {secrets.HOW} (without either it is in each host's home folder)"
            )
        if not secrets.is_hub(secret, asked["nonce"], nonce, proof):
            raise EnvironmentProblem(
                f"{at} does not know the job's secret; {secrets.HOW}, and see what listens there"
            )
    except BaseException:
        wire.close()
        raise
    secrets.trust(wire, secret, asked["nonce"], nonce, is_hub=False)
    wire.settimeout(_SENDING_S)
    wire.send(here=True)
    return wire


def _next(wire: Wire, signals: _Signals) -> dict[str, Any] | None:
    """Return the next message; None if what comes is none, or nothing comes.

    Raises:
      OSError: if the connection ends, or a signal comes.
    """
    until = time.monotonic() + _FIRST_WORD_S
    wire.settimeout(_RETRY_S)
    while time.monotonic() < until:
        if signals.any():
            raise InterruptedError(errno.EINTR, "asked, it has not answered yet")
        try:
            messages = wire.receive(or_wait=True)
        except TimeoutError:
            continue
        except ValueError:
            return None
        if messages is None:
            raise ConnectionResetError(errno.ECONNRESET, "what listens there closes the connection")
        if messages:
            return messages[0] if len(messages) == 1 else None
    return None


class _Guard:
    def __init__(
        self,
        place: Place,
        wire: Wire,
        arguments: Sequence[str],
        saves: bool,
        signals: _Signals,
        everywhere: bool,
    ):
        self._everywhere = everywhere
        self._place, self._hub, self._arguments, self._signals = place, wire, arguments, signals
        self._saves = saves
        self._child: subprocess.Popen[bytes] | None = None
        self._member: Wire | None = None
        self._state: dict[str, Any] = {"beat": 0, "doing": "starting", "patience": member.STARTING}
        self._failed: int | None = None
        self._has_spoken = self._asked = self._forwarded = False
        self._heard = self._beaten = self._spoke = self._looked = time.monotonic()

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
            if wire is self._hub:
                try:
                    messages = self._hub.receive()
                except ValueError:
                    return self._hub_is_gone(CHANGED)
                if messages is None:
                    return self._hub_is_gone("it was killed, it stands still, or its machine ended")
                self._heard = time.monotonic()
                for message in messages:
                    code = self._from_hub(message)
                    if code is not None:
                        return code
            elif (messages := _received(wire)) is None:
                self._selector.unregister(wire)
            else:
                for message in messages:
                    self._from_member(message)
        return self._look(time.monotonic())

    def _look(self, now: float) -> int | None:
        suspended_s, self._looked = (
            max(now - self._looked - BEAT_S, 0),
            now,
        )  # by a scheduler, for instance, as its child was
        self._heard += suspended_s
        self._spoke += suspended_s
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
            self._fail(
                code, message["line"], "said" if code in (EXIT_USER, EXIT_ENVIRONMENT) else "bug"
            )
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
        self._member.settimeout(_SENDING_S)
        self._selector.register(self._member, selectors.EVENT_READ)
        environment = {
            **os.environ,
            member.VARIABLE: member.describe(self._place, theirs.fileno(), self._everywhere),
        }
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
            self._fail(
                EXIT_ENVIRONMENT,
                _killed_by(-code),
                "aborted" if code == -signal.SIGABRT else "died",
            )
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
        if (
            not self._has_spoken or kind == "died"
        ):  # of what came of a death the child may have spoken
            self._say(line)
        elif self._failed is not None:
            code = self._failed
        self._kill(with_traceback=kind == "hung")
        self._hub.send(down=True)
        return code

    def _hub_is_gone(self, why: str) -> int:
        self._kill()
        self._say(
            f"process 0 of {self._place.count} ({self._place.host}:{self._place.port}) is gone: {why}"
        )
        return EXIT_ENVIRONMENT

    def _say(self, line: str) -> None:
        _say(self._arguments[0], line)

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
