"""Each option of LAMB and LARS on every kind of leaf, against a float64 transcription.

The transcription has the same switches. test_variants.py compares the named variants with their
sources; here each option changes alone.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiling import QUICKLY

import lbopt

STEPS = 50
WEIGHTS = {"conv/kernel", "dense/kernel", "fresh/kernel", "idle/kernel", "late/kernel"}
ALL = WEIGHTS | {
    "dense/bias",
    "fresh/bias",
    "idle/bias",
    "BatchNorm_0/scale",
    "BatchNorm_0/bias",
    "slope",
    "temperature",
}
NOT_ZERO_AT_START = ALL - {"fresh/kernel", "fresh/bias", "idle/bias"}


def lamb_float64(
    params,
    grads,
    rates,
    b1=0.9,
    b2=0.999,
    eps=1e-6,
    wd=0.0,
    debias=True,
    clip=None,
    phi=None,
    bounds=None,
    decayed=WEIGHTS,
    adapted=WEIGHTS,
):
    """Return the final parameters from flat dicts; gradients are stacked over steps."""
    w = {name: np.array(value, np.float64) for name, value in params.items()}
    m = {name: np.zeros(value.shape) for name, value in w.items()}
    v = {name: np.zeros(value.shape) for name, value in w.items()}

    for t, rate in enumerate(rates, start=1):
        step = {name: np.array(grads[name][t - 1], np.float64) for name in w}
        if clip is not None:
            total = np.sqrt(sum((g**2).sum() for g in step.values()))
            step = {name: g / max(1.0, total / clip) for name, g in step.items()}

        for name, g in step.items():
            m[name] = b1 * m[name] + (1 - b1) * g
            v[name] = b2 * v[name] + (1 - b2) * g * g
            m_hat, v_hat = (
                (m[name] / (1 - b1**t), v[name] / (1 - b2**t)) if debias else (m[name], v[name])
            )
            u = m_hat / (np.sqrt(v_hat) + eps)
            if name in decayed:
                u = u + wd * w[name]

            ratio = 1.0
            if name in adapted:
                size_w = np.sqrt((w[name] ** 2).sum())
                size_u = np.sqrt((u**2).sum())
                if size_w > 0 and size_u > 0:
                    ratio = (size_w if phi is None else min(max(size_w, phi[0]), phi[1])) / size_u
                if bounds is not None:
                    ratio = min(max(ratio, bounds[0]), bounds[1])

            w[name] = w[name] - rate * ratio * u

    return w


def lars_float64(
    params,
    grads,
    rates,
    wd=0.0,
    beta=0.9,
    eta=0.001,
    eps=0.0,
    nesterov=False,
    bounds=None,
    of_sum=False,
    outside=False,
    decayed=WEIGHTS,
    adapted=WEIGHTS,
):
    """Return the final parameters; `outside` puts rate and ratio outside the momentum."""
    w = {name: np.array(value, np.float64) for name, value in params.items()}
    velocity = {name: np.zeros(value.shape) for name, value in w.items()}
    for t, rate in enumerate(rates):
        for name in w:
            g = np.array(grads[name][t], np.float64)
            decay = wd if name in decayed else 0.0
            d = g + decay * w[name]
            size_w, size_g, size_d = (np.sqrt((x**2).sum()) for x in (w[name], g, d))
            ratio = 1.0
            if name in adapted:
                if size_w > 0 and (size_d if of_sum else size_g) > 0:
                    ratio = eta * size_w / ((size_d if of_sum else size_g + decay * size_w) + eps)
                if bounds is not None:
                    ratio = min(max(ratio, bounds[0]), bounds[1])
            factor = rate * ratio
            velocity[name] = beta * velocity[name] + (1.0 if outside else factor) * d
            move = factor * d + beta * velocity[name] if nesterov else velocity[name]
            w[name] = w[name] - (factor if outside else 1.0) * move
    return w


def _names(chosen):
    """Return a mask in lbopt's callable form that selects exactly these leaves."""
    return lambda params: jax.tree_util.tree_map_with_path(
        lambda path, _: "/".join(key.key for key in path) in chosen, params
    )


