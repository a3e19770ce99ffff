"""The values of a config's fields arrive where they are used."""

import dataclasses
import math
import pathlib

import jax
import numpy as np
import pytest
from refusal import refused, troubled

from lbopt.cli import call_get_config
from lbopt.config import (
    AggregatorConfig,
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ResolvedSchedule,
    ScheduleConfig,
    make_schedule,
    resolve_schedule,
)
from lbopt.config._schedule import check_schedule
from lbopt.recipes import build_run, make_problem
from lbopt.transforms import ema_params, optimizer_metrics

CNN = {"name": "cnn", "widths": (4,), "hidden": 8}


def small(**changes):
    config = call_get_config(
        str(pathlib.Path(__file__).parents[2] / "configs" / "digits_cnn.py") + ":lamb-128"
    )
    config.model = ModelConfig(**CNN)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def problem_of(loss=None, **model):
    return make_problem(DataConfig(), ModelConfig(**{**CNN, **model}), loss)


def first_loss(problem):
    """Return the first training loss on 64 examples, and the model state after it."""
    params, model_state = problem.init(jax.random.key(0))
    batch = problem.splits.train.take(np.arange(64))
    loss, (after, _) = problem.loss_fn(params, model_state, batch, jax.random.key(1))
    return float(loss), model_state, after, params, batch


def mean_over(problem, state, split):
    whole = {**split.take(np.arange(len(split))), "mask": np.ones(len(split), bool)}
    pairs = problem.metric_fn(state.params, state.model_state, whole)
    return {name: float(total) / float(count) for name, (total, count) in pairs.items()}


def test_a_run_evaluates_on_validation_and_tests_on_test():
    config = small()
    run = build_run(config)
    problem = make_problem(config.data, config.model)
    state = run.init()
    expected = [mean_over(problem, state, split) for split in problem.splits]
    assert len({round(scores["loss"], 4) for scores in expected}) == 3  # the three splits differ
    for scores, wanted in (
        (run.evaluate(state), expected[1]),
        (run.evaluate_test(state), expected[2]),
    ):
        assert scores == pytest.approx(wanted, rel=1e-5)


def test_label_smoothing_mixes_the_target_with_the_uniform_one():
    plain = problem_of()
    smooth = problem_of(LossConfig(label_smoothing=0.25))
    loss, model_state, _, params, batch = first_loss(plain)
    uniform = []
    for label in range(10):
        every = {**batch, "label": np.full(64, label, batch["label"].dtype)}
        uniform.append(float(plain.loss_fn(params, model_state, every, jax.random.key(1))[0]))
    assert first_loss(smooth)[0] == pytest.approx(0.75 * loss + 0.25 * np.mean(uniform), rel=1e-5)
    assert abs(np.mean(uniform) - loss) > 1e-3


def test_batch_norm_momentum_is_what_is_kept_of_the_running_statistics():
    moved = {}
    for momentum in (0.9, 0.5):
        _, before, after, *_ = first_loss(problem_of(batch_norm_momentum=momentum))
        pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        moved[momentum] = np.concatenate([np.ravel(b - a) for a, b in pairs])
    assert np.linalg.norm(moved[0.5]) > 0.01
    np.testing.assert_allclose(moved[0.5], 5 * moved[0.9], rtol=1e-4, atol=1e-6)


