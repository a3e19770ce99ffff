"""Colours of the reports: optimizers, batch sizes, and the two backgrounds they are read on."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Sequence
from typing import NamedTuple

PAPER = "#ffffff"
"""Background in light mode, and of every PNG."""
DARK_PAPER = "#16181d"
"""Background in dark mode."""
INK = "#222222"
SOFT_INK = "#5b6068"
GREY = "#8a8f98"
"""Lines that are not data: ideals, limits, reference lines; contrast 3 on both backgrounds."""
GRID = "#ececee"
EMPTY = "#cfd2d6"
"""Things without a number, for instance diverged candidates."""
BETTER = "#1c7ed6"
WORSE = "#d9480f"

_DARK_NEUTRALS = {
    PAPER: DARK_PAPER,
    INK: "#e6e7ea",
    SOFT_INK: "#a9aeb8",
    GRID: "#2d3138",
    EMPTY: "#4a4f58",
}
"""Neutral colours that a figure exchanges in dark mode; the others are read on both backgrounds."""


class Look(NamedTuple):
    """Colour and marker of an optimizer; the marker in matplotlib's letters."""

    colour: str
    marker: str


# All have a contrast of 3 or more on both backgrounds; a test computes it.
_LOOKS = {
    "lamb": Look("#d9480f", "D"),
    "lars": Look("#2b8a3e", "^"),
    "lans": Look("#c2255c", "v"),
    "adam": Look("#1c7ed6", "o"),
    "adamw": Look("#0c8599", "s"),
    "momentum": Look("#7d828c", "P"),
    "nesterov": Look("#946b2d", "p"),
    "rmsprop": Look("#7950f2", "h"),
    "muon": Look("#ae3ec9", "*"),
    "lion": Look("#b8860b", "X"),
    "adamh": Look("#4c6ef5", "H"),
    "muonh": Look("#e64980", "d"),
    "soap": Look("#12976f", "<"),
    "shampoo": Look("#5f8b1e", "p"),
    "schedule_free_adamw": Look("#b35c44", "8"),
}
_SAME = {"sgd": "momentum", "nadam": "adam", "nadamw": "adamw"}
_OWN_COLOURS = ("#5f8b1e", "#e64980", "#4c6ef5", "#a8527a", "#b35c44", "#12976f")
_OWN_MARKERS = ("<", ">", "d", "H", "8")

MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*", "p", "h", "<", ">", "d", "H", "8")
"""Markers that tell arms of one optimizer apart."""
LINES = ("-", (0, (5, 1.5)), (0, (1.3, 1.3)), (0, (6, 1.5, 1.3, 1.5)))
"""Lines that tell arms of one optimizer apart."""


def optimizer_look(name: str, nesterov: bool = False) -> Look:
    """Return the colour and the marker of an optimizer, the same wherever optimizers are compared.

    Args:
      name: Name in a config: lbopt's own, or the path of another, whose last name counts.
      nesterov: Whether momentum is Nesterov's.

    Returns:
      The look of a known name; for another, one that depends on its letters alone.

    >>> optimizer_look("optax.lion") == optimizer_look("lion"), optimizer_look("sgd").colour
    (True, '#7d828c')
    """
    last = name.replace(":", ".").split(".")[-1].lower()
    known = _SAME.get(last, last)
    if known == "momentum" and nesterov:
        known = "nesterov"
    if known in _LOOKS:
        return _LOOKS[known]
    letters = zlib.crc32(last.encode("utf-8", "backslashreplace"))
    colour = _OWN_COLOURS[letters % len(_OWN_COLOURS)]
    return Look(colour, _OWN_MARKERS[letters // len(_OWN_COLOURS) % len(_OWN_MARKERS)])


def arm_colours(colours: Sequence[str]) -> list[str]:
    """Return the colours of arms; if all arms have the same, those of other optimizers tell them.

    >>> arm_colours(["#0c8599", "#1c7ed6"]), arm_colours(["#0c8599", "#0c8599"])
    (['#0c8599', '#1c7ed6'], ['#0c8599', '#d9480f'])
    """
    if len(set(colours)) != 1:
        return list(colours)
    others = [look.colour for look in _LOOKS.values() if look.colour != colours[0]]
    return list(itertools.islice(itertools.cycle([colours[0], *others]), len(colours)))


def all_optimizer_colours() -> list[str]:
    """Return every colour that `optimizer_look` can give."""
    return [*(look.colour for look in _LOOKS.values()), *_OWN_COLOURS]


# ---- ordered colours

# Nearly Matplotlib's viridis, from the end that is faint on a background to the end that is strong
# on it.
_ON_LIGHT = ("#21a682", "#1e9c89", "#25848e", "#2f6c8e", "#414487", "#482071", "#440154")
_ON_DARK = ("#336b91", "#277f8e", "#1f9d8a", "#4ac16d", "#7ad151", "#bddf26", "#f1e51d")
_STEPS = 97


def shade(place: int, count: int) -> str:
    """Return the colour of the `place`-th of `count` ordered things; the last is the strongest.

    In dark mode a figure exchanges it for one whose strength is the same on a dark background.

    >>> shade(0, 3), shade(2, 3)
    ('#21a682', '#440154')
    """
    return _between(_ON_LIGHT, round((_STEPS - 1) * (place / (count - 1) if count > 1 else 1.0)))


def dark_colours() -> dict[str, str]:
    """Return the colours that a figure exchanges in dark mode, light to dark."""
    ordered = {_between(_ON_LIGHT, step): _between(_ON_DARK, step) for step in range(_STEPS)}
    return _DARK_NEUTRALS | ordered


def _between(anchors: tuple[str, ...], step: int) -> str:
    """Return a colour between anchors, linear in each channel."""
    position = step / (_STEPS - 1) * (len(anchors) - 1)
    before = min(math.floor(position), len(anchors) - 2)
    share = position - before
    ends = [
        [int(anchor[at : at + 2], 16) for at in (1, 3, 5)]
        for anchor in anchors[before : before + 2]
    ]
    mixed = [round(low + share * (high - low)) for low, high in zip(*ends, strict=True)]
    return "#{:02x}{:02x}{:02x}".format(*mixed)
