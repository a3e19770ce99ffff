"""Choose the command and turn what went wrong into an exit code and one line."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence

from lbopt.errors import EXIT_USER, EnvironmentProblem, Preempted, UserError, require_choice

COMMANDS = {
    "train": "train a recipe; the same command resumes",
    "evaluate": "evaluate a checkpoint on every example of the validation and test splits",
    "sweep": "run a batch-size-limit study; the same command resumes",
    "plan": "what a recipe costs on a TPU pod that is not here, by the TPU compiler",
    "report": "draw report.html and PNGs from a training run or a study",
    "export": "write a checkpoint's network as safetensors or as a folder for transformers",
    "recipes": "list every config",
    "prepare": "download, convert or make a data set; says what has to be fetched by hand",
    "doctor": "check devices, versions, collectives, data and disk",
}


def usage() -> str:
    """Return the help text."""
    lines = [f"  {name:<10}{text}" for name, text in COMMANDS.items()]
    return "usage: lbopt COMMAND [--flag=VALUE ...]     (lbopt COMMAND --help says which)\n\n" + "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Run a command line (without the program's name) and return its exit code."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else EXIT_USER
    name = argv[0]
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax narrates every save there; what matters is raised
    try:
        require_choice("command", name, COMMANDS)
        _check_folder()
        importlib.import_module(f"lbopt.cli.{name}").run(list(argv[1:]))
    except (UserError, EnvironmentProblem, Preempted) as error:
        print(f"lbopt {name}: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    return 0


def _check_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise EnvironmentProblem("the current folder has been removed; change to another one") from error


def run() -> None:
    """Entry point of the `lbopt` command."""
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
