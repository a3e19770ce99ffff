"""Rows of config files: the text after the colon in `--config=configs/digits_cnn.py:lamb-256`."""

from __future__ import annotations

from collections.abc import Iterable

from lbopt.errors import require, require_choice


def parse_row(row: str, optimizers: Iterable[str]) -> tuple[str, int]:
    """Return the optimizer and the batch size of a row `<optimizer>-<global batch size>`.

    Args:
      row: Text of the row.
      optimizers: Names of the optimizers that the config file knows.

    Raises:
      UserError: Naming "--config row".

    >>> parse_row("lamb-256", ["adam", "lamb"])
    ('lamb', 256)
    """
    name, _, size = row.partition("-")
    require_choice("--config row", name, optimizers)
    fix = f"use OPTIMIZER-BATCH, for instance {name}-256, or smoke"
    require(size.isdecimal(), "--config row", row, fix)
    return name, int(size)
