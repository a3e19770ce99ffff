"""The settings of a study, field by field, so that it can be repeated from its page."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

from lbopt.config import AggregatorConfig, Arm, LossConfig, ScheduleConfig, SweepConfig
from lbopt.report._settings import changed, part, value, with_fields
from lbopt.report.study._study import Study
from lbopt.report.study._style import length_text
from lbopt.report.study._tables import Table

_OF_THE_DECAY = (
    "power",
    "end_factor",
    "decay_from",
    "end_learning_rate",
    "decay_steps",
    "decay_rate",
    "stair_epochs",
)
_SHOWN = {
    "base_learning_rate": "base learning rate",
    "base_batch_size": "at batch",
    "scaling_rule": "scaling",
    "warmup_rule": "warmup",
    "base_warmup_epochs": "base warmup, epochs",
}
_OWN = "its own"


def definitions(study: Study) -> list[tuple[str, str]]:
    """Return the settings that all trials of a study share, as terms and their values."""
    config = study.config
    train = study.config.train
    found = [
        ("data", _data(study)),
        ("model", part(train.model)),
        ("loss", _loss(train.loss)),
        ("sum of gradients", _summed(train.aggregator)),
        ("length of a run", length_text(config)),
        ("evaluations for the target", _evaluations(study)),
        ("global batch sizes", ", ".join(map(str, study.sizes))),
        ("search seeds", ", ".join(map(str, config.search.seeds))),
        ("final seeds", ", ".join(map(str, config.final_seeds))),
        ("probes of the gradient", _probes(config)),
        ("devices of a trial", _devices(config)),
    ]
    return [(term, text) for term, text in found if text]


def _data(study: Study) -> str:
    text = part(study.config.train.data)
    told = training_examples(study)
    if told is None:
        return text
    low, high = told
    number = str(low) if low == high else f"{low} to {high}"
    return f"{text}; {number} training examples, from the number of steps"


def training_examples(study: Study) -> tuple[int, int] | None:
    """Return the smallest and the largest number of training examples that fit the steps of runs.

    Rounding of the steps leaves a range, of one number in most studies. None if the length is given
    in steps, or an arm has data of its own.
    """
    epochs = study.config.train.num_epochs
    steps = study.config.train.num_steps
    cells = [(cell.global_batch_size, cell.first.steps) for arm in study.arms for cell in arm.cells]
    if steps or not epochs or not cells or any(arm.data for arm in study.config.arms):
        return None
    return examples_of(cells, epochs)


def examples_of(cells: Collection[tuple[int, float]], epochs: float) -> tuple[int, int] | None:
    """Return the smallest and the largest number of examples that fit runs of (batch size, steps).

    >>> examples_of([(16, 1601), (64, 401), (1024, 26)], epochs=6.0)
    (4267, 4269)
    """
    low = max(math.floor((steps - 1) * size / epochs) + 1 for size, steps in cells)
    high = min(math.floor(steps * size / epochs + 1e-6) for size, steps in cells)
    return (low, high) if low <= high else None


def _summed(aggregator: AggregatorConfig) -> str:
    return "" if aggregator.name == "none" else part(aggregator)


def _loss(loss: LossConfig) -> str:
    return ", ".join(changed(loss)) or "the task's own, with nothing added to it"


def _evaluations(study: Study) -> str:
    train = study.config.train
    if not study.has_target:
        return ""
    if train.eval_every_epochs:
        return f"every {train.eval_every_epochs:g} epochs"
    return f"every {train.eval_every_steps} steps" if train.eval_every_steps else ""


def _probes(config: SweepConfig) -> str:
    measure = config.measure
    if not measure.num_probes:
        return ""
    return (
        f"{measure.num_probes} log-spaced steps of every final run, {measure.probe_parts} parts of "
        f"{measure.probe_part_size} training examples each"
    )


def _devices(config: SweepConfig) -> str:
    text = "all, data-parallel" if config.trial_devices == "all" else "one"
    if config.microstep_size:
        return f"{text}, at most {config.microstep_size} examples at a time on each"
    microsteps = config.train.parallel.num_microsteps
    return text if microsteps == 1 else f"{text}, {microsteps} microsteps a step"


# ---- arms


def arms_table(config: SweepConfig) -> Table:
    """Return the table of arms, with the base values of their rules.

    The last column, the fields of an arm that replace those of the study, is left out if no arm has
    any.
    """
    header = ["arm", "optimizer", *_SHOWN.values(), "decay", _OWN]
    lines = [_arm_line(arm) for arm in config.arms]
    if any(line[-1] for line in lines):
        return header, lines
    return header[:-1], [line[:-1] for line in lines]


def _arm_line(arm: Arm) -> list[str]:
    schedule = arm.schedule
    shown = {name: value(getattr(schedule, name)) for name in _SHOWN}
    if schedule.warmup_rule == "none":
        shown["base_warmup_epochs"] = ""
    rest = changed(schedule, (*_SHOWN, "decay", *_OF_THE_DECAY))
    shown["warmup_rule"] = with_fields(schedule.warmup_rule, rest)
    return [arm.name, part(arm.optimizer), *shown.values(), _decay(schedule), _own(arm)]


def _decay(schedule: ScheduleConfig) -> str:
    others = [f.name for f in dataclasses.fields(schedule) if f.name not in _OF_THE_DECAY]
    fields = changed(schedule, others)
    if schedule.decay == "polynomial" and schedule.power == 1:
        fields.insert(0, "power=1")  # the default, but no polynomial is known without it
    return with_fields(schedule.decay, fields)


def _own(arm: Arm) -> str:
    """Return the parts of an arm's config that replace those of the study."""
    parts = {"data": arm.data, "model": arm.model, "aggregator": arm.aggregator}
    found = [f"{name}: {part(one)}" for name, one in parts.items() if one]
    found += [f"loss: {_loss(arm.loss)}"] if arm.loss else []
    growing = arm.batch_schedule
    if growing:
        others = [f.name for f in dataclasses.fields(growing) if f.name != "kind"]
        found.append(f"batch schedule: {with_fields(growing.kind, changed(growing, others))}")
    found += ["a search of its own"] if arm.search else []
    return "; ".join(found)
