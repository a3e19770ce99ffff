"""Aggregators by name, in recipes and in arms of studies: built as asked, and refused where they do not fit."""

import pathlib
import re

import jax
import numpy as np
import pytest

import lbopt
from lbopt.cli import load_config
from lbopt.config import AggregatorConfig, OptimizerConfig, SweepConfig, TrainConfig
from lbopt.errors import UserError
from lbopt.recipes import build_run
from lbopt.recipes._aggregators import group_of, make_aggregator
from lbopt.sweep import make_cells, make_problems
from lbopt.sweep.lanes import program_key
from lbopt.sweep.search import Factors, Proposal

pytestmark = pytest.mark.usefixtures("most_quickly_compiled")
CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
BRIEF = (
    "--config.num_epochs=1",
    "--config.model.widths=(4,)",
    "--config.model.hidden=8",
    "--config.parallel.num_devices=2",
)
MODULES = (("head", "^Dense_1/"), ("body", ""))

# Name: the fields, and what it calls itself.
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


@pytest.mark.everyday("aps", "ef21", "powersgd")
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
    ("overrides", "said"),
    [
        (("name=topk",), "config.aggregator.name = 'topk': use one of"),
        (("over=2",), "config.aggregator.over = '2': only an aggregator sees replicas"),
        (
            ("replicas_per_device=2",),
            "config.aggregator.replicas_per_device = 2: only an aggregator sees replicas",
        ),
        (
            ("name=ef", "over=hosts"),
            "config.aggregator.over = 'hosts': use 'replicas', 'slices', or a number",
        ),
        (("name=ef", "fraction=0.0"), "config.aggregator.fraction = 0.0: give a number in (0, 1]"),
        (("name=ef", "compressor=top"), "config.aggregator.compressor = 'top': use one of"),
        (
            ("name=aps", "exponent_bits=9"),
            "config.aggregator.exponent_bits = 9: give a whole number from 2 to 8",
        ),
        (("name=aps", "mantissa_bits=24"), "config.aggregator.mantissa_bits = 24"),
        (("name=aps", "accumulate=bf16"), "config.aggregator.accumulate = 'bf16'"),
        (("name=ef21", "momentum=1.0"), "config.aggregator.momentum = 1.0"),
        (("name=econtrol", "eta=-1.0"), "config.aggregator.eta = -1.0"),
        (("name=powersgd", "rank=0"), "config.aggregator.rank = 0"),
        (("name=agvm",), "config.aggregator.modules = (): name the modules of the model"),
        (("name=agvm", "alpha=1.5"), "config.aggregator.alpha = 1.5"),
        (
            (*AGVM, "modules=(('body','('),)"),
            "config.aggregator.modules: pattern = '(': not a regular expression",
        ),
        ((*AGVM, "modules=(('body','^a'),('body','^b'))"), "use each name once"),
        (
            (*AGVM, "scale_bounds=(2.0,1.0)"),
            "config.aggregator.scale_bounds = (2.0, 1.0): give (low, high)",
        ),
        (
            (*AGVM, "stop_step=499"),
            "config.aggregator.stop_step = 499: it begins at step 500; use at least that",
        ),
    ],
)
def test_a_field_that_is_wrong_is_named(overrides, said):
    with pytest.raises(UserError, match=re.escape(said)):
        load(*(f"--config.aggregator.{one}" for one in overrides)).validate()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("parallel.reduce_dtype=float32",),
            "config.parallel.reduce_dtype = 'float32': config.aggregator.name = 'ef'",
        ),
        (
            ("parallel.shard_update=True", "parallel.reduce_scatter=True"),
            "config.parallel.reduce_scatter = True: config.aggregator.name = 'ef'",
        ),
        (
            ("optimizer.max_grad_norm=1.0", "optimizer.clip_stage=mean"),
            "config.optimizer.clip_stage = 'mean': an aggregator takes the mean once a step",
        ),
        (
            ("parallel.backend=pmap", "aggregator.replicas_per_device=2"),
            "config.aggregator.replicas_per_device = 2: use config.parallel.backend='jit'",
        ),
    ],
)
def test_what_does_not_go_with_it_is_named(overrides, said):
    with pytest.raises(UserError, match=re.escape(said)):
        load("--config.aggregator.name=ef", *(f"--config.{one}" for one in overrides)).validate()


def test_what_agvm_needs_is_named():
    one = load(
        *(f"--config.aggregator.{field}" for field in AGVM), "--config.parallel.num_devices=1"
    )
    with pytest.raises(
        UserError, match=r"config.aggregator.replicas_per_device = 1: agvm compares two halves"
    ):
        build_run(one)
    lars = OptimizerConfig("lars")
    with pytest.raises(
        UserError,
        match=r"^config.aggregator.of_adam = True: config.optimizer.name = 'lars' keeps no",
    ):
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
    with pytest.raises(
        UserError, match=r"config.aggregator.modules: labels: module 'head' has no parameter"
    ):
        build_run(config)


@pytest.mark.parametrize("scope", ["global", "replicas:2"])
def test_statistics_of_several_rows_are_refused(scope):
    """Replicas of one device run one after another."""
    rows = ("--config.aggregator.name=mean", "--config.aggregator.replicas_per_device=2")
    config = load(*rows, f"--config.model.batch_norm_scope={scope}")
    with pytest.raises(
        UserError,
        match=rf"config.model.batch_norm_scope = '{scope}': the 2 replicas of a device run",
    ):
        build_run(config)


def test_a_batch_that_replicas_cannot_share_is_refused():
    config = load("--config.aggregator.name=ef", "--config.aggregator.replicas_per_device=5", LOCAL)
    with pytest.raises(
        UserError,
        match="global_batch_size = 64: 2 devices x 5 replicas x 1 microsteps need a multiple of 10; 60 is the nearest",
    ):
        build_run(config)


def test_devices_that_cannot_be_grouped_are_refused():
    with pytest.raises(
        UserError, match=r"config\.aggregator\.over = 3: it does not divide the 2 devices"
    ):
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
    config.arms[1].aggregator.replicas_per_device = 7
    with pytest.raises(
        UserError, match=r"config.train.aggregator.replicas_per_device = 7: so many replicas"
    ):
        make_cells(config, make_problems(config))
    config.arms[1].aggregator = AggregatorConfig("ef", over="2")
    with pytest.raises(UserError, match=r"aggregator.over = '2': a trial has one device"):
        config.validate()
