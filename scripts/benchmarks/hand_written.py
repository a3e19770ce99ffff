"""The peer for sweeps: hand-written loops around one compiled step that takes the learning rate.

`python hand_written.py MODEL BATCH EPOCHS` runs one trial and prints its validation accuracy.
"""

import sys

import jax
import numpy as np
import optax
import shapes

from lbopt.data import load_digits
from lbopt.models import CNN, MLP, LSTMClassifier, SimpleCNN, make_decoder_lm

MODELS = {"cnn": CNN, "lstm": LSTMClassifier, "mlp": MLP}
"""Models of the digits."""
LARGE = {
    "large_cnn": lambda: SimpleCNN(widths=(8, 16), hidden=256),
    "large_lm": lambda: make_decoder_lm(
        "1m", vocab_size=shapes.VOCABULARY, max_length=shapes.LENGTH
    ),
    "large_mlp": MLP,
}
"""Models of the data of `shapes`."""
OPTIMIZERS = {
    "momentum": lambda rate: optax.sgd(rate, 0.9),
    "adamw": lambda rate: optax.adamw(rate, weight_decay=0.01),
}


class HandWritten:
    """A model, an optimizer, one compiled step and one compiled evaluation.

    Args:
      model: A key of `MODELS` or `LARGE`.
      optimizer: "momentum" or "adamw".
      batch_size: Examples per step.
      epochs: Length of a trial in epochs.
    """

    def __init__(self, model: str, optimizer: str, batch_size: int, epochs: int):
        self.is_lm = model == "large_lm"
        if model in LARGE:
            self.model = LARGE[model]()
            data = shapes.splits(model.removeprefix("large_")).values()
        else:
            self.model = MODELS[model]()
            data = [(one.arrays["image"], one.arrays["label"]) for one in load_digits()]
        self.train, self.validation, self.test = data
        self.batch_size = batch_size
        self.steps = epochs * len(self.train[0]) // batch_size
        self.optimizer = OPTIMIZERS[optimizer]
        self.start = jax.jit(self._start)
        self.step = jax.jit(self._step, donate_argnums=(0, 1, 2))
        self.accuracy = jax.jit(self._accuracy)

    def trial(self, learning_rate: float, seed: int) -> tuple[float, float]:
        """Train once; return validation and test accuracy."""
        rng = np.random.default_rng(seed)
        inputs, labels = self.train
        epochs = -(-self.steps * self.batch_size // len(labels))
        order = np.concatenate([rng.permutation(len(labels)) for _ in range(epochs)])

        params, stats, opt_state = self.start(seed)
        for number in range(self.steps):
            picked = order[number * self.batch_size : (number + 1) * self.batch_size]
            rate = learning_rate * (1 - number / self.steps)
            params, stats, opt_state, loss = self.step(
                params, stats, opt_state, inputs[picked], labels[picked], rate, seed + number
            )
        jax.block_until_ready(loss)
        return tuple(
            float(self.accuracy(params, stats, *split)) for split in (self.validation, self.test)
        )

    def _start(self, seed):
        inputs = self._given(self.train[0][:1])
        variables = dict(self.model.init(jax.random.key(seed), inputs, train=False))
        params = variables.pop("params")
        return params, variables, self.optimizer(0.0).init(params)

    def _step(self, params, stats, opt_state, inputs, labels, learning_rate, seed):
        def loss_fn(params):
            outputs, updated = self.model.apply(
                {"params": params, **stats},
                self._given(inputs),
                train=True,
                mutable=list(stats),
                rngs={"example": jax.random.key(seed)},
            )
            logits = self._logits(outputs)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), updated

        (loss, stats_after), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = self.optimizer(learning_rate).update(grads, opt_state, params)
        return optax.apply_updates(params, updates), stats_after, opt_state, loss

    def _accuracy(self, params, stats, inputs, labels):
        outputs = self.model.apply({"params": params, **stats}, self._given(inputs), train=False)
        return (self._logits(outputs).argmax(-1) == labels).mean()

    def _given(self, inputs):
        return {"tokens": inputs} if self.is_lm else inputs

    def _logits(self, outputs):
        return outputs["logits"] if self.is_lm else outputs


if __name__ == "__main__":
    model, batch_size, epochs = sys.argv[1:4]
    peer = HandWritten(model, "momentum", int(batch_size), int(epochs))
    print(peer.trial(0.05, 0)[0])
