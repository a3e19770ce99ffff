"""Recipes at another batch size: what is trained, what is printed and what is refused."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from refusal import refused

import lbopt
from lbopt.cli import _scale, load_config, main
from lbopt.config import (
    Arm,
    OptimizerConfig,
    PhaseConfig,
    ScheduleConfig,
    SweepConfig,
    TrainConfig,
    resolve_schedule,
    scale_optimizer,
)
from lbopt.recipes import build_run
from lbopt.sweep import make_cells, make_problems

ADAMW = OptimizerConfig("adamw", weight_decay=0.1, b2=0.99, eps=1e-8)
EPOCHS = {"warmup_rule": "epochs", "base_warmup_epochs": 1.0, "base_batch_size": 64}


def digits(optimizer=ADAMW, rule="sde+power_lines", size=256, **changes):
    schedule = ScheduleConfig(0.001, scaling_rule=rule, **(EPOCHS | changes))
    return TrainConfig(
        data="digits",
        model="mlp",
        optimizer=dataclasses.replace(optimizer),
        schedule=schedule,
        global_batch_size=size,
    )


def updates(config, times=2):
    """Return the parameters after updates by the same gradients, with the run's own optimizer."""
    run = build_run(config)
    state = run.make_state()
    params = state.params
    opt_state = state.opt_state
    for time in range(times):
        gradients = jax.tree.map(lambda leaf, time=time: np.cos(leaf + time), params)
        changes, opt_state = run.tx.update(gradients, opt_state, params)
        params = jax.tree.map(np.add, params, changes)
    return params


def test_a_run_trains_with_the_scaled_numbers():
    by_rule = digits()
    by_hand = digits(
        dataclasses.replace(ADAMW, b1=0.6, b2=0.96, eps=5e-9, weight_decay=0.2), "sqrt"
    )
    rule, hand, base = (updates(each) for each in (by_rule, by_hand, digits(rule="sqrt")))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), rule, hand)
    far = jax.tree.map(lambda a, b: np.abs(a - b).max() > 1e-5, rule, base)
    assert any(jax.tree.leaves(far))


@pytest.mark.parametrize(
    ("name", "options", "exponent"),
    [
        ("rmsprop", {}, -1),
        ("optax.rmsprop", {}, -1),
        ("optax.rmsprop", {"eps_in_sqrt": False}, -0.5),
        ("optax.adamw", {"eps_root": 1e-8}, -0.5),
    ],
)
def test_eps_follows_the_place_where_it_stands(name, options, exponent):
    config = digits(OptimizerConfig(name, options=options), "sde", 64)
    scaled = lbopt.scale_recipe(config, global_batch_size=256, rule="sde")
    ratios = {
        one.name.rpartition(".")[2]: one.after / one.before
        for one in scaled.changed
        if one.name.rpartition(".")[2] in ("eps", "eps_root")
    }
    expected = {"eps": 4**exponent} | dict.fromkeys(set(options) & {"eps_root"}, 0.25)
    assert ratios == pytest.approx(expected)


def test_a_study_trains_each_batch_with_its_own_numbers():
    arm = Arm("AdamW", dataclasses.replace(ADAMW), digits().schedule)
    study = SweepConfig(train=digits(), arms=(arm,), global_batch_sizes=(64, 256))
    study.validate()
    small, large = make_cells(study, make_problems(study))
    assert (small.train.optimizer.b2, large.train.optimizer.b2) == (0.99, 0.96)
    proposal = lbopt.sweep.search.Proposal(lbopt.sweep.search.Factors(1.0, 1.0, 0.5), 1.0)
    assert math.isclose(large.trial("search", proposal, 0).weight_decay, 0.1)


def test_a_scaled_config_trains_like_the_rule_and_its_flags_make_it(tmp_path):
    found = lbopt.scale_recipe(digits(size=64), global_batch_size=256, rule="sde+power_lines")
    new = found.recipe
    assert (new.global_batch_size, new.schedule.base_batch_size) == (256, 256)
    jax.tree.map(np.testing.assert_array_equal, updates(new), updates(digits()))

    lamb = load_config("digits_cnn:lamb-1024", [], TrainConfig)
    scaled = lbopt.scale_recipe(lamb, global_batch_size=2048, rule="sqrt+token_half_life")
    assert load_config("digits_cnn:lamb-1024", scaled.flags, TrainConfig) == scaled.recipe


