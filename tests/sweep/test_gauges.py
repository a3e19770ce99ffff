"""Probes against closed forms: Gaussian gradients, quadratics, finite differences of models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused

from lbopt import losses
from lbopt.models import CNN, LSTMClassifier, from_linen
from lbopt.sweep import Probes, noise_scales
from lbopt.sweep.lanes import _gauges

KEY = jax.random.key(0)
NUM_SLICES = 8
SLICE_SIZE = 4
DIM = 4000
SIGNAL = 0.5
NOISE = {"quiet": 0.5, "loud": 3.0}


def squares(params, model_state, batch, rng):
    """Return half the squared distance from the examples; its gradient w - mean(x) is Gaussian."""
    del rng
    each = sum(0.5 * jnp.sum(jnp.square(params[name] - batch[name]), axis=1) for name in params)
    return jnp.mean(each), (model_state, {})


@functools.cache
def gaussian_probes():
    """Probe 60 batches of Gaussian gradients, with |G| = SIGNAL in each of the two leaves."""
    probe = _gauges.make_probe(squares, NUM_SLICES)
    params = {name: jnp.full(DIM, SIGNAL / np.sqrt(DIM)) for name in NOISE}

    def one(key):
        keys = dict(zip(NOISE, jax.random.split(key, 2), strict=True))
        shape = (NUM_SLICES * SLICE_SIZE, DIM)
        batch = {
            name: sigma / np.sqrt(DIM) * jax.random.normal(keys[name], shape)
            for name, sigma in NOISE.items()
        }
        return probe(params, {}, batch, key)

    return jax.jit(lambda keys: jax.lax.map(one, keys))(jax.random.split(jax.random.key(1), 60))


def assert_mean(values, expected, relative_spread):
    """Check that the mean is right within 4 standard errors, and that these are small."""
    standard_error = np.std(values, ddof=1) / np.sqrt(len(values))
    assert abs(np.mean(values) - expected) <= 4 * standard_error
    assert standard_error <= relative_spread * expected


def test_the_noise_scale_of_gaussian_gradients():
    probes = gaussian_probes()
    signal = 2 * SIGNAL**2
    trace = sum(sigma**2 for sigma in NOISE.values())
    assert_mean(probes.noise_trace, trace, 0.002)
    assert_mean(probes.gradient_square_norm, signal, 0.01)
    seeds = [
        Probes([1], noise_trace=[float(noise)], gradient_square_norm=[float(norm)])
        for noise, norm in zip(probes.noise_trace, probes.gradient_square_norm, strict=True)
    ]
    ((_, found),) = noise_scales(seeds)
    assert found == pytest.approx(trace / signal, rel=0.04)  # four standard errors of the quotient


def test_phi_of_gaussian_gradients():
    """phi is q / (1 + q) up to 1/4,000 for 4,000 numbers; q is a half's noise over its signal."""
    probes = gaussian_probes()
    assert list(probes.phi_layers) == ["loud", "quiet"]
    variances = {name: sigma**2 / (NUM_SLICES * SLICE_SIZE / 2) for name, sigma in NOISE.items()}
    for name, variance in variances.items():
        q = variance / SIGNAL**2
        assert_mean(probes.phi_layers[name], q / (1 + q), 0.01)
    q = sum(variances.values()) / (2 * SIGNAL**2)
    assert_mean(probes.phi, q / (1 + q), 0.01)
    assert probes.phi_modules == {}


def test_phi_of_modules_is_that_of_their_parameters_together():
    rng = np.random.default_rng(0)
    params = {name: jnp.zeros(2) for name in ("body_a", "body_b", "head")}
    batch = {name: jnp.float32(rng.normal(size=(4, 2)) + 1) for name in params}
    found = _gauges.make_probe(squares, 2, {"head": "^head", "body": ""})(params, {}, batch, KEY)
    halves = {name: np.asarray(x, float).reshape(2, 2, 2).mean(1) for name, x in batch.items()}
    for module, leaves in {"body": ("body_a", "body_b"), "head": ("head",)}.items():
        one, other = (np.concatenate([halves[leaf][half] for leaf in leaves]) for half in (0, 1))
        cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
        assert found.phi_modules[module] == pytest.approx(1 - cosine, rel=1e-5)
    assert set(found.flat()) >= {"phi", "phi_modules/body", "phi_modules/head", "phi_layers/head"}


