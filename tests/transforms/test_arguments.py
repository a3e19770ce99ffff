"""Bad arguments raise ValueError, at the earliest possible moment, and the message names the argument."""

import copy
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lbopt

NAN, INF = float("nan"), float("inf")
TRUST, MOMENTS = lbopt.scale_by_layerwise_trust_ratio, lbopt.scale_by_lamb_moments
MOMENTUM, RATE = lbopt.scale_by_lars_momentum, lbopt.scale_by_learning_rate
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
    (TRUST, "denominator", {"denominator": "norm_of_product"}),
    *[(MOMENTS, name, {name: bad}) for name in ("b1", "b2") for bad in (1.0, -0.1, 1.5, NAN)],
    *[(MOMENTS, name, {name: bad}) for name in ("eps", "eps_root") for bad in (-1e-8, NAN, INF)],
    *[(MOMENTS, "b2", {"b2": kind(1.5)}) for kind in (np.array, jnp.array)],
    (lbopt.track_ema, "decay", {"decay": jnp.array(1.0)}),
    (lbopt.clip_by_global_norm, "max_norm", {"max_norm": np.array(NAN)}),
    (RATE, "learning_rate", {"learning_rate": jnp.array(-0.1)}),
    *[(MOMENTUM, "momentum", {"momentum": bad}) for bad in (1.0, -0.1, NAN)],
    *[(RATE, "learning_rate", {"learning_rate": bad}) for bad in (-0.1, NAN, INF)],
    *[(lbopt.lamb, "learning_rate", {"learning_rate": bad}) for bad in (-0.1, NAN, INF)],
    *[(lbopt.lamb, name, {"learning_rate": 0.1, name: 1.0}) for name in ("b1", "b2")],
    *[
        (lbopt.lamb, name, {"learning_rate": 0.1, name: -1.0})
        for name in ("eps", "weight_decay", "max_grad_norm")
    ],
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
    with pytest.raises(ValueError, match=rf"^{argument} = .*: (give|use)"):
        build(**options)


@pytest.mark.parametrize(
    ("build", "argument", "options"),
    [
        (TRUST, "trust_coefficient", {"trust_coefficient": NAN}),
        (TRUST, "trust_coefficient", {"trust_coefficient": INF}),
        (TRUST, "trust_ratio_bounds", {"trust_ratio_bounds": 5.0}),
        (RATE, "learning_rate", {"learning_rate": np.float32(-1)}),
        (lbopt.lamb, "max_grad_norm", {"learning_rate": 0.1, "max_grad_norm": 0.0}),
    ],
    ids=["nan", "inf", "no_pair", "numpy_scalar", "zero_clip"],
)
def test_bad_value_of_another_kind(build, argument, options):
    with pytest.raises(ValueError, match=f"^{argument} = "):
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
    tx = lbopt.lamb(lambda count: rate, **options)
    with pytest.raises(ValueError, match=r"^learning_rate = .*: it gives .*; return one number"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("build", [lbopt.lamb, lbopt.lars])
def test_unknown_variant_lists_the_known_ones(build):
    with pytest.raises(ValueError, match=r"^variant = 'mine': use one of paper, .*optax, .*timm"):
        build(0.1, variant="mine")


PARAMS = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}
BAD_MASKS = {
    "selects_nothing": (
        {"dense": {"kernel": False, "bias": False}},
        "selects none of the 2 parameters",
    ),
    "callable_selects_nothing": (
        lambda params: jax.tree.map(lambda _: False, params),
        "selects none of the 2 parameters",
    ),
    "leaf_missing": ({"dense": {"kernel": True}}, "has another structure than params .*dense/bias"),
    "leaf_too_many": (
        {"dense": {"kernel": True, "bias": True, "extra": True}},
        "has another structure than params .*dense/extra",
    ),
    "float": (
        {"dense": {"kernel": 1.0, "bias": True}},
        "at 'dense/kernel' is 1.0: give True or False",
    ),
    "name": (
        {"dense": {"kernel": "no", "bias": True}},
        "at 'dense/kernel' is 'no': give True or False",
    ),
    "number_array": (
        {"dense": {"kernel": np.ones(()), "bias": True}},
        "at 'dense/kernel' is .*: give True or False",
    ),
}


@pytest.mark.parametrize("bad", BAD_MASKS)
@pytest.mark.parametrize("argument", ["weight_decay_mask", "trust_ratio_mask"])
@pytest.mark.parametrize("build", [lbopt.lamb, lbopt.lars])
def test_bad_mask_is_refused_by_init(build, argument, bad):
    mask, message = BAD_MASKS[bad]
    with pytest.raises(ValueError, match=f"^{argument} {message}"):
        build(0.1, weight_decay=0.1, **{argument: mask}).init(PARAMS)


def test_default_mask_on_a_tree_without_weights_says_how_to_go_on():
    with pytest.raises(ValueError, match="trust_ratio_mask=False if no leaf is meant"):
        lbopt.lamb(0.1).init({"dense": {"bias": jnp.ones(3)}})


@pytest.mark.parametrize("build", [lbopt.lamb, lbopt.lars])
def test_update_without_parameters(build):
    tx = build(0.1)
    with pytest.raises(ValueError, match=r"call tx.update\(grads, opt_state, params\)"):
        tx.update(PARAMS, tx.init(PARAMS))


def test_traced_values_are_let_through():
    def first_update(rate, decay, b1):
        tx = lbopt.lamb(rate, b1=b1, weight_decay=decay)
        return tx.update(PARAMS, tx.init(PARAMS), PARAMS)[0]["dense"]["kernel"]

    traced = jax.jit(first_update)(0.1, 0.2, 0.9)
    assert np.allclose(traced, first_update(0.1, 0.2, 0.9), rtol=1e-6, atol=0)


def test_what_was_not_given_stays_so_in_another_process():
    """A sweep that pickles a transform, or a copy of its arguments, has the variant's values."""
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
    with pytest.raises(ValueError, match=r"^[a-z_]+ ") as caught:
        SHOWN[name](bad)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 500


def test_a_number_beyond_all_floats_is_refused():
    with pytest.raises(ValueError, match=r"^learning_rate = 1000"):
        lbopt.lamb(10**400)
