"""The digits and two networks of lbopt as a user's own code, for comparison with the built-in ones.

Data, network and optimizer are the same; only the way to them differs.
"""

import pathlib

from flax import linen as nn

from lbopt.config import DataConfig, ModelConfig
from lbopt.data import load_digits
from lbopt.models import CNN, MLP

_FILE = pathlib.Path(__file__).resolve()


def load() -> tuple[dict, ...]:
    """Return the arrays of the three splits."""
    return tuple(split.arrays for split in load_digits())


def cnn(outputs: int) -> nn.Module:
    """Return the built-in CNN."""
    return CNN(outputs)


def mlp(outputs: int) -> nn.Module:
    """Return the built-in MLP."""
    return MLP(outputs)


def data() -> DataConfig:
    """Return the config of `load`."""
    return DataConfig(f"{_FILE}:load")


def model(name: str) -> ModelConfig:
    """Return the config of the function called `name`."""
    return ModelConfig(f"{_FILE}:{name}")
