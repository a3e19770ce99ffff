"""Every shipped config builds a run with the promised schedule."""

import math
import pathlib

import jax
import numpy as np
import pytest
from refusal import refused

import lbopt
from lbopt.cli import _flags, call_get_config, config_files
from lbopt.config import (
    AggregatorConfig,
    OptimizerConfig,
    SweepConfig,
    TrainConfig,
    make_optimizer,
    make_schedule,
    resolve_schedule,
)
from lbopt.data import load_digits
from lbopt.data.from_config import load_source
from lbopt.recipes import _build, make_problem
from lbopt.sweep import make_cells, make_problems

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
NUM_EXAMPLES = 1024

OPTIMIZERS = ("lamb", "lars", "adamw", "adam", "momentum")
ROWS = ["digits_cnn.py", "digits_cnn.py:smoke"]
ROWS += [f"digits_cnn.py:{name}-{size}" for name in OPTIMIZERS for size in (64, 256, 1024)]
ROWS += [
    "digits_lstm.py",
    "digits_lstm.py:smoke",
    *(f"digits_lstm.py:{name}-1024" for name in ("lamb", "adamw", "momentum")),
]
FAMILIES = {
    "digits_resnet.py": ("lamb", "lars", "momentum"),
    "digits_efficientnet.py": ("lamb",),
    "pydoc_bert.py": ("lamb",),
    "pydoc_lstm.py": ("lamb",),
}
for file, names in FAMILIES.items():
    ROWS += [file, f"{file}:smoke", *(f"{file}:{name}-512" for name in names)]
PUBLISHED = {
    "bert_large_lamb.py",
    "bert_mlperf.py",
    "cifar10.py",
    "decoder_lm.py",
    "efficientnet.py",
    "fashion_mnist.py",
    "lstm_legw.py",
    "mnist.py",
    "mnist1d.py",
    "resnet50_lamb.py",
    "resnet50_lars.py",
    "resnet50_mlperf.py",
    "squad.py",
}
EMBEDDED_STUDIES = (
    "digits_limit",
    "digits_lstm_legw",
    "pydoc_lm_legw",
    "waterfall_digits",
    "diffusion_digits",
    "precision_digits",
    "growing_bert",
)
STUDIES = [
    *(f"sweeps/{name}.py" for name in EMBEDDED_STUDIES),
    *(f"sweeps/{name}.py:smoke" for name in EMBEDDED_STUDIES),
    "sweeps/fashion_limit.py:smoke",
    "sweeps/fashion_target.py:smoke",
    "sweeps/lm_critical.py:smoke",
    "sweeps/mnist_limit.py:smoke",
    "sweeps/rules_transfer.py:smoke",
    "sweeps/waterfall_digits.py:trust-first",
    "sweeps/waterfall_digits.py:searched",
    "sweeps/diffusion_digits.py:epochs",
    "sweeps/precision_digits.py:same",
]


def test_each_layer_of_a_scanned_bert_has_a_trust_ratio_of_its_own():
    config = load("pydoc_bert.py:smoke")
    config.model.scan_layers = True
    config.parallel.num_devices = 1
    config.global_batch_size = 8
    run = _build.build_run(config)
    state, _ = jax.block_until_ready(run.train_step(run.init(), run.batches[0]))
    metrics = lbopt.optimizer_metrics(state.opt_state)
    ratios = [metrics[f"trust_ratio/layers/inner/kernel[{layer}]"] for layer in range(2)]
    assert ratios[0] != ratios[1]


def load(row):
    return call_get_config(str(CONFIGS / row))


def size_of(config):
    """Return the number of training examples."""
    return len(load_source(config.data).splits.train)


