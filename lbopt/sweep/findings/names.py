"""Names of arms in running text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def quoted(name: str) -> str:
    """Return a name, in quotation marks where it would not be seen as one.

    >>> quoted("LAMB + LEGW"), quoted("momentum, linear"), quoted("+ LEGW")
    ('LAMB + LEGW', '"momentum, linear"', '"+ LEGW"')
    """
    return name if name[:1].isalnum() and not {",", ";"} & set(name) else f'"{name}"'


def arm_name(arm: Mapping[str, Any]) -> str:
    """Return the name of an arm of a summary, or of a step of its waterfall."""
    return quoted(arm["arm"])


def listed(names: Iterable[str]) -> str:
    """Return names as a list in running text.

    >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def grouped(texts: Iterable[tuple[str, str]]) -> str:
    """Say of whom what is true, those together of whom the same is.

    Args:
      texts: (what, name) of several.

    >>> grouped([("1", "a"), ("1", "b"), ("14", "c")]), grouped([("1", "a"), ("1", "b")]), grouped([("1", "a")])
    ('1 for a, b; 14 for c', '1 for every arm', '1 for a')
    """
    names: dict[str, list[str]] = {}
    for what, name in texts:
        names.setdefault(what, []).append(quoted(name))
    if len(names) == 1 and len(next(iter(names.values()))) > 1:
        return f"{next(iter(names))} for every arm"
    return "; ".join(f"{what} for {', '.join(found)}" for what, found in names.items())
