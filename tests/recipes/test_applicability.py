"""A field applies where the factory reads it, and is refused elsewhere."""

import dataclasses
import itertools
import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reading import declared, reads
from refusal import refused

from lbopt.cli import load_config
from lbopt.config import (
    TASKS,
    AggregatorConfig,
    CheckpointConfig,
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
from lbopt.config._model import BATCH_NORMED, MODELS
from lbopt.config._optimizer import OPTIMIZERS, check_optimizer
from lbopt.config._schedule import DECAYS
from lbopt.config._search import METHODS, PRUNERS
from lbopt.errors import UserError
from lbopt.parallel import Aggregate
from lbopt.recipes import make_network, make_problem
from lbopt.schedules._scaling_plan import WARMUP_RULES
from lbopt.sweep.search import make_searcher, search_cost
from lbopt.transforms import VARIANTS

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
            *product(
                OptimizerConfig,
                name=("lamb",),
                weight_decay=(0.1,),
                clip_stage=("replica", "none"),
            ),
            *product(OptimizerConfig, name=("adam",), clip_stage=("replica", "none")),
            OptimizerConfig(weight_decay=0.1, ema_decay=0.5),
            OptimizerConfig(weight_decay=0.1, skip_limit=0),
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
            *(
                ModelConfig(
                    name,
                    batch_norm_scope="local" if name in BATCH_NORMED else "global",
                    size=SMALLEST.get(name, ""),
                )
                for name in MODELS
            ),
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
        if is_sound(config):
            assert reads(config, factory) - of_others == declared(config) - of_others, config


LEAVES = {
    "body": {"kernel": jnp.array([[0.1, 0.3], [0.5, 0.7]])},
    "head": {"kernel": jnp.array([[0.9], [0.2]]), "bias": jnp.array([0.4])},
}
KINDS = {name: OptimizerConfig(name) for name in ("lans", "adamw", "momentum", "rmsprop")} | {
    f"{name}-{variant}": OptimizerConfig(name, variant)
    for name, variants in VARIANTS.items()
    for variant in variants
}
MASKED = [
    {"weight_decay_exclude": ("^body/",)},
    {"weight_decay_exclude": ("^body/",), "weight_decay_include": ("^body/",)},
]
ADAPTED = [
    {"trust_ratio_bounds": (7.0, 8.0)},
    {"trust_ratio_exclude": ("^body/",)},
    {"trust_ratio_exclude": ("^body/",), "trust_ratio_include": ("^body/",)},
]
VELOCITY = [{"nesterov": True}, {"momentum": 0.0, "nesterov": True}]


def changes_of(config):
    """Return values of fields, the last of which may have an effect beside the others."""
    if config.name in ("lamb", "lans"):
        return MASKED + ADAPTED
    if config.name != "lars":
        return MASKED + (VELOCITY if config.name != "adamw" else [])
    of_lars = [{"trust_coefficient": 0.5}, {"trust_ratio_eps": 0.5}]
    options = VARIANTS["lars"][config.variant].options
    if options.clip_mode == "clip":
        return MASKED + of_lars + [{"trust_ratio_clip_mode": "scale"}] + VELOCITY
    if options.trust_ratio_bounds is None:
        of_lars.append({"trust_coefficient": 0.5, "trust_ratio_clip_mode": "clip"})
    return MASKED + ADAPTED + of_lars + VELOCITY


def updates_of(config):
    """Return the updates of a tiny tree by an optimizer that has made some steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some variants adapt no layer without decay
        tx = build_optimizer(config, 0.1)
    state = jax.tree.map(lambda x: x + jnp.asarray(2, x.dtype), tx.init(LEAVES))
    updates, _ = tx.update(jax.tree.map(lambda p: p * 3 - 2, LEAVES), state, LEAVES)
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(updates)])


def refusal_of(optimizer):
    try:
        _fields.check(optimizer)
        check_optimizer(optimizer)
    except UserError as error:
        return error.code
    return None


@pytest.mark.everyday(
    "lamb-paper",
    "lamb-albert",
    "lamb-apex",
    "lamb-you_rn50",
    "lans",
    "lars-paper",
    "lars-timm",
    "adamw",
)
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizers_field_is_refused_exactly_where_it_changes_no_update(kind):
    for weight_decay, changes in itertools.product((0.0, 0.1), changes_of(KINDS[kind])):
        changed = dataclasses.replace(KINDS[kind], weight_decay=weight_decay, **changes)
        field = list(changes)[-1]
        default = getattr(OptimizerConfig(), field)
        before = updates_of(dataclasses.replace(changed, **{field: default}))
        is_idle = np.array_equal(before, updates_of(changed))
        assert refusal_of(changed) == ("unused" if is_idle else None), (weight_decay, changes)


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


AROUND = [
    TrainConfig(data=DataConfig("digits")),
    TrainConfig(data=DataConfig("pydoc_lm"), model=ModelConfig("lstm_lm", size="small")),
    TrainConfig(data=DataConfig("pydoc_mlm"), model=ModelConfig("bert", size="tiny")),
]
WHOLE = {
    "data": list(product(DataConfig, name=TASKS, train_crop=("resized", "padded"))),
    "loss": [LossConfig(), LossConfig(label_smoothing=0.1)],
    "parallel": [ParallelConfig(), ParallelConfig(shard_update=True)],
    "measure": [MeasureConfig(), MeasureConfig(num_probes=1)],
    "phase2": [PhaseConfig()],
    "checkpoint": [CheckpointConfig()],
    **{name: configs for name, (_, configs) in GROUPS.items()},
}


@pytest.mark.parametrize("group", WHOLE)
def test_a_field_is_refused_exactly_where_it_does_not_apply(group):
    for around in AROUND if group == "phase2" else AROUND[:1]:
        for config in WHOLE[group]:
            check_each_field(config, around)


@pytest.mark.parametrize(
    "changes",
    [{}, {"target_metric": "eval/loss"}, {"num_steps": 3}, {"eval_every_epochs": 1.0}],
    ids=str,
)
def test_a_field_of_a_run_is_refused_exactly_where_it_does_not_apply(changes):
    check_each_field(TrainConfig(**changes))


def check_each_field(config, *around):
    """Check that each field with another value is refused if it does not apply, else accepted."""
    if not is_sound(config, *around):
        return
    for field in dataclasses.fields(config):
        if field.name in ("name", "method") or field.default is dataclasses.MISSING:
            continue
        value = other_than(field.type, field.default)
        changed = dataclasses.replace(config, **{field.name: value})
        applies = _fields.applies(field, changed, *around)
        if applies or _fields.applicability(field).may_stay:
            assert named_as_idle(changed, *around) != f"here.{field.name}"
        else:
            with refused(f"here.{field.name}", value, "unused"):
                _fields.check(changed, "here", *around)


@pytest.mark.parametrize("around", AROUND, ids=lambda around: around.data.name)
def test_a_field_of_the_second_phase_applies_where_it_changes_that_phase(around):
    of_the_optimizer = {"optimizer_state"}  # read where the phase begins
    before = dataclasses.replace(around, phase2=PhaseConfig())
    for field in dataclasses.fields(PhaseConfig):
        if field.name in of_the_optimizer:
            continue
        other = ScheduleConfig(1.0)
        if field.name != "schedule":
            other = other_than(field.type, field.default)
        after = dataclasses.replace(around, phase2=PhaseConfig(**{field.name: other}))
        changes = before.phases()[1] != after.phases()[1]
        assert changes == _fields.applies(field, after.phase2, after), field.name


def named_as_idle(config, *around):
    try:
        _fields.check(config, "here", *around)
    except UserError as error:  # a changed kind may leave another field without effect
        return error.field
    return None


def is_sound(config, *around):
    return all(
        _fields.applies(field, config, *around) or getattr(config, field.name) == field.default
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
    kind = {"limit_points": ["train.target_metric=eval/loss", "train.stop_at_target=True"]}
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


def test_a_waterfall_of_unknown_arms_is_refused_as_a_whole():
    names = (load_config(STUDY, [], SweepConfig).arms[0].name, "a")
    with refused("config.waterfall", names, "choice"):
        load_config(STUDY, [f"--config.waterfall={names}"], SweepConfig).validate()


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


def lamb(variant, **options):
    return {"optimizer": OptimizerConfig("lamb", variant, **options)}


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
        ("config.optimizer.weight_decay_exclude", lamb("paper", weight_decay_exclude=("kernel",))),
        ("config.optimizer.trust_ratio_bounds", lamb("apex", trust_ratio_bounds=(0.0, 1.0))),
        ("config.optimizer.trust_ratio_exclude", lamb("you_rn50", trust_ratio_exclude=("^a",))),
        (
            "config.model.batch_norm_running_from",
            {"model": ModelConfig("resnet", size="18", batch_norm_running_from="first")},
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
