"""Aggregators by name, in recipes and study arms: built as configured, or refused."""

import pathlib

import jax
import numpy as np
import pytest
from refusal import ANY, refused

import lbopt
from lbopt.cli import load_config
from lbopt.config import (
    AggregatorConfig,
    OptimizerConfig,
    SweepConfig,
    TrainConfig,
    group_of,
    make_aggregator,
)
from lbopt.recipes import build_run
from lbopt.sweep import make_cells, make_problems
from lbopt.sweep.lanes import program_key
from lbopt.sweep.search import Factors, Proposal

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
BRIEF = (
    "--config.num_epochs=1",
    "--config.model.widths=(4,)",
    "--config.model.hidden=8",
    "--config.parallel.num_devices=2",
)
MODULES = (("head", "^Dense_1/"), ("body", ""))

# Name: the fields, and the aggregator's own description.
NAMED = {
    "mean": ({}, "mean()"),
    "agvm": (
        {"modules": MODULES, "anchor": "body", "interval_steps": 2, "start_step": 0},
        "agvm(interval=2)",
    ),
    "aps": ({"exponent_bits": 4, "mantissa_bits": 3, "accumulate": "kahan"}, "aps(4, 3, 'kahan')"),
    "ef": ({"compressor": "sign"}, "ef(sign())"),
    "ef21": ({"momentum": 0.5, "fraction": 0.1}, "ef21(topk(0.1), momentum=0.5)"),
    "econtrol": ({"compressor": "cast", "eta": 0.2}, "econtrol(cast(5, 2), eta=0.2)"),
    "powersgd": ({"rank": 2, "start_step": 1}, "powersgd(2)"),
}


def load(*overrides):
    return load_config(f"{CONFIGS / 'digits_cnn.py'}:lamb-64", [*BRIEF, *overrides], TrainConfig)


@pytest.mark.everyday("ef21")
@pytest.mark.parametrize("name", NAMED)
def test_a_recipe_takes_it_by_name(name):
    fields, called = NAMED[name]
    config = load()
    config.aggregator = AggregatorConfig(name, **fields)
    config.validate()
    run = build_run(config)
    assert run.train_step.aggregation.aggregator.name == called
    state = run.init()
    first = jax.tree.map(np.asarray, state.params)
    for batch in (run.batches[0], run.batches[1]):
        state, _ = jax.block_until_ready(run.train_step(state, batch))
    assert any(
        np.any(a != b)
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(state.params), strict=True)
    )
    shown = lbopt.optimizer_metrics(state.opt_state)
    assert ("agvm_phi/head" in shown) == (name == "agvm")
    assert set(run.evaluate(state)) >= {"accuracy", "loss"}


def test_without_one_nothing_changes():
    assert make_aggregator(AggregatorConfig(), OptimizerConfig()) is None
    run = build_run(load())
    assert run.train_step.aggregation is None
    assert run.shapes().aggregator_state == ()


LOCAL = "--config.model.batch_norm_scope=local"


def test_fields_reach_it():
    over = {"": "replicas", "2": 2, "slices": "slices"}
    for text, meant in over.items():
        assert group_of(AggregatorConfig("ef", over=text or "replicas")) == meant
    of_adam = make_aggregator(
        AggregatorConfig("agvm", modules=MODULES, anchor="body", of_adam=True), OptimizerConfig()
    )
    assert of_adam.needs_second_moment
    two = load(
        "--config.aggregator.name=ef",
        "--config.aggregator.over=2",
        "--config.aggregator.fraction=0.01",
    )
    assert build_run(two).train_step.aggregation.num_replicas == 1
    rows = load("--config.aggregator.name=ef21", "--config.aggregator.replicas_per_device=4", LOCAL)
    assert build_run(rows).train_step.aggregation.num_replicas == 8


AGVM = ("name=agvm", "anchor=body", "modules=(('body',''),)")