def closed_form(schedule, batch_size, num_epochs, num_examples):
    """Return peak, warmup steps and total steps of a rule, from its definition."""
    exponents = {"sqrt": 0.5, "sde_half_life": 0.5, "linear": 1, "none": 0}
    exponent = exponents[schedule.scaling_rule]
    peak = schedule.base_learning_rate * (batch_size / schedule.base_batch_size) ** exponent
    over = {"legw": schedule.base_batch_size, "epochs": batch_size, "none": math.inf}[
        schedule.warmup_rule
    ]
    return (
        peak,
        round(schedule.base_warmup_epochs * num_examples / over),
        math.ceil(num_epochs * num_examples / batch_size),
    )


def check_rates(schedule, batch_size, num_epochs, num_examples=NUM_EXAMPLES):
    resolved = resolve_schedule(schedule, batch_size, num_examples, num_epochs)
    built = make_schedule(schedule, resolved)
    values = np.asarray(jax.vmap(built)(np.arange(resolved.num_steps)))
    peak, warmup, steps = closed_form(schedule, batch_size, num_epochs, num_examples)

    assert (resolved.warmup_steps, resolved.num_steps) == (warmup, steps)
    assert resolved.learning_rate == pytest.approx(peak, rel=1e-12)
    assert (schedule.decay, schedule.power, schedule.end_factor, schedule.first_step) == (
        "polynomial",
        1,
        0,
        1,
    )

    # The first step is step 1: a rise to the peak at step `warmup`, then a line to 0 at step
    # `steps` + 1.
    t = np.arange(1, steps + 1)
    line = (steps + 1 - t) / (steps + 1 - warmup)
    expected = peak * np.where(t < warmup, t / max(warmup, 1), line)
    np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-7 * peak)

    if warmup:
        assert values[0] == pytest.approx(peak / warmup, rel=1e-6)
        assert values.max() == values[warmup - 1] == pytest.approx(peak, rel=1e-6)
    assert values[-1] == pytest.approx(peak / (steps + 1 - warmup), rel=1e-4)


@pytest.mark.parametrize("row", ROWS)
def test_a_row_becomes_a_run(row):
    config = load(row)
    assert isinstance(config, TrainConfig)
    plan = _build.build_run(config)
    assert plan.global_batch_size == config.global_batch_size
    steps = math.ceil(config.num_epochs * size_of(config) / config.global_batch_size)
    assert plan.num_steps == len(plan.batches) == steps
    assert {len(array) for array in plan.batches[0].values()} == {config.global_batch_size}
    assert plan.mesh.size == 4


@pytest.mark.parametrize("row", ROWS)
def test_the_rates_of_a_row(row):
    config = load(row)
    check_rates(config.schedule, config.global_batch_size, config.num_epochs, size_of(config))


@pytest.mark.parametrize("name", ["lamb", "muonh"])
def test_a_run_deals_matrices_over_its_devices(name):
    config = load("digits_cnn.py:lamb-64")
    config.optimizer = OptimizerConfig(name)
    text = _build.build_run(config).lower().as_text()
    assert ("all_reduce" in text) == (name == "muonh")  # those of gradients come later


def test_rows_say_what_they_are():
    for file, names in {"digits_cnn.py": OPTIMIZERS, **FAMILIES}.items():
        for name in names:
            config = load(f"{file}:{name}-512")
            assert (config.optimizer.name, config.global_batch_size) == (name, 512)
            assert config.name == f"{file.removesuffix('.py')}:{name}-512"


@pytest.mark.parametrize("row", STUDIES)
def test_a_study_can_be_laid_out(row):
    config = load(row)
    assert isinstance(config, SweepConfig)
    config.validate()
    cells = make_cells(config, make_problems(config))
    assert len(cells) == len(config.arms) * len(config.global_batch_sizes)
    for cell in cells:
        size = cell.global_batch_size
        examples = len(cell.problem.splits.train)
        peak, warmup, steps = closed_form(
            cell.arm.schedule, size, config.train.num_epochs, examples
        )
        steps = config.train.num_steps or steps
        assert (cell.resolved.warmup_steps, cell.resolved.num_steps) == (warmup, steps)
        assert cell.resolved.learning_rate == pytest.approx(peak, rel=1e-12)
        if "digits_limit" in row:
            check_rates(cell.arm.schedule, size, config.train.num_epochs)


