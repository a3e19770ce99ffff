"""The ways a run can end early that are not bugs.

Each carries one line for the user; the command line turns the class into an exit code.
"""

from __future__ import annotations

import contextlib
import contextvars
import difflib
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, Literal

EXIT_USER = 2
EXIT_ENVIRONMENT = 3
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: the same command may succeed later

Code = Literal[
    "value",  # out of range, or malformed
    "type",  # of another type, dtype, shape or structure
    "choice",  # not among the known names
    "conflict",  # does not go with another field
    "unused",  # does not apply to the chosen kind
    "missing",  # needed, and not given or not found
    "exists",  # would overwrite something
    "damaged",  # a file or record that cannot be read
    "mismatch",  # two things that must agree do not
    "installation",  # a package, compiler or device is not there
    "resource",  # disk, memory, network or a process failed
]
"""The kind of fault that an error reports; tests and programs read this, not the sentence."""


class _NoValue:
    """Stands for the value of an error that has none."""

    def __repr__(self) -> str:
        return "NO_VALUE"

    def __reduce__(self) -> str:
        return "NO_VALUE"


NO_VALUE: Any = _NoValue()


_COPIES: dict[str, str] = {}
"""Beginnings of the paths of copies, and those of the originals, which messages show instead."""


def show_original(copy: str, original: str) -> None:
    """Let messages show the place that the user knows instead of its copy on this machine.

    Args:
      copy: Beginning of the paths of copies.
      original: Beginning of the addresses in its place.
    """
    _COPIES[copy] = original


class LboptError(Exception):
    """An error that is not a bug: a field, its value, and what to do, in one line.

    Attributes:
      field: The parameter, config field, flag, file or leaf at fault; None for none of them.
      value: Value of the field; `NO_VALUE` if the line does not show one.
      reason: The fault and its fix. Names in `also` stand in it in braces.
      code: The kind of fault.
      also: Other fields that the reason mentions: their names in braces there -> where they stand.
      files: Files that the reason mentions: their names in braces there -> their paths.

    >>> print(UserError("rank", 0, "give a number >= 1"))
    rank = 0: give a number >= 1
    """

    def __init__(
        self,
        field: str | None,
        value: Any = NO_VALUE,
        reason: str | None = None,
        *,
        code: Code = "value",
        also: Iterable[str] | Mapping[str, str] = (),
        files: Mapping[str, Any] | None = None,
    ):
        if reason is None:  # a line without a field
            reason = field or ""
            field = None
            value = NO_VALUE
        super().__init__(field, value, reason)
        self.field = field
        self.value = value
        self.reason = reason
        self.code = code
        self.also = dict(also) if isinstance(also, Mapping) else {name: name for name in also}
        self.files = {name: str(path) for name, path in (files or {}).items()}

    def __str__(self) -> str:
        # Other braces stay as they are: a reason may quote a path or a value that has some.
        shown = {**self.also, **self.files}
        reason = re.sub(r"\{(\w+)\}", lambda name: shown.get(name[1], name[0]), self.reason)
        line = f"{self.field} = {brief(self.value)}: {reason}"
        if self.field is None:
            line = reason
        elif self.value is NO_VALUE:
            line = f"{self.field}: {reason}"
        for copy, original in _COPIES.items():
            line = line.replace(copy, original)
        return line


class UserError(LboptError, ValueError):
    """A request of the user that cannot be carried out: exit code 2.

    >>> import lbopt
    >>> try:
    ...     lbopt.lamb(0.01, b1=1.5)
    ... except UserError as error:
    ...     print(error.field, error.code, error.exit_code)
    b1 value 2
    """

    exit_code = EXIT_USER


class EnvironmentProblem(LboptError, RuntimeError):
    """The machine, disk or installation is at fault: exit code 3.

    >>> try:
    ...     raise EnvironmentProblem("scikit-learn", reason="it is not installed; pip install it")
    ... except EnvironmentProblem as error:
    ...     print(error, error.exit_code)
    scikit-learn: it is not installed; pip install it 3
    """

    exit_code = EXIT_ENVIRONMENT


class MissingPackage(EnvironmentProblem):
    """A package of one of lbopt's extras is not installed: exit code 2.

    A supervisor restarts a process that ends with 3, because a lost peer or a full disk may come
    back. A package does not: somebody has to install it.

    >>> raise MissingPackage("pyarrow", reason="it reads tables: pip install 'lbopt[tables]'")
    Traceback (most recent call last):
    lbopt.errors.MissingPackage: pyarrow: it reads tables: pip install 'lbopt[tables]'
    """

    exit_code = EXIT_USER

    def __init__(self, field: str, value: Any = NO_VALUE, reason: str | None = None):
        super().__init__(field, value, reason, code="installation")


class Preempted(RuntimeError):
    """The run was asked to stop and saved its state: exit code 75, run the same command again.

    >>> import lbopt
    >>> def train(problem):  # 75 asks a job scheduler to run the same program again
    ...     try:
    ...         return lbopt.run_training(problem, "lamb", 0.01, workdir="runs/one")
    ...     except Preempted as error:
    ...         raise SystemExit(error.exit_code)
    """

    exit_code = EXIT_PREEMPTED


