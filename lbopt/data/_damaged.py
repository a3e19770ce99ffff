"""Damaged records: skipped and counted; too many of them end the run."""

from __future__ import annotations

from lbopt.errors import EnvironmentProblem

DAMAGED = "damaged"
"""Key of a batch with the (index, reason) of each damaged record found while making it."""


class DamagedRecord(ValueError):
    """A record that cannot be used, with the reason."""


class DamagedCount:
    """Number of different damaged records of a split.

    Each process counts the records that it reads itself. The count restarts at 0 with the process.

    Args:
      split: Name of the data set and the split, for the message.
      limit: Maximum number of damaged records to skip before raising.
      field: Name of the limit in errors.
    """

    def __init__(self, split: str, limit: int, field: str = "max_damaged_records"):
        self._split = split
        self._limit = limit
        self._field = field
        self._found: set[int] = set()

    def __len__(self) -> int:
        return len(self._found)

    def add(self, index: int, reason: str) -> None:
        """Count a record.

        Raises:
          EnvironmentProblem: If there are more damaged records than the limit.
        """
        self._found.add(index)
        if len(self._found) > self._limit:
            fix = (
                f"record {index} of {self._split} cannot be used ({reason}), which is one too "
                "many; repair the data set, or allow more"
            )
            raise EnvironmentProblem(self._field, self._limit, fix, code="damaged")
