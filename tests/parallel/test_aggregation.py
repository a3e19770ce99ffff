"""A training step with an aggregator: under jit and pmap, on any number of devices."""

import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jobs import on_devices
from refusal import refused

import lbopt
from lbopt.aggregators import identity, keep_finite, plain_mean, randk, sign, topk
from lbopt.data import example_indices, load_digits
from lbopt.models import CNN, MLP

REPLICAS = 4
LABELS = {"head": "^(head|Dense_1)/", "body": ""}
AGGREGATORS = {
    "mean": plain_mean(),
    "agvm": lbopt.agvm(LABELS, "body", 2, 0, alpha=0.5),
    "aps": lbopt.aps(4, 3),
    "ef": lbopt.ef(sign()),
    "ef21": lbopt.ef21(topk(0.1), 0.5, dense_start=True),
    "econtrol": lbopt.econtrol(randk(0.2)),
    "powersgd": lbopt.powersgd(2, start=2),
}


def optimizer(name, rate=0.02):
    return (
        optax.chain(lbopt.lamb(rate), lbopt.scale_by_agvm(LABELS))
        if name == "agvm"
        else lbopt.lamb(rate)
    )


@pytest.fixture(scope="module")
def mlp(problem):
    return problem(MLP(widths=(24,)))


def asked(name, backend="jit", shard_update=False, num_microsteps=1, **how):
    """Return arguments of `make_train_step`; some belong to an `Aggregate`."""
    return {
        "backend": backend,
        "shard_update": shard_update,
        "num_microsteps": num_microsteps,
        "reduction": lbopt.Aggregate(AGGREGATORS[name], **how),
    }


_TRAINED = {}


def trained(problem, trajectory, batches, name, devices, steps=4, **options):
    """Return all states of a run; each run is made once."""
    key = (id(problem[0]), name, devices, steps, *sorted(options.items()))
    if key not in _TRAINED:
        loss_fn, state_of = problem
        tx = optimizer(name)
        step = lbopt.make_train_step(
            loss_fn,
            tx,
            lbopt.make_mesh(devices),
            **asked(name, **options),
        )
        _TRAINED[key] = trajectory(step, step.place(state_of(tx)), batches[:steps])
    return _TRAINED[key]


