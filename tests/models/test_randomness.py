"""Dropout and stochastic depth: the share dropped, the rest's scale, and when draws repeat."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused

from lbopt import replicas
from lbopt.models._randomness import Dropout, StochasticDepth, draw

LEVELS = 2**16


def dropped(module, x, key=0, train=True):
    return np.asarray(module.apply({}, x, train, rngs={"example": jax.random.key(key)}))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_rate_and_the_mean(rate):
    """Kept values are x / (1 - rate), with the rate in 16 bits; their number is binomial."""
    x = jnp.full((64, 5, 300), 3.0)
    y = dropped(Dropout(rate), x)
    met = round(rate * LEVELS) / LEVELS
    assert abs(met - rate) <= 2**-17
    kept = y != 0
    np.testing.assert_allclose(y[kept], 3 / (1 - met), rtol=2e-7)
    deviation = np.sqrt(rate * (1 - rate) / x.size)
    assert abs(kept.mean() - (1 - met)) < 4 * deviation
    assert abs(y.mean() / 3 - 1) < 4 * deviation / (1 - rate)
    # Every example, and every position of an example, loses its share.
    assert np.abs(kept.mean((1, 2)) - (1 - met)).max() < 5 * np.sqrt(rate * (1 - rate) / 1500)
    assert np.abs(kept.mean(0) - (1 - met)).max() < 5.5 * np.sqrt(rate * (1 - rate) / 64)


def test_a_rate_between_two_levels_is_rounded():
    x = jnp.ones((1, 8))
    for rate, levels in ((0.1, 6554), (1 / 3, 21845), (2**-17, 0), (1.1 * 2**-17, 1)):
        y = dropped(Dropout(rate), x)
        np.testing.assert_array_equal(y[y != 0], np.float32(LEVELS / (LEVELS - levels)))


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, 1 - 2**-18])
@pytest.mark.parametrize(
    ("kind", "field"), [(Dropout, "dropout_rate"), (StochasticDepth, "stochastic_depth_rate")]
)
def test_a_rate_that_drops_all_or_less_than_nothing_is_refused(kind, field, rate):
    with refused(field, rate, "value") as caught:
        dropped(kind(rate), jnp.ones((2, 3)))
    assert "[0, 0.999985]" in caught.value.reason


@pytest.mark.parametrize("kind", [Dropout, StochasticDepth])
def test_identity_in_evaluation_at_rate_zero_and_in_initialisation(kind):
    x = jax.random.normal(jax.random.key(0), (4, 3))
    np.testing.assert_array_equal(kind(0.5).apply({}, x, False), x)
    np.testing.assert_array_equal(kind(0.0).apply({}, x, True), x)
    y, variables = kind(0.5).init_with_output(jax.random.key(0), x, True)
    np.testing.assert_array_equal(y, x)
    assert not variables


def test_stochastic_depth_drops_whole_examples():
    x = jax.random.normal(jax.random.key(0), (2000, 3, 2))
    y = dropped(StochasticDepth(0.25), x)
    kept = np.any(y != 0, (1, 2))
    np.testing.assert_allclose(y, np.where(kept[:, None, None], x / 0.75, 0), rtol=2e-7)
    assert abs(kept.mean() - 0.75) < 4 * np.sqrt(0.25 * 0.75 / 2000)


@pytest.mark.parametrize("kind", [Dropout, StochasticDepth])
def test_dtype_is_kept_and_gradients_follow_what_was_kept(kind):
    x = jnp.ones((16, 4), jnp.bfloat16)
    assert dropped(kind(0.5), x).dtype == jnp.bfloat16
    key = jax.random.key(0)
    wide = x.astype(jnp.float32)
    grad = jax.grad(lambda x: jnp.sum(kind(0.5).apply({}, x, True, rngs={"example": key})))(wide)
    np.testing.assert_array_equal(grad, dropped(kind(0.5), wide))


def test_draws_are_uniform_16_bit_numbers_in_every_place():
    """The number of draws is odd, so that half a word is left over."""
    numbers = np.asarray(draw(jax.random.key(0), 4000, (5,)))
    assert numbers.dtype == np.int32
    assert numbers.min() >= 0
    assert 65000 < numbers.max() < LEVELS
    np.testing.assert_allclose(numbers.mean(0) / LEVELS, 0.5, atol=4 * np.sqrt(1 / 12 / 4000))
    for bit in range(16):
        np.testing.assert_allclose(
            ((numbers >> bit) & 1).mean(0), 0.5, atol=4.5 * 0.5 / np.sqrt(4000)
        )
    correlation = np.corrcoef(numbers.T) - np.eye(5)
    assert np.abs(correlation).max() < 4.5 / np.sqrt(4000), "places draw independently"
    correlation = np.corrcoef(numbers[:-1, 0], numbers[1:, 0])[0, 1]
    assert abs(correlation) < 4.5 / np.sqrt(4000), "examples draw independently"


def test_an_example_draws_by_its_number_in_the_global_batch():
    whole = draw(jax.random.key(1), 8, (3, 2))
    assert whole.shape == (8, 3, 2)
    np.testing.assert_array_equal(draw(jax.random.key(1), 4, (3, 2)), whole[:4])
    assert not np.any(np.all(whole == draw(jax.random.key(2), 8, (3, 2)), axis=(1, 2)))

    def part(_):
        with replicas.tracing_for(4, "data"):
            return draw(jax.random.key(1), 2, (3, 2))

    np.testing.assert_array_equal(jax.pmap(part, "data")(np.zeros(4)).reshape(8, 3, 2), whole)


class Two(nn.Module):
    """The same layer twice, and once more within another module."""

    @nn.compact
    def __call__(self, x):
        return Dropout(0.5)(x, True), Dropout(0.5)(x, True), Nested(name="inside")(x)


class Nested(nn.Module):
    """A dropout one level deeper."""

    @nn.compact
    def __call__(self, x):
        return Dropout(0.5)(x, True)


def test_modules_keys_and_examples_draw_differently():
    x = jnp.ones((8, 64))
    outputs = [Two().apply({}, x, rngs={"example": jax.random.key(key)}) for key in (0, 1, 0)]
    for one, again in zip(outputs[0], outputs[2], strict=True):
        np.testing.assert_array_equal(one, again)
    masks = np.stack([*outputs[0], *outputs[1]]) != 0
    rows = masks.reshape(-1, 64)
    agreement = (rows[:, None] == rows[None]).mean(-1)
    np.fill_diagonal(agreement, 0.5)
    assert agreement.max() < 0.85, "of 64 independent halves about 32 agree"
    assert agreement.min() > 0.15


class Layer(nn.Module):
    """Counts, in a running sum, what each layer kept."""

    @nn.compact
    def __call__(self, x, _):
        y = Dropout(0.5)(jnp.ones_like(x), True)
        return x + StochasticDepth(0.5)(y, True), y


def test_layers_of_a_scan_draw_differently():
    scanned = nn.scan(Layer, split_rngs={"example": True}, length=4)
    x = jnp.zeros((8, 64))
    _, masks = scanned().apply({}, x, None, rngs={"example": jax.random.key(0)})
    rows = np.asarray(masks).reshape(-1, 64) != 0
    agreement = (rows[:, None] == rows[None]).mean(-1)
    np.fill_diagonal(agreement, 0.5)
    assert 0.15 < agreement.min() < agreement.max() < 0.85


class Product(nn.Module):
    """A layer whose gradient is that of the draws that the forward pass made, or else wrong."""

    @nn.compact
    def __call__(self, x):
        return jnp.sin(StochasticDepth(0.5)(Dropout(0.5)(jnp.exp(x), True), True))


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_recomputation_draws_the_same(prevent_cse):
    """The gradient of the rematerialised layer equals the plain layer's, up to fusion."""
    x = jax.random.normal(jax.random.key(0), (8, 64))

    def output(x, module):
        return jnp.sum(module().apply({}, x, rngs={"example": jax.random.key(5)}))

    remat = nn.remat(
        Product, prevent_cse=prevent_cse, policy=jax.checkpoint_policies.nothing_saveable
    )
    results = [
        jax.jit(jax.value_and_grad(lambda x, m=module: output(x, m)))(x)
        for module in (Product, remat)
    ]
    np.testing.assert_allclose(*[value for value, _ in results], rtol=1e-6)
    np.testing.assert_allclose(*[grad for _, grad in results], rtol=1e-6, atol=1e-7)
    assert 0.5 < np.mean(np.asarray(results[0][1]) == 0) < 0.9
