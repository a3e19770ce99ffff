"""LARS against a float64 NumPy transcription of Algorithm 1 (arXiv 1708.03888), and against optax."""

import jax
import numpy as np
import optax
import pytest

import lbopt

PEAK = 0.05
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
    """Return the parameters after all steps; `outside` is the other form, rate and ratio outside the momentum."""
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
    """Return a mask in the callable form that selects exactly these leaves."""
    return lambda params: jax.tree_util.tree_map_with_path(
        lambda path, _: "/".join(key.key for key in path) in chosen, params
    )


# case -> (options of lbopt.lars, options of the transcription); the trust coefficient is large enough to move the layers
CASES = {
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
    "eps": ({"trust_coefficient": 0.05, "weight_decay": 0.1, "eps": 0.5}, {"eta": 0.05, "wd": 0.1, "eps": 0.5}),
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
        {"trust_coefficient": 0.05, "weight_decay": 0.1, "variant": "optax", "denominator": "sum_of_norms"},
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


@pytest.fixture(scope="module")
def oracle(problem, flatten):
    params, grads = flatten(problem.params), flatten(problem.grads)
    assert params.keys() == ALL
    return {case: lars_float64(params, grads, PEAK * problem.rates, **options) for case, (_, options) in CASES.items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "limit"), [(np.float32, 1e-6), (np.float64, 1e-12)], ids=["fp32", "x64"])
def test_fifty_steps_equal_the_paper(case, dtype, limit, oracle, descend, position_errors, movement_errors):
    run = descend(lbopt.lars, CASES[case][0], PEAK, dtype)
    errors = position_errors(run.last, oracle[case])
    assert max(errors.values()) <= limit, errors
    errors = movement_errors(run, oracle[case])
    assert max(errors.values()) <= limit, errors


def test_every_case_differs_from_every_other(oracle, position_errors):
    cases = list(CASES)
    for i, one in enumerate(cases):
        for other in cases[i + 1 :]:
            assert max(position_errors(oracle[one], oracle[other]).values()) > 1e-3, (one, other)


def test_transcription_tells_the_rate_inside_from_outside_the_momentum(problem, flatten, oracle, position_errors):
    other = lars_float64(
        flatten(problem.params), flatten(problem.grads), PEAK * problem.rates, wd=0.1, eta=0.05, outside=True
    )
    errors = position_errors(other, oracle["decay"])
    assert min(errors[name] for name in ALL - {"idle/bias"}) > 1e-4, errors


@pytest.mark.parametrize(
    "options", [{"weight_decay": 0.1}, {"weight_decay": 0.1, "nesterov": True, "eps": 0.01, "momentum": 0.5}]
)
def test_variant_optax_equals_optax(options, descend, position_errors):
    options = {"trust_coefficient": 0.05, **options}
    ours = descend(lbopt.lars, {"variant": "optax", **options}, PEAK, np.float64)
    theirs = descend(optax.lars, options, PEAK, np.float64)
    errors = position_errors(ours.last, theirs.last)
    assert max(errors.values()) <= 1e-10, errors


def test_masks_of_optax_are_the_two_masks(descend, position_errors):
    options = {
        "trust_coefficient": 0.05,
        "weight_decay": 0.1,
        "weight_decay_mask": _names(WEIGHTS),
        "trust_ratio_mask": _names(WEIGHTS | {"slope"}),
    }
    ours = descend(lbopt.lars, {"variant": "optax", **options}, PEAK, np.float64)
    theirs = descend(optax.lars, options, PEAK, np.float64)
    errors = position_errors(ours.last, theirs.last)
    assert max(errors.values()) <= 1e-10, errors


def test_variants_differ_on_weights_by_the_denominator_and_elsewhere_by_the_masks(descend, position_errors):
    def last(**options):
        return descend(lbopt.lars, {"trust_coefficient": 0.05, **options}, PEAK, np.float32).last

    decayed = position_errors(last(weight_decay=0.1, variant="optax"), last(weight_decay=0.1))
    assert min(decayed[name] for name in ALL - {"idle/bias"}) > 1e-4, decayed
    plain = position_errors(last(variant="optax"), last())
    assert max(plain[name] for name in WEIGHTS) <= 1e-6, plain
    assert min(plain[name] for name in ALL - WEIGHTS - {"idle/bias"}) > 1e-4, plain


def test_ratio_of_optax_is_never_smaller(problem):
    tx = {v: lbopt.lars(0.1, 0.1, variant=v, weight_decay_mask=None, trust_ratio_mask=None) for v in ("paper", "optax")}
    gradient = jax.tree.map(lambda g: g[0], problem.grads)
    states = {v: t.update(gradient, t.init(problem.params), problem.params)[1] for v, t in tx.items()}
    paper, every = (lbopt.optimizer_metrics(states[v]) for v in ("paper", "optax"))
    names = {f"trust_ratio/{name}" for name in ("conv/kernel", "dense/kernel", "dense/bias", "slope")}
    assert all(every[name] >= paper[name] * (1 - 1e-6) for name in names)
    assert any(every[name] > paper[name] * 1.01 for name in names)
