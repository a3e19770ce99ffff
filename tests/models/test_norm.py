"""BatchNorm over every scope equals NumPy over the same contiguous groups, whole under jit and in parts under pmap."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lbopt
from lbopt import replicas
from lbopt.parallel import mesh as meshes

DEVICES, BATCH, MOMENTUM = 4, 16, 0.75
# Scope -> the number of contiguous groups of a global batch of 16 on 4 replicas. A replica's part has 4 examples.
GROUPS = {
    "global": 1,
    "local": 4,
    "replicas:1": 4,
    "replicas:2": 2,
    "replicas:4": 1,
    "examples:2": 8,
    "examples:4": 4,
    "examples:8": 2,
    "examples:16": 1,
}


@pytest.fixture(scope="module")
def arrays():
    """Return inputs whose examples differ in mean and spread, so that other groups give other statistics."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH, 3, 2)) * rng.uniform(0.5, 2, (BATCH, 1, 1)) + rng.standard_normal((BATCH, 1, 2))
    scale, bias, weights = rng.uniform(0.5, 2, 2), rng.standard_normal(2), rng.standard_normal(x.shape)
    return [array.astype(np.float32) for array in (x, scale, bias, weights)]


def losses_and_all(scope):
    """Return a function that applies the module and differentiates a nonlinear function of its output."""
    module = lbopt.BatchNorm(scope, momentum=MOMENTUM)

    def apply(x, scale, bias, weights):
        variables = {
            "params": {"scale": scale, "bias": bias},
            "batch_stats": {"mean": jnp.full(2, 5.0), "var": jnp.full(2, 3.0)},
        }
        y, updated = module.apply(variables, x, use_running_average=False, mutable=["batch_stats"])
        return jnp.sum(weights * jnp.tanh(y.astype(jnp.float32))), (y, updated["batch_stats"])

    def everything(x, scale, bias, weights):
        (dx, dscale, dbias), (y, stats) = jax.grad(apply, argnums=(0, 1, 2), has_aux=True)(x, scale, bias, weights)
        return {"y": y, "dx": dx}, {"dscale": dscale, "dbias": dbias}, stats

    return everything


def run(backend, scope, x, scale, bias, weights):
    """Run on the global batch, on four devices."""
    everything = losses_and_all(scope)
    if backend == "jit":
        mesh = lbopt.make_mesh(DEVICES)

        def whole(*arguments):
            with replicas.tracing_for(DEVICES):
                return everything(*arguments)

        split, same = meshes.sharded(mesh), meshes.replicated(mesh)
        return jax.block_until_ready(jax.jit(whole, in_shardings=(split, same, same, split))(x, scale, bias, weights))

    def part(*arguments):
        with replicas.tracing_for(DEVICES, "data"):
            by_example, by_feature, stats = everything(*arguments)
        return by_example, jax.lax.psum(by_feature, "data"), jax.lax.pmean(stats, "data")

    mapped = jax.pmap(part, "data", in_axes=(0, None, None, 0), out_axes=(0, None, None))
    by_replica = lambda array: array.reshape(DEVICES, -1, *array.shape[1:])  # noqa: E731
    by_example, by_feature, stats = jax.block_until_ready(mapped(by_replica(x), scale, bias, by_replica(weights)))
    return {name: array.reshape(x.shape) for name, array in by_example.items()}, by_feature, stats


def moved(start, batch):
    return MOMENTUM * start + (1 - MOMENTUM) * batch