def test_the_published_rows_of_lamb_on_resnet50_are_legw():
    # NUS-HPC-AI-Lab/pytorch-lamb@638a309: batch, rate and warmup epochs of its README.
    small = load_config("resnet50_lamb:512", [], TrainConfig)
    for size in (1024, 2048, 4096, 8192, 16384, 32768):
        row = load_config(f"resnet50_lamb:{size}", [], TrainConfig)
        scaled = lbopt.scale_recipe(small, global_batch_size=size, rule="legw").recipe
        ours, theirs = (
            resolve_schedule(each.schedule, size, 1_281_167, 90) for each in (scaled, row)
        )
        assert math.isclose(ours.learning_rate, theirs.learning_rate, rel_tol=1e-12)
        assert (ours.warmup_steps, ours.num_steps) == (theirs.warmup_steps, theirs.num_steps)


def test_both_phases_of_bert_are_scaled():
    mixed = load_config("bert_large_lamb:mixed", [], TrainConfig)
    new = lbopt.scale_recipe(mixed, global_batch_size=16384, rule="legw").recipe
    first, second = new.phases()
    assert (first.global_batch_size, second.global_batch_size) == (16384, 8192)
    assert (first.num_steps, second.num_steps) == (4 * 7037, 4 * 1562)
    assert (first.schedule.warmup_steps, second.schedule.warmup_steps) == (2000, 200)
    assert math.isclose(first.schedule.base_learning_rate, 0.003)
    assert math.isclose(second.schedule.base_learning_rate, 0.002)
    with refused("global_batch_size", 16383, "conflict"):
        lbopt.scale_recipe(mixed, global_batch_size=16383, rule="legw")


def in_two_phases(rules, bases=(64, 64), **changes):
    """Return a config whose phases have batches of 512 and 256, and schedules of their own."""
    first, second = (
        ScheduleConfig(0.001, scaling_rule=rule, **(EPOCHS | {"base_batch_size": base} | changes))
        for rule, base in zip(rules, bases, strict=True)
    )
    found = digits(OptimizerConfig("adamw", weight_decay=0.1, b1=0.99, b2=0.999), size=512)
    found.schedule = first
    found.num_steps = 64
    found.phase2 = PhaseConfig(num_steps=64, global_batch_size=256, schedule=second)
    return found


def numbers_of(config):
    """Return the numbers that each phase of a config is trained with."""
    found = []
    for phase in config.phases():
        size = phase.global_batch_size
        resolved = resolve_schedule(phase.schedule, size, 1024, 1.0, phase.num_steps)
        optimizer = scale_optimizer(phase.optimizer, phase.schedule, size)
        names = ("b1", "b2", "eps", "weight_decay")
        found += [getattr(optimizer, name) for name in names]
        found += [resolved.learning_rate, resolved.warmup_steps, resolved.num_steps]
    return found


@pytest.mark.parametrize(
    ("rules", "bases", "rule", "decays"),
    [
        (("sde", "sde"), (64, 64), "sde", (0.984, 0.992)),
        (("sde", "sde"), (64, 32), "sde", (0.984, 0.984)),
        (("sde+power_lines", "sde+power_lines"), (128, 32), "sde+power_lines", (0.992, 0.984)),
        (("sde", "none"), (64, 64), "sde", (0.984, 0.998)),
        (("sqrt", "sde"), (64, 64), "sde", (0.998, 0.992)),
        (("sqrt", "none"), (64, 64), "sde", (0.998, 0.998)),
    ],
)
def test_each_phase_has_its_own_numbers_of_one_optimizer(rules, bases, rule, decays):
    config = in_two_phases(rules, bases)
    same = lbopt.scale_recipe(config, global_batch_size=512, rule=rule).recipe
    same.validate()
    assert numbers_of(same) == pytest.approx(numbers_of(config), rel=1e-9)

    scaled = lbopt.scale_recipe(config, global_batch_size=1024, rule=rule)
    scaled.recipe.validate()
    assert numbers_of(scaled.recipe)[1::7] == pytest.approx(decays)
    shown = {one.name: one.after for one in scaled.changed if one.name.endswith("optimizer.b2")}
    expected = {"optimizer.b2": decays[0], "phase2: optimizer.b2": decays[1]}
    if decays[0] == decays[1]:
        del expected["phase2: optimizer.b2"]
    assert shown == pytest.approx(expected)


