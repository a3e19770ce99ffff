"""Scores, time, settings and metrics of a training run as tables and text."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lbopt import _typed_json
from lbopt._shown import printable, spreadsheet_cell
from lbopt.config import (
    AggregatorConfig,
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ScheduleConfig,
)
from lbopt.report import _settings
from lbopt.train import lower_is_better
from lbopt.workdir import machine_text

Lines = Sequence[Mapping[str, Any]]
"""Lines of metrics.jsonl."""
_IN_PERCENT = ("accuracy", "top_5_accuracy")
_NAMED = {"data": DataConfig, "model": ModelConfig, "optimizer": OptimizerConfig}
_UNNAMED = {
    "loss": ("loss", LossConfig),
    "learning rate": ("schedule", ScheduleConfig),
    "devices": ("parallel", ParallelConfig),
    "sum of gradients": ("aggregator", AggregatorConfig),
}
"""Term in the table of settings -> field and dataclass."""
_MINUTE = 60
_HOUR = 3600


def scores(lines: Lines) -> tuple[list[str], list[list[str]]]:
    """Return the table of scores: last in training, last and best in evaluation, and its step.

    Accuracies are in percent. The loss is the last line.
    """
    names = {
        name.partition("/")[2]
        for line in lines
        for name in line
        if name.startswith("eval/") or name in ("train/loss", "train/accuracy", "train/perplexity")
    }
    header = ["score", "training, last", "evaluation, last", "evaluation, best", "best at step"]
    ordered = sorted(names, key=lambda name: (name == "loss", name))
    rows = [_score_row(lines, name) for name in ordered]
    return header, [row for row in rows if any(row[1:])]


def _score_row(lines: Lines, name: str) -> list[str]:
    trained = finite(lines, f"train/{name}")
    tested = finite(lines, f"eval/{name}")
    shown = [in_words(name, found[-1][1]) if found else "" for found in (trained, tested)]
    best = ["", ""]
    if tested:
        better = min if lower_is_better(name) else max
        step, value = better(tested, key=lambda pair: pair[1])
        best = [in_words(name, value), str(step)]
    text = printable(name.replace("_", " "))
    return [f"{text}, %" if name in _IN_PERCENT else text, *shown, *best]


def in_words(name: str, value: float) -> str:
    """Return a score as text, an accuracy in percent.

    >>> in_words("accuracy", 0.98765), in_words("loss", 0.0123456)
    ('98.77', '0.01235')
    """
    return f"{100 * value:.2f}" if name in _IN_PERCENT else f"{value:.4g}"


def finite(lines: Lines, name: str) -> list[tuple[int, float]]:
    """Return the steps and the finite values of a metric."""
    found = [(line["step"], line.get(name)) for line in lines]
    # Floats alone: NumPy makes objects of integers that it cannot hold.
    kept = [(step, float(value)) for step, value in found if value is not None]
    return [(step, value) for step, value in kept if math.isfinite(value)]


# ---- time


def spent(lines: Lines, saved: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return time, throughput and devices as terms and their values."""
    last = lines[-1]
    seconds = max((value for _, value in finite(lines, "perf/elapsed_s")), default=None)
    rates = [value for _, value in finite(lines, "perf/examples_per_s")]
    # The first logged steps contain the compilation.
    steady = rates[1:] or rates
    found = [
        ("steps", f"{last['step']:,}"),
        ("examples seen", f"{last['examples_seen']:,}"),
        ("training and evaluation", "" if seconds is None else duration(seconds)),
        (
            "throughput, median",
            f"{statistics.median(steady):,.0f} examples per second" if steady else "",
        ),
        ("devices", machine_text(saved)),
    ]
    return [(term, text) for term, text in found if text]


def duration(seconds: float) -> str:
    """Return a time as text.

    >>> duration(3.47), duration(125), duration(7325)
    ('3.5 s', '2 min 5 s', '2 h 2 min')
    """
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    if seconds < _HOUR:
        return f"{seconds // _MINUTE:.0f} min {seconds % _MINUTE:.0f} s"
    return f"{seconds // _HOUR:.0f} h {seconds % _HOUR // _MINUTE:.0f} min"


# ---- settings


def settings(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the settings of a run as terms and their values, those at their defaults left out."""
    steps = config.get("num_steps")
    epochs = config.get("num_epochs")
    found = [
        ("global batch size", batch_words(config, ", then ")),
        ("length", f"{steps:,} steps" if steps else f"{epochs:g} epochs" if epochs else ""),
    ]
    for name, kind in _NAMED.items():
        found.append((name, _settings.part(_typed_json.convert(config[name], kind))))
    for term, (name, kind) in _UNNAMED.items():
        if config.get(name):
            changed = _settings.changed(_typed_json.convert(config[name], kind))
            found.append((term, ", ".join(changed)))
    found.append(("seed", str(config.get("seed", ""))))
    return [(term, text) for term, text in found if text]


def batch_words(config: Mapping[str, Any], then: str) -> str:
    """Return the batch size of a run, or those of its phases, as text.

    >>> batch_words({"global_batch_size": 64, "batch_schedule": {"kind": "ramp"}}, " then ")
    '64 at the start, growing by a batch schedule (ramp)'
    """
    first = str(config["global_batch_size"])
    growing = config.get("batch_schedule")
    if growing:
        return f"{first} at the start, growing by a batch schedule ({growing['kind']})"
    second = config.get("phase2")
    return f"{first}{then}{second['global_batch_size']}" if second else first


# ---- metrics


def csv_of(lines: Lines) -> str:
    """Return the metrics as CSV, a line for each logged step; a value that is not there is empty.

    >>> csv_of([{"step": 1, "train/loss": 0.5}, {"step": 2, "eval/loss": None}])
    'step,train/loss,eval/loss\\n1,0.5,\\n2,,\\n'
    """
    names = list(dict.fromkeys(name for line in lines for name in line))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(spreadsheet_cell, names))
    writer.writerows([line.get(name) for name in names] for line in lines)
    return text.getvalue()
