"""Compressors: the kept elements, the loss, and the data sent."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused

from lbopt.aggregators import Group, _compress
from tests.oracles import low_bits

KEY = jax.random.key(3)
ALL = [
    _compress.identity(),
    _compress.topk(0.1),
    _compress.topk(k=5),
    _compress.randk(0.25),
    _compress.sign(),
    _compress.cast(4, 3),
    _compress.cast(5, 10),
]


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(0).normal(size=(3, 2, 101)).astype(np.float32)


def known_of(compressor, x, key=KEY):
    """Return the knowledge of three replicas about two layers."""
    return _compress.known_of(compressor, Group(len(x)), [jnp.asarray(x)], [key])[0]


@functools.partial(jax.jit, static_argnums=0)
def sent(compressor, x, key=KEY):
    """Return the message, and what is made of it."""
    known = known_of(compressor, x, key)
    message = compressor.compress(x, known)
    return message, compressor.decompress(message, known)


def message_of(compressor, x):
    return sent(compressor, x)[0]


def through(compressor, x, key=KEY):
    return np.asarray(sent(compressor, x, key)[1])


def test_topk_keeps_the_largest_numbers(x):
    out = through(_compress.topk(k=7), x)
    for row, kept in zip(x.reshape(-1, 101), out.reshape(-1, 101), strict=True):
        places = np.argsort(-np.abs(row), kind="stable")[:7]
        wanted = np.zeros_like(row)
        wanted[places] = row[places]
        np.testing.assert_array_equal(kept, wanted)


def test_randk_keeps_the_same_places_on_all_replicas_and_others_at_other_steps(x):
    out = through(_compress.randk(k=20), x)
    places = out != 0
    assert np.all(places == places[0, 0])
    assert places[0, 0].sum() == 20
    np.testing.assert_array_equal(out[places], x[places])
    assert np.any(places != (through(_compress.randk(k=20), x, jax.random.key(4)) != 0))


def test_randk_draws_all_places_equally_often():
    keys = jax.random.split(jax.random.key(0), 2000)
    one = jnp.ones((1, 1, 20))
    few = _compress.randk(k=5)

    def draw(key):
        known = _compress.Known((20,), key)
        return few.decompress(few.compress(one, known), known)[0, 0]

    drawn = jax.vmap(draw)(keys)
    counts = np.asarray(drawn).sum(0)
    assert np.abs(counts - 500).max() < 5 * np.sqrt(2000 * 0.25 * 0.75)


def test_sign_is_one_bit_and_a_size(x):
    compressor = _compress.sign()
    message = message_of(compressor, x)
    assert message["bits"].dtype == jnp.uint8
    assert message["bits"].shape == (3, 2, 13)
    wanted = np.where(x >= 0, 1, -1) * np.abs(x).mean(-1, keepdims=True)
    np.testing.assert_allclose(through(compressor, x), wanted, rtol=1e-6)


@pytest.mark.parametrize("shape", [(16, 130), (2, 24, 128), (3, 128), (1000,), ()])
def test_layouts_of_bits_are_all_the_same(shape):
    """A matrix whose rows divide into eighths keeps its layout; others are one row.

    Both give the same bits in the same order.
    """
    x = np.random.default_rng(1).normal(size=(2, 3, *shape)).astype(np.float32)
    compressor = _compress.sign()
    bits = message_of(compressor, x)["bits"].reshape(2, 3, -1)
    flat = x.reshape(2, 3, -1)
    row = message_of(compressor, flat)["bits"]
    np.testing.assert_array_equal(bits, row)
    out = through(compressor, x)
    assert out.shape == x.shape
    np.testing.assert_allclose(
        out.reshape(2, 3, -1), through(compressor, flat), rtol=1e-6
    )  # means of two magnitudes
    np.testing.assert_array_equal(np.sign(out), np.where(x >= 0, 1, -1))


def test_cast_rounds_at_the_largest_power_of_two_that_fits(x):
    tiny = x * np.float32(1e-7)
    shift = 7 - np.ceil(np.log2(np.abs(tiny).max((0, 2))[:, None])).astype(
        int
    )  # the maximum over all replicas, per layer
    wanted = np.ldexp(low_bits.rounded(np.ldexp(tiny, shift), 4, 3), -shift)
    np.testing.assert_array_equal(through(_compress.cast(4, 3), tiny), wanted.astype(np.float32))
    assert message_of(_compress.cast(4, 3), tiny)["payload"].dtype == jnp.float8_e4m3


@pytest.mark.parametrize("compressor", ALL, ids=lambda one: one.name)
def test_contraction(compressor, x):
    keys = jax.random.split(KEY, 200)
    lost = np.mean(
        [
            np.sum((through(compressor, x, key) - x) ** 2, -1)
            for key in keys[: 200 if "rand" in compressor.name else 1]
        ],
        0,
    )
    bound = (1 - compressor.delta(101)) * np.sum(x.astype(np.float64) ** 2, -1)
    slack = 1.05 if "rand" in compressor.name else 1 + 1e-6
    assert np.all(lost <= bound * slack)


@pytest.mark.parametrize("compressor", ALL, ids=lambda one: one.name)
def test_zero_stays_zero(compressor):
    np.testing.assert_array_equal(through(compressor, np.zeros((2, 1, 30), np.float32)), 0)


@pytest.mark.parametrize("compressor", ALL, ids=lambda one: one.name)
@pytest.mark.parametrize("shape", [(101,), (16, 128), (9, 130)])
def test_message_bytes_are_those_of_its_arrays(compressor, shape):
    x = np.random.default_rng(0).normal(size=(1, 1, *shape)).astype(np.float32)
    message = message_of(compressor, x)
    assert sum(array.nbytes for array in message.values()) == compressor.message_bytes(x.size)


def test_break_even_of_topk_is_at_one_over_the_replicas():
    n = 1_000_000
    replicas = 64
    ring = 2 * 4 * n * (replicas - 1) / replicas
    assert (
        _compress.topk(0.99 / replicas).wire_bytes([n], replicas)
        < ring
        < _compress.topk(1.01 / replicas).wire_bytes([n], replicas)
    )
    at_1024 = _compress.topk(0.01).wire_bytes([n], 1024) / (2 * 4 * n * 1023 / 1024)
    assert at_1024 == pytest.approx(10.24)


def test_randk_wins_on_any_number_of_replicas():
    for replicas in (2, 1024):
        assert (
            _compress.randk(0.01).wire_bytes([10_000], replicas)
            == 2 * 400 * (replicas - 1) / replicas
        )


def test_cast_sends_pieces_sums_and_the_largest_number_of_each_vector():
    pieces = 300 * 7 / 8
    sums = 4 * 300 * 7 / 8
    largest = 2 * 4 * 2 * 7 / 8
    assert _compress.cast(5, 2).wire_bytes([100, 200], 8) == pieces + sums + largest


@pytest.mark.parametrize(
    ("make", "field", "value", "code"),
    [
        (lambda: _compress.topk(), "fraction", None, "conflict"),
        (lambda: _compress.topk(0.1, 3), "fraction", 0.1, "conflict"),
        (lambda: _compress.topk(0.0), "fraction", 0.0, "value"),
        (lambda: _compress.randk(1.5), "fraction", 1.5, "value"),
        (lambda: _compress.randk(k=0), "k", 0, "value"),
        (lambda: _compress.topk(k=2.5), "k", 2.5, "value"),
        (lambda: _compress.cast(9, 2), "exponent_bits", 9, "value"),
    ],
)
def test_refusals(make, field, value, code):
    with refused(field, value, code):
        make()
