"""Bad arguments are refused at the earliest possible moment, by the name of the argument."""

import copy
import inspect
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import ANY, refused

import lbopt

NAN = float("nan")
INF = float("inf")
TRUST = lbopt.scale_by_layerwise_trust_ratio
MOMENTS = lbopt.scale_by_lamb_moments
MOMENTUM = lbopt.scale_by_lars_momentum
RATE = lbopt.scale_by_learning_rate
BAD_BOUNDS = ((2.0, 1.0), (-1.0, 1.0), (NAN, 1.0), (0.0, 1.0, 2.0))

AT_BUILD = [
    *[
        (TRUST, name, {name: bad})
        for name in ("trust_ratio_bounds", "weight_norm_bounds")
        for bad in BAD_BOUNDS
    ],
    *[(TRUST, "weight_decay", {"weight_decay": bad}) for bad in (-1e-4, NAN, INF)],
    *[(TRUST, "eps", {"eps": bad}) for bad in (-1e-8, NAN)],
    *[(TRUST, "trust_coefficient", {"trust_coefficient": bad}) for bad in (0.0, -1.0)],
    *[(TRUST, "trust_coefficient", {"trust_coefficient": bad}) for bad in (NAN, INF)],
    (TRUST, "trust_ratio_bounds", {"trust_ratio_bounds": 5.0}),
    (TRUST, "denominator", {"denominator": "norm_of_product"}),
    *[(MOMENTS, name, {name: bad}) for name in ("b1", "b2") for bad in (1.0, -0.1, 1.5, NAN)],
    *[(MOMENTS, name, {name: bad}) for name in ("eps", "eps_root") for bad in (-1e-8, NAN, INF)],
    *[(MOMENTS, "b2", {"b2": kind(1.5)}) for kind in (np.array, jnp.array)],
    (lbopt.track_ema, "decay", {"decay": jnp.array(1.0)}),
    (lbopt.clip_by_global_norm, "max_norm", {"max_norm": np.array(NAN)}),
    (RATE, "learning_rate", {"learning_rate": jnp.array(-0.1)}),
    *[(MOMENTUM, "momentum", {"momentum": bad}) for bad in (1.0, -0.1, NAN)],
    *[(RATE, "learning_rate", {"learning_rate": bad}) for bad in (-0.1, NAN, INF)],
    (RATE, "learning_rate", {"learning_rate": np.float32(-1)}),
    *[(lbopt.lamb, "learning_rate", {"learning_rate": bad}) for bad in (-0.1, NAN, INF)],
    *[(lbopt.lamb, name, {"learning_rate": 0.1, name: 1.0}) for name in ("b1", "b2")],
    *[
        (lbopt.lamb, name, {"learning_rate": 0.1, name: -1.0})
        for name in ("eps", "weight_decay", "max_grad_norm")
    ],
    (lbopt.lamb, "max_grad_norm", {"learning_rate": 0.1, "max_grad_norm": 0.0}),
    (lbopt.lamb, "trust_ratio_bounds", {"learning_rate": 0.1, "trust_ratio_bounds": (2.0, 1.0)}),
    (lbopt.lamb, "weight_norm_bounds", {"learning_rate": 0.1, "weight_norm_bounds": (2.0, 1.0)}),
    (lbopt.lamb, "variant", {"learning_rate": 0.1, "variant": "albret"}),
    *[(lbopt.lars, "learning_rate", {"learning_rate": bad}) for bad in (-0.1, NAN, INF)],
    *[
        (lbopt.lars, name, {"learning_rate": 0.1, name: -1.0})
        for name in ("eps", "weight_decay", "momentum", "trust_coefficient")
    ],
    (lbopt.lars, "trust_ratio_bounds", {"learning_rate": 0.1, "trust_ratio_bounds": (2.0, 1.0)}),
    (lbopt.lars, "denominator", {"learning_rate": 0.1, "denominator": "sum"}),
    (lbopt.lars, "variant", {"learning_rate": 0.1, "variant": "tpu_v9"}),
]