# case -> (options of lbopt.lamb, options of the transcription)
LAMB_CASES = {
    "plain": ({}, {}),
    "decay": ({"weight_decay": 0.1}, {"wd": 0.1}),
    "no_debias": ({"weight_decay": 0.1, "debias": False}, {"wd": 0.1, "debias": False}),
    "rates": ({"b1": 0.5, "b2": 0.9, "eps": 1e-3}, {"b1": 0.5, "b2": 0.9, "eps": 1e-3}),
    "b1_zero": ({"b1": 0.0}, {"b1": 0.0}),
    "phi_above": ({"weight_norm_bounds": (0.0, 2.0)}, {"phi": (0.0, 2.0)}),
    "phi_both": (
        {"weight_norm_bounds": (3.0, 5.0), "trust_ratio_mask": _names(NOT_ZERO_AT_START)},
        {"phi": (3.0, 5.0), "adapted": NOT_ZERO_AT_START},
    ),
    "ratio_bounds": ({"trust_ratio_bounds": (0.4, 0.9)}, {"bounds": (0.4, 0.9)}),
    "clip": ({"weight_decay": 0.1, "max_grad_norm": 1.0}, {"wd": 0.1, "clip": 1.0}),
    "every_leaf": (
        {"weight_decay": 0.1, "variant": "optax"},
        {"wd": 0.1, "decayed": ALL, "adapted": ALL},
    ),
    "decay_all": ({"weight_decay": 0.1, "weight_decay_mask": None}, {"wd": 0.1, "decayed": ALL}),
    "adapt_all": ({"weight_decay": 0.1, "trust_ratio_mask": None}, {"wd": 0.1, "adapted": ALL}),
    "adapt_none": ({"weight_decay": 0.1, "trust_ratio_mask": False}, {"wd": 0.1, "adapted": set()}),
}


# The same for lbopt.lars; the trust coefficient is large enough to move the layers.
LARS_CASES = {
    "default_coefficient": ({"weight_decay": 0.1}, {"wd": 0.1}),
    "plain": ({"trust_coefficient": 0.05}, {"eta": 0.05}),
    "decay": ({"trust_coefficient": 0.05, "weight_decay": 0.1}, {"eta": 0.05, "wd": 0.1}),
    "nesterov": (
        {"trust_coefficient": 0.05, "weight_decay": 0.1, "nesterov": True},
        {"eta": 0.05, "wd": 0.1, "nesterov": True},
    ),
    "no_momentum": (
        {"trust_coefficient": 0.05, "weight_decay": 0.1, "momentum": 0.0},
        {"eta": 0.05, "wd": 0.1, "beta": 0.0},
    ),
    "eps": (
        {"trust_coefficient": 0.05, "weight_decay": 0.1, "eps": 0.5},
        {"eta": 0.05, "wd": 0.1, "eps": 0.5},
    ),
    "ratio_bounds": (
        {"trust_coefficient": 0.05, "weight_decay": 0.1, "trust_ratio_bounds": (0.02, 0.1)},
        {"eta": 0.05, "wd": 0.1, "bounds": (0.02, 0.1)},
    ),
    "norm_of_sum": (
        {"trust_coefficient": 0.05, "weight_decay": 0.1, "denominator": "norm_of_sum"},
        {"eta": 0.05, "wd": 0.1, "of_sum": True},
    ),
    "every_leaf": (
        {"trust_coefficient": 0.05, "weight_decay": 0.1, "variant": "optax"},
        {"eta": 0.05, "wd": 0.1, "of_sum": True, "decayed": ALL, "adapted": ALL},
    ),
    "sum_on_every_leaf": (
        {
            "trust_coefficient": 0.05,
            "weight_decay": 0.1,
            "variant": "optax",
            "denominator": "sum_of_norms",
        },
        {"eta": 0.05, "wd": 0.1, "decayed": ALL, "adapted": ALL},
    ),
    "two_masks": (
        {
            "trust_coefficient": 0.05,
            "weight_decay": 0.1,
            "weight_decay_mask": _names({"slope", "conv/kernel"}),
            "trust_ratio_mask": None,
        },
        {"eta": 0.05, "wd": 0.1, "decayed": {"slope", "conv/kernel"}, "adapted": ALL},
    ),
}