def test_the_warmup_of_a_second_phase_keeps_its_length_at_another_base_batch():
    rules = ("sqrt+token_half_life",) * 2
    config = in_two_phases(rules, warmup_rule="legw", base_warmup_epochs=0.25)
    same = lbopt.scale_recipe(config, global_batch_size=512, rule=rules[0]).recipe
    assert same.phase2.schedule.base_batch_size == 512
    assert numbers_of(same) == pytest.approx(numbers_of(config), rel=1e-9)


def test_the_rate_of_a_second_phase_is_not_capped_at_its_base_batch():
    config = in_two_phases(("adamh", "adamh"))
    config.optimizer = OptimizerConfig("adamh", options={"b2": 0.999})
    config.phase2.schedule.base_learning_rate = 0.004
    same = lbopt.scale_recipe(config, global_batch_size=512, rule="adamh").recipe
    assert same.phase2.schedule.base_learning_rate > 0.01  # the cap of the rule
    assert numbers_of(same)[-3] == pytest.approx(0.008)


@pytest.mark.parametrize(
    ("bases", "rule"),
    [((64, 64), "sqrt"), ((48, 64), "sde"), ((64, 64), "sqrt+token_half_life")],
)
def test_numbers_of_two_phases_that_one_optimizer_cannot_give_are_refused(bases, rule):
    config = in_two_phases(("sde", "none"), bases)
    with refused("rule", rule, "conflict"):
        lbopt.scale_recipe(config, global_batch_size=512, rule=rule)


def test_the_rate_of_the_rest_stays_where_another_rule_takes_over():
    config = digits(OptimizerConfig("muonh"), "muonh", 1024)
    config.schedule.base_learning_rate = 0.008
    found = lbopt.scale_recipe(config, global_batch_size=1024, rule="sqrt").recipe
    before, after = (
        scale_optimizer(each.optimizer, each.schedule, 1024).options for each in (config, found)
    )
    assert before["rest_learning_rate_ratio"] > 1
    assert after == pytest.approx(before)


def test_stairs_follow_the_length_and_the_first_step_the_warmup():
    config = digits(size=64, rule="power_lines", decay="step", start_step=-40)
    config.num_epochs = 90.0
    config.schedule.stair_epochs = (30.0, 60.0, 80.0)
    scaled = lbopt.scale_recipe(config, global_batch_size=256, rule="power_lines", duration=2.0)
    assert scaled.recipe.num_epochs == 180
    assert scaled.recipe.schedule.stair_epochs == (60, 120, 160)
    assert scaled.recipe.schedule.start_step == -10  # the warmup has as many epochs
    assert [one.after for one in scaled.changed if "stair" in one.name] == [60, 120, 160]
    kept = lbopt.scale_recipe(config, global_batch_size=256, rule="power_lines").kept
    assert [one.before for one in kept if "stair" in one.name] == [30, 60, 80]


@pytest.mark.parametrize(
    ("rule", "changes", "start"),
    [
        ("legw", {"warmup_steps": 160.0}, -40),
        ("sde", {"warmup_steps": 160.0}, -10),
        ("legw", {"base_warmup_epochs": 10.0, "warmup_rule": "legw"}, -40),
        ("sde", {"base_warmup_epochs": 10.0}, -10),
        ("sqrt", {"warmup_rule": "none", "base_warmup_epochs": 0.5}, -10),
    ],
)
def test_the_first_step_of_a_warmup_follows_its_steps(rule, changes, start):
    old = {"warmup_rule": "legw", "base_warmup_epochs": 0.5} if "warmup_steps" in changes else {}
    config = digits(size=64, rule="none", start_step=-40, **(old | changes))
    scaled = lbopt.scale_recipe(config, global_batch_size=256, rule=rule)
    assert scaled.recipe.schedule.start_step == start
    scaled.recipe.validate()


def test_options_of_a_matrix_optimizer_are_scaled():
    base = digits(OptimizerConfig("muon"), "none", 64)
    new = lbopt.scale_recipe(base, global_batch_size=256, rule="sqrt+token_half_life").recipe
    assert math.isclose(new.optimizer.options["rest_b2"], 0.95**4)
    capped = digits(OptimizerConfig("muonh"), "none", 64)
    capped.schedule.base_learning_rate = 0.008
    new = lbopt.scale_recipe(capped, global_batch_size=256, rule="muonh").recipe
    assert new.schedule.base_learning_rate == 0.01
    assert math.isclose(new.optimizer.options["rest_learning_rate_ratio"], 1.6)


