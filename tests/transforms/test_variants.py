"""Every named LAMB and LARS, and LANS, for 200 steps against tests/oracles."""

import functools
import itertools

import jax
import jax.numpy as jnp
import lamb_sources
import lars_sources
import numpy as np
import optax
import pytest
from compiling import QUICKLY

import lbopt
from lbopt.transforms._variants import LAMB, LARS

STEPS = 200
NORM = {"lamb": "layer_norm", "lars": "batch_normalization"}
CLIP_GRAD_NORM_EPS = 1e-6
"""pytorch/pytorch@01a57d87bd4826d1f528b2dc47360a8087b34f5a:torch/nn/utils/clip_grad.py"""


def norm_or_bias(name):
    return "norm" in name or name.endswith("bias")


def not_a_weight(name):
    return norm_or_bias(name) or name in ("gain", "slope")


def by_24(name, leaf):
    """MLPerf's code has this rule; a user states it, and lbopt never guesses it."""
    return leaf.ndim > 1 and leaf.shape[0] == 24


# name -> (variant, our options, the source's transcription with the same options)
LAMB_CASES = {
    "paper": ("paper", {}, lambda wd: lamb_sources.paper(weight_decay=wd, skipped=not_a_weight)),
    "optax": ("optax", {}, lambda wd: lamb_sources.optax(weight_decay=wd)),
    "tfa": ("tfa", {}, lambda wd: lamb_sources.tfa(weight_decay=wd)),
    "albert": ("albert", {}, lambda wd: lamb_sources.albert(weight_decay=wd)),
    "you_rn50": ("you_rn50", {}, lambda wd: lamb_sources.you_rn50(weight_decay=wd)),
    "you_mnist": ("you_mnist", {}, lambda wd: lamb_sources.you_mnist(weight_decay=wd)),
    "apex": ("apex", {}, lambda wd: lamb_sources.apex(weight_decay=wd, no_decay=norm_or_bias)),
    "nvlamb": (
        "nvlamb",
        {},
        lambda wd: lamb_sources.nvlamb(weight_decay=wd, no_decay=norm_or_bias),
    ),
    "timm": ("timm", {}, lambda wd: lamb_sources.timm(weight_decay=wd, no_decay=not_a_weight)),
    "nus": (
        "nus",
        {},
        lambda wd: lamb_sources.nus(
            weight_decay=wd,
            no_decay=norm_or_bias,
            clip_eps=CLIP_GRAD_NORM_EPS,
        ),
    ),
    "cybertron": ("cybertron", {}, lambda wd: lamb_sources.cybertron(weight_decay=wd)),
    "mlperf_tf": (
        "mlperf_tf",
        {"stacked": by_24},
        lambda wd: lamb_sources.mlperf_tf(weight_decay=wd),
    ),
    "mlperf_jax": (
        "mlperf_jax",
        {"stacked": by_24},
        lambda wd: lamb_sources.mlperf_jax(weight_decay=wd),
    ),
    "flax": ("flax", {}, lambda wd: lamb_sources.flax(weight_decay=wd)),
}
LAMB_OPTIONS = {
    "paper_phi": (
        "paper",
        {"weight_norm_bounds": (0.0, 3.0)},
        lambda wd: lamb_sources.paper(weight_decay=wd, skipped=not_a_weight, phi=(0.0, 3.0)),
    ),
    "optax_eps_root": (
        "optax",
        {"eps_root": 1e-3, "b1": 0.8, "b2": 0.95, "eps": 1e-2},
        lambda wd: lamb_sources.optax(weight_decay=wd, eps_root=1e-3, b1=0.8, b2=0.95, eps=1e-2),
    ),
    "optax_mask": (
        "optax",
        {"weight_decay_mask": lbopt.weights_only},
        lambda wd: lamb_sources.optax(weight_decay=wd, decayed=lambda name: not not_a_weight(name)),
    ),
    "tfa_mask": (
        "tfa",
        {"weight_decay_mask": lbopt.weights_only},
        lambda wd: lamb_sources.tfa(weight_decay=wd, excluded_from_decay=not_a_weight),
    ),
    "tfa_two_masks": (
        "tfa",
        {"weight_decay_mask": lbopt.weights_only, "trust_ratio_mask": lbopt.exclude_roles("bias")},
        lambda wd: lamb_sources.tfa(
            weight_decay=wd,
            excluded_from_decay=not_a_weight,
            excluded_from_adaptation=lambda name: name.endswith("bias") and "norm" not in name,
        ),
    ),
    "apex_l2": (
        "apex",
        {"weight_decay_placement": "gradient"},
        lambda wd: lamb_sources.apex(weight_decay=wd, no_decay=norm_or_bias, adam_w_mode=False),
    ),
    "apex_sum": (
        "apex",
        {"grad_averaging": False, "debias": False},
        lambda wd: lamb_sources.apex(
            weight_decay=wd, no_decay=norm_or_bias, grad_averaging=False, bias_correction=False
        ),
    ),
    "nvlamb_no_clip": (
        "nvlamb",
        {"max_grad_norm": None},
        lambda wd: lamb_sources.nvlamb(weight_decay=wd, no_decay=norm_or_bias, max_grad_norm=None),
    ),
    "nvlamb_l2": (
        "nvlamb",
        {"weight_decay_placement": "gradient"},
        lambda wd: lamb_sources.nvlamb(weight_decay=wd, no_decay=norm_or_bias, adam_w_mode=False),
    ),
    "timm_trust_clip": (
        "timm",
        {"trust_ratio_bounds": (0.0, 1.0)},
        lambda wd: lamb_sources.timm(weight_decay=wd, no_decay=not_a_weight, trust_clip=True),
    ),
    "timm_always_adapt": (
        "timm",
        {"adapt_undecayed": True, "max_grad_norm": 2.0},
        lambda wd: lamb_sources.timm(
            weight_decay=wd, no_decay=not_a_weight, always_adapt=True, max_grad_norm=2.0
        ),
    ),
    "timm_decoupled": (
        "timm",
        {"weight_decay_placement": "decoupled"},
        lambda wd: lamb_sources.timm(weight_decay=wd, no_decay=not_a_weight, decoupled_decay=True),
    ),
    "timm_no_clip": (
        "timm",
        {"max_grad_norm": None},
        lambda wd: lamb_sources.timm(weight_decay=wd, no_decay=not_a_weight, max_grad_norm=None),
    ),
    "nus_flag": (
        "nus",
        {"debias": "in_state"},
        lambda wd: lamb_sources.nus(
            weight_decay=wd,
            no_decay=norm_or_bias,
            bias_correction=True,
            clip_eps=CLIP_GRAD_NORM_EPS,
        ),
    ),
    "cybertron_adam": (
        "cybertron",
        {"trust_ratio_mask": False},
        lambda wd: lamb_sources.cybertron(weight_decay=wd, adam=True),
    ),
}
LANS_CASES = {
    "lans": (None, {}, lambda wd: lamb_sources.lans(weight_decay=wd, skipped=not_a_weight)),
    "lans_betas": (
        None,
        {"b1": 0.7, "b2": 0.99, "eps": 1e-3},
        lambda wd: lamb_sources.lans(
            weight_decay=wd, skipped=not_a_weight, b1=0.7, b2=0.99, eps=1e-3
        ),
    ),
}
ETA = {"trust_coefficient": 0.01}
LARS_CASES = {
    "paper": (
        "paper",
        ETA,
        lambda wd: lars_sources.paper(weight_decay=wd, **ETA, skipped=not_a_weight),
    ),
    "lamb_paper": (
        "lamb_paper",
        ETA,
        lambda wd: lars_sources.lamb_paper(weight_decay=wd, **ETA, skipped=not_a_weight),
    ),
    "contrib_2018": (
        "contrib_2018",
        ETA,
        lambda wd: lars_sources.contrib_2018(weight_decay=wd, **ETA),
    ),
    "tpu": ("tpu", ETA, lambda wd: lars_sources.tpu(weight_decay=wd, **ETA)),
    "mlperf_tf2": ("mlperf_tf2", ETA, lambda wd: lars_sources.mlperf_tf2(weight_decay=wd, **ETA)),
    "flax": ("flax", ETA, lambda wd: lars_sources.flax(weight_decay=wd, **ETA)),
    "optax": ("optax", ETA, lambda wd: lars_sources.optax(weight_decay=wd, **ETA)),
    "nus": ("nus", ETA, lambda wd: lars_sources.nus(weight_decay=wd, **ETA, skipped=norm_or_bias)),
    "timm": (
        "timm",
        ETA,
        lambda wd: lars_sources.timm(weight_decay=wd, **ETA, skipped=not_a_weight),
    ),
    "nvcaffe": ("nvcaffe", ETA, lambda wd: lars_sources.nvcaffe(weight_decay=wd, **ETA)),
}
LARS_OPTIONS = {
    "lamb_paper_phi": (
        "lamb_paper",
        {**ETA, "weight_norm_bounds": (0.5, 3.0), "momentum": 0.5},
        lambda wd: lars_sources.lamb_paper(
            weight_decay=wd, **ETA, phi=(0.5, 3.0), momentum=0.5, skipped=not_a_weight
        ),
    ),
    "contrib_2018_nesterov": (
        "contrib_2018",
        {**ETA, "nesterov": True, "eps": 1e-2},
        lambda wd: lars_sources.contrib_2018(weight_decay=wd, **ETA, nesterov=True, eps=1e-2),
    ),
    "tpu_nesterov": (
        "tpu",
        {**ETA, "nesterov": True},
        lambda wd: lars_sources.tpu(weight_decay=wd, **ETA, nesterov=True),
    ),
    "tpu_no_momentum": (
        "tpu",
        {**ETA, "momentum": 0.0},
        lambda wd: lars_sources.tpu(weight_decay=wd, **ETA, momentum=0.0),
    ),
    "flax_nesterov": (
        "flax",
        {**ETA, "nesterov": True},
        lambda wd: lars_sources.flax(weight_decay=wd, **ETA, nesterov=True),
    ),
    "optax_nesterov": (
        "optax",
        {**ETA, "nesterov": True, "eps": 1e-2},
        lambda wd: lars_sources.optax(weight_decay=wd, **ETA, nesterov=True, eps=1e-2),
    ),
    "optax_masks": (
        "optax",
        {
            **ETA,
            "weight_decay_mask": lbopt.weights_only,
            "trust_ratio_mask": lbopt.exclude_roles("norm", "bias"),
        },
        lambda wd: lars_sources.optax(
            weight_decay=wd,
            **ETA,
            decayed=lambda name: not not_a_weight(name),
            adapted=lambda name: not norm_or_bias(name),
        ),
    ),
    "nus_32k": (
        "nus",
        {**ETA, "eps": 0.0},
        lambda wd: lars_sources.nus(weight_decay=wd, **ETA, eps=0.0, skipped=norm_or_bias),
    ),
    "timm_dampening": (
        "timm",
        {**ETA, "dampening": 0.4},
        lambda wd: lars_sources.timm(weight_decay=wd, **ETA, dampening=0.4, skipped=not_a_weight),
    ),
    "timm_trust_clip": (
        "timm",
        {**ETA, "clip_mode": "clip"},
        lambda wd: lars_sources.timm(weight_decay=wd, **ETA, trust_clip=True, skipped=not_a_weight),
    ),
    "timm_always_adapt": (
        "timm",
        {**ETA, "adapt_undecayed": True},
        lambda wd: lars_sources.timm(
            weight_decay=wd, **ETA, always_adapt=True, skipped=not_a_weight
        ),
    ),
    "nvcaffe_scale": (
        "nvcaffe",
        {"trust_coefficient": 1e-4, "clip_mode": "scale"},
        lambda wd: lars_sources.nvcaffe(weight_decay=wd, trust_coefficient=1e-4, mode="scale"),
    ),
}
FAMILIES = {
    "lamb": (lbopt.lamb, LAMB_CASES | LAMB_OPTIONS, 0.02),
    "lans": (lbopt.lans, LANS_CASES, 0.02),
    "lars": (lbopt.lars, LARS_CASES | LARS_OPTIONS, 0.5),
}
CASES = [(family, case) for family, (_, cases, _) in FAMILIES.items() for case in cases]
DECAYS = [0.0, 0.1]
NO_RATIO_LEFT = (
    "ignore:.*adapts no layer:UserWarning"  # said by weight_decay = 0; see test_arguments
)


