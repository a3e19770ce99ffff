"""Flags of the commands, and configs from files with overrides."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import math
import operator
import pathlib
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags

from lbopt import _user_code, errors, paths
from lbopt._shown import shell_line, show
from lbopt.cli import _columns, _config_files, _field_lists
from lbopt.config import (
    OF_TEXT,
    FromText,
    SweepConfig,
    TrainConfig,
    check_fields,
    check_flag,
    default_of,
    unused,
)
from lbopt.errors import UserError, require

_OVERRIDE = ("--config.", "-config.")
_SWITCHES = ("json",)
"""Flags without a value."""
_INDENT = 4
_MOST = 10**12
"""Largest whole number that a flag takes unless told otherwise; a larger one is a slip."""
_LOCAL = ("configs", "copy", "data_dir", "from", "images", "job_secret_file", "manual_dir")
_OR_BUCKET = ("folder", "other", "output", "pilot", "study", "target_study", "vocab", "workdir")
"""Flags that take a local path, and those that take an address of a bucket too. (`--config` may
have a row.)"""


def parse(
    command: str,
    argv: Sequence[str],
    defined: Mapping[str, str],
    required: Sequence[str] = (),
    words: Sequence[str] = (),
    fields: bool = True,
) -> tuple[dict[str, str], list[str]]:
    """Split a command line into its flags and its config overrides.

    Args:
      command: Name of the command, for its help.
      argv: Arguments after the command.
      defined: flag -> help text; every flag takes a string, but those in `_SWITCHES` none.
      required: Names of the flags that must be given.
      words: Names of arguments that are no flags, in their order; each may be left out.
      fields: Whether fields of the config can be set by flags.

    Returns:
      The flags and words that were given, and the `--config.field=VALUE` arguments.

    Raises:
      UserError: If a flag is unknown, an argument is not a flag, a required flag is missing, or a
        path is an address where none is taken.
    """
    asks = {"-h", "--help"} & set(argv)
    if asks:
        _help(command, defined, required, words)
        argv = [argument for argument in argv if argument not in asks]

    # Overrides are parsed later: only the config file tells which fields there are.
    overrides = []
    if "config" in defined:
        overrides = [argument for argument in argv if argument.startswith(_OVERRIDE)]
    values = flags.FlagValues()
    for name, text in defined.items():
        define = flags.DEFINE_boolean if name in _SWITCHES else flags.DEFINE_string
        define(name, None, text, flag_values=values)
    lists = f"lbopt {command} --help lists the flags"
    try:
        stray = values([command, *(argument for argument in argv if argument not in overrides)])[1:]
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, defined, n=1)
        hint = f"did you mean --{near[0]}? " if near else ""
        fix = f"no flag of this command; {hint}{lists}"
        raise UserError(f"--{error.flagname}", reason=fix, code="choice") from error
    except flags.Error as error:
        raise UserError("flags", reason=f"{error}; {lists}") from error
    refused = stray[len(words) :] or [word for word in stray if word.startswith("-")]
    if refused:
        fix = f"not a flag; write --flag=VALUE ({lists})"
        raise UserError("argument", refused[0], fix, code="choice")

    given = {name: value for name in defined if (value := values[name].value) not in (None, False)}
    given |= zip(words, stray, strict=False)
    if asks:
        if "config" in defined and fields:
            _list_fields(given.get("config"), overrides)
        raise SystemExit(0)

    for name in required:
        if not given.get(name):
            value = "FILE[:ROW]" if name == "config" else "VALUE"
            fix = f"missing; give --{name}={value} ({lists})"
            raise UserError(f"--{name}", reason=fix, code="missing")
    for name, value in given.items():
        if name in _LOCAL:
            paths.local(value, f"--{name}")
        elif name in _OR_BUCKET:
            paths.local_or_bucket(value, f"--{name}")
    return given, overrides


def _help(
    command: str, defined: Mapping[str, str], required: Sequence[str], words: Sequence[str]
) -> None:
    """Print the usage of a command, and its flags."""
    typed = {name: f"--{name}{'' if name in _SWITCHES else '=...'}" for name in defined}
    usage = [each if name in required else f"[{each}]" for name, each in typed.items()]
    line = " ".join([f"usage: lbopt {command}", *usage, *(f"[{word}]" for word in words)])
    show(*_columns.wrapped(line, hanging=_INDENT), "")
    width = max(map(len, defined), default=0) + 2
    for name, text in defined.items():
        label = f"  --{name:<{width}}"
        show(*_columns.wrapped(label + text, hanging=len(label)))


def _list_fields(flag: str | None, overrides: Sequence[str]) -> None:
    """Print the flags of a config's fields; without a config, how to see them."""
    if flag is None:
        show("", "with --config=FILE[:ROW], --help lists the fields of that config as flags")
        return
    config = load_config(flag, overrides, (TrainConfig, SweepConfig))
    title = f"fields of {flag} that have an effect, with their values"
    show("", *_columns.wrapped(title), "")
    show(*_field_lists.as_flags(config))


