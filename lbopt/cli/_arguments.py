"""Flags of the commands, and configs from files with overrides."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.util
import operator
import os
import pathlib
import sys
import typing
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags

from lbopt import errors, paths
from lbopt._shown import shell_line, show
from lbopt.config import check_fields, check_flag, unused
from lbopt.errors import UserError

_OVERRIDE = ("--config.", "-config.")
_LOCAL = ("configs", "data_dir", "folder", "job_secret_file", "manual_dir", "output", "vocab")
"""Flags that take a path of this machine. `--workdir` takes one or a bucket's, `--config` has a row behind it."""
_beside: dict[str, str] = {}
"""Modules that configs of this process have imported from beside them -> that folder."""


def parse(
    command: str, argv: Sequence[str], defined: Mapping[str, str], required: Sequence[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """Split a command line into its flags and its config overrides.

    Args:
      command: name, for the help.
      argv: arguments after the command.
      defined: flag -> help text; every flag takes a string.
      required: flags that must be given.

    Returns:
      The flags that were given, and the `--config.field=VALUE` arguments.

    Raises:
      UserError: for an unknown flag, a stray argument, a required flag that is missing, or a path that is none of this machine.
    """
    if {"-h", "--help"} & set(argv):
        words = (f"--{name}=..." if name in required else f"[--{name}=...]" for name in defined)
        show(f"usage: lbopt {command} {' '.join(words)}", "")
        width = max(map(len, defined), default=0) + 2
        show(*(f"  --{name:<{width}}{text}" for name, text in defined.items()))
        raise SystemExit(0)
    overrides = (
        [argument for argument in argv if argument.startswith(_OVERRIDE)]
        if "config" in defined
        else []
    )
    values = flags.FlagValues()
    for name, text in defined.items():
        flags.DEFINE_string(name, None, text, flag_values=values)
    try:
        stray = values([command, *(argument for argument in argv if argument not in overrides)])[1:]
    except flags.Error as error:
        raise UserError(f"{error}; lbopt {command} --help lists the flags") from error
    if stray:
        raise UserError(
            f"argument {stray[0]!r} is not a flag: write --flag=VALUE; lbopt {command} --help lists the flags"
        )
    given = {name: value for name in defined if (value := values[name].value) is not None}
    for name in required:
        if not given.get(name):
            raise UserError(
                f"--{name} is missing: give --{name}={'FILE[:ROW]' if name == 'config' else 'VALUE'}; lbopt {command} --help lists the flags"
            )
    for name, value in given.items():
        if name in _LOCAL:
            paths.local(value, f"--{name}")
        elif name == "workdir":
            paths.local_or_bucket(value, "--workdir")
    return given, overrides


def load_config(flag: str, overrides: Sequence[str], expected: type | tuple[type, ...]) -> Any:
    """Return the config that `FILE[:ARG]` gives, with the overrides applied; not validated yet.

    Raises:
      UserError: if the file cannot be loaded, if it gives something else than `expected`, or if an override names no
        field or does not parse.
    """
    config = call_get_config(flag)
    if not isinstance(config, expected):
        kinds = expected if isinstance(expected, tuple) else (expected,)
        needed = " or a ".join(kind.__name__ for kind in kinds)
        fix = f"it gives a {type(config).__name__}, this command needs a {needed}"
        raise UserError("--config", flag, fix, code="type")
    for override in overrides:
        _check_override(config, override)
    # A tuple given twice would be taken for its parts; of two values the last one counts, as with every flag.
    overrides = list({_named(override): override for override in overrides}.values())
    before = {name: operator.attrgetter(name)(config) for name in map(_named, overrides)}
    already_unused = unused(config)
    overrides = [override for override in overrides if not _set_to_none(config, override)]
    for override in overrides:  # whose group may be None now
        _check_override(config, override)
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_dataclass(
        "config", config, flag_values=values, sys_argv=list(overrides)
    )
    values(["lbopt"])
    for override in overrides:
        _parse_override(values, override)
    with errors.under("config"):
        for name, value in before.items():
            check_flag(holder.value, name, value)
    # A flag that chooses another kind makes fields of the file's kind idle: nobody asked for them.
    for name, (group, field) in unused(holder.value).items():
        if name not in already_unused:
            setattr(group, field.name, field.default)
    return holder.value


def _parse_override(values: flags.FlagValues, override: str) -> None:
    """Set the field that an override names, or raise `UserError` if its text is no value of the field's type."""
    name, _, text = override.lstrip("-").partition("=")
    try:
        values(["lbopt", override])
    except (flags.Error, ValueError, TypeError, LookupError) as error:
        reason = str(error).removeprefix(f"flag --{name}={text}: ")
        fix = f"{reason}; give a value of the field's type"
        raise UserError(f"--{name}", text, fix, code="type") from error
    except (RecursionError, MemoryError) as error:  # Python's parser, of brackets in brackets
        fix = "nested too deeply; give a value of the field's type"
        raise UserError(f"--{name}", reason=fix, code="type") from error


def call_get_config(flag: str) -> Any:
    """Import a config file and call its `get_config(arg)`; the flag is `FILE` or `FILE:ARG`, and FILE may have colons too."""
    path, argument = split_row(flag)
    config = _from_config_file(flag, path, lambda module: module.get_config(argument))
    with errors.under("config"):
        check_fields(config)
    return config


def split_row(flag: str) -> tuple[str, str]:
    """Return the path and the row of `FILE[:ROW]`, whose FILE may have colons too.

    Raises:
      UserError: if it is an address.
    """
    cuts = [place for place, letter in enumerate(flag) if letter == ":"] + [len(flag)]
    cut = next((cut for cut in cuts if os.path.isfile(os.path.expanduser(flag[:cut]))), None)
    if cut is None:
        paths.local(flag, "--config")
        cut = cuts[0]
    return flag[:cut], flag[cut + 1 :]


def config_rows(path: str) -> list[str]:
    """Return the rows that a config file lists in `ROWS`; one without a list has only its default row, ""."""
    return _from_config_file(
        path, path, lambda module: [str(row) for row in getattr(module, "ROWS", ("",))]
    )


def _from_config_file(flag: str, path: str, ask: Callable[[Any], Any]) -> Any:
    file = paths.local(path, "--config")
    if not file.is_file():
        fix = f"there is no file {path!r} here ({pathlib.Path.cwd()})"
        raise UserError("--config", flag, fix, code="missing")
    if file.suffix != ".py":
        raise UserError("--config", flag, "give a Python file (.py)")
    beside = str(file.resolve().parent)
    spec = importlib.util.spec_from_file_location(
        f"lbopt_config_{file.stem}_{zlib.crc32(os.fsencode(beside)):x}", file
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their annotations up there
    # Another folder may have modules of the same names.
    for name in [name for name, folder in _beside.items() if folder != beside]:
        sys.modules.pop(name, None)
        del _beside[name]
    before = set(sys.modules)
    sys.path.insert(0, beside)
    try:
        spec.loader.exec_module(module)
        return ask(module)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        fix = f"{type(error).__name__}: {error}; mend {path}"
        raise UserError("--config", flag, fix, code="damaged") from error
    finally:
        with contextlib.suppress(ValueError):  # the config may have taken it out
            sys.path.remove(beside)
        new = {name for name in set(sys.modules) - before if name.partition(".")[0] not in before}
        _beside.update((name, beside) for name in new if _lies_in(beside, sys.modules[name]))


def _lies_in(folder: str, module: Any) -> bool:
    """Return whether a module came from a folder, and not from another place of the path inside it, as a `.venv` is."""
    file = str(getattr(module, "__file__", None) or "")
    places = [
        place for place in (folder, *sys.path) if file.startswith(place.rstrip(os.sep) + os.sep)
    ]
    return max(places, key=len, default=None) == folder


def command_line(command: str, argv: Sequence[str]) -> str:
    """Return the command as a user would type it again."""
    return shell_line(["lbopt", command, *argv])


def _set_to_none(config: Any, override: str) -> bool:
    """Carry out an override that sets a field to None, if the field may be; flags have no word for it."""
    *groups, field = override.lstrip("-").partition("=")[0].split(".")[1:]
    for group in groups:
        config = getattr(config, group)
    if not override.endswith("=None") or not _may_be_none(config, field):
        return False
    setattr(config, field, None)
    return True


def _named(override: str) -> str:
    """Return the dotted name of the field that an override sets, without "config."."""
    return override.lstrip("-").partition("=")[0].partition(".")[2]


def _may_be_none(config: Any, field: str) -> bool:
    return type(None) in typing.get_args(typing.get_type_hints(type(config))[field])


def _may_be_group(config: Any, field: str) -> bool:
    return any(
        map(dataclasses.is_dataclass, typing.get_args(typing.get_type_hints(type(config))[field]))
    )


def _check_override(config: Any, override: str) -> None:
    """Raise `UserError` if an override names no field, saying which one may be meant."""
    name, equals, _ = override.lstrip("-").partition("=")
    if not equals:
        raise UserError(f"--{name}", reason=f"has no value: write --{name}=VALUE", code="missing")
    above, node, path = None, config, "config"
    for part in name.split(".")[1:]:
        known = (
            [field.name for field in dataclasses.fields(node)]
            if dataclasses.is_dataclass(node)
            else []
        )
        if part not in known:
            near = difflib.get_close_matches(part.partition("[")[0], known, n=1)
            if node is None and _may_be_group(above, path.rpartition(".")[2]):
                fix = f"{path} is None: use a row that has it"
                raise UserError(f"--{name}", reason=fix, code="conflict")
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'none'}"
            fix = f"{path} has no field {part!r}; {hint}"
            raise UserError(f"--{name}", reason=fix, code="choice")
        above, node, path = node, getattr(node, part), f"{path}.{part}"
    if dataclasses.is_dataclass(node) and not (
        override.endswith(f".{part}=None") and _may_be_none(above, part)
    ):
        fix = f"it is a group of fields; give --{name}.FIELD=VALUE"
        raise UserError(f"--{name}", reason=fix, code="type")
