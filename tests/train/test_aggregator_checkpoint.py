"""The memory of aggregators in checkpoints: restored bit for bit, or rebuilt for other devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lbopt
from lbopt.aggregators import randk, topk
from lbopt.parallel import take_fragment
from lbopt.train import Checkpoints, _replica_memory

LABELS = {"out": "^out", "hidden": ""}
ECONTROL = lbopt.econtrol(topk(0.1), 0.1)
MOMENTUM = lbopt.ef21(topk(0.1), 0.5)
AGGREGATORS = {
    "agvm": lbopt.agvm(LABELS, "hidden", 1, 0, alpha=0.5),
    "aps, drawn": lbopt.aps(5, 2, rounding="stochastic"),
    "randk": lbopt.ef(randk(0.1)),
    "momentum": MOMENTUM,
    "econtrol": ECONTROL,
    "powersgd": lbopt.powersgd(2, start=1),
}


def params():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 8, jnp.float32)  # noqa: E731
    return {"hidden": {"kernel": draw(64, 128), "bias": draw(128)}, "out": {"kernel": draw(128, 5)}}


def loss_fn(params, model_state, batch, rng):
    del rng
    hidden = jax.nn.relu(batch["x"] @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    each = jnp.square(hidden @ params["out"]["kernel"] - batch["y"]).sum(-1)
    return each.mean(), (model_state, {"loss": (each.sum(), jnp.float32(len(each)))})


def batch(number):
    rng = np.random.default_rng(number)
    return {
        "x": rng.normal(size=(8, 64)).astype(np.float32),
        "y": rng.normal(size=(8, 5)).astype(np.float32),
    }


def make(aggregator, devices=4, over="replicas"):
    """Return a step and its first state."""
    tx = lbopt.lamb(0.01)
    if aggregator.name.startswith("agvm"):
        tx = optax.chain(tx, lbopt.scale_by_agvm(LABELS))
    mesh = lbopt.make_mesh(devices)
    step = lbopt.make_train_step(
        loss_fn, tx, mesh, reduction=lbopt.Aggregate(aggregator, over=over), donate=False
    )
    return step, step.place(lbopt.TrainState.create(params(), {}, tx))


def steps(step, state, numbers):
    for number in numbers:
        state, _ = jax.block_until_ready(step(state, batch(number)))
    return state


def shapes_of(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def through_a_checkpoint(folder, state, like, said=None):
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(state, {})
        checkpoints.wait()
        return checkpoints.restore(
            shapes_of(like), int(state.step), (said if said is not None else []).append
        )


def resumed_bit_for_bit(step, first, folder):
    """Check that a state goes on from a checkpoint as it does without; return the state."""
    half = steps(step, first, range(3))
    back = through_a_checkpoint(folder, half, first)
    jax.tree.map(np.testing.assert_array_equal, back, half)
    jax.tree.map(
        np.testing.assert_array_equal,
        steps(step, back, range(3, 6)),
        steps(step, half, range(3, 6)),
    )
    return half


@pytest.mark.everyday("momentum-2")
@pytest.mark.parametrize(
    ("name", "over"), [*((name, "replicas") for name in AGGREGATORS), ("momentum", 2)]
)
def test_resumed_it_goes_on_bit_for_bit(name, over, tmp_path):
    step, first = make(AGGREGATORS[name], over=over)
    half = resumed_bit_for_bit(step, first, tmp_path)
    assert any(
        np.any(x != y)
        for x, y in zip(
            *map(jax.tree.leaves, (half.aggregator_state, first.aggregator_state)), strict=True
        )
    )


@pytest.mark.everyday("(4, 2)-(2, 1)", "(4, 'replicas')-(4, 2)")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((4, 2), (4, 4)),
        ((4, 2), (2, 1)),
        ((4, 4), (4, 2)),
        ((4, 2), (4, "replicas")),
        ((4, "replicas"), (4, 2)),
    ],
    ids=str,
)
def test_other_groups_of_devices_have_what_was_remembered(before, after, tmp_path):
    step, first = make(MOMENTUM, *before)
    state = steps(step, first, range(2))
    other, like = make(MOMENTUM, *after)

    said = []
    back = through_a_checkpoint(tmp_path, state, like, said)

    was = _replica_memory.count(state)
    now = _replica_memory.count(like)
    assert (_replica_memory.slices_of(state), _replica_memory.slices_of(like)) == tuple(
        1 if over == "replicas" else over for _, over in (before, after)
    )

    assert len(said) == (was != now)
    assert all(f"{was} replicas saved this state and there are {now} now" in line for line in said)
    for trains, lines in ((None, []), (True, said)):
        told = []
        with Checkpoints(tmp_path, read_only=True, trains=trains) as checkpoints:
            checkpoints.restore(shapes_of(like), int(state.step), told.append)
        assert told == lines
    jax.tree.map(np.testing.assert_array_equal, back.params, state.params)

    for field, old, new in zip(
        ("local", "mirrored"), state.aggregator_state[:2], back.aggregator_state[:2], strict=True
    ):
        # The local state has an estimate and a velocity for each parameter.
        trees = jax.tree.leaves(state.params) * (2 if field == "local" else 1)
        for x, y, p in zip(jax.tree.leaves(old), jax.tree.leaves(new), trees, strict=True):
            if field == "local":
                x = np.broadcast_to(np.mean(x, 0), (now, *x.shape[1:])) if was != now else x
                x, y = (np.reshape(z, (now, -1))[:, : p.size] for z in (x, y))
            else:
                x, y = (np.ravel(z)[: p.size] for z in (x, y))
            np.testing.assert_allclose(y, x, rtol=1e-6, atol=1e-9)
            assert np.any(x)

    assert all(
        x.sharding == y.sharding
        for x, y in zip(
            *map(jax.tree.leaves, (back.aggregator_state, like.aggregator_state)), strict=True
        )
    )

    steps(other, back, range(2, 4))


def make_workers(devices, over, fragments=2):
    """Return a step of local steps with a memory in every fragment, and its first state."""
    tx = lbopt.diloco(lbopt.lamb(0.01), every=2, num_fragments=fragments)
    between = lbopt.Aggregate(MOMENTUM, over=over)
    step = lbopt.make_train_step(
        loss_fn, tx, lbopt.make_mesh(devices), reduction=between, donate=False
    )
    return step, step.place(lbopt.TrainState.create(params(), {}, tx))


@pytest.mark.parametrize("over", ["replicas", 2])
def test_workers_go_on_bit_for_bit_from_the_middle_of_a_round(over, tmp_path):
    resumed_bit_for_bit(*make_workers(4, over), tmp_path)


@pytest.mark.parametrize(
    ("before", "after"),
    [((4, "replicas"), (2, "replicas")), ((2, "replicas"), (4, "replicas")), ((4, 2), (4, 4))],
    ids=str,
)
def test_other_workers_go_on_from_the_mean_of_those_before(before, after, tmp_path):
    step, first = make_workers(*before)
    state = steps(step, first, range(3))
    other, like = make_workers(*after)
    said = []
    back = through_a_checkpoint(tmp_path, state, like, said)
    assert ["every worker starts at the mean of those before" in line for line in said] == [True]
    jax.tree.map(np.testing.assert_array_equal, back.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, back.opt_state, state.opt_state)

    was = state.aggregator_state
    now = back.aggregator_state
    assert now.present.all()
    for x, y in zip(*map(jax.tree.leaves, (was.params, now.params)), strict=True):
        mean = np.mean(np.asarray(x, np.float64), 0)
        np.testing.assert_allclose(y, np.broadcast_to(mean, y.shape), rtol=1e-6, atol=1e-8)
    for x, y in zip(*map(jax.tree.leaves, (was.opt_state, now.opt_state)), strict=True):
        np.testing.assert_array_equal(y, np.broadcast_to(x[0], y.shape))

    # Each fragment's memory has the mean of what the replicas remembered of its leaves.
    for fragment, (old, new) in enumerate(zip(was.exchange, now.exchange, strict=True)):
        sizes = [x.size for x in jax.tree.leaves(take_fragment(state.params, fragment, 2))]
        for x, y, size in zip(
            *map(jax.tree.leaves, (old.local, new.local)), sizes * 2, strict=True
        ):
            mean, rows = (np.reshape(z, (len(z), -1))[:, :size] for z in (np.asarray(x), y))
            np.testing.assert_allclose(rows, np.broadcast_to(mean.mean(0), rows.shape), 1e-6, 1e-8)
    steps(other, back, range(3, 6))
