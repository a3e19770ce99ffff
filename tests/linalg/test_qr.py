"""QR over devices against LAPACK in float64; words and messages counted in the program."""

import functools
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P
from refusal import refused

from lbopt.linalg import cholesky_qr2, grqr, orthonormal_basis, tsqr

DEVICES = 4


def matrix(condition, rows=64, columns=6, seed=0):
    """Return a matrix in float64 with singular values from 1 down to 1 / condition."""
    rng = np.random.default_rng(seed)
    u, _ = np.linalg.qr(rng.normal(size=(rows, columns)))
    v, _ = np.linalg.qr(rng.normal(size=(columns, columns)))
    return u @ np.diag(np.logspace(0, -np.log10(condition), columns)) @ v.T


def over_devices(fn, count=DEVICES):
    mesh = jax.make_mesh((count,), ("x",), axis_types=(AxisType.Auto,))
    return jax.jit(
        jax.shard_map(
            functools.partial(fn, axis_name="x"),
            mesh=mesh,
            in_specs=P("x"),
            out_specs=(P("x"), P()),
            check_vma=False,
        )
    )


def check_factors(a, q, r, limit=1.5e-6):
    """Check orthogonality and backward error in float64, in multiples of the fp32 roundoff."""
    q = np.asarray(q, np.float64)
    r = np.asarray(r, np.float64)
    assert np.linalg.norm(q.T @ q - np.eye(q.shape[1])) <= limit
    assert np.linalg.norm(q @ r - a) <= limit * np.linalg.norm(a)
    assert np.all(np.diag(r) >= 0)
    assert not np.any(np.tril(r, -1))


def lapack(a):
    """Return R of the factorization with a positive diagonal, in float64."""
    _, r = np.linalg.qr(a)
    return np.sign(np.diag(r))[:, None] * r


@pytest.mark.parametrize("condition", [1e1, 1e3, 1e5, 1e8, 1e12])
@pytest.mark.parametrize("factor", [tsqr, cholesky_qr2])
def test_factors_are_orthogonal_and_accurate_for_every_condition(factor, condition):
    a = np.asarray(matrix(condition), np.float32)
    for q, r in (factor(jnp.asarray(a)), over_devices(factor)(a)):
        check_factors(a.astype(np.float64), q, r)
        if condition <= 1e3:  # R is well determined
            np.testing.assert_allclose(r, lapack(a.astype(np.float64)), atol=2e-6 * condition)


def test_cholesky_qr2_falls_back_exactly_where_it_must():
    run = over_devices(functools.partial(cholesky_qr2, fallback="none"))
    good, _ = run(np.asarray(matrix(1e2), np.float32))
    assert np.linalg.norm(np.asarray(good).T @ np.asarray(good) - np.eye(6)) <= 1.5e-6
    for condition in (1e6, 1e12):
        a = np.asarray(matrix(condition), np.float32)
        bad, _ = run(a)
        gap = np.asarray(bad, np.float64)
        assert not np.linalg.norm(gap.T @ gap - np.eye(6)) <= 1e-3
        check_factors(a.astype(np.float64), *over_devices(cholesky_qr2)(a))


@pytest.mark.parametrize("condition", [1e1, 1e3, 1e5, 1e12])
def test_bases_of_stacks_are_orthonormal_and_span_the_columns(condition):
    """Singular and huge matrices stand in the same stack."""
    a = np.asarray(matrix(condition), np.float32)
    singular = np.where(np.arange(6) < 3, a, 0)
    stack = np.stack([a, 1e30 * a, singular])
    found = np.asarray(jax.jit(orthonormal_basis)(jnp.asarray(stack[:2])), np.float64)
    found = np.concatenate([found, orthonormal_basis(jnp.asarray(stack))[2:]])
    for one, q in zip(stack.astype(np.float64), found, strict=True):
        assert np.linalg.norm(q.T @ q - np.eye(6)) <= 1.5e-6
        assert np.linalg.norm(q @ (q.T @ one) - one) <= 1.5e-6 * np.linalg.norm(one)


def test_few_bases_need_householders_qr(monkeypatch):
    monkeypatch.setattr(jnp.linalg, "qr", lambda a: types.SimpleNamespace(Q=jnp.zeros_like(a)))
    used = [
        not np.any(orthonormal_basis(jnp.asarray(matrix(condition), jnp.float32)))
        for condition in (1e2, 1e3, 1e6)
    ]
    assert used == [False, False, True]


def test_bad_scaling_of_columns_needs_no_fallback():
    a = np.asarray(matrix(10) * np.logspace(0, -12, 6), np.float32)
    q, r = cholesky_qr2(jnp.asarray(a), fallback="none")
    assert np.linalg.norm(np.asarray(q).T @ np.asarray(q) - np.eye(6)) <= 1.5e-6
    off = np.linalg.norm(np.asarray(q, np.float64) @ np.asarray(r, np.float64) - a, axis=0)
    assert np.all(off <= 1.5e-6 * np.linalg.norm(a, axis=0))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_result_does_not_depend_on_the_number_of_devices(count):
    """Three devices take the all-gather, two and four the rounds."""
    a = np.asarray(matrix(50, rows=36), np.float32)
    expected, upper = tsqr(jnp.asarray(a))
    q, r = over_devices(tsqr, count)(a)
    np.testing.assert_allclose(q, expected, atol=5e-6)
    np.testing.assert_allclose(r, upper, atol=5e-6)


def test_blocks_with_fewer_rows_than_columns():
    a = np.asarray(matrix(50, rows=8, columns=5), np.float32)
    check_factors(a.astype(np.float64), *over_devices(tsqr)(a))


