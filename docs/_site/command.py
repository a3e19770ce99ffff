"""Tables of the commands and of their flags, read from the command line's own help texts."""

import importlib
import inspect
import re

from _site.markdown import table
from lbopt.cli import _main
from lbopt.job import JOB_FLAGS

_OF_JOBS = "flags-of-jobs"
"""Anchor of the section with the flags of jobs, which four commands share."""


def commands():
    """Return a table of all commands, each with a link to its section of this page."""
    rows = [
        (f"[`lbopt {name}`](#lbopt-{name})", _sentence(text))
        for name, text in _main.COMMANDS.items()
    ]
    return table(("command", "what it does"), rows)


def flags(command, word=""):
    """Return a table of the flags of a command.

    Args:
      command: Name of the command.
      word: Word after the command, if its flags depend on that ("text" of `lbopt prepare text`).
    """
    module = importlib.import_module(f"lbopt.cli._{command}")
    found = module.FLAGS_OF[word] if word else _own_flags(command, module)
    own = {name: text for name, text in found.items() if name not in JOB_FLAGS}
    needed = _required(module, word)

    shown = [_table(own, needed)] if own else []
    if len(own) < len(found):
        shown.append(f"{'Also' if own else 'It takes'} the [flags of jobs](#{_OF_JOBS}).")
    return "\n\n".join(shown)


def _own_flags(command, module):
    if hasattr(module, "FLAGS"):
        return module.FLAGS
    if command in _main.TOGETHER:
        return JOB_FLAGS
    raise ValueError(f"lbopt/cli/_{command}.py has no FLAGS; give it some, or flags() a word")


def job_flags():
    """Return a table of the flags of jobs of several processes."""
    return _table(JOB_FLAGS, ())


def _table(found, needed):
    rows = [
        (f"`--{name}`", _sentence(text) + " *Required.*" * (name in needed))
        for name, text in found.items()
    ]
    return table(("flag", "meaning"), rows)


def _required(module, word):
    """Return the flags that a command needs, as it states them where it parses its arguments."""
    calls = re.findall(r"_flags\.parse\((.*?)\)\n", inspect.getsource(module), re.DOTALL)
    meant = [call for call in calls if not word or f' {word}"' in call]
    stated = [re.search(r"required=\((.*)", call, re.DOTALL) for call in meant]
    return {name for one in stated if one for name in re.findall(r'"(\w+)"', one[1])}


def _sentence(text):
    """Return a help text as a sentence for a cell of a table."""
    text = text.replace("*", "\\*").replace("<", "\\<")
    text = re.sub(r"(?<![`\w])(--?[\w.-]+(?:=\S+)?)(?=[\s,;:.)]|$)", r"`\1`", text)
    text = f"{text[0].upper()}{text[1:]}" if text[0].islower() else text
    return text if text.endswith((".", ":")) else f"{text}."
