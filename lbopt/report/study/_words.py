"""Sentences from jinja templates, names of arms in running text, and numbers as text."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

from lbopt.report import _page

HELD = "held"
NOT_HELD = "did not hold"
UNKNOWN = "cannot be told"


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """A claim of a paper and its verdict.

    Attributes:
      claim: Short name.
      verdict: "held", "did not hold" or "cannot be told".
      sentence: Claim and verdict in words, with the numbers.
    """

    claim: str
    verdict: str
    sentence: str


def judged(claim: str, verdict: str, what: str, *evidence: str) -> Claim:
    """Return a claim with its sentence.

    Args:
      claim: Short name.
      verdict: `HELD`, `NOT_HELD` or `UNKNOWN`.
      what: The claim as a clause.
      *evidence: Clauses with the reasons of the verdict; empty ones are left out.

    >>> judged("x", HELD, "two is even", "2 = 2 * 1").sentence
    'That two is even held here: 2 = 2 * 1.'
    >>> judged("x", UNKNOWN, "two is even", "", "no two").sentence
    'Whether two is even cannot be told here: no two.'
    """
    opening = "Whether" if verdict == UNKNOWN else "That"
    clauses = "; ".join(clause for clause in evidence if clause)
    return Claim(claim, verdict, f"{opening} {what} {verdict} here: {clauses}.")


def say(template: str, **values: Any) -> str:
    """Fill in a jinja template; line breaks of the template become spaces.

    Filters: `name` quotes the name of an arm if it needs it, `listed` joins names, `count` writes a
    number with its noun, `number` writes three significant digits.

    >>> say("{{ arms | map('name') | listed }} won {{ 2 | count('time') }}", arms=["a", "+ b"])
    'a and "+ b" won 2 times'
    """
    return _compiled(" ".join(template.split())).render(values)


@functools.cache
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


@functools.cache
def _environment() -> Any:
    environment = _page.need("jinja2").Environment(autoescape=False)
    environment.filters |= {"name": quoted, "listed": listed, "count": count, "number": number}
    return environment


def quoted(name: str) -> str:
    """Return the name of an arm, in quotation marks if it would not read as a name.

    >>> quoted("LAMB + LEGW"), quoted("momentum, linear"), quoted("+ LEGW")
    ('LAMB + LEGW', '"momentum, linear"', '"+ LEGW"')
    """
    return name if name[:1].isalnum() and not {",", ";"} & set(name) else f'"{name}"'


def listed(names: Iterable[Any], last_word: str = "and") -> str:
    """Return names as a list in running text.

    >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    *others, last = map(str, names)
    return f"{', '.join(others)} {last_word} {last}" if others else last


def count(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> count(1, "arm"), count(2, "arm")
    ('1 arm', '2 arms')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with a given count of significant digits; "" for None."""
    return "" if value is None else f"{value:.{digits}g}"


def span(values: Iterable[float], form: str = "{:.3g}") -> str:
    """Return the range of numbers as text; one number if both ends are written alike.

    >>> span([0.5, 2.0, 1.0]), span([3, 3])
    ('0.5 to 2', '3')
    """
    found = list(values)
    low = form.format(min(found))
    high = form.format(max(found))
    return low if low == high else f"{low} to {high}"


def grouped(texts: Iterable[tuple[str, str]]) -> str:
    """Return texts about arms; arms with the same text are named together.

    Args:
      texts: Pairs (text, name of an arm).

    >>> grouped([("1", "a"), ("1", "b"), ("14", "c")]), grouped([("1", "a"), ("1", "b")])
    ('1 for a, b; 14 for c', '1 for every arm')
    """
    names: dict[str, list[str]] = {}
    for text, name in texts:
        names.setdefault(text, []).append(quoted(name))
    if len(names) == 1 and sum(map(len, names.values())) > 1:
        return f"{next(iter(names))} for every arm"
    return "; ".join(f"{text} for {', '.join(found)}" for text, found in names.items())
