"""test_examples.jsonl: the scores of every final trial on each test example, packed.

A bootstrap over test examples needs them. They have a file of their own to keep results.jsonl
readable: right or wrong takes 60 characters for 360 examples, and 8 KB for 50,000.
"""

from __future__ import annotations

import base64
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, TypedDict

import numpy as np

from lbopt._typed_json import Finite, Int, Positive, Size, convert
from lbopt.sweep._finished_trial import metric_of
from lbopt.sweep._trials import trial_identity
from lbopt.sweep.lanes import Pairs
from lbopt.workdir import read_json_lines

EXAMPLES = "test_examples.jsonl"
OTHERS = ".others/test_examples"
"""Folder in the mirror of a bucket with the lines of other shards."""
_KEY = (
    "study",
    "arm",
    "global_batch_size",
    "phase",
    "fidelity",
    "learning_rate_factor",
    "warmup_factor",
    "weight_decay_factor",
    "seed",
)


class _ExamplesLine(TypedDict):
    arm: str
    global_batch_size: Size
    phase: str
    fidelity: Positive
    learning_rate_factor: Positive
    warmup_factor: Finite
    weight_decay_factor: Finite
    seed: Int
    metric: str
    num_examples: Size


class _Bits(_ExamplesLine):
    correct: str


class _Numbers(_ExamplesLine):
    sums: str
    counts: str


@dataclasses.dataclass(frozen=True)
class ExampleScores:
    """The score of one trial on each test example.

    Attributes:
      metric: Metric that judges the trial; "loss" instead of perplexity, its exponential.
      values: Mean of the metric on each example [examples] float64: 1 or 0 for right or wrong, the
        mean loss of a block's tokens.
      weights: Divisor of each mean [examples] float64: 1, or the number of a block's tokens.
    """

    metric: str
    values: np.ndarray
    weights: np.ndarray


def pack(record: Mapping[str, Any], examples: Pairs) -> dict[str, Any] | None:
    """Return the line of a final trial.

    Args:
      record: The trial's record of results.jsonl.
      examples: The trial's metrics on each test example.

    Returns:
      JSON data: the fields that identify the trial, `metric`, `num_examples`, and either the bits
      `correct` or the fp32 numbers `sums` and `counts`, in base64, little-endian. None if the
      trial has no score because its outputs are not finite.
    """
    metric = metric_of(record)
    of_mean = "loss" if metric == "perplexity" else metric
    if record[f"test_{of_mean}"] is None:
        return None

    sums, counts = (np.asarray(numbers) for numbers in examples[metric])
    line = {name: record[name] for name in _KEY}
    line |= {"metric": of_mean, "num_examples": len(sums)}
    if np.isin(sums, (0, 1)).all() and (counts == 1).all():
        return {**line, "correct": _encode(np.packbits(sums.astype(bool), bitorder="little"))}
    return {**line, "sums": _encode(sums.astype("<f4")), "counts": _encode(counts.astype("<f4"))}


def unpack(line: Mapping[str, Any]) -> ExampleScores:
    """Return the scores in a line of `pack`.

    Raises:
      ValueError: Naming the field, if the line is damaged.
    """
    count = convert(line, _ExamplesLine)["num_examples"]
    if "correct" in line:
        bits = _decode(convert(line, _Bits)["correct"], "correct", np.uint8, -(-count // 8))
        values = np.unpackbits(bits, count=count, bitorder="little").astype(float)
        return ExampleScores(line["metric"], values, np.ones(count))
    numbers = convert(line, _Numbers)
    sums = _decode(numbers["sums"], "sums", "<f4", count).astype(float)
    weights = _decode(numbers["counts"], "counts", "<f4", count).astype(float)
    values = np.divide(sums, weights, out=np.zeros(count), where=weights != 0)
    return ExampleScores(line["metric"], values, weights)


def read_examples(workdir: pathlib.Path) -> dict[tuple, ExampleScores]:
    """Return the scores of the final trials of a study, those of other shards included.

    Args:
      workdir: The study's folder.

    Returns:
      Scores by `trial_identity`. A trial that was killed between its line here and its record ran
      again; its last line counts.

    Raises:
      EnvironmentProblem: Naming the file, if it cannot be read, or a whole line is damaged.
    """
    return {trial_identity(line): unpack(line) for line in read_packed(workdir)}


def read_packed(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Return the lines of a study, those of other shards included, one for each trial."""
    files = [*sorted((workdir / OTHERS).glob("*.jsonl")), workdir / EXAMPLES]
    lines = [line for file in files for line in read_json_lines(file, _check)]
    return list({trial_identity(line): line for line in lines}.values())


def _check(line: Any) -> None:
    unpack(line)


def _encode(numbers: np.ndarray) -> str:
    return base64.b64encode(numbers.tobytes()).decode()


def _decode(text: str, field: str, dtype: Any, count: int) -> np.ndarray:
    try:
        numbers = np.frombuffer(base64.b64decode(text, validate=True), dtype)
    except ValueError as error:
        raise ValueError(f"{field}: not base64 of {np.dtype(dtype).name}") from error
    if len(numbers) != count or not np.isfinite(numbers).all():
        raise ValueError(f"{field}: {len(numbers)} numbers, expected {count} finite ones")
    return numbers