def load_config(flag: str, overrides: Sequence[str], expected: type | tuple[type, ...]) -> Any:
    """Return the config of a file with the overrides applied; it is not validated yet.

    Args:
      flag: `FILE[:ROW]`; FILE may be the name of a recipe.
      overrides: `--config.field=VALUE` arguments.
      expected: Class, or classes, of which the config must be an instance.

    Raises:
      UserError: If the file cannot be loaded, if its config is not of the expected class, if an
        override names no field, or if its value cannot be parsed.

    >>> from lbopt.config import TrainConfig
    >>> load_config("digits_cnn:lamb-1024", ["--config.num_epochs=5"], TrainConfig).num_epochs
    5.0
    """
    config = call_get_config(flag)
    if not isinstance(config, expected):
        kinds = expected if isinstance(expected, tuple) else (expected,)
        needed = " or a ".join(kind.__name__ for kind in kinds)
        fix = f"it gives a {type(config).__name__}; give a file for a {needed}"
        raise UserError("--config", flag, fix, code="type")
    return with_overrides(config, overrides)


def with_overrides(config: Any, overrides: Sequence[str]) -> Any:
    """Return a config with the `--config.field=VALUE` arguments applied; see `load_config`."""
    # Texts first: a flag of one field counts more than what the text for its group implies.
    spelled = [(override, _spelled_out(config, override)) for override in overrides]
    spelled.sort(key=lambda pair: pair[1] == [pair[0]])
    overrides = [one for _, several in spelled for one in several]
    for override in overrides:
        _check_override(config, override)
    # The last of two values counts, as with every flag; given two tuples, absl would join them.
    overrides = list({_named(override): override for override in overrides}.values())
    before = {name: operator.attrgetter(name)(config) for name in map(_named, overrides)}
    already_unused = unused(config)
    overrides = [override for override in overrides if not _set_at_once(config, override)]
    for override in overrides:  # again: the group of a field may be None now
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

    # If a flag chose another kind, fields that only the file's kind reads return to their defaults.
    for name, (group, field) in unused(holder.value).items():
        if name not in already_unused:
            setattr(group, field.name, default_of(field))
    return holder.value


def _parse_override(values: flags.FlagValues, override: str) -> None:
    """Set the field that an override names.

    Raises:
      UserError: If its text is not a value of the field's type.
    """
    name, _, text = override.lstrip("-").partition("=")
    try:
        values(["lbopt", override])
    except (flags.Error, ValueError, TypeError, LookupError) as error:
        reason = str(error).removeprefix(f"flag --{name}={text}: ")
        fix = f"{reason}; give a value of the field's type"
        raise UserError(f"--{name}", text, fix, code="type") from error
    except (RecursionError, MemoryError) as error:  # from Python's parser, given nested brackets
        fix = "nested too deeply; give a value of the field's type"
        raise UserError(f"--{name}", reason=fix, code="type") from error


def call_get_config(flag: str) -> Any:
    """Import the config file of `FILE[:ROW]` and return the result of its `get_config(ROW)`.

    FILE may be the name of a recipe that comes with lbopt; see `_config_files.split_row`. A file
    whose `get_config` takes no argument has no rows.
    """
    path, argument = _config_files.split_row(flag)

    def get_config(module: Any) -> Any:
        fix = "it defines no get_config; give a config file"
        require(hasattr(module, "get_config"), "--config", flag, fix, code="missing")
        if inspect.signature(module.get_config).parameters:
            return module.get_config(argument)
        fix = f"its get_config takes no row; leave out {':' + argument!r}"
        require(not argument, "--config", flag, fix)
        return module.get_config()

    config = _from_config_file(flag, path, get_config)
    with errors.under("config"):
        check_fields(config)
    return config


def config_rows(path: str) -> list[str]:
    """Return the rows that a config file lists in `ROWS`; without it, only the default row ""."""
    return _from_config_file(
        path, path, lambda module: [str(row) for row in getattr(module, "ROWS", ("",))]
    )