def test_no_config_is_forgotten_here():
    """A new file belongs in the tables above.

    A file with its own data is tested by tests/configs and tests/cli/test_smoke.py instead.
    """
    files = {str(file.relative_to(CONFIGS)) for file in config_files(CONFIGS)}
    elsewhere = {"sweeps/cifar10_limit.py", "sweeps/imagenet_limit.py"}
    assert files == {row.partition(":")[0] for row in ROWS + STUDIES} | PUBLISHED | elsewhere
    assert len(load_digits().train) == NUM_EXAMPLES


@pytest.mark.parametrize("row", ["digits_cnn.py", *STUDIES])
def test_two_loads_share_nothing(row):
    """A config is mutable; changes for one run must not appear in the next one's."""
    first = load(row)
    second = load(row)
    assert first == second
    assert first is not second
    (
        first.optimizer if isinstance(first, TrainConfig) else first.arms[0].optimizer
    ).weight_decay = 7.0
    assert first != second


def test_rows_of_one_loaded_file_share_nothing():
    """An override of one recipe must not change another recipe of the same module."""

    def two(module):
        first = module.get_config("lamb-64")
        first.optimizer.weight_decay = 7.0
        first.schedule.base_learning_rate = 7.0
        return module.get_config("lamb-128")

    file = str(CONFIGS / "digits_cnn.py")
    second = _flags._from_config_file(file, file, two)
    assert second.optimizer.weight_decay != 7.0
    assert second.schedule.base_learning_rate != 7.0


def test_warmup_must_end_before_training():
    config = load("digits_cnn.py:lamb-1024")
    config.num_epochs = 4.0
    with refused("config.schedule.base_warmup_epochs", code="conflict"):
        _build.build_run(config)
    config.num_epochs = 5.0
    assert _build.build_run(config).num_steps == 5


def test_a_run_and_a_study_start_from_the_same_state():
    """Both take `make_state`, and its seed may be traced."""
    config = load("digits_cnn.py:lamb-64")
    config.model.widths = (4,)
    config.model.hidden = 8
    config.seed = 5
    problem = make_problem(config.data, config.model)
    tx = make_optimizer(config.optimizer, 0.1)
    traced = jax.jit(lambda seed: _build.build_state(problem, tx, seed).params)(np.uint32(5))
    run = _build.build_run(config).init().params
    for ours, theirs in zip(jax.tree.leaves(traced), jax.tree.leaves(run), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_study_runs_the_settings_of_the_measured_rows():
    """This justifies `measured here`: the study's learning-rate factor 1 is the recipe's rate."""
    study = load("sweeps/digits_limit.py")
    rows = {
        name: load(f"digits_cnn.py:{name}-{study.global_batch_sizes[0]}") for name in OPTIMIZERS
    }
    assert {arm.optimizer.name for arm in study.arms} == set(rows)
    assert 1.0 in study.search.learning_rate_factors
    for arm in study.arms:
        row = rows[arm.optimizer.name]
        assert (arm.optimizer, arm.schedule) == (row.optimizer, row.schedule)
        assert (study.train.model, study.train.num_epochs, row.about.status) == (
            row.model,
            row.num_epochs,
            "measured here",
        )


def test_batch_norm_over_the_batch_is_that_of_a_worker_of_local_steps():
    """Four workers on one device: without local steps no statistics are shared there."""
    workers = AggregatorConfig("mean", replicas_per_device=4)
    config = TrainConfig(data="digits", model="cnn", optimizer="adam", aggregator=workers)
    config.global_batch_size = 64
    config.parallel.num_devices = 1
    with refused("config.model.batch_norm_scope", "global", "mismatch"):
        _build.build_run(config)
    config.diloco.every = 2
    assert _build.build_run(config).train_step.aggregation.num_replicas == 4
    config.model.batch_norm_scope = "replicas:2"
    with refused("config.model.batch_norm_scope", "replicas:2", "mismatch"):
        _build.build_run(config)
