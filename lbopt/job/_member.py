"""A job as seen by the process that computes: messages to the other processes, and agreement."""

from __future__ import annotations

import abc
import faulthandler
import json
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from lbopt import errors
from lbopt.errors import EnvironmentProblem, UserError
from lbopt.job import _pulse
from lbopt.job._hub import BEAT_S
from lbopt.job._place import Place
from lbopt.job._wire import Wire

MEMBER_VARIABLE = "LBOPT_MEMBER"
"""The environment variable by which a guard describes the job to its child."""
STARTING_PATIENCE = 4
"""The patience during start-up, while data are prepared and programs are compiled."""
_RELEASE_S = 20.0
"""Seconds that a failed process waits for the others: if process 0 ends first, JAX aborts them."""


def describe(place: Place, descriptor: int, everywhere: bool = False) -> str:
    """Return the value of `MEMBER_VARIABLE` for a guard's child.

    Args:
      place: The place of the process.
      descriptor: File descriptor of the child's connection to its guard.
      everywhere: Whether JAX's coordination service listens on every interface.
    """
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


class Job(abc.ABC):
    """The job that this process takes part in.

    Attributes:
      index: Index of this process, from 0.
      count: Number of processes in the job.
      stop_wanted: Whether the job has been asked to save its state and stop.
    """

    index = 0
    count = 1
    stop_wanted = False
    _receive: Callable[[Any], None] = staticmethod(lambda value: None)

    @abc.abstractmethod
    def together(self, key: str, value: Any) -> list[Any]:
        """Send a value, wait for every process's value, and return all of them by index.

        Every process makes the same calls in the same order.

        Args:
          key: Name of the value, the same in all processes.
          value: JSON data.
        """

    def from_first(self, key: str, value: Any) -> Any:
        """Return the value of process 0, in every process; see `together`."""
        return self.together(key, value if self.index == 0 else None)[0]

    def on_post(self, receive: Callable[[Any], None]) -> None:
        """Set the function that process 0 calls with each posted value; ignored in the others."""
        self._receive = receive

    @abc.abstractmethod
    def post(self, value: Any) -> None:
        """Send a value to process 0 without waiting.

        The posts of one process arrive in order, and before the values that it sends afterwards by
        `together`.
        """

    @abc.abstractmethod
    def doing(self, what: str, step: int = 0, patience: float = 1) -> None:
        """Record what this process is doing, for the message if it hangs.

        Args:
          what: The activity, in words.
          step: The training step that the activity belongs to.
          patience: The activity may take this many times `hang_timeout_s`; 0 if it only waits for
            other processes.
        """

    @abc.abstractmethod
    def stops_after(self, step: int) -> bool:
        """Return whether to stop after a finished step; the answer is the same in all processes."""

    @abc.abstractmethod
    def fail(self, code: int, line: str) -> None:
        """Report that this process ends with an error, and wait until the others have ended."""

    def same(self, what: str, ours: dict[str, Any], names: str = "config") -> None:
        """Raise `UserError` in every process unless all of them pass the same data.

        Args:
          what: Name of the data, for the message.
          ours: Nested JSON data of this process.
          names: Prefix of the field names in the message.
        """
        first, *others = self.together(what, ours)
        for index, other in enumerate(others, 1):
            for field, (of_first, of_other) in _differences(first, other, names).items():
                raise UserError(
                    field,
                    of_first,
                    f"process 0 of {self.count} has this, and process {index} has "
                    f"{errors.brief(of_other)}; start every process with the same {what}",
                    code="mismatch",
                )


class SoloJob(Job):
    """A job of one process."""

    def together(self, key: str, value: Any) -> list[Any]:
        """Return the value alone."""
        del key
        return [value]

    def post(self, value: Any) -> None:
        """Receive the value at once."""
        self._receive(value)

    def doing(self, what: str, step: int = 0, patience: float = 1) -> None:
        """Do nothing: no other process waits for this one."""

    def stops_after(self, step: int) -> bool:
        """Return whether this process has been asked to stop."""
        del step
        return self.stop_wanted

    def fail(self, code: int, line: str) -> None:
        """Do nothing: no other process has to be told."""


