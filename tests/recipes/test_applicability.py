"""A field applies where the factory reads it, and is refused elsewhere."""

import dataclasses
import itertools
import pathlib

import jax
import numpy as np
import pytest
from reading import declared, reads
from refusal import refused

from lbopt.cli import load_config
from lbopt.config import (
    TASKS,
    AggregatorConfig,
    DataConfig,
    LossConfig,
    MeasureConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PhaseConfig,
    ScheduleConfig,
    SearchConfig,
    SweepConfig,
    TrainConfig,
    _fields,
    group_of,
    make_aggregator as build_aggregator,
    make_optimizer as build_optimizer,
    make_schedule as build_schedule,
    resolve_schedule,
)
from lbopt.config._aggregator import AGGREGATORS, COMPRESSORS
from lbopt.config._model import MODELS
from lbopt.config._optimizer import OPTIMIZERS
from lbopt.config._schedule import DECAYS
from lbopt.config._search import METHODS, PRUNERS
from lbopt.errors import UserError
from lbopt.parallel import Aggregate
from lbopt.recipes import make_network, make_problem
from lbopt.schedules._scaling_plan import WARMUP_RULES
from lbopt.sweep.search import make_searcher, search_cost

SMALLEST = {"bert": "tiny", "efficientnet": "b0", "lstm_lm": "small", "resnet": "18"}
DIGITS = str(pathlib.Path(__file__).parents[2] / "configs" / "digits_cnn.py")


def product(kind, **choices):
    """Yield a config group for each combination of values."""
    for values in itertools.product(*choices.values()):
        yield kind(**dict(zip(choices, values, strict=True)))


def make_optimizer(config):
    build_optimizer(config, 0.1, global_batch_size=64)


def make_schedule(config):
    build_schedule(config, resolve_schedule(config, 64, 6400, 4.0))


def make_aggregator(config):
    made = build_aggregator(config, OptimizerConfig())
    if made is not None:
        assert Aggregate(made, config.replicas_per_device, group_of(config)).over == "replicas"


def search(config):
    make_searcher(config)
    search_cost(config)


GROUPS = {
    "optimizer": (
        make_optimizer,
        [
            *product(OptimizerConfig, name=OPTIMIZERS, weight_decay=(0.1,)),
            *product(OptimizerConfig, name=("lamb", "adam"), clip_stage=("replica", "none")),
            OptimizerConfig(ema_decay=0.5),
            OptimizerConfig(skip_limit=0),
        ],
    ),
    "schedule": (
        make_schedule,
        [
            *product(ScheduleConfig, decay=DECAYS, warmup_rule=("none",), start_step=(0, 2)),
            *product(
                ScheduleConfig,
                decay=("constant", "polynomial"),
                scaling_rule=("none", "sqrt"),
                warmup_rule=WARMUP_RULES,
                warmup_steps=(None, 0, 3.0),
                base_warmup_epochs=(0.0, 0.5),
            ),
        ],
    ),
    "model": (
        lambda config: make_network(config, 10),
        [
            *(ModelConfig(name, size=SMALLEST.get(name, "")) for name in MODELS),
            *product(
                ModelConfig,
                name=["bert"],
                size=["tiny"],
                remat=("none", "layer"),
                scan_layers=(False, True),
            ),
        ],
    ),
    "aggregator": (
        make_aggregator,
        [
            *product(AggregatorConfig, name=set(AGGREGATORS) - {"agvm"}, compressor=COMPRESSORS),
            AggregatorConfig("agvm", modules=(("all", ""),), anchor="all"),
        ],
    ),
    "search": (search, list(product(SearchConfig, method=METHODS, pruner=PRUNERS))),
}
"""Group -> the factory, and configs of all kinds."""


@pytest.mark.parametrize("group", GROUPS)
def test_what_is_declared_is_what_the_factory_reads(group):
    factory, configs = GROUPS[group]
    of_others = {"seeds"}  # the runner reads this one
    for config in configs:
        if is_sound(config, None):
            assert reads(config, factory) - of_others == declared(config) - of_others, config


