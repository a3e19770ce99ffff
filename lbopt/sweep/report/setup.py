"""What a study ran, field by field, so that it can be done again from its page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lbopt.config import (
    AggregatorConfig,
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    checks,
)
from lbopt.sweep.report.figures.style import length_text

Config = Mapping[str, Any]
_OF_THE_MACHINE = ("data_dir", "reader_threads", "reader_processes", "max_damaged_records")
_OF_THE_DECAY = (
    "power",
    "end_factor",
    "decay_from",
    "end_learning_rate",
    "decay_steps",
    "decay_rate",
    "stair_epochs",
)
_SHOWN = (
    "base_learning_rate",
    "base_batch_size",
    "scaling_rule",
    "warmup_rule",
    "base_warmup_epochs",
    "decay",
)
_HEADER = (
    "arm",
    "optimizer",
    "base learning rate",
    "at batch",
    "scaling",
    "warmup",
    "base warmup, epochs",
    "decay",
    "its own",
)


def definitions(config: Config, arms: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return what all trials of a study have in common, as terms and what they are.

    Args:
      config: the study's config as JSON data.
      arms: of its summary; the steps of its cells tell how many examples an epoch has.
    """
    train = config["train"]
    found = [
        ("data", _data(config, arms)),
        ("model", _part(train.get("model"), ModelConfig)),
        ("loss", _loss(train.get("loss"))),
        ("sum of gradients", _summed(train.get("aggregator"))),
        ("length of a run", length_text(config)),
        ("evaluations for the target", _evaluations(train)),
        ("global batch sizes", ", ".join(map(str, config["global_batch_sizes"]))),
        ("search seeds", ", ".join(map(str, config["search"]["seeds"]))),
        ("final seeds", ", ".join(map(str, config["final_seeds"]))),
        ("probes of the gradient", _probes(config.get("measure") or {})),
        ("devices of a trial", _devices(config)),
    ]
    return [(term, text) for term, text in found if text]


def _data(config: Config, arms: Sequence[Mapping[str, Any]]) -> str:
    text = _part(config["train"].get("data"), DataConfig, _OF_THE_MACHINE)
    told = training_examples(config, arms)
    if not text or told is None:
        return text
    low, high = told
    return f"{text}; {low if low == high else f'{low} to {high}'} training examples, as the steps of the epochs tell"


def training_examples(config: Config, arms: Sequence[Mapping[str, Any]]) -> tuple[int, int] | None:
    """Return the least and the greatest number of training examples with which epochs have the steps that they had.

    Args:
      config: the study's config as JSON data.
      arms: of its summary.

    Returns:
      (least, greatest), the same number in most studies, as the steps of an epoch are rounded up; None where the length is
      given in steps, or where arms have data of their own.
    """
    points = [
        (point["global_batch_size"], point["steps"]) for arm in arms for point in arm["points"]
    ]
    epochs = config["train"].get("num_epochs")
    if (
        config["train"].get("num_steps")
        or not epochs
        or not points
        or any(arm.get("data") for arm in config["arms"])
    ):
        return None
    low = max(math.floor((steps - 1) * size / epochs) + 1 for size, steps in points)
    high = min(math.floor(steps * size / epochs + 1e-6) for size, steps in points)
    return (low, high) if low <= high else None


def _summed(aggregator: Config | None) -> str:
    named = aggregator is not None and aggregator.get("name", "none") != "none"
    return _part(aggregator, AggregatorConfig) if named else ""


def _loss(loss: Config | None) -> str:
    changed = _changed(loss, LossConfig)
    return "" if loss is None else ", ".join(changed) or "the task's own, with nothing added to it"


def _evaluations(train: Config) -> str:
    if not train.get("target_metric"):
        return ""
    if train.get("eval_every_epochs"):
        return f"every {train['eval_every_epochs']:g} epochs"
    return f"every {train['eval_every_steps']} steps" if train.get("eval_every_steps") else ""


def _probes(measure: Config) -> str:
    if not measure.get("num_probes"):
        return ""
    parts, size = measure["probe_parts"], measure["probe_part_size"]
    return f"{measure['num_probes']} log-spaced steps of every final run, {parts} parts of {size} training examples each"


def _devices(config: Config) -> str:
    if "trial_devices" not in config:
        return ""
    text = "all, data-parallel" if config["trial_devices"] == "all" else "one"
    if config.get("microstep_size"):
        return f"{text}, at most {config['microstep_size']} examples at a time on each"
    microsteps = config["train"].get("parallel", {}).get("num_microsteps", 1)
    return text if microsteps == 1 else f"{text}, {microsteps} microsteps a step"


# ---- arms


def arms_table(config: Config) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table of arms: what the rules of each start from.

    Args:
      config: the study's config as JSON data.

    Returns:
      Text throughout; the last column, what an arm has instead of the study's, is left out if no arm has anything.
    """
    rows = [_arm_row(arm) for arm in config["arms"]]
    kept = len(_HEADER) if any(row[-1] for row in rows) else len(_HEADER) - 1
    return list(_HEADER[:kept]), [row[:kept] for row in rows]


def _arm_row(arm: Config) -> list[str]:
    schedule = arm["schedule"]
    shown = [_value(schedule.get(name, "")) for name in _SHOWN[:-1]]
    if schedule.get("warmup_rule") == "none":
        shown[4] = ""
    shown[3] = _with(shown[3], _changed(schedule, ScheduleConfig, (*_SHOWN, *_OF_THE_DECAY)))
    return [
        arm["name"],
        _part(arm["optimizer"], OptimizerConfig),
        *shown,
        _decay(schedule),
        _own(arm),
    ]


def _decay(schedule: Config) -> str:
    other = [name for name in schedule if name not in _OF_THE_DECAY]
    changed = _changed(schedule, ScheduleConfig, other)
    power = schedule.get("power")
    if schedule.get("decay") == "polynomial" and power == 1:
        changed.insert(0, "power=1")  # the default, but no polynomial is known without it
    return _with(schedule.get("decay", ""), changed)


def _own(arm: Config) -> str:
    """Return the parts that an arm has instead of the study's; how it was searched is said in words elsewhere."""
    kinds = {"data": DataConfig, "model": ModelConfig, "aggregator": AggregatorConfig}
    found = [
        f"{name}: {_part(arm[name], kind, _OF_THE_MACHINE)}"
        for name, kind in kinds.items()
        if arm.get(name)
    ]
    found += [f"loss: {_loss(arm['loss'])}"] if arm.get("loss") else []
    return "; ".join(found + (["a search of its own"] if arm.get("search") else []))


# ---- fields


def _part(given: Config | None, kind: type, left_out: Sequence[str] = ()) -> str:
    """Return a part of the config by its name and the fields that are not at their defaults; "" if there is none."""
    return "" if given is None else _with(given["name"], _changed(given, kind, (*left_out, "name")))


def _with(name: str, fields: Sequence[str]) -> str:
    return f"{name} ({', '.join(fields)})" if fields else name


def _changed(given: Config | None, kind: type, left_out: Sequence[str] = ()) -> list[str]:
    """Return "field=value" for every field that is not at its default."""
    defaults = checks.to_json(kind())
    return [
        f"{name}={_value(value)}"
        for name, value in (given or {}).items()
        if name not in left_out and not (name in defaults and defaults[name] == value)
    ]


def _value(value: Any) -> str:
    """Return a value as a config file would have it.

    >>> _value([16, 32]), _value(0.0001), _value(20.0), _value("sqrt")
    ('(16, 32)', '0.0001', '20', 'sqrt')
    """
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_value, value))}{',' * (len(value) == 1)})"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
