"""Options that contradict each other, trees that do not fit, and options that would do nothing."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusal import ANY, refused

import lbopt

PARAMS = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}
TRUST = lbopt.scale_by_layerwise_trust_ratio

CONTRADICTIONS = {
    "clip_without_rate": (lambda: TRUST(clip_mode="clip"), "clip_mode", "clip", "conflict"),
    "clip_and_bounds": (
        lambda: lbopt.lars(0.1, variant="nvcaffe", trust_ratio_bounds=(0.0, 1.0)),
        "clip_mode",
        "clip",
        "conflict",
    ),
    "decoupled_without_rate": (
        lambda: TRUST(weight_decay_placement="decoupled"),
        "weight_decay_placement",
        "decoupled",
        "conflict",
    ),
    "decay_nowhere": (
        lambda: lbopt.lars(0.1, weight_decay_placement="norm_only", denominator="gradient_only"),
        "weight_decay_placement",
        "norm_only",
        "conflict",
    ),
    "ratio_outside_rate_inside": (
        lambda: lbopt.lars(0.1, trust_ratio_placement="outside"),
        "trust_ratio_placement",
        "outside",
        "conflict",
    ),
    "norm_of_momentum_inside_it": (
        lambda: lbopt.lars(0.1, denominator="momentum"),
        "denominator",
        "momentum",
        "conflict",
    ),
    "adapt_only_what_nothing_is": (
        lambda: lbopt.lamb(0.1, variant="apex", weight_decay_mask=False),
        "adapt_undecayed",
        False,
        "conflict",
    ),
    "lamb_norm_only": (
        lambda: lbopt.lamb(0.1, weight_decay_placement="norm_only"),
        "weight_decay_placement",
        "norm_only",
        "choice",
    ),
    "lars_gradient": (
        lambda: lbopt.lars(0.1, weight_decay_placement="gradient"),
        "weight_decay_placement",
        "gradient",
        "choice",
    ),
    "placement": (
        lambda: lbopt.lars(0.1, learning_rate_placement="before"),
        "learning_rate_placement",
        "before",
        "choice",
    ),
    "denominator": (lambda: TRUST(denominator="sum"), "denominator", "sum", "choice"),
    "debias": (lambda: lbopt.lamb(0.1, debias="yes"), "debias", "yes", "value"),
    "clip_mode": (lambda: lbopt.lars(0.1, clip_mode="cap"), "clip_mode", "cap", "choice"),
    "per": (
        lambda: lbopt.lamb(0.1, gradient_normalization="leaf"),
        "gradient_normalization",
        "leaf",
        "choice",
    ),
    "bounds": (
        lambda: lbopt.lamb(0.1, trust_ratio_bounds=(2.0, 1.0)),
        "trust_ratio_bounds",
        (2.0, 1.0),
        "value",
    ),
    "phi": (
        lambda: lbopt.lamb(0.1, weight_norm_bounds=(-1.0, 1.0)),
        "weight_norm_bounds",
        (-1.0, 1.0),
        "value",
    ),
    "update_bounds": (
        lambda: TRUST(update_bounds=(1.0, -1.0)),
        "update_bounds",
        (1.0, -1.0),
        "value",
    ),
    "zero_norm": (lambda: lbopt.lamb(0.1, zero_norm_ratio=-1.0), "zero_norm_ratio", -1.0, "value"),
    "mu_dtype": (lambda: lbopt.lamb(0.1, mu_dtype="int8"), "mu_dtype", "int8", "value"),
    "momentum_dtype": (
        lambda: lbopt.lars(0.1, momentum_dtype="half a byte"),
        "momentum_dtype",
        "half a byte",
        "value",
    ),
    "dampening": (lambda: lbopt.lars(0.1, dampening=1.0), "dampening", 1.0, "value"),
    "clip_norm": (lambda: lbopt.clip_by_global_norm(None), "max_norm", None, "value"),
    "lamb_clip_eps": (
        lambda: lbopt.lamb(0.1, variant="nus", weight_decay=0.1, max_grad_norm_eps=-1.0),
        "max_grad_norm_eps",
        -1.0,
        "value",
    ),
    "stage": (
        lambda: lbopt.lamb(0.1, gradient_normalization_stage="first"),
        "gradient_normalization_stage",
        "first",
        "choice",
    ),
    "decay_into_the_velocity": (
        lambda: lbopt.lars(0.1, weight_decay_placement="decoupled"),
        "weight_decay_placement",
        "decoupled",
        "conflict",
    ),
    "adapt_as_nothing": (
        lambda: lbopt.lamb(0.1, variant="albert", weight_decay_mask=False),
        "trust_ratio_mask",
        "as_weight_decay",
        "conflict",
    ),
    "rate_as_text": (lambda: lbopt.lamb("0.1"), "learning_rate", "0.1", "value"),
    "no_rate": (lambda: lbopt.lars(None), "learning_rate", None, "value"),
    "decay_as_text": (lambda: lbopt.lamb(0.1, weight_decay="0.1"), "weight_decay", "0.1", "value"),
    "decay_as_list": (lambda: lbopt.lars(0.1, weight_decay=[0.1]), "weight_decay", [0.1], "value"),
    "decay_as_flag": (lambda: lbopt.lamb(0.1, weight_decay=True), "weight_decay", True, "value"),
    "b1_class": (lambda: lbopt.lamb(0.1, b1=np.float32), "b1", np.float32, "value"),
    "b1_class_of_jax": (lambda: lbopt.lamb(0.1, b1=jnp.float32), "b1", jnp.float32, "value"),
    "b1_none": (lambda: lbopt.lamb(0.1, b1=None), "b1", None, "value"),
    "bound_as_text": (
        lambda: lbopt.lamb(0.1, trust_ratio_bounds=(0.0, "b")),
        "trust_ratio_bounds",
        (0.0, "b"),
        "value",
    ),
    "bound_none": (
        lambda: lbopt.lamb(0.1, trust_ratio_bounds=(None, 1.0)),
        "trust_ratio_bounds",
        (None, 1.0),
        "value",
    ),
    "nesterov_as_text": (lambda: lbopt.lars(0.1, nesterov="no"), "nesterov", "no", "value"),
    "averaging_as_text": (
        lambda: lbopt.lamb(0.1, grad_averaging="no"),
        "grad_averaging",
        "no",
        "value",
    ),
    "debias_as_number": (lambda: lbopt.lamb(0.1, debias=1), "debias", 1, "value"),
    "dampening_as_text": (
        lambda: lbopt.lars(0.1, dampening="average"),
        "dampening",
        "average",
        "value",
    ),
    "variant_as_list": (
        lambda: lbopt.lamb(0.1, variant=["albert"]),
        "variant",
        ["albert"],
        "choice",
    ),
    "ramp": (lambda: lbopt.track_ema(ramp="no"), "ramp", "no", "value"),
    "guard_nothing": (lambda: lbopt.skip_bad_updates(None), "inner", None, "type"),
    "ratio_of_nothing": (
        lambda: lbopt.scale_by_layerwise_trust_ratio(inner=optax.sgd),
        "inner",
        optax.sgd,
        "type",
    ),
    "aggregate_before_nothing": (lambda: lbopt.aggregate(lbopt.aps(), 0.1, 2), "tx", 0.1, "type"),
    "aggregate_by_nothing": (
        lambda: lbopt.aggregate(optax.sgd(0.1), optax.sgd(0.1), 2),
        "aggregator",
        ANY,
        "type",
    ),
    "state_of_nothing": (lambda: lbopt.TrainState.create({}, {}, None), "tx", None, "type"),
    "spike_as_text": (
        lambda: lbopt.skip_bad_updates(optax.sgd(0.1), spike_factor="3"),
        "spike_factor",
        "3",
        "value",
    ),
    "clip_eps": (lambda: lbopt.clip_by_global_norm(1.0, -1.0), "eps", -1.0, "value"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_refused_when_it_is_built(case):
    build, field, value, code = CONTRADICTIONS[case]
    with refused(field, value, code):
        build()


BUILD = [lbopt.lamb, lbopt.lans, lbopt.lars]


@pytest.mark.parametrize("build", BUILD)
def test_masks_and_stacks_that_do_not_fit_the_parameters(build):
    select = lbopt.select_paths("attention")
    stacked = lbopt.stacked_paths("layers")
    cases = [
        ("weight_decay_mask", select, "weight_decay_mask", select, "value"),
        ("trust_ratio_mask", lbopt.exclude_paths("dense"), "trust_ratio_mask", ANY, "value"),
        ("stacked", lambda name, leaf: 2 * name.endswith("bias"), "stacked/dense/bias", 2, "value"),
        ("stacked", stacked, "stacked", stacked, "value"),
        ("stacked", "dense", "stacked", "dense", "type"),
        ("trust_ratio_mask", 1, "trust_ratio_mask", 1, "type"),
        ("sharded_mask", lbopt.weights_only, "sharded_mask", lbopt.weights_only, "conflict"),
    ]
    for argument, given, field, value, code in cases:
        with refused(field, value, code):
            build(0.1, **{argument: given}).init(PARAMS)


@pytest.mark.parametrize("build", BUILD)
@pytest.mark.parametrize(
    ("updates", "places"),
    [
        ({"dense": {"kernel": jnp.ones((2, 3))}}, "dense/bias"),
        ({"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}, "more": jnp.ones(1)}, "more"),
        ([jnp.ones((2, 3)), jnp.ones(3)], "0, 1, dense/bias, dense/kernel"),
    ],
    ids=["missing", "more", "list"],
)
def test_gradients_of_another_tree(build, updates, places):
    tx = build(0.1)
    with refused("updates", code="type") as caught:
        tx.update(updates, tx.init(PARAMS), PARAMS)
    assert re.search(rf"\w {places};", caught.value.reason)


@pytest.mark.parametrize("build", BUILD)
def test_gradients_of_other_shapes(build):
    tx = build(0.1)
    for shape in ((3,), (1, 3), (3, 2)):
        updates = {"dense": {"kernel": jnp.ones(shape), "bias": jnp.ones(3)}}
        with refused("updates/dense/kernel", code="type"):
            tx.update(updates, tx.init(PARAMS), PARAMS)


def test_only_the_finished_optimizers_know_the_mask_of_the_decay():
    for build in (TRUST, lambda **options: lbopt.lans(0.1, **options)):
        with refused("trust_ratio_mask", "as_weight_decay", "type"):
            build(trust_ratio_mask="as_weight_decay").init(PARAMS)


def test_masks_without_a_leaf_in_common_leave_nothing_to_adapt():
    adapted = lbopt.select_roles("weight")
    tx = lbopt.lamb(
        0.1,
        variant="apex",
        weight_decay_mask=lbopt.select_roles("bias"),
        trust_ratio_mask=adapted,
    )
    with refused("trust_ratio_mask", adapted, "conflict"):
        tx.init(PARAMS)


@pytest.mark.parametrize("build", BUILD)
def test_leaves_that_are_no_floating_point_arrays(build):
    params = {"dense": {"kernel": jnp.ones((2, 3)), "count": jnp.ones(3, bool)}}
    with refused("params/dense/count", code="type"):
        build(0.1).init(params)
    mask = {"dense": {"kernel": True, "count": False}}
    optax.masked(build(0.1), mask).init(params)


TRANSFORMS = {
    "lamb": lbopt.lamb(0.1),
    "lans": lbopt.lans(0.1),
    "lars": lbopt.lars(0.1),
    "ema": lbopt.track_ema(),
    "monitor": lbopt.monitor_layers(),
    "lamb_l2": lbopt.lamb(0.1, weight_decay_placement="gradient"),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_no_parameters(name):
    tx = TRANSFORMS[name]
    with refused("params", None, "missing"):
        tx.update(PARAMS, tx.init(PARAMS))


@pytest.mark.parametrize(
    ("build", "variant", "what"),
    [
        (lbopt.lamb, "apex", "Adam"),
        (lbopt.lamb, "timm", "Adam"),
        (lbopt.lamb, "nus", "Adam"),
        (lbopt.lamb, "you_rn50", "Adam"),
        (lbopt.lars, "timm", "momentum SGD"),
    ],
)
def test_no_decay_turns_some_variants_into_another_optimizer_and_they_say_so(build, variant, what):
    with pytest.warns(UserWarning, match=rf'variant="{variant}".* weight_decay\b.* {what}\b'):
        tx = build(0.1, weight_decay=0.0, variant=variant)
    assert not [name for name in lbopt.optimizer_metrics(tx.init(PARAMS)) if "trust_ratio" in name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(0.1, weight_decay=0.0, variant=variant, adapt_undecayed=True)
        build(0.1, weight_decay=0.0, variant=variant, trust_ratio_mask=False)
        build(0.1, weight_decay=0.1, variant=variant)


def test_decay_that_is_traced_switches_the_ratio_by_its_value():
    gradient = {"dense": {"kernel": jnp.full((2, 3), 0.5), "bias": jnp.ones(3)}}

    @jax.jit
    def first(decay):
        tx = lbopt.lamb(0.1, variant="apex", weight_decay=decay, max_grad_norm=None)
        return tx.update(gradient, tx.init(PARAMS), PARAMS)[0]

    adam = optax.adam(0.1, eps=1e-6)
    expected, _ = adam.update(gradient, adam.init(PARAMS))
    assert jnp.allclose(first(0.0)["dense"]["kernel"], expected["dense"]["kernel"], rtol=1e-5)
    assert jnp.allclose(
        jnp.linalg.norm(first(0.01)["dense"]["kernel"]), 0.1 * jnp.sqrt(6.0), rtol=1e-5
    )
