"""Folders written by `transformers`, and lbopt's reading of them."""

import jax
import pytest

import lbopt


@pytest.fixture
def moved(tmp_path):
    """Return a function (PyTorch network) -> our module and variables, through a saved folder."""

    def move(model, **options):
        folder = tmp_path / f"saved{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(folder, **options)
        return lbopt.load_huggingface(folder)

    return move


@pytest.fixture(scope="session")
def evaluated():
    """Return a function (module, variables, inputs) -> outputs in evaluation."""
    return lambda module, variables, x: jax.jit(lambda v, x: module.apply(v, x, train=False))(
        variables, x
    )


@pytest.fixture(scope="session")
def trained():
    """Return a function (module, variables, inputs) -> training outputs, new batch statistics."""

    def train(module, variables, x):
        run = jax.jit(lambda v, x: module.apply(v, x, train=True, mutable=["batch_stats"]))
        outputs, updated = run(variables, x)
        return outputs, updated["batch_stats"]

    return train