@pytest.mark.parametrize("rule", ["sqrt", "linear", "sqrt+ema", "sqrt+token_half_life"])
@pytest.mark.parametrize("name", ["muon", "muonh", "soap", "kron"])
def test_the_rest_of_a_matrix_optimizer_follows_alike_by_both_ways(name, rule):
    base = digits(OptimizerConfig(name, ema_decay=0.9), rule, 64)
    by_recipe = lbopt.scale_recipe(base, global_batch_size=256, rule=rule).recipe.optimizer
    by_rule = scale_optimizer(base.optimizer, base.schedule, 256)
    assert by_recipe == by_rule
    assert "rest_learning_rate_ratio" not in by_rule.options


def test_what_leaves_its_range_is_said():
    lamb = load_config("digits_cnn:lamb-1024", [], TrainConfig)
    late = lbopt.scale_recipe(lamb, global_batch_size=8192, rule="legw")
    assert [line.split(" = ")[0] for line in late.out_of_range] == [
        "batch 8192 is larger than the training set, of 1024 examples",
        "warmup epochs",
    ]
    mixed = load_config("bert_large_lamb:mixed", [], TrainConfig)
    many = lbopt.scale_recipe(mixed, global_batch_size=2**20, rule="legw").out_of_range
    assert [line.split(" = ")[0] for line in many] == [
        "schedule.warmup_steps",
        "phase2: schedule.warmup_steps",
    ]
    assert not lbopt.scale_recipe(digits(size=64), global_batch_size=576, rule="sde").out_of_range
    short = lbopt.scale_recipe(digits(size=64), global_batch_size=1024, rule="sde_half_life")
    assert [line.split(" = ")[0] for line in short.out_of_range] == ["optimizer.b2"]
    adan = digits(OptimizerConfig("optax.adan", options={"b3": 0.99}), "none", 64)
    short = lbopt.scale_recipe(adan, global_batch_size=1024, rule="token_half_life")
    assert [line.split(" = ")[0] for line in short.out_of_range] == ["optimizer.options.b3"]


def test_what_leaves_its_range_in_a_second_phase_is_said():
    config = in_two_phases(("sqrt", "sqrt"))
    large = lbopt.scale_recipe(config, global_batch_size=4096, rule="legw")
    assert [line.split(" = ")[0] for line in large.out_of_range] == [
        "batch 4096 is larger than the training set, of 1024 examples",
        "phase2: batch 2048 is larger than the training set, of 1024 examples",
    ]

    # A warmup in epochs, of a phase whose length is in steps.
    config.phase2.schedule.base_warmup_epochs = 10.0
    late = lbopt.scale_recipe(config, global_batch_size=1024, rule="legw")
    assert [line.split(" = ")[0] for line in late.out_of_range] == ["phase2: warmup steps"]
    (steps,) = (one for one in late.numbers if one.name == "phase2: warmup steps")
    assert (steps.before, steps.after) == (40, 40)


@pytest.mark.parametrize(
    ("scale", "told"),
    [
        (1536.0, "75% at 512, so it holds"),
        (128.0, "20% at 512, so it does not"),
        (math.inf, "infinite"),
        (np.float32(np.inf), "so it holds"),
        (None, "not known"),
    ],
)
def test_the_noise_scale_says_whether_the_rule_holds(scale, told):
    base = digits(size=64)
    found = lbopt.scale_recipe(base, global_batch_size=512, rule="sde", noise_scale=scale)
    (line,) = found.regime
    assert told in line


FILE = """
from lbopt.config import *
def get_config():
    return TrainConfig(
        data="digits", model="mlp", optimizer="adam", global_batch_size=1024, num_steps=1,
        schedule=ScheduleConfig(0.01, base_batch_size=1024, warmup_rule="none"))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return a config file, and a workdir of its run."""
    folder = tmp_path_factory.mktemp("measured")
    file = folder / "own.py"
    file.write_text(FILE)
    workdir = folder / "run"
    assert main(["train", f"--config={file}", f"--workdir={workdir}"]) == 0
    return file, workdir


