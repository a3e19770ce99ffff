"""The hub of a job, in the guard of process 0.

It keeps the list of processes, collects the values on which all of them agree, and ends the job
when one of them fails, dies or hangs.
"""

from __future__ import annotations

import dataclasses
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from lbopt import errors
from lbopt._shown import one_line
from lbopt.errors import EXIT_ENVIRONMENT, EXIT_USER, EnvironmentProblem, UserError
from lbopt.job import _listening, _secret
from lbopt.job._place import Place
from lbopt.job._wire import CHANGED, MOST_BYTES, MOST_HELLO_BYTES, QueuedWire, encode

BEAT_S = 2.0
"""Seconds between the heartbeats that each end of a connection sends."""
SILENT_S = 30.0
"""Seconds without a message after which the other end counts as dead.

A machine that loses its power or its network does not close its connections.
"""
_GREETING_S = 5.0
"""Seconds that a connection may take to prove that it belongs to the job."""
_MOST_STRANGERS = 64
"""Unproven connections to keep, beyond one for each process that is still missing."""
_MOST_QUEUED_BYTES = 4 * MOST_BYTES
_SETTLE_S = 1.0
"""Seconds to collect failures after the first one.

An error of JAX's runtime may arrive before the news of the death that caused it.
"""
_LATE_S = 5.0
"""Seconds in which processes that come after a refusal are told that the job has failed."""
_KILLING_S = 6.0
"""Seconds that processes may take to end once they have been told to."""
NOT_READING = "it does not read its messages"
"""The reason given when the messages queued for a process become too many."""
KINDS = ("died", "said", "bug", "aborted")
"""Failure kinds, most fundamental first.

The earliest failure of the first kind present is reported as the cause.
"""


@dataclasses.dataclass
class _Stranger:
    """A connection that has not proven yet that it belongs to the job.

    Attributes:
      address: IP address of the other end.
      asked: The nonce of the challenge that was sent.
      since: Time at which the connection was made.
      hello: Answer to the challenge, once it has proven that the other end knows the secret.
    """

    address: str
    asked: str
    since: float
    hello: dict[str, Any] | None = None


@dataclasses.dataclass
class _Process:
    """The state of a process that has answered the roll call.

    Attributes:
      wire: The connection to the process's guard.
      name: Index, host and process id, for messages.
      heard: Time of the guard's last message.
      step: Training step of the last heartbeat.
      doing: Activity of the last heartbeat, in words.
      pulse: Number of batches begun, by the last heartbeat.
      since: Time at which step, activity or pulse last changed.
      patience: Multiple of the hang timeout that the activity may take; 0 if it only waits.
      silent_s: Seconds since the guard last heard the process that computes.
      done: Whether the process has finished.
      failed: Whether the process has reported an error.
      down: Whether the process, or its connection, has ended.
    """

    wire: QueuedWire
    name: str
    heard: float
    step: int = 0
    doing: str = "starting"
    pulse: int = 0
    since: float = 0.0
    patience: float = 1
    silent_s: float = 0.0
    done: bool = False
    failed: bool = False
    down: bool = False