@pytest.mark.everyday("powersgd")
@pytest.mark.parametrize("name", AGGREGATORS)
def test_one_two_and_four_devices_give_equal_results(name, mlp, trajectory, batches, relative_gap):
    runs = [
        trained(mlp, trajectory, batches, name, n, replicas_per_device=REPLICAS // n)
        for n in (1, 2, 4)
    ]
    for other in runs[1:]:
        assert relative_gap(runs[0][0], runs[0][-1], other[-1]) < 1e-5


@pytest.mark.everyday(
    "{'backend': 'pmap'}-ef21", "{'num_microsteps': 2, 'shard_update': True}-powersgd"
)
@pytest.mark.parametrize("name", AGGREGATORS)
@pytest.mark.parametrize(
    "options",
    [{"backend": "pmap"}, {"num_microsteps": 2, "shard_update": True}],
    ids=str,
)
def test_backends_sharding_and_microsteps(name, options, mlp, trajectory, batches, relative_gap):
    plain = trained(mlp, trajectory, batches, name, 4)
    other = trained(mlp, trajectory, batches, name, 4, **options)
    assert relative_gap(plain[0], plain[-1], other[-1]) < 1e-5


def test_the_mean_is_the_step_without_an_aggregator_bit_for_bit(mlp, trajectory, batches):
    loss_fn, state_of = mlp
    tx = optimizer("mean")
    step = lbopt.make_train_step(
        loss_fn, tx, lbopt.make_mesh(4), reduction=lbopt.AllReduce(jnp.float32)
    )
    plain = trajectory(step, state_of(tx), batches[:4])
    ours = trained(mlp, trajectory, batches, "mean", 4)
    jax.tree.map(np.testing.assert_array_equal, plain[-1].params, ours[-1].params)


@pytest.mark.process
@pytest.mark.slow
def test_eight_devices_too(tmp_path):
    """Eight devices need a separate process, because this one has four."""
    root = pathlib.Path(__file__).parents[2]
    file = tmp_path / "gaps.json"
    subprocess.run(
        [sys.executable, "-m", "tests.parallel.eight_devices", str(file)],
        check=True,
        cwd=root,
        env=on_devices(8),
        timeout=300,
    )
    gaps = json.loads(file.read_text())
    assert set(gaps) == {"ef", "ef21", "econtrol", "aps", "aps stochastic", "powersgd", "agvm"}
    assert max(gaps.values()) < 1e-5


@pytest.mark.everyday("mean")
@pytest.mark.parametrize("name", ["mean", "ef", "agvm"])
def test_groups_of_batch_norm(name, problem, trajectory, batches, relative_gap):
    """Pairs of replicas share statistics under both backends, with any aggregator."""
    grouped, alone = (
        problem(CNN(widths=(8,), hidden=16, batch_norm_scope=scope))
        for scope in ("replicas:2", "local")
    )
    jitted = trained(grouped, trajectory, batches, name, 4)
    mapped = trained(grouped, trajectory, batches, name, 4, backend="pmap")
    assert relative_gap(jitted[0], jitted[-1], mapped[-1]) < 1e-5
    assert (
        relative_gap(jitted[0], jitted[-1], trained(alone, trajectory, batches, name, 4)[-1]) > 1e-3
    )


@pytest.mark.parametrize("scope", ["local", "examples:8"])
def test_batch_norm_of_rows_is_that_of_replicas(scope, problem, trajectory, batches, relative_gap):
    normed = problem(CNN(widths=(8,), hidden=16, batch_norm_scope=scope))
    runs = [
        trained(normed, trajectory, batches, "mean", n, 3, replicas_per_device=4 // n)
        for n in (4, 2, 1)
    ]
    for other in runs[1:]:
        assert relative_gap(runs[0][0], runs[0][-1], other[-1]) < 1e-5


@pytest.mark.parametrize("scope", ["global", "replicas:2"])
def test_rows_share_no_statistics(scope, problem, batches):
    loss_fn, state_of = problem(CNN(widths=(8,), hidden=16, batch_norm_scope=scope))
    tx = optimizer("mean")
    step = lbopt.make_train_step(
        loss_fn, tx, lbopt.make_mesh(2), reduction=lbopt.Aggregate(AGGREGATORS["mean"], 2)
    )
    with refused("stats_scope", scope, "mismatch"):
        step(step.place(state_of(tx)), batches[0])


def test_devices_that_are_summed_first(mlp, trajectory, batches, relative_gap):
    """A replica is a group of two devices; the compressor sees each device's shard of the sum."""
    plain = trained(mlp, trajectory, batches, "mean", 4)
    for name in ("mean", "powersgd"):
        alone = trained(mlp, trajectory, batches, name, 2)
        grouped = trained(mlp, trajectory, batches, name, 4, over=2)
        assert relative_gap(alone[0], alone[-1], grouped[-1]) < 1e-5
    assert (
        relative_gap(plain[0], plain[-1], trained(mlp, trajectory, batches, "mean", 4, over=4)[-1])
        < 1e-5
    )


@pytest.mark.parametrize(
    ("backend", "over"), [("jit", "replicas"), ("pmap", "replicas"), ("jit", 2)]
)
def test_leaves_without_axes_or_without_numbers(backend, over):
    def loss_fn(params, model_state, batch, rng):
        each = params["scale"] * (batch["x"] @ params["w"]) ** 2
        return jnp.mean(each) + params["none"].sum(), (
            model_state,
            {"loss": (jnp.sum(each), len(each))},
        )

    tx = optax.sgd(0.1)
    batch = {"x": np.arange(8.0, dtype=np.float32).reshape(4, 2)}
    params = {"scale": jnp.float32(0.5), "w": jnp.array([0.1, 0.2]), "none": jnp.zeros((0, 3))}
    ends = []
    for reduction in (None, lbopt.Aggregate(lbopt.ef21(identity()), over=over)):
        step = lbopt.make_train_step(
            loss_fn, tx, lbopt.make_mesh(4), backend, reduction=reduction, donate=False
        )
        ends.append(step(step.place(lbopt.TrainState.create(params, {}, tx)), batch)[0].params)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6), *ends)


def test_a_broken_gradient_is_forgotten_by_all_parts(mlp, batches):
    """This holds even if only one device's shard contains the non-finite number."""
    loss_fn, state_of = mlp
    aggregator = keep_finite(lbopt.ef(topk(0.1)))
    tx = lbopt.skip_bad_updates(optimizer("ef"), 5)

    def broken(params, model_state, batch, rng):
        loss, rest = loss_fn(params, model_state, batch, rng)
        return loss + jnp.where(batch["label"][0] < 0, jnp.nan, 0.0) * params["head"]["bias"][
            0
        ], rest

    step = lbopt.make_train_step(
        broken, tx, lbopt.make_mesh(4), reduction=lbopt.Aggregate(aggregator, over=2)
    )
    state, _ = jax.block_until_ready(step(step.place(state_of(tx)), batches[0]))
    before = jax.tree.map(np.array, (state.params, state.aggregator_state))
    bad = {**batches[1], "label": batches[1]["label"].copy()}
    bad["label"][0] = -1
    state, _ = jax.block_until_ready(step(state, bad))
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.aggregator_state), before)
    assert {int(shard.data) for shard in state.aggregator_state.shared.addressable_shards} == {1}
    assert lbopt.optimizer_metrics(state.opt_state)["skipped/nonfinite"] == 1


