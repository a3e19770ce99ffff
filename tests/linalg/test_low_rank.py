"""Sketches, low-rank approximations and inverse roots against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchanges import exchanges
from jax.sharding import AxisType, PartitionSpec as P
from refusal import refused

from lbopt.linalg import LowRank, gaussian_sketch, glu, inverse_root, range_finder, srht

KEY = jax.random.key(0)


def decaying(rows=64, columns=48, power=1.0):
    """Return a matrix in fp32 with singular values 1 / i^power."""
    rng = np.random.default_rng(0)
    u, _ = np.linalg.qr(rng.normal(size=(rows, columns)))
    v, _ = np.linalg.qr(rng.normal(size=(columns, columns)))
    return np.asarray(u @ np.diag(np.arange(1.0, columns + 1) ** -power) @ v.T, np.float32)


def best_error(a, rank):
    return np.linalg.norm(np.linalg.svd(a, compute_uv=False)[rank:])


def over_devices(fn, out_specs, in_specs=None):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    return jax.jit(
        jax.shard_map(
            functools.partial(fn, axis_name="x"),
            mesh=mesh,
            in_specs=P("x") if in_specs is None else in_specs,
            out_specs=out_specs,
            check_vma=False,
        )
    )


@pytest.mark.parametrize("sketch", [gaussian_sketch, srht])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_sketches_keep_norms_on_average_and_are_isometries_of_subspaces(sketch, split):
    basis, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(256, 4)))
    basis = np.asarray(basis, np.float32)

    def run(a, key, axis_name=None):
        return sketch(a, 64, key=key, axis_name=axis_name)

    run = over_devices(run, P(), (P("x"), P())) if split else jax.jit(run)
    sketched = (np.asarray(run(basis, jax.random.key(seed)), np.float64) for seed in range(30))
    grams = [one.T @ one for one in sketched]
    np.testing.assert_allclose(np.mean(grams, axis=0), np.eye(4), atol=0.15)
    # Davidson and Szarek: beyond 1 +- (sqrt(4 / 64) + 0.25) with probability 2 exp(-2).
    squares = np.sqrt(np.linalg.eigvalsh(np.stack(grams)))
    assert np.mean((squares.min(1) < 0.5) | (squares.max(1) > 1.5)) <= 0.27


def test_srht_is_a_hadamard_transform_of_signed_rows():
    a = np.random.default_rng(2).normal(size=(6, 3)).astype(np.float32)
    whole = np.asarray(srht(jnp.asarray(a), 8, key=KEY), np.float64)
    # All rows of the transform are taken, so it is an isometry.
    np.testing.assert_allclose(whole.T @ whole, a.astype(np.float64).T @ a, rtol=1e-5, atol=1e-5)
    with refused("size", 9, "value"):
        srht(jnp.asarray(a), 9, key=KEY)


@pytest.mark.parametrize("sketch", ["gaussian", "srht"])
@pytest.mark.parametrize("iterations", [0, 1])
def test_the_range_finder_is_near_the_best_approximation(sketch, iterations):
    a = decaying()
    find = functools.partial(
        range_finder, rank=8, key=KEY, sketch=sketch, power_iterations=iterations
    )
    for q in (find(jnp.asarray(a)), over_devices(find, P("x"))(a)):
        q = np.asarray(q, np.float64)
        np.testing.assert_allclose(q.T @ q, np.eye(16), atol=2e-6)
        error = np.linalg.norm(a - q @ (q.T @ a))
        # Theorem 10.5 of Halko et al. for 16 columns, with the rank that gives the least bound.
        bound = min(np.sqrt(1 + k / (15 - k)) * best_error(a, k) for k in range(1, 14))
        assert error <= (1 if iterations == 0 else 0.7) * bound
        assert error >= best_error(a, 16) * (1 - 1e-5)


@pytest.mark.parametrize("sketch", ["gaussian", "srht"])
def test_glu_is_stable_with_twice_as_many_rows_as_columns(sketch):
    a = decaying()
    find = functools.partial(glu, rank=8, key=KEY, sketch=sketch, oversampling=0)
    for left, right in (find(jnp.asarray(a)), over_devices(find, LowRank(P("x"), P()))(a)):
        built = np.asarray(left, np.float64) @ np.asarray(right, np.float64)
        assert np.linalg.norm(a - built) <= 3 * best_error(a, 8)
    exact = decaying()[:, :3] @ decaying()[:3, :]
    left, right = glu(jnp.asarray(exact), 3, key=KEY)
    np.testing.assert_allclose(left @ right, exact, atol=1e-5)


def sent(run):
    """Return [(collective, words)] of a function over devices."""
    text = run.lower(decaying()).compile().as_text()
    return [(op, words) for op, _, words, _ in exchanges(text, 4)]


def test_glu_over_devices_is_one_all_reduce():
    # Sketches of 8 columns and 16 rows.
    find = functools.partial(glu, rank=4, oversampling=4, key=KEY)
    run = over_devices(find, LowRank(P("x"), P()))
    assert sent(run) == [("all-reduce", 16 * (48 + 8))]


def test_an_iteration_of_the_range_finder_is_one_all_reduce_and_one_tsqr():
    find = functools.partial(range_finder, rank=4, oversampling=4, key=KEY, power_iterations=1)
    # The first TSQR is that of the sketch; each sends log2(4) messages.
    messages = [("collective-permute", 8 * 8)] * 4
    assert sent(over_devices(find, P("x"))) == [("all-reduce", 48 * 8), *messages]


def test_a_rank_above_the_smaller_side_is_refused():
    for find in (range_finder, glu):
        with refused("rank", 5, "value"):
            find(jnp.ones((8, 4)), 5, key=KEY)
        with refused("sketch", "sparse", "choice"):
            find(jnp.ones((8, 4)), 2, key=KEY, sketch="sparse")


def positive(seed=0, n=8, condition=1e4):
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(n, n)))
    return q @ np.diag(np.logspace(0, -np.log10(condition), n)) @ q.T


@pytest.mark.parametrize("root", [1, 2, 4])
def test_inverse_roots_equal_those_of_the_eigenvalues(root):
    a = np.stack([positive(0), 5 * positive(1)])
    values, vectors = np.linalg.eigh(a + 1e-3 * np.eye(8))
    expected = (vectors * values[:, None, :] ** (-1 / root)) @ np.swapaxes(vectors, -1, -2)
    found = inverse_root(jnp.asarray(a, jnp.float32), root, eps=1e-3)
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-3 * np.abs(expected).max())

    # Newton's ridge is relative to the Frobenius norm.
    for one in a:
        ridged = one + 1e-3 * np.linalg.norm(one) * np.eye(8)
        values, vectors = np.linalg.eigh(ridged)
        expected = (vectors * values ** (-1 / root)) @ vectors.T
        found = inverse_root(jnp.asarray(one, jnp.float32), root, eps=1e-3, method="newton")
        np.testing.assert_allclose(found, expected, atol=2e-3 * np.abs(expected).max())


def test_inverse_roots_of_indefinite_and_zero_matrices_are_finite():
    a = np.diag([1.0, 0.0, -1e-3])
    found = np.asarray(inverse_root(jnp.asarray(a, jnp.float32), 2, eps=1e-2))
    np.testing.assert_allclose(np.diag(found), (np.diag(a) + 1e-3 + 1e-2) ** -0.5, rtol=1e-4)
    assert not np.any(inverse_root(jnp.zeros((3, 3)), 2, eps=0.0))
    assert not np.any(inverse_root(jnp.zeros((3, 3)), 2, method="newton"))
    with refused("root", 2.5, "value"):
        inverse_root(jnp.eye(2), 2.5, method="newton")
    with refused("method", "svd", "choice"):
        inverse_root(jnp.eye(2), 2, method="svd")
