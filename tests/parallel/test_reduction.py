"""Gradient sums over devices: in the requested precision, and scattered for a sharded update."""

import functools
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from refusal import refused

import lbopt
from lbopt.parallel import _shards

TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def sharded_run():
    return runpy.run_path(str(Path(__file__).with_name("sharded_run.py")))


@pytest.mark.everyday("options2", "options5")
@pytest.mark.parametrize(
    "options",
    [
        {"reduction": lbopt.AllReduce(jnp.float32)},
        {"reduction": lbopt.AllReduce(jnp.float32), "num_microsteps": 2, "shard_update": True},
        {"reduction": lbopt.ReduceScatter()},
        {
            "reduction": lbopt.ReduceScatter(),
            "clip": lbopt.GradientClip(0.5, "replica"),
        },
        {
            "reduction": lbopt.AllReduce(jnp.float32),
            "clip": lbopt.GradientClip(0.5, "mean"),
            "num_microsteps": 2,
        },
        {"reduction": lbopt.AllReduce(jnp.float32), "backend": "pmap"},
    ],
)
def test_training_is_the_same_however_gradients_are_summed(sharded_run, options):
    plain = {name: value for name, value in options.items() if name in ("num_microsteps", "clip")}
    tx = functools.partial(lbopt.lamb, 0.01, weight_decay=0.01)
    (start, whole, _), (_, other, _) = (
        sharded_run["train"](tx(), 5, **given) for given in (plain, options)
    )
    assert max(sharded_run["gaps"](start, whole, other).values()) <= TOLERANCE


def per_device_gradients(loss_fn, state, batch, num_devices):
    """Compute each device's gradient from its slice of the batch alone."""
    parts = [
        jax.tree.map(lambda x: np.split(x, num_devices)[number], batch)  # noqa: B023
        for number in range(num_devices)
    ]
    grad = jax.jit(jax.grad(lambda params, part: loss_fn(params, {}, part, None)[0]))
    return [jax.tree.map(np.asarray, grad(state.params, part)) for part in parts]


@pytest.mark.parametrize(
    "options",
    [
        {"reduction": lbopt.AllReduce(jnp.bfloat16)},
        {"reduction": lbopt.AllReduce(jnp.bfloat16), "shard_update": True},
        {"reduction": lbopt.ReduceScatter(jnp.bfloat16)},
    ],
)
def test_a_sum_in_bf16_is_one_of_rounded_gradients(sharded_run, options):
    loss_fn, _ = sharded_run["problem"]()
    batch = sharded_run["batches"](1)[0]
    start, after, _ = sharded_run["train"](optax.sgd(1.0), 1, **options)
    grads = per_device_gradients(loss_fn, start, batch, 4)
    moved = jax.tree.map(
        lambda a, b: np.asarray(a, np.float64) - np.asarray(b, np.float64),
        start.params,
        after.params,
    )
    for ours, *each in zip(jax.tree.leaves(moved), *map(jax.tree.leaves, grads), strict=True):
        rounded = sum(np.asarray(x.astype(ml_dtypes.bfloat16), np.float64) for x in each) / 4
        exact = sum(np.asarray(x, np.float64) for x in each) / 4
        largest = max(np.abs(x).max() for x in each)
        # Partial sums are rounded to 8 bits too, in an order that the backend chooses; the fp32
        # step adds its own rounding.
        assert np.max(np.abs(ours - rounded)) <= 2 * largest * 2.0**-8 + 1e-6
        if ours.size > 1000:
            assert np.max(np.abs(ours - exact)) > largest * 2.0**-12, "nothing was rounded"


@pytest.mark.parametrize("shape", [(256, 130), (130, 254), (130, 127), (3, 64, 127), (4, 4)])
def test_a_scattered_mean_is_the_mean(shape):
    mesh = lbopt.make_mesh(4)
    stacked = np.random.default_rng(0).standard_normal((4, *shape), np.float32)
    found = jax.jit(
        lambda x: _shards.scatter_mean(mesh, [x], None)[0],
        in_shardings=jax.NamedSharding(mesh, jax.P("data")),
    )(stacked)
    assert found.sharding.is_equivalent_to(_shards.split_sharding(mesh, shape), len(shape))
    np.testing.assert_allclose(found, stacked.astype(np.float64).mean(0), atol=1e-6)
    whole = jax.jit(lambda x: _shards.gather_along_axes(mesh, x), in_shardings=found.sharding)(
        found
    )
    np.testing.assert_array_equal(whole, found)


class Core:
    """A device of a torus, reduced to its coordinates."""

    def __init__(self, *coords, core=0):
        self.coords = coords
        self.core_on_chip = core


@pytest.mark.parametrize(
    ("places", "lines"),
    [
        (
            [(x, y, 0, core) for y in range(4) for x in range(4) for core in range(2)],
            [1, 1, 0, 0, 0],
        ),
        # Hosts come one after another, each with 2 x 2 chips.
        (
            [
                (2 * hx + x, 2 * hy + y, 0, c)
                for hy in (0, 1)
                for hx in (0, 1)
                for y in (0, 1)
                for x in (0, 1)
                for c in (0, 1)
            ],
            [1, 0, 1, 0, 0],
        ),
        ([(x, y, z, 0) for z in range(4) for y in range(2) for x in range(2)], [2, 2, 1, 0]),
        (
            [(x, y, 0, 0) for y in range(3) for x in range(4)],
            [0, 0, 0],
        ),  # the factors of 12 do not match the coordinates
    ],
)
def test_lines_of_the_torus(places, lines):
    class Mesh:
        size = len(places)
        devices = np.array([Core(*place[:3], core=place[3]) for place in places], object)

    assert _shards._torus_lines(Mesh) == lines


def test_a_clip_of_the_mean_and_a_scatter_do_not_go_together():
    with refused("clip.stage", "mean", "conflict"):
        lbopt.make_train_step(
            lambda *_: None,
            optax.sgd(0.1),
            lbopt.make_mesh(4),
            reduction=lbopt.ReduceScatter(),
            clip=lbopt.GradientClip(1.0, "mean"),
        )


@pytest.mark.parametrize("field", ["shard_update", "reduction"])
def test_under_pmap_no_update_is_sharded(field):
    asked = {"shard_update": True, "reduction": lbopt.ReduceScatter()}[field]
    with refused(field, asked, "conflict"):
        lbopt.make_train_step(
            lambda *_: None, optax.sgd(0.1), lbopt.make_mesh(4), "pmap", **{field: asked}
        )
