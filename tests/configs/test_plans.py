"""The committed plans match the current recipes."""

import json
import pathlib
import runpy

import pytest

from lbopt.cli import call_get_config
from lbopt.config import TrainConfig, completed_json
from lbopt.plan._document import settings as settings_on

ROOT = pathlib.Path(__file__).parents[2]
PLANS = {
    json.loads(file.read_text())["recipe"]: file
    for file in sorted((ROOT / "configs" / "plans").glob("*.json"))
}
MAKE = runpy.run_path(str(ROOT / "scripts" / "make_plans.py"))


def as_now(config):
    """Return a plan's settings; settings that are newer than the plan have their defaults."""
    return {
        name: value
        for name, value in completed_json(TrainConfig, config).items()
        if name != "about"
    }


def settings(config, found):
    """Return a recipe's settings on the devices of its plan."""
    return json.loads(json.dumps(settings_on(config, "tpu", found["num_devices"])))


def planned(name):
    return json.loads(PLANS[f"configs/{name}"].read_text())


def test_every_recipe_that_names_a_pod_has_a_plan(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert {*MAKE["recipes"](), *MAKE["SMALL"]} == set(PLANS)


@pytest.mark.parametrize("recipe", PLANS)
def test_a_plan_is_of_the_recipe_as_it_is(recipe):
    found = json.loads(PLANS[recipe].read_text())
    config = call_get_config(str(ROOT / recipe))
    assert found["topology"] == MAKE["SMALL"].get(recipe, config.about.topology)
    assert found["published_seconds"] == config.about.published_seconds
    assert as_now(found["config"]) == settings(config, found), "run scripts/plans"
    if recipe not in MAKE["SMALL"]:
        assert config.about.status == "planned by the TPU compiler"


def test_the_plan_of_a_study_is_of_its_cells_as_they_are(monkeypatch):
    """Every arm fits at every batch size."""
    monkeypatch.chdir(ROOT)
    (study,) = MAKE["studies"]()
    found = json.loads(MAKE["plan_file"](study).read_text())
    config = call_get_config(study)

    assert (found["study"], found["topology"], found["fits"]) == (
        config.name,
        config.about.topology,
        True,
    )

    cells = [
        (index, size) for index in range(len(config.arms)) for size in config.global_batch_sizes
    ]
    for (index, size), cell in zip(cells, found["cells"], strict=True):
        train = config.cell_train(index, size, cell["run"]["num_devices"])
        assert as_now(cell["run"]["config"]) == settings(train, cell["run"]), (
            "run scripts/plans imagenet_limit"
        )
        assert (cell["arm"], cell["num_microsteps"]) == (
            config.arms[index].name,
            train.parallel.num_microsteps,
        )


def test_operations_of_bert_large_are_those_of_its_equations():
    """The operations in the compiled program's text equal the closed form exactly."""
    found = planned("bert_large_lamb.py:mixed")
    for phase, length, masked in zip(found["phases"], (128, 512), (20, 80), strict=True):
        each = (
            24 * length * (12 * 1024**2 + 2 * length * 1024)
            + masked * (1024**2 + 30522 * 1024)
            + 1024**2
        )
        wanted = 3 * 2 * each * phase["global_batch_size"] / found["num_devices"]
        assert phase["model_flops_per_step_per_device"] == pytest.approx(wanted, rel=0.001)
        assert phase["matrix_flops_per_step_per_device"] == pytest.approx(wanted, rel=0.03)


def test_a_published_step_of_efficientnet_lies_between_roofline_and_cycles():
    found = planned("efficientnet.py:b5-lars-65536")
    assert found["published_seconds"] == 64 * 60
    seconds = found["published_seconds"] / found["steps"]
    assert found["roofline_seconds_per_step"] < seconds < found["compute_seconds_per_step"]


def test_operations_of_resnet_50_are_those_of_its_paper():
    """An image takes 4.089 G multiply-adds.

    The compiled program does more, for folded columns and the moments of products.
    """
    found = planned("resnet50_lars.py:official-32768")
    wanted = 3 * 2 * 4.089e9 * 32768 / found["num_devices"]
    assert found["model_flops_per_step_per_device"] == pytest.approx(wanted, rel=0.001)
    assert wanted < found["flops_per_step_per_device"] < 1.3 * wanted


@pytest.mark.parametrize(
    ("name", "parameters", "size"),
    [
        # Where a block joins its shortcut, the biases of two norms share one gradient, which the
        # compiler sends once.
        ("resnet50_lars.py:official-32768", 25_557_032 - (256 + 512 + 1024 + 2048), 4),
        ("bert_large_lamb.py:mixed", 336_226_108, 4),
        ("bert_mlperf.py:8192", 336_226_108, 2),
    ],
)
def test_gradients_are_all_reduced_in_the_precision_of_the_recipe(name, parameters, size):
    found = planned(name)
    dtype = {4: "f32", 2: "bf16"}[size]
    phases = len(found["phases"])
    gradients = [one for one in found["collectives"] if one["source"] == "gradients"]
    assert {(one["op"], one["dtype"], one["group_size"]) for one in gradients} == {
        ("all-reduce", dtype, found["num_devices"])
    }
    assert sum(one["bytes"] for one in gradients) == phases * parameters * size
