"""Batch norm of a 1 x 1 convolution that is not kept equals NumPy's, for every scope."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lbopt
from lbopt import replicas
from lbopt.models import _product, _stem
from lbopt.parallel import batch_sharding, make_mesh, replicated_sharding

DEVICES = 4
BATCH = 16
IN = 3
OUT = 5
SCOPES = {"global": 1, "local": 4, "replicas:2": 2, "examples:2": 8, "examples:8": 2}
TILES = {"tiles:2x1@2x2": [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]}
STATISTICS = {"mean": 5.0, "var": 3.0}


@pytest.fixture(scope="module")
def arrays():
    """Return x, kernel, scale, bias and weights; examples differ, so that groups matter."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH, 3, 2, IN)) * rng.uniform(
        0.5, 2, (BATCH, 1, 1, 1)
    ) + rng.standard_normal((BATCH, 1, 1, IN))
    kernel = rng.standard_normal((IN, OUT))
    scale = rng.uniform(0.5, 2, OUT)
    bias = rng.standard_normal(OUT)
    return [
        a.astype(np.float32)
        for a in (x, kernel, scale, bias, rng.standard_normal((BATCH, 3, 2, OUT)))
    ]


def differentiated(scope):
    module = lbopt.BatchNorm(scope, momentum=0.75)

    def loss(x, kernel, scale, bias, weights):
        stats = {name: jnp.full(OUT, value) for name, value in STATISTICS.items()}
        variables = {"params": {"scale": scale, "bias": bias}, "batch_stats": stats}
        y, new = module.apply(variables, x, False, kernel, mutable=["batch_stats"])
        return jnp.sum(weights * jnp.tanh(y)), (y, new["batch_stats"])

    return jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)


def under_jit(scope, arrays):
    def traced(*arguments):
        with replicas.tracing_for(DEVICES):
            return differentiated(scope)(*arguments)

    mesh = make_mesh(DEVICES)
    layouts = [batch_sharding(mesh), *[replicated_sharding(mesh)] * 3, batch_sharding(mesh)]
    return jax.block_until_ready(jax.jit(traced, in_shardings=layouts)(*arrays))


def under_pmap(scope, arrays):
    def traced(*arguments):
        with replicas.tracing_for(DEVICES, "data"):
            (dx, *rest), (y, stats) = differentiated(scope)(*arguments)
            return (dx, *jax.lax.psum(rest, "data")), (y, jax.lax.pmean(stats, "data"))

    x, kernel, scale, bias, weights = arrays
    parts = [a.reshape(DEVICES, BATCH // DEVICES, *a.shape[1:]) for a in (x, weights)]
    axes = (0, None, None, None, 0)
    (dx, *rest), (y, stats) = jax.block_until_ready(
        jax.pmap(traced, "data", in_axes=axes, devices=jax.devices()[:DEVICES])(
            parts[0], kernel, scale, bias, parts[1]
        )
    )
    joined = [a.reshape(BATCH, *a.shape[2:]) for a in (dx, y)]
    return (joined[0], *(a[0] for a in rest)), (joined[1], jax.tree.map(lambda a: a[0], stats))


@pytest.mark.parametrize("run", [under_jit, under_pmap])
@pytest.mark.parametrize("scope", [*SCOPES, *TILES])
def test_equals_numpy(scope, run, arrays, reference):
    x, kernel, scale, bias, weights = (a.astype(np.float64) for a in arrays)
    expected = reference(x @ kernel, scale, bias, weights, {**SCOPES, **TILES}[scope])
    (dx, dkernel, dscale, dbias), (y, stats) = run(scope, arrays)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
    close(y, expected["y"])
    close(dx, expected["dx"] @ kernel.T)
    close(dkernel, np.einsum("nhwc,nhwd->cd", x, expected["dx"]), atol=1e-4)
    close(dscale, expected["dscale"])
    close(dbias, expected["dbias"])
    for name, start in STATISTICS.items():
        close(stats[name], 0.75 * start + 0.25 * expected[name])


def test_statistics_are_those_of_the_kernel_that_is_multiplied():
    """bf16 rounds the kernel 1 + 1/300 to 1; the moments must be those of the rounded kernel."""
    x = jnp.asarray(np.random.default_rng(2).integers(-4, 5, (BATCH, 2, 2, 2)), jnp.bfloat16)
    kernel = jnp.array([[1 + 1 / 300, -1.0], [-1.0, 1 + 1 / 300]])
    module = lbopt.BatchNorm(momentum=0.0, use_scale=False, use_bias=False)
    variables = module.init(jax.random.key(0), x, False)
    _, updated = module.apply(variables, x, False, kernel, mutable=["batch_stats"])
    multiplied = np.asarray(x, np.float64) @ np.array([[1.0, -1.0], [-1.0, 1.0]])
    np.testing.assert_allclose(updated["batch_stats"]["var"], multiplied.var((0, 1, 2)), rtol=1e-5)


def test_output_of_the_convolution_is_not_kept(arrays):
    """Apart from tanh's input, no residual has as many elements as the output."""
    x, kernel, *_ = arrays
    module = lbopt.BatchNorm()
    variables = module.init(jax.random.key(0), x @ kernel, False)

    def kept(fused):
        def total(x, kernel):
            inputs = (x, False, kernel) if fused else (_product.pointwise(x, kernel), False)
            return jnp.sum(module.apply(variables, *inputs, mutable=["batch_stats"])[0])

        shapes = [leaf.shape for leaf in jax.tree.leaves(jax.vjp(total, x, kernel)[1])]
        return sum(int(np.prod(shape)) >= BATCH * 6 * OUT for shape in shapes)

    assert kept(fused=True) == 0 < kept(fused=False)


@pytest.mark.parametrize(
    ("pixels", "out", "fused"), [(16, 64, True), (15, 64, False), (64, 8, False)]
)
def test_fused_only_where_channels_grow_and_images_are_large(pixels, out, fused):
    seen = []

    def norm(x, use_running_average, kernel=None):
        seen.append(kernel is not None)
        return x

    _product.normalized(jnp.ones((2, pixels, 1, 16)), jnp.ones((16, out)), norm, train=True)
    _product.normalized(jnp.ones((2, pixels, 1, 16)), jnp.ones((16, out)), norm, train=False)
    assert seen == [fused, False]


def test_pooling_before_scaling_changes_nothing():
    """With a negative scale, the maximum after scaling is the minimum before: signs are flipped."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((4, 6, 6, 4))
    weights = rng.standard_normal((4, 3, 3, 4))
    scale = np.array([1.5, -0.5, -2.0, 1e-3])
    bias = rng.standard_normal(4)
    module = lbopt.BatchNorm(momentum=0.5)
    stats = {"mean": jnp.full(4, 0.3), "var": jnp.full(4, 2.0)}

    def loss(x, scale, early, train):
        bound = module.bind(
            {"params": {"scale": scale, "bias": bias}, "batch_stats": stats},
            mutable=["batch_stats"],
        )
        if early:
            y = bound(x * bound.sign(), not train, then=_stem.max_pool)
        else:
            y = _stem.max_pool(bound(x, not train))
        return jnp.sum(weights * jnp.tanh(y)), bound.variables["batch_stats"]

    for train in (True, False):
        results = [
            jax.grad(loss, (0, 1), has_aux=True)(x, scale, early, train) for early in (True, False)
        ]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *results)
