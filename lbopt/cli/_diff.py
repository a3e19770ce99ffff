"""`lbopt diff`: how a run differs from what is here now, or from another run."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lbopt import _user_code
from lbopt._shown import show
from lbopt.cli import _config_files, _flags
from lbopt.config import (
    SweepConfig,
    TrainConfig,
    completed_json,
    config_to_json,
    json_differences,
)
from lbopt.errors import LboptError, UserError, require
from lbopt.workdir import (
    absolute_workdir,
    data_changes,
    describe_software,
    different_versions,
    kept_sources,
    last_environment,
    last_record,
    local_workdir,
    own_files,
    read_config,
    record_changes,
    source_changes,
    source_diff,
)

FLAGS = {
    "workdir": "a folder of lbopt train or lbopt sweep; `lbopt diff FOLDER` is the same",
    "other": "another one to compare with; `lbopt diff FOLDER OTHER` is the same",
    "config": "FILE[:ROW] to compare with (default: that of the command the workdir keeps)",
}
CONFIGS: dict[str, Any] = {"train": TrainConfig, "sweep": SweepConfig}


def run(argv: Sequence[str]) -> None:
    """Print a line for each difference in config, files of the user, versions and git revisions.

    "There" is the workdir; "here" is what the config, the files and the installation are now, or
    the other workdir.

    Args:
      argv: Arguments after the command, see `FLAGS`.

    Raises:
      UserError: If a flag is wrong, or no run or study is in a workdir.
      EnvironmentProblem: If a workdir cannot be read.
    """
    given, overrides = _flags.parse("diff", list(_named(argv)), FLAGS, required=("workdir",))
    flag = given.get("config")
    if flag is not None:
        _config_files.split_row(flag)  # refuses an address before a workdir is read
        fix = "two workdirs are compared by their own configs; leave it out, or leave --other out"
        require("other" not in given, "--config", flag, fix, code="conflict")
    with contextlib.ExitStack() as stack:
        folders = [
            absolute_workdir(stack.enter_context(local_workdir(given[flag], write=False)))
            for flag in ("workdir", "other")
            if flag in given
        ]
        saved = [_read(folder, flag) for folder, flag in zip(folders, FLAGS, strict=False)]
        if "other" in given:
            lines = list(_from_other(folders[0], saved[0], folders[1], saved[1]))
        else:
            lines = list(_from_here(folders[0], saved[0], flag, overrides))
    show(*lines or ["nothing differs"])


def _named(argv: Sequence[str]) -> Iterator[str]:
    """Yield the arguments, with the flags that those without one stand for."""
    names = iter(("workdir", "other"))
    for argument in argv:
        name = None if argument.startswith("-") else next(names, None)
        yield f"--{name}={argument}" if name else argument


def _read(folder: pathlib.Path, flag: str) -> dict[str, Any]:
    saved = read_config(folder)
    if saved is None:
        fix = "no run or study is there; run lbopt train or lbopt sweep first"
        raise UserError(f"--{flag}", str(folder), fix, code="missing")
    return saved


# ---- a workdir and what is here now


def _from_here(
    folder: pathlib.Path, saved: Mapping[str, Any], flag: str | None, overrides: Sequence[str]
) -> Iterator[str]:
    """Yield how a workdir differs from the config, files and installation of now."""
    if flag is not None:
        yield from _config_lines(saved, flag, overrides)
    else:
        yield from _recorded_config_lines(saved, overrides)
        _user_code.look_beside(saved.get("code_folders", ()))

    own = own_files(saved["config"], folder=saved.get("folder", ""))
    sources = last_record(saved).get("sources", {})
    kept = kept_sources(folder)
    if own.sources and not sources:
        yield "files: the workdir has no record of them; it began under an older lbopt"
    for change in source_changes(folder, saved, own.sources):
        yield f"{change.name} {change.words}"
        before = kept.get(sources.get(change.name, ""))
        yield from _indented(source_diff(change.name, before, own.sources.get(change.name)))
    yield from (f"{change.name} {change.words}" for change in data_changes(saved, own))

    now = describe_software()
    now["versions"] = {**now["versions"], **own.packages}
    if now["code_revision"] is None:  # the folder of the config is not here
        del now["code_revision"]
    yield from different_versions(last_environment(saved), now)


def _recorded_config_lines(saved: Mapping[str, Any], overrides: Sequence[str]) -> Iterator[str]:
    """Yield how a run's config differs from what its own command would make of it now."""
    flag, before = _recorded_flags(saved)
    if flag is None:
        yield "config: its file is not here; give --config=FILE[:ROW]"
        return
    try:
        yield from _config_lines(saved, flag, [*before, *overrides])
    except LboptError as error:
        yield f"config: {flag} cannot be loaded ({error})"


def _config_lines(saved: Mapping[str, Any], flag: str, overrides: Sequence[str]) -> list[str]:
    kind = CONFIGS[saved["kind"]]
    ours = config_to_json(_flags.load_config(flag, overrides, kind))
    found = json_differences(ours, completed_json(kind, saved["config"]))
    return [f"config.{difference}" for difference in found]


def _recorded_flags(saved: Mapping[str, Any]) -> tuple[str | None, list[str]]:
    """Return --config and the overrides of the command that a workdir keeps.

    --config is None without such a file.
    """
    try:
        words = shlex.split(saved.get("command", ""))
    except ValueError:
        return None, []
    overrides = [word for word in words if word.startswith("--config.")]
    for word in words:
        name, _, flag = word.partition("=")
        if name != "--config":
            continue
        file, row = _config_files.split_row(flag, saved.get("folder", ""))
        if os.path.isfile(file):
            return f"{file}:{row}" if row else file, overrides
    return None, []


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


# ---- two workdirs


def _from_other(
    folder: pathlib.Path,
    saved: Mapping[str, Any],
    other: pathlib.Path,
    their: Mapping[str, Any],
) -> Iterator[str]:
    """Yield how a workdir differs from another one."""
    fix = f"it holds a {their['kind']}, and the other one a {saved['kind']}; give two of a kind"
    require(their["kind"] == saved["kind"], "--other", str(other), fix, code="mismatch")
    kind = CONFIGS[saved["kind"]]
    configs = [completed_json(kind, each["config"]) for each in (their, saved)]
    yield from (f"config.{difference}" for difference in json_differences(*configs))

    before = {"sources": {}, "data": {}, **last_record(saved)}
    now = {"sources": {}, "data": {}, **last_record(their)}
    texts = {**kept_sources(folder), **kept_sources(other)}
    for line in record_changes(before, now):
        yield line
        name = line.removesuffix(" changed")
        both = [texts.get(each["sources"].get(name, "")) for each in (before, now)]
        yield from _indented(source_diff(name, *both))
    yield from different_versions(last_environment(saved), last_environment(their))
