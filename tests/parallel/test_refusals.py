"""What cannot be done is refused in one line, before anything is traced or compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lbopt
from lbopt.errors import UserError
from lbopt.parallel.mesh import check_divisible


def never(*arguments):
    raise AssertionError("traced")


def state():
    return lbopt.TrainState.create({"w": jnp.zeros(8)}, {}, optax.sgd(0.1))


@pytest.mark.parametrize("backend", ["jit", "pmap"])
@pytest.mark.parametrize(("batch_size", "num_microsteps"), [(30, 1), (36, 2), (2, 1), (0, 1)])
def test_a_batch_that_does_not_split_is_refused_before_tracing(backend, batch_size, num_microsteps):
    step = lbopt.make_train_step(never, optax.sgd(0.1), lbopt.make_mesh(4), backend, num_microsteps=num_microsteps)
    batch = {"image": np.zeros((batch_size, 8), np.float32)}
    for call in (step, step.lower):
        with pytest.raises(UserError, match=f"global_batch_size = {batch_size}"):
            call(state(), batch)


@pytest.mark.parametrize("backend", ["jit", "pmap"])
def test_a_batch_that_splits_is_traced(backend):
    step = lbopt.make_train_step(never, optax.sgd(0.1), lbopt.make_mesh(4), backend, num_microsteps=2)
    with pytest.raises(AssertionError, match="traced"):
        step(state(), {"image": np.zeros((32, 8), np.float32)})


@pytest.mark.parametrize("backend", ["jit", "pmap"])
def test_an_evaluation_batch_that_does_not_split_is_refused_before_tracing(backend):
    step = lbopt.make_eval_step(never, lbopt.make_mesh(4), backend)
    with pytest.raises(UserError, match="global_batch_size = 30"):
        step({}, {}, {"image": np.zeros((30, 8), np.float32)})


def test_the_message_names_the_nearest_size_that_works():
    mesh = lbopt.make_mesh(4)
    with pytest.raises(UserError, match="multiple of 8; 32 is the nearest"):
        check_divisible(35, mesh, num_microsteps=2)
    with pytest.raises(UserError, match="8 is the nearest"):
        check_divisible(1, mesh, num_microsteps=2)
    check_divisible(32, mesh, num_microsteps=2)


def test_an_unknown_backend_is_refused():
    message = r"backend = 'pmpa': use one of jit, pjit, pmap \(did you mean 'pmap'\?\)"
    with pytest.raises(UserError, match=message):
        lbopt.make_train_step(never, optax.sgd(0.1), lbopt.make_mesh(1), "pmpa")
    with pytest.raises(UserError, match=message):
        lbopt.make_eval_step(never, lbopt.make_mesh(1), "pmpa")


@pytest.mark.parametrize("num_devices", [0, 5, -1])
def test_a_number_of_devices_that_is_not_there_is_refused(num_devices):
    with pytest.raises(UserError, match=f"num_devices = {num_devices}: .*4 devices"):
        lbopt.make_mesh(num_devices)


def test_a_mesh_takes_the_first_devices():
    assert list(lbopt.make_mesh(2).devices.flat) == jax.devices()[:2]
    assert lbopt.make_mesh().size == 4
    assert list(lbopt.make_mesh(1, jax.devices()[2:]).devices.flat) == [jax.devices()[2]]
