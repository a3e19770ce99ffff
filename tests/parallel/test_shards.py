"""Weight-update sharding: equal training, with state and work divided among the devices.

Tolerance: after 20 updates no element of a parameter or moment differs by more than 1e-6 of the
distance that its array moved.
"""

import json
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jobs import on_devices
from refusal import refused

import lbopt
from lbopt.parallel import _shards, put_replicated
from lbopt.train import Checkpoints

TOLERANCE = 1e-6
PROGRAM = Path(__file__).with_name("sharded_run.py")
OPTIMIZERS = ["lamb", "lars", "adamw", "momentum"]


@pytest.fixture(scope="module")
def sharded_run():
    return runpy.run_path(str(PROGRAM))


@pytest.mark.everyday("lamb", "momentum")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_is_the_same_on_four_devices(sharded_run, optimizer):
    found = sharded_run["compare"](optimizer)
    assert max(found.values()) <= TOLERANCE
    assert {"params/Dense_0/kernel", "params/Dense_3/bias"} < found.keys()


@pytest.mark.process
@pytest.mark.slow
def test_training_is_the_same_on_eight_devices():
    environment = on_devices(8)
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert sorted(found) == sorted(OPTIMIZERS)
    for optimizer, gaps in found.items():
        assert max(gaps.values()) <= TOLERANCE, optimizer


def test_the_tolerance_sees_norms_of_parts(sharded_run):
    """An update that saw only half a kernel would use its trust ratio; one step shows that."""
    start, whole, _ = sharded_run["train"](sharded_run["OPTIMIZERS"]["lamb"](), count=1)
    before, after = (
        np.asarray(state.params["Dense_0"]["kernel"], np.float64) for state in (start, whole)
    )
    of_part = np.linalg.norm(before[:32]) * math.sqrt(2) / np.linalg.norm(before)
    assert abs(of_part - 1) * np.max(np.abs(after - before)) > 10 * TOLERANCE * np.linalg.norm(
        after - before
    )


@pytest.mark.everyday("options0", "options3")
@pytest.mark.parametrize(
    "options",
    [
        {"clip": lbopt.GradientClip(0.5, "replica")},
        {"clip": lbopt.GradientClip(0.5, "mean"), "num_microsteps": 2},
        {"clip": lbopt.GradientClip(0.5)},
        {"measure_noise": True},
        {"num_microsteps": 4},
    ],
)
def test_clips_noise_and_microsteps_are_the_same(sharded_run, options):
    def tx():
        first = [lbopt.track_noise_scale(16)] if "measure_noise" in options else []
        return optax.chain(*first, optax.sgd(0.1, momentum=0.9))

    (start, whole, metrics), (_, parts, others) = (
        sharded_run["train"](tx(), 5, shard_update=on, **options) for on in (False, True)
    )
    assert max(sharded_run["gaps"](start, whole, parts).values()) <= TOLERANCE
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), metrics, others)
    if "clip" in options:
        total, count = metrics[f"gradient_norm/{options['clip'].stage}"]
        assert total / count > 0.5, "nothing was clipped"


@pytest.mark.parametrize("num_devices", [2, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, TOLERANCE), (jnp.bfloat16, 1e-3)])
def test_layers_of_a_stack_keep_their_ratios_wherever_they_lie(num_devices, dtype, tolerance):
    """Six stacked layers, also split along the layer axis; a bf16 number may round differently."""
    rng = np.random.default_rng(0)
    kernel = jnp.asarray(rng.normal(size=(6, 48, 96)) * np.arange(1, 7)[:, None, None], dtype)
    x = rng.normal(size=(12, 48)).astype(np.float32)

    def loss_fn(params, model_state, batch, key):
        outputs = jnp.einsum(
            "bi,lio->lbo", batch["x"], params["layers"]["kernel"].astype(jnp.float32)
        )
        return jnp.mean(jnp.square(outputs - 1)), (model_state, {})

    tx = lbopt.lamb(0.01, weight_decay=0.01, stacked=lbopt.stacked_paths("^layers/"))
    ends = []
    for on in (False, True):
        step = lbopt.make_train_step(
            loss_fn, tx, lbopt.make_mesh(num_devices), donate=False, shard_update=on
        )
        state = lbopt.TrainState.create({"layers": {"kernel": kernel}}, {}, tx)
        state = jax.device_put(state, step.state_sharding(state))
        for _ in range(3):
            state, _ = jax.block_until_ready(step(state, {"x": x}))
        ends.append(np.asarray(state.params["layers"]["kernel"], np.float64))
    parts = {
        leaf.sharding.shard_shape(leaf.shape)
        for leaf in jax.tree.leaves(state.opt_state)
        if leaf.ndim == 3
    }
    assert parts == {_shards.shard_shape(num_devices, (6, 48, 96))}
    moved = np.linalg.norm(ends[0] - np.asarray(kernel, np.float64), axis=(1, 2), keepdims=True)
    assert np.max(np.abs(ends[0] - ends[1]) / moved) <= tolerance


def test_each_device_holds_its_part(sharded_run):
    _, state, _ = sharded_run["train"](lbopt.lamb(0.01), count=2, shard_update=True)
    assert all(
        leaf.sharding.is_fully_replicated
        for leaf in jax.tree.leaves((state.params, state.model_state))
    )
    held = {}
    for name, leaf in jax.tree.leaves_with_path(state.opt_state):
        if leaf.size >= _shards.MIN_SPLIT_ELEMENTS:
            held[jax.tree_util.keystr(name)] = leaf.size / leaf.addressable_shards[0].data.size
        else:
            assert leaf.sharding.is_fully_replicated
    assert sorted(held.values()) == [
        2,
        2,
        4,
        4,
        4,
        4,
    ]  # two moments of 130 x 127, 64 x 256 and 256 x 130


