"""The hostile string that tests share, and every command with the flags that can carry it."""

import contextlib
from unittest import mock

from lbopt.cli import _flags, _main, _prepare

HOSTILE = "=1+1<script>alert(1)</script>\x1b[31m\nnext $(touch pwned) $x$ \"q' \u202e\x07"
"""Attacks pages (a script), terminals (escapes, a bell, a direction mark), tables, logs and shells.

Tables get a formula, logs a newline.
"""


def unprintable(text):
    """Return the control characters of a text, except newlines."""
    return {letter for letter in text if not letter.isprintable()} - {"\n"}


def commands():
    """Yield (words, flags, required flags) of every command, from its own parser."""
    for words in [[name] for name in _main.COMMANDS if name != "prepare"] + [
        ["prepare", name] for name in _prepare.LISTED
    ]:
        with (
            mock.patch.object(_flags, "parse", side_effect=SystemExit) as parse,
            contextlib.suppress(SystemExit),
        ):
            _main.main([*words, "--help"])
        _, _, flags = parse.call_args.args
        yield words, flags, parse.call_args.kwargs.get("required", ())
