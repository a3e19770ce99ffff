"""Placement of the state: donation, replication before and after, batches on host and mesh."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusal import refused

import lbopt
from lbopt.parallel import put_batch, put_replicated

BACKENDS = ["jit", "pmap"]


class Linear(nn.Module):
    """One dense layer."""

    @nn.compact
    def __call__(self, images, train):
        return nn.Dense(10)(images.reshape(images.shape[0], -1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_donation_deletes_the_old_state(backend, problem, batches):
    loss_fn, create = problem(Linear())
    tx = lbopt.lamb(0.01)
    mesh = lbopt.make_mesh(4)
    step = lbopt.make_train_step(loss_fn, tx, mesh, backend)
    state = put_replicated(mesh, create(tx))
    new_state, _ = jax.block_until_ready(step(state, batches[0]))
    arrays = [
        leaf for leaf in jax.tree.leaves(state) if leaf.ndim
    ]  # scalars that are only reported are not inputs of the program
    assert (
        len(arrays) == 3 * len(jax.tree.leaves(state.params)) + 1
    )  # parameters, two moments, the key
    assert all(leaf.is_deleted() for leaf in arrays)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new_state))


def test_arrays_that_are_in_a_state_twice_are_copied_and_a_state_taken_twice_is_refused():
    def loss_fn(params, model_state, batch, rng):
        return jnp.mean(batch @ params["in"] @ params["out"]), (model_state, {})

    tx = optax.contrib.schedule_free_sgd(0.1)  # its average starts at the parameters
    tied = jnp.ones((2, 2))
    state = lbopt.TrainState.create({"in": tied, "out": tied}, {"before": tied}, tx)
    step = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(1))
    after, _ = step(state, jnp.ones((4, 2)))
    for again in (
        jnp.ones((2, 2)),
        after.params["out"],
    ):  # XLA on CPUs used to end in a segmentation fault
        after, _ = jax.block_until_ready(
            step(after.replace(params={"in": again, "out": again}), jnp.ones((4, 2)))
        )
    with refused("state", code="type"):  # as Orbax gives it without a target
        step({"params": state.params, "opt_state": []}, jnp.ones((4, 2)))
    with refused("state", code="conflict"):
        step(state, jnp.ones((4, 2)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_donation_the_old_state_lives(backend, problem, batches):
    loss_fn, create = problem(Linear())
    tx = lbopt.lamb(0.01)
    mesh = lbopt.make_mesh(4)
    step = lbopt.make_train_step(loss_fn, tx, mesh, backend, donate=False)
    state = put_replicated(mesh, create(tx))
    before = jax.tree.map(np.array, state)
    jax.block_until_ready(step(state, batches[0]))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    jax.tree.map(np.testing.assert_array_equal, before, state)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_state_stays_replicated(backend, problem, batches):
    loss_fn, create = problem(Linear())
    tx = lbopt.lamb(0.01)
    mesh = lbopt.make_mesh(4)
    step = lbopt.make_train_step(loss_fn, tx, mesh, backend)
    state = create(tx)
    shapes = jax.tree.map(lambda leaf: leaf.shape, state)
    for batch in batches[:3]:
        state, metrics = jax.block_until_ready(step(state, batch))
        for leaf in jax.tree.leaves((state, metrics)):
            assert leaf.sharding.is_fully_replicated
            assert leaf.sharding.device_set == set(mesh.devices.flat)
            copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
            assert len(copies) == 4
            assert all(np.array_equal(copies[0], copy) for copy in copies)
    assert jax.tree.map(lambda leaf: leaf.shape, state) == shapes


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_on_the_mesh_equals_a_host_batch(backend, problem, batches):
    loss_fn, create = problem(Linear())
    tx = optax.sgd(0.1)
    mesh = lbopt.make_mesh(4)
    step = lbopt.make_train_step(loss_fn, tx, mesh, backend, donate=False)
    laid_out = put_batch(mesh, batches[0])
    assert laid_out["image"].sharding.shard_shape(laid_out["image"].shape) == (8, 8, 8)
    from_host = jax.block_until_ready(step(create(tx), batches[0]))
    from_mesh = jax.block_until_ready(step(create(tx), laid_out))
    jax.tree.map(np.testing.assert_array_equal, from_host, from_mesh)


def test_the_state_moves_between_backends(problem, batches):
    loss_fn, create = problem(Linear())
    tx = optax.sgd(0.1)
    mesh = lbopt.make_mesh(4)
    steps = [lbopt.make_train_step(loss_fn, tx, mesh, backend) for backend in BACKENDS]
    state = create(tx)
    for step in (*steps, *steps):
        state, _ = jax.block_until_ready(step(state, batches[0]))
    assert int(state.step) == 4
