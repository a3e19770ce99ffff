"""Checks of a refusal: by field, value, code, and the words it names; never by its sentence."""

import contextlib
import dataclasses
import functools
import re
import typing
from unittest import mock
from unittest.mock import ANY

import pytest

from lbopt._shown import one_line
from lbopt.config import SweepConfig, TrainConfig
from lbopt.errors import EnvironmentProblem, LboptError, UserError

__all__ = ["ANY", "names_in", "numbers_in", "raised", "refused", "run_refused", "troubled"]


@contextlib.contextmanager
def refused(field, value=ANY, code=ANY, kind=UserError):
    """Check that the block raises a `kind` with a one-line message, this field, value and code."""
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert (error.field, error.code) == (field, code), error
    if value is not ANY:
        assert error.value is value or repr(error.value) == repr(value)
    assert "\n" not in str(error)
    assert error.reason
    unknown = [place for place in error.also.values() if not _may_exist(place)]
    assert not unknown, error


def troubled(field, value=ANY, code=ANY):
    """Check as `refused` does, for a fault of the machine instead of the user."""
    return refused(field, value, code, EnvironmentProblem)


@contextlib.contextmanager
def raised(kind, numbers=ANY, names=()):
    """Check that the block raises a `kind` of one line with these whole numbers and these words."""
    with pytest.raises(kind) as caught:
        yield caught
    assert "\n" not in str(caught.value)
    assert numbers_in(caught) == numbers, caught.value
    assert set(names) <= names_in(caught), caught.value


def run_refused(capsys, *arguments, lines=1):
    """Run a refused command and raise the error that it has printed.

    The error is the only line of the command's output, or the last of its `lines` (None: any).
    """
    from lbopt.cli import _main

    ended_by = []
    print_error = _main._print_error

    def note(name, error):
        ended_by.append(error)
        print_error(name, error)

    capsys.readouterr()
    with mock.patch.object(_main, "_print_error", note):
        code = _main.main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    assert ended_by, (code, said.err)
    (error,) = ended_by
    assert (code, said.out) == (error.exit_code, "")
    assert said.err.endswith(one_line(f"lbopt {arguments[0]}: {error}") + "\n")
    assert lines is None or said.err.count("\n") == lines, said.err
    assert "Traceback" not in said.err
    raise error


def numbers_in(caught):
    """Return the whole numbers in the reason of a caught refusal, or in another error's message."""
    return [int(number) for number in re.findall(r"\d+", _reason(caught.value))]


def names_in(caught):
    """Return the words of the reason of a caught refusal, or of another error's message.

    Paths of leaves count as words.
    """
    return set(re.findall(r"[\w./-]*\w", _reason(caught.value)))


def _may_exist(place):
    """Return whether a place in a config is one of a recipe or a study; other places all may be."""
    if not re.fullmatch(r"config(\.\w+(\[\d+\])?)+", place or "") or place == "config.json":
        return True
    steps = re.sub(r"\[\d+\]", "", place).split(".")[1:]
    return any(_reaches(kind, steps) for kind in (TrainConfig, SweepConfig))


def _reaches(kind, steps):
    """Return whether names lead from a class to a field; below a dict any may follow."""
    if not steps or dict in (kind, typing.get_origin(kind)):
        return True
    if not dataclasses.is_dataclass(kind):
        return any(_reaches(part, steps) for part in typing.get_args(kind))
    hints = _hints(kind)
    return steps[0] in hints and _reaches(hints[steps[0]], steps[1:])


_hints = functools.cache(typing.get_type_hints)


def _reason(error):
    """Return the reason as it is shown: with the places of the other fields that it names."""
    if not isinstance(error, LboptError):
        return str(error)
    return str(UserError(error.reason, also=error.also, files=error.files))
