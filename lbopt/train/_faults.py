"""Reasons why a checkpoint cannot be read: it is damaged, or the storage is at fault."""

from __future__ import annotations

from typing import Any, NamedTuple

from lbopt.errors import EnvironmentProblem

_NOT_DAMAGE = (
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "RESOURCE_EXHAUSTED",
    "ABORTED",
    "CANCELLED",
)
"""Status codes of storage layers that say nothing about the data."""
_WRONG_KIND = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_CLIENTS = ("gcsfs", "aiohttp", "google")
"""Packages whose exceptions say that a bucket does not answer."""
_MOST_CHARACTERS = 120


class Damaged(EnvironmentProblem):
    """A checkpoint differs from the saved state.

    Attributes:
      what: Description of the damage.
    """

    def __init__(self, checkpoint: str, what: str, fix: str):
        super().__init__(checkpoint, reason=f"{what}; {fix}", code="damaged")
        self.what = what


class Fault(NamedTuple):
    """The reason why a checkpoint cannot be read; processes send it to each other as a list.

    Attributes:
      field: Path of the checkpoint, or name of the setting at fault.
      value: Value of the setting; None for a checkpoint.
      what: Description of the fault.
      fix: Instruction to the user, which ends the message.
      is_damage: Whether the checkpoint is damaged, so that an earlier one may be used.
    """

    field: str
    value: str | None
    what: str
    fix: str
    is_damage: bool

    def error(self) -> EnvironmentProblem:
        """Return the fault as an exception, `Damaged` if it is that."""
        reason = f"{self.what}; {self.fix}"
        if self.value is not None:
            return EnvironmentProblem(self.field, self.value, reason, code="mismatch")
        if self.is_damage:
            return Damaged(self.field, self.what, self.fix)
        return EnvironmentProblem(self.field, reason=reason, code="resource")


def unreadable(checkpoint: Any, earlier: list[int], reason: str, is_damage: bool) -> Fault:
    """Return the fault of a checkpoint that cannot be read.

    Args:
      checkpoint: Folder of the checkpoint.
      earlier: Steps of earlier checkpoints.
      reason: Reason why the checkpoint cannot be read.
      is_damage: Whether the checkpoint is damaged.
    """
    then = (
        f"to resume at step {max(earlier)}" if earlier else "to start again, or use another workdir"
    )
    what = f"this checkpoint cannot be read ({reason})"
    return Fault(str(checkpoint), None, what, f"remove that folder {then}", is_damage)


def is_damage(error: Exception) -> bool:
    """Return whether what was read is wrong, and not only out of reach."""
    if isinstance(error, OSError | MemoryError) and not isinstance(error, _WRONG_KIND):
        return False
    if type(error).__module__.partition(".")[0] in _CLIENTS:
        return False
    return not any(word in str(error) for word in _NOT_DAMAGE)


def reason_of(error: Exception) -> str:
    """Return the first line of a storage layer's message."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:_MOST_CHARACTERS]