def _from_config_file(flag: str, path: str, ask: Callable[[Any], Any]) -> Any:
    """Import a config file, and return `ask(module)`; the code that it names may lie beside it."""
    file = paths.local(path, "--config")
    if not file.is_file():
        fix = f"there is no file {path!r} here ({pathlib.Path.cwd()}); {_config_files.hint(path)}"
        raise UserError("--config", flag, fix, code="missing")
    if file.suffix != ".py":
        raise UserError("--config", flag, "give a Python file (.py)")
    _user_code.look_beside(_user_code.import_folders(file))
    return _user_code.import_file(file, ask, "--config", flag, anew=True)


def whole(name: str, text: str, least: int = 1, most: int = _MOST) -> int:
    """Return the whole number that a flag gives.

    Raises:
      UserError: If its text is none, or one outside [least, most].

    >>> whole("batch", "4096")
    4096
    """
    fits = text.isdecimal() and len(text) <= len(str(most)) and least <= int(text) <= most
    limit = f">= {least}" if most == _MOST else f"in [{least}, {most:,}]"
    require(fits, f"--{name}", text, f"give a whole number {limit}")
    return int(text)


def number(name: str, text: str) -> float:
    """Return the finite number that a flag gives.

    Raises:
      UserError: If its text is none.
    """
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    require(math.isfinite(found), f"--{name}", text, "give a number")
    return found


def command_line(command: str, argv: Sequence[str]) -> str:
    """Return the command as a user would type it again."""
    return shell_line(["lbopt", command, *argv])


def _set_at_once(config: Any, override: str) -> bool:
    """Apply an override that sets None or a dict, and return whether it did.

    Flags of ml_collections can set neither.

    Raises:
      UserError: If the text of a dict is none.
    """
    name, _, text = override.lstrip("-").partition("=")
    *groups, field = name.split(".")[1:]
    for group in groups:
        config = getattr(config, group)
    if text == "None" and _may_be_none(config, field):
        setattr(config, field, None)
        return True
    if not isinstance(getattr(config, field), dict):
        return False
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        found = None
    fix = "write a dict, for instance {'width': 64}"
    require(isinstance(found, dict), f"--{name}", text, fix, code="type")
    setattr(config, field, found)
    return True


def _spelled_out(config: Any, override: str) -> list[str]:
    """Return an override of a field; for one text in place of a group, those of its fields.

    `--config.model=net.py:make` is `--config.model.name=net.py:make`.
    """
    name, equals, text = override.partition("=")
    group, _, last = name.lstrip("-").removeprefix("config.").rpartition(".")
    owner = _group_at(config, group)
    if not equals or text == "None" or last not in OF_TEXT or not isinstance(owner, FromText):
        return [override]
    meant = OF_TEXT[last](text)
    return [
        f"{name}.{field.name}={getattr(meant, field.name)}"
        for field in dataclasses.fields(meant)
        if field.name == "name" or getattr(meant, field.name) != default_of(field)
    ]


def _group_at(config: Any, name: str) -> Any:
    """Return the group of a dotted name; None if there is none."""
    for step in name.split(".") if name else []:
        config = getattr(config, step, None)
    return config


def _named(override: str) -> str:
    """Return the dotted name of the field that an override sets, without `config.`."""
    return override.lstrip("-").partition("=")[0].partition(".")[2]


def _may_be_none(config: Any, field: str) -> bool:
    return type(None) in typing.get_args(typing.get_type_hints(type(config))[field])


def _may_be_group(config: Any, field: str) -> bool:
    types = typing.get_args(typing.get_type_hints(type(config))[field])
    return any(map(dataclasses.is_dataclass, types))


def _check_override(config: Any, override: str) -> None:
    """Raise `UserError` if an override names no field, with the name that may be meant."""
    name, equals, _ = override.lstrip("-").partition("=")
    if not equals:
        raise UserError(f"--{name}", reason=f"has no value; write --{name}=VALUE", code="missing")

    # The group above tells a field that is None from a field that does not exist.
    above = None
    node = config
    path = "config"
    for field in name.split(".")[1:]:
        fields = dataclasses.fields(node) if dataclasses.is_dataclass(node) else ()
        known = [one.name for one in fields]
        if field not in known:
            if node is None and _may_be_group(above, path.rpartition(".")[2]):
                fix = f"{path} is None; use a row that has it"
                raise UserError(f"--{name}", reason=fix, code="conflict")
            near = difflib.get_close_matches(field.partition("[")[0], known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'none'}"
            fix = f"{path} has no field {field!r}; {hint}"
            raise UserError(f"--{name}", reason=fix, code="choice")
        above = node
        node = getattr(node, field)
        path = f"{path}.{field}"

    to_none = override.endswith(f".{field}=None") and _may_be_none(above, field)
    if dataclasses.is_dataclass(node) and not to_none:
        fix = f"it is a group of fields; give --{name}.FIELD=VALUE"
        raise UserError(f"--{name}", reason=fix, code="type")
