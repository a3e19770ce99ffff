"""In the compiled step on four devices, gradients are summed and no data changes its layout."""

import re

import jax
import numpy as np
import optax
import pytest

import lbopt
from lbopt.models import CNN

COLLECTIVE = re.compile(
    r"= \S.*? (all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+|ragged-all-to-all)"
    r"(?:-start)?\("
)


def collectives(step, *arguments):
    return COLLECTIVE.findall(step.lower(*arguments).compile().as_text())


@pytest.mark.parametrize("backend", ["jit", "pmap"])
@pytest.mark.parametrize("num_microsteps", [1, 2])
def test_the_training_step_only_reduces(backend, num_microsteps, problem, batches):
    loss_fn, create = problem(CNN(widths=(4,), hidden=8))
    tx = lbopt.lamb(0.01)
    step = lbopt.make_train_step(
        loss_fn, tx, lbopt.make_mesh(4), backend, num_microsteps=num_microsteps
    )
    found = collectives(step, create(tx), batches[0])
    assert set(found) == {"all-reduce"}


def test_one_device_needs_no_collective(problem, batches):
    loss_fn, create = problem(CNN(widths=(4,), hidden=8))
    tx = optax.sgd(0.1)
    assert (
        collectives(
            lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(1), num_microsteps=2),
            create(tx),
            batches[0],
        )
        == []
    )


def test_the_pattern_sees_another_collective():
    """Microsteps of contiguous examples, the obvious split, would move examples across devices."""
    mesh = lbopt.make_mesh(4)

    def loss_fn(params, model_state, batch, rng):
        halves = batch["x"].reshape(2, 8, 3)
        total = sum(jax.lax.map(lambda half: jax.numpy.tanh(half @ params["w"]).sum(), halves))
        return total, (model_state, {})

    tx = optax.sgd(0.1)
    state = lbopt.TrainState.create({"w": np.ones(3, np.float32)}, {}, tx)
    found = collectives(
        lbopt.make_train_step(loss_fn, tx, mesh), state, {"x": np.ones((16, 3), np.float32)}
    )
    assert set(found) - {"all-reduce"}


def test_lowering_takes_shapes(problem, batches):
    loss_fn, create = problem(CNN(widths=(4,), hidden=8))
    tx = optax.sgd(0.1)
    shapes = (
        jax.eval_shape(lambda: create(tx)),
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batches[0]),
    )
    for backend in ("jit", "pmap"):
        assert (
            lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(4), backend).lower(*shapes).as_text()
        )
