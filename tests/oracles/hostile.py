"""The one hostile string of the tests, and every command with its flags to give it to."""

import contextlib
from unittest import mock

from lbopt.cli import _arguments, _main, _prepare

HOSTILE = "=1+1<script>alert(1)</script>\x1b[31m\nnext $(touch pwned) $x$ \"q' \u202e\x07"
"""For pages (a script), terminals (ANSI escapes, a bell, a mark of direction), tables (a formula), logs (a newline) and shells."""


def unprintable(text):
    """Return the characters of a text that a terminal may obey, but for newlines."""
    return {letter for letter in text if not letter.isprintable()} - {"\n"}


def commands():
    """Yield (words, flags, those that must be given) of every command, by its own parser."""
    for words in [[name] for name in _main.COMMANDS if name != "prepare"] + [
        ["prepare", name] for name in _prepare.LISTED
    ]:
        with (
            mock.patch.object(_arguments, "parse", side_effect=SystemExit) as parse,
            contextlib.suppress(SystemExit),
        ):
            _main.main([*words, "--help"])
        _, _, flags = parse.call_args.args
        yield words, flags, parse.call_args.kwargs.get("required", ())
