"""Number, dtype and size of each aggregator's collectives in the program for four CPU devices."""

import pytest

import lbopt
from tests.oracles import aggregated_step
from tests.oracles.exchanges import exchanges, of_gradients

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*sends.*:UserWarning"),
]
WEIGHTS = 64 * 256 + 256 + 256 * 16
"""20,736: the elements that the plain mean sums."""
KEPT = 164 + 3 + 41
"""A hundredth of each leaf, rounded up."""
WIDE = (64 + 1 + 3) * 256
NARROW = 256 * 16
"""Elements of the two sharded groups.

Wide: 64 rows, the biases, and three rows of zeros as padding for four devices. Narrow: the other
weights, as one row.
"""
LOSS = 2
"""The loss's sum and count travel with another fp32 sum, if there is one."""


def shared_out(there, back):
    return [
        (op, dtype, size)
        for op, dtype in (("all-to-all", there), ("all-gather", back))
        for size in (WIDE, NARROW)
    ]


EXPECTED = {
    "mean": [("all-reduce", "f32", WEIGHTS + LOSS)],
    # A step has one of these two collectives: it either measures or does not.
    "agvm": [("all-reduce", "f32", WEIGHTS), ("all-reduce", "f32", 2 * WEIGHTS)],
    # XLA's CPU backend cannot send fp8 or bf16: their bits travel as unsigned integers.
    "aps e5m2": shared_out("u8", "u8"),
    "aps e4m3 kahan": shared_out("u8", "u8"),
    "aps bf16": shared_out("u16", "u16"),
    "ef topk": [("all-gather", "f32", 4 * KEPT), ("all-gather", "s32", 4 * KEPT)],
    "ef21 randk": [("all-reduce", "f32", KEPT + LOSS)],
    "econtrol sign": [("all-gather", "u8", 4 * WEIGHTS // 8)],
    "ef cast": shared_out("u8", "f32"),
    # One side of both matrices, and the biases.
    "powersgd": [
        ("all-reduce", "f32", 2 * 64 + 2 * 256 + 256),
        ("all-reduce", "f32", 2 * 256 + 2 * 16 + 256),
    ],
    "powersgd later": [
        ("all-reduce", "f32", 2 * 64 + 2 * 256 + 256),
        ("all-reduce", "f32", 2 * 256 + 2 * 16 + 256),
        ("all-reduce", "f32", WEIGHTS),
    ],
}


@pytest.mark.everyday(
    "aps e4m3 kahan-jit",
    "ef topk-pmap",
    "ef21 randk-jit",
    "powersgd-jit",
    "agvm-jit",
    "mean-jit",
    "econtrol sign-jit",
)
@pytest.mark.parametrize("backend", ["jit", "pmap"])
@pytest.mark.parametrize("name", EXPECTED)
def test_collectives(name, backend):
    _, text = aggregated_step.compiled(name, lbopt.make_mesh(4), backend=backend)
    found = of_gradients(exchanges(text, 4))
    assert [one[:3] for one in found] == sorted(EXPECTED[name])
    assert {one[3] for one in found} == {4}


@pytest.mark.parametrize("name", ["ef topk", "powersgd", "agvm", "aps e5m2"])
def test_a_sharded_update_changes_nothing_of_it(name):
    _, plain = aggregated_step.compiled(name, lbopt.make_mesh(4))
    _, sharded = aggregated_step.compiled(name, lbopt.make_mesh(4), shard_update=True)
    sent = [
        one
        for one in exchanges(sharded, 4)
        if one[0] != "all-gather" or one[1] != "f32" or one[2] < 4096
    ]
    assert of_gradients(sent) == of_gradients(exchanges(plain, 4))


def test_between_groups_of_devices_only_parts_are_compressed():
    _, text = aggregated_step.compiled("ef topk", lbopt.make_mesh(4), over=2)
    found = of_gradients(exchanges(text, 4))
    kept = 82 + 2 + 21
    assert sorted(one[:2] for one in found if one[2] == 2 * kept) == [
        ("all-gather", "f32"),
        ("all-gather", "s32"),
    ]
    inside = [one for one in found if one[2] != 2 * kept]
    assert {one[0] for one in inside} == {"reduce-scatter", "all-gather"}
    assert {one[3] for one in found} == {2}


def test_vmapped_top_k_would_gather_dense_gradients():
    """Batched top_k gathers dense gradients, so aggregators see their rows in a mapped function."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = lbopt.make_mesh(4)
    rows = jax.ShapeDtypeStruct(
        (4, WEIGHTS), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data"))
    )

    def kept(x):
        return jax.lax.top_k(jnp.abs(x), KEPT)[0].sum(0)

    found = exchanges(jax.jit(kept).lower(rows).compile().as_text(), 4)
    assert any(one[0] == "all-gather" and one[2] == 4 * WEIGHTS for one in found)
