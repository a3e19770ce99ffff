"""LAMB against a float64 NumPy transcription of Algorithm 2 (arXiv 1904.00962), and against optax."""

import jax
import numpy as np
import optax
import pytest

import lbopt

PEAK = 0.03
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
    """Return the parameters after all steps; `params` and `grads` are flat dicts, gradients stacked over steps."""
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
            m_hat, v_hat = (m[name] / (1 - b1**t), v[name] / (1 - b2**t)) if debias else (m[name], v[name])
            u = m_hat / (np.sqrt(v_hat) + eps)
            if name in decayed:
                u = u + wd * w[name]
            ratio = 1.0
            if name in adapted:
                size_w, size_u = np.sqrt((w[name] ** 2).sum()), np.sqrt((u**2).sum())
                if size_w > 0 and size_u > 0:
                    ratio = (size_w if phi is None else min(max(size_w, phi[0]), phi[1])) / size_u
                if bounds is not None:
                    ratio = min(max(ratio, bounds[0]), bounds[1])
            w[name] = w[name] - rate * ratio * u
    return w


def _names(chosen):
    """Return a mask in lbopt's callable form that selects exactly these leaves."""
    return lambda params: jax.tree_util.tree_map_with_path(
        lambda path, _: "/".join(key.key for key in path) in chosen, params
    )


# case -> (options of lbopt.lamb, options of the transcription)
CASES = {
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
    "every_leaf": ({"weight_decay": 0.1, "variant": "optax"}, {"wd": 0.1, "decayed": ALL, "adapted": ALL}),
    "decay_all": ({"weight_decay": 0.1, "weight_decay_mask": None}, {"wd": 0.1, "decayed": ALL}),
    "adapt_all": ({"weight_decay": 0.1, "trust_ratio_mask": None}, {"wd": 0.1, "adapted": ALL}),
    "adapt_none": ({"weight_decay": 0.1, "trust_ratio_mask": False}, {"wd": 0.1, "adapted": set()}),
}


@pytest.fixture(scope="module")
def oracle(problem, flatten):
    params, grads = flatten(problem.params), flatten(problem.grads)
    assert params.keys() == ALL
    return {case: lamb_float64(params, grads, PEAK * problem.rates, **options) for case, (_, options) in CASES.items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "limit"), [(np.float32, 1e-6), (np.float64, 1e-12)], ids=["fp32", "x64"])
def test_fifty_steps_equal_the_paper(case, dtype, limit, oracle, descend, position_errors, movement_errors):
    run = descend(lbopt.lamb, CASES[case][0], PEAK, dtype)
    errors = position_errors(run.last, oracle[case])
    assert max(errors.values()) <= limit, errors
    errors = movement_errors(run, oracle[case])
    assert max(errors.values()) <= limit, errors


def test_every_case_differs_from_every_other(oracle, position_errors):
    cases = list(CASES)
    for i, one in enumerate(cases):
        for other in cases[i + 1 :]:
            assert max(position_errors(oracle[one], oracle[other]).values()) > 1e-3, (one, other)


def test_transcription_sees_a_wrong_decay_and_a_constant_rate(problem, flatten, oracle, position_errors):
    params, grads, rates = flatten(problem.params), flatten(problem.grads), PEAK * problem.rates
    for wrong in (lamb_float64(params, grads, rates, wd=0.101), lamb_float64(params, grads, np.full(50, PEAK), wd=0.1)):
        assert max(position_errors(wrong, oracle["decay"]).values()) > 1e-4


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_variant_optax_equals_optax(weight_decay, descend, position_errors):
    ours = descend(lbopt.lamb, {"weight_decay": weight_decay, "variant": "optax"}, PEAK, np.float64)
    theirs = descend(optax.lamb, {"weight_decay": weight_decay}, PEAK, np.float64)
    errors = position_errors(ours.last, theirs.last)
    assert max(errors.values()) <= 1e-10, errors


def test_decay_mask_of_optax_is_the_decay_mask_alone(descend, position_errors):
    mask = _names(WEIGHTS)
    ours = descend(lbopt.lamb, {"weight_decay": 0.1, "variant": "optax", "weight_decay_mask": mask}, PEAK, np.float64)
    theirs = descend(optax.lamb, {"weight_decay": 0.1, "mask": mask}, PEAK, np.float64)
    errors = position_errors(ours.last, theirs.last)
    assert max(errors.values()) <= 1e-10, errors


def test_variants_differ_on_all_but_the_weights(descend, position_errors):
    paper, every = (descend(lbopt.lamb, CASES[case][0], PEAK, np.float32) for case in ("decay", "every_leaf"))
    errors = position_errors(every.last, paper.last)
    moving = ALL - WEIGHTS - {"idle/bias"}
    assert min(errors[name] for name in moving) > 1e-3, errors
    assert max(errors[name] for name in WEIGHTS) <= 1e-6, errors