class Hub:
    """Listens for the processes of a job, and serves them in a thread until the job is over.

    Args:
      place: The place of process 0.
      secret: The job's secret. A connection that does not know it is closed and counted.

    Raises:
      socket.gaierror: If the host name cannot be resolved.
      EnvironmentProblem: If process 0 cannot listen at its address.

    Attributes:
      address: (host, port) at which this host reaches the hub.
      everywhere: Whether the hub listens on every interface; see `_listening.listen`.
    """

    def __init__(self, place: Place, secret: bytes):
        self._place = place
        self._secret = secret
        _listening.allow_connections(place.count + _MOST_STRANGERS)
        self._listeners, self.everywhere = _listening.listen(place)
        self.address: tuple[str, int] = self._listeners[0].getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

        self._processes: dict[int, _Process] = {}
        self._indices: dict[QueuedWire, int] = {}
        self._strangers: dict[QueuedWire, _Stranger] = {}
        self._num_closed = 0
        self._first_closed = ""
        self._told: dict[str, Any] | None = None
        self._rounds: dict[int, dict[int, tuple[str, Any]]] = {}
        self._bounds: dict[int, int] = {}
        self._failures: list[tuple[int, float, int, str]] = []
        self._stopping = self._started = self._over = self._left = False
        self._begun = self._beaten = self._ticked = time.monotonic()

        # Last, because the thread reads all of the above.
        self._thread = threading.Thread(target=self._serve, name="lbopt hub", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until all processes know that the job is over, unless process 0 never came."""
        self._left = 0 not in self._processes
        self._thread.join(timeout_s)

    def strangers(self) -> str:
        """Return the number of connections closed since the last call, in words; "" for none."""
        number = self._num_closed
        self._num_closed = 0
        if not number:
            return ""
        if number == 1:
            return f"1 connection without the job's secret was closed, from {self._first_closed}"
        return (
            f"{number:,} connections without the job's secret were closed, the first from "
            f"{self._first_closed}"
        )

    def _serve(self) -> None:
        try:
            self._serve_to_the_end()
        except Exception as error:
            line = f"the hub of this job, in process 0, failed ({type(error).__name__}: {error})"
            self._end(1, line, "bug")
            raise
        finally:
            for listener in self._listeners:
                listener.close()
            for wire in list(self._strangers):
                self._forget(wire)

    def _serve_to_the_end(self) -> None:
        while not (self._over or self._left):
            self._turn(BEAT_S / 4)
            if not self._over:
                self._tick(time.monotonic())

    def _turn(self, timeout_s: float) -> None:
        """Accept connections, handle the messages that have come, and send queued bytes."""
        for key, events in self._selector.select(timeout_s):
            if isinstance(key.fileobj, socket.socket):
                self._accept(key.fileobj)
                continue
            wire = cast(QueuedWire, key.fileobj)
            if events & selectors.EVENT_WRITE:
                wire.flush()
                self._watch(wire)
            if events & selectors.EVENT_READ:
                self._hear(wire)
        now = time.monotonic()
        for wire, stranger in list(self._strangers.items()):
            # A guard that has proven itself believes that it has joined, and need not hurry.
            if now - stranger.since > (_GREETING_S if stranger.hello is None else SILENT_S):
                self._close(wire)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, address = listener.accept()
        except OSError:  # the other end has left, or this process has no file descriptor left
            self._make_room()
            time.sleep(0.01)
            return
        wire = QueuedWire(connection, MOST_HELLO_BYTES)
        asked, message = _secret.challenge()
        self._strangers[wire] = _Stranger(address[0], asked, time.monotonic())
        self._selector.register(wire, selectors.EVENT_READ)
        wire.send(**message)
        if len(self._strangers) > _MOST_STRANGERS + self._place.count - len(self._processes):
            self._make_room()

    def _make_room(self) -> None:
        """Close the oldest unproven connection of the address that has most of them.

        A flood of connections from one host thus does not displace those of other hosts.
        """
        addresses = {
            wire: stranger.address
            for wire, stranger in self._strangers.items()
            if stranger.hello is None
        }
        if addresses:
            busiest = Counter(addresses.values()).most_common(1)[0][0]
            self._close(next(wire for wire, address in addresses.items() if address == busiest))

    def _hear(self, wire: QueuedWire) -> None:
        if wire not in self._strangers and wire not in self._indices:
            self._forget(wire)  # it was refused or closed earlier in this turn
            return

        why = "it was killed, or its machine ended"
        messages = None
        try:
            messages = wire.receive()
        except ValueError:
            why = CHANGED
        if wire in self._strangers:
            self._meet(wire, messages)
            return

        index = self._indices[wire]
        process = self._processes[index]
        if self._told is not None:
            if messages is None or any(
                "down" in message or "done" in message for message in messages
            ):
                process.down = True
                self._forget(wire)
        elif messages is None:
            self._lose(process, why)
        else:
            process.heard = time.monotonic()
            for message in messages:
                if not self._over:
                    self._answer(index, process, message)

    def _lose(self, process: _Process, why: str) -> None:
        self._forget(process.wire)
        process.down = True
        if not process.done and not process.failed:
            self._fail("died", EXIT_ENVIRONMENT, f"{process.name} is gone: {why}")

    def _meet(self, wire: QueuedWire, messages: list[dict[str, Any]] | None) -> None:
        """Handle the next step of a greeting: the answer to the challenge, then `here`.

        A connection that sends anything else is closed.
        """
        stranger = self._strangers[wire]
        if messages == []:
            return
        if messages is None or (stranger.hello is None and len(messages) > 1):
            self._close(wire)
        elif stranger.hello is None:
            self._check_hello(wire, stranger, messages[0])
        else:
            del self._strangers[wire]
            self._call(wire, stranger.hello, messages[1:])

    def _check_hello(self, wire: QueuedWire, stranger: _Stranger, hello: dict[str, Any]) -> None:
        """Check the answer to the challenge, and prove in turn that the hub knows the secret."""
        believed = _secret.believed(self._secret, stranger.asked, hello)
        if not believed:
            if believed is False:
                wire.send(refused="secret")
            self._close(wire)
        elif self._is_of_the_next_job(hello["index"]):
            self._forget(wire)  # its guard retries, and finds the next job's hub
        else:
            stranger.hello = hello
            nonce = hello["nonce"]
            wire.send(**_secret.reply(self._secret, stranger.asked, nonce))
            _secret.trust(wire, self._secret, stranger.asked, nonce, is_hub=True)

    def _call(
        self, wire: QueuedWire, hello: dict[str, Any], messages: list[dict[str, Any]]
    ) -> None:
        """Admit a process that has answered the roll call, or refuse it.

        Args:
          wire: The authenticated connection.
          hello: The process's answer to the challenge.
          messages: The messages that came with `here`.
        """
        index = hello["index"]
        count = hello["count"]
        name = f"process {index} of {count} ({one_line(hello['where'])})"
        present = self._processes.get(index)
        now = time.monotonic()
        process = _Process(wire, name, now, since=now)

        # A process may answer only after the others have failed and the job is over.
        if self._told is not None:
            self._send(wire, end=self._told)
        elif count != self._place.count:
            reason = (
                f"{name} has this and process 0 has {self._place.count}; give every process the "
                "same number"
            )
            self._refuse(process, UserError("--num_processes", count, reason, code="mismatch"))
        elif present is not None:
            reason = f"{name} and {present.name} both have it; give each process its own"
            self._refuse(process, UserError("--process_id", index, reason, code="conflict"))
        else:
            self._processes[index] = process
            self._indices[wire] = index
            # The job starts before the messages are read: they may already end it.
            if len(self._processes) == self._place.count:
                self._start()

            for message in messages:
                self._answer(index, process, message)

    def _is_of_the_next_job(self, index: int) -> bool:
        """Return whether a process that connects belongs to the job that follows this one.

        It does if this job was complete and is ending, or if its own process of this index is done.
        """
        present = self._processes.get(index)
        is_done = present is not None and present.done
        return self._started and bool(self._failures or self._told or is_done)

    def _start(self) -> None:
        self._started = True
        for process in self._processes.values():  # the wait for the last process was not a hang
            process.since = time.monotonic()
        self._tell_all(started=True)

    def _refuse(self, process: _Process, error: UserError) -> None:
        """Send a process away; if the job has not started yet, end the whole job."""
        line = str(error)
        self._send(process.wire, end={"code": EXIT_USER, "line": line, "kind": "said"})
        self._forget(process.wire)
        if not self._started:
            self._end(EXIT_USER, line)
            self._turn_until(lambda: False, _LATE_S)  # tells the processes that come late

    def _answer(self, index: int, process: _Process, message: dict[str, Any]) -> None:
        if "say" in message:
            self._say(index, message["round"], message["say"], message["value"])
        elif "post" in message:
            self._send(self._processes[0].wire, posted=message["post"])
        elif "bound" in message:
            self._bounds[index] = message["bound"]
            self._decide()
        elif "stop" in message and not self._stopping:
            self._stopping = True
            self._tell_all(stop=process.name)

        elif "beat" in message:
            # A guard repeats the last state of its child, so only a change is progress.
            before = (process.step, process.doing, process.pulse)
            process.step = message["beat"]
            process.doing = message["doing"]
            process.pulse = message.get("pulse", 0)
            if (process.step, process.doing, process.pulse) != before:
                process.since = time.monotonic()
            process.patience = message.get("patience", 1)
            process.silent_s = message.get("silent_s", 0.0)

        elif "done" in message:
            process.done = True
            self._decide()  # the others no longer wait for this process's bound
            self._over = all(other.done for other in self._processes.values()) and self._started
        elif "failed" in message:
            process.failed = True
            self._fail(message["kind"], message["failed"], f"{process.name}: {message['line']}")

    def _decide(self) -> None:
        """Announce the step after which to stop, once each working process has sent its own."""
        working = [index for index, process in self._processes.items() if not process.done]
        if self._bounds and all(index in self._bounds for index in working):
            self._tell_all(stop_at=max(self._bounds.values()))

    def _say(self, index: int, number: int, key: str, value: Any) -> None:
        """Collect the values of one round of `Job.together`, and send all of them to all."""
        received = self._rounds.setdefault(number, {})
        received[index] = (key, value)
        if len({key for key, _ in received.values()}) > 1:
            keys = ", ".join(f"process {i} {k!r}" for i, (k, _) in sorted(received.items()))
            fix = "start every process with the same command"
            line = f"the processes do different things ({keys}); {fix}"
            self._fail("said", EXIT_USER, line)
        elif len(received) == self._place.count:
            del self._rounds[number]
            for process in self._processes.values():
                process.since = time.monotonic()
            values = [received[i][1] for i in range(self._place.count)]
            try:
                with errors.under("", message=key):
                    self._tell_all(round=number, values=values)
            except EnvironmentProblem as error:
                self._fail("said", EXIT_ENVIRONMENT, str(error))

    def _tick(self, now: float) -> None:
        """Look for processes that are missing, silent or stuck, and end the job after a failure."""
        # Time in which the hub was suspended, by a scheduler for instance, does not count.
        suspended_s = max(now - self._ticked - BEAT_S, 0)
        self._ticked = now
        for process in self._processes.values():
            process.heard += suspended_s
            process.since += suspended_s

        if now - self._beaten > BEAT_S:
            self._beaten = now
            self._tell_all(beat=True)

        if self._failures:
            if now - min(when for _, when, _, _ in self._failures) > _SETTLE_S:
                kind, _, code, line = min(self._failures)
                self._end(code, line, KINDS[kind])
        elif not self._started:
            if now - self._begun > self._place.start_timeout_s:
                self._end(EXIT_ENVIRONMENT, self._missing())
        else:
            self._look_for_stuck(now)

    def _look_for_stuck(self, now: float) -> None:
        """Report the first process that is lost or silent; if there is none, look for hangs."""
        working = {index: process for index, process in self._processes.items() if not process.done}
        for process in working.values():
            if process.wire.queued_bytes > _MOST_QUEUED_BYTES:
                self._lose(process, NOT_READING)
                return
            if now - process.heard > SILENT_S:
                silence = f"has not been heard of for {SILENT_S:.0f} s; check its host and network"
                self._fail("died", EXIT_ENVIRONMENT, f"{process.name} {silence}")
                return
        self._look_for_hangs(working, now)

    def _look_for_hangs(self, working: dict[int, _Process], now: float) -> None:
        """End the job if a process is stuck, or if no process makes progress.

        A process is stuck if its guard does not hear it. Processes that only wait for others do not
        count as long as another one is busy.
        """
        hang_s = self._place.hang_timeout_s
        stuck = next((process for process in working.values() if process.silent_s > hang_s), None)
        if stuck is not None:
            self._end_hung(f"{stuck.name} has been stuck for this long; it was {stuck.doing}")
            return

        busy = [process for process in working.values() if process.patience]
        busy = busy or list(working.values())
        if busy and all(now - process.since > hang_s * (process.patience or 1) for process in busy):
            doing = "; ".join(
                f"{process.name} is {process.doing}" for process in _slowest_first(working)
            )
            seconds = now - max(process.since for process in busy)
            self._end_hung(f"no process has made progress for {seconds:.0f} s; {doing}")

    def _end_hung(self, reason: str) -> None:
        hang_s = self._place.hang_timeout_s
        reason += "; raise the timeout if it only needs longer"
        error = EnvironmentProblem("--hang_timeout_s", hang_s, reason, code="resource")
        self._end(EXIT_ENVIRONMENT, str(error), "hung")

    def _missing(self) -> str:
        missing = [str(index) for index in range(self._place.count) if index not in self._processes]
        names = ", ".join(missing[:8]) + " and more" * (len(missing) > 8)
        closed = self.strangers()
        error = EnvironmentProblem(
            "--start_timeout_s",
            self._place.start_timeout_s,
            f"process{'es' * (len(missing) > 1)} {names} of {self._place.count} did not connect in "
            f"this time; start them, check that they reach {self._place.host}:{self._place.port}, "
            "or raise the timeout" + (f" ({closed}; {_secret.HOW})" if closed else ""),
            code="missing",
        )
        return str(error)

    def _fail(self, kind: str, code: int, line: str) -> None:
        self._failures.append((KINDS.index(kind), time.monotonic(), code, line))

    def _end(self, code: int, line: str, kind: str = "said") -> None:
        """Tell all processes to end, process 0 last.

        Process 0 has JAX's coordination service, without which the others would be aborted.
        """
        self._over = True
        self._told = {"code": code, "line": line, "kind": kind}
        present = {
            index: process
            for index, process in self._processes.items()
            if not (process.down or process.done)
        }
        self._end_processes([process for index, process in present.items() if index > 0])
        self._end_processes([process for index, process in present.items() if index == 0])
        # A process of this job may be in the middle of its greeting.
        self._turn_until(lambda: not self._strangers, 1.0)

    def _end_processes(self, processes: list[_Process]) -> None:
        for process in processes:
            self._send(process.wire, end=self._told)
        self._turn_until(lambda: all(process.down for process in processes), _KILLING_S)

    def _turn_until(self, condition: Callable[[], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not condition():
            self._turn(0.2)

    def _tell_all(self, **message: Any) -> None:
        line = encode(**message)
        for process in self._processes.values():
            if not process.done and not process.down:
                process.wire.send_line(line)
                self._watch(process.wire)

    def _send(self, wire: QueuedWire, **message: Any) -> None:
        wire.send(**message)
        self._watch(wire)

    def _watch(self, wire: QueuedWire) -> None:
        """Wake the selector when queued bytes can be sent, if there are any."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wire.queued_bytes else 0)
        if wire.fileno() >= 0 and self._selector.get_key(wire).events != events:
            self._selector.modify(wire, events)

    def _close(self, wire: QueuedWire) -> None:
        """Close an unproven connection, and count it."""
        self._num_closed += 1
        self._first_closed = self._first_closed or self._strangers[wire].address
        self._forget(wire)

    def _forget(self, wire: QueuedWire) -> None:
        self._strangers.pop(wire, None)
        self._indices.pop(wire, None)
        if wire.fileno() >= 0:
            self._selector.unregister(wire)
            wire.close()


def _slowest_first(processes: dict[int, _Process]) -> list[_Process]:
    """Return the processes by progress, the slowest first; only one for each step and activity.

    Of processes that are equally far, the one that its guard has not heard for longest comes first.
    """

    def progress(process: _Process) -> tuple[Any, ...]:
        return process.step, process.doing.startswith("in step"), -process.silent_s

    ordered = sorted(processes.values(), key=progress)
    first_of_each: dict[tuple[int, str], _Process] = {}
    for process in ordered:
        first_of_each.setdefault((process.step, process.doing), process)
    return list(first_of_each.values())
