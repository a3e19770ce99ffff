"""Newton-Schulz iterations against their scalar polynomials in float64 and the published bands."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusal import names_in, refused

from lbopt.linalg import COEFFICIENTS, newton_schulz

BANDS = {  # set -> (least singular value, of the Frobenius norm; low; high), as the docstring says
    "muon": (0.002, 0.68, 1.21),
    "quintic": (0.002, 0.85, 1.15),
    "polar_express_5": (0.002, 0.85, 1.15),
    "cans": (0.002, 0.88, 1.12),
    "polar_express": (0.002, 0.99, 1.01),
    "deepseek": (0.002, 0.99, 1.01),
    "newton": (0.002, 0.99, 1.01),
    "cubic": (0.007, 0.77, 1.3),
}
# Steps and coefficients written once more from their sources, with the rule for further steps.
SOURCES = {
    "muon": (5, lambda i: (3.4445, -4.7750, 2.0315)),
    "newton": (12, lambda i: (2, -1.5, 0.5)),
    "deepseek": (10, lambda i: (3.4445, -4.7750, 2.0315) if i < 8 else (2, -1.5, 0.5)),
    "polar_express": (
        8,
        lambda i: [
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.8750, -1.2500, 0.3750),
        ][min(i, 7)],
    ),
    "quintic": (
        5,
        lambda i: [
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ][i % 5],
    ),
}


def mapped(name, s, steps=None):
    """Return singular values, relative to the Frobenius norm, after the iteration in float64."""
    chosen = COEFFICIENTS[name]
    count, triple = SOURCES.get(name, (chosen.steps, lambda i: chosen.triples[i]))
    y = np.asarray(s, np.float64) / chosen.norm_factor
    for i in range(steps or count):
        a, b, c = triple(i)
        y = a * y + b * y**3 + c * y**5
    return y


def spectrum(rng, rows, columns, values):
    """Return a matrix with these singular values, and its singular vectors, in float64."""
    u, _ = np.linalg.qr(rng.normal(size=(rows, len(values))))
    v, _ = np.linalg.qr(rng.normal(size=(columns, len(values))))
    return u @ np.diag(values) @ v.T, u, v


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_singular_values_follow_the_polynomial_and_end_in_the_band(name):
    rng = np.random.default_rng(0)
    values = np.logspace(-4, 0, 12)
    x, u, v = spectrum(rng, 20, 14, values)
    y = np.asarray(newton_schulz(jnp.asarray(x, jnp.float32), name), np.float64)
    relative = values / np.linalg.norm(values)
    found = u.T @ y @ v
    np.testing.assert_allclose(np.diag(found), mapped(name, relative), atol=3e-4)
    np.testing.assert_allclose(found - np.diag(np.diag(found)), 0, atol=3e-4)

    least, low, high = BANDS[name]
    grid = mapped(name, np.logspace(np.log10(least), 0, 100_001))
    assert low <= grid.min()
    assert grid.max() <= high


def test_products_in_bf16_keep_the_band_within_two_percent():
    rng = np.random.default_rng(1)
    values = np.logspace(-2, 0, 16)
    x, _, _ = spectrum(rng, 16, 64, values)
    y = newton_schulz(jnp.asarray(x, jnp.float32), "muon", dtype=jnp.bfloat16)
    assert y.dtype == jnp.float32
    found = np.linalg.svd(np.asarray(y, np.float64), compute_uv=False)
    assert found.min() >= 0.68 * 0.98
    assert found.max() <= 1.21 * 1.02


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (6, 6), (3, 7, 5), (2, 3, 4, 4)])
def test_stacks_shapes_and_scales(shape):
    x = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    whole = newton_schulz(jnp.asarray(x))
    assert whole.shape == shape
    flat = x.reshape(-1, *shape[-2:])
    for one, expected in zip(flat, whole.reshape(flat.shape), strict=True):
        np.testing.assert_allclose(newton_schulz(jnp.asarray(one)), expected, atol=2e-6)
    for scale in (1e-30, 1e30):
        np.testing.assert_allclose(
            newton_schulz(jnp.asarray(x * np.float32(scale))), whole, atol=5e-6
        )
    np.testing.assert_allclose(
        newton_schulz(jnp.asarray(np.swapaxes(x, -1, -2))), np.swapaxes(whole, -1, -2), atol=5e-6
    )


def test_zero_stays_zero_and_complex_matrices_are_orthogonalized():
    assert not np.any(newton_schulz(jnp.zeros((3, 4, 5))))
    rng = np.random.default_rng(3)
    x = rng.normal(size=(4, 6)) + 1j * rng.normal(size=(4, 6))
    u, _, vh = np.linalg.svd(x, full_matrices=False)
    y = newton_schulz(jnp.asarray(x, jnp.complex64), "deepseek")
    np.testing.assert_allclose(y, u @ vh, atol=2e-3)


@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (64, 64)])
def test_bits_are_those_of_optax(shape):
    """XLA writes products of smaller matrices as loops, whose rounding depends on their place."""
    x = jnp.asarray(np.random.default_rng(4).normal(size=shape), jnp.float32)
    theirs = optax.contrib._muon.orthogonalize_via_newton_schulz(
        x, jnp.asarray((3.4445, -4.7750, 2.0315))
    )
    ours = jax.jit(functools.partial(newton_schulz, eps=1e-8))(x)
    np.testing.assert_array_equal(ours, theirs)


def test_steps_beyond_the_set_repeat_as_published():
    s = np.array([0.3, 0.9])
    x = jnp.diag(jnp.asarray(s, jnp.float32))
    relative = s / np.linalg.norm(s)
    for name, steps in [("polar_express", 9), ("quintic", 7), ("muon", 2), ("deepseek", 11)]:
        assert steps != SOURCES[name][0]
        np.testing.assert_allclose(
            np.diag(newton_schulz(x, name, steps)), mapped(name, relative, steps), atol=1e-4
        )


def test_wrong_coefficients_are_refused_in_one_line():
    x = jnp.ones((2, 2))
    with refused("coefficients", "muno", "choice") as caught:
        newton_schulz(x, "muno")
    assert "muon" in names_in(caught)
    for wrong in ((), [(1.0, 2.0)], [("a", 1, 2)], 3):
        with refused("coefficients", wrong, "value"):
            newton_schulz(x, wrong)
    with refused("steps", 0, "value"):
        newton_schulz(x, steps=0)
    triples = [(1.5, -0.5, 0.0)]
    np.testing.assert_allclose(newton_schulz(x, triples, 40), jnp.full((2, 2), 0.5), atol=1e-5)