@pytest.mark.parametrize(
    ("build", "argument", "options"),
    AT_BUILD,
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_bad_value(build, argument, options):
    bad = options[argument]
    shown = ANY if hasattr(bad, "dtype") else bad  # arrays are shown as numbers
    with refused(argument, shown, "choice" if isinstance(bad, str) else "value"):
        build(**options)


@pytest.mark.parametrize(
    "options", [{}, {"weight_decay_placement": "decoupled"}], ids=["applied", "looked_at"]
)
@pytest.mark.parametrize(
    "rate",
    [np.full(1, 0.1), jnp.ones(3), None, "0.1", 1j],
    ids=["one", "three", "none", "text", "complex"],
)
def test_a_schedule_that_does_not_give_one_number_is_refused(rate, options):
    schedule = lambda count: rate  # noqa: E731
    tx = lbopt.lamb(schedule, **options)
    with refused("learning_rate", schedule, "type"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("build", [lbopt.lamb, lbopt.lars])
def test_unknown_variant_lists_the_known_ones(build):
    with refused("variant", "mine", "choice") as caught:
        build(0.1, variant="mine")
    assert {"paper", "optax", "timm"} <= set(re.findall(r"\w+", caught.value.reason))


PARAMS = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}
BAD_MASKS = {  # name -> (mask, leaf that the field names, code)
    "selects_nothing": ({"dense": {"kernel": False, "bias": False}}, "", "value"),
    "callable_selects_nothing": (
        lambda params: jax.tree.map(lambda _: False, params),
        "",
        "value",
    ),
    "leaf_missing": ({"dense": {"kernel": True}}, "", "type"),
    "leaf_too_many": ({"dense": {"kernel": True, "bias": True, "extra": True}}, "", "type"),
    "float": ({"dense": {"kernel": 1.0, "bias": True}}, "/dense/kernel", "type"),
    "number_in_a_combination": (
        lbopt.weights_only & (lambda params: jax.tree.map(jnp.ndim, params)),
        "/dense/bias",
        "type",
    ),
    "name": ({"dense": {"kernel": "no", "bias": True}}, "/dense/kernel", "type"),
    "number_array": ({"dense": {"kernel": np.ones(()), "bias": True}}, "/dense/kernel", "type"),
}


@pytest.mark.parametrize("bad", BAD_MASKS)
@pytest.mark.parametrize("argument", ["weight_decay_mask", "trust_ratio_mask"])
@pytest.mark.parametrize("build", [lbopt.lamb, lbopt.lars])
def test_bad_mask_is_refused_by_init(build, argument, bad):
    mask, leaf, code = BAD_MASKS[bad]
    with refused(argument + leaf, code=code):
        build(0.1, weight_decay=0.1, **{argument: mask}).init(PARAMS)


def test_default_mask_on_a_tree_without_weights_is_refused():
    with refused("trust_ratio_mask", lbopt.weights_only, "value"):
        lbopt.lamb(0.1).init({"dense": {"bias": jnp.ones(3)}})


@pytest.mark.parametrize("build", [lbopt.lamb, lbopt.lars])
def test_update_without_parameters(build):
    tx = build(0.1)
    with refused("params", None, "missing"):
        tx.update(PARAMS, tx.init(PARAMS))


def test_traced_values_are_let_through():
    def first_update(rate, decay, b1):
        tx = lbopt.lamb(rate, b1=b1, weight_decay=decay)
        return tx.update(PARAMS, tx.init(PARAMS), PARAMS)[0]["dense"]["kernel"]

    traced = jax.jit(first_update)(0.1, 0.2, 0.9)
    assert np.allclose(traced, first_update(0.1, 0.2, 0.9), rtol=1e-6, atol=0)


def test_a_default_stays_one_in_another_process():
    """A sweep that pickles a transform, or a copy of its arguments, gets the variant's values."""
    default = inspect.signature(lbopt.lamb).parameters["max_grad_norm"].default
    assert default.value is None
    for copied in (default, pickle.loads(pickle.dumps(default)), copy.deepcopy(default)):
        tx = lbopt.lamb(0.1, max_grad_norm=copied, variant="albert")
        assert len(tx.init(PARAMS)) == len(lbopt.lamb(0.1, max_grad_norm=1.0).init(PARAMS))
    assert len(tx.init(PARAMS)) > len(lbopt.lamb(0.1, max_grad_norm=None).init(PARAMS))


TABLE_OF_NUMBERS = np.arange(2000.0).reshape(40, 50)
SHOWN = {
    "variant": lambda bad: lbopt.lamb(0.1, debias=bad),
    "flag": lambda bad: lbopt.lamb(0.1, adapt_undecayed=bad),
    "number": lambda bad: lbopt.legw_schedule(bad, 256, 1.0, 512, 2560, 8),
    "choice": lambda bad: lbopt.warmup_schedule(0.1, 2, 10, bad),
    "bits": lambda bad: lbopt.aps(bad, 3),
    "dtype": lambda bad: lbopt.track_ema(ema_dtype=bad),
    "argument of a step": lambda bad: lbopt.make_train_step(
        bad, lbopt.lamb(0.1), lbopt.make_mesh(1)
    ),
    "devices": lbopt.make_mesh,
}


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize(
    "bad", [TABLE_OF_NUMBERS, [TABLE_OF_NUMBERS] * 30, "a\nb" * 900], ids=["array", "list", "text"]
)
def test_a_message_shows_a_long_value_in_one_short_line(name, bad):
    with refused(ANY, ANY, ANY) as caught:
        SHOWN[name](bad)
    assert caught.value.field
    assert len(str(caught.value)) < 500


def test_a_number_beyond_all_floats_is_refused():
    with refused("learning_rate", 10**400, "value"):
        lbopt.lamb(10**400)
