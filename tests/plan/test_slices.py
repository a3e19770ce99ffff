"""Two TPU slices, by the real compiler: everything inside goes over their interconnect, between them goes a part."""

import re

import jax
import jax.numpy as jnp
import pytest

import lbopt
from lbopt.parallel import shards
from lbopt.parallel.mesh import make_mesh, num_slices
from lbopt.plan import topology

pytestmark = pytest.mark.usefixtures("cache_afterwards")
CHIPS = 4


@pytest.fixture(scope="module")
def mesh():
    topology.prepare_environment()
    from jax.experimental import topologies

    found = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2", num_slices=2)
    return make_mesh(devices=found.devices)


def loss_fn(params, model_state, batch, rng):
    del rng
    error = jnp.tanh(batch["x"] @ params["first"]) @ params["second"] - batch["y"]
    return jnp.mean(error**2), (model_state, {})


def program(mesh, **settings):
    tx = lbopt.lamb(0.1)
    step = lbopt.make_train_step(loss_fn, tx, mesh, **settings)
    params = {"first": jnp.zeros((512, 1024)), "second": jnp.zeros((1024, 256))}
    state = jax.eval_shape(lambda: lbopt.TrainState.create(params, {}, tx))
    state = shards.placed(state, step.state_sharding(state))
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)  # noqa: E731
    return step.lower(state, {"x": shape(512, 512), "y": shape(512, 256)}).compile().as_text()


def sent_bytes(text):
    """Bytes of fp32 that a device sends to the other slice."""
    sizes = re.findall(r"= \(f32\[([\d,]+)\][^=]* send\(", text)
    return sum(4 * eval(size.replace(",", "*")) for size in sizes)


@pytest.mark.parametrize(
    "settings",
    [{}, {"shard_update": True}, {"shard_update": True, "reduce_dtype": jnp.float32, "reduce_scatter": True}],
)
def test_inside_and_between(mesh, settings):
    assert num_slices(mesh) == 2
    text = program(mesh, **settings)
    groups = re.findall(r"(?:all-gather|reduce-scatter|all-reduce)[^=]*\(.*?replica_groups=\{(\{.*?\})\}", text)
    assert groups
    for group in groups:
        assert all(int(number) < CHIPS for number in re.findall(r"\d+", group)), group
    parameters = 512 * 1024 + 1024 * 256
    assert sent_bytes(text) == pytest.approx(4 * parameters / CHIPS, rel=0.01)
