"""Text from outside, made safe to show: on a terminal, on a page, in a table or a shell command."""

from __future__ import annotations

import shlex
import unicodedata
from collections.abc import Iterable

_LONGEST = 4000
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def printable(text: str, keep: str = "") -> str:
    r"""Return text with escapes for control characters, direction marks and lone surrogates.

    Args:
      text: Any text.
      keep: Characters that stay as they are, a newline for instance.

    >>> printable("a\x1b[31mb\nc\u202e")
    'a\\x1b[31mb\\nc\\u202e'
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter in keep or _is_visible(letter) else repr(letter)[1:-1] for letter in text
    )


def one_line(text: str) -> str:
    r"""Return a message as one line, of 4000 characters at most.

    >>> one_line("runs/a\nb: it is missing;\x1b[2J  make it")
    'runs/a b: it is missing;\\x1b[2J make it'
    """
    line = printable(" ".join(text.split()))
    if len(line) <= _LONGEST:
        return line
    return f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"


def shell_line(words: Iterable[str]) -> str:
    r"""Return a command as a user would type it, one line that bash splits into these words.

    >>> shell_line(["lbopt", "report", "--workdir=my runs"]), shell_line(["a\nb", "$(id)"])
    ("lbopt report '--workdir=my runs'", "$'a\\x0ab' '$(id)'")
    """
    return " ".join(map(_shell_word, words))


def show(*lines: str) -> None:
    """Print lines to standard output, each made `printable`."""
    for line in lines:
        print(printable(line))


def spreadsheet_cell(text: str) -> str:
    r"""Return text as one line of a CSV file that no spreadsheet takes for a formula.

    >>> spreadsheet_cell("=1+1"), spreadsheet_cell("LAMB + LEGW")
    ("'=1+1", 'LAMB + LEGW')
    """
    return f"{chr(39) if text.startswith(_FORMULA) else ''}{printable(text)}"


def _is_visible(letter: str) -> bool:
    category = unicodedata.category(letter)
    return category[0] != "C" and category not in ("Zl", "Zp")


def _shell_word(word: str) -> str:
    if all(map(_is_visible, word)):
        return shlex.quote(word)
    return f"$'{''.join(map(_escaped, word))}'"


def _escaped(letter: str) -> str:
    """Return a letter as it is written inside $'...' of bash."""
    if letter in "\\'":
        return "\\" + letter
    return letter if _is_visible(letter) else _as_bytes(letter)


def _as_bytes(letter: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in letter.encode("utf-8", "surrogateescape"))
