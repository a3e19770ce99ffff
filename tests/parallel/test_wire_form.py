"""Sums in wire form equal one device's, however leaves are stacked, padded and sharded."""

import functools

import jax
import numpy as np
import pytest

import lbopt
from lbopt.aggregators import as_optax, cast, sign, topk
from lbopt.aggregators._group import Shares

pytestmark = pytest.mark.usefixtures("fusion_emitters")  # without, it runs four times as long
REPLICAS = 4
SHAPES = {
    "stack": (3, 32, 128),  # three layers; 96 rows of the width 128
    "bias": (128,),  # one row of that width
    "odd": (61, 130),  # rows that nothing divides: padded
    "table": (32, 256),
    "few": (2, 512),  # more padding than numbers: sent with the narrow leaves
    "narrow": (5, 7, 9),
    "scalar": (),
}


def leaves(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    drawn = {name: rng.normal(size=(REPLICAS, *shape)) for name, shape in SHAPES.items()}
    return {name: (scale * 10.0 ** -len(name) * x).astype(np.float32) for name, x in drawn.items()}


STACKED = lbopt.stacked_paths("^stack$")
EXACT = {
    "mean of few bits": lbopt.aps(5, 2, stacked=STACKED),
    "partial sums": lbopt.aps(4, 3, "same"),
    "kahan": lbopt.aps(8, 7, "kahan", shift=False),
    "drawn": lbopt.aps(5, 2, rounding="stochastic", overflow="saturate", stacked=STACKED),
    "drawn, partial sums": lbopt.aps(3, 4, "same", rounding="stochastic"),
}
ROUNDED = {
    "sign": lbopt.econtrol(sign(), 0.1, stacked=STACKED),
    "topk": lbopt.ef21(topk(0.1), 0.5, stacked=STACKED),
    "topk, dense start": lbopt.ef21(topk(0.1), dense_start=True),
    "cast": lbopt.ef(cast(4, 3)),
}


DRAWN = ("stack", "odd", "few", "narrow")
"""Leaves whose random bits are compared: one of each kind, since each takes long to compile."""


@functools.cache
def after_three_steps(name, devices):
    mesh = None if devices == 1 else lbopt.make_mesh(devices)
    tx = as_optax((EXACT | ROUNDED)[name], REPLICAS, mesh)
    kept = DRAWN if name.startswith("drawn") else SHAPES

    def rows(seed):
        return {leaf: value for leaf, value in leaves(seed).items() if leaf in kept}

    state = tx.init(jax.tree.map(lambda g: g[0], rows(0)))
    update = jax.jit(tx.update)
    for seed in range(3):
        (updates, _), state = jax.block_until_ready(update(rows(seed), state))
    return jax.tree.map(np.asarray, (updates, state))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices"), [("mean of few bits", 4), *((name, 2) for name in EXACT)]
)
def test_several_devices_find_the_bits_of_one(name, devices):
    jax.tree.map(
        np.testing.assert_array_equal, after_three_steps(name, devices), after_three_steps(name, 1)
    )


@pytest.mark.everyday("sign-2")
@pytest.mark.parametrize(("name", "devices"), [("topk", 4), *((name, 2) for name in ROUNDED)])
def test_sums_in_fp32_differ_by_their_rounding_alone(name, devices):
    one, many = (after_three_steps(name, n) for n in (1, devices))
    for ours, alone in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(ours, alone, rtol=0, atol=1e-6 * np.abs(alone).max())


@pytest.mark.parametrize("devices", [1, 2, 4, 32, 1000])
def test_shares_hold_every_number_once(devices):
    tree = leaves(1)
    shares = Shares(tree, devices)
    packed = shares.pack(tree)
    assert all(x.shape[1] % devices == 0 for x in packed)
    back = shares.unpack([x[2] for x in packed])
    jax.tree.map(np.testing.assert_array_equal, back, jax.tree.map(lambda x: x[2], tree))
    numbers = sum(x[0].size for x in jax.tree.leaves(tree))
    assert numbers <= sum(x[0].size for x in packed) <= 1.06 * numbers + devices


def test_what_is_wide_keeps_its_layout():
    tree = {name: jax.ShapeDtypeStruct((1, *shape), np.float32) for name, shape in SHAPES.items()}
    shapes = {x.shape for x in jax.eval_shape(lambda tree: Shares(tree, 4).pack(tree), tree)}
    narrow = 2 * 512 + 5 * 7 * 9 + 1
    assert shapes == {(1, 96 + 1 + 3, 128), (1, 61 + 3, 130), (1, 32, 256), (1, narrow)}
