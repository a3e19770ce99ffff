"""Trials of arms whose batch grows: the runs of `lbopt train`, one trial after another."""

import dataclasses
import math

import numpy as np
import pytest
from refusal import ANY, refused

from lbopt.config import (
    Arm,
    BatchScheduleConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    SearchConfig,
    SweepConfig,
    TrainConfig,
)
from lbopt.parallel import put_batch
from lbopt.recipes import build_run
from lbopt.sweep import make_cells, make_problems, run_sweep
from lbopt.sweep._progress import StudyProgress
from lbopt.train import Progress
from lbopt.workdir import read_json_lines

RAMP = BatchScheduleConfig("ramp", final_batch_size=256, increment=64, length=2.0)
EPOCHS = 4.0


def study(batching="none", **changes):
    train = TrainConfig(
        data="digits",
        model=ModelConfig("mlp", (16,)),
        num_epochs=EPOCHS,
        eval_every_epochs=1.0,
        target_metric="eval/accuracy",
        target_value=0.5,
    )
    schedule = ScheduleConfig(
        0.01,
        base_batch_size=64,
        scaling_rule="sde+power_lines",
        warmup_rule="epochs",
        base_warmup_epochs=0.5,
    )
    optimizer = OptimizerConfig("adamw", weight_decay=0.1, b1=0.8, b2=0.98)

    arms = (
        Arm("constant", optimizer, schedule),
        Arm("ramp", dataclasses.replace(optimizer), schedule, batch_schedule=RAMP),
    )
    found = SweepConfig(
        name="growing",
        train=train,
        arms=arms,
        global_batch_sizes=(64, 128),
        search=SearchConfig(learning_rate_factors=(1.0, 2.0), widen_candidates=0),
        final_seeds=(7,),
        trial_batching=batching,
    )
    return dataclasses.replace(found, **changes)


def train_alone(config, factor, seed):
    """Return the losses of a run of the ramp from batch 64, as `lbopt train` takes its steps."""
    train = config.cell_train(1, 64)
    train = dataclasses.replace(train, seed=seed)
    train.schedule = dataclasses.replace(
        train.schedule, base_learning_rate=factor * train.schedule.base_learning_rate
    )
    train.parallel = dataclasses.replace(train.parallel, num_devices=1)
    run = build_run(train)
    state = run.init()
    losses = []
    for phase in run.phases():
        if phase.continues:
            state = phase.enter(state)
        for step in range(phase.num_steps):
            state, metrics = phase.train_step(state, put_batch(phase.mesh, phase.batches[step]))
            losses.append(float(metrics["loss"][0] / metrics["loss"][1]))
    return losses, run.phases()[-1].evaluate(state)


@pytest.mark.parametrize("batching", ["none", "vmap"])
def test_a_trial_is_the_run_of_lbopt_train(batching, tmp_path):
    config = study(batching)
    config.validate()
    workdir = tmp_path / "study"
    (workdir).mkdir()
    cells = make_cells(config, make_problems(config))
    run_sweep(config, [cell for cell in cells if cell.arm.name == "ramp"][:1], workdir)
    (final,) = (
        line
        for line in read_json_lines(workdir / "results.jsonl", lambda line: None)
        if line["phase"] == "final"
    )
    losses, evaluated = train_alone(config, final["learning_rate_factor"], seed=7)

    assert (final["global_batch_size"], final["final_batch_size"]) == (64, 256)
    assert final["steps"] == final["steps_run"] == len(losses)
    assert final["examples_seen"] >= EPOCHS * 1024 > final["examples_seen"] - 256
    at = np.asarray(final["curve"]["step"]) - 1
    np.testing.assert_allclose(final["curve"]["train_loss"], np.asarray(losses)[at], rtol=1e-3)
    assert math.isclose(final["validation_loss"], evaluated["loss"], rel_tol=1e-3)


def test_a_trial_that_waits_for_a_lane_begins_at_the_first_batch(tmp_path):
    """A rate that diverges at once frees its lane; the others are in the next phase soon."""
    search = SearchConfig(learning_rate_factors=(1e30, 1.0, 2.0, 3.0, 4.0), widen_candidates=0)
    config = study("vmap", search=search, trials_per_program=4)
    workdir = tmp_path / "study"
    workdir.mkdir()
    cells = make_cells(config, make_problems(config))
    run_sweep(config, [cell for cell in cells if cell.arm.name == "ramp"][:1], workdir)
    lines = read_json_lines(workdir / "results.jsonl", lambda line: None)
    found = {line["learning_rate_factor"]: line for line in lines if line["phase"] == "search"}
    assert found[1e30]["diverged"]
    for factor in (2.0, 4.0):
        losses, evaluated = train_alone(config, factor, seed=0)
        assert found[factor]["steps_run"] == len(losses)
        assert math.isclose(found[factor]["validation_loss"], evaluated["loss"], rel_tol=1e-3)


