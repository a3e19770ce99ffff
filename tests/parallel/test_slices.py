"""Several TPU slices: devices in slice order, shards within a slice, numbers as with one slice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused

import lbopt
from lbopt.parallel import _mesh, _shards


class Device:
    def __init__(self, number, slice_index):
        self.id = number
        self.slice_index = slice_index


@pytest.fixture
def two_slices(monkeypatch):
    """Present the four devices as two slices of two."""
    monkeypatch.setattr(_mesh, "slice_of", lambda device: device.id // 2)


def test_devices_come_slice_by_slice(monkeypatch):
    monkeypatch.setattr(_mesh, "slice_of", lambda device: device.id % 2)
    mesh = _mesh.make_mesh(4)
    assert [device.id for device in mesh.devices.flat] == [0, 2, 1, 3]
    assert _mesh.num_slices(mesh) == 2


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_whole_slices_are_taken(two_slices, num_devices):
    assert _mesh.num_slices(_mesh.make_mesh(num_devices)) == (2 if num_devices == 4 else 1)


def test_a_part_of_a_slice_is_refused(two_slices):
    with refused("num_devices", 3, "mismatch"):
        _mesh.make_mesh(3)


def loss_fn(params, model_state, batch, rng):
    del rng
    error = jnp.tanh(batch["x"] @ params["first"]) @ params["second"] - batch["y"]
    return jnp.mean(error**2), (model_state, {"loss": (jnp.sum(error**2), jnp.float32(error.size))})


def train(mesh, **settings):
    rng = np.random.default_rng(0)
    params = {
        "first": 0.1 * rng.normal(size=(128, 256)),
        "second": 0.1 * rng.normal(size=(256, 64)),
    }
    params = jax.tree.map(jnp.float32, params)
    tx = lbopt.lamb(0.01)
    step = lbopt.make_train_step(loss_fn, tx, mesh, **settings)
    state = lbopt.TrainState.create(params, {}, tx)
    state = jax.device_put(state, step.state_sharding(state))
    for _ in range(5):
        batch = {
            "x": np.float32(rng.normal(size=(16, 128))),
            "y": np.float32(rng.normal(size=(16, 64))),
        }
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
    return state


SETTINGS = [
    {"shard_update": True},
    {"shard_update": True, "reduction": lbopt.AllReduce(jnp.float32)},
    {"reduction": lbopt.ReduceScatter(jnp.float32)},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_numbers_are_those_of_one_slice(two_slices, settings):
    mesh = _mesh.make_mesh(4)
    state = train(mesh, **settings)
    plain = train(_mesh.make_mesh(1))
    for ours, theirs in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(plain.params), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())
    moments = [
        leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.size >= _shards.MIN_SPLIT_ELEMENTS
    ]
    assert len(moments) == 4
    for leaf in moments:
        assert leaf.size // leaf.addressable_shards[0].data.size == 2, "each slice has all of it"
        assert leaf.sharding.mesh.axis_names[0] == "slice"