# family -> (builder, transcription, cases, peak of the learning rate)
FAMILIES = {
    "lamb": (lbopt.lamb, lamb_float64, LAMB_CASES, 0.03),
    "lars": (lbopt.lars, lars_float64, LARS_CASES, 0.05),
}
CASES = [(family, case) for family, (_, _, cases, _) in FAMILIES.items() for case in cases]


def flatten(tree, prefix=""):
    flat = {}
    for key, value in tree.items():
        flat.update(
            flatten(value, f"{prefix}{key}/")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return flat


@functools.cache
def make_problem():
    """Return fp32 parameters, 50 stacked fp32 gradients, and a learning rate.

    The learning rate rises and falls; it is given as float64 factors.
    """
    rng = np.random.default_rng(20)
    params = {
        "conv": {"kernel": rng.normal(size=(3, 3, 2, 4))},
        "dense": {"kernel": rng.normal(size=(6, 5)), "bias": rng.normal(size=5)},
        "fresh": {"kernel": np.zeros((4, 3)), "bias": np.zeros(3)},
        "idle": {"kernel": rng.normal(size=(3, 4)), "bias": np.zeros(4)},
        "late": {"kernel": rng.normal(size=(2, 3, 4))},
        "BatchNorm_0": {"scale": rng.uniform(0.5, 1.5, size=4), "bias": rng.normal(size=4)},
        "slope": rng.normal(size=7),
        "temperature": rng.normal(size=()),
    }
    params = jax.tree.map(np.float32, params)

    size = 10.0 ** rng.uniform(-2, 0, size=STEPS)  # the global norm passes 1 upwards and downwards
    grads = jax.tree.map(
        lambda w: np.float32(
            (size * rng.normal(size=(*w.shape, STEPS))).T.reshape(STEPS, *w.shape)
        ),
        params,
    )

    grads["idle"] = jax.tree.map(np.zeros_like, grads["idle"])
    grads["late"]["kernel"][:7] = 0

    t = np.arange(STEPS)
    rates = np.where(t < 10, (t + 1) / 10, ((STEPS - t) / (STEPS - 10)) ** 2)

    return types.SimpleNamespace(params=params, grads=grads, rates=rates)


@functools.cache
def oracle(family, case, **wrong):
    """Return the final parameters of the transcription."""
    _, transcription, cases, peak = FAMILIES[family]
    problem = make_problem()
    params = flatten(problem.params)
    grads = flatten(problem.grads)
    assert params.keys() == ALL
    return transcription(params, grads, peak * problem.rates, **{**cases[case][1], **wrong})


def descend(family, case, dtype):
    """Run the problem in a dtype and return results in float64.

    `last`: the final parameters; `moved`: the sum of all updates; `path`: the sum of the norms of a
    leaf's updates.
    """
    build, _, cases, peak = FAMILIES[family]
    problem = make_problem()
    with jax.enable_x64(dtype == np.float64):
        params, grads = jax.tree.map(
            lambda x: jnp.asarray(x, dtype), (problem.params, problem.grads)
        )
        table = jnp.asarray(peak * problem.rates, dtype)
        tx = build(lambda count: table[count], **cases[case][0])

        def step(carry, gradient):
            params, state = carry
            updates, state = tx.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), updates

        run = jax.jit(lambda p, g: jax.lax.scan(step, (p, tx.init(p)), g), compiler_options=QUICKLY)
        (last, _), updates = run(params, grads)
        assert all(leaf.dtype == dtype for leaf in jax.tree.leaves((last, updates)))
        last, updates = (
            flatten(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree))
            for tree in (last, updates)
        )
    moved = {name: steps.sum(0) for name, steps in updates.items()}
    path = {
        name: np.linalg.norm(steps.reshape(STEPS, -1), axis=1).sum()
        for name, steps in updates.items()
    }
    return types.SimpleNamespace(last=last, moved=moved, path=path)


