"""`lbopt recipes`: the configs, with their sources and published results."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from lbopt import errors, paths
from lbopt._shown import printable, show
from lbopt.cli import _columns, _config_files, _flags
from lbopt.config import SweepConfig, TrainConfig
from lbopt.errors import UserError, require
from lbopt.transforms import VARIANTS

FLAGS = {
    "config": "FILE[:ROW] to show in full, instead of the table",
    "configs": "folder of config files (default: configs/ here, or else the recipes of lbopt)",
    "filter": "words of which each is in the config, the optimizer, the source or the status",
    "json": "print a list of objects",
}
_COLUMNS = ("row", "batch", "optimizer", "status", "published result, hardware, time")
_IN_FULL = (
    "source",
    "batch",
    "optimizer",
    "published_result",
    "hardware",
    "time",
    "status",
    "note",
)
_SEARCHED = ("config", "optimizer", "source", "status")
_SHORT = {
    "measured here": "measured",
    "planned by the TPU compiler": "planned",
    "not yet run": "not yet",
}
"""Statuses as the table shows them."""
HINT = (
    "lbopt recipes --config=FILE:ROW shows a row in full; "
    "lbopt train --config=FILE:ROW --workdir=DIR runs it; FILE may be a name without .py"
)


def run(argv: Sequence[str]) -> None:
    """Print one line per recipe, below its source; or one recipe in full.

    The recipes are the rows that each config file lists in `ROWS`.

    Args:
      argv: Arguments after the command, see `FLAGS`.

    Raises:
      UserError: If a flag is wrong, or a config cannot be loaded.
    """
    given, overrides = _flags.parse("recipes", argv, FLAGS, fields=False)
    if overrides:
        name, _, value = overrides[0].partition("=")
        fix = "lbopt recipes shows recipes without changes; leave it out"
        raise UserError(name, value, fix, code="unused")
    flag = given.get("config")
    for name in ("configs", "filter"):
        if flag is not None and name in given:
            fix = f"it does not go with --config={flag}; give one of the two"
            raise UserError(f"--{name}", given[name], fix, code="conflict")

    flags = list(_flags_of(given.get("configs"))) if flag is None else [flag]
    words = given.get("filter", "").lower().split()
    found = [recipe for recipe in map(_recipe, flags) if _has_all(recipe, words)]
    if words and not found:
        fix = "no recipe has all of these words; lbopt recipes lists all"
        raise UserError("--filter", given["filter"], fix, code="choice")

    if "json" in given:
        show(*json.dumps(found, indent=1).split("\n"))
    elif flag is not None:
        _print_recipe(flag, found[0])
    else:
        show(*_table(found), "", *_columns.wrapped(HINT))


def _has_all(recipe: Mapping[str, str], words: Sequence[str]) -> bool:
    """Return whether every word is in one of the fields that are searched."""
    text = "\n".join(recipe[name] for name in _SEARCHED).lower()
    return all(word in text for word in words)


def _table(recipes: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield the lines of a table: each file and source once, and below them the file's rows."""
    lines = [dict(zip(_COLUMNS, _COLUMNS, strict=True)), *map(_cells, recipes)]
    widths = {name: max(len(line[name]) for line in lines) for name in _COLUMNS[:-1]}
    indent = 2 + sum(width + 2 for width in widths.values())

    above = ""
    for line in lines:
        if line.get("above", "") != above:
            above = line["above"]
            yield from ("", *_columns.wrapped(above, hanging=2))
        padded = [line[name].ljust(width) for name, width in widths.items()]
        cells = ["", *padded, line[_COLUMNS[-1]]]
        yield from _columns.wrapped("  ".join(cells), hanging=indent)


def _cells(recipe: Mapping[str, str]) -> dict[str, str]:
    """Return the text of a recipe in each column, and the line above the rows of its file."""
    _, row = _config_files.split_row(recipe["config"])
    file = recipe["config"].removesuffix(f":{row}")
    published = [recipe[name] for name in ("published_result", "hardware", "time")]
    shown = {
        "above": f"{file}: {recipe['source']}",
        "row": row or "(none)",
        "batch": recipe["batch"],
        "optimizer": recipe["optimizer"],
        "status": _SHORT[recipe["status"]],
        _COLUMNS[-1]: ", ".join(text for text in published if text != "-"),
    }
    return {name: printable(text) for name, text in shown.items()}


def _print_recipe(flag: str, recipe: Mapping[str, str]) -> None:
    config = _flags.call_get_config(flag)
    command = "sweep" if isinstance(config, SweepConfig) else "train"
    file, row = _config_files.split_row(flag)
    workdir = f"runs/{pathlib.Path(file).stem}" + (f"-{row}" if row else "")
    typed = _flags.command_line(command, [f"--config={flag}", f"--workdir={workdir}"])

    fields = {name.replace("_", " "): recipe[name] for name in _IN_FULL}
    if isinstance(config, TrainConfig) and config.optimizer.name in VARIANTS:
        fields["optimizer"] += f", variant {config.optimizer.variant}"

    widest = max(map(len, fields)) + 2
    show(f"{'command':<{widest}}{typed}")  # on one line, to be copied
    for name, text in fields.items():
        show(*_columns.wrapped(f"{name:<{widest}}{text or '-'}", hanging=widest))


def _flags_of(given: str | None) -> Iterator[str]:
    """Yield the `FILE[:ROW]` of each recipe in a folder, or else of each recipe of lbopt by name.

    Args:
      given: Folder from the user; None for `configs/` here, or else the recipes of lbopt.

    Raises:
      UserError: If there is no such folder, or if a file cannot be loaded.
    """
    folder = pathlib.Path("configs") if given is None else paths.local(given, "--configs")
    fix = "there is no such folder; give one of config files, or leave the flag out"
    require(given is None or folder.is_dir(), "--configs", str(folder), fix, code="missing")
    files = _config_files.config_files(folder)
    shipped = given is None and not files
    if shipped:
        folder = _config_files.shipped_recipes()
        files = _config_files.config_files(folder)

    for file in files:
        name = _config_files.name_of(file, folder)
        # A file here of the same name would be loaded in its place.
        means_it = shipped and _config_files.split_row(name)[0] == str(file)
        for row in _flags.config_rows(str(file)):
            yield ":".join([name if means_it else str(file), *filter(None, [row])])


def _recipe(flag: str) -> dict[str, str]:
    """Return the description of a recipe.

    Raises:
      UserError: If the config cannot be loaded or is wrong.
    """
    config = _flags.call_get_config(flag)
    if not isinstance(config, (SweepConfig, TrainConfig)):
        fix = f"get_config gives a {type(config).__name__}; return a TrainConfig or a SweepConfig"
        raise UserError(flag, reason=fix, code="type")
    with errors.under(f"{flag}: "):
        config.validate()

    if isinstance(config, SweepConfig):
        sizes = config.global_batch_sizes
        batch = f"{sizes[0]}..{sizes[-1]}"
        optimizer = f"{len(config.arms)} arms"
    else:
        in_phases = [str(phase.global_batch_size) for phase in config.phases()]
        batch = "/".join(dict.fromkeys(in_phases))
        if config.batch_schedule is not None:
            batch += f" {config.batch_schedule.kind}"
        optimizer = config.optimizer.name

    about = config.about
    return {
        "config": flag,
        "batch": batch,
        "optimizer": optimizer,
        "source": about.paper,
        "published_result": about.published_result,
        "hardware": about.hardware,
        "time": about.time,
        "status": about.status,
        "note": about.note,
    }