def other_than(kind, value):
    """Return a different value of a field's type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, tuple):
        return (*value, 1)
    return "x" if "str" in str(kind) else 1


WHOLE = {
    "data": list(product(DataConfig, name=TASKS, train_crop=("resized", "padded"))),
    "loss": [LossConfig(), LossConfig(label_smoothing=0.1)],
    "parallel": [ParallelConfig(), ParallelConfig(shard_update=True)],
    "measure": [MeasureConfig(), MeasureConfig(num_probes=1)],
    **{name: configs for name, (_, configs) in GROUPS.items()},
}


@pytest.mark.parametrize("group", WHOLE)
def test_a_field_is_refused_exactly_where_it_does_not_apply(group):
    around = TrainConfig(data=DataConfig("digits"))
    for config, field in itertools.product(WHOLE[group], dataclasses.fields(WHOLE[group][0])):
        value = other_than(field.type, field.default)
        changed = dataclasses.replace(config, **{field.name: value})
        if field.name in ("name", "method") or not is_sound(config, around):
            continue
        if _fields.applies(field, changed, around) or _fields.applicability(field).may_stay:
            assert named_as_idle(changed, around) != f"here.{field.name}"
        else:
            with refused(f"here.{field.name}", value, "unused"):
                _fields.check(changed, "here", around)


def named_as_idle(config, around):
    try:
        _fields.check(config, "here", around)
    except UserError as error:  # a changed kind may leave another field without effect
        return error.field
    return None


def is_sound(config, around):
    return all(
        _fields.applies(field, config, around) or getattr(config, field.name) == field.default
        for field in dataclasses.fields(config)
    )


@pytest.mark.parametrize("name", ["digits", "pydoc_lm"])
def test_the_loss_is_read_where_it_applies(name):
    """Fields of the loss are read when a step is traced."""
    model = ModelConfig("mlp", (4,)) if name == "digits" else ModelConfig("lstm_lm", size="small")
    if name == "pydoc_lm":
        model.width_coefficient = 0.05
    for loss in (LossConfig(), LossConfig(label_smoothing=0.1)):
        data = DataConfig(name, **({} if name == "digits" else {"vocab_size": 512}))

        def trace(recorded, data=data):
            problem = make_problem(data, model, recorded)
            params, state = jax.eval_shape(problem.init, jax.random.key(0))
            batch = problem.splits.train.take(np.arange(2))
            jax.eval_shape(problem.loss_fn, params, state, batch, jax.random.key(0))

        assert reads(loss, trace) == declared(loss, TrainConfig(data=data))


STUDY = str(pathlib.Path(DIGITS).parent / "sweeps" / "digits_limit.py")
IDLE_IN_A_STUDY = {
    "train.optimizer.weight_decay": "0.5",
    "train.schedule.base_learning_rate": "0.5",
    "train.seed": "1",
    "train.global_batch_size": "128",
    "train.checkpoint.keep": "1",
    "train.log_every_steps": "5",
    "train.eval_every_epochs": "1.0",
    "limit_points": "2.0",
    "trial_batching": "vmap",
    "trials_per_program": "8",
}


@pytest.mark.parametrize("name", IDLE_IN_A_STUDY)
def test_a_flag_without_effect_on_a_study_is_refused(name):
    kind = {"limit_points": ["train.target_metric=eval/accuracy", "train.stop_at_target=True"]}
    others = kind.get(name, ["trial_devices=all"])
    flags = [f"--config.{flag}" for flag in (*others, f"{name}={IDLE_IN_A_STUDY[name]}")]
    with refused(f"config.{name}", code="unused"):
        load_config(STUDY, flags, SweepConfig)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train.parallel.reduce_dtype", "bfloat16"),
        ("train.parallel.order", "torus"),
        ("arms[0].optimizer.monitor_layers", True),
        ("arms[0].optimizer.track_noise_scale", True),
    ],
)
def test_a_study_refuses_what_no_trial_uses(name, value):
    config = load_config(STUDY, ["--config.train.parallel.num_microsteps=2"], SweepConfig)
    place, _, field = name.rpartition(".")
    group = config.train.parallel if "parallel" in place else config.arms[0].optimizer
    setattr(group, field, value)
    with refused(f"config.{name}", value, "conflict"):
        config.validate()


def test_the_same_flags_are_taken_where_they_have_an_effect():
    kind = ["train.target_metric=eval/accuracy", "train.target_value=0.9", "trial_batching=vmap"]
    flags = [*kind, "train.eval_every_epochs=1.0", "limit_points=2.0", "trials_per_program=8"]
    load_config(STUDY, [f"--config.{flag}" for flag in flags], SweepConfig).validate()


IDLE = {
    "optimizer.weight_decay": "0.5",
    "optimizer.variant": "apex",
    "model.remat": "layer",
    "aggregator.rank": "8",
    "schedule.decay_rate": ".5",
    "data.flip": "False",
    "num_epochs": "3.0",
    "eval_every_steps": "7",
}


@pytest.mark.parametrize("name", IDLE)
def test_a_flag_without_effect_is_refused(name):
    """This includes a flag with the default's value, and one that another field replaces."""
    flags = [f"--config.{name}={IDLE[name]}", "--config.num_steps=9"]
    with refused(f"config.{name}", code="unused"):
        load_config(
            f"{DIGITS}:adam-64", [*flags, "--config.eval_every_epochs=1.0"], TrainConfig
        ).validate()


