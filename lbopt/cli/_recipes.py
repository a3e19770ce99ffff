"""`lbopt recipes`."""

from __future__ import annotations

import pathlib
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from lbopt import paths
from lbopt._shown import printable, show
from lbopt.cli import _arguments
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
HINT = "lbopt recipes --config=CONFIG shows a row in full; lbopt train --config=CONFIG --workdir=DIR runs it"
_WIDTH = 100
"""Of the text beside the names in a row shown in full."""


def run(argv: Sequence[str]) -> None:
    """Print one line per config (every row that a file lists in `ROWS`, or its only one), or one row in full."""
    given, overrides = _arguments.parse("recipes", argv, FLAGS)
    if overrides:
        raise UserError(f"{overrides[0]}: lbopt recipes shows rows as they are; leave it out")
    flag = given.get("config")
    if flag is None:
        _print_table(_folder(given.get("configs")))
        return
    if "configs" in given:
        raise UserError(
            f"--configs = {given['configs']!r} beside --config = {flag!r}: give one of the two"
        )
    _print_row(flag)


def _print_table(folder: pathlib.Path) -> None:
    rows = [HEADER, *(tuple(map(printable, row)) for row in _rows(folder))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    for row in rows:
        show("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    show(HINT)


def _print_row(flag: str) -> None:
    config = _arguments.call_get_config(flag)
    shown = dict(zip(HEADER, (flag, *_describe(flag, config)), strict=True))
    command = "sweep" if isinstance(config, SweepConfig) else "train"
    file, row = _arguments.split_row(flag)
    workdir = f"runs/{pathlib.Path(file).stem}" + (f"-{row}" if row else "")
    line = _arguments.command_line(command, [f"--config={flag}", f"--workdir={workdir}"])
    order = ("source", "batch", "optimizer", "published result", "hardware", "time", "status")
    fields = {"command": line, **{name: shown[name] for name in order}, "note": config.about.note}
    if isinstance(config, TrainConfig) and config.optimizer.name in VARIANTS:
        fields["optimizer"] += f", variant {config.optimizer.variant}"
    widest = max(map(len, fields))
    for name, text in fields.items():
        # The command stays one line, to be copied.
        parts = (
            [text]
            if name == "command"
            else textwrap.wrap(text, _WIDTH, break_on_hyphens=False) or ["-"]
        )
        show(
            f"{name:<{widest}}  {parts[0]}", *(f"{' ' * (widest + 2)}{part}" for part in parts[1:])
        )


def _folder(given: str | None) -> pathlib.Path:
    candidates = (
        [paths.local(given, "--configs")]
        if given
        else [pathlib.Path("configs"), pathlib.Path(__file__).parents[2] / "configs"]
    )
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise UserError(
        f"--configs = {str(candidates[0])!r}: there is no such folder; give the configs/ folder of a checkout"
    )


def _rows(folder: pathlib.Path) -> Iterator[tuple[str, ...]]:
    for file in sorted(folder.rglob("*.py")):
        for row in _arguments.config_rows(str(file)):
            flag = f"{file}:{row}" if row else str(file)
            yield flag, *_describe(flag, _arguments.call_get_config(flag))


def _describe(flag: str, config: Any) -> tuple[str, ...]:
    if not isinstance(config, (SweepConfig, TrainConfig)):
        raise UserError(
            f"{flag}: get_config gives a {type(config).__name__}; return a TrainConfig or a SweepConfig"
        )
    try:
        config.validate()
    except UserError as error:
        raise UserError(f"{flag}: {error}") from error
    if isinstance(config, SweepConfig):
        sizes = config.global_batch_sizes
        batch, optimizer = f"{sizes[0]}..{sizes[-1]}", f"{len(config.arms)} arms"
    else:
        in_phases = [str(phase.global_batch_size) for phase in config.phases()]
        batch, optimizer = "/".join(dict.fromkeys(in_phases)), config.optimizer.name
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