def test_the_hessian_of_squares_is_the_identity():
    assert gaussian_probes().lipschitz == pytest.approx(np.ones(60), rel=1e-5)


def test_no_signal_is_an_infinite_noise_scale():
    seed = Probes([1, 2, 3], noise_trace=[6.0] * 3, gradient_square_norm=[2.0, 0.0, -1.0])
    assert noise_scales([seed]) == [(1, 3.0), (2, np.inf), (3, np.inf)]


def test_example_i_belongs_to_slice_i_over_b():
    """The first half of the examples points east and the second north."""
    x = jnp.repeat(jnp.eye(2), 8, axis=0)
    probe = _gauges.make_probe(squares, 4)({"x": jnp.zeros(2)}, {}, {"x": x}, KEY)
    assert probe.phi == pytest.approx(1, abs=1e-6)
    # All slices have norm 1, the mean has 1/2: (4 * 1/2 - 1) / 3 and (1 - 1/2) * 16 / 3.
    assert (probe.gradient_square_norm, probe.noise_trace) == pytest.approx(
        (1 / 3, 8 / 3), rel=1e-6
    )
    turns = jnp.tile(jnp.eye(2), (8, 1))
    assert _gauges.make_probe(squares, 4)(
        {"x": jnp.zeros(2)}, {}, {"x": turns}, KEY
    ).phi == pytest.approx(0, abs=1e-6)


def test_gradients_of_slices_are_numpys():
    rng = np.random.default_rng(0)
    slices = rng.normal(size=(6, 5)).astype(np.float32)
    found = _gauges.slice_gradients(
        lambda w, one_slice: {"w": w["w"] * one_slice}, {"w": jnp.arange(5.0)}, jnp.asarray(slices)
    )
    each = np.arange(5.0) * slices
    for ours, theirs in zip(found[:3], (each, each[:3], each[3:]), strict=True):
        assert ours["w"] == pytest.approx(theirs.mean(0), rel=1e-5, abs=1e-6)
    assert found.mean_square_norm == pytest.approx(np.mean(np.sum(each**2, 1)), rel=1e-5)


def test_bf16_gradients_are_summed_in_fp32():
    """In bf16, 256 + 1 is 256."""
    slices = jnp.array([256.0, 1, 1, 1, 1, 1, 1, 1], jnp.bfloat16)[:, None]
    found = _gauges.slice_gradients(
        lambda w, one_slice: one_slice, jnp.zeros(1, jnp.bfloat16), slices
    )
    assert (found.first_half.dtype, found.first_half[0]) == (jnp.float32, 259 / 4)
    assert found.mean_square_norm == pytest.approx((256**2 + 7) / 8, rel=1e-6)


def test_phi_keeps_its_digits_where_the_angle_is_small():
    one = jnp.array([1.0, 0.0])
    other = jnp.array([1.0, 1e-4])
    assert _gauges.phi(one, other) == pytest.approx(5e-9, rel=1e-3)
    assert (
        1 - jnp.dot(one, other) / jnp.linalg.norm(other) == 0
    )  # the plain formula loses all digits


NUM_EXAMPLES = 8
SIDE = 6


def quadratic(params, model_state, batch, rng):
    del rng
    w = jnp.concatenate([params["a"], params["b"]])
    each = 0.5 * jnp.einsum("i,eij,j->e", w, batch["matrix"], w) + batch["vector"] @ w
    return jnp.mean(each), (model_state, {})


