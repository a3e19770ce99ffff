"""The three ways a run can end early that are not bugs.

Each carries one line for the user; the command line turns the class into an exit code.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

EXIT_USER = 2
EXIT_ENVIRONMENT = 3
EXIT_PREEMPTED = 75


class UserError(ValueError):
    """What the user asked for cannot be done: exit code 2."""

    exit_code = EXIT_USER


class EnvironmentProblem(RuntimeError):
    """The machine, disk or installation is at fault: exit code 3."""

    exit_code = EXIT_ENVIRONMENT


class Preempted(RuntimeError):
    """The run was asked to stop and has saved its state: exit code 75, run the same command again."""

    exit_code = EXIT_PREEMPTED


def brief(value: Any, most: int = 300) -> str:
    """Return the `repr` of a value in one line; the shape of an array; the beginning and the end of what is long, a file's for instance."""
    shape = getattr(value, "shape", None)
    if shape and hasattr(value, "dtype"):
        return f"an array of shape {shape}"
    text = " ".join(line.strip() for line in repr(value).splitlines())
    return text if len(text) <= most else f"{text[: most * 2 // 3]} ... {text[-most // 6 :]}"


def require(condition: Any, field: str, value: Any, fix: str) -> None:
    """Raise `UserError` naming the field, its value and the fix unless `condition` holds."""
    if not condition:
        raise UserError(f"{field} = {brief(value)}: {fix}")


def require_choice(field: str, value: Any, choices: Iterable[str]) -> None:
    """Raise `UserError` listing the choices (and the nearest one) unless `value` is among them."""
    known = sorted(choices)
    if value in known:
        return
    near = difflib.get_close_matches(str(value)[:100], known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise UserError(f"{field} = {brief(value)}: use one of {', '.join(known)}{hint}")