@pytest.mark.parametrize("backend", ["jit", "pmap"])
@pytest.mark.parametrize("scope", GROUPS)
def test_outputs_gradients_and_running_statistics(scope, backend, arrays, reference):
    expected = reference(*arrays, GROUPS[scope])
    by_example, by_feature, stats = run(backend, scope, *arrays)
    for name, array in (by_example | by_feature).items():
        np.testing.assert_allclose(array, expected[name], rtol=2e-5, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(stats["mean"], moved(5.0, expected["mean"]), rtol=2e-6)
    np.testing.assert_allclose(stats["var"], moved(3.0, expected["var"]), rtol=2e-6)


def test_other_groups_give_other_numbers(arrays, reference):
    """The comparison above tells the scopes apart: outputs, gradients and statistics differ by far more than its tolerance."""
    results = [reference(*arrays, num_groups) for num_groups in sorted(set(GROUPS.values()))]
    for i, one in enumerate(results):
        for other in results[:i]:
            assert all(np.abs(one[name] - other[name]).max() > 1e-2 for name in ("y", "dx", "dscale", "dbias", "var"))


@pytest.mark.parametrize("backend", ["jit", "pmap"])
@pytest.mark.parametrize("scope", ["global", "examples:2"])
def test_bf16_inputs_have_fp32_statistics(scope, backend, arrays, reference):
    x, scale, bias, weights = arrays
    narrow = (x + 20).astype(jnp.bfloat16)  # in bf16, E[x^2] - E[x]^2 would be off by more than the variance
    expected = reference(narrow.astype(np.float64), scale, bias, weights, GROUPS[scope])
    by_example, by_feature, stats = run(backend, scope, narrow, scale, bias, weights)
    assert by_example["y"].dtype == by_example["dx"].dtype == jnp.bfloat16
    assert {array.dtype for array in jax.tree.leaves((by_feature, stats))} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(stats["mean"], moved(5.0, expected["mean"]), rtol=2e-6)
    np.testing.assert_allclose(stats["var"], moved(3.0, expected["var"]), rtol=1e-4)
    np.testing.assert_allclose(np.asarray(by_example["y"], np.float64), expected["y"], rtol=2**-8, atol=2e-3)


def test_global_scope_equals_flax(arrays):
    x, scale, bias, weights = arrays
    ours, theirs = lbopt.BatchNorm(momentum=MOMENTUM), nn.BatchNorm(momentum=MOMENTUM, epsilon=1e-5)
    variables = {"params": {"scale": scale, "bias": bias}, "batch_stats": {"mean": jnp.zeros(2), "var": jnp.ones(2)}}
    initial = [module.init(jax.random.key(0), x, use_running_average=False) for module in (ours, theirs)]
    jax.tree.map(np.testing.assert_array_equal, *initial)

    def loss(params, x, module):
        y, updated = module.apply(variables | {"params": params}, x, use_running_average=False, mutable=["batch_stats"])
        return jnp.sum(weights * jnp.tanh(y)), (y, updated)

    results = [
        jax.grad(loss, argnums=(0, 1), has_aux=True)(variables["params"], x, module) for module in (ours, theirs)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), *results)
    inferred = [module.apply(variables, x, use_running_average=True) for module in (ours, theirs)]
    np.testing.assert_allclose(*inferred, rtol=1e-6, atol=1e-6)


def test_running_statistics_normalize_at_inference(arrays):
    x, scale, bias, _ = arrays
    mean, var = np.array([0.5, -1.0], np.float32), np.array([2.0, 0.25], np.float32)
    variables = {"params": {"scale": scale, "bias": bias}, "batch_stats": {"mean": mean, "var": var}}
    for scope in ("global", "examples:8"):
        y = lbopt.BatchNorm(scope).apply(variables, x, use_running_average=True)
        np.testing.assert_allclose(y, (x - mean) / np.sqrt(var + 1e-5) * scale + bias, rtol=1e-5, atol=1e-6)


def test_without_scale_or_bias_there_are_no_parameters(arrays):
    module = lbopt.BatchNorm(use_scale=False, use_bias=False, dtype=jnp.bfloat16)
    variables = module.init(jax.random.key(0), arrays[0], use_running_average=False)
    assert set(variables) == {"batch_stats"}
    y, _ = module.apply(variables, arrays[0], use_running_average=False, mutable=["batch_stats"])
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float64).mean((0, 1)), 0, atol=1e-2)
    np.testing.assert_allclose(np.asarray(y, np.float64).var((0, 1)), 1, atol=1e-2)
