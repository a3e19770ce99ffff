"""AGVM against its published hook in NumPy, and its exact properties."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusal import ANY, refused

import lbopt
from lbopt.aggregators import as_optax, phi_modules, plain_mean
from lbopt.transforms import monitor_layers, optimizer_metrics

LABELS = {"body": "^body/", "head": "^head/"}
OPTIONS = {
    "interval": 5,
    "start": 22,
    "stop": 170,
    "alpha": 0.9,
}  # the first measurement is at step 25, as in the hook
STEPS = 200
RATE = 0.05
B1 = 0.9
B2 = 0.99
EPS = 1e-8


def hook(grads, adam):
    """Train as `agvm_optimizer_hook.py` does, in float64, on [replicas, n] per module and step.

    Return the parameters of every step, the factors, and the measured quotients.
    """
    names = list(grads[0])
    replicas = len(next(iter(grads[0].values())))
    weights = {name: np.zeros(grads[0][name].shape[1]) for name in names}
    first, second = ({name: np.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    scale = dict.fromkeys(names, 1.0)
    visited = []
    quotients = []

    for step, rows in enumerate(grads):
        active = OPTIONS["start"] <= step <= OPTIONS["stop"]
        if active and step % OPTIONS["interval"] == 0:
            different = {}
            for name in names:
                halves = []
                for half in (rows[name][: replicas // 2], rows[name][replicas // 2 :]):
                    # The loss was divided by replicas^2 / 2; the gradients of a half are summed.
                    g = half.astype(np.float64).sum(0) * 2 / replicas**2
                    if adam:
                        g = g / (np.sqrt(second[name] * B2 + g**2 * (1 - B2)) + EPS)
                    halves.append(g * replicas)
                a, b = halves
                different[name] = 1 - a @ b / np.sqrt((a @ a) * (b @ b))

            anchor = different[names[0]]
            for name in names:
                quotient = (anchor + 1e-6) / (different[name] + 1e-6)
                quotients += [quotient] * (name != names[0])
                new = np.sqrt(np.clip(quotient, 0.5, 10.0))
                scale[name] = OPTIONS["alpha"] * scale[name] + (1 - OPTIONS["alpha"]) * new

        for name in names:
            g = rows[name].astype(np.float64).mean(0)
            rate = RATE * (scale[name] if active else 1.0)
            if adam:
                first[name] = B1 * first[name] + (1 - B1) * g
                second[name] = B2 * second[name] + (1 - B2) * g**2
                debiased = (
                    first[name] / (1 - B1 ** (step + 1)),
                    second[name] / (1 - B2 ** (step + 1)),
                )
                weights[name] = weights[name] - rate * debiased[0] / (np.sqrt(debiased[1]) + EPS)
            else:
                weights[name] = weights[name] - rate * g

        visited.append({name: w.copy() for name, w in weights.items()})

    return visited, scale, np.array(quotients)


@pytest.fixture(scope="module")
def noisy():
    """Return gradients [8, n] of two modules over 200 steps; the head's are somewhat noisier."""
    rng = np.random.default_rng(0)
    return [
        {
            "body": (rng.normal(size=30) + 0.5 * rng.normal(size=(8, 30))).astype(np.float32),
            "head": (rng.normal(size=20) + 0.6 * rng.normal(size=(8, 20))).astype(np.float32),
        }
        for _ in range(STEPS)
    ]


@pytest.mark.parametrize("adam", [False, True])
def test_equals_the_published_hook_over_200_steps(adam, noisy):
    wanted, scale, quotients = hook(noisy, adam)
    assert ((quotients > 0.5) & (quotients < 10)).sum() > 20  # the other ones of 30 are clipped
    assert (quotients < 0.5).any()

    of_adam = {"adam_b2": B2, "adam_eps": EPS} if adam else {}
    labels = {"body": "body", "head": "head"}
    aggregator = lbopt.agvm(labels, "body", **OPTIONS, **of_adam)
    base = optax.adam(RATE, B1, B2, EPS) if adam else optax.sgd(RATE)
    tx = lbopt.aggregate(aggregator, optax.chain(base, lbopt.scale_by_agvm(labels)), 8)

    params = {"body": jnp.zeros(30), "head": jnp.zeros(20)}
    state = tx.init(params)
    update = jax.jit(tx.update)

    for step, rows in enumerate(noisy):
        updates, state = update(rows, state, params)
        params = optax.apply_updates(params, updates)
        for name, theirs in wanted[step].items():
            np.testing.assert_allclose(
                params[name], theirs, rtol=2e-4, atol=2e-5, err_msg=f"{name} at {step}"
            )

    for name, value in scale.items():
        np.testing.assert_allclose(state[0].shared.scale[name], value, rtol=1e-5)
    assert abs(scale["head"] - 1) > 0.02
    assert scale["body"] == 1.0