@pytest.mark.parametrize(
    ("overrides", "field", "value", "code"),
    [
        (("name=topk",), "name", "topk", "choice"),
        (("over=2",), "over", "2", "unused"),
        (("replicas_per_device=2",), "replicas_per_device", 2, "unused"),
        (("name=ef", "over=hosts"), "over", "hosts", "value"),
        (("name=ef", "fraction=0.0"), "fraction", 0.0, "value"),
        (("name=ef", "compressor=top"), "compressor", "top", "choice"),
        (("name=aps", "exponent_bits=9"), "exponent_bits", 9, "value"),
        (("name=aps", "mantissa_bits=24"), "mantissa_bits", 24, "value"),
        (("name=aps", "accumulate=bf16"), "accumulate", "bf16", "choice"),
        (("name=ef21", "momentum=1.0"), "momentum", 1.0, "value"),
        (("name=econtrol", "eta=-1.0"), "eta", -1.0, "value"),
        (("name=powersgd", "rank=0"), "rank", 0, "value"),
        (("name=agvm",), "modules", (), "missing"),
        (("name=agvm", "alpha=1.5"), "alpha", 1.5, "value"),
        ((*AGVM, "modules=(('body','('),)"), "modules", (("body", "("),), "value"),
        ((*AGVM, "modules=(('body','^a'),('body','^b'))"), "modules", ANY, "value"),
        ((*AGVM, "scale_bounds=(2.0,1.0)"), "scale_bounds", (2.0, 1.0), "value"),
        ((*AGVM, "stop_step=499"), "stop_step", 499, "value"),
    ],
)
def test_a_field_that_is_wrong_is_named(overrides, field, value, code):
    with refused(f"config.aggregator.{field}", value, code):
        load(*(f"--config.aggregator.{one}" for one in overrides)).validate()


@pytest.mark.parametrize(
    ("overrides", "field", "value"),
    [
        (("parallel.reduce_dtype=float32",), "parallel.reduce_dtype", "float32"),
        (
            ("parallel.shard_update=True", "parallel.reduce_scatter=True"),
            "parallel.reduce_scatter",
            True,
        ),
        (
            ("optimizer.max_grad_norm=1.0", "optimizer.clip_stage=mean"),
            "optimizer.clip_stage",
            "mean",
        ),
        (
            ("parallel.backend=pmap", "aggregator.replicas_per_device=2"),
            "aggregator.replicas_per_device",
            2,
        ),
    ],
)
def test_what_does_not_go_with_it_is_named(overrides, field, value):
    with refused(f"config.{field}", value, "conflict"):
        load("--config.aggregator.name=ef", *(f"--config.{one}" for one in overrides)).validate()


def test_what_agvm_needs_is_named():
    one = load(
        *(f"--config.aggregator.{field}" for field in AGVM), "--config.parallel.num_devices=1"
    )
    with refused("config.aggregator.replicas_per_device", 1, "mismatch"):
        build_run(one)
    lars = OptimizerConfig("lars")
    with refused("aggregator.of_adam", True, "conflict"):
        make_aggregator(
            AggregatorConfig("agvm", modules=MODULES, anchor="body", of_adam=True), lars
        )


def test_modules_that_do_not_fit_the_model_are_named():
    config = load(
        *(
            f"--config.aggregator.{one}"
            for one in (*AGVM[:2], "modules=(('head','^nothing'),('body',''))")
        )
    )
    with refused("config.aggregator.modules", code="mismatch"):
        build_run(config)


@pytest.mark.parametrize("scope", ["global", "replicas:2"])
def test_statistics_of_several_rows_are_refused(scope):
    """Replicas on one device run one after another."""
    rows = ("--config.aggregator.name=mean", "--config.aggregator.replicas_per_device=2")
    config = load(*rows, f"--config.model.batch_norm_scope={scope}")
    with refused("config.model.batch_norm_scope", scope, "mismatch"):
        build_run(config)


def test_a_batch_that_replicas_cannot_share_is_refused():
    config = load("--config.aggregator.name=ef", "--config.aggregator.replicas_per_device=5", LOCAL)
    with refused("config.global_batch_size", 64):
        build_run(config)


def test_devices_that_cannot_be_grouped_are_refused():
    with refused("config.aggregator.over", 3):
        build_run(load("--config.aggregator.name=ef", "--config.aggregator.over=3"))


def test_arms_have_aggregators_of_their_own():
    config = load_config(f"{CONFIGS / 'sweeps' / 'precision_digits.py'}:smoke", [], SweepConfig)
    cells = make_cells(config, make_problems(config))
    keys = {
        program_key(cell, cell.trial("final", Proposal(Factors(1.0, 1.0, 1.0), 1.0), 0))
        for cell in cells
        if cell.global_batch_size == 1024
    }
    assert len(keys) == 3
    config.arms[1].aggregator = AggregatorConfig("agvm", modules=MODULES[1:], anchor="body")
    with refused("config.arms[1].aggregator.replicas_per_device", 1, "mismatch"):
        make_cells(config, make_problems(config))
    config.arms[1].aggregator.replicas_per_device = 7
    with refused("config.arms[1].aggregator.replicas_per_device", 7, "mismatch"):
        make_cells(config, make_problems(config))
    config.arms[1].aggregator = AggregatorConfig("ef", over="2")
    with refused("config.arms[1].aggregator.over", "2", "conflict"):
        config.validate()