@pytest.mark.parametrize("backend", ["jit", "pmap"])
def test_a_skipped_spike_leaves_nothing_behind(backend, mlp, batches):
    loss_fn, state_of = mlp
    tx = lbopt.skip_bad_updates(lbopt.lamb(0.02), 5, spike_factor=20.0, warmup_updates=2)

    def spiked(params, model_state, batch, rng):
        loss, rest = loss_fn(
            params, model_state, {**batch, "label": jnp.abs(batch["label"]) % 10}, rng
        )
        return loss * jnp.where(jnp.any(batch["label"] < 0), 1e5, 1.0), rest

    step = lbopt.make_train_step(
        spiked, tx, lbopt.make_mesh(4), backend, reduction=lbopt.ef(topk(0.1))
    )
    state = step.place(state_of(tx))
    for batch in batches[:3]:
        state, _ = jax.block_until_ready(step(state, batch))
    where = jax.tree.map(lambda x: x.sharding, state)
    assert where == step.state_sharding(state)  # otherwise the second step would recompile
    before = jax.tree.map(np.array, (state.params, state.aggregator_state))
    state, _ = jax.block_until_ready(step(state, {**batches[3], "label": -1 - batches[3]["label"]}))
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.aggregator_state), before)
    state, _ = jax.block_until_ready(step(state, batches[4]))
    assert int(state.aggregator_state.shared) == 4
    assert lbopt.optimizer_metrics(state.opt_state)["skipped/spikes"] == 1


def test_parts_of_a_slice_are_compressed_for_themselves(mlp, batches):
    loss_fn, state_of = mlp
    tx = optimizer("ef")
    params = state_of(optimizer("ef")).params
    aggregator = lbopt.ef(topk(0.1))
    step = lbopt.make_train_step(
        loss_fn, tx, lbopt.make_mesh(4), reduction=lbopt.Aggregate(aggregator, over=2), donate=False
    )

    state = step.place(state_of(tx))
    after, _ = step(state, batches[0])

    rows = {}
    for part in range(2):  # the gradient of each group of two devices is that of half of the batch
        half = {name: value[16 * part : 16 * part + 16] for name, value in batches[0].items()}
        rows[part] = jax.grad(lambda p, half=half: loss_fn(p, {}, half, jax.random.key(0))[0])(
            params
        )

    for leaf, error in enumerate(jax.tree.leaves(after.aggregator_state.local.error)):
        each = np.stack([np.ravel(jax.tree.leaves(rows[part])[leaf]) for part in range(2)])
        padded = np.pad(each, [(0, 0), (0, -each.shape[1] % 2)]).reshape(2, 2, -1)
        k = int(np.ceil(0.1 * padded.shape[-1] - 1e-9))
        left = padded.copy()
        np.put_along_axis(left, np.argsort(-np.abs(padded), -1, kind="stable")[..., :k], 0, -1)
        np.testing.assert_allclose(np.asarray(error).reshape(2, 2, -1), left, atol=1e-6)
        assert error.sharding.shard_shape(error.shape) == (1, padded.shape[-1])

    assert step.aggregation.wire_bytes(params).sent < aggregator.wire_bytes(params, 2).sent / 1.8


def test_memory_lies_with_its_replica(mlp, batches):
    loss_fn, state_of = mlp
    tx = optimizer("ef21")
    for options in ({}, {"backend": "pmap"}):
        step = lbopt.make_train_step(
            loss_fn, tx, lbopt.make_mesh(4), reduction=AGGREGATORS["ef21"], **options
        )
        state, _ = jax.block_until_ready(step(step.place(state_of(tx)), batches[0]))
        for row in jax.tree.leaves(state.aggregator_state.local):
            assert row.shape[0] == 4
            assert row.sharding.shard_shape(row.shape)[0] == 1
        for whole in jax.tree.leaves((state.aggregator_state.mirrored, state.params)):
            assert whole.sharding.is_fully_replicated