@pytest.mark.parametrize("sigma", [0.1, 1.0, 3.0])
def test_phi_of_gaussian_gradients_is_known(sigma):
    size = 200_000
    replicas = 8
    rng = np.random.default_rng(1)
    signal = rng.normal(size=size)
    rows = {"w": (signal + sigma * rng.normal(size=(replicas, size))).astype(np.float32)}
    aggregator = lbopt.agvm({"all": ""}, "all", interval=1, start=0)
    tx = as_optax(aggregator, replicas)
    params = {"w": jnp.zeros(size)}
    (_, aux), _ = tx.update(rows, tx.init(params), params)
    q = sigma**2 / (replicas / 2) / np.mean(signal**2)
    assert float(aux["agvm_phi"]["all"]) == pytest.approx(q / (1 + q), rel=0.02)


def test_phi_alone_is_a_gauge(gradients, params):
    one, other = (jax.tree.map(lambda x, at=at: x[at], gradients(1)[0]) for at in (0, 1))
    labels = {"body": {"kernel": "all", "bias": "all"}, "head": {"kernel": "head"}}
    found = phi_modules(labels, one, other)
    flat = [
        np.concatenate([np.ravel(tree["body"][kind]) for kind in ("bias", "kernel")])
        for tree in (one, other)
    ]
    cosine = flat[0] @ flat[1] / np.linalg.norm(flat[0]) / np.linalg.norm(flat[1])
    assert list(found) == ["all", "head"]
    assert float(found["all"]) == pytest.approx(1 - cosine, rel=1e-5)


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize(
    ("labels", "alpha"), [(LABELS, 1.0), ({"all": ""}, 0.5)], ids=["alpha of one", "one module"]
)
def test_without_a_change_of_scale_it_is_the_mean_bit_for_bit(
    labels, alpha, devices, gradients, run
):
    grads = gradients(4)
    aggregator = lbopt.agvm(labels, next(iter(labels)), interval=2, start=0, alpha=alpha)
    ours, aux, _ = run(aggregator, grads, devices)
    plain, _, _ = run(plain_mean(), grads, devices)
    jax.tree.map(np.testing.assert_array_equal, ours, plain)
    assert set(map(float, aux["agvm_scale"].values())) == {1.0}
    assert all(value > 0 for value in aux["agvm_phi"].values())


@pytest.mark.parametrize("base", [optax.sgd, optax.adam, lbopt.lamb, lbopt.lars])
@pytest.mark.parametrize(
    ("labels", "alpha"), [(LABELS, 1.0), ({"all": ""}, 0.5)], ids=["alpha of one", "one module"]
)
def test_without_a_change_of_scale_it_is_the_base_optimizer_bit_for_bit(
    labels, alpha, base, gradients
):
    """The base optimizer sees the mean of the gradients and no aggregator."""
    grads = gradients(6)
    start = jax.tree.map(lambda g: jnp.ones(g.shape[1:]), grads[0])
    aggregator = lbopt.agvm(labels, next(iter(labels)), interval=2, start=0, alpha=alpha)
    ours = lbopt.aggregate(aggregator, optax.chain(base(0.1), lbopt.scale_by_agvm(labels)), 8)
    plain = base(0.1)

    def end(tx, steps):
        params = start
        state = tx.init(start)
        update = jax.jit(tx.update)
        for one in steps:
            updates, state = update(one, state, params)
            params = optax.apply_updates(params, updates)
        return params

    means = [jax.tree.map(lambda g: jnp.asarray(g).sum(0) / 8, rows) for rows in grads]
    jax.tree.map(np.testing.assert_array_equal, end(ours, grads), end(plain, means))


def test_a_steady_difference_saturates_at_the_bound():
    """Doubled noise suffices: the factor converges to the root of the lower bound."""
    rng = np.random.default_rng(0)
    labels = {"body": "body", "head": "head"}
    tx = as_optax(lbopt.agvm(labels, "body", interval=1, start=0), 8)
    params = {"body": jnp.zeros(200), "head": jnp.zeros(200)}
    state = tx.init(params)
    update = jax.jit(tx.update)
    for _ in range(300):
        shared = rng.normal(size=200)
        rows = {
            name: (shared + noise * rng.normal(size=(8, 200))).astype(np.float32)
            for name, noise in (("body", 0.3), ("head", 1.5))
        }
        (_, aux), state = update(rows, state, params)
    assert float(aux["agvm_scale"]["head"]) == pytest.approx(np.sqrt(0.5), abs=1e-3)


