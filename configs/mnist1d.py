"""Four small networks on MNIST-1D: signals of 40 numbers, on which architectures differ.

Paper: Greydanus and Kobak, "Scaling down deep learning with MNIST-1D", arXiv 2011.14439. Networks:
greydanus/mnist1d@579085a3934c37e20fa4b6dae064d3e9d6f2d122:notebooks/models.py. Published test
accuracies: README.md at 7878d96082abd200c546a07a4101fa90b30fdf7e; a human expert reaches 96 %.

    lbopt prepare mnist1d
    lbopt train    --config=configs/mnist1d.py:cnn --workdir=runs/mnist1d
    lbopt evaluate --workdir=runs/mnist1d

Data: train[:3600] to train, train[3600:] to validate. The published runs train on all 4000.

    row         network                        published    test accuracy here, %
    logistic    logistic regression            32           32.0 (0.1)
    mlp         two hidden layers of 100       68           66.5 (1.1)
    gru         6 units in each direction      91           92.0 (1.4)
    cnn         three convolutions of 25       94           93.7 (0.7)
    smoke       8 steps of the row cnn, seconds on a CPU

The results are means over seeds 0 to 4, with the standard deviation in brackets, of the last step;
`scripts/families` runs them, and docs/results/families.json has each.

Theirs (notebooks/train.py): Adam with a constant rate of .01, batch 100, 6000 steps, without weight
decay. Here rate and weight decay were chosen on the validation split, and the rate decays to 0.
Biases and kernels start as in PyTorch, uniform within 1/sqrt(inputs). Flax's GRU has one bias for
each of the gates r and z, PyTorch's has two: 5110 parameters instead of 5134, for the same
functions.
Default row: cnn. Hardware and time: 10 to 40 s of CPU time per run.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from lbopt.config import (
    About,
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)
from lbopt.errors import require_choice

TABLE = {
    "logistic": ("Logistic", 0.01, 0.0, 32),
    "mlp": ("ResidualMLP", 0.01, 0.3, 68),
    "gru": ("BidirectionalGRU", 0.03, 0.03, 91),
    "cnn": ("SignalCNN", 0.02, 0.1, 94),
}
"""Network, learning rate, weight decay and published test accuracy in percent of each row."""
ROWS = (*TABLE, "smoke")


def get_config(arg: str = "cnn") -> TrainConfig:
    """Return the row of a network, or `smoke`."""
    row = arg or "cnn"
    require_choice("--config row", row, ROWS)
    if row == "smoke":
        return _smoke()

    network, rate, decay, percent = TABLE[row]
    return TrainConfig(
        name=f"mnist1d:{row}",
        about=About(
            paper="MNIST-1D 2011.14439, greydanus/mnist1d@7878d96",
            published_result=f"test accuracy {percent} %",
            note="Own choice: decay of the rate, validation split; rate and weight decay, chosen "
            "on it.",
            status="measured here",
        ),
        global_batch_size=100,
        num_steps=6000,
        data=DataConfig(
            "tfds",
            builder="mnist1d",
            train_split="train[:3600]",
            validation_split="train[3600:]",
            normalize=False,
        ),
        model=ModelConfig(f"mnist1d.py:{network}"),
        optimizer=OptimizerConfig("adamw", weight_decay=decay),
        schedule=ScheduleConfig(rate, scaling_rule="none", warmup_rule="none"),
        checkpoint=CheckpointConfig(every_steps=2000),
        eval_global_batch_size=400,
        eval_every_steps=500,
        log_every_steps=100,
    )


def _smoke() -> TrainConfig:
    """Return the row cnn with few steps."""
    config = get_config("cnn")
    config.name = "mnist1d:smoke"
    config.about = About(paper=config.about.paper, note="Tiny: our own choice throughout.")
    config.num_steps = 8
    config.checkpoint.every_steps = 4
    config.eval_every_steps = 4
    config.log_every_steps = 1
    return config


class Logistic(nn.Module):
    """Logistic regression: 410 parameters."""

    outputs: int

    @nn.compact
    def __call__(self, signals: jax.Array) -> jax.Array:
        """Map [batch, length] to logits [batch, outputs]."""
        return _dense(self.outputs, signals)


class ResidualMLP(nn.Module):
    """Two hidden layers with ReLU, the second one residual: 15,210 parameters."""

    outputs: int
    width: int = 100

    @nn.compact
    def __call__(self, signals: jax.Array) -> jax.Array:
        """Map [batch, length] to logits [batch, outputs]."""
        x = nn.relu(_dense(self.width, signals))
        x = x + nn.relu(_dense(self.width, x))
        return _dense(self.outputs, x)


class BidirectionalGRU(nn.Module):
    """A GRU in both directions, whose states at all places are classified: 5110 parameters."""

    outputs: int
    width: int = 6

    @nn.compact
    def __call__(self, signals: jax.Array) -> jax.Array:
        """Map [batch, length] to logits [batch, outputs]."""
        init = _within(self.width)
        inits = {"kernel_init": init, "recurrent_kernel_init": init, "bias_init": init}
        directions = (nn.RNN(nn.GRUCell(self.width, **inits)) for _ in range(2))
        states = nn.Bidirectional(*directions)(signals[..., None])
        return _dense(self.outputs, states.reshape(states.shape[0], -1))


class SignalCNN(nn.Module):
    """Three convolutions of stride 2 with ReLU: 5210 parameters."""

    outputs: int
    channels: int = 25

    @nn.compact
    def __call__(self, signals: jax.Array) -> jax.Array:
        """Map [batch, length] to logits [batch, outputs]."""
        x = signals[..., None]
        for size in (5, 3, 3):
            init = _within(size * x.shape[-1])
            convolution = nn.Conv(
                self.channels, (size,), strides=2, padding=1, kernel_init=init, bias_init=init
            )
            x = nn.relu(convolution(x))
        return _dense(self.outputs, x.reshape(x.shape[0], -1))


def _dense(width: int, x: jax.Array) -> jax.Array:
    init = _within(x.shape[-1])
    return nn.Dense(width, kernel_init=init, bias_init=init)(x)


def _within(inputs: int) -> nn.initializers.Initializer:
    """Return PyTorch's initializer of kernels and biases, from the number of a layer's inputs."""
    bound = inputs**-0.5

    def init(key, shape, dtype=jnp.float32):
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init
