"""A claim and what became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

HELD, NOT_HELD, UNKNOWN = "held", "did not hold", "cannot be told"
Arms = Sequence[Mapping[str, Any]]


class Claim(NamedTuple):
    """A claim and what became of it.

    Attributes:
      claim: a short name.
      verdict: "held", "did not hold" or "cannot be told".
      sentence: both in words, with the numbers.
    """

    claim: str
    verdict: str
    sentence: str


def said(claim: str, verdict: str, what: str, numbers: str) -> Claim:
    """Put a claim into a sentence.

    Args:
      claim: a short name.
      verdict: `HELD`, `NOT_HELD` or `UNKNOWN`.
      what: is claimed, as a clause.
      numbers: that led to the verdict.

    >>> said("x", "held", "two is even", "2 = 2 * 1").sentence
    'That two is even held here: 2 = 2 * 1.'
    >>> said("x", "cannot be told", "two is even", "no two").sentence
    'Whether two is even cannot be told here: no two.'
    """
    return Claim(
        claim,
        verdict,
        f"{'Whether' if verdict == UNKNOWN else 'That'} {what} {verdict} here: {numbers}.",
    )