def test_the_time_that_is_left_counts_the_examples_of_every_batch():
    """One trial of a cell has taken 10 s, and the cell's other two take as long."""
    config = study()
    config.final_seeds = (7,)
    ramp = make_cells(config, make_problems(config))[2]
    now = [0.0]
    with Progress(None, unit="trial") as progress:
        shown = StudyProgress(config, [ramp], progress, clock=lambda: now[0])
        now[0] = 10.0
        record = {
            "arm": "ramp",
            "global_batch_size": 64,
            "phase": "search",
            "learning_rate": 0.01,
            "steps": ramp.num_steps,
            "seconds": 10.0,
            "validation_accuracy": 0.9,
            "diverged": False,
        }
        shown.add([record])
        assert math.isclose(shown.seconds_left, 20.0)


def test_cells_have_the_numbers_of_each_batch():
    config = study()
    constant, _, ramp, _ = make_cells(config, make_problems(config))
    assert constant.growth == ()
    sizes = [phase.steps.global_batch_size for phase in ramp.growth]
    assert sizes == [64, 128, 192, 256]
    decays = [phase.train.optimizer.b2 for phase in ramp.growth]
    np.testing.assert_allclose(decays, [0.98, 0.96, 0.94, 0.92])
    shrinkage = [phase.ratios.weight_decay for phase in ramp.growth]
    np.testing.assert_allclose(shrinkage, np.sqrt([1, 2, 3, 4]))
    # Evaluations count epochs: the first step that reaches each.
    steps = sorted(ramp.evaluated_steps(ramp.num_steps))
    assert [ramp.examples(step) // 1024 for step in steps] == [1, 2, 3, 4]
    assert [ramp.examples(step - 1) // 1024 for step in steps] == [0, 1, 2, 3]
    assert (constant.largest_batch_size, ramp.largest_batch_size) == (64, 256)


def test_lanes_are_counted_by_the_largest_batch_of_a_schedule_that_falls_again():
    falling = BatchScheduleConfig("steps", changes=((1.0, 256), (2.0, 128)))
    config = study()
    config.arms[1].batch_schedule = falling
    *_, cell, _ = make_cells(config, make_problems(config))
    assert [cell.final_batch_size, cell.largest_batch_size] == [128, 256]


def test_trials_of_all_arms_are_evaluated_at_the_same_examples():
    # A tenth of 1,024 examples; the fifth multiple, 512, is where the batch changes.
    config = study(global_batch_sizes=(16,))
    config.train.num_epochs = 0.625
    config.train.eval_every_epochs = 0.1
    config.arms[0].schedule.base_warmup_epochs = 0.05
    config.arms[1].batch_schedule = BatchScheduleConfig("steps", changes=((0.5, 49),))
    constant, grown = make_cells(config, make_problems(config))
    assert constant.evaluated_steps(40) == {7, 13, 20, 26, 32, 39, 40}
    assert grown.evaluated_steps(35) == {7, 13, 20, 26, 32, 35}


@pytest.mark.parametrize(
    ("changes", "field", "code"),
    [
        ({"trial_devices": "all"}, "config.trial_devices", "conflict"),
        (
            {"search": SearchConfig("successive_halving", min_fidelity=0.1)},
            "config.search.method",
            "conflict",
        ),
        ({"global_batch_sizes": (64, 256)}, "config.arms[1].batch_schedule.final_batch_size", ANY),
    ],
)
def test_refused(changes, field, code):
    with refused(field, code=code):
        study("auto", **changes).validate()


def test_a_rule_that_changes_the_state_of_an_optimizer_is_refused():
    config = study(global_batch_sizes=(64,))
    config.arms[1].optimizer = OptimizerConfig("muonh")
    config.arms[1].schedule = dataclasses.replace(
        config.arms[1].schedule, base_learning_rate=0.008, scaling_rule="muonh"
    )
    config.validate()
    with refused("config.arms[1].schedule.scaling_rule", "muonh", "conflict"):
        make_cells(config, make_problems(config))


@pytest.mark.parametrize(
    ("growing", "field"),
    [
        (dataclasses.replace(RAMP, final_batch_size=2048, increment=1984), "final_batch_size"),
        (BatchScheduleConfig("steps", changes=((1.0, 2048),)), "changes"),
    ],
)
def test_a_later_batch_larger_than_the_training_set_is_named(growing, field):
    config = study(global_batch_sizes=(64,))
    config.arms[1].batch_schedule = growing
    config.validate()
    with refused(f"config.arms[1].batch_schedule.{field}", 2048):
        make_cells(config, make_problems(config))