def products(jaxpr):
    """Yield every matrix product, also of inner functions."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda value: hasattr(value, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from products(inner)


@pytest.mark.everyday("cnn")
@pytest.mark.parametrize("model", [CNN, {"name": "lstm", "hidden": 8}], ids=["cnn", "lstm"])
def test_dtype_is_of_the_computation_and_not_of_the_parameters(model):
    losses = {}
    for dtype in ("float32", "bfloat16"):
        problem = problem_of(**{**model, "dtype": dtype})
        losses[dtype], _, after, params, batch = first_loss(problem)
        assert {str(leaf.dtype) for leaf in jax.tree.leaves((params, after))} == {"float32"}
        traced = jax.make_jaxpr(problem.loss_fn)(params, after, batch, jax.random.key(1))
        factors = {
            str(factor.aval.dtype)
            for product in products(traced.jaxpr)
            for factor in product.invars
        }
        assert factors == {dtype}
    assert 0 < abs(losses["bfloat16"] - losses["float32"]) < 0.02 * losses["float32"]


@pytest.mark.parametrize("metric", ["eval/accuracy", "eval/loss"])
def test_what_is_best_kept_and_due(metric):
    config = small(log_every_steps=3, eval_every_steps=4)
    config.checkpoint.best_metric = metric
    config.checkpoint.keep = 7
    config.checkpoint.every_steps = 5
    run = build_run(config)
    assert (run.best_metric, run.keep_checkpoints) == (metric, 7)
    assert tuple(vars(run.cadence).values()) == (3, 4, 5, None)


# decay, power, end factor -> share of the peak that is left after a fraction x of the decay
FALLS = {
    ("polynomial", 2.0, 0.0): lambda x: (1 - x) ** 2,
    ("polynomial", 1.0, 0.25): lambda x: 0.25 + 0.75 * (1 - x),
    ("cosine", 1.0, 0.1): lambda x: 0.1 + 0.9 * (1 + math.cos(math.pi * x)) / 2,
    ("constant", 1.0, 0.0): lambda x: 1.0,
}


@pytest.mark.parametrize(("decay", "power", "end_factor"), FALLS)
@pytest.mark.parametrize("first_step", [0, 1])
def test_the_decay_that_is_asked_for(decay, power, end_factor, first_step):
    config = ScheduleConfig(decay=decay, power=power, end_factor=end_factor, first_step=first_step)
    schedule = make_schedule(config, ResolvedSchedule(2.0, 10, 50, 12.5))
    for count in (10, 30, 49):
        x = (count + first_step - 10) / (50 + first_step - 10)
        assert float(schedule(count)) == pytest.approx(
            2.0 * FALLS[decay, power, end_factor](x), rel=1e-5
        )


# case -> (fields, count -> rate); 12.5 steps per epoch, 10 steps of warmup, 50 steps, a peak of 2
FORMS = {
    "jump": ({"decay_from": "start", "first_step": 0}, lambda t: 2 * (1 - t / 50)),
    "end": ({"end_learning_rate": 0.5, "first_step": 0}, lambda t: 0.5 + 1.5 * (1 - (t - 10) / 40)),
    "stairs": (
        {
            "decay": "exponential",
            "decay_rate": 0.5,
            "stair_epochs": (0.8,),
            "decay_from": "start",
            "first_step": 0,
        },
        lambda t: 2 * 0.5 ** (t // 10),
    ),
    "steps": (
        {
            "decay": "step",
            "decay_rate": 0.1,
            "stair_epochs": (2.0, 3.2),
            "decay_from": "start",
            "first_step": 0,
        },
        lambda t: 2 * 0.1 ** ((t >= 25) + (t >= 40)),
    ),
    "start": ({"start_step": -4, "first_step": 0}, lambda t: 2 * (1 - (t - 6) / 44)),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_form_of_the_schedule_that_is_asked_for(form):
    fields, after = FORMS[form]
    config = ScheduleConfig(**fields)
    check_schedule(config)
    schedule = make_schedule(config, ResolvedSchedule(2.0, 10, 50, 12.5))
    for count in (10, 24, 25, 39, 40, 49):
        assert float(schedule(count)) == pytest.approx(after(count), rel=1e-5), count
    assert float(schedule(4)) == pytest.approx(2 * (0.8 if form == "start" else 0.4), rel=1e-5)


def test_the_power_of_the_ramp_and_where_it_begins():
    def rate(**ramp):
        config = ScheduleConfig(warmup_power=2.0, first_step=0, **ramp)
        return float(make_schedule(config, ResolvedSchedule(2.0, 10, 50, 12.5))(5))

    assert rate() == pytest.approx(0.5)
    assert rate(warmup_from=1.0) == pytest.approx(1.25)


def trained(config, steps=3):
    """Return the run, and its state after a few steps."""
    run = build_run(config)
    state = run.init()
    for number in range(steps):
        state, metrics = run.train_step(state, run.batches[number])
        jax.block_until_ready(metrics)
    return run, state, metrics


def test_averaged_parameters_are_what_is_evaluated():
    config = small(optimizer=OptimizerConfig("lamb", ema_decay=0.5, ema_ramp=False))
    run, state, _ = trained(config)
    problem = make_problem(config.data, config.model)
    average = state.replace(params=ema_params(state.opt_state))
    for scores, split in ((run.evaluate(state), 1), (run.evaluate_test(state), 2)):
        assert scores == pytest.approx(mean_over(problem, average, problem.splits[split]), rel=1e-5)
        assert scores["loss"] != pytest.approx(
            mean_over(problem, state, problem.splits[split])["loss"], rel=1e-4
        )


@pytest.mark.parametrize("stage", ["replica", "mean", "accumulated", "none"])
def test_the_stage_of_the_clip_is_the_one_that_is_asked_for(stage):
    optimizer = OptimizerConfig("momentum", max_grad_norm=0.01, clip_stage=stage)
    if stage == "none":  # otherwise the step would clip to the variant's norm
        optimizer = OptimizerConfig("lamb", variant="albert", clip_stage=stage)
    _, state, metrics = trained(small(optimizer=optimizer), steps=1)
    found = {name for name in metrics if name.startswith("gradient_norm/")}
    assert found == ({f"gradient_norm/{stage}"} if stage in ("replica", "mean") else set())
    assert ("gradient_norm" in optimizer_metrics(state.opt_state)) == (stage == "accumulated")


def test_the_noise_scale_needs_parts_to_compare():
    config = small(optimizer=OptimizerConfig("lamb", track_noise_scale=True))
    config.parallel.num_devices = 1
    with refused("config.optimizer.track_noise_scale", True, "conflict") as caught:
        build_run(config)
    assert "config.parallel.num_microsteps" in str(caught.value)
    config.parallel.num_microsteps = 2
    _, state, _ = trained(config, steps=2)
    assert float(optimizer_metrics(state.opt_state)["noise_scale"]) != 0


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("power", {"decay": "cosine", "power": 2.0}),
        ("decay_rate", {"decay": "polynomial", "decay_rate": 0.5}),
        ("stair_epochs", {"decay": "cosine", "stair_epochs": (1.0,)}),
        ("end_factor", {"decay": "step", "end_factor": 0.1, "stair_epochs": (1.0,)}),
        ("decay_from", {"decay": "constant", "decay_from": "start"}),
        ("warmup_from", {"warmup_steps": 0.0, "warmup_from": 0.001}),
        ("warmup_power", {"warmup_rule": "none", "warmup_power": 2.0}),
    ],
)
def test_a_field_of_the_schedule_without_effect_is_refused(field, fields):
    with refused(f"config.schedule.{field}", fields[field], "unused"):
        small(schedule=ScheduleConfig(**fields)).validate()


# Several faults at once, or rules of the config before those of what is built from it.
FIRST_FAULTS = [
    (("parallel.reduce_scatter", True, "unused"), {"backend": "pmap"}, {}),
    (("parallel.reduce_scatter", True, "unused"), {}, {"clip_stage": "mean", "max_grad_norm": 1.0}),
    (("optimizer.name", "lamdba", "choice"), {}, {"name": "lamdba", "momentum": 0.5}),
    (("optimizer.mu_dtype", "float16", "choice"), {}, {"mu_dtype": "float16"}),
    (("optimizer.max_grad_norm", 0.0, "value"), {}, {"max_grad_norm": 0.0}),
]


@pytest.mark.parametrize(("refusal", "parallel", "optimizer"), FIRST_FAULTS)
def test_the_first_fault_is_the_one_to_mend_first(refusal, parallel, optimizer):
    field, value, code = refusal
    scattered = {"reduce_scatter": True} if field == "parallel.reduce_scatter" else {}
    config = small(
        parallel=ParallelConfig(**parallel, **scattered),
        optimizer=OptimizerConfig(**{"name": "lamb", **optimizer}),
    )
    with refused(f"config.{field}", value, code):
        config.validate()


def test_a_value_is_the_one_of_the_config():
    with refused("config.aggregator.over", "3", "conflict"):
        small(
            parallel=ParallelConfig("pmap"), aggregator=AggregatorConfig("aps", over="3")
        ).validate()
    with refused("config.aggregator.over", "9" * 5000, "value"):
        small(aggregator=AggregatorConfig("aps", over="9" * 5000)).validate()


def test_the_pattern_that_is_no_regular_expression_is_shown():
    modules = (("a", "x("), ("b", ""))
    config = small(aggregator=AggregatorConfig("agvm", modules=modules, anchor="a"))
    with refused("config.aggregator.modules", modules, "value") as caught:
        config.validate()
    assert "'x('" in caught.value.reason


def test_stairs_may_be_a_list():
    schedule = ScheduleConfig(0.1, decay="exponential", stair_epochs=[2.4])
    small(schedule=schedule).validate()


@pytest.mark.filterwarnings("error")
def test_validation_does_not_warn():
    """Building the optimizer warns that decay adapts the rate and there is none."""
    small(optimizer=OptimizerConfig("lamb", variant="apex", weight_decay=0.0)).validate()


@pytest.mark.parametrize("field", ["warmup_from", "end_learning_rate"])
def test_a_peak_below_its_floor_is_refused_with_the_field(field):
    with refused(f"schedule.{field}", 0.5, "conflict"):
        resolve_schedule(ScheduleConfig(**{field: 0.5}), 64, 6400, 4.0)


def test_a_ramp_that_is_over_before_the_first_step_is_refused():
    config = ScheduleConfig(warmup_steps=5.0, start_step=-5, warmup_power=2.0)
    with refused("schedule.warmup_steps", 5.0, "conflict"):
        resolve_schedule(config, 64, 6400, 4.0)
    assert (
        resolve_schedule(dataclasses.replace(config, start_step=-4), 64, 6400, 4.0).warmup_steps
        == 5
    )


def test_a_model_of_two_precisions_under_strict_promotion_names_the_variable():
    named = troubled("$JAX_NUMPY_DTYPE_PROMOTION", "strict", "conflict")
    with jax.numpy_dtype_promotion("strict"), named:
        problem_of(dtype="bfloat16")
