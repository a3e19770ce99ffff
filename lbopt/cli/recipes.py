"""`lbopt recipes`."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from lbopt.cli import arguments
from lbopt.config import SweepConfig, TrainConfig
from lbopt.errors import UserError

FLAGS = {"configs": "folder of config files (default: configs/ here or beside the package)"}
HEADER = ("config", "batch", "optimizer", "source", "published result", "hardware", "time", "status")


def run(argv: Sequence[str]) -> None:
    """Print one line per config: every row that a file lists in `ROWS`, or its only one."""
    given, _ = arguments.parse("recipes", argv, FLAGS)
    folder = _folder(given.get("configs"))
    rows = [HEADER, *_rows(folder)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _folder(given: str | None) -> pathlib.Path:
    candidates = (
        [pathlib.Path(given)] if given else [pathlib.Path("configs"), pathlib.Path(__file__).parents[2] / "configs"]
    )
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise UserError(
        f"--configs = {str(candidates[0])!r}: there is no such folder; give the configs/ folder of a checkout"
    )


def _rows(folder: pathlib.Path) -> Iterator[tuple[str, ...]]:
    for file in sorted(folder.rglob("*.py")):
        for row in arguments.config_rows(str(file)):
            flag = f"{file}:{row}" if row else str(file)
            yield flag, *_describe(flag, arguments.call_get_config(flag))


def _describe(flag: str, config: Any) -> tuple[str, ...]:
    if not isinstance(config, (SweepConfig, TrainConfig)):
        raise UserError(f"{flag}: get_config gives a {type(config).__name__}; return a TrainConfig or a SweepConfig")
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
    return batch, optimizer, about.paper, about.published_result, about.hardware, about.time, about.status
