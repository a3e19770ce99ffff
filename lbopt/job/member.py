"""The process that computes, seen from inside: what it tells the others, and what they agree on."""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from lbopt.errors import EnvironmentProblem, UserError
from lbopt.job import pulse
from lbopt.job.hub import BEAT_S
from lbopt.job.place import Place
from lbopt.job.wire import Wire

VARIABLE = "LBOPT_MEMBER"
"""The environment variable by which a guard tells its child who it is."""
STARTING = 4
"""The patience with what comes before the first step: data are made ready and programs compiled."""
_RELEASE_S = 20.0


def describe(place: Place, descriptor: int, everywhere: bool = False) -> str:
    """Return what a guard writes into `VARIABLE`."""
    local = list(place.local_device_ids) if place.local_device_ids else None
    bind = None if place.index or everywhere else place.jax_bind_address
    return json.dumps(
        [
            descriptor,
            place.index,
            place.count,
            place.jax_address,
            place.start_timeout_s,
            local,
            bind,
        ]
    )


class Alone:
    """The only process of a job, as far as it asks what `Member` answers."""

    index, count = 0, 1
    stop_wanted = False
    _receive: Callable[[Any], None] = staticmethod(lambda value: None)

    def together(self, key: str, value: Any) -> list[Any]:
        """Return what all have said."""
        del key
        return [value]

    def from_first(self, key: str, value: Any) -> Any:
        """Return what process 0 says."""
        return self.together(key, value if self.index == 0 else None)[0]

    def on_post(self, receive: Callable[[Any], None]) -> None:
        """Say what process 0 does with what the others post; in them it has no effect."""
        self._receive = receive

    def post(self, value: Any) -> None:
        """Hand a value to process 0 without waiting; what one process posts comes in order, and before what it says together."""
        self._receive(value)

    def doing(self, what: str, step: int = 0, patience: float = 1) -> None:
        """Say what the process is at, for when it hangs.

        Args:
          what: in words.
          step: of training that this belongs to.
          patience: how many times `hang_timeout_s` it may take; 0 if it only waits for the others.
        """

    def stops_after(self, step: int) -> bool:
        """Return whether to stop, now that a step is done: all processes answer alike."""
        del step
        return self.stop_wanted

    def fail(self, code: int, line: str) -> None:
        """Tell the others that this process ends with an error, and wait until they have ended."""

    def same(self, what: str, ours: dict[str, Any], names: str = "config") -> None:
        """Raise `UserError` in every process unless all have said the same.

        Args:
          what: they are to agree on, in words.
          ours: nested JSON data.
          names: what goes before a field's name.
        """
        first, *others = self.together(what, ours)
        for index, other in enumerate(others, 1):
            for name, (a, b) in _differences(first, other, names).items():
                raise UserError(
                    f"{name}: process 0 of {self.count} has {a!r}, process {index} has {b!r}; start all with the same {what}"
                )