# Without decay in the denominator, a ratio of 1e11 multiplies a sizeable update wd w, and the leaf
# explodes.
LEFT_OUT = {"nvcaffe_scale": {"tiny/kernel"}}


def problem(family, case=None):
    """Return `whole_problem`, without the leaves that explode in this case."""
    weights, grads, rates = whole_problem(family)
    kept = [name for name in weights if name not in LEFT_OUT.get(case, ())]
    return {name: weights[name] for name in kept}, {name: grads[name] for name in kept}, rates


@functools.cache
def whole_problem(family):
    """Return flat {name: first weights}, {name: [steps, ...] gradients} and rates of one family."""
    rng = np.random.default_rng(7)
    norm = NORM["lars" if family == "lars" else "lamb"]
    shapes = {
        "embed/embedding": (7, 5),
        "dense/kernel": (6, 5),
        "dense/bias": (5,),
        f"{norm}/scale": (5,),
        f"{norm}/bias": (5,),
        "fresh/kernel": (4, 3),
        "fresh/bias": (3,),
        "idle/kernel": (3, 4),
        "idle/bias": (4,),
        "tiny/kernel": (4, 4),
        "large/kernel": (6, 6),
        "spiky/kernel": (4, 3),
        "spiky/bias": (3,),
        "stack/kernel": (24, 3, 2),
        "stack/bias": (24, 2),
        f"stack/{norm}/scale": (24, 2),
        "conv/kernel": (2, 2, 3, 2),
        "slope": (7,),
        "gain": (),
    }

    weights = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    weights |= {
        name: np.zeros(shapes[name]) for name in ("fresh/kernel", "fresh/bias", "idle/bias")
    }
    weights["large/kernel"] *= 5  # a norm of 30
    weights["stack/kernel"] *= np.geomspace(0.01, 100, 24).reshape(24, 1, 1)
    weights["stack/bias"] *= np.geomspace(100, 0.01, 24).reshape(24, 1)

    size = 10.0 ** rng.uniform(-3, 0, size=STEPS)  # the global norm passes 1 upwards and downwards
    grads = {
        name: np.einsum("s,s...->s...", size, rng.normal(size=(STEPS, *shape)))
        for name, shape in shapes.items()
    }

    grads["idle/kernel"] *= 0
    grads["idle/bias"] *= 0
    grads["tiny/kernel"] *= 1e-12
    grads["spiky/kernel"] *= 40
    grads["spiky/bias"] *= 40

    t = np.arange(STEPS)
    rates = np.where(t < 20, t / 20, ((STEPS - t) / (STEPS - 20)) ** 2)

    to_fp32 = lambda leaves: {name: np.float32(leaf) for name, leaf in leaves.items()}  # noqa: E731
    return to_fp32(weights), to_fp32(grads), np.float32(FAMILIES[family][2] * rates)