@pytest.mark.parametrize(
    ("size", "shape", "part"),
    [
        (8, (3, 3, 64, 128), (3, 3, 8, 128)),
        (2048, (1024, 1024), (1, 512)),
        (2048, (30522, 1024), (15261, 1)),
        (2048, (24, 1024, 4096), (3, 4, 4096)),
        (12, (7, 1000, 24), (7, 250, 8)),
        (8, (100001,), (100001,)),
        (8, (64, 128), (64, 128)),
        (1, (1024, 1024), (1024, 1024)),
        (8, (), ()),
    ],
)
def test_what_is_split(size, shape, part):
    assert _shards.shard_shape(size, shape) == part


@pytest.mark.parametrize("shape", [(256, 130), (130, 127), (7, 64, 64), (4, 4)])
def test_an_array_lies_as_it_is_said_to(shape):
    mesh = lbopt.make_mesh(4)
    where = _shards.split_sharding(mesh, shape)
    assert where.shard_shape(shape) == _shards.shard_shape(4, shape)
    assert list(where.mesh.devices.flat) == list(mesh.devices.flat)


@pytest.mark.everyday("False-1-True-4", "True-4-True-2")
@pytest.mark.parametrize(
    ("saved_in_parts", "saved_on", "read_in_parts", "read_on"),
    [(True, 4, False, 4), (False, 1, True, 4), (True, 4, True, 2)],
)
def test_a_checkpoint_does_not_know_how_it_was_sharded(
    tmp_path, sharded_run, saved_in_parts, saved_on, read_in_parts, read_on
):
    _, create = sharded_run["problem"]()
    state = create(lbopt.lamb(0.01))
    state = state.replace(
        opt_state=jax.tree.map(
            lambda x: (x + jnp.arange(x.size).reshape(x.shape)).astype(x.dtype), state.opt_state
        )
    )

    where = [
        _shards.state_sharding(lbopt.make_mesh(n), state, parts)
        for n, parts in ((saved_on, saved_in_parts), (read_on, read_in_parts))
    ]

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(jax.device_put(state.replace(step=jnp.int32(3)), where[0]), None)
        checkpoints.wait()
        restored = checkpoints.restore(
            _shards.with_shardings(jax.eval_shape(lambda: state), where[1]), 3
        )

    for before, after, there in zip(
        *map(jax.tree.leaves, (state.opt_state, restored.opt_state, where[1].opt_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(before, after)
        assert after.sharding.is_equivalent_to(there, after.ndim)


@pytest.mark.parametrize("way", [_shards.gather_by_dimension, _shards.gather_by_sum])
@pytest.mark.parametrize("shape", [(256, 130), (130, 254), (130, 127), (3, 64, 127), (4, 4)])
def test_what_was_split_comes_back_whole(way, shape):
    mesh = lbopt.make_mesh(4)
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    whole = jax.jit(lambda x: way(mesh, x), in_shardings=_shards.split_sharding(mesh, shape))(x)
    assert whole.sharding.is_fully_replicated
    assert [np.array_equal(x, np.asarray(copy.data)) for copy in whole.addressable_shards] == [
        True
    ] * 4


@pytest.mark.parametrize("by_sum", [False, True])
def test_devices_share_the_work_and_gather_parameters_only(monkeypatch, sharded_run, by_sum):
    """CPUs gather one dimension after another; TPU v3's way sums and gathers no array."""
    if by_sum:
        monkeypatch.setattr(_shards, "SUM_KINDS", (jax.devices()[0].device_kind,))
    loss_fn, create = sharded_run["problem"]()
    tx = lbopt.lamb(0.01)
    step = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(), shard_update=True)
    state = jax.device_put(create(tx), step.state_sharding(create(tx)))
    program = step.lower(state, sharded_run["batches"](1)[0]).compile().as_text()
    gathered = re.findall(r"= (.+?) all-gather(?:-start)?\(", program)
    split = [
        leaf.shape
        for leaf in jax.tree.leaves(state.params)
        if leaf.size >= _shards.MIN_SPLIT_ELEMENTS
    ]
    assert len(split) == 3
    assert len(gathered) == (0 if by_sum else 3), gathered
    for shape in split:
        part = ",".join(map(str, _shards.shard_shape(4, shape)))
        assert f"f32[{part}]" in program


def test_a_state_that_lies_elsewhere_is_named(sharded_run):
    loss_fn, create = sharded_run["problem"]()
    tx = lbopt.lamb(0.01)
    step = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(), shard_update=True)
    state = put_replicated(lbopt.make_mesh(), create(tx))
    step.lower(jax.eval_shape(lambda: state), sharded_run["batches"](1)[0])  # shapes lie nowhere
    for use in (step, step.lower):
        with refused("opt_state/0/mu/Dense_0/kernel", code="mismatch") as caught:
            use(state, sharded_run["batches"](1)[0])
        assert "jax.device_put(state, step.state_sharding(state))" in caught.value.reason


def test_donation_deletes_the_old_state(sharded_run):
    first, last, _ = sharded_run["train"](lbopt.lamb(0.01), count=1, donate=True, shard_update=True)
    assert all(
        leaf.is_deleted() for leaf in jax.tree.leaves((first.params, first.opt_state)) if leaf.ndim
    )
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(last))


def test_pmap_is_refused():
    with refused("shard_update", True, "conflict"):
        lbopt.make_train_step(
            lambda *_: None, optax.sgd(0.1), lbopt.make_mesh(4), "pmap", shard_update=True
        )
