"""Text in the width of the terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap

WIDTH = 100
"""Columns of output that is no terminal's."""
_NARROWEST = 40


def width() -> int:
    """Return the columns of standard output."""
    if sys.stdout is None or not sys.stdout.isatty():
        return WIDTH
    return max(_NARROWEST, shutil.get_terminal_size((WIDTH, 0)).columns)


def wrapped(text: str, indent: int = 0, hanging: int | None = None) -> list[str]:
    """Return text as lines of the width; words longer than that stay whole.

    Args:
      text: The text.
      indent: Spaces before each line.
      hanging: Spaces before the lines after the first; None for `indent`.
    """
    return textwrap.wrap(
        text,
        width(),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent if hanging is None else hanging),
        break_long_words=False,
        break_on_hyphens=False,
    )
