"""Gradients of replicas, and a runner for aggregators on one device or several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lbopt.aggregators import as_optax
from lbopt.parallel import make_mesh

REPLICAS = 8
SHAPES = {"body": {"kernel": (12, 16), "bias": (16,)}, "head": {"kernel": (16, 10)}}


@pytest.fixture(scope="session")
def params():
    return jax.tree.map(
        lambda shape: jnp.zeros(shape), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    )


@pytest.fixture(scope="session")
def gradients(params):
    """Return a function (steps, seed) -> list of gradients [8, ...]: a shared signal and noise."""

    def draw(steps, seed=0):
        rng = np.random.default_rng(seed)
        like = lambda p: rng.normal(size=p.shape)  # noqa: E731
        return [
            jax.tree.map(
                lambda p: (like(p) + rng.normal(size=(REPLICAS, *p.shape))).astype(np.float32),
                params,
            )
            for _ in range(steps)
        ]

    return draw


@pytest.fixture(scope="session")
def run(params):
    """Return a function (aggregator, gradients, devices) that runs an aggregator.

    It returns the updates of every step, the last aux and the last state, on the host.
    """

    def go(aggregator, grads, devices=1, state=None, second_moments=None):
        mesh = None if devices == 1 else make_mesh(devices)
        tx = as_optax(aggregator, REPLICAS, mesh)
        update = jax.jit(tx.update)
        state = tx.init(params) if state is None else state
        rows = None if mesh is None else NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
        if mesh is not None:
            state = state._replace(local=jax.device_put(state.local, rows))
        updates = []
        aux = {}
        for step, one in enumerate(grads):
            one = one if mesh is None else jax.device_put(one, rows)
            extra = {} if second_moments is None else {"second_moment": second_moments[step]}
            (update_, aux), state = jax.block_until_ready(update(one, state, params, **extra))
            updates.append(jax.tree.map(np.asarray, update_))
        return updates, jax.tree.map(np.asarray, aux), jax.tree.map(np.asarray, state)

    return go


@pytest.fixture(scope="session")
def largest_gap():
    """Return a function (tree, other tree) -> their largest absolute difference."""

    def gap(one, other):
        pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
        return max(
            (float(np.max(np.abs(np.asarray(a, np.float64) - b))) for a, b in pairs), default=0.0
        )

    return gap