@pytest.mark.parametrize(
    ("logged", "told"),
    [
        (("10.0", "96.0"), "96 examples"),
        (("10.0", "null"), "infinite"),
        (("null",), "infinite"),
        (("null", "96.0"), "96 examples"),
    ],
)
def test_the_command_takes_the_last_noise_scale_of_a_run(logged, told, measured, capsys):
    file, workdir = measured
    lines = [
        f'{{"step": {step}, "examples_seen": {step}, "train/noise_scale": {scale}}}\n'
        for step, scale in enumerate(logged, 1)
    ]
    (workdir / "metrics.jsonl").write_text("".join(lines) + '{"step": 9, "examples_seen": 9}\n')
    command = ["scale", f"--config={file}", "--batch=2048", "--rule=sde", f"--workdir={workdir}"]
    capsys.readouterr()
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert told in shown
    assert ("does not hold" in shown) == ("96" in told)
    assert "optimizer.b2   0.999       0.998" in shown


@pytest.mark.parametrize(
    ("line", "change", "code"),
    [
        ('{"step": 1, "examples_seen": 1}', [], "missing"),
        ('{"step": 1, "examples_seen": 1, "train/noise_scale": -2.0}', [], "value"),
        ('{"step": 1, "examples_seen": 1, "train/noise_scale": 2.0}', ["model=cnn"], "mismatch"),
        (
            '{"step": 1, "examples_seen": 1, "train/noise_scale": 2.0}',
            ["data.name=images", "data.builder=mnist"],
            "mismatch",
        ),
    ],
)
def test_a_noise_scale_that_does_not_fit_is_refused(line, change, code, measured):
    file, workdir = measured
    (workdir / "metrics.jsonl").write_text(line + "\n")
    flags = [f"--config.{each}" for each in change]
    with refused("--workdir", str(workdir), code):
        _scale.run(
            [f"--config={file}", "--batch=2048", "--rule=sde", f"--workdir={workdir}", *flags]
        )


@pytest.mark.parametrize(
    ("change", "field", "code"),
    [
        ({"rule": "cubic"}, "rule", "choice"),
        ({"rule": "linear+sde"}, "rule", "conflict"),
        ({"rule": "adamh"}, "rule", "conflict"),
        ({"rule": "sqrt+ema"}, "rule", "conflict"),
        ({"rule": "sqrt", "duration": 2.0}, "duration", "conflict"),
        ({"rule": "completed_p", "duration": 0}, "duration", "value"),
        ({"rule": "sde", "global_batch_size": 64 * 10}, "config.optimizer.b1", "conflict"),
        ({"rule": "sde", "global_batch_size": 0}, "global_batch_size", "value"),
        ({"rule": "sde", "noise_scale": -1.0}, "noise_scale", "value"),
        ({"rule": "sde", "noise_scale": -math.inf}, "noise_scale", "value"),
        ({"rule": "sde", "noise_scale": math.nan}, "noise_scale", "value"),
        ({"recipe": SweepConfig()}, "recipe", "type"),
        ({"recipe": {"learning_rate": 1.0}}, "recipe", "missing"),
        ({"recipe": {"lr": 1.0, "global_batch_size": 2}}, "recipe", "choice"),
        ({"recipe": {"momentum": 0.9, "global_batch_size": 2}}, "recipe", "missing"),
        (
            {"recipe": {"learning_rate": 0.1, "momentum": 0.9, "global_batch_size": 64}},
            "recipe",
            "conflict",
        ),
    ],
)
def test_refusals(change, field, code):
    arguments = {"recipe": digits(size=64), "global_batch_size": 256, "rule": "sde"} | change
    with refused(field, code=code):
        lbopt.scale_recipe(arguments.pop("recipe"), **arguments)


@pytest.mark.parametrize(
    ("optimizer", "rule", "changes", "field"),
    [
        ("adamw", "sde", {"warmup_rule": "legw"}, "config.schedule.warmup_rule"),
        ("adamw", "legw", {}, "config.schedule.warmup_rule"),
        ("momentum", "sde", {}, "config.schedule.scaling_rule"),
        ("momentum", "sqrt+token_half_life", {}, "config.schedule.scaling_rule"),
        ("lamb", "sqrt+power_lines", {}, "config.schedule.scaling_rule"),
        ("adamw", "sde", {"base_batch_size": 16}, "config.optimizer.b1"),
    ],
)
def test_configs_are_refused_before_anything_is_built(optimizer, rule, changes, field):
    with refused(field, code="conflict"):
        digits(OptimizerConfig(optimizer), rule, **changes).validate()
