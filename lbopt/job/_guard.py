"""The guard of a process: it starts the process that computes, its child, and ends it with the job.

The guard is a process of its own so that it survives what it watches: a child that JAX's runtime
aborts, that is killed for its memory, or that is stuck in a collective with a dead peer. It says in
one line why the job has ended.
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

from lbopt._shown import one_line
from lbopt.errors import EXIT_ENVIRONMENT, EXIT_PREEMPTED, EXIT_USER, EnvironmentProblem, UserError
from lbopt.job import _member, _secret
from lbopt.job._hub import BEAT_S, SILENT_S, Hub
from lbopt.job._place import Place, given_job_flags
from lbopt.job._wire import CHANGED, MOST_HELLO_BYTES, Wire

_RETRY_S = 0.2
_GREETING_S = 10.0
"""Seconds that the hub may take to answer each message of the greeting."""
_SENDING_S = SILENT_S / 2
"""Seconds that hub and child may leave a message unread; a guard that waits longer seems dead."""
_TRACEBACK_S = 3.0
"""Seconds for a child that hangs to print its stack."""
_LEAVING_S = 3.0
"""Seconds for a child that has reported its error to end by itself."""
_PR_SET_PDEATHSIG = 1
_INTERRUPTED = 128 + signal.SIGINT
_STOPPED = 128 + signal.SIGTERM


def run_guarded(place: Place, arguments: Sequence[str], saves: bool) -> int:
    """Run a command as one process of a job and return its exit code.

    Args:
      place: The place of this process in the job.
      arguments: The arguments of `lbopt`, the command first.
      saves: Whether the command saves its state and ends by itself when it is asked to stop; any
        other command is killed.

    Raises:
      UserError: If an address, a secret or a host name in the flags is wrong.
      EnvironmentProblem: If the processes of the job do not find each other.
    """
    secret = _secret.find(given_job_flags(arguments[1:]), os.environ)
    with _Signals() as signals:
        hub = _open_hub(place, secret, signals) if place.index == 0 else None
        everywhere = hub is not None and hub.everywhere
        if everywhere:
            _say(
                arguments[0],
                f"--coordinator_address = '{place.host}:{place.port}': {place.host} is a loopback "
                "address on this host, so process 0 listens on every interface; choose one with "
                "--coordinator_bind_address",
            )

        wire = _connect(place, secret, hub, signals)
        code = _Guard(place, wire, arguments, saves, signals, everywhere).watch()

    if hub is not None:
        # The other processes still have to be told how the job has ended.
        hub.join(SILENT_S)
        if closed := hub.strangers():
            _say(arguments[0], closed)
    return code


def _open_hub(place: Place, secret: bytes, signals: _Signals) -> Hub:
    """Return the hub of the job, listening.

    If another process 0 listens at the address, greet it before the error is raised: its hub then
    tells all of the job that two processes have one index.
    """
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
                connection = socket.create_connection((place.host, place.port), timeout=1)
                wire = _greeted(connection, place, secret, signals)
                _next(wire, signals)
                wire.close()
            raise


def _no_such_host(place: Place) -> UserError:
    flag, host, port = place.listens
    return UserError(
        f"--{flag}",
        f"{host}:{port}",
        "there is no host of that name; give HOST:PORT of process 0",
        code="missing",
    )


def _say(command: str, line: str) -> None:
    print(one_line(f"lbopt {command}: {line}"), file=sys.stderr, flush=True)


class _Signals:
    """Records which signals have come, for the guard to act on.

    SIGTERM and SIGHUP ask the job to stop; a SIGHUP that nohup ignores stays ignored. SIGINT has to
    be passed on to the child: a terminal sends it to the guard's process group only.
    """

    def __init__(self) -> None:
        self.stop = self.interrupt = False
        self._stopping = [signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            self._stopping.append(signal.SIGHUP)

    def any(self) -> bool:
        """Return whether a signal has come."""
        return self.stop or self.interrupt

    def __enter__(self) -> _Signals:
        for number in self._stopping:
            signal.signal(number, lambda *_: setattr(self, "stop", True))
        signal.signal(signal.SIGINT, lambda *_: setattr(self, "interrupt", True))
        return self

    def __exit__(self, *exception: object) -> None:
        for number in (*self._stopping, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)


def _connect(place: Place, secret: bytes, hub: Hub | None, signals: _Signals) -> Wire:
    """Answer the roll call: connect to the hub, retrying until the start's timeout.

    Args:
      place: The place of this process.
      secret: The job's secret.
      hub: The hub in this process; None in all processes but 0.
      signals: The signals that end the attempt.

    Raises:
      UserError: If the host name does not exist.
      EnvironmentProblem: If process 0 does not answer, or something else does.
    """
    address = f"{place.host}:{place.port}"
    until = time.monotonic() + place.start_timeout_s
    say_after = time.monotonic() + 5
    while True:
        try:
            connection = socket.create_connection(
                hub.address if hub else (place.host, place.port), timeout=5
            )
            return _greeted(connection, place, secret, signals)
        except socket.gaierror as error:
            # A name server that does not answer yet may do so later; an unknown name stays unknown.
            if error.errno != socket.EAI_AGAIN:
                raise _no_such_host(place) from error
            problem: OSError = error
        except OSError as error:
            # Process 0 may start later than this one, and a full hub closes new connections.
            problem = error

        if signals.any() or time.monotonic() > until:
            ended_by = "stopped" if signals.any() else f"{place.start_timeout_s:.0f} s"
            raise EnvironmentProblem(
                "--coordinator_address",
                address,
                f"process 0 does not answer there ({ended_by}; {problem.strerror or problem}); "
                "start process 0 on that host, or give its address",
                code="resource",
            ) from problem
        if time.monotonic() > say_after:
            say_after = float("inf")
            print(one_line(f"waiting for process 0 at {address}"), file=sys.stderr, flush=True)
        time.sleep(_RETRY_S)


def _greeted(connection: socket.socket, place: Place, secret: bytes, signals: _Signals) -> Wire:
    """Return an authenticated connection, after both ends have proven that they know the secret.

    Raises:
      EnvironmentProblem: If the other end is not a hub with the same secret and protocol.
      OSError: If the other end closes the connection; a hub does so while it has too many.
    """

    def refusal(reason: str) -> EnvironmentProblem:
        address = f"{place.host}:{place.port}"
        return EnvironmentProblem("--coordinator_address", address, reason, code="mismatch")

    not_a_hub = refusal(
        "the program that listens there is not process 0 of lbopt; start process 0 there, or give "
        "another port"
    )
    wire = Wire(connection, MOST_HELLO_BYTES)
    try:
        challenge = _next(wire, signals)
        if challenge is None:
            raise not_a_hub
        protocol = challenge.get("lbopt")
        if type(protocol) is int and protocol != _secret.PROTOCOL:
            raise refusal(
                "process 0 has another version of lbopt than this process; install one version on "
                "all hosts"
            )
        if not _secret.is_challenge(challenge):
            raise not_a_hub

        # This end proves first that it knows the secret; the hub tells strangers nothing more.
        asked = challenge["nonce"]
        where = f"{socket.gethostname()}, pid {os.getpid()}"
        nonce, hello = _secret.answer(secret, asked, place.index, place.count, where)
        wire.send(**hello)
        proof = _next(wire, signals)
        if proof is None:
            raise not_a_hub
        if "refused" in proof:
            raise refusal(
                f"process 0 has another secret than this process; {_secret.HOW} (by default it is "
                "in each host's home folder)"
            )
        if not _secret.is_hub(secret, asked, nonce, proof):
            raise refusal(
                "the program that listens there does not know the job's secret; "
                f"{_secret.HOW}, and check which program it is"
            )
    except BaseException:
        wire.close()
        raise
    _secret.trust(wire, secret, asked, nonce, is_hub=False)
    wire.settimeout(_SENDING_S)
    wire.send(here=True)
    return wire


def _next(wire: Wire, signals: _Signals) -> dict[str, Any] | None:
    """Return the next message; None if none comes in time, or not exactly one valid message does.

    Raises:
      OSError: If the connection ends, or a signal comes.
    """
    until = time.monotonic() + _GREETING_S
    wire.settimeout(_RETRY_S)
    while time.monotonic() < until:
        if signals.any():
            raise InterruptedError(errno.EINTR, "it has not answered the greeting yet")
        try:
            messages = wire.receive(or_wait=True)
        except TimeoutError:
            continue
        except ValueError:
            return None
        if messages is None:
            raise ConnectionResetError(errno.ECONNRESET, "the other end closes the connection")
        if messages:
            return messages[0] if len(messages) == 1 else None
    return None


class _Guard:
    """Starts the child once all processes are there, relays its messages to the hub, and ends it.

    Args:
      place: The place of this process.
      wire: The authenticated connection to the hub.
      arguments: The arguments of `lbopt`, the command first.
      saves: Whether the command saves its state and ends by itself when it is asked to stop.
      signals: The signals that this process gets.
      everywhere: Whether process 0 listens on every interface.
    """

    def __init__(
        self,
        place: Place,
        wire: Wire,
        arguments: Sequence[str],
        saves: bool,
        signals: _Signals,
        everywhere: bool,
    ):
        self._place = place
        self._hub = wire
        self._arguments = arguments
        self._saves = saves
        self._signals = signals
        self._everywhere = everywhere

        self._child: subprocess.Popen[bytes] | None = None
        self._member: Wire | None = None
        self._state: dict[str, Any] = {
            "beat": 0,
            "doing": "starting",
            "patience": _member.STARTING_PATIENCE,
        }
        self._failed: int | None = None
        self._has_spoken = self._asked = self._forwarded = False
        # When the hub was last heard, was last sent a heartbeat, when the child was last heard, and
        # when this guard last looked at the clock.
        self._heard = self._beaten = self._spoke = self._looked = time.monotonic()

    def watch(self) -> int:
        """Serve child and hub until the job ends, and return the exit code."""
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
        """Handle the messages that have come, then the clock, the signals and the child.

        Returns:
          The exit code if the job has ended, or else None.
        """
        for key, _ in self._selector.select(_RETRY_S):
            wire = key.fileobj
            if wire is self._hub:
                try:
                    messages = self._hub.receive()
                except ValueError:
                    return self._hub_is_gone(CHANGED)
                if messages is None:
                    return self._hub_is_gone("it was killed, it is stuck, or its machine ended")

                self._heard = time.monotonic()
                for message in messages:
                    code = self._from_hub(message)
                    if code is not None:
                        return code
            # A lost connection to the child ends nothing: `_look` waits for its exit code.
            elif (messages := _received(wire)) is None:
                self._selector.unregister(wire)
            else:
                for message in messages:
                    self._from_member(message)

        return self._look(time.monotonic())

    def _look(self, now: float) -> int | None:
        # Time in which guard and child were suspended, by a scheduler for instance, is not silence.
        suspended_s = max(now - self._looked - BEAT_S, 0)
        self._looked = now
        self._heard += suspended_s
        self._spoke += suspended_s

        if now - self._heard > SILENT_S:
            return self._hub_is_gone(f"it has not been heard of for {SILENT_S:.0f} s")
        if now - self._beaten > BEAT_S:
            self._beaten = now
            self._hub.send(**self._state, silent_s=now - self._spoke if self._child else 0.0)

        self._handle_signals()
        if self._child is not None and self._child.poll() is not None and self._failed is None:
            return self._child_ended(self._child.returncode)
        return None

    def _handle_signals(self) -> None:
        """Act once on a request to stop, and once on an interrupt."""
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
            self._state = message
            self._spoke = time.monotonic()
        elif "failed" in message:
            self._has_spoken = True
            code = message["failed"]
            kind = "said" if code in (EXIT_USER, EXIT_ENVIRONMENT) else "bug"
            self._fail(code, message["line"], kind)
        else:
            self._hub.send(**message)

    def _fail(self, code: int, line: str, kind: str) -> None:
        """Report a failure to the hub, which finds the first cause and then ends the job.

        Args:
          code: Exit code of the process.
          line: Description of the failure, without the name of the process.
          kind: One of `_hub.KINDS`.
        """
        self._failed = code
        self._hub.send(failed=code, line=line, kind=kind)

    def _start(self) -> None:
        self._spoke = time.monotonic()
        ours, theirs = socket.socketpair()
        self._member = Wire(ours)
        self._member.settimeout(_SENDING_S)
        self._selector.register(self._member, selectors.EVENT_READ)
        description = _member.describe(self._place, theirs.fileno(), self._everywhere)
        self._child = subprocess.Popen(
            [sys.executable, "-m", "lbopt", *self._arguments],
            env={**os.environ, _member.MEMBER_VARIABLE: description},
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
        if self._failed is not None:
            return None

        if code == -signal.SIGTERM and not self._saves:
            self._fail(_STOPPED, "was stopped", "said")
        elif code < 0:
            kind = "aborted" if code == -signal.SIGABRT else "died"
            self._fail(EXIT_ENVIRONMENT, _killed_by(-code), kind)
        else:
            self._fail(code, f"ended with exit code {code}", "bug")
        return None

    def _hear_the_rest(self) -> None:
        """Handle the messages that the child sent before it ended."""
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
        # The child may have reported a consequence of the death of another one, which may have been
        # ended because it hung, so the cause is said too.
        if not self._has_spoken or kind in ("died", "hung"):
            self._say(line)
        elif self._failed is not None:
            code = self._failed
        self._kill(with_traceback=kind == "hung")
        self._hub.send(down=True)
        return code

    def _hub_is_gone(self, why: str) -> int:
        self._kill()
        place = self._place
        self._say(f"process 0 of {place.count} ({place.host}:{place.port}) is gone: {why}")
        return EXIT_ENVIRONMENT

    def _say(self, line: str) -> None:
        _say(self._arguments[0], line)

    def _kill(self, with_traceback: bool = False) -> None:
        """Kill the child and the processes that it has started.

        Args:
          with_traceback: Whether to let the child print its stack first, after a hang.
        """
        child = self._child
        self._child = None
        if child is None:
            return
        if with_traceback and child.poll() is None:
            child.send_signal(signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_TRACEBACK_S)
        # The child leads a session of its own, whose process group has the child's id.
        with contextlib.suppress(ProcessLookupError, PermissionError):
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
        "SIGKILL": "was killed by SIGKILL: by a user, or because memory ran out",
        "SIGABRT": "was aborted by a library, whose message is above",
    }
    return hints.get(name, f"was ended by {name}")


def _die_with_parent() -> None:
    """Ask the kernel, where it can, to kill the child when its guard is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