def nest(flat):
    tree = {}
    for name, leaf in flat.items():
        *parents, last = name.split("/")
        functools.reduce(lambda node, key: node.setdefault(key, {}), parents, tree)[last] = leaf
    return tree


def flatten(tree, prefix=""):
    flat = {}
    for key, value in tree.items():
        flat |= (
            flatten(value, f"{prefix}{key}/")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return flat


def make(family, case, weight_decay, schedule):
    build, cases, _ = FAMILIES[family]
    variant, options, _ = cases[case]
    named = {} if variant is None else {"variant": variant}
    return build(schedule, weight_decay=weight_decay, **named, **options)


@functools.cache
def descend(family, case, weight_decay, dtype):
    """Run our optimizer in float64.

    Return {name: [steps, ...] weights before each step} and {name: [steps, ...] updates}.
    """
    weights, grads, rates = problem(family, case)
    with jax.enable_x64(dtype == "float64"):
        params = nest({name: jnp.asarray(leaf, dtype) for name, leaf in weights.items()})
        wide = "float32" if dtype == "bfloat16" else dtype
        gradients = nest({name: jnp.asarray(leaf, wide) for name, leaf in grads.items()})
        table = jnp.asarray(rates, wide)
        tx = make(family, case, weight_decay, lambda count: table[count])

        def step(carry, gradient):
            params, state = carry
            updates, state = tx.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), (params, updates)

        lowered = jax.jit(lambda p, g: jax.lax.scan(step, (p, tx.init(p)), g)).lower(
            params, gradients
        )
        _, (path, updates) = lowered.compile(QUICKLY)(params, gradients)
        assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(path))
        return tuple(
            {name: np.asarray(leaf, np.float64) for name, leaf in flatten(tree).items()}
            for tree in (path, updates)
        )


