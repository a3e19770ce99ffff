"""The hub of a job, in the guard of process 0: it knows who is there, who is gone, and what all have said."""

from __future__ import annotations

import dataclasses
import selectors
import socket
import threading
import time
from typing import Any

from lbopt.errors import EXIT_ENVIRONMENT, EXIT_USER, EnvironmentProblem
from lbopt.job.place import Place
from lbopt.job.wire import Wire

BEAT_S = 2.0
"""How often each end of a connection says that it is there."""
SILENT_S = 30.0
"""Whoever says nothing for so long is taken for dead: a machine that lost its power or its network closes no connection."""
_KILLING_S = 6.0
"""How long the others may take to end once one has failed."""


@dataclasses.dataclass
class _Process:
    """What is known of a process that has answered the roll call."""

    wire: Wire
    name: str
    heard: float
    step: int = 0
    doing: str = "starting"
    since: float = 0.0
    done: bool = False
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
        self._stopping = self._started = self._over = False
        self._begun = self._beaten = time.monotonic()
        self._thread = threading.Thread(target=self._serve, name="lbopt hub", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until everybody has been told that the job is over."""
        self._thread.join(timeout_s)

    def _serve(self) -> None:
        while not self._over:
            for key, _ in self._selector.select(BEAT_S / 4):
                if key.fileobj is self._listener:
                    self._accept()
                elif not self._over:
                    self._hear(key.fileobj)  # type: ignore[arg-type]
            if not self._over:
                self._tick(time.monotonic())
        self._listener.close()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        wire = Wire(connection)
        self._strangers.append(wire)
        self._selector.register(wire, selectors.EVENT_READ)  # type: ignore[arg-type]

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
            if not process.done:
                self._end(index, EXIT_ENVIRONMENT, f"{process.name} is gone: it was killed, or its machine ended")
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
        if not isinstance(index, int) or not isinstance(count, int) or not isinstance(where, str):
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
                self._started = True
                self._tell_all(started=True)

    def _refuse(self, process: _Process, line: str) -> None:
        process.wire.send(end={"code": EXIT_USER, "line": line, "hung": False})
        self._forget(process.wire)
        if not self._started:  # a job at work is not ended by somebody who was started twice
            self._end(-1, EXIT_USER, line)

    def _answer(self, index: int, process: _Process, message: dict[str, Any]) -> None:
        if "say" in message:
            self._say(index, message["round"], message["say"], message["value"])
        elif "bound" in message:
            self._bounds[index] = message["bound"]
            if len(self._bounds) == self._place.count:
                self._tell_all(stop_at=max(self._bounds.values()))
        elif "stop" in message and not self._stopping:
            self._stopping = True
            self._tell_all(stop=process.name)
        elif "beat" in message:
            now = (message["beat"], message["doing"])
            if now != (process.step, process.doing):
                process.step, process.doing = now
                process.since = time.monotonic()
        elif "done" in message:
            process.done = True
            self._over = all(other.done for other in self._processes.values()) and self._started
        elif "failed" in message:
            self._end(index, message["failed"], f"{process.name}: {message['line']}")

    def _say(self, index: int, number: int, key: str, value: Any) -> None:
        said = self._rounds.setdefault(number, {})
        said[index] = (key, value)
        if len({key for key, _ in said.values()}) > 1:
            keys = ", ".join(f"process {i} {k!r}" for i, (k, _) in sorted(said.items()))
            self._end(-1, 1, f"processes of one job do different things ({keys}); start all with the same command")
        elif len(said) == self._place.count:
            del self._rounds[number]
            self._tell_all(round=number, values=[said[i][1] for i in range(self._place.count)])

    def _tick(self, now: float) -> None:
        """Look at the clock: who is missing, silent or stuck."""
        if now - self._beaten > BEAT_S:
            self._beaten = now
            self._tell_all(beat=True)
        if not self._started:
            if now - self._begun > self._place.start_timeout_s:
                self._end(-1, EXIT_ENVIRONMENT, self._missing())
            return
        working = {index: process for index, process in self._processes.items() if not process.done}
        for index, process in working.items():
            if now - process.heard > SILENT_S:
                line = (
                    f"{process.name} has not been heard of for {SILENT_S:.0f} s: its machine or its network has failed"
                )
                self._end(index, EXIT_ENVIRONMENT, line)
                return
        hang_s = self._place.hang_timeout_s
        if working and all(now - process.since > hang_s for process in working.values()):
            what = "; ".join(f"{process.name} is {process.doing}" for process in _slowest_first(working))
            line = f"nothing has gone on for {hang_s:.0f} s (--hang_timeout_s): {what}"
            self._end(-1, EXIT_ENVIRONMENT, line, hung=True)

    def _missing(self) -> str:
        missing = [str(index) for index in range(self._place.count) if index not in self._processes]
        which = f"process {missing[0]}" if len(missing) == 1 else f"processes {', '.join(missing[:8])}"
        return (
            f"{which}{' and more' * (len(missing) > 8)} of {self._place.count} did not come within "
            f"{self._place.start_timeout_s:.0f} s: start them, and see that they reach "
            f"{self._place.host}:{self._place.port}, or raise --start_timeout_s"
        )

    def _end(self, culprit: int, code: int, line: str, hung: bool = False) -> None:
        """Tell all but the culprit to end, wait until they have, and let the culprit go.

        The culprit waits: were it the one with JAX's coordination service, its end would abort the others before they have
        been told why.
        """
        self._over = True
        others = {i: p for i, p in self._processes.items() if i != culprit and not (p.down or p.done)}
        for process in others.values():
            process.wire.send(end={"code": code, "line": line, "hung": hung})
        for wire in self._strangers:
            wire.send(end={"code": code, "line": line, "hung": hung})
        until = time.monotonic() + _KILLING_S
        while time.monotonic() < until and not all(process.down for process in others.values()):
            for key, _ in self._selector.select(0.2):
                self._hear_down(key.fileobj)
        if culprit in self._processes:
            self._processes[culprit].wire.send(release=True)

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
        self._selector.unregister(wire)  # type: ignore[arg-type]
        wire.close()


def _slowest_first(processes: dict[int, _Process]) -> list[_Process]:
    """Order processes by how far they are; of many that are equally far, one speaks for all."""
    ordered = sorted(processes.values(), key=lambda process: (process.step, process.doing.startswith("in step")))
    seen: set[tuple[int, str]] = set()
    return [p for p in ordered if (p.step, p.doing) not in seen and not seen.add((p.step, p.doing))]  # type: ignore[func-returns-value]
