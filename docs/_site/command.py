"""Tables of the commands and of their flags, read from the command line's own help texts."""

import importlib
import inspect
import re

from lbopt.cli import _main
from lbopt.job import JOB_FLAGS

_OF_JOBS = "flags-of-jobs"
"""Anchor of the section with the flags of jobs, which four commands share."""


def commands():
    """Return a table of all commands, each with a link to its section of this page."""
    lines = ["| command | what it does |", "|---|---|"]
    for name, text in _main.COMMANDS.items():
        lines.append(f"| [`lbopt {name}`](#lbopt-{name}) | {_sentence(text)} |")
    return "\n".join(lines)


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

    lines = [*_table(own, needed)] if own else []
    if len(own) < len(found):
        lines += ["", f"{'Also' if own else 'It takes'} the [flags of jobs](#{_OF_JOBS})."]
    return "\n".join(lines)


def _own_flags(command, module):
    if hasattr(module, "FLAGS"):
        return module.FLAGS
    if command in _main.TOGETHER:
        return JOB_FLAGS
    raise ValueError(f"lbopt/cli/_{command}.py has no FLAGS; give it some, or flags() a word")


def job_flags():
    """Return a table of the flags of jobs of several processes."""
    return "\n".join(_table(JOB_FLAGS, ()))


def _table(found, needed):
    yield from ("| flag | meaning |", "|---|---|")
    for name, text in found.items():
        must = " *Required.*" if name in needed else ""
        yield f"| `--{name}` | {_sentence(text)}{must} |"


def _required(module, word):
    """Return the flags that a command needs, as it states them where it parses its arguments."""
    calls = re.findall(r"_flags\.parse\((.*?)\)\n", inspect.getsource(module), re.DOTALL)
    meant = [call for call in calls if not word or f' {word}"' in call]
    stated = [re.search(r"required=\((.*)", call, re.DOTALL) for call in meant]
    return {name for one in stated if one for name in re.findall(r'"(\w+)"', one[1])}


def _sentence(text):
    """Return a help text as a sentence for a cell of a table."""
    text = text.replace("|", "\\|").replace("*", "\\*").replace("<", "\\<")
    text = re.sub(r"(?<![`\w])(--?[\w.-]+(?:=\S+)?)(?=[\s,;:.)]|$)", r"`\1`", text)
    text = f"{text[0].upper()}{text[1:]}" if text[0].islower() else text
    return text if text.endswith((".", ":")) else f"{text}."