@functools.cache
def transcribed(family, case, weight_decay):
    """Return {name: [steps, ...]} weights before each step, by the transcription alone."""
    weights, grads, rates = problem(family, case)
    step = FAMILIES[family][1][case][2](weight_decay)
    current = {name: np.asarray(leaf, np.float64) for name, leaf in weights.items()}
    path = []
    for t in range(STEPS):
        path.append(current)
        current = step(
            current,
            {name: np.asarray(leaf[t], np.float64) for name, leaf in grads.items()},
            float(rates[t]),
        )
    return {name: np.stack([weights[name] for weights in path]) for name in current}


def distance(ours, theirs, least=0.0):
    """Return max over steps of ||ours - theirs|| / ||theirs||; NaN equals NaN.

    `least` has, per step, the size below which a relative error is meaningless.
    """
    ours, theirs = (x.reshape(len(x), -1) for x in (ours, theirs))
    assert np.array_equal(np.isnan(ours), np.isnan(theirs))
    ours = np.nan_to_num(ours)
    theirs = np.nan_to_num(theirs)
    size = np.maximum(np.linalg.norm(theirs, axis=1), least)
    error = np.linalg.norm(ours - theirs, axis=1)
    assert not np.any(error[size == 0])
    return np.max(error / np.where(size > 0, size, 1))