@pytest.mark.slow
@pytest.mark.parametrize("name", AGGREGATORS)
def test_lamb_on_top_trains_the_digits_cnn(name, problem):
    """Sixty steps of batch 128, four replicas on two devices, beat chance clearly.

    Chance is a loss of 2.3 and an accuracy of 0.1.
    """
    loss_fn, state_of = problem(CNN(widths=(8, 16), hidden=32, batch_norm_scope="local"))
    tx = optimizer(name)
    train = load_digits().train
    step = lbopt.make_train_step(
        loss_fn,
        tx,
        lbopt.make_mesh(2),
        reduction=lbopt.Aggregate(AGGREGATORS[name], REPLICAS // 2),
    )
    state = step.place(state_of(tx))
    last = []
    for number in range(60):
        state, metrics = step(
            state, train.take(example_indices(len(train), 3, 128 * (number % 10), 128))
        )
        last.append([float(metrics[kind][0] / metrics[kind][1]) for kind in ("loss", "accuracy")])
    loss, accuracy = np.mean(last[-10:], 0)
    assert loss < 1.3, name
    assert accuracy > 0.6, name


def test_a_choice_that_loses_on_the_wire_is_told(mlp):
    loss_fn, state_of = mlp
    tx = optimizer("ef")
    half = lbopt.ef(topk(0.5))
    step = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(4), reduction=half)
    with pytest.warns(UserWarning, match=r"ef\(topk\(0.5\)\) .*\b2 x\b"):
        step.place(state_of(tx))


@pytest.mark.parametrize(
    ("options", "how", "field", "value", "code"),
    [
        ({"clip": lbopt.GradientClip(1.0, "mean")}, {}, "clip.stage", "mean", "conflict"),
        (
            {"backend": "pmap"},
            {"replicas_per_device": 2},
            "reduction.replicas_per_device",
            2,
            "conflict",
        ),
        ({"backend": "pmap"}, {"over": 2}, "reduction.over", 2, "conflict"),
        ({}, {"replicas_per_device": 0}, "reduction.replicas_per_device", 0, "value"),
        ({}, {"over": 3}, "reduction.over", 3, "mismatch"),
        ({}, {"over": "hosts"}, "reduction.over", "hosts", "choice"),
        ({}, {"over": "slices"}, "reduction.over", "slices", "mismatch"),
        (
            {},
            {"over": 2, "replicas_per_device": 2},
            "reduction.replicas_per_device",
            2,
            "conflict",
        ),
        ({}, {"aggregator": None}, "reduction.aggregator", None, "type"),
        (
            {"shard_update": True},
            {"aggregator": lbopt.agvm(LABELS, "body", adam_b2=0.9)},
            "shard_update",
            True,
            "conflict",
        ),
    ],
)
def test_refusals(options, how, field, value, code, mlp):
    with refused(field, value, code):
        reduction = lbopt.Aggregate(**{"aggregator": AGGREGATORS["ef"], **how})
        lbopt.make_train_step(
            mlp[0], optimizer("ef"), lbopt.make_mesh(4), reduction=reduction, **options
        )


def test_a_state_that_does_not_fit_is_refused_before_anything_is_compiled(mlp, batches):
    loss_fn, state_of = mlp
    tx = optimizer("ef")
    step = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(4), reduction=AGGREGATORS["ef"])
    with refused("aggregator", AGGREGATORS["ef"], "missing"):
        step(state_of(tx), batches[0])
    two = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(2), reduction=AGGREGATORS["ef"])
    with refused("aggregator_state/local/error/Dense_0/bias", code="mismatch"):
        step(two.place(state_of(tx)), batches[0])
    agvm = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(4), reduction=AGGREGATORS["agvm"])
    with refused("aggregator", AGGREGATORS["agvm"], "conflict"):
        agvm.place(state_of(tx))
    with refused("reduction.replicas_per_device", 1, "mismatch"):
        lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(3), reduction=AGGREGATORS["agvm"])
    sgd = optax.chain(optax.sgd(0.1), lbopt.scale_by_agvm(LABELS))
    of_adam = lbopt.agvm(LABELS, "body", adam_b2=0.9)
    agvm = lbopt.make_train_step(loss_fn, sgd, lbopt.make_mesh(4), reduction=of_adam)
    with refused("aggregator", of_adam, "conflict"):
        agvm.place(state_of(sgd))


def test_agvm_of_adam_finds_the_second_moment(mlp, batches):
    loss_fn, state_of = mlp
    aggregator = lbopt.agvm(LABELS, "body", 1, 0, alpha=0.5, adam_b2=0.999, adam_eps=1e-6)
    tx = optimizer("agvm")
    step = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(4), reduction=aggregator)
    state = step.place(state_of(tx))
    for batch in batches[:3]:
        state, _ = jax.block_until_ready(step(state, batch))
    shared = state.aggregator_state.shared
    assert shared.scale["head"] != 1
    assert all(np.isfinite(value) for value in shared.phi.values())
