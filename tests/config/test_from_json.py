"""A config comes back from the JSON of a workdir."""

import json

import pytest

from lbopt.config import (
    Arm,
    ModelConfig,
    OptimizerConfig,
    SweepConfig,
    TrainConfig,
    config_from_json,
    config_to_json,
)
from lbopt.errors import UserError

CONFIGS = [
    TrainConfig(),
    TrainConfig(
        "x",
        model=ModelConfig(widths=(3, 4, 5)),
        optimizer=OptimizerConfig(trust_ratio_bounds=(0.0, 10.0)),
        seed=3,
    ),
    SweepConfig(),
    SweepConfig(arms=(Arm("lamb"), Arm("lars"))),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_it_comes_back(config):
    back = config_from_json(type(config), json.loads(json.dumps(config_to_json(config))))
    assert back == config
    assert repr(back) == repr(config)


def test_left_out_fields_have_their_defaults():
    assert config_from_json(TrainConfig, {"seed": 7}) == TrainConfig(seed=7)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"sede": 1}, "config.sede = 1: this lbopt has no such field; use lbopt 9.9"),
        (
            {"model": {"hiden": 2}},
            "config.model.hiden = 2: this lbopt has no such field; use lbopt 9.9",
        ),
        ({"model": 3}, "config.model = 3: not a group of fields"),
    ],
)
def test_fields_of_another_version(data, said):
    with pytest.raises(UserError) as raised:
        config_from_json(TrainConfig, data, "9.9")
    assert said in str(raised.value)


def test_wrong_types_are_left_for_validate():
    with pytest.raises(UserError, match=r"config.model.widths"):
        config_from_json(TrainConfig, {"model": {"widths": "wide"}}).validate()