def scale_of_updates(updates, weights):
    """Return the reference size for errors of updates, per step.

    It is at least the leaf's mean update, because momentum may nearly cancel in one step. It is
    also at least the resolution of float64 when an update is the difference of two weights.
    """
    mean = (
        np.nanmean(np.linalg.norm(updates.reshape(STEPS, -1), axis=1))
        if np.any(np.isfinite(updates))
        else 0.0
    )
    resolved = 1e5 * np.finfo(np.float64).eps * np.linalg.norm(weights.reshape(STEPS, -1), axis=1)
    return np.nan_to_num(np.maximum(mean, resolved))


def is_row(case):
    return case in LAMB_CASES or case in LARS_CASES or case in LANS_CASES


IN_FLOAT64_WITHIN = 1e-10
"""Largest error of 200 steps in float64, as a share of the weights."""
IN_FLOAT64 = [(*case, decay) for case in CASES for decay in DECAYS if decay or is_row(case[1])]


@pytest.mark.everyday(
    "lamb-paper-0.1",
    "lamb-albert-0.1",
    "lamb-apex_l2-0.1",
    "lamb-timm_trust_clip-0.1",
    "lamb-mlperf_tf-0.1",
    "lans-lans_betas-0.1",
    "lars-paper-0.0",
    "lars-nvcaffe_scale-0.1",
    "lars-flax_nesterov-0.1",
)
@pytest.mark.parametrize(("family", "case", "weight_decay"), IN_FLOAT64)
@pytest.mark.filterwarnings(NO_RATIO_LEFT)
def test_two_hundred_steps_in_float64_equal_the_source(family, case, weight_decay):
    path, _ = descend(family, case, weight_decay, "float64")
    expected = transcribed(family, case, weight_decay)
    errors = {name: distance(path[name], expected[name]) for name in expected}
    assert max(errors.values()) <= IN_FLOAT64_WITHIN, errors


IN_FP32 = [(*case, "float32") for case in CASES]
IN_FP32 += [(*case, "bfloat16") for case in CASES if is_row(case[1])]
DECAY = 0.1
"""The weight decay of these tests; without decay, cases are compared in float64 only."""


@pytest.mark.everyday("lamb-paper-float32", "lars-nvcaffe-bfloat16")
@pytest.mark.parametrize(("family", "case", "dtype"), IN_FP32)
def test_every_update_in_fp32_equals_the_source_at_the_same_weights(family, case, dtype):
    """The transcription starts each step from our weights, so that rounding cannot accumulate."""
    path, updates = descend(family, case, DECAY, dtype)
    _, grads, rates = problem(family, case)
    step = FAMILIES[family][1][case][2](DECAY)
    expected = {name: np.zeros_like(leaf) for name, leaf in path.items()}
    for t in range(STEPS):
        here = {name: leaf[t] for name, leaf in path.items()}
        after = step(
            here,
            {name: np.asarray(leaf[t], np.float64) for name, leaf in grads.items()},
            float(rates[t]),
        )
        for name, leaf in after.items():
            # No update can be computed from weights that are NaN already (flax).
            expected[name][t] = np.where(np.isnan(here[name]), updates[name][t], leaf - here[name])
    errors = {
        name: distance(updates[name], expected[name], scale_of_updates(expected[name], path[name]))
        for name in expected
    }
    assert max(errors.values()) <= 1e-5, errors


