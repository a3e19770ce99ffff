"""Records that cannot be used: left out, counted, and too many of them end the run."""

from __future__ import annotations

from lbopt.errors import EnvironmentProblem

DAMAGED = "damaged"
"""In a batch, beside its arrays: the (number, reason) of the records that were found damaged in making it."""


class DamagedRecord(ValueError):
    """A record that cannot be used, and why."""


class DamagedCount:
    """How many records of a split were found damaged so far, each counted once.

    Every process of a run counts what it reads itself, from its start on: the limit is each one's, and begins anew after a
    restart.

    Args:
      place: what is read, for the message.
      limit: so many are skipped.
      field: what the limit is called where it was given.
    """

    def __init__(self, place: str, limit: int, field: str = "config.data.max_damaged_records"):
        self._place, self._limit, self._field = place, limit, field
        self._found: set[int] = set()

    def __len__(self) -> int:
        return len(self._found)

    def add(self, index: int, reason: str) -> None:
        """Count a record.

        Raises:
          EnvironmentProblem: if it is one too many.
        """
        self._found.add(index)
        if len(self._found) > self._limit:
            raise EnvironmentProblem(
                f"{self._place}: record {index} cannot be used ({reason}), and {self._field} = {self._limit} are "
                "skipped; mend the data set, or allow more"
            )
