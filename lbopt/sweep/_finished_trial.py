"""A finished trial, with the types that every line of `results.jsonl` must have."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from lbopt._typed_json import Exponent, Finite, Int, Positive, Share, Size, convert
from lbopt.train import lower_is_better

Number = Finite | None
Numbers = list[Number]
SPLITS = ("train", "validation", "test")
SEARCH = "search"
_LEARNED = 0.05
FINAL = "final"


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """Measurements at some steps of a run; every column has a number, or None, for each step.

    Attributes:
      step: Optimizer steps, 1-based, ascending.
      train_loss: Loss of the batch.
      distance: ||w_t - w_0|| after the step.
    """

    step: list[Finite]
    train_loss: Numbers | None = None
    distance: Numbers | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Probes:
    """Measurements of the gradient at some steps of a run; columns as in `Curve`.

    Attributes:
      step: Optimizer steps, 1-based, ascending.
      noise_trace: tr(Sigma), the sum over parameters of the variance of one example's gradient.
      gradient_square_norm: |G|^2, an unbiased estimate that can be negative.
      lipschitz: |g^T H g| / |g|^2, the local Lipschitz constant along the gradient.
      phi: 1 - cosine of the gradients of two half batches.
      phi_layers: phi of each layer, by its path.
      phi_modules: phi of each module, by its name.
      trust_ratio: Trust ratio of each layer, by its path.
    """

    step: list[Finite]
    noise_trace: Numbers | None = None
    gradient_square_norm: Numbers | None = None
    lipschitz: Numbers | None = None
    phi: Numbers | None = None
    phi_layers: dict[str, Numbers] | None = None
    phi_modules: dict[str, Numbers] | None = None
    trust_ratio: dict[str, Numbers] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class LogFit:
    """d(t) = intercept + slope log t, with the R^2 of d."""

    intercept: Finite
    slope: Finite
    r2: Finite


@dataclasses.dataclass(frozen=True, slots=True)
class PowerFit:
    """d(t) = scale t^exponent, with the R^2 of d."""

    scale: Finite
    exponent: Exponent
    r2: Finite


@dataclasses.dataclass(frozen=True, slots=True)
class Diffusion:
    """Both fits of the distance d from the start over the steps t from `from_step` to `to_step`."""

    from_step: Positive
    to_step: Positive
    log: LogFit
    power: PowerFit


@dataclasses.dataclass(frozen=True, slots=True)
class FinishedTrial:
    """A finished trial; `lbopt.sweep._running_trial.RunningTrial.record` explains the fields.

    None stands for a number that was not measured or is not finite. Lines of earlier versions lack
    some of the fields that have a default here. `scores` has the scores of a metric that has no
    fields here, by their names in the line, `test_r2` for instance.
    """

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
    validation_loss: Number
    diverged: bool | Literal[0, 1]
    study: str | None = None
    optimizer: str | None = None
    scaling_rule: str | None = None
    warmup_rule: str | None = None
    final_batch_size: Size | None = None
    weight_decay: Finite = 0.0
    steps_run: Finite = 0.0
    examples_seen: Finite = 0.0
    metric: str | None = None
    scores: dict[str, Number] = dataclasses.field(default_factory=dict)
    train_loss: Number = None
    test_loss: Number = None
    train_accuracy: Share | None = None
    validation_accuracy: Share | None = None
    test_accuracy: Share | None = None
    train_perplexity: Positive | None = None
    validation_perplexity: Positive | None = None
    test_perplexity: Positive | None = None
    last_epoch_loss: Number = None
    divergence_step: Number = None
    steps_to_target: Positive | None = None
    examples_to_target: Positive | None = None
    distance: Number = None
    outputs: Number = None
    trivial_loss: Number = None
    curve: Curve | None = None
    diffusion: Diffusion | None = None
    evaluations: dict[str, Numbers] | None = None
    probes: Probes | None = None
    noise_scale: Number = None
    seconds: Finite = 0.0

    @property
    def is_final(self) -> bool:
        """Whether the trial was tested; search trials, which choose the candidate, were not."""
        return self.phase == FINAL

    def score(self, split: str, name: str) -> float | None:
        """Return the metric of this name on "train", "validation" or "test"."""
        field = f"{split}_{name}"
        return self.scores[field] if field in self.scores else getattr(self, field)


_ALWAYS = tuple(
    field.name
    for field in dataclasses.fields(FinishedTrial)
    if field.default is field.default_factory is dataclasses.MISSING
)
REQUIRED = (*_ALWAYS, *(f"{split}_accuracy" for split in SPLITS))
"""Fields that every line of a study of accuracy has."""
_SERIES = ("curve", "evaluations", "probes")
_SHARES = ("accuracy", "exact_match")


def metric_of(record: Mapping[str, Any]) -> str:
    """Return the name of the metric that judges a trial; lines of earlier versions lack it."""
    by_fields = "perplexity" if "validation_perplexity" in record else "accuracy"
    return record.get("metric") or by_fields


def is_learned(loss: float, trivial_loss: float) -> bool:
    """Return whether a loss is 5 % below that of outputs that do not look at the input.

    The margin is larger than the differences between batches.

    >>> is_learned(2.1, 2.3), is_learned(2.29, 2.3)
    (True, False)
    """
    return loss < trivial_loss - _LEARNED * abs(trivial_loss)


def worst_score(metric: str) -> float:
    """Return the score of a trial that diverged: the worst that the metric of this name can have.

    >>> worst_score("accuracy"), worst_score("r2"), worst_score("loss")
    (0.0, -inf, inf)
    """
    if metric in _SHARES:
        return 0.0
    return math.inf if lower_is_better(metric) else -math.inf


def finished_trial(record: Mapping[str, Any]) -> FinishedTrial:
    """Return a line of `results.jsonl` as a finished trial.

    Raises:
      ValueError: Naming the field, if it is missing or has another type.
    """
    run = convert(record, FinishedTrial)
    known = {field.name for field in dataclasses.fields(FinishedTrial)}
    names = [f"{split}_{metric_of(record)}" for split in SPLITS]
    missing = next((name for name in names if name not in record), None)
    if missing:
        raise ValueError(f"object missing required field `{missing}`")
    others = {name: record[name] for name in names if name not in known}
    return dataclasses.replace(run, scores=convert(others, dict[str, Number]))


def check_record(record: Mapping[str, Any]) -> None:
    """Raise `ValueError` naming a field of a finished trial that has another type."""
    run = finished_trial(record)
    for name in ("loss", "accuracy") if metric_of(record) == "accuracy" else ("loss",):
        if run.score("validation", name) is None and not run.diverged:
            raise ValueError(f"validation_{name}: expected a number, as the trial did not diverge")
    for name in _SERIES:
        if series := record.get(name):
            _check_lengths(series, name)


def _check_lengths(series: Mapping[str, Any], place: str) -> None:
    """Raise `ValueError` unless every column of a table has a number for each of its steps."""
    steps = series.get("step")
    if not isinstance(steps, list):
        raise ValueError(f"{place}.step: expected list, got {type(steps).__name__}")
    columns = {name: column for name, column in series.items() if isinstance(column, list)}
    for group in (group for group in series.values() if isinstance(group, dict)):
        columns |= group
    for name, column in columns.items():
        if len(column) != len(steps):
            raise ValueError(f"{place}.{name}: {len(column)} numbers for {len(steps)} steps")
