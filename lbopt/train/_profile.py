"""A trace of some steps for xprof, which shows where the time of a step goes."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax

from lbopt.errors import UserError, require
from lbopt.parallel import TrainState
from lbopt.workdir import PROFILE_FOLDER, checkpoint_root, file_errors, shown_path

_WARMUP = 2
"""First steps of a start that are never traced: they compile."""
_FORM = re.compile(r"(?:([0-9]{1,9}):)?([0-9]{1,9})")


@dataclasses.dataclass(frozen=True)
class ProfiledSteps:
    """The steps of a run that are traced.

    Attributes:
      text: The steps as the user gave them: `FIRST:LAST`, both traced, or their number.
      first: The first step; None for the first one after the warmup of a start.
      last: The last step; the number of steps if there is no first one.
    """

    text: str
    first: int | None
    last: int

    @classmethod
    def parse(cls, text: str) -> ProfiledSteps:
        """Read `FIRST:LAST` or a number of steps.

        Raises:
          UserError: Naming `profile`.

        >>> ProfiledSteps.parse("10:20").range_after(0), ProfiledSteps.parse("3").range_after(10)
        (range(10, 21), range(13, 16))
        """
        found = _FORM.fullmatch(text)
        fix = "give FIRST:LAST, for instance 10:20, or a number of steps"
        require(found, "profile", text, fix)
        assert found is not None
        first = None if found[1] is None else int(found[1])
        asked = cls(text, first, int(found[2]))

        fix = f"steps 1 to {_WARMUP} compile; give a FIRST of at least {_WARMUP + 1}"
        require(first is None or first > _WARMUP, "profile", text, fix)
        fix = "it has no steps; give a LAST that is not before FIRST, or a number of at least 1"
        require(asked.last >= (first or 1), "profile", text, fix)
        return asked

    def range_after(self, start: int) -> range:
        """Return the steps that are traced by a start after a step."""
        warm = start + _WARMUP + 1
        if self.first is None:
            return range(warm, warm + self.last)
        return range(max(warm, self.first), self.last + 1)

    def check(self, total: int) -> None:
        """Raise `UserError`, naming `profile`, if a run of `total` steps traces none of them."""
        fix = f"the run has {total} steps, of which it compiles the first {_WARMUP}; give others"
        require(self.range_after(0).start <= total, "profile", self.text, fix)


class StepProfile:
    """Traces steps of a run once, into `profile/` of its workdir.

    Args:
      asked: The steps; None for none.
      workdir: The workdir.
      start: The step at which this start begins.
      say: Function that prints a line.
    """

    def __init__(
        self,
        asked: ProfiledSteps | None,
        workdir: pathlib.Path,
        start: int,
        say: Callable[[str], None],
    ):
        self._folder = workdir / PROFILE_FOLDER
        self._say = say
        self._steps = range(0) if asked is None else asked.range_after(start)
        self._is_active = False
        if asked is None:
            return

        kept = checkpoint_root(workdir) / PROFILE_FOLDER
        if kept.exists():
            say(f"--profile: {kept} is there already; remove it to trace steps again")
            self._steps = range(0)
        elif not self._steps:
            say(f"--profile = {asked.text}: those steps are over at step {start}; none is traced")

    def step(self, step: int, state: TrainState) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a step, before which the trace begins if it is the first one."""
        if step not in self._steps:
            return contextlib.nullcontext()
        if not self._is_active:
            jax.block_until_ready(state)
            self._begin()
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def end(self, step: int, state: TrainState) -> None:
        """End the trace after its last step, when that is done on the devices."""
        if self._is_active and step >= self._steps[-1]:
            jax.block_until_ready(state)
            self.close()

    def _begin(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # it slows steps and makes most of the file
        try:
            with file_errors(self._folder):
                jax.profiler.start_trace(self._folder, profiler_options=options)
        except RuntimeError as error:
            fix = f"JAX's profiler refuses ({error}); end the other trace of this process"
            raise UserError("profile", reason=fix, code="conflict") from error
        self._is_active = True

    def close(self) -> None:
        """Write what was traced; does nothing without a trace."""
        if not self._is_active:
            return
        self._is_active = False
        with file_errors(self._folder):
            jax.profiler.stop_trace()
        self._say(f"profile of steps from {self._steps[0]} on: {shown_path(self._folder)}")
