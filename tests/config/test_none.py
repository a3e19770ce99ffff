"""An override may say None where a field may be None."""

import pathlib

import pytest
from refusal import refused

from lbopt.cli import load_config
from lbopt.config import TrainConfig

FILE = pathlib.Path(__file__).parents[2] / "configs" / "bert_large_lamb.py"


def load(*overrides):
    return load_config(
        f"{FILE}:mixed", [f"--config.{override}" for override in overrides], TrainConfig
    )


def test_a_number_a_text_a_tuple_and_a_group_may_be_none():
    config = load(
        "num_steps=None",
        "data.data_dir=None",
        "optimizer.trust_ratio_bounds=None",
        "phase2=None",
        "phase2=None",
    )
    assert (
        config.num_steps
        is config.data.data_dir
        is config.optimizer.trust_ratio_bounds
        is config.phase2
        is None
    )


def test_of_two_values_the_last_one_counts():
    assert load("num_steps=None", "num_steps=7").num_steps == 7
    assert load("num_steps=7", "num_steps=None").num_steps is None


def test_fields_of_a_group_that_may_be_none_are_set():
    config = load("phase2.num_steps=5", "phase2.schedule.base_learning_rate=0.1")
    assert (config.phase2.num_steps, config.phase2.schedule.base_learning_rate) == (5, 0.1)


@pytest.mark.parametrize(
    "override", ["seed=None", "data=None", "global_batch_size=None", "nothing=None"]
)
def test_other_fields_may_not(override):
    with refused(f"--config.{override.partition('=')[0]}"):
        load(override)


def test_a_field_of_a_group_that_is_none_says_so():
    with refused("--config.phase2.num_steps", code="conflict"):
        load_config(
            str(FILE.with_name("digits_cnn.py")), ["--config.phase2.num_steps=3"], TrainConfig
        )
    with refused("--config.phase2.num_steps", code="conflict"):
        load("phase2.num_steps=3", "phase2=None")


def test_a_field_of_a_number_that_is_none_is_no_field():
    with refused("--config.data.data_dir.x", code="choice"):
        load_config(
            str(FILE.with_name("digits_cnn.py")), ["--config.data.data_dir.x=3"], TrainConfig
        )


def test_a_text_is_taken_as_it_is():
    assert load("name=None").name == "None"
