"""The hub of a job, in the guard of process 0: it knows who is there, who is gone, and what all have said."""

from __future__ import annotations

import dataclasses
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from lbopt.errors import EXIT_ENVIRONMENT, EXIT_USER, EnvironmentProblem
from lbopt.job import listening, secret as secrets
from lbopt.job.place import Place
from lbopt.job.wire import CHANGED, MOST_BYTES, MOST_HELLO_BYTES, QueuedWire, encode
from lbopt.shown import one_line

BEAT_S = 2.0
"""How often each end of a connection says that it is there."""
SILENT_S = 30.0
"""Whoever says nothing for so long is taken for dead: a machine that lost its power or its network closes no connection."""
_GREETING_S = 5.0
"""How long a connection may take to prove that it belongs to the job."""
_MOST_STRANGERS = 64
"""How many more connections than the job still lacks may wait to prove it. One more, and the busiest address loses its oldest."""
_MOST_QUEUED_BYTES = 4 * MOST_BYTES
_SETTLE_S = 1.0
"""How long to listen once one has failed: what JAX's runtime makes of a death can be heard before the death is."""
_LATE_S = 5.0
"""How long to tell latecomers that the job has failed."""
_KILLING_S = 6.0
"""How long processes may take to end once they have been told to."""
KINDS = ("died", "said", "bug", "aborted")
"""Of failures; of several the first of the first kind is the cause of the others."""


@dataclasses.dataclass
class _Stranger:
    """A connection that has not proven yet that it belongs to the job."""

    address: str
    asked: str
    since: float
    hello: dict[str, Any] | None = None


