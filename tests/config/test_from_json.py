"""A config is restored from the JSON of a workdir."""

import json

import pytest
from refusal import refused

from lbopt.config import (
    Arm,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    PhaseConfig,
    SearchConfig,
    SweepConfig,
    TrainConfig,
    completed_json,
    config_from_json,
    config_to_json,
)

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


def test_a_study_of_an_earlier_version_is_not_widened():
    """It has no such field, and did not search beyond its edges; this version's default does."""
    earlier = config_to_json(SweepConfig(arms=(Arm("lamb", search=SearchConfig()), Arm("lars"))))
    assert earlier["search"].pop("widen_candidates") > 0
    earlier["arms"][0]["search"].pop("widen_candidates")
    found = completed_json(SweepConfig, earlier)
    assert found["search"]["widen_candidates"] == 0
    assert found["arms"][0]["search"]["widen_candidates"] == 0
    assert completed_json(SweepConfig, found) == found


def test_left_out_fields_have_their_defaults():
    assert config_from_json(TrainConfig, {"seed": 7}) == TrainConfig(seed=7)


@pytest.mark.parametrize(
    ("kind", "data", "field", "value", "code"),
    [
        (TrainConfig, {"sede": 1}, "config.sede", 1, "choice"),
        (TrainConfig, {"model": {"hiden": 2}}, "config.model.hiden", 2, "choice"),
        (TrainConfig, {"model": 3}, "config.model", 3, "type"),
        (TrainConfig, 3, "config", 3, "type"),
        (SweepConfig, {"arms": [{}, {"surname": "x"}]}, "config.arms[1].surname", "x", "choice"),
    ],
)
def test_fields_of_another_version(kind, data, field, value, code):
    with refused(field, value, code):
        config_from_json(kind, data, "9.9")


def test_what_an_earlier_version_saved_of_fields_without_effect_is_forgotten():
    """The earlier version accepted any value of them; neither run nor network depends on it."""
    config = TrainConfig(
        "x",
        num_steps=4,
        optimizer=OptimizerConfig("adam"),
        loss=LossConfig(label_smoothing=0.1, label_smoothing_rule="other_classes"),
        phase2=PhaseConfig(3),
    )
    data = config_to_json(config)
    data["optimizer"] |= {"weight_decay": 0.5, "variant": "apex", "eps": 1e-7}
    data["phase2"] |= {"sequence_length": 128, "remat": "layer"}
    data["model"]["size"] = "large"
    found = config_from_json(TrainConfig, completed_json(TrainConfig, data))
    found.validate()
    config.optimizer.eps = 1e-7
    assert found == config


def test_a_study_forgets_them_too():
    study = SweepConfig(arms=(Arm("a", OptimizerConfig("adam"), loss=LossConfig(0.1)),))
    data = config_to_json(study)
    data["arms"][0]["optimizer"]["weight_decay"] = 0.5
    data["train"]["model"]["size"] = "large"
    assert config_from_json(SweepConfig, completed_json(SweepConfig, data)) == study


def test_wrong_types_are_left_for_validate():
    with refused("config.model.widths", "wide", "type"):
        config_from_json(TrainConfig, {"model": {"widths": "wide"}}).validate()
