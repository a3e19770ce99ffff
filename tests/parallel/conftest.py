"""A small classification problem that every test of the steps shares."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lbopt import losses, metrics, tree
from lbopt.data import example_indices, load_digits
from lbopt.models import from_linen
from lbopt.parallel import TrainState

BATCH_SIZE = 32
NUM_BATCHES = 10


@pytest.fixture(scope="session")
def batches():
    """Return ten global batches of 32 digits, as host arrays."""
    train = load_digits().train
    return [
        train.take(example_indices(len(train), 3, step * BATCH_SIZE, BATCH_SIZE))
        for step in range(NUM_BATCHES)
    ]


@pytest.fixture(scope="session")
def problem():
    """Return a function module -> (loss_fn, function tx -> the state before the first update)."""

    @functools.cache
    def build(module):
        model = from_linen(module)
        params, model_state = jax.jit(model.init)(jax.random.key(0), jnp.zeros((2, 8, 8)))
        host = jax.tree.map(np.asarray, (params, model_state))

        def loss_fn(params, model_state, batch, rng):
            logits, new_model_state = model.apply(
                params, model_state, batch["image"], train=True, rng=rng
            )
            each = losses.softmax_cross_entropy(logits, batch["label"])
            return jnp.mean(each), (
                new_model_state,
                metrics.classification(logits, batch["label"], each),
            )

        return loss_fn, lambda tx: TrainState.create(*jax.tree.map(jnp.asarray, host), tx, seed=7)

    return build


@pytest.fixture(scope="session")
def trajectory():
    """Return a function (step, state, batches) -> host copies of the first and all later states."""

    def run(step, state, batches):
        visited = [jax.tree.map(np.array, state)]
        for batch in batches:
            state, _ = jax.block_until_ready(step(state, batch))
            visited.append(jax.tree.map(np.array, state))
        return visited

    return run


@pytest.fixture(scope="session")
def relative_gap():
    """Return a function (state 0, state t, other state t) -> relative gap.

    The gap is the largest difference of any parameter, divided by the movement ||w_t - w_0||.
    """

    def gap(start, end, other):
        def wide(state):
            return np.concatenate(
                [np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(state.params)]
            )

        assert tree.leaf_names(end.params) == tree.leaf_names(other.params)
        return np.max(np.abs(wide(end) - wide(other))) / np.linalg.norm(wide(end) - wide(start))

    return gap