def make_quadratic(seed=0):
    """Return examples with indefinite symmetric matrices, and their means in fp64."""
    rng = np.random.default_rng(seed)
    matrices = rng.normal(size=(NUM_EXAMPLES, SIDE, SIDE))
    matrices = np.float32(matrices + matrices.transpose(0, 2, 1))
    vectors = np.float32(rng.normal(size=(NUM_EXAMPLES, SIDE)))
    return (
        {"matrix": matrices, "vector": vectors},
        matrices.astype(float).mean(0),
        vectors.astype(float).mean(0),
    )


def split(w):
    return {"a": jnp.float32(w[:2]), "b": jnp.float32(w[2:])}


@pytest.mark.parametrize("num_slices", [2, 4, 8])
def test_lipschitz_is_exact_on_a_quadratic(num_slices):
    batch, matrix, vector = make_quadratic()
    w = np.random.default_rng(1).normal(size=SIDE)
    g = matrix @ w + vector
    probe = jax.jit(_gauges.make_probe(quadratic, num_slices))(split(w), {}, batch, KEY)
    assert probe.lipschitz == pytest.approx(abs(g @ matrix @ g) / (g @ g), rel=1e-5)


@pytest.mark.parametrize("place", range(SIDE))
def test_along_an_eigenvector_lipschitz_is_the_eigenvalue(place):
    batch, matrix, vector = make_quadratic()
    values, vectors = np.linalg.eigh(matrix)
    assert values[0] < 0 < values[-1]
    w = np.linalg.solve(
        matrix, 3 * vectors[:, place] - vector
    )  # where the gradient is three times that eigenvector
    probe = _gauges.make_probe(quadratic, 2)(split(w), {}, batch, KEY)
    # The gradient at w is rounded to fp32, which adds small components along other eigenvectors.
    assert probe.lipschitz == pytest.approx(abs(values[place]), rel=1e-5, abs=1e-5)


def test_lipschitz_does_not_depend_on_the_size_of_the_gradient():
    batch, matrix, vector = make_quadratic()
    w = np.random.default_rng(1).normal(size=SIDE)
    g = matrix @ w + vector
    slices = _gauges.split_slices(batch, 2)
    loss = lambda params, one_slice: quadratic(params, {}, one_slice, KEY)[0]  # noqa: E731
    for scale in (1e-12, 1.0, 1e12):
        found = _gauges.local_lipschitz(loss, split(w), split(scale * g), slices)
        assert found == pytest.approx(abs(g @ matrix @ g) / (g @ g), rel=1e-5)


def test_at_rest_there_is_no_direction():
    batch = {"x": jnp.ones((4, 3))}
    probe = _gauges.make_probe(squares, 2)({"x": jnp.ones(3)}, {}, batch, KEY)
    assert np.isnan([probe.lipschitz, probe.phi, probe.phi_layers["x"]]).all()
    assert (probe.noise_trace, probe.gradient_square_norm) == (0, 0)


def test_each_slice_has_random_numbers_of_its_own_and_both_passes_the_same():
    """For the loss c |w|^2 / 2 with a random c, gradient and Hessian then have the same mean c."""

    def loss_fn(params, model_state, batch, rng):
        del batch
        return jax.random.uniform(rng) * 0.5 * jnp.sum(params**2), (model_state, {})

    num_slices = 4
    w = jnp.array([3.0, 4.0])
    probe = _gauges.make_probe(loss_fn, num_slices)(w, {}, jnp.zeros(num_slices), KEY)
    norm = np.sqrt(
        probe.gradient_square_norm + probe.noise_trace / num_slices
    )  # of the mean gradient
    assert probe.lipschitz == pytest.approx(norm / 5, rel=1e-5)
    assert probe.noise_trace > 0.01


MODELS = {"cnn": (CNN(10, (4, 8), 8), (8, 8)), "lstm": (LSTMClassifier(10, 8), (3, 8))}
"""Models with the size of their images; the LSTM's program grows with the rows of an image."""


