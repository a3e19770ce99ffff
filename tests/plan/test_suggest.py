"""Suggested changes: their order, and that only fitting ones are named.

The costs of changes are invented here; the test of the command compiles one.
"""

import dataclasses

import planned
import pytest

from lbopt.config import PhaseConfig, ScheduleConfig
from lbopt.plan import StepCost, _suggest, open_topology

pytestmark = pytest.mark.tpu_compiler


@pytest.fixture(scope="module")
def place():
    return open_topology("v3:1x1")


@pytest.fixture
def tried(monkeypatch):
    """Return a function fits -> the configs that were tried.

    `fits` is a function of a config that returns whether its step fits in memory.
    """

    def arrange(fits):
        configs = []

        def build(config, devices, load):
            configs.append(config)
            return config

        monkeypatch.setattr(_suggest, "build_run", build)
        monkeypatch.setattr(_suggest, "_cost", lambda config, *_: StepCost(fits(config), 0, 0.0))
        return configs

    return arrange


def bert(**parallel):
    config = planned.bert(**parallel)
    config.model.scan_layers = False
    return config


def test_the_mildest_of_each_kind_is_named(place, tried):
    configs = tried(
        lambda config: (
            config.model.remat in ("inner", "layer")
            or config.parallel.num_microsteps >= 4
            or config.parallel.shard_update
        )
    )
    found = _suggest.suggest_changes(bert(), place, 0)
    assert [(one.name, one.flags) for one in found] == [
        ("rematerialisation of inner", ("--config.model.remat=inner",)),
        ("accumulation x4", ("--config.parallel.num_microsteps=4",)),
        ("sharded update", ("--config.parallel.shard_update=True",)),
    ]
    assert [config.model.remat for config in configs[:3]] == ["attention", "dots", "inner"]


def test_what_helps_only_together_is_named_together(place, tried):
    tried(
        lambda config: (
            config.model.remat == "layer"
            and config.parallel.num_microsteps == 8
            and config.parallel.shard_update
        )
    )
    (found,) = _suggest.suggest_changes(bert(), place, 0)
    assert set(found.flags) == {
        "--config.model.remat=layer",
        "--config.parallel.num_microsteps=8",
        "--config.parallel.shard_update=True",
    }


def test_nothing_is_named_that_does_not_fit(place, tried):
    tried(lambda config: False)
    assert _suggest.suggest_changes(bert(shard_update=True), place, 0) == []


def test_a_batch_is_not_cut_where_it_does_not_divide(place, tried):
    configs = tried(lambda config: False)
    config = bert()
    config.global_batch_size = 12  # six a core: parts of three, and no more
    _suggest.suggest_changes(config, place, 0)
    assert {config.parallel.num_microsteps for config in configs} == {1, 2}


def test_fields_of_the_second_phase(place, tried):
    tried(lambda config: config.phase2.remat != "none" or config.phase2.num_microsteps > 1)
    second = PhaseConfig(
        10,
        64,
        sequence_length=64,
        max_predictions=8,
        schedule=ScheduleConfig(1e-3, warmup_rule="none"),
    )
    config = dataclasses.replace(bert(), phase2=second)
    found = _suggest.suggest_changes(config, place, 1)
    assert [one.flags for one in found] == [
        ("--config.phase2.remat=attention",),
        ("--config.phase2.num_microsteps=2",),
    ]


def test_only_networks_whose_layers_can_be_computed_again(place, tried):
    configs = tried(lambda config: False)
    _suggest.suggest_changes(planned.cnn(), place, 0)
    assert all(config.model.remat == "none" for config in configs)


@pytest.mark.slow
def test_layers_in_a_loop_are_computed_again_too(place):
    """A suggestion is compiled: with rematerialised layers a looped step holds less."""
    plain, again = (
        _suggest._cost(_suggest.build_run(changed, place.devices, _suggest.known_source), place, 0)
        for changed in (
            planned.bert(),
            _suggest.with_fields(planned.bert(), {"model.remat": "layer"}),
        )
    )
    assert again.temporary_bytes < plain.temporary_bytes


def test_evaluation_is_cut_down_to_an_example_a_device(place, monkeypatch):
    monkeypatch.setattr(_suggest, "cost_of", lambda *_: StepCost(False, 0, 0.0))
    said = []
    config = planned.cnn()
    config.eval_global_batch_size = 8
    assert _suggest.suggest_evaluation(config, place, 0, said.append) is None
    assert said == [f"trying evaluation in batches of {size} ..." for size in (4, 2)]
