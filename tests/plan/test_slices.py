"""Programs of the real compiler for two TPU slices, and the data between the slices."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

import lbopt
from lbopt.parallel import make_mesh, with_shardings
from lbopt.parallel._mesh import num_slices
from lbopt.plan import HloProgram, bytes_between_slices, prepare_environment
from tests.oracles import aggregated_step

pytestmark = [pytest.mark.tpu_compiler, pytest.mark.usefixtures("cache_afterwards")]
CHIPS = 4


@pytest.fixture(scope="module")
def mesh():
    prepare_environment()
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
    state = with_shardings(state, step.state_sharding(state))
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)  # noqa: E731
    return step.lower(state, {"x": shape(512, 512), "y": shape(512, 256)}).compile().as_text()


def sent_bytes(text):
    """Bytes of fp32 that a device sends to the other slice."""
    sizes = re.findall(r"= \(f32\[([\d,]+)\][^=]* send\(", text)
    return sum(4 * eval(size.replace(",", "*")) for size in sizes)


@pytest.mark.everyday("settings1")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"shard_update": True},
        {"reduction": lbopt.ReduceScatter(jnp.float32)},
    ],
)
def test_inside_and_between(mesh, settings):
    assert num_slices(mesh) == 2
    text = program(mesh, **settings)
    groups = re.findall(
        r"(?:all-gather|reduce-scatter|all-reduce)[^=]*\(.*?replica_groups=\{(\{.*?\})\}", text
    )
    assert groups
    for group in groups:
        assert all(int(number) < CHIPS for number in re.findall(r"\d+", group)), group
    parameters = 512 * 1024 + 1024 * 256
    assert sent_bytes(text) == pytest.approx(4 * parameters / CHIPS, rel=0.01)


SENT = re.compile(r"= \((\w+)\[([\d,]+)\][^=]* send\(")
SIZES = {"f32": 4, "s32": 4, "u8": 1, "f8e5m2": 1}


BRANCHES = {"powersgd": 2, "agvm": 3 / 1.2}
"""Ratio of the program's sends to those of a step, where the program has both of two branches.

PowerSGD's are one for each factor. AGVM's send the sums once or twice, 1.2 times on average.
"""


@pytest.mark.everyday("mean", "agvm")
@pytest.mark.filterwarnings("ignore:.*sends.*:UserWarning")
@pytest.mark.parametrize("name", ["mean", "ef topk", "aps e5m2", "ef21 randk", "powersgd", "agvm"])
def test_an_aggregator_between_slices_sends_what_it_says(mesh, name):
    """Gradients are summed inside a slice; each chip sends its compressed part to the other."""
    step, text = aggregated_step.compiled(name, mesh, 4096, over="slices")
    sent = [
        (SIZES[dtype], math.prod(map(int, dims.split(",")))) for dtype, dims in SENT.findall(text)
    ]
    found = sum(size * count for size, count in sent if count != 128)  # the loss, padded to a line
    if name == "aps e5m2":
        found -= 41472  # the all-to-all of two also hands over the half that stays
    promised = step.aggregation.wire_bytes(aggregated_step.params(4096))
    padding = 1024 if name != "powersgd" else 2 * 4096  # small arrays fill lines of 1,024 numbers
    assert found == pytest.approx(BRANCHES.get(name, 1) * promised.sent, rel=0.02, abs=padding)
    assert promised.ring == pytest.approx(4 * (64 + 1 + 16) * 4096 / CHIPS)

    # A plan counts each branch as often as it is taken.
    planned = bytes_between_slices(HloProgram(text), 2) - 4 * 128
    assert planned == pytest.approx(promised.sent, rel=0.02, abs=padding)