def test_complex_narrow_and_singular_matrices():
    rng = np.random.default_rng(1)
    a = np.asarray(rng.normal(size=(12, 4)) + 1j * rng.normal(size=(12, 4)), np.complex64)
    for factor in (tsqr, cholesky_qr2):
        for q, r in (factor(jnp.asarray(a)), over_devices(factor)(a)):
            np.testing.assert_allclose(np.asarray(q).conj().T @ q, np.eye(4), atol=1e-6)
            np.testing.assert_allclose(q @ r, a, atol=5e-6)
            assert np.all(np.abs(np.diag(r).imag) <= 1e-6)
        q, _ = factor(jnp.asarray(a.real, jnp.bfloat16))
        assert q.dtype == jnp.bfloat16
        q, r = factor(jnp.zeros((8, 3)))
        assert np.all(np.isfinite(q))
        assert not np.any(r)


def counted(fn, a, count=DEVICES):
    """Return {collective: (count, words)} of the compiled program over some devices."""
    text = over_devices(fn, count).lower(a).compile().as_text()
    found = {}
    for line in text.splitlines():
        for kind in ("all-reduce", "all-gather", "collective-permute", "all-to-all"):
            if f" {kind}(" in line or f" {kind}-start(" in line:
                shape = line.split("[")[1].split("]")[0]
                words = int(np.prod([int(n) for n in shape.split(",")])) if shape else 1
                number, total = found.get(kind, (0, 0))
                found[kind] = (number + 1, total + words)
    return found


def test_words_and_messages_are_those_of_the_docstrings():
    a = np.asarray(matrix(10), np.float32)
    assert counted(tsqr, a) == {"collective-permute": (2, 2 * 36)}  # log2(4) messages of n^2
    assert counted(tsqr, a[:63], 3) == {"all-gather": (1, 3 * 36)}
    two_passes = counted(functools.partial(cholesky_qr2, fallback="none"), a)
    assert two_passes["all-reduce"][0] == 3  # the norms of the columns, and one Gram matrix a pass
    assert two_passes["all-reduce"][1] <= 2 * 36 + 2 * 6


@pytest.mark.parametrize("condition", [1e2, 1e12])
def test_grqr_factors_products_and_inverses(condition):
    a, b, c = (matrix(condition, 5, 5, seed=seed) for seed in range(3))
    with jax.enable_x64(True):
        u, (ra, rb, rc), v = grqr(
            [jnp.asarray(one) for one in (a, b, c)], [False, True, False], key=jax.random.key(0)
        )
        for basis in (u, v):
            np.testing.assert_allclose(basis @ basis.T, np.eye(5), atol=1e-13)
        for upper in (ra, rb, rc):
            assert not np.any(np.abs(np.tril(upper, -1)) > 1e-14)
        # A = U R_a Q^T for a common Q, so the singular values of each factor are R's.
        for factor, upper in ((a, ra), (b, rb), (c, rc)):
            np.testing.assert_allclose(
                np.linalg.svd(upper, compute_uv=False),
                np.linalg.svd(factor, compute_uv=False),
                atol=1e-13,
            )
        if condition <= 1e2:
            product = a @ np.linalg.inv(b) @ c
            built = u @ ra @ np.linalg.inv(rb) @ rc @ v
            np.testing.assert_allclose(built, product, rtol=1e-9, atol=1e-11)


def test_grqr_reveals_the_rank_of_a_product():
    with jax.enable_x64(True):
        low = matrix(1e2, 8, 3) @ matrix(1e2, 8, 3, seed=1).T  # rank 3
        full = matrix(1e1, 8, 8, seed=2)
        _, (r1, r2), _ = grqr([jnp.asarray(low), jnp.asarray(full)], key=jax.random.key(1))
        product = np.asarray(r1 @ r2)
        best = np.linalg.svd(low @ full, compute_uv=False)
        assert np.linalg.norm(product[3:, 3:], 2) <= 1e-13
        assert np.linalg.svd(product[:3, :3], compute_uv=False)[-1] >= best[2] / (8 * 8)


def test_wrong_shapes_are_refused_in_one_line():
    wide = jnp.ones((2, 3))
    with refused("a", code="value"):
        cholesky_qr2(wide)
    with refused("a", code="value"):
        orthonormal_basis(wide)
    with refused("a", code="type"):
        tsqr(jnp.ones((2, 3, 4)))
    with refused("fallback", "qr", "choice"):
        cholesky_qr2(wide.T, fallback="qr")
    key = jax.random.key(0)
    for factors in ([], [wide], [jnp.eye(2), jnp.eye(3)]):
        with refused("factors", code="type"):
            grqr(factors, key=key)
    with refused("inverted", [True], "value"):
        grqr([jnp.eye(2)] * 2, [True], key=key)


STACKS = """
import jax, jax.numpy as jnp
from lbopt.linalg import of_each, orthonormal_basis

xs = [jax.random.normal(jax.random.key(0), (4, size, size)) for size in (64, 96, 128, 160)]
factored = jax.jit(
    lambda xs: [(of_each(lambda x: jnp.linalg.qr(x).Q, x), orthonormal_basis(x)) for x in xs]
)
for _ in range(3):
    jax.block_until_ready(factored(xs))
print("finished")
"""


@pytest.mark.process
def test_stacks_of_several_sizes_do_not_wait_for_each_other_on_two_threads():
    """jnp.linalg.qr alone hangs here, with jaxlib 0.10.2 in the first program."""
    done = subprocess.run(
        [sys.executable, "-c", STACKS],
        env={**os.environ, "PJRT_NPROC": "2"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "finished\n", done.stderr
