"""The peer for sweeps: hand-written loops around one compiled step that takes the learning rate.

`python hand_written.py MODEL BATCH EPOCHS` runs one trial and prints its validation accuracy.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lbopt.data import load_digits
from lbopt.models import CNN, MLP, LSTMClassifier

MODELS = {"cnn": CNN, "lstm": LSTMClassifier, "mlp": MLP}
OPTIMIZERS = {
    "momentum": lambda rate: optax.sgd(rate, 0.9),
    "adamw": lambda rate: optax.adamw(rate, weight_decay=0.01),
}


class HandWritten:
    """A model, an optimizer, one compiled step and one compiled evaluation.

    Args:
      model: "cnn", "lstm" or "mlp".
      optimizer: "momentum" or "adamw".
      batch_size: Examples per step.
      epochs: Length of a trial in epochs.
    """

    def __init__(self, model: str, optimizer: str, batch_size: int, epochs: int):
        self.train, self.validation, self.test = load_digits()
        self.model = MODELS[model]()
        self.batch_size = batch_size
        self.steps = epochs * len(self.train) // batch_size
        self.optimizer = OPTIMIZERS[optimizer]
        self.start = jax.jit(self._start)
        self.step = jax.jit(self._step, donate_argnums=(0, 1, 2))
        self.accuracy = jax.jit(self._accuracy)

    def trial(self, learning_rate: float, seed: int) -> tuple[float, float]:
        """Train once; return validation and test accuracy."""
        rng = np.random.default_rng(seed)
        images = self.train.arrays["image"]
        labels = self.train.arrays["label"]
        epochs = -(-self.steps * self.batch_size // len(labels))
        order = np.concatenate([rng.permutation(len(labels)) for _ in range(epochs)])

        params, stats, opt_state = self.start(seed)
        for number in range(self.steps):
            picked = order[number * self.batch_size : (number + 1) * self.batch_size]
            rate = learning_rate * (1 - number / self.steps)
            params, stats, opt_state, loss = self.step(
                params, stats, opt_state, images[picked], labels[picked], rate
            )
        jax.block_until_ready(loss)
        return tuple(
            float(self.accuracy(params, stats, split.arrays["image"], split.arrays["label"]))
            for split in (self.validation, self.test)
        )

    def _start(self, seed):
        variables = dict(self.model.init(jax.random.key(seed), jnp.zeros((1, 8, 8)), train=True))
        params = variables.pop("params")
        return params, variables, self.optimizer(0.0).init(params)

    def _step(self, params, stats, opt_state, images, labels, learning_rate):
        def loss_fn(params):
            logits, updated = self.model.apply(
                {"params": params, **stats}, images, train=True, mutable=list(stats)
            )
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), updated

        (loss, stats_after), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = self.optimizer(learning_rate).update(grads, opt_state, params)
        return optax.apply_updates(params, updates), stats_after, opt_state, loss

    def _accuracy(self, params, stats, images, labels):
        return (
            self.model.apply({"params": params, **stats}, images, train=False).argmax(-1) == labels
        ).mean()


if __name__ == "__main__":
    model, batch_size, epochs = sys.argv[1:4]
    peer = HandWritten(model, "momentum", int(batch_size), int(epochs))
    print(peer.trial(0.05, 0)[0])