def farthest_apart(family, one, other):
    """Return the largest relative distance of two transcriptions over decays and leaves."""
    far = 0.0
    for weight_decay in DECAYS:
        ours, theirs = (transcribed(family, case, weight_decay) for case in (one, other))
        for name in ours.keys() & theirs.keys():
            a = ours[name][-1]
            b = theirs[name][-1]
            if np.any(np.isnan(a) != np.isnan(b)):
                return np.inf
            a = np.nan_to_num(a)
            b = np.nan_to_num(b)
            far = max(far, np.linalg.norm(a - b) / max(np.linalg.norm(a), np.linalg.norm(b), 1e-30))
    return far


# Without lists these two do the same arithmetic; with a decay mask they differ (optax_mask,
# tfa_mask).
SAME_WITHOUT_LISTS = {("optax", "tfa")}


@pytest.mark.parametrize("family", ["lamb", "lars"])
def test_every_pair_of_variants_differs(family):
    names = list(LAMB_CASES if family == "lamb" else LARS_CASES)
    assert names == list(LAMB if family == "lamb" else LARS)
    for one, other in itertools.combinations(names, 2):
        if (one, other) not in SAME_WITHOUT_LISTS:
            assert farthest_apart(family, one, other) > 1e-3, (one, other)
    assert farthest_apart("lamb", "optax_mask", "tfa_mask") > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_every_option_differs_from_its_variant(family):
    cases = FAMILIES[family][1]
    for case, (variant, _, _) in cases.items():
        if case != variant and variant is not None:
            assert farthest_apart(family, variant, case) > 1e-3, case
    assert farthest_apart("lans", "lans", "lans_betas") > 1e-3


@pytest.mark.everyday(
    "lamb-you_rn50",
    "lamb-timm",
    "lamb-nus",
    "lans-lans",
    "lars-mlperf_tf2",
    "lars-nvcaffe",
    "lars-nus",
)
@pytest.mark.parametrize(("family", "case"), [case for case in CASES if is_row(case[1])])
@pytest.mark.filterwarnings(NO_RATIO_LEFT)
def test_the_very_first_update_with_a_rate_that_is_not_zero(family, case):
    """Checks bias correction, fallbacks and the first velocity; the runs above start at rate 0."""
    weights, grads, _ = problem(family, case)

    with jax.enable_x64(True):
        tx = make(family, case, 0.1, lambda count: 0.1)
        params = nest({name: jnp.asarray(leaf, "float64") for name, leaf in weights.items()})
        gradient = nest({name: jnp.asarray(leaf[0], "float64") for name, leaf in grads.items()})
        updates, _ = jax.jit(lambda p, g: tx.update(g, tx.init(p), p), compiler_options=QUICKLY)(
            params, gradient
        )
        updates = {name: np.asarray(leaf) for name, leaf in flatten(updates).items()}

    step = FAMILIES[family][1][case][2](0.1)
    before = {name: np.asarray(leaf, np.float64) for name, leaf in weights.items()}
    after = step(
        before, {name: np.asarray(leaf[0], np.float64) for name, leaf in grads.items()}, 0.1
    )

    for name, leaf in after.items():
        expected = leaf - before[name]
        resolved = np.finfo(np.float64).eps * np.linalg.norm(before[name])
        assert (
            np.linalg.norm(updates[name] - expected)
            <= 1e-10 * np.linalg.norm(expected) + 4 * resolved
        ), name


