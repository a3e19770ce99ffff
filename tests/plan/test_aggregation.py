"""Bytes that each aggregator sends between TPUs in programs of the real compiler."""

import pytest

from lbopt.parallel import make_mesh
from lbopt.plan import open_topology
from tests.oracles import aggregated_step
from tests.oracles.exchanges import exchanges, of_gradients

pytestmark = [
    pytest.mark.tpu_compiler,
    pytest.mark.usefixtures("cache_afterwards"),
    pytest.mark.filterwarnings("ignore:.*sends.*:UserWarning"),
]
WIDTH = 4096
WEIGHTS = 64 * WIDTH + WIDTH + WIDTH * 16
KEPT = 2622 + 41 + 656
LOSS = 2
"""The loss's sum and count travel with another fp32 sum, if there is one."""


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(devices=open_topology("v3:2x2").devices)


EXPECTED = {
    "mean": [("all-reduce", "f32", WEIGHTS + LOSS)],
    "agvm": [("all-reduce", "f32", WEIGHTS), ("all-reduce", "f32", 2 * WEIGHTS)],
    "aps e5m2": [("all-gather", "f8e5m2", WEIGHTS), ("all-to-all", "f8e5m2", WEIGHTS)],
    "aps e4m3 kahan": [("all-gather", "f8e4m3", WEIGHTS), ("all-to-all", "f8e4m3", WEIGHTS)],
    "aps bf16": [("all-gather", "bf16", WEIGHTS), ("all-to-all", "bf16", WEIGHTS)],
    "ef topk": [("all-gather", "f32", 8 * KEPT), ("all-gather", "s32", 8 * KEPT)],
    "ef21 randk": [("all-reduce", "f32", KEPT + LOSS)],
    "econtrol sign": [("all-gather", "u8", WEIGHTS)],
    "ef cast": [("all-gather", "f32", WEIGHTS), ("all-to-all", "f8e5m2", WEIGHTS)],
    "powersgd": [
        ("all-reduce", "f32", 2 * 64 + 2 * WIDTH + WIDTH),
        ("all-reduce", "f32", 2 * WIDTH + 2 * 16 + WIDTH),
    ],
}


@pytest.mark.everyday("powersgd", "mean")
@pytest.mark.parametrize("name", EXPECTED)
def test_collectives_on_v3(name, mesh):
    _, text = aggregated_step.compiled(name, mesh, WIDTH)
    found = of_gradients(exchanges(text, 8), least=100)
    assert [one[:3] for one in found] == sorted(EXPECTED[name])