_contexts: contextvars.ContextVar[tuple[Callable[[str], str], ...]] = contextvars.ContextVar(
    "places of fields", default=()
)
"""The functions that give a field its place in each context of `under`, the innermost first."""


@contextlib.contextmanager
def under(prefix: str, only: Container[str] | None = None, /, **places: str) -> Iterator[None]:
    """Put the caller's place before the fields of an error that is raised inside.

    A factory names its own arguments; a caller that fills them from a config says where they come
    from. Contexts nest: the outer prefix comes before the inner one. Flags (`--workdir`) and leaves
    (`params/dense/kernel`) keep their names.

    Args:
      prefix: The place of the fields, "config.aggregator" for instance; "" for none. A prefix that
        ends in a blank is put before the name as it is: "config.json: ".
      only: The fields that stand at the prefix, all if None; others keep their names.
      **places: Fields, or first parts of their names (before `.`, `[` or `/`), that stand
        elsewhere.

    >>> with under("config.aggregator", rank="config.model.rank"):
    ...     raise UserError("rank", 0, "give a number >= {least}", also=["least"])
    Traceback (most recent call last):
    lbopt.errors.UserError: config.model.rank = 0: give a number >= config.aggregator.least
    """

    def moved(name: str, prefix: str = prefix) -> str:
        head = name
        while head:
            if head in places:
                return places[head] + name[len(head) :]
            head = head[: max(0, *(head.rfind(end) for end in ".[/"))]
        first = re.split(r"[.\[]", name)[0]
        known = first.isidentifier() and "/" not in name
        if not known or (only is not None and first not in only):
            return name
        return f"{prefix}{name}" if prefix == "" or prefix.endswith(" ") else f"{prefix}.{name}"

    outer = _contexts.get()
    _contexts.set((moved, *outer))
    try:
        yield
    except LboptError as error:
        if error.field is not None:
            error.field = moved(error.field)
        # The place of the whole line ("config.json: ") stands once, at its beginning.
        before_also = "" if prefix.endswith(" ") else prefix
        error.also = {name: moved(shown, before_also) for name, shown in error.also.items()}
        raise
    finally:
        _contexts.set(outer)


def place_of(field: str) -> str:
    """Return the name that an error of a field gets here from the contexts of `under`.

    Use it for warnings and other lines that are not raised.

    >>> with under("config.train"), under("data"):
    ...     place_of("lowercase")
    'config.train.data.lowercase'
    """
    for moved in _contexts.get():
        field = moved(field)
    return field


@contextlib.contextmanager
def about(field: str, value: Any, /, *names: str, code: Code | None = None) -> Iterator[None]:
    """Let errors that are raised inside be about one field of the caller.

    Use it if the called function has no argument of that name: the field may be a tuple of which
    one pattern is wrong, or the path of a file with a wrong value.

    Args:
      field: The caller's field.
      value: Value of that field.
      *names: Fields of the errors that are meant; errors of other fields pass. None for all errors.
        The reason of an error of these fields, or of `field`, is kept; an error of another field
        becomes the reason as a whole line.
      code: Code of these errors; None for their own.

    >>> with about("modules", ("x(",), code="mismatch"):
    ...     raise UserError("pattern", "x(", "close the group")
    Traceback (most recent call last):
    lbopt.errors.UserError: modules = ('x(',): pattern = 'x(': close the group
    """
    try:
        yield
    except LboptError as error:
        if names and error.field not in names:
            raise
        if error.field not in (field, *names):
            error.reason = str(error)
            error.also = {}
            error.files = {}
        error.field = field
        error.value = value
        error.code = code or error.code
        raise


def brief(value: Any, most: int = 300) -> str:
    """Return a value's `repr` on one line, its middle left out if it is long; an array's shape."""
    shape = getattr(value, "shape", None)
    if shape and hasattr(value, "dtype"):
        return f"an array of shape {shape}"
    text = " ".join(line.strip() for line in repr(value).splitlines())
    return text if len(text) <= most else f"{text[: most * 2 // 3]} ... {text[-most // 6 :]}"


def require(
    condition: Any,
    field: str,
    value: Any,
    reason: str,
    *,
    code: Code = "value",
    also: Iterable[str] | Mapping[str, str] = (),
) -> None:
    """Raise `UserError` unless `condition` holds; the arguments are those of `LboptError`."""
    if not condition:
        raise UserError(field, value, reason, code=code, also=also)


def require_choice(field: str, value: Any, choices: Iterable[str]) -> None:
    """Raise `UserError` with the choices, and the nearest one, unless `value` is among them.

    Args:
      field: Name of the field in the error.
      value: Value of the field.
      choices: Accepted values.

    >>> require_choice("rule", "sqr", ("linear", "sqrt"))
    Traceback (most recent call last):
      ...
    lbopt.errors.UserError: rule = 'sqr': use one of linear, sqrt (did you mean 'sqrt'?)
    """
    known = sorted(choices)
    if isinstance(value, str) and value in known:
        return
    near = difflib.get_close_matches(str(value)[:100], known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise UserError(field, value, f"use one of {', '.join(known)}{hint}", code="choice")