@pytest.mark.parametrize(("clip", "quotient"), [((0.5, 10.0), 1.5), ((0.5, 1.2), 1.2), (None, 1.5)])
def test_eps_is_added_to_both_sides_inside_the_bounds(clip, quotient):
    """phi is 2e-6 and 1e-6, from angles of 2e-3 and its root; eps is 1e-6."""
    rows = {
        name: np.array([[1, 0], [np.cos(angle), np.sin(angle)]], np.float32)
        for name, angle in (("body", 2e-3), ("head", 2e-3 / np.sqrt(2)))
    }
    labels = {"body": "body", "head": "head"}
    params = {"body": jnp.zeros(2), "head": jnp.zeros(2)}
    tx = as_optax(lbopt.agvm(labels, "body", 1, 0, alpha=0.0, clip=clip), 2)
    (_, aux), _ = tx.update(rows, tx.init(params), params)
    assert float(aux["agvm_scale"]["head"]) == pytest.approx(np.sqrt(quotient), rel=1e-3)


def test_phi_of_a_zero_module_is_one(params, gradients):
    rows = gradients(1)[0]
    rows["head"]["kernel"] = np.zeros_like(rows["head"]["kernel"])
    tx = as_optax(lbopt.agvm(LABELS, "body", interval=1, start=0), 8)
    (_, aux), state = tx.update(rows, tx.init(params), params)
    assert aux["agvm_phi"]["head"] == 1
    assert np.isfinite(state.shared.scale["head"])


def chained(*links):
    return optax.chain(*links)


def test_before_a_trust_ratio_the_scale_has_no_effect(gradients):
    """The guard tested below exists for this reason."""
    params = jax.tree.map(lambda g: jnp.ones(g.shape[1:]), gradients(1)[0])
    grads = jax.tree.map(lambda g: g[0], gradients(1)[0])
    scale = {
        "agvm_scale": {"body": jnp.float32(0.7), "head": jnp.float32(2.0)},
        "agvm_phi": dict.fromkeys(LABELS, jnp.float32(0.1)),
    }
    ratio = lambda: lbopt.scale_by_layerwise_trust_ratio(trust_ratio_mask=None)  # noqa: E731
    before = chained(lbopt.scale_by_agvm(LABELS), ratio())
    after = chained(ratio(), lbopt.scale_by_agvm(LABELS))
    none = ratio()

    def updates(tx):
        tx = optax.with_extra_args_support(tx)
        return jax.tree.leaves(tx.update(grads, tx.init(params), params, **scale)[0])

    for lost, plain in zip(updates(before), updates(none), strict=True):
        np.testing.assert_allclose(lost, plain, rtol=1e-6)
    for kept, plain in zip(updates(after), updates(none), strict=True):
        assert np.max(np.abs(kept / plain - 1)) > 0.2


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Kept:
    """A state that is not a tuple."""

    count: jax.Array = dataclasses.field(default_factory=lambda: jnp.zeros(()))


def stateless(state):
    """Return a transform whose effect cannot be known."""
    return optax.GradientTransformation(
        lambda params: state(), lambda updates, state, params=None: (updates, state)
    )