def position_errors(last, expected):
    """Return ||w - expected|| / ||expected|| per leaf, 0 where both are equal."""
    assert last.keys() == expected.keys()
    return {
        name: relative(last[name] - leaf, np.linalg.norm(np.ravel(leaf)))
        for name, leaf in expected.items()
    }


def movement_errors(run, expected):
    """Return ||sum of updates - the expected movement|| / length of the path, per leaf.

    The sum of updates excludes the rounding of parameters at every step, and the path does not
    shrink where steps cancel. The measure is therefore a relative error of the steps themselves.
    """
    first = flatten(make_problem().params)
    return {
        name: relative(run.moved[name] - (leaf - first[name]), run.path[name])
        for name, leaf in expected.items()
    }


def relative(difference, scale):
    size = np.linalg.norm(np.ravel(difference))
    return 0.0 if size == 0 else (size / scale if scale > 0 else np.inf)


@pytest.mark.everyday(
    "fp32-lamb-plain",
    "fp32-lamb-clip",
    "fp32-lamb-rates",
    "fp32-lamb-b1_zero",
    "fp32-lamb-every_leaf",
    "fp32-lamb-decay",
    "fp32-lamb-phi_above",
    "fp32-lamb-adapt_none",
    "fp32-lamb-ratio_bounds",
    "x64-lamb-no_debias",
    "x64-lamb-phi_both",
    "fp32-lars-plain",
    "fp32-lars-two_masks",
    "fp32-lars-sum_on_every_leaf",
    "fp32-lars-eps",
    "fp32-lars-no_momentum",
    "fp32-lars-default_coefficient",
    "x64-lars-nesterov",
    "x64-lars-norm_of_sum",
)
@pytest.mark.parametrize(("family", "case"), CASES)
@pytest.mark.parametrize(
    ("dtype", "limit"), [(np.float32, 1e-6), (np.float64, 1e-12)], ids=["fp32", "x64"]
)
def test_fifty_steps_equal_the_transcription(family, case, dtype, limit):
    run = descend(family, case, dtype)
    expected = oracle(family, case)
    for errors in (position_errors(run.last, expected), movement_errors(run, expected)):
        assert max(errors.values()) <= limit, errors


@pytest.mark.parametrize("family", FAMILIES)
def test_every_case_differs_from_every_other(family):
    cases = list(FAMILIES[family][2])
    for i, one in enumerate(cases):
        for other in cases[i + 1 :]:
            errors = position_errors(oracle(family, one), oracle(family, other))
            assert max(errors.values()) > 1e-3, (one, other)


def test_transcriptions_see_a_wrong_decay_and_the_rate_outside_the_momentum():
    for family, wrong in (("lamb", {"wd": 0.101}), ("lars", {"outside": True})):
        errors = position_errors(oracle(family, "decay", **wrong), oracle(family, "decay"))
        assert max(errors.values()) > 1e-4, (family, errors)


def test_norm_of_the_sum_is_never_larger_than_the_sum_of_norms():
    problem = make_problem()
    gradient = jax.tree.map(lambda g: g[0], problem.grads)
    ratios = {}
    for denominator in ("sum_of_norms", "norm_of_sum"):
        tx = lbopt.lars(
            0.1, 0.1, denominator=denominator, weight_decay_mask=None, trust_ratio_mask=None
        )
        ratios[denominator] = lbopt.optimizer_metrics(
            tx.update(gradient, tx.init(problem.params), problem.params)[1]
        )
    names = {
        f"trust_ratio/{name}" for name in ("conv/kernel", "dense/kernel", "dense/bias", "slope")
    }
    quotients = [ratios["norm_of_sum"][name] / ratios["sum_of_norms"][name] for name in names]
    assert min(quotients) >= 1 - 1e-6
    assert max(quotients) > 1.01
