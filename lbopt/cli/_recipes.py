"""`lbopt recipes`: the configs, with their sources and published results."""

from __future__ import annotations

import pathlib
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from lbopt import errors, paths
from lbopt._shown import printable, show
from lbopt.cli import _flags
from lbopt.config import SweepConfig, TrainConfig
from lbopt.errors import UserError
from lbopt.transforms import VARIANTS

FLAGS = {
    "config": "FILE[:ROW] to show in full, instead of the table",
    "configs": "folder of config files (default: configs/ here or beside the package)",
}
HEADER = (
    "config",
    "batch",
    "optimizer",
    "source",
    "published result",
    "hardware",
    "time",
    "status",
)
HINT = (
    "lbopt recipes --config=CONFIG shows a row in full; "
    "lbopt train --config=CONFIG --workdir=DIR runs it"
)
_WIDTH = 100
"""Columns of the text beside the names if a recipe is shown in full."""


def run(argv: Sequence[str]) -> None:
    """Print one line per recipe, or one recipe in full.

    The recipes are the rows that each config file lists in `ROWS`.

    Args:
      argv: Arguments after the command, see `FLAGS`.

    Raises:
      UserError: If a flag is wrong, or a config cannot be loaded.
    """
    given, overrides = _flags.parse("recipes", argv, FLAGS)
    if overrides:
        name, _, value = overrides[0].partition("=")
        fix = "lbopt recipes shows recipes without changes; leave it out"
        raise UserError(name, value, fix, code="unused")
    flag = given.get("config")
    if flag is None:
        _print_table(_folder(given.get("configs")))
        return
    if "configs" in given:
        fix = f"it does not go with --config={flag}; give one of the two"
        raise UserError("--configs", given["configs"], fix, code="conflict")
    _print_recipe(flag)


def _print_table(folder: pathlib.Path) -> None:
    table = [HEADER, *(tuple(map(printable, line)) for line in _lines(folder))]
    widths = [max(len(line[column]) for line in table) for column in range(len(HEADER))]
    for line in table:
        padded = (text.ljust(width) for text, width in zip(line, widths, strict=True))
        show("  ".join(padded).rstrip())
    show(HINT)


def _print_recipe(flag: str) -> None:
    config = _flags.call_get_config(flag)
    shown = dict(zip(HEADER, (flag, *_describe(flag, config)), strict=True))
    command = "sweep" if isinstance(config, SweepConfig) else "train"
    file, row = _flags.split_row(flag)
    workdir = f"runs/{pathlib.Path(file).stem}" + (f"-{row}" if row else "")
    typed = _flags.command_line(command, [f"--config={flag}", f"--workdir={workdir}"])

    order = ("source", "batch", "optimizer", "published result", "hardware", "time", "status")
    fields = {"command": typed, **{name: shown[name] for name in order}, "note": config.about.note}
    if isinstance(config, TrainConfig) and config.optimizer.name in VARIANTS:
        fields["optimizer"] += f", variant {config.optimizer.variant}"

    widest = max(map(len, fields))
    for name, text in fields.items():
        wrapped = [text]  # the command stays on one line, to be copied
        if name != "command":
            wrapped = textwrap.wrap(text, _WIDTH, break_on_hyphens=False) or ["-"]
        first, *others = wrapped
        show(f"{name:<{widest}}  {first}", *(f"{' ' * (widest + 2)}{other}" for other in others))


def _folder(given: str | None) -> pathlib.Path:
    candidates = [pathlib.Path("configs"), pathlib.Path(__file__).parents[2] / "configs"]
    if given:
        candidates = [paths.local(given, "--configs")]
    for folder in candidates:
        if folder.is_dir():
            return folder
    fix = "there is no such folder; give the configs/ folder of a checkout"
    raise UserError("--configs", str(candidates[0]), fix, code="missing")


def _lines(folder: pathlib.Path) -> Iterator[tuple[str, ...]]:
    for file in _flags.config_files(folder):
        for row in _flags.config_rows(str(file)):
            flag = f"{file}:{row}" if row else str(file)
            yield flag, *_describe(flag, _flags.call_get_config(flag))


def _describe(flag: str, config: Any) -> tuple[str, ...]:
    """Return the columns of a recipe that follow its name."""
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
        optimizer = config.optimizer.name

    about = config.about
    return (
        batch,
        optimizer,
        about.paper,
        about.published_result,
        about.hardware,
        about.time,
        about.status,
    )