REFUSED = {  # name -> (optimizer, code)
    "missing": (lambda: lbopt.lamb(0.1), "missing"),
    "before lbopt's trust ratio": (
        lambda: chained(lbopt.scale_by_agvm(LABELS), lbopt.scale_by_layerwise_trust_ratio()),
        "conflict",
    ),
    "before lamb": (lambda: chained(lbopt.scale_by_agvm(LABELS), lbopt.lamb(0.1)), "conflict"),
    "before lans": (lambda: chained(lbopt.scale_by_agvm(LABELS), lbopt.lans(0.1)), "conflict"),
    "before optax's trust ratio": (
        lambda: chained(lbopt.scale_by_agvm(LABELS), optax.scale_by_trust_ratio()),
        "conflict",
    ),
    "before optax.lamb": (
        lambda: chained(lbopt.scale_by_agvm(LABELS), optax.lamb(0.1)),
        "conflict",
    ),
    "before a link without a state": (
        lambda: chained(lbopt.scale_by_agvm(LABELS), stateless(lambda: ())),
        "conflict",
    ),
    "before a link with a state of another kind": (
        lambda: chained(lbopt.scale_by_agvm(LABELS), stateless(Kept)),
        "conflict",
    ),
    "before a link whose state is an array": (
        lambda: chained(lbopt.scale_by_agvm(LABELS), stateless(lambda: jnp.zeros(3))),
        "conflict",
    ),
    "before a link whose state is nothing": (
        lambda: chained(lbopt.scale_by_agvm(LABELS), stateless(lambda: None)),
        "conflict",
    ),
    "under a guard": (
        lambda: lbopt.skip_bad_updates(chained(lbopt.scale_by_agvm(LABELS), lbopt.lamb(0.1)), 5),
        "conflict",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_guard_refuses(name, params):
    optimizer, code = REFUSED[name]
    tx = lbopt.aggregate(lbopt.agvm(LABELS, "body"), optimizer(), 8)
    with refused("tx", code=code):
        tx.init(params)


def test_other_labels_of_the_same_names_are_refused(params, gradients):
    swapped = {"body": "^head/", "head": "^body/"}
    tx = lbopt.aggregate(
        lbopt.agvm(LABELS, "body"), chained(optax.sgd(0.1), lbopt.scale_by_agvm(swapped)), 8
    )
    with refused("labels/body/bias", "head", "mismatch"):
        jax.jit(tx.update)(gradients(1)[0], tx.init(params), params)


def test_the_guard_lets_pass_what_only_looks(params):
    last = chained(
        lbopt.lamb(0.1), lbopt.scale_by_agvm(LABELS), monitor_layers(), lbopt.track_ema()
    )
    first = chained(stateless(lambda: jnp.zeros(3)), last)
    for tx in (last, first, lbopt.skip_bad_updates(last, 5)):
        aggregator = lbopt.agvm(LABELS, "body")
        _, state = lbopt.aggregate(aggregator, tx, 8).init(params)
        aggregator.check_chain(state, params)  # arrays, as a step checks them


class Weights(NamedTuple):
    """Parameters in a named tuple, a type that states use too."""

    body: jax.Array
    head: jax.Array


class Summing(NamedTuple):
    """The state of a wrapper that keeps a sum of gradients behind its inner state."""

    inner: Any
    total: Weights


def test_the_guard_takes_no_sum_of_gradients_for_a_link():
    params = Weights(jnp.ones((3, 3)), jnp.ones(3))
    labels = {"body": "body", "head": "head"}
    tx = optax.chain(optax.adam(0.1), lbopt.scale_by_agvm(labels))
    lbopt.agvm(labels, "body").check_chain(Summing(tx.init(params), params), params)


def test_a_wrapper_that_hands_nothing_on_is_refused(params):
    tx = optax.MultiSteps(
        chained(lbopt.lamb(0.1), lbopt.scale_by_agvm(LABELS)), 2
    ).gradient_transformation()
    with refused("tx", code="conflict"):
        lbopt.aggregate(lbopt.agvm(LABELS, "body"), tx, 8).init(params)


def test_factors_and_phi_are_among_the_metrics(params, gradients):
    tx = lbopt.aggregate(
        lbopt.agvm(LABELS, "body", 1, 0), chained(optax.sgd(1.0), lbopt.scale_by_agvm(LABELS)), 8
    )
    _, state = tx.update(gradients(1)[0], tx.init(params), params)
    shown = optimizer_metrics(state[1])
    assert set(shown) == {f"agvm_{kind}/{module}" for kind in ("scale", "phi") for module in LABELS}


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (
            lambda params: lbopt.agvm(LABELS, "neck").init(params, 8),
            ("anchor", "neck", "choice"),
        ),
        (
            lambda params: lbopt.agvm(LABELS, "body").init(params, 7),
            ("num_replicas", 7, "value"),
        ),
        (
            lambda params: lbopt.agvm({"body": "^body/"}, "body").init(params, 8),
            ("labels", ANY, "missing"),
        ),
        (
            lambda params: lbopt.agvm({**LABELS, "neck": "^neck"}, "body").init(params, 8),
            ("labels", ANY, "unused"),
        ),
        (lambda params: lbopt.agvm({"a": "("}, "a").init(params, 8), ("pattern", "(", "value")),
        (lambda params: lbopt.agvm(LABELS, "body", alpha=1.1), ("alpha", 1.1, "value")),
        (lambda params: lbopt.agvm(LABELS, "body", alpha="x"), ("alpha", "x", "value")),
        (lambda params: lbopt.agvm(LABELS, "body", interval=0), ("interval", 0, "value")),
        (
            lambda params: lbopt.agvm(LABELS, "body", interval=2.5),
            ("interval", 2.5, "value"),
        ),
        (lambda params: lbopt.agvm(LABELS, "body", adam_eps=-1.0), ("adam_eps", -1.0, "value")),
        (lambda params: lbopt.agvm(LABELS, "body", start=10, stop=5), ("stop", 5, "value")),
        (lambda params: lbopt.agvm(LABELS, "body", clip=(2.0, 1.0)), ("clip", (2.0, 1.0), "value")),
        (
            lambda params: as_optax(lbopt.agvm(LABELS, "body", adam_b2=0.9), 8).update(
                params, None, params
            ),
            ("second_moment", None, "missing"),
        ),
        (
            lambda params: lbopt.scale_by_agvm(LABELS).update(
                params, lbopt.scale_by_agvm(LABELS).init(params)
            ),
            ("agvm_scale", None, "missing"),
        ),
    ],
)
def test_refusals(make, error, params):
    with refused(*error):
        make(params)
