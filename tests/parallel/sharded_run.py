"""Train with and without weight-update sharding on all devices; print the results if run.

Some of the network's kernels split over all devices, one over two of them only, and some arrays
stay whole.
"""

import functools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import lbopt
from lbopt import losses, tree
from lbopt.data import example_indices, load_digits
from lbopt.models import from_linen

STEPS = 20
BATCH = 16
OPTIMIZERS = {
    "lamb": lambda: lbopt.lamb(0.01, weight_decay=0.01),
    "lars": lambda: lbopt.lars(0.1, weight_decay=1e-4),
    "adamw": lambda: optax.adamw(1e-3),
    "momentum": lambda: optax.sgd(
        0.1, momentum=0.9
    ),  # unlike the others it depends on the gradient's scale
}


class Network(nn.Module):
    """Three hidden layers."""

    @nn.compact
    def __call__(self, images, train):
        x = images.reshape(images.shape[0], -1)
        for width in (256, 130, 127):
            x = nn.tanh(nn.Dense(width)(x))
        return nn.Dense(10)(x)


@functools.cache
def problem():
    """Return (loss_fn, function from an optimizer to the first state)."""
    model = from_linen(Network())
    params, model_state = jax.device_get(
        jax.jit(model.init)(jax.random.key(0), jnp.zeros((2, 8, 8)))
    )

    def loss_fn(params, model_state, batch, rng):
        logits, new_model_state = model.apply(
            params, model_state, batch["image"], train=True, rng=rng
        )
        each = losses.softmax_cross_entropy(logits, batch["label"])
        return jnp.mean(each), (new_model_state, {"loss": (jnp.sum(each), len(each))})

    return loss_fn, lambda tx: lbopt.TrainState.create(
        *jax.tree.map(jnp.asarray, (params, model_state)), tx, seed=7
    )


@functools.cache
def batches(count=STEPS):
    """Return batches of digits."""
    train = load_digits().train
    return [
        train.take(example_indices(len(train), 3, step * BATCH, BATCH)) for step in range(count)
    ]


def train(tx, count=STEPS, donate=False, **options):
    """Return the states before the first and after the last update, on device, and last metrics."""
    loss_fn, create = problem()
    step = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(), donate=donate, **options)
    first = state = jax.device_put(create(tx), step.state_sharding(create(tx)))
    for batch in batches(count):
        state, metrics = jax.block_until_ready(step(state, batch))
    return first, state, metrics


def gaps(start, one, other):
    """Return the largest difference of two states over parameters and optimizer state.

    Each array's difference is relative to the norm of its movement; a scalar's, to its own value.
    """
    found = {}
    held = lambda state: {"params": state.params, "opt_state": state.opt_state}  # noqa: E731
    leaves = zip(*(jax.tree.leaves(held(state)) for state in (start, one, other)), strict=True)
    for name, arrays in zip(tree.leaf_names(held(one)), leaves, strict=True):
        begin, a, b = (np.asarray(array, np.float64) for array in arrays)
        moved = np.linalg.norm(a - begin) if a.ndim else abs(a)
        found[name] = float(np.max(np.abs(a - b)) / (moved or 1))
    return found


def compare(name):
    """Return the gaps between training with a whole and with a sharded update."""
    (start, whole, _), (_, parts, _) = (
        train(OPTIMIZERS[name](), shard_update=sharded) for sharded in (False, True)
    )
    return gaps(start, whole, parts)


if __name__ == "__main__":
    print(json.dumps({name: compare(name) for name in OPTIMIZERS}))
