"""The ablation's ingredients come in any order, and each step changes only one."""

import dataclasses
import itertools
import pathlib

import pytest
from refusal import refused

from lbopt.cli import load_config
from lbopt.config import SweepConfig

FILE = pathlib.Path(__file__).parents[2] / "configs" / "sweeps" / "waterfall_digits.py"
CHANGES = {
    "decay": {"decay"},
    "legw": {"scaling_rule", "warmup_rule", "base_warmup_epochs"},
    "adam": {"optimizer", "base_learning_rate"},
    "trust": {"optimizer", "base_learning_rate"},
    "smoothing": {"loss"},
    "tuned": {"search"},
}


def load(row):
    return load_config(f"{FILE}:{row}", [], SweepConfig)


def fields(arm):
    return {
        **dataclasses.asdict(arm.schedule),
        "optimizer": arm.optimizer,
        "loss": arm.loss,
        "search": arm.search,
    }


@pytest.mark.parametrize(
    "order",
    [
        "legw-decay-adam-trust-smoothing-tuned",
        "tuned-trust-adam-smoothing-legw-decay",
        "-".join(CHANGES),
    ],
)
def test_every_step_adds_its_ingredient_and_nothing_else(order):
    config = load(order)
    config.validate()
    assert config.waterfall == tuple(arm.name for arm in config.arms)
    assert len(config.arms) == 1 + len(CHANGES)
    assert len(config.final_seeds) == 10
    for name, (before, after) in zip(
        order.split("-"), itertools.pairwise(map(fields, config.arms)), strict=True
    ):
        assert {field for field in before if before[field] != after[field]} == CHANGES[name], name
    last = config.arms[-1]
    assert (last.optimizer.name, last.schedule.decay, last.search) == ("lamb", "polynomial", None)


@pytest.mark.parametrize(
    "row", ["legw-decay", "decay-decay-legw-adam-trust-smoothing-tuned", "legw_decay"]
)
def test_an_order_that_is_none_is_refused(row):
    with refused("--config row", row, "choice"):
        load(row)
