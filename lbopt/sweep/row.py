"""A line of `results.jsonl`: its fields and their types, by which every line is checked when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from lbopt.typed_json import Exponent, Finite, Int, Positive, Share, Size, convert

_Number = Finite | None
_Numbers = list[_Number]
_Perplexity = Positive | None
_Share = Share | None


class _Curve(TypedDict, total=False):
    train_loss: _Numbers
    distance: _Numbers


class _LogFit(TypedDict):
    intercept: float
    slope: float
    r2: float


class _PowerFit(TypedDict):
    scale: float
    exponent: Exponent
    r2: float


class _Diffusion(TypedDict):
    from_step: Positive
    to_step: Positive
    log: _LogFit
    power: _PowerFit


class _Always(TypedDict):
    arm: str
    phase: str
    global_batch_size: Size
    fidelity: Positive
    steps: Positive
    warmup_steps: Finite
    learning_rate: Finite
    learning_rate_factor: Positive
    warmup_factor: Finite
    weight_decay_factor: Finite
    seed: Int
    train_accuracy: _Share
    validation_accuracy: _Share
    validation_loss: _Number
    test_accuracy: _Share
    diverged: bool | Literal[0, 1]


class Line(_Always, total=False):
    """Fields of a finished trial; see `lbopt.sweep.record.Record.row`. Lines of earlier versions lack some."""

    study: str
    optimizer: str
    scaling_rule: str
    warmup_rule: str
    weight_decay: Finite
    steps_run: Finite
    examples_seen: Finite
    train_loss: _Number
    test_loss: _Number
    train_perplexity: _Perplexity
    validation_perplexity: _Perplexity
    test_perplexity: _Perplexity
    last_epoch_loss: _Number
    divergence_step: _Number
    steps_to_target: _Number
    examples_to_target: _Number
    distance: _Number
    outputs: _Number
    curve: _Curve | None
    diffusion: _Diffusion | None
    evaluations: dict[str, _Numbers] | None
    probes: dict[str, _Numbers | dict[str, _Numbers]] | None
    noise_scale: _Number
    seconds: Finite


class _Series(TypedDict):
    step: list[Finite]


REQUIRED = tuple(_Always.__annotations__)
_SERIES = ("curve", "evaluations", "probes")


def check_row(row: Mapping[str, Any]) -> None:
    """Raise `ValueError` naming a field of a finished trial that is of another type."""
    convert(row, Line)
    for name in ("validation_loss", "validation_accuracy"):
        if row[name] is None and not row["diverged"]:
            raise ValueError(f"{name}: expected a number, as the trial did not diverge")
    for name in _SERIES:
        series = row.get(name) or {}
        if series:
            _check_lengths(series, name)


def _check_lengths(series: Mapping[str, Any], place: str) -> None:
    """Hold the columns of a table against its steps: each has a number for every one of them."""
    try:
        steps = convert(series, _Series)["step"]
    except ValueError as error:
        raise ValueError(f"{place}.{error}") from error
    columns = {name: column for name, column in series.items() if isinstance(column, list)}
    for group in (group for group in series.values() if isinstance(group, dict)):
        columns |= group
    for name, column in columns.items():
        if len(column) != len(steps):
            raise ValueError(f"{place}.{name}: {len(column)} numbers for {len(steps)} steps")