# name -> (family, variant, options, other variant, options, conditions); agreements of the sources
IDENTITIES = {
    # The user defines their groups; lbopt's rows differ only by the default mask.
    "apex_timm": (
        "lamb",
        "apex",
        {},
        "timm",
        {"weight_decay_mask": lbopt.exclude_roles("norm", "bias")},
        {},
    ),
    "nvlamb_optax": (
        "lamb",
        "nvlamb",
        {},
        "optax",
        {"max_grad_norm": 1.0, "weight_decay_mask": lbopt.exclude_roles("norm", "bias")},
        {},
    ),
    "tfa_mlperf_tf": (
        "lamb",
        "tfa",
        {"weight_decay_mask": lbopt.weights_only, "max_grad_norm": 1.0},
        "mlperf_tf",
        {"weight_decay_mask": lbopt.weights_only},
        {},
    ),
    "mlperf_jax_flax": (
        "lamb",
        "mlperf_jax",
        {"max_grad_norm": None, "weight_decay_mask": None},
        "flax",
        {},
        {"leaves": lambda name: name not in ("fresh/kernel", "fresh/bias", "idle/bias")},
    ),
    "cybertron_you_mnist": (
        "lamb",
        "cybertron",
        {"weight_decay_mask": lbopt.weights_only},
        "you_mnist",
        {"max_grad_norm": None, "weight_decay_mask": lbopt.weights_only},
        {"leaves": lambda name: name not in ("large/kernel", "stack/kernel", "stack/bias")},
    ),
    "you_rn50_albert": (
        "lamb",
        "you_rn50",
        {"weight_decay_mask": lbopt.weights_only},
        "albert",
        {"weight_decay_mask": lbopt.weights_only},
        {},
    ),
    "tpu_mlperf_tf2": ("lars", "tpu", {"eps": 1e-7}, "mlperf_tf2", {}, {}),
    "tpu_flax": ("lars", "tpu", {}, "flax", {}, {"leaves": lambda name: not norm_or_bias(name)}),
    "optax_tpu": (
        "lars",
        "optax",
        {"trust_ratio_mask": lbopt.exclude_roles("norm", "bias")},
        "tpu",
        {},
        {"weight_decay": 0.0},
    ),
    "contrib_2018_tpu": (
        "lars",
        "contrib_2018",
        {"momentum": 0.0},
        "tpu",
        {"momentum": 0.0},
        {"weight_decay": 0.0},
    ),
    "timm_tpu": (
        "lars",
        "timm",
        {"weight_decay_mask": lbopt.exclude_roles("norm", "bias")},
        "tpu",
        {"eps": 1e-8},
        {"constant": True},
    ),
}


@pytest.mark.everyday("tfa_mlperf_tf", "tpu_flax")
@pytest.mark.parametrize("identity", IDENTITIES)
def test_rows_that_coincide_under_stated_conditions(identity):
    family, one, options, other, other_options, conditions = IDENTITIES[identity]
    weights, grads, rates = problem(family)
    weight_decay = conditions.get("weight_decay", 0.1)
    leaves = conditions.get("leaves", lambda name: True)
    table = np.full_like(rates, 0.05) if "constant" in conditions else rates[20:]

    def last(variant, options):
        tx = FAMILIES[family][0](
            lambda count: jnp.asarray(table)[count],
            weight_decay=weight_decay,
            variant=variant,
            **options,
        )
        params = nest({name: jnp.asarray(leaf) for name, leaf in weights.items()})
        state = tx.init(params)
        update = jax.jit(tx.update, compiler_options=QUICKLY)
        for t in range(5):
            updates, state = update(
                nest({name: jnp.asarray(leaf[t]) for name, leaf in grads.items()}), state, params
            )
            params = optax.apply_updates(params, updates)
        return flatten(params)

    ours = last(one, options)
    theirs = last(other, other_options)
    for name in filter(leaves, ours):
        assert np.linalg.norm(ours[name] - theirs[name]) <= 1e-6 * np.linalg.norm(theirs[name]), (
            name
        )


@pytest.mark.everyday("lamb-*", "lars-lars-options1-0.1")
@pytest.mark.parametrize("weight_decay", DECAYS)
@pytest.mark.parametrize(
    ("family", "theirs", "options"),
    [
        ("lamb", optax.lamb, {}),
        ("lars", optax.lars, {"trust_coefficient": 0.05}),
        ("lars", optax.lars, {"trust_coefficient": 0.05, "nesterov": True, "eps": 1e-2}),
    ],
)
def test_variant_optax_equals_the_installed_optax(family, theirs, options, weight_decay):
    weights, grads, rates = problem(family)
    with jax.enable_x64(True):
        params = nest({name: jnp.asarray(leaf, "float64") for name, leaf in weights.items()})
        gradients = nest({name: jnp.asarray(leaf, "float64") for name, leaf in grads.items()})

        def last(build, **named):
            tx = build(
                lambda count: jnp.asarray(rates, "float64")[count],
                weight_decay=weight_decay,
                **options,
                **named,
            )

            def step(carry, gradient):
                updates, state = tx.update(gradient, carry[1], carry[0])
                return (optax.apply_updates(carry[0], updates), state), None

            run = jax.jit(
                lambda p, g: jax.lax.scan(step, (p, tx.init(p)), g)[0][0], compiler_options=QUICKLY
            )
            return run(params, gradients)

        ours = last(FAMILIES[family][0], variant="optax")
        expected = last(theirs)
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(mine - other) <= 1e-10 * np.linalg.norm(other)
