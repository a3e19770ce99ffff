"""Train twice, with and without weight-update sharding, on all devices there are; run as a program it prints the results.

The network has kernels that split over all devices, one that splits over two of them only, and arrays that stay whole.
"""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import lbopt
from lbopt import losses
from lbopt.data.digits import load_digits
from lbopt.data.order import example_indices
from lbopt.models import seam

STEPS, BATCH = 20, 16
OPTIMIZERS = {
    "lamb": lambda: lbopt.lamb(0.01, weight_decay=0.01),
    "lars": lambda: lbopt.lars(0.1, weight_decay=1e-4),
    "adamw": lambda: optax.adamw(1e-3),
}


class Network(nn.Module):
    """Three hidden layers."""

    @nn.compact
    def __call__(self, images, train):
        x = images.reshape(images.shape[0], -1)
        for width in (256, 130, 127):
            x = nn.tanh(nn.Dense(width)(x))
        return nn.Dense(10)(x)


def problem():
    """Return (loss_fn, function tx -> first state)."""
    model = seam.from_linen(Network())
    params, model_state = jax.device_get(jax.jit(model.init)(jax.random.key(0), jnp.zeros((2, 8, 8))))

    def loss_fn(params, model_state, batch, rng):
        logits, new_model_state = model.apply(params, model_state, batch["image"], train=True, rng=rng)
        each = losses.softmax_cross_entropy(logits, batch["label"])
        return jnp.mean(each), (new_model_state, {"loss": (jnp.sum(each), len(each))})

    return loss_fn, lambda tx: lbopt.TrainState.create(*jax.tree.map(jnp.asarray, (params, model_state)), tx, seed=7)


def batches(count=STEPS):
    """Return batches of digits."""
    train = load_digits().train
    return [train.take(example_indices(len(train), 3, step * BATCH, BATCH)) for step in range(count)]


def train(tx, count=STEPS, **options):
    """Return the states before the first update and after the last, as they lie on the devices."""
    loss_fn, create = problem()
    step = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(), donate=False, **options)
    first = state = jax.device_put(create(tx), step.state_sharding(create(tx)))
    for batch in batches(count):
        state, _ = jax.block_until_ready(step(state, batch))
    return first, state


def wide(state):
    """Return all parameters and optimizer state as one float64 vector each."""
    vector = lambda tree: np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)])  # noqa: E731
    return vector(state.params), vector(state.opt_state)


def gaps(name):
    """Return the largest difference of any parameter and of any moment, each over the distance that all moved."""
    (start, whole), (_, parts) = train(OPTIMIZERS[name]()), train(OPTIMIZERS[name](), shard_update=True)
    return [
        float(np.max(np.abs(a - b)) / np.linalg.norm(a - c))
        for a, b, c in zip(wide(whole), wide(parts), wide(start), strict=True)
    ]


if __name__ == "__main__":
    print(json.dumps({name: gaps(name) for name in OPTIMIZERS}))