@pytest.mark.parametrize(
    ("name", "value", "decay"),
    [
        ("base_batch_size", "128", "cosine"),
        ("decay_from", "start", "cosine"),
        ("first_step", "0", "constant"),
        ("start_step", "3", "constant"),
    ],
)
def test_a_flag_is_refused_where_the_rate_does_not_depend_on_it(name, value, decay):
    plain = ["scaling_rule=none", "warmup_rule=none", f"decay={decay}"]
    flags = [f"--config.schedule.{flag}" for flag in (*plain, f"{name}={value}")]
    with refused(f"config.schedule.{name}", code="unused"):
        load_config(f"{DIGITS}:adam-64", flags, TrainConfig)
    load_config(f"{DIGITS}:adam-64", flags[3:], TrainConfig).validate()


def test_a_flag_with_the_default_of_an_idle_field_is_refused():
    with refused("config.optimizer.variant", "paper", "unused"):
        load_config(f"{DIGITS}:adam-64", ["--config.optimizer.variant=paper"], TrainConfig)


def test_a_flag_that_chooses_another_kind_sets_the_fields_of_the_former_to_their_defaults():
    assert load_config(f"{DIGITS}:lamb-64", [], TrainConfig).optimizer.weight_decay > 0
    config = load_config(f"{DIGITS}:lamb-64", ["--config.optimizer.name=adam"], TrainConfig)
    config.validate()
    assert config.optimizer.weight_decay == 0


def test_flags_do_not_mend_what_a_config_file_sets_without_effect(tmp_path):
    file = tmp_path / "idle.py"
    file.write_text(
        "from lbopt.config import *\n"
        "def get_config(arg=''):\n"
        "    return TrainConfig(optimizer=OptimizerConfig('adam', variant='apex'))\n"
    )
    with refused("config.optimizer.variant", "apex", "unused"):
        load_config(str(file), ["--config.seed=1"], TrainConfig).validate()


def test_a_row_may_keep_what_a_flag_replaces():
    config = load_config(f"{DIGITS}:adam-64", ["--config.num_steps=30"], TrainConfig)
    config.validate()
    assert config.num_epochs == 20.0


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("config.optimizer.variant", {"optimizer": OptimizerConfig("adam", variant="apex")}),
        (
            "config.optimizer.nesterov",
            {"optimizer": OptimizerConfig("momentum", momentum=0.0, nesterov=True)},
        ),
        (
            "config.optimizer.weight_decay_exclude",
            {"optimizer": OptimizerConfig("adamw", weight_decay_exclude=("^embed/",))},
        ),
        ("config.loss.label_smoothing_rule", {"loss": LossConfig(0.0, "other_classes")}),
        ("config.parallel.reduce_scatter", {"parallel": ParallelConfig(reduce_scatter=True)}),
        ("config.target_value", {"target_value": 0.5}),
        ("config.phase2.remat", {"num_steps": 2, "phase2": PhaseConfig(remat="layer")}),
        (
            "config.phase2.schedule.power",
            {
                "num_steps": 2,
                "phase2": PhaseConfig(3, schedule=ScheduleConfig(decay="cosine", power=2.0)),
            },
        ),
    ],
)
def test_validate_refuses_what_a_config_file_sets(field, changes):
    with refused(field, code="unused"):
        TrainConfig(**changes).validate()
