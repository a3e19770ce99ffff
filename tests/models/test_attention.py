"""Attention in few passes equals attention by its definition, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lbopt.models import _attention

BATCH = 3
HEADS = 2
WIDTH = 4
QUERIES = 5
KEYS = 6
SHARE = 0.75


@pytest.fixture(scope="module")
def arrays():
    """Return queries, keys, values, mask, dropout's keep mask, and weights of the summed output."""
    rng = np.random.default_rng(0)
    shapes = [(BATCH, HEADS, WIDTH, length) for length in (QUERIES, KEYS, KEYS)]
    mask = np.array([[1] * KEYS, [1, 1, 0, 0, 1, 0], [0] * KEYS], bool)
    keep = rng.random((BATCH, HEADS, QUERIES, KEYS)) < SHARE
    return (
        *(3 * rng.standard_normal(shape) for shape in shapes),
        mask,
        keep,
        rng.standard_normal(shapes[0]),
    )


def by_definition(query, key, value, mask, keep):
    scores = jnp.einsum("bhkq,bhks->bhqs", query, key) / query.shape[2] ** 0.5
    probabilities = jax.nn.softmax(
        jnp.where(mask[:, None, None], scores, jnp.finfo(scores.dtype).min)
    )
    probabilities = probabilities if keep is None else jnp.where(keep, probabilities / SHARE, 0)
    return jnp.einsum("bhqs,bhks->bhkq", probabilities, value)


def in_few_passes(query, key, value, mask, keep):
    share = 1.0 if keep is None else SHARE
    scale = query.shape[2] ** -0.5
    return _attention.attend(query, key, value, mask[:, None, None], keep, share, scale)


def results(fn, query, key, value, mask, keep, weights):
    def total(query, key, value):
        y = fn(query, key, value, mask, keep)
        return jnp.sum(weights * jnp.sin(y.astype(weights.dtype))), y

    gradients, y = jax.grad(total, (0, 1, 2), has_aux=True)(query, key, value)
    return y, *gradients


@pytest.mark.parametrize("drops", [False, True])
def test_values_and_gradients_in_float64(arrays, drops):
    """The third example's mask hides all keys: attention is uniform, scores get no gradient."""
    with jax.enable_x64(True):
        *inputs, keep, weights = (jnp.asarray(array) for array in arrays)
        found, expected = (
            results(fn, *inputs, keep if drops else None, weights)
            for fn in (in_few_passes, by_definition)
        )
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-12)
    assert not np.any(found[1][2])
    assert np.any(found[3][2])


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("groups", [2, 6])
def test_causal_attention_in_blocks(groups, drops):
    """Keys of fewer heads stand for their repetition; three blocks, the last one shorter."""
    heads = 6
    length = 2 * _attention.SHORTEST_BLOCK + 3
    rng = np.random.default_rng(0)
    shapes = [(2, number, WIDTH, length) for number in (heads, groups, groups)]
    inputs = [rng.standard_normal(shape) for shape in shapes]
    keep = rng.random((2, heads, length, length)) < SHARE if drops else None
    weights = rng.standard_normal(shapes[0])
    before = np.tril(np.ones((length, length), bool))

    def whole(query, key, value, mask, keep):
        key, value = (jnp.repeat(x, heads // groups, axis=1) for x in (key, value))
        scores = jnp.einsum("bhkq,bhks->bhqs", query, key) * 0.7
        probabilities = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
        if keep is not None:
            probabilities = jnp.where(keep, probabilities / SHARE, 0)
        return jnp.einsum("bhqs,bhks->bhkq", probabilities, value)

    def in_blocks(query, key, value, mask, keep):
        share = 1.0 if keep is None else SHARE
        return _attention.attend_causally(query, key, value, keep, share, 0.7)

    with jax.enable_x64(True):
        arrays = [jnp.asarray(array) for array in inputs]
        found, expected = (
            results(fn, *arrays, before, keep, jnp.asarray(weights)) for fn in (in_blocks, whole)
        )
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-12)


def rounding_probabilities(query, key, value, mask, keep):
    """Use fp32 scores and softmax, and round probabilities to bf16 for the product with values."""
    scores = (
        jnp.einsum("bhkq,bhks->bhqs", query, key, preferred_element_type=jnp.float32)
        / query.shape[2] ** 0.5
    )
    probabilities = jax.nn.softmax(scores).astype(value.dtype)
    return jnp.einsum("bhqs,bhks->bhkq", jnp.where(keep, probabilities / SHARE, 0), value)


def test_bf16_is_as_near_to_fp32_as_it_usually_is():
    rng = np.random.default_rng(0)
    shapes = [(8, 2, 16, 32)] * 3
    inputs = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    mask = jnp.ones((8, 32), bool)
    keep = jnp.asarray(rng.random((8, 2, 32, 32)) < SHARE)
    weights = jnp.asarray(rng.standard_normal(shapes[0]), jnp.float32)

    exact = results(
        rounding_probabilities,
        *(array.astype(jnp.float32) for array in inputs),
        mask,
        keep,
        weights,
    )

    gaps = {}
    for fn in (in_few_passes, rounding_probabilities):
        found = results(fn, *inputs, mask, keep, weights)
        assert {result.dtype for result in found} == {jnp.dtype(jnp.bfloat16)}
        pairs = zip(found, exact, strict=True)
        gaps[fn] = np.array(
            [np.linalg.norm(np.float32(a) - b) / np.linalg.norm(b) for a, b in pairs]
        )

    assert np.all(gaps[in_few_passes] < 1.3 * gaps[rounding_probabilities])
    assert np.all(gaps[in_few_passes] < 2**-7)


def test_large_scores_stay_finite(arrays):
    query, key, value, mask, _, weights = (jnp.asarray(array, jnp.float32) for array in arrays)
    for result in results(
        in_few_passes, 1e3 * query, 1e3 * key, value, mask.astype(bool), None, weights
    ):
        assert np.all(np.isfinite(result))


def test_what_is_kept_is_narrow(arrays):
    """No residual of the size of the scores is wider than the dtype of the products."""
    *inputs, mask, keep, _ = arrays
    inputs = [jnp.asarray(array, jnp.bfloat16) for array in inputs]
    _, pull = jax.vjp(lambda *given: in_few_passes(*given, mask, keep), *inputs)
    squares = [leaf.dtype for leaf in jax.tree.leaves(pull) if leaf.shape == keep.shape]
    assert sorted(squares, key=str) == [jnp.bfloat16, jnp.bool_]