@functools.cache
def make_model(name):
    """Return a loss, the model at its start, 32 images of noise, and the jitted probe."""
    network, size = MODELS[name]
    network = from_linen(network)
    rng = np.random.default_rng(0)
    batch = {
        "image": jnp.float32(rng.normal(size=(32, *size))),
        "label": jnp.asarray(rng.integers(0, 10, 32)),
    }

    def loss_fn(params, model_state, batch, rng):
        logits, new_model_state = network.apply(
            params, model_state, batch["image"], train=True, rng=rng
        )
        return jnp.mean(losses.softmax_cross_entropy(logits, batch["label"])), (new_model_state, {})

    params, model_state = jax.jit(network.init)(KEY, batch["image"])
    return loss_fn, params, model_state, batch, jax.jit(_gauges.make_probe(loss_fn, 2))


def vdot(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return sum(np.vdot(np.asarray(a, float), np.asarray(b, float)) for a, b in pairs)


@pytest.mark.everyday("lstm")
@pytest.mark.parametrize("name", ["cnn", "lstm"])
def test_lipschitz_is_the_finite_difference_of_two_gradients(name):
    """Differences over 3e-4 round by about 2e-4; larger ones cross kinks of ReLU or a maximum."""
    loss_fn, params, model_state, batch, probe = make_model(name)
    slices = _gauges.split_slices(batch, 2)

    @jax.jit
    def gradient(params):
        gradient = jax.grad(loss_fn, has_aux=True)
        each = lambda one_slice: gradient(params, model_state, one_slice, KEY)[0]  # noqa: E731
        return jax.tree.map(lambda x: x.mean(0), jax.lax.map(each, slices))

    g = gradient(params)
    step = jax.tree.map(lambda x: 3e-4 * x / np.sqrt(vdot(g, g)), g)
    ahead = gradient(jax.tree.map(jnp.add, params, step))
    behind = gradient(jax.tree.map(jnp.subtract, params, step))
    expected = abs(vdot(ahead, step) - vdot(behind, step)) / 2 / vdot(step, step)
    assert probe(params, model_state, batch, KEY).lipschitz == pytest.approx(expected, rel=1e-3)


def test_vmapped_probes_are_those_of_each_alone():
    """The tolerance is 1e-4 because batched products sum in another order."""
    _, params, model_state, batch, probe = make_model("cnn")
    both = jax.tree.map(lambda x: jnp.stack([x, 1.5 * x]), (params, model_state))
    batched = jax.jit(jax.vmap(probe, in_axes=(0, 0, None, None)))(*both, batch, KEY)
    for index in (0, 1):
        alone = probe(*jax.tree.map(lambda x, index=index: x[index], both), batch, KEY)
        ours = jax.tree.map(lambda x, index=index: x[index], batched)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), ours, alone
        )


@pytest.mark.parametrize("name", ["cnn", "lstm"])
def test_every_leaf_has_its_phi(name):
    _, params, model_state, batch, probe = make_model(name)
    found = probe(params, model_state, batch, KEY)
    assert len(found.phi_layers) == len(jax.tree.leaves(params))
    assert all("/" in name for name in found.phi_layers)
    assert all(0 <= value <= 2 for value in found.phi_layers.values())


def test_memory_does_not_grow_with_the_number_of_slices():
    """100,000 parameters are 400 kB, and a gradient for each slice would be 6 MB more."""

    def scratch(num_slices):
        params = {"x": jnp.zeros(100_000)}
        batch = {"x": jnp.zeros((num_slices, 1))}
        compiled = (
            jax.jit(_gauges.make_probe(squares, num_slices)).lower(params, {}, batch, KEY).compile()
        )
        return compiled.memory_analysis().temp_size_in_bytes

    assert scratch(16) <= scratch(2) + 100_000


@pytest.mark.parametrize("num_slices", [-2, 0, 1, 3])
def test_an_odd_number_of_slices_is_refused(num_slices):
    with refused("num_slices", num_slices):
        _gauges.make_probe(squares, num_slices)


def test_slices_of_unequal_size_are_refused():
    with refused("num_slices", 4):
        _gauges.make_probe(squares, 4)({"x": jnp.zeros(1)}, {}, {"x": jnp.zeros((6, 1))}, KEY)
