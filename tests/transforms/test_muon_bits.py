"""Muon configured as Optax's gives Optax's numbers, bit for bit, compiled as users compile."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lbopt
from lbopt.masks import matrix_dimension_numbers


def test_bits_are_those_of_optax(optimized):
    rng = np.random.default_rng(0)
    rate = lambda t: 0.02 / (1 + 0.01 * t)  # noqa: E731
    shapes = {"a": (128, 160), "b": (160, 128), "c": (128, 128), "d": (2, 128, 128)}

    def draw(dtype=jnp.float32):
        kernels = {
            name: {"kernel": jnp.asarray(rng.normal(size=s), dtype)} for name, s in shapes.items()
        }
        return {**kernels, "norm": {"scale": jnp.asarray(rng.normal(size=64), dtype)}}

    stacked = lbopt.stacked_paths("^d/")
    numbers = matrix_dimension_numbers(jax.eval_shape(draw), stacked)
    theirs = optax.contrib.muon(rate, weight_decay=0.1, muon_weight_dimension_numbers=numbers)
    ours = lbopt.muon(rate, weight_decay=0.1, variant="optax", stacked=stacked)
    params = draw()
    ends = []
    gradients = [draw() for _ in range(8)]
    for tx in (ours, theirs):
        update = jax.jit(tx.update)
        state = tx.init(params)
        steps = []
        for step in range(200):
            gradient = gradients[step % 8]
            updates, state = update(gradient, state, params)
            if step in (0, 1, 4, 199):
                steps.append(jax.device_get(updates))
        ends.append(steps)
    for mine, other in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_array_equal(mine, other)
