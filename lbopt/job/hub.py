"""The hub of a job, in the guard of process 0: it knows who is there, who is gone, and what all have said."""

from __future__ import annotations

import contextlib
import dataclasses
import selectors
import socket
import threading
import time
from typing import Any, cast

from lbopt.errors import EXIT_ENVIRONMENT, EXIT_USER, EnvironmentProblem
from lbopt.job.place import Place
from lbopt.job.wire import Wire

BEAT_S = 2.0
"""How often each end of a connection says that it is there."""
SILENT_S = 30.0
"""Whoever says nothing for so long is taken for dead: a machine that lost its power or its network closes no connection."""
_SENDING_S = 10.0
_SETTLE_S = 1.0
"""How long to listen once one has failed: what JAX's runtime makes of a death can be heard before the death is."""
_LATE_S = 5.0
"""How long to tell latecomers that the job has failed."""
_KILLING_S = 6.0
"""How long processes may take to end once they have been told to."""
KINDS = ("died", "said", "bug", "aborted")
"""Of failures; of several the first of the first kind is the cause of the others."""


@dataclasses.dataclass
class _Process:
    """What is known of a process that has answered the roll call."""

    wire: Wire
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
    """Listen, and serve the job in a thread until it is over.

    Args:
      place: of process 0.

    Raises:
      EnvironmentProblem: if the port cannot be listened at.
    """

    def __init__(self, place: Place):
        self._place = place
        try:
            family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
            self._listener = socket.create_server(("", place.port), family=family, backlog=place.count)
        except OSError as error:
            raise EnvironmentProblem(
                f"--coordinator_address: process 0 cannot listen at port {place.port} ({error.strerror}); "
                "end what uses it, or give all processes another port"
            ) from error
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._processes: dict[int, _Process] = {}
        self._strangers: list[Wire] = []
        self._rounds: dict[int, dict[int, tuple[str, Any]]] = {}
        self._bounds: dict[int, int] = {}
        self._failures: list[tuple[int, float, int, str]] = []
        self._stopping = self._started = self._over = self._left = False
        self._begun = self._beaten = time.monotonic()
        self._thread = threading.Thread(target=self._serve, name="lbopt hub", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until everybody has been told that the job is over; that is at once if not even process 0 is here."""
        self._left = 0 not in self._processes
        self._thread.join(timeout_s)

    def _serve(self) -> None:
        try:
            self._serve_to_the_end()
        except Exception as error:
            self._end(1, f"the hub of this job, in process 0, has failed ({type(error).__name__}: {error})", "bug")
            raise
        finally:
            self._listener.close()

    def _serve_to_the_end(self) -> None:
        while not (self._over or self._left):
            for key, _ in self._selector.select(BEAT_S / 4):
                if key.fileobj is self._listener:
                    self._accept()
                elif not self._over:
                    self._hear(cast(Wire, key.fileobj))
            if not self._over:
                self._tick(time.monotonic())

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(_SENDING_S)  # somebody who does not read must not hold up the others
        wire = Wire(connection)
        self._strangers.append(wire)
        self._selector.register(wire, selectors.EVENT_READ)

    def _hear(self, wire: Wire) -> None:
        try:
            messages = wire.receive()
        except ValueError:
            messages = None
        if wire in self._strangers:
            self._meet(wire, messages)
            return
        index, process = next((i, p) for i, p in self._processes.items() if p.wire is wire)
        if messages is None:
            self._forget(wire)
            process.down = True
            if not process.done and not process.failed:
                self._fail("died", EXIT_ENVIRONMENT, f"{process.name} is gone: it was killed, or its machine ended")
            return
        process.heard = time.monotonic()
        for message in messages:
            if not self._over:
                self._answer(index, process, message)

    def _meet(self, wire: Wire, messages: list[dict[str, Any]] | None) -> None:
        """Take the first message of a connection for the answer to the roll call; whoever says something else is not ours."""
        if messages == []:
            return
        self._strangers.remove(wire)
        hello = messages[0] if messages else {}
        index, count, where = hello.get("index"), hello.get("count"), hello.get("where")
        if not (isinstance(index, int) and isinstance(count, int) and isinstance(where, str) and 0 <= index < count):
            self._forget(wire)
            return
        name = f"process {index} of {count} ({where})"
        there, process = self._processes.get(index), _Process(wire, name, time.monotonic(), since=time.monotonic())
        if count != self._place.count:
            line = f"--num_processes = {count}: so says {name}, process 0 says {self._place.count}; give all the same"
            self._refuse(process, line)
        elif there is not None and there.done and self._started:
            self._refuse(process, f"{name} comes too late: the job is over")
        elif there is not None:
            line = f"--process_id = {index}: {name} and {there.name} have the same; give each process its own"
            self._refuse(process, line)
        else:
            self._processes[index] = process
            if len(self._processes) == self._place.count:
                self._start()
            for message in (messages or [])[1:]:
                self._answer(index, process, message)

    def _start(self) -> None:
        self._started = True
        for process in self._processes.values():  # waiting for the last one was no hang
            process.since = time.monotonic()
        self._tell_all(started=True)

    def _refuse(self, process: _Process, line: str) -> None:
        process.wire.send(end={"code": EXIT_USER, "line": line, "kind": "said"})
        self._forget(process.wire)
        if not self._started:  # a job at work is not ended by somebody who was started twice
            self._end(EXIT_USER, line)
            self._tell_latecomers(EXIT_USER, line)

    def _answer(self, index: int, process: _Process, message: dict[str, Any]) -> None:
        if "say" in message:
            self._say(index, message["round"], message["say"], message["value"])
        elif "post" in message:
            self._processes[0].wire.send(posted=message["post"])
        elif "bound" in message:
            self._bounds[index] = message["bound"]
            self._decide()
        elif "stop" in message and not self._stopping:
            self._stopping = True
            self._tell_all(stop=process.name)
        elif "beat" in message:
            now = (message["beat"], message["doing"], message.get("pulse", 0))
            if now != (process.step, process.doing, process.pulse):
                process.step, process.doing, process.pulse = now
                process.since = time.monotonic()
            process.patience, process.silent_s = message.get("patience", 1), message.get("silent_s", 0.0)
        elif "done" in message:
            process.done = True
            self._decide()
            self._over = all(other.done for other in self._processes.values()) and self._started
        elif "failed" in message:
            process.failed = True
            self._fail(message["kind"], message["failed"], f"{process.name}: {message['line']}")

    def _decide(self) -> None:
        """Say after which step to stop once all that still work have said which one they are in."""
        working = [index for index, process in self._processes.items() if not process.done]
        if self._bounds and all(index in self._bounds for index in working):
            self._tell_all(stop_at=max(self._bounds.values()))

    def _say(self, index: int, number: int, key: str, value: Any) -> None:
        said = self._rounds.setdefault(number, {})
        said[index] = (key, value)
        if len({key for key, _ in said.values()}) > 1:
            keys = ", ".join(f"process {i} {k!r}" for i, (k, _) in sorted(said.items()))
            self._fail(
                "said", EXIT_USER, f"processes of one job do different things ({keys}); start all with the same command"
            )
        elif len(said) == self._place.count:
            del self._rounds[number]
            for process in self._processes.values():
                process.since = time.monotonic()
            self._tell_all(round=number, values=[said[i][1] for i in range(self._place.count)])

    def _tick(self, now: float) -> None:
        """Look at the clock: who is missing, silent or stuck."""
        if now - self._beaten > BEAT_S:
            self._beaten = now
            self._tell_all(beat=True)
        if self._failures:
            if now - min(when for _, when, _, _ in self._failures) > _SETTLE_S:
                kind, _, code, line = min(self._failures)
                self._end(code, line, KINDS[kind])
            return
        if not self._started:
            if now - self._begun > self._place.start_timeout_s:
                self._end(EXIT_ENVIRONMENT, self._missing())
            return
        working = {index: process for index, process in self._processes.items() if not process.done}
        for process in working.values():
            if now - process.heard > SILENT_S:
                line = (
                    f"{process.name} has not been heard of for {SILENT_S:.0f} s: its machine or its network has failed"
                )
                self._fail("died", EXIT_ENVIRONMENT, line)
                return
        self._look_for_hangs(working, now)

    def _look_for_hangs(self, working: dict[int, _Process], now: float) -> None:
        """End the job if one process does not even beat, or if none of those that others may wait for has gone on."""
        hang_s = self._place.hang_timeout_s
        stopped = next((process for process in working.values() if process.silent_s > hang_s), None)
        if stopped is not None:
            line = f"{stopped.name} has stood still for {hang_s:.0f} s (--hang_timeout_s): it was {stopped.doing}"
            self._end(EXIT_ENVIRONMENT, line, "hung")
            return
        busy = [process for process in working.values() if process.patience] or list(working.values())
        if busy and all(now - process.since > hang_s * (process.patience or 1) for process in busy):
            what = "; ".join(f"{process.name} is {process.doing}" for process in _slowest_first(working))
            seconds = now - max(process.since for process in busy)
            line = f"nothing has gone on for {seconds:.0f} s (--hang_timeout_s = {hang_s:.0f}): {what}"
            self._end(EXIT_ENVIRONMENT, line, "hung")

    def _missing(self) -> str:
        missing = [str(index) for index in range(self._place.count) if index not in self._processes]
        which = f"process {missing[0]}" if len(missing) == 1 else f"processes {', '.join(missing[:8])}"
        return (
            f"{which}{' and more' * (len(missing) > 8)} of {self._place.count} did not come within "
            f"{self._place.start_timeout_s:.0f} s: start them, and see that they reach "
            f"{self._place.host}:{self._place.port}, or raise --start_timeout_s"
        )

    def _fail(self, kind: str, code: int, line: str) -> None:
        self._failures.append((KINDS.index(kind), time.monotonic(), code, line))

    def _end(self, code: int, line: str, kind: str = "said") -> None:
        """Tell all to end, process 0 last: without JAX's coordination service, which it has, the others would be aborted."""
        self._over = True
        told = {"code": code, "line": line, "kind": kind}
        there = {index: process for index, process in self._processes.items() if not (process.down or process.done)}
        for wave in ([p for i, p in there.items() if i], [p for i, p in there.items() if not i]):
            for process in wave:
                process.wire.send(end=told)
            until = time.monotonic() + _KILLING_S
            while time.monotonic() < until and not all(process.down for process in wave):
                for key, _ in self._selector.select(0.2):
                    self._hear_down(key.fileobj)
        for wire in self._strangers:
            wire.send(end=told)

    def _tell_latecomers(self, code: int, line: str) -> None:
        """Tell those who answer the roll call a little later that it has failed: else they would wait for somebody to listen."""
        self._listener.settimeout(_LATE_S / 10)
        until, told = time.monotonic() + _LATE_S, []
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                connection, _ = self._listener.accept()
                connection.settimeout(_SENDING_S)
                told.append(Wire(connection))
                told[-1].send(end={"code": code, "line": line, "kind": "said"})
        for wire in told:
            wire.close()

    def _hear_down(self, wire: Any) -> None:
        process = next((p for p in self._processes.values() if p.wire is wire), None)
        if process is None:
            return
        try:
            messages = wire.receive()
        except ValueError:
            messages = None
        if messages is None or any("down" in message or "done" in message for message in messages):
            process.down = True
            self._forget(wire)

    def _tell_all(self, **message: Any) -> None:
        for process in self._processes.values():
            if not process.done:
                process.wire.send(**message)

    def _forget(self, wire: Wire) -> None:
        self._selector.unregister(wire)
        wire.close()


def _slowest_first(processes: dict[int, _Process]) -> list[_Process]:
    """Order processes by how far they are; of many that are equally far, one speaks for all."""
    ordered = sorted(processes.values(), key=lambda process: (process.step, process.doing.startswith("in step")))
    seen: set[tuple[int, str]] = set()
    return [p for p in ordered if (p.step, p.doing) not in seen and not seen.add((p.step, p.doing))]  # type: ignore[func-returns-value]
