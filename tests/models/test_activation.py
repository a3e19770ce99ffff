"""Activations equal JAX's in value and gradient, and keep only the documented residuals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lbopt.models import _activation

X = np.random.default_rng(0).standard_normal((4, 33)) * 4
PAIRS = {
    "relu": (lambda x: _activation.relu(x, x.dtype), jax.nn.relu),
    "gelu": (_activation.gelu, lambda x: jax.nn.gelu(x, approximate=False)),
    "gelu_tanh": (_activation.gelu_tanh, jax.nn.gelu),
    "swish": (_activation.swish, jax.nn.silu),
}


@pytest.mark.parametrize("name", PAIRS)
def test_values_and_gradients_in_float64(name):
    with jax.enable_x64(True):
        x = jnp.asarray(X)
        weights = jnp.cos(jnp.asarray(X))
        ours, theirs = (
            jax.value_and_grad(lambda x, f=f: jnp.sum(weights * f(x)))(x) for f in PAIRS[name]
        )
        np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-12)
        np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "swish"])
def test_bf16_is_fp32_rounded_once(name):
    narrow = jnp.asarray(X, jnp.bfloat16)
    exact = PAIRS[name][0](narrow.astype(jnp.float32))
    np.testing.assert_array_equal(PAIRS[name][0](narrow), exact.astype(jnp.bfloat16))


@pytest.mark.parametrize("fn", [_activation.gelu, _activation.gelu_tanh])
def test_gelu_keeps_only_its_input(fn):
    kept = jax.tree.leaves(jax.vjp(fn, jnp.asarray(X, jnp.bfloat16))[1])
    assert [leaf.dtype for leaf in kept if leaf.size > 1] == [jnp.bfloat16]


def test_relu_keeps_only_the_narrow_result():
    kept = jax.tree.leaves(
        jax.vjp(lambda x: _activation.relu(x, jnp.bfloat16), jnp.asarray(X, jnp.float32))[1]
    )
    assert [leaf.dtype for leaf in kept if leaf.size > 1] == [jnp.bfloat16]


def test_relu_passes_nothing_at_zero():
    assert jax.grad(lambda x: _activation.relu(x, jnp.float32))(0.0) == 0