class Member(Alone):
    """One of several processes.

    Args:
      connection: to the guard.
      index: of this process.
      count: of processes.
      jax_address: of JAX's coordination service.
      start_timeout_s: how long JAX may take to bring them together.
      local_device_ids: see `Place`.
      jax_bind_address: where that service listens; None for every interface.
    """

    def __init__(
        self,
        connection: socket.socket,
        index: int,
        count: int,
        jax_address: str,
        start_timeout_s: float,
        local_device_ids: list[int] | None,
        jax_bind_address: str | None = None,
    ):
        self.index, self.count = index, count
        self.jax_bind_address = jax_bind_address
        self.jax_address, self.start_timeout_s, self.local_device_ids = (
            jax_address,
            start_timeout_s,
            local_device_ids,
        )
        self._wire = Wire(connection)
        self._round = 0
        self._said: dict[int, list[Any]] = {}
        self._now: tuple[int, str, float] = (0, "starting", STARTING)
        self._step = 0
        self._bound: int | None = None
        self._stop_at: int | None = None
        self._asked = self._lost = False
        self._problem: Exception | None = None
        self._changed = threading.Condition()
        self._released = threading.Event()
        faulthandler.enable()  # the guard asks by SIGABRT where a process hangs
        threading.Thread(target=self._listen, name="lbopt member", daemon=True).start()
        threading.Thread(target=self._beat, name="lbopt beats", daemon=True).start()

    def together(self, key: str, value: Any) -> list[Any]:
        """Say something, wait until every process has, and return what all have said, by index.

        Every process calls this equally often, in the same order.

        Args:
          key: what it is about.
          value: JSON data.
        """
        number, self._round = self._round, self._round + 1
        try:
            self._wire.send(say=key, round=number, value=value)
        except EnvironmentProblem as error:
            raise EnvironmentProblem(f"{key}: {error}") from error
        with self._changed:
            self._changed.wait_for(lambda: number in self._said or self._lost or self._problem)
            self._check()
            return self._said.pop(number)

    def post(self, value: Any) -> None:
        """Hand a value to process 0 without waiting; what one process posts comes in order, and before what it says together."""
        if self.index == 0:
            self._receive(value)
        else:
            self._wire.send(post=value)

    def doing(self, what: str, step: int = 0, patience: float = 1) -> None:
        """Say what the process is at, for when it hangs."""
        self._now = (step, what, patience)

    def stops_after(self, step: int) -> bool:
        """Return whether to stop, now that a step is done: all processes answer alike.

        When one is asked to stop, each says which step it is in and goes no further; all stop after the latest of these.
        """
        with self._changed:
            self._step = step
            if self._bound is not None and step >= self._bound:
                self._changed.wait_for(lambda: self._stop_at is not None or self._lost)
                self._check()
            return self._stop_at is not None and step >= self._stop_at

    def fail(self, code: int, line: str) -> None:
        """Tell the others that this process ends with an error, and wait until they have ended."""
        self._wire.send(failed=code, line=line)
        self._released.wait(_RELEASE_S)

    def _check(self) -> None:
        if self._problem is not None:
            raise self._problem
        if self._lost:
            raise EnvironmentProblem(
                "the guard of this process is gone; run the same command again"
            )

    def _listen(self) -> None:
        while (messages := self._wire.receive()) is not None:
            for message in messages:
                self._hear(message)
        with self._changed:
            self._lost = True
            self._changed.notify_all()
        self._released.set()

    def _hear(self, message: dict[str, Any]) -> None:
        if "posted" in message:
            self._take(message["posted"])
            return
        with self._changed:
            if "round" in message:
                self._said[message["round"]] = message["values"]
            elif "stop" in message:
                self.stop_wanted = self._asked = True
                self._bound = self._step + 1
                self._wire.send(bound=self._bound)
            elif "stop_at" in message:
                self._stop_at = message["stop_at"]
            elif "release" in message:
                self._released.set()
            self._changed.notify_all()

    def _take(self, posted: Any) -> None:
        """Do with a post what process 0 does with them; what that raises is raised where the process next waits for the others."""
        if self._problem is None:
            try:
                self._receive(posted)
            except Exception as error:
                with self._changed:
                    self._problem, self.stop_wanted = error, True  # nothing more would be kept
                    self._changed.notify_all()

    def _beat(self) -> None:
        """Say every now and then what goes on, and soon when this process has been asked to stop."""
        turns = 0
        while not self._released.wait(BEAT_S / 10):
            if self.stop_wanted and not self._asked:
                self._asked = True
                self._wire.send(stop=True)
            turns += 1
            if turns % 5 == 0:
                step, doing, patience = self._now
                self._wire.send(beat=step, doing=doing, pulse=pulse.count(), patience=patience)


def _differences(first: Any, other: Any, name: str) -> dict[str, tuple[Any, Any]]:
    """Return field -> the two values, where they differ."""
    if isinstance(first, dict) and isinstance(other, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for key in {**first, **other}:
            found |= _differences(first.get(key), other.get(key), f"{name}.{key}".lstrip("."))
        return found
    return {} if first == other else {name: (first, other)}


def join() -> Alone:
    """Return this process's part in its job: what its guard has told it, or that it is alone."""
    described = os.environ.pop(VARIABLE, None)  # what this process starts is no member
    if described is None:
        return Alone()
    descriptor, *rest = json.loads(described)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(
        False
    )  # the guard hears that this process has ended, whatever it has started
    return Member(connection, *rest)
