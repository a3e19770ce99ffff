"""Optimizers by name take the same steps as the corresponding chains of Optax."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusal import refused

from lbopt import tree
from lbopt.cli import load_config
from lbopt.config import (
    OptimizerConfig,
    SweepConfig,
    TrainConfig,
    check_fits,
    make_optimizer,
    resolve_clip,
)
from lbopt.recipes import build_run
from lbopt.sweep import make_cells, make_problems
from lbopt.transforms import lamb, lans, lars, optimizer_metrics

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
SCHEDULE = optax.linear_schedule(0.1, 0.02, 6)
MASK = {"Dense_0": {"kernel": True, "bias": False}, "BatchNorm_0": {"scale": False}}

# Name: the config, and the corresponding chain of Optax.
SAME = {
    "adam": (
        OptimizerConfig("adam", b1=0.8, b2=0.95, eps=1e-5),
        optax.adam(SCHEDULE, 0.8, 0.95, 1e-5),
    ),
    "adam has no weight decay": (
        OptimizerConfig("adam", weight_decay=0.5),
        optax.adam(SCHEDULE, 0.9, 0.999, 1e-6),
    ),
    "adamw": (
        OptimizerConfig("adamw", weight_decay=0.3),
        optax.adamw(SCHEDULE, 0.9, 0.999, 1e-6, weight_decay=0.3, mask=MASK),
    ),
    "momentum": (OptimizerConfig("momentum", momentum=0.7), optax.sgd(SCHEDULE, 0.7)),
    "nesterov": (
        OptimizerConfig("momentum", momentum=0.7, nesterov=True),
        optax.sgd(SCHEDULE, 0.7, nesterov=True),
    ),
    "momentum with decay": (
        OptimizerConfig("momentum", momentum=0.7, weight_decay=0.2),
        optax.chain(optax.add_decayed_weights(0.2, MASK), optax.sgd(SCHEDULE, 0.7)),
    ),
    "clipped": (
        OptimizerConfig("momentum", max_grad_norm=0.5),
        optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(SCHEDULE, 0.9)),
    ),
    "lamb": (
        OptimizerConfig("lamb", weight_decay=0.1, b1=0.8, eps=1e-4, trust_ratio_bounds=(0.5, 2.0)),
        lamb(SCHEDULE, 0.8, 0.999, 1e-4, 0.1, trust_ratio_bounds=(0.5, 2.0)),
    ),
    "lars": (
        OptimizerConfig(
            "lars", weight_decay=0.1, momentum=0.8, trust_coefficient=0.01, nesterov=True
        ),
        lars(SCHEDULE, 0.1, 0.8, 0.01, nesterov=True),
    ),
    "lamb of a variant": (
        OptimizerConfig("lamb", variant="albert", weight_decay=0.1),
        lamb(SCHEDULE, variant="albert", weight_decay=0.1),
    ),
    "lamb of a variant without its clip": (
        OptimizerConfig("lamb", variant="nus", weight_decay=0.1, clip_stage="none"),
        lamb(SCHEDULE, variant="nus", weight_decay=0.1, max_grad_norm=None),
    ),
    "lamb of a variant with another clip": (
        OptimizerConfig("lamb", variant="nus", weight_decay=0.1, max_grad_norm=0.3),
        lamb(SCHEDULE, variant="nus", weight_decay=0.1, max_grad_norm=0.3),
    ),
    "the first lars, which is larc by default": (
        OptimizerConfig("lars", variant="nvcaffe", weight_decay=0.1),
        lars(SCHEDULE, variant="nvcaffe", weight_decay=0.1, clip_mode="clip"),
    ),
    "the first lars, scaling": (
        OptimizerConfig("lars", variant="nvcaffe", weight_decay=0.1, trust_ratio_clip_mode="scale"),
        lars(SCHEDULE, variant="nvcaffe", weight_decay=0.1, clip_mode="scale"),
    ),
    "lars of a variant keeps its bounds and its coefficient": (
        OptimizerConfig("lars", variant="nus", weight_decay=0.1),
        lars(SCHEDULE, variant="nus", weight_decay=0.1),
    ),
    "lars of the LAMB paper has coefficient 1": (
        OptimizerConfig("lars", variant="lamb_paper", weight_decay=0.1),
        lars(SCHEDULE, variant="lamb_paper", weight_decay=0.1, trust_coefficient=1.0),
    ),
    "lans": (
        OptimizerConfig("lans", weight_decay=0.1, b1=0.8),
        lans(SCHEDULE, b1=0.8, weight_decay=0.1),
    ),
    "moments in bf16": (
        OptimizerConfig("lamb", mu_dtype="bfloat16", nu_dtype="bfloat16"),
        lamb(SCHEDULE, mu_dtype="bfloat16", nu_dtype="bfloat16"),
    ),
    "velocity in bf16": (
        OptimizerConfig("lars", mu_dtype="bfloat16"),
        lars(SCHEDULE, momentum_dtype="bfloat16"),
    ),
    "watched and guarded": (
        OptimizerConfig(
            "lamb",
            weight_decay=0.1,
            ema_decay=0.9,
            skip_limit=3,
            spike_factor=1e6,
            monitor_layers=True,
        ),
        lamb(SCHEDULE, weight_decay=0.1),
    ),
}


def make_params():
    rng = np.random.default_rng(0)
    return {
        "Dense_0": {"kernel": rng.normal(size=(4, 3)), "bias": rng.normal(size=3)},
        "BatchNorm_0": {"scale": rng.uniform(0.5, 1.5, size=3)},
    }


def descend(tx, num_steps=5):
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), make_params())
    state = tx.init(params)
    update = jax.jit(tx.update)
    for step in range(num_steps):
        rng = np.random.default_rng(step + 1)
        sampled = jax.tree.map(lambda w, rng=rng: rng.normal(size=w.shape), params)
        grads = jax.tree.map(jnp.float32, sampled)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("name", SAME)
def test_it_takes_the_same_steps(name):
    config, expected = SAME[name]
    ours = descend(make_optimizer(config, SCHEDULE))
    theirs = descend(expected)
    start = make_params()
    for ours_leaf, theirs_leaf, start_leaf in zip(
        *map(jax.tree.leaves, (ours, theirs, start)), strict=True
    ):
        moved = np.linalg.norm(theirs_leaf - start_leaf)
        assert moved > 1e-4
        assert np.linalg.norm(ours_leaf - theirs_leaf) < 1e-5 * moved


def test_rmsprop_is_tensorflows():
    """In float64: squares start at 1, eps is under the root, the rate is inside the momentum."""
    config = OptimizerConfig("rmsprop", rmsprop_decay=0.9, momentum=0.8, eps=1e-3)
    got = descend(make_optimizer(config, SCHEDULE))

    params = jax.tree.map(np.asarray, make_params())
    squares = jax.tree.map(np.ones_like, params)
    velocity = jax.tree.map(np.zeros_like, params)

    for step in range(5):
        rng = np.random.default_rng(step + 1)
        grads = jax.tree.map(lambda w: rng.normal(size=w.shape), params)  # noqa: B023
        squares = jax.tree.map(lambda s, g: 0.9 * s + 0.1 * g**2, squares, grads)
        rate = float(SCHEDULE(step))
        velocity = jax.tree.map(
            lambda v, s, g, rate=rate: 0.8 * v + rate * g / np.sqrt(s + 1e-3),
            velocity,
            squares,
            grads,
        )
        params = jax.tree.map(lambda w, v: w - v, params, velocity)

    for ours, theirs, start in zip(
        *map(jax.tree.leaves, (got, params, make_params())), strict=True
    ):
        assert np.linalg.norm(ours - theirs) < 1e-5 * np.linalg.norm(theirs - start)


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop"])
def test_a_gradient_whose_square_is_infinite_stops_no_weight(name):
    """A gradient that is itself not finite must not be hidden either."""
    tx = make_optimizer(OptimizerConfig(name), 0.1)
    params = make_params()
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(
            jax.tree.map(lambda w: jnp.full_like(w, 1e20), params), state, params
        )
        assert all(
            np.all(np.isfinite(leaf)) and np.all(leaf < 0) for leaf in jax.tree.leaves(updates)
        )
    updates, _ = tx.update(jax.tree.map(lambda w: jnp.full_like(w, np.inf), params), state, params)
    assert not any(np.any(np.isfinite(leaf)) for leaf in jax.tree.leaves(updates))


def test_a_weight_decay_beside_the_config_counts():
    beside = descend(
        make_optimizer(OptimizerConfig("adamw", weight_decay=0.9), SCHEDULE, weight_decay=0.3)
    )
    inside = descend(make_optimizer(OptimizerConfig("adamw", weight_decay=0.3), SCHEDULE))
    jax.tree.map(np.testing.assert_array_equal, beside, inside)
    without = descend(
        make_optimizer(OptimizerConfig("adamw", weight_decay=0.9), SCHEDULE, weight_decay=0.0)
    )
    assert not np.array_equal(beside["Dense_0"]["kernel"], without["Dense_0"]["kernel"])
    np.testing.assert_array_equal(beside["Dense_0"]["bias"], without["Dense_0"]["bias"])


@pytest.mark.parametrize("name", ["adam", "adamw", "lamb", "lans", "lars", "momentum", "rmsprop"])
def test_rate_and_decay_may_be_traced(name):
    def last(rate, decay):
        return descend(make_optimizer(OptimizerConfig(name), rate, decay), num_steps=2)

    traced = jax.jit(last)(jnp.float32(0.05), jnp.float32(0.1))
    plain = last(0.05, 0.1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), traced, plain)


def test_a_clip_of_the_step_is_not_in_the_optimizer():
    clipped, free = (
        descend(
            make_optimizer(
                OptimizerConfig("momentum", max_grad_norm=0.1, clip_stage=stage), SCHEDULE
            )
        )
        for stage in ("accumulated", "replica")
    )
    expected = descend(optax.sgd(SCHEDULE, 0.9))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), free, expected)
    assert not np.allclose(clipped["Dense_0"]["kernel"], expected["Dense_0"]["kernel"], rtol=1e-3)


@pytest.mark.parametrize(
    ("config", "norm"),
    [
        (OptimizerConfig("lamb"), None),
        (OptimizerConfig("lamb", variant="albert"), 1.0),
        (OptimizerConfig("lamb", variant="albert", max_grad_norm=2.0), 2.0),
        (OptimizerConfig("lamb", variant="albert", max_grad_norm=2.0, clip_stage="none"), None),
        (OptimizerConfig("lars", variant="nus"), None),
        (OptimizerConfig("adam", variant="albert"), None),
        (OptimizerConfig("adam", max_grad_norm=3.0, clip_stage="replica"), 3.0),
    ],
)
def test_the_norm_that_is_clipped_to(config, norm):
    assert resolve_clip(config) == norm


def test_what_is_watched_is_in_the_metrics():
    config = OptimizerConfig(
        "lamb", variant="albert", skip_limit=3, monitor_layers=True, track_noise_scale=True
    )
    tx = make_optimizer(config, SCHEDULE, global_batch_size=64)
    names = {
        name.split("/")[0]
        for name in optimizer_metrics(tx.init(jax.tree.map(jnp.asarray, make_params())))
    }
    assert names == {
        "learning_rate",
        "gradient_norm",
        "trust_ratio",
        "skipped",
        "noise_scale",
        "weight_norm",
        "update_norm",
        "update_over_weight",
    }


EMBEDDED = {
    "embed": {"embedding": np.full((4, 3), 2.0, np.float32)},
    "Dense_0": {"kernel": np.full((3, 2), 3.0, np.float32), "bias": np.ones(2, np.float32)},
}


@pytest.mark.parametrize("name", ["adamw", "lamb", "lans", "lars", "momentum", "rmsprop"])
def test_patterns_change_which_parameters_decay_and_keep_the_rest_of_the_default(name):
    def decayed(**patterns):
        """Return the parameters that move under zero gradients."""
        tx = make_optimizer(OptimizerConfig(name, weight_decay=0.5, **patterns), 0.1)
        zeros = jax.tree.map(jnp.zeros_like, EMBEDDED)
        updates, _ = tx.update(zeros, tx.init(EMBEDDED), EMBEDDED)
        return {leaf for leaf, update in tree.by_name(updates).items() if np.any(update)}

    assert decayed() == {"embed/embedding", "Dense_0/kernel"}
    assert decayed(weight_decay_exclude=("^embed/",)) == {"Dense_0/kernel"}
    both = decayed(weight_decay_exclude=("^Dense_0/",), weight_decay_include=("0/bias$",))
    assert both == {"embed/embedding", "Dense_0/bias"}


def adapted(**fields):
    """Return the parameters that have a trust ratio."""
    state = make_optimizer(OptimizerConfig(**fields), 0.1).init(EMBEDDED)
    return {
        leaf for leaf in tree.by_name(EMBEDDED) if f"trust_ratio/{leaf}" in optimizer_metrics(state)
    }


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_patterns_change_which_parameters_are_adapted(name):
    assert adapted(name=name) == {"embed/embedding", "Dense_0/kernel"}
    assert adapted(name=name, trust_ratio_exclude=("^embed/",)) == {"Dense_0/kernel"}
    one_more = adapted(name=name, trust_ratio_include=("0/bias$",))
    assert one_more == {"embed/embedding", "Dense_0/kernel", "Dense_0/bias"}


def test_a_variant_that_adapts_as_it_decays_follows_the_patterns_of_the_decay():
    albert = {"name": "lamb", "variant": "albert", "weight_decay_exclude": ("^embed/",)}
    assert adapted(**albert) == {"Dense_0/kernel"}
    assert adapted(**albert, trust_ratio_include=("^embed/",)) == {
        "embed/embedding",
        "Dense_0/kernel",
    }


@pytest.mark.parametrize("field", ["weight_decay_exclude", "trust_ratio_include"])
def test_a_pattern_that_is_no_regular_expression_is_refused(field):
    config = TrainConfig(optimizer=OptimizerConfig(weight_decay=0.1, **{field: ("(",)}))
    with refused(f"config.optimizer.{field}", ("(",), "value"):
        config.validate()


@pytest.mark.parametrize(
    ("field", "patterns"),
    [
        ("weight_decay_exclude", ("^nothing/",)),
        ("weight_decay_exclude", ("kernel", "embedding")),  # no leaf decays any more
        ("weight_decay_include", ("",)),
        ("trust_ratio_exclude", ("^nothing/",)),
    ],
)
def test_patterns_that_do_not_fit_the_parameters_are_refused(field, patterns):
    check_fits(OptimizerConfig(weight_decay_exclude=("^embed/",)), EMBEDDED)
    with refused(f"optimizer.{field}", patterns, "mismatch"):
        check_fits(OptimizerConfig(**{field: patterns}), EMBEDDED)


def test_runs_and_studies_check_patterns_before_they_compile():
    flag = "--config.optimizer.weight_decay_exclude=('^nothing/',)"
    run = load_config(f"{CONFIGS / 'digits_cnn.py'}:lamb-64", [flag], TrainConfig)
    with refused("config.optimizer.weight_decay_exclude", ("^nothing/",), "mismatch"):
        build_run(run)
    study = load_config(f"{CONFIGS / 'sweeps' / 'digits_limit.py'}:smoke", [], SweepConfig)
    study.arms[0].optimizer.trust_ratio_exclude = ("^nothing/",)
    with refused("config.arms[0].optimizer.trust_ratio_exclude", code="mismatch"):
        make_cells(study, make_problems(study))