class MemberJob(Job):
    """A job of several processes, seen from one of them.

    Args:
      connection: Connection to this process's guard.
      index: Index of this process.
      count: Number of processes.
      jax_address: HOST:PORT of JAX's coordination service.
      start_timeout_s: Seconds that JAX may take to connect the processes.
      local_device_ids: Devices of this host that this process uses; None for all of them.
      jax_bind_address: HOST:PORT where JAX's coordination service listens; None for every
        interface.
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
        self.index = index
        self.count = count
        self.jax_address = jax_address
        self.jax_bind_address = jax_bind_address
        self.start_timeout_s = start_timeout_s
        self.local_device_ids = local_device_ids

        self._wire = Wire(connection)
        self._round = 0
        self._values: dict[int, list[Any]] = {}
        self._activity: tuple[int, str, float] = (0, "starting", STARTING_PATIENCE)
        self._step = 0
        self._bound: int | None = None
        self._stop_at: int | None = None
        self._asked = self._lost = False
        self._problem: Exception | None = None
        self._changed = threading.Condition()
        self._released = threading.Event()

        faulthandler.enable()  # the guard of a process that hangs asks for its stack by SIGABRT
        threading.Thread(target=self._listen, name="lbopt member", daemon=True).start()
        threading.Thread(target=self._beat, name="lbopt beats", daemon=True).start()

    def together(self, key: str, value: Any) -> list[Any]:
        """Send a value, wait for every process's value, and return all of them by index."""
        number = self._round
        self._round += 1
        with errors.under("", message=key):
            self._wire.send(say=key, round=number, value=value)
        with self._changed:
            self._changed.wait_for(lambda: number in self._values or self._lost or self._problem)
            self._check()
            return self._values.pop(number)

    def post(self, value: Any) -> None:
        """Send a value to process 0 without waiting."""
        if self.index == 0:
            self._receive(value)
        else:
            self._wire.send(post=value)

    def doing(self, what: str, step: int = 0, patience: float = 1) -> None:
        """Record what this process is doing; the next heartbeat carries it."""
        self._activity = (step, what, patience)

    def stops_after(self, step: int) -> bool:
        """Return whether to stop after a finished step; the answer is the same in all processes.

        When the job is asked to stop, each process reports the step that it is in and goes no
        further; all of them stop after the latest of these steps.
        """
        with self._changed:
            self._step = step
            if self._bound is not None and step >= self._bound:
                self._changed.wait_for(lambda: self._stop_at is not None or self._lost)
                self._check()
            return self._stop_at is not None and step >= self._stop_at

    def fail(self, code: int, line: str) -> None:
        """Report that this process ends with an error, and wait until the others have ended."""
        self._wire.send(failed=code, line=line)
        self._released.wait(_RELEASE_S)

    def _check(self) -> None:
        if self._problem is not None:
            raise self._problem
        if self._lost:
            fix = "it has ended; run the same command again"
            raise EnvironmentProblem("guard of this process", reason=fix, code="resource")

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
                self._values[message["round"]] = message["values"]
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
        """Receive a posted value in process 0.

        An error is raised where the process next waits for the others, not in this thread.
        """
        if self._problem is None:
            try:
                self._receive(posted)
            except Exception as error:
                with self._changed:
                    self._problem = error
                    self.stop_wanted = True  # later results could not be kept either
                    self._changed.notify_all()

    def _beat(self) -> None:
        """Send heartbeats, and without delay the request to stop that this process has received."""
        turns = 0
        while not self._released.wait(BEAT_S / 10):
            if self.stop_wanted and not self._asked:
                self._asked = True
                self._wire.send(stop=True)
            turns += 1
            if turns % 5 == 0:
                step, doing, patience = self._activity
                self._wire.send(beat=step, doing=doing, pulse=_pulse.count(), patience=patience)


def _differences(first: Any, other: Any, name: str) -> dict[str, tuple[Any, Any]]:
    """Return the two values of each field in which nested data differ, by the field's name."""
    if isinstance(first, dict) and isinstance(other, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for key in {**first, **other}:
            found |= _differences(first.get(key), other.get(key), f"{name}.{key}".lstrip("."))
        return found
    return {} if first == other else {name: (first, other)}


def join_job() -> Job:
    """Return the job that this process's guard describes, or a job of this process alone."""
    # Programs that this process starts are not members, so the variable is removed.
    described = os.environ.pop(MEMBER_VARIABLE, None)
    if described is None:
        return SoloJob()
    descriptor, *rest = json.loads(described)
    connection = socket.socket(fileno=descriptor)
    # A program that inherited the connection would hide this process's end from the guard.
    connection.set_inheritable(False)
    return MemberJob(connection, *rest)