@dataclasses.dataclass
class _Process:
    """What is known of a process that has answered the roll call."""

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
    """Listen, and serve the job in a thread until it is over.

    Args:
      place: of process 0.
      secret: of the job. A connection that does not know it is closed, and counted.

    Raises:
      UserError: if there is no host of that name.
      EnvironmentProblem: if the address cannot be listened at.

    Attributes:
      address: (host, port) by which this host reaches it.
      everywhere: whether it listens on every interface, because the coordinator's name does not say on which.
    """

    def __init__(self, place: Place, secret: bytes):
        self._place, self._secret = place, secret
        listening.allow_connections(place.count + _MOST_STRANGERS)
        self._listeners, self.everywhere = listening.listen(place)
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
        self._thread = threading.Thread(target=self._serve, name="lbopt hub", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until everybody has been told that the job is over; that is at once if not even process 0 is here."""
        self._left = 0 not in self._processes
        self._thread.join(timeout_s)

    def strangers(self) -> str:
        """Return in words how many connections without the job's secret were closed since this was last asked; "" if none."""
        number, self._num_closed = self._num_closed, 0
        if not number:
            return ""
        what = (
            "connections without the job's secret were closed, the first"
            if number > 1
            else "connection without the job's secret was closed,"
        )
        return f"{number:,} {what} from {self._first_closed}"

    def _serve(self) -> None:
        try:
            self._serve_to_the_end()
        except Exception as error:
            self._end(
                1,
                f"the hub of this job, in process 0, has failed ({type(error).__name__}: {error})",
                "bug",
            )
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
        """Hear who has something to say, and go on sending to who was slow."""
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
            # One that has proven itself takes itself for one of the job's: it has as long as these.
            if now - stranger.since > (_GREETING_S if stranger.hello is None else SILENT_S):
                self._close(wire)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, address = listener.accept()
        except OSError:  # gone again, or no descriptor is left: a stranger makes room
            self._make_room()
            time.sleep(0.01)
            return
        wire = QueuedWire(connection, MOST_HELLO_BYTES)
        asked, message = secrets.challenge()
        self._strangers[wire] = _Stranger(address[0], asked, time.monotonic())
        self._selector.register(wire, selectors.EVENT_READ)
        wire.send(**message)
        if len(self._strangers) > _MOST_STRANGERS + self._place.count - len(self._processes):
            self._make_room()

    def _make_room(self) -> None:
        """Close the oldest stranger of the address that has most: a flood from one host drives out no other's. None that has proven itself."""
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
            self._forget(wire)  # refused, or forgotten in this turn
            return
        why = "it was killed, or its machine ended"
        try:
            messages = wire.receive()
        except ValueError:
            messages, why = None, CHANGED
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
        """Take what a stranger says for the next of its two lines; whoever says something else is not ours."""
        stranger = self._strangers[wire]
        if messages == []:
            return
        if messages is None or (stranger.hello is None and len(messages) > 1):
            self._close(wire)
        elif stranger.hello is None:
            believed = secrets.believed(self._secret, stranger.asked, messages[0])
            if not believed:
                if believed is False:
                    wire.send(refused="secret")
                self._close(wire)
                return
            if self._is_of_the_next_job(messages[0]["index"]):
                self._forget(wire)  # it tries again
                return
            stranger.hello = messages[0]
            nonce = stranger.hello["nonce"]
            wire.send(**secrets.reply(self._secret, stranger.asked, nonce))
            secrets.trust(wire, self._secret, stranger.asked, nonce, is_hub=True)
        else:
            del self._strangers[wire]
            self._call(wire, stranger.hello, messages[1:])

    def _call(
        self, wire: QueuedWire, hello: dict[str, Any], messages: list[dict[str, Any]]
    ) -> None:
        """Take the answer to the roll call of one who knows the secret."""
        index, count, now = hello["index"], hello["count"], time.monotonic()
        name = f"process {index} of {count} ({one_line(hello['where'])})"
        there, process = self._processes.get(index), _Process(wire, name, now, since=now)
        if self._told is not None:
            self._send(wire, end=self._told)
        elif count != self._place.count:
            line = f"--num_processes = {count}: so says {name}, process 0 says {self._place.count}; give all the same"
            self._refuse(process, line)
        elif there is not None:
            line = f"--process_id = {index}: {name} and {there.name} have the same; give each process its own"
            self._refuse(process, line)
        else:
            self._processes[index] = process
            self._indices[wire] = index
            if len(self._processes) == self._place.count:
                self._start()
            for message in messages:
                self._answer(index, process, message)

    def _is_of_the_next_job(self, index: int) -> bool:
        """Return whether this job has had all its processes and is at its end, or has heard that this one is done."""
        there = self._processes.get(index)
        return self._started and bool(self._failures or self._told or (there and there.done))

    def _start(self) -> None:
        self._started = True
        for process in self._processes.values():  # waiting for the last one was no hang
            process.since = time.monotonic()
        self._tell_all(started=True)

    def _refuse(self, process: _Process, line: str) -> None:
        self._send(process.wire, end={"code": EXIT_USER, "line": line, "kind": "said"})
        self._forget(process.wire)
        if not self._started:  # a job at work is not ended by somebody who was started twice
            self._end(EXIT_USER, line)
            self._turn_until(lambda: False, _LATE_S)  # others come a little later, and are told

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
            now = (message["beat"], message["doing"], message.get("pulse", 0))
            if now != (process.step, process.doing, process.pulse):
                process.step, process.doing, process.pulse = now
                process.since = time.monotonic()
            process.patience, process.silent_s = (
                message.get("patience", 1),
                message.get("silent_s", 0.0),
            )
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
                "said",
                EXIT_USER,
                f"processes of one job do different things ({keys}); start all with the same command",
            )
        elif len(said) == self._place.count:
            del self._rounds[number]
            for process in self._processes.values():
                process.since = time.monotonic()
            try:
                self._tell_all(round=number, values=[said[i][1] for i in range(self._place.count)])
            except EnvironmentProblem as error:
                self._fail("said", EXIT_ENVIRONMENT, f"{key}: {error}")

    def _tick(self, now: float) -> None:
        """Look at the clock: who is missing, silent or stuck. The time in which the hub was suspended does not count."""
        suspended_s, self._ticked = max(now - self._ticked - BEAT_S, 0), now
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
            return
        if not self._started:
            if now - self._begun > self._place.start_timeout_s:
                self._end(EXIT_ENVIRONMENT, self._missing())
            return
        working = {index: process for index, process in self._processes.items() if not process.done}
        for process in working.values():
            if process.wire.queued_bytes > _MOST_QUEUED_BYTES:
                self._lose(process, "it does not read what it is told")
                return
            if now - process.heard > SILENT_S:
                line = f"{process.name} has not been heard of for {SILENT_S:.0f} s: its machine or its network has failed"
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
        busy = [process for process in working.values() if process.patience] or list(
            working.values()
        )
        if busy and all(now - process.since > hang_s * (process.patience or 1) for process in busy):
            what = "; ".join(
                f"{process.name} is {process.doing}" for process in _slowest_first(working)
            )
            seconds = now - max(process.since for process in busy)
            line = (
                f"nothing has gone on for {seconds:.0f} s (--hang_timeout_s = {hang_s:.0f}): {what}"
            )
            self._end(EXIT_ENVIRONMENT, line, "hung")

    def _missing(self) -> str:
        missing = [str(index) for index in range(self._place.count) if index not in self._processes]
        which = (
            f"process {missing[0]}" if len(missing) == 1 else f"processes {', '.join(missing[:8])}"
        )
        return (
            f"{which}{' and more' * (len(missing) > 8)} of {self._place.count} did not come within "
            f"{self._place.start_timeout_s:.0f} s: start them, and see that they reach "
            f"{self._place.host}:{self._place.port}, or raise --start_timeout_s"
            + (f" ({closed}; {secrets.HOW})" if (closed := self.strangers()) else "")
        )

    def _fail(self, kind: str, code: int, line: str) -> None:
        self._failures.append((KINDS.index(kind), time.monotonic(), code, line))

    def _end(self, code: int, line: str, kind: str = "said") -> None:
        """Tell all to end, process 0 last: without JAX's coordination service, which it has, the others would be aborted."""
        self._over = True
        self._told = {"code": code, "line": line, "kind": kind}
        there = {
            index: process
            for index, process in self._processes.items()
            if not (process.down or process.done)
        }
        for wave in ([p for i, p in there.items() if i], [p for i, p in there.items() if not i]):
            for process in wave:
                self._send(process.wire, end=self._told)
            self._turn_until(lambda wave=wave: all(process.down for process in wave), _KILLING_S)  # type: ignore[misc]
        self._turn_until(lambda: not self._strangers, 1.0)  # one of ours may just be on its way in

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
        """Let the selector say when what is queued can be sent."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wire.queued_bytes else 0)
        if wire.fileno() >= 0 and self._selector.get_key(wire).events != events:
            self._selector.modify(wire, events)

    def _close(self, wire: QueuedWire) -> None:
        """Close a connection that has not proven itself, and count it."""
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
    """Order processes by how far they are; of many that are equally far, one speaks for all."""
    ordered = sorted(
        processes.values(), key=lambda process: (process.step, process.doing.startswith("in step"))
    )
    seen: set[tuple[int, str]] = set()
    return [p for p in ordered if (p.step, p.doing) not in seen and not seen.add((p.step, p.doing))]  # type: ignore[func-returns-value]
