"""Relative updates, spheres, brakes, floors and cautious updates against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from refusal import refused

import lbopt

few = settings(max_examples=15, deadline=None, derandomize=True, database=None)
STEPS = 200


def kernels(seed, shape=(6, 5)):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape)


def gradient_of(step, shape=(6, 5)):
    """Return a gradient; some steps are tiny, one is zero."""
    size = {3: 0.0, 5: 1e-12, 7: 1e6}.get(step, 1.0)
    return size * kernels(1000 + step, shape)


def norm(x):
    return np.linalg.norm(np.asarray(x, np.float64))


def scaled_to(x, size):
    return x * (size / norm(x)) if norm(x) > 0 else 0 * x


# Transcriptions of emerging_optimizers/weight_update_hooks, of "u/w floor" in modded-nanogpt, and
# of Algorithm 1 of arXiv:2411.16085: (weight, initial weight, gradient, momentum, rate) -> weight.
def relative(w, start, g, m, lr):
    return w - lr * scaled_to(g, norm(w))


def relative_initial(w, start, g, m, lr):
    return w - lr * scaled_to(g, norm(start))


def relative_fixed(w, start, g, m, lr):
    return w - lr * scaled_to(g, 2.5)


def hyperball(w, start, g, m, lr):
    moved = w - lr * scaled_to(g, norm(start))
    return scaled_to(moved, norm(start))


def brake(w, start, g, m, lr):
    moved = w - lr * scaled_to(g, norm(w))
    change = norm(moved) - norm(w)
    share = 0.3 if change > 0 else 0.6
    return scaled_to(moved, norm(w) + share * change)


def floor(w, start, g, m, lr):
    small = norm(g) < 0.8 * norm(w)
    return w - lr * (scaled_to(g, 0.8 * norm(w)) if small else g)


def cautious(w, start, g, m, lr):
    kept = m * g > 0
    return w - lr * m * kept / max(kept.mean(), 0.3)


SOURCES = {
    "relative": (relative, lambda rate: [lbopt.relative_update(), rate]),
    "relative_initial": (relative_initial, lambda rate: [lbopt.relative_update("initial"), rate]),
    "relative_fixed": (relative_fixed, lambda rate: [lbopt.relative_update(2.5), rate]),
    "hyperball": (
        hyperball,
        lambda rate: [lbopt.relative_update("initial"), rate, lbopt.hyperball()],
    ),
    "brake": (brake, lambda rate: [lbopt.relative_update(), rate, lbopt.radial_brake(0.3, 0.6)]),
    "floor": (floor, lambda rate: [lbopt.update_floor(0.8), rate]),
    "cautious": (
        cautious,
        lambda rate: [lbopt.cautious(optax.trace(0.9), 0.3), rate],
    ),
}


def walk_source(step_of, count=STEPS):
    w = start = kernels(0)
    m = 0
    walked = []
    for step in range(count):
        g = gradient_of(step) if step_of is not floor else 0.05 * step * gradient_of(step)
        m = 0.9 * m + g
        w = step_of(w, start, g, m, 0.1 / (1 + 0.01 * step))
        walked.append(w)
    return walked


@pytest.mark.parametrize("name", SOURCES)
def test_200_steps_equal_the_source_in_float64(name):
    source, links = SOURCES[name]
    expected = walk_source(source)
    tx = optax.chain(*links(lbopt.scale_by_learning_rate(lambda t: 0.1 / (1 + 0.01 * t))))
    params = {"kernel": jnp.asarray(kernels(0), jnp.float32)}
    state = tx.init(params)

    @jax.jit
    def step_fn(params, state, gradient):
        updates, state = tx.update({"kernel": gradient}, state, params)
        return optax.apply_updates(params, updates), state

    for step, w in enumerate(expected):
        g = gradient_of(step) if source is not floor else 0.05 * step * gradient_of(step)
        params, state = step_fn(params, state, jnp.asarray(g, jnp.float32))
        assert norm(params["kernel"] - w) <= 3e-5 * norm(w), step


def test_every_two_sources_differ_by_far_more_than_the_tolerance():
    ends = {name: walk_source(source)[-1] for name, (source, _) in SOURCES.items()}
    for name, end in ends.items():
        for other, their in ends.items():
            assert name == other or norm(end - their) > 1e-2 * norm(end), (name, other)


def relative_steps(rate, stacked):
    return optax.chain(
        lbopt.relative_update("initial", stacked=stacked),
        lbopt.scale_by_learning_rate(rate),
        lbopt.hyperball(stacked=stacked),
    )


@functools.cache
def sphere_walk(dtype, stacked, make=relative_steps):
    tx = make(0.02, stacked=stacked)

    @jax.jit
    def run(params, key):
        state = tx.init(params)

        def body(carry, key):
            params, state = carry
            grads = {"kernel": jax.random.normal(key, params["kernel"].shape, dtype)}
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params["kernel"]

        return jax.lax.scan(body, (params, state), jax.random.split(key, 1000))[1]

    return run


@pytest.mark.everyday("1.0-fp32", "1e-20-fp32")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("size", [1.0, 1e-20, 1e12])
def test_the_norm_stays_within_one_ulp_for_a_thousand_steps(dtype, size):
    start = (
        np.random.default_rng(0).normal(size=(3, 40, 24)) * np.array([1, 10, 0.1])[:, None, None]
    )
    start = jnp.asarray(size * start, dtype)
    radius = np.linalg.norm(np.asarray(start, np.float64), axis=(1, 2))
    walked = np.asarray(
        sphere_walk(dtype, lbopt.stacked_paths("kernel"))({"kernel": start}, jax.random.key(1)),
        np.float64,
    )
    norms = np.linalg.norm(walked, axis=(2, 3))
    digits = {jnp.float32: 24, jnp.bfloat16: 8}[dtype]
    ulp = 2.0 ** (np.floor(np.log2(radius)) + 1 - digits)
    assert np.abs(norms - radius).max(0).tolist() <= ulp.tolist()
    turned = np.sum(walked[-1] * walked[0], axis=(1, 2)) / radius**2
    assert np.all(np.abs(turned) < 0.98)  # they moved


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("make", [lbopt.adamh, lbopt.muonh, lbopt.soaph])
def test_optimizers_on_spheres_keep_norms_within_one_ulp(make, dtype):
    start = jnp.asarray(np.random.default_rng(0).normal(size=(12, 12)), dtype)
    walked = sphere_walk(dtype, None, make)({"kernel": start}, jax.random.key(1))
    radius = norm(start)
    norms = np.linalg.norm(np.asarray(walked, np.float64), axis=(1, 2))
    ulp = 2.0 ** (np.floor(np.log2(radius)) + 1 - {jnp.float32: 24, jnp.bfloat16: 8}[dtype])
    assert np.abs(norms - radius).max() <= ulp
    assert norm(walked[-1] - start) > 0.1 * radius


@few
@given(scale=st.floats(-25, 25), seed=st.integers(0, 10**6), rate=st.floats(1e-4, 3.0))
def test_the_scale_of_gradients_has_no_effect(scale, seed, rate):
    params = {"kernel": jnp.asarray(kernels(seed), jnp.float32)}
    tx = optax.chain(lbopt.relative_update(), optax.scale_by_learning_rate(rate), lbopt.hyperball())
    g = np.asarray(kernels(seed + 1), np.float32)
    # A power of two, so that the gradient itself is not rounded.
    power = np.float32(2.0 ** np.round(scale))
    ours, theirs = (
        tx.update({"kernel": jnp.asarray(one)}, tx.init(params), params)[0]["kernel"]
        for one in (g, g * power)
    )
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("make", [lbopt.adamh, lbopt.muonh])
@pytest.mark.parametrize("factor", [3.7, 1e4])
def test_a_factor_of_all_gradients_has_no_effect_on_optimizers_on_spheres(make, factor):
    """What remains is rounding, and eps beside the gradients."""
    rng = np.random.default_rng(0)
    tx = make(0.1)

    def draw():
        return {
            name: {"kernel": jnp.asarray(rng.normal(size=(6, 8)), jnp.float32)} for name in "ab"
        }

    start = draw()
    gradients = [draw() for _ in range(5)]
    ends = []
    for scale in (1.0, factor):
        params = start
        state = tx.init(params)
        for gradient in gradients:
            scaled = jax.tree.map(lambda g, scale=scale: scale * g, gradient)
            updates, state = tx.update(scaled, state, params)
            params = optax.apply_updates(params, updates)
        ends.append(params)
    for name in "ab":
        one, other = (end[name]["kernel"] for end in ends)
        assert norm(one - other) <= 1e-5 * norm(one - start[name]["kernel"])


@few
@given(seed=st.integers(0, 10**6), rate=st.floats(1e-4, 0.5))
def test_sphere_and_tangent(seed, rate):
    """A tangent step of length lr R ends at the angle atan(lr); a radial one does nothing."""
    w = kernels(seed)
    g = kernels(seed + 1)
    tangent = g - w * np.sum(g * w) / norm(w) ** 2
    tx = optax.chain(lbopt.relative_update(), optax.scale_by_learning_rate(rate), lbopt.hyperball())
    params = {"kernel": jnp.asarray(w, jnp.float32)}

    def after(g):
        grads = {"kernel": jnp.asarray(g, jnp.float32)}
        updates, _ = tx.update(grads, tx.init(params), params)
        return np.asarray(params["kernel"] + updates["kernel"], np.float64)

    moved = after(tangent)
    cosine = np.sum(moved * w) / (norm(moved) * norm(w))
    assert abs(np.arccos(np.clip(cosine, -1, 1)) - np.arctan(rate)) <= 2e-4
    assert norm(after(w) - w) <= 1e-6 * norm(w)


def test_zero_weights_stay_zero_with_a_warning():
    params = {"kernel": jnp.zeros((3, 2)), "other": jnp.ones((3, 2))}
    grads = {"kernel": jnp.ones((3, 2)), "other": jnp.ones((3, 2))}
    for build in (lbopt.hyperball, functools.partial(lbopt.relative_update, "initial")):
        with pytest.warns(UserWarning, match="'kernel'.*stay zero"):
            state = build().init(params)
        updates, _ = build().update(grads, state, params)
        assert not np.any(updates["kernel"])
    updates, _ = lbopt.relative_update().update(grads, lbopt.relative_update().init(params), params)
    assert not np.any(updates["kernel"])
    for tx in (lbopt.radial_brake(), lbopt.update_floor()):
        updates, _ = tx.update(grads, tx.init(params), params)
        assert np.all(np.isfinite(updates["kernel"]))


def test_a_checkpoint_of_other_masks_is_refused():
    params = {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}
    state = lbopt.hyperball().init(params)
    tx = lbopt.hyperball(mask=None)
    with refused("opt_state", code="type"):
        tx.update(params, state, params)


def test_wrong_arguments_are_refused_in_one_line():
    for build, field, value, code in [
        (lbopt.relative_update, "scale", "weights", "choice"),
        (lbopt.relative_update, "scale", 0.0, "value"),
        (lbopt.hyperball, "radius", "weight", "choice"),
        (lbopt.hyperball, "radius", -1.0, "value"),
        (lbopt.radial_brake, "outward_scale", 1.5, "value"),
        (lbopt.radial_brake, "inward_scale", -0.1, "value"),
        (lbopt.update_floor, "floor", -0.1, "value"),
    ]:
        with refused(field, value, code):
            build(**{field: value})
    with refused("inner", 3, "type"):
        lbopt.cautious(3)
    with refused("min_fraction", 0.0, "value"):
        lbopt.cautious(optax.identity(), 0.0)
