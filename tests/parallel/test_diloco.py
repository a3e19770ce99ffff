"""Local steps: DiLoCo against its transcription, on devices and slices, with workers left out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusal import refused

import lbopt
from lbopt.aggregators import identity, plain_mean, topk
from lbopt.errors import UserError
from lbopt.models import CNN, MLP
from lbopt.parallel import LocalState, _mesh, first_worker, leave_out, rebuilt_workers
from tests.oracles import diloco as transcribed

pytestmark = pytest.mark.filterwarnings("ignore:.*sends.*:UserWarning")
WORKERS = 4
STEPS = 11
RATE = 0.05
MOMENTUM = 0.8


def loss_fn(params, model_state, batch, rng):
    del rng
    error = batch["x"] @ params["first"] @ params["second"] + params["bias"] - batch["y"]
    seen = {"mean": 0.5 * model_state["mean"] + 0.5 * batch["x"].mean(), "count": jnp.int32(3)}
    return jnp.mean(error**2), (seen, {"loss": (jnp.sum(error**2), jnp.float32(error.size))})


def start():
    rng = np.random.default_rng(0)
    shapes = {"first": (6, 5), "second": (5, 3), "bias": (3,)}
    params = {name: rng.normal(size=shape) / 2 for name, shape in shapes.items()}
    return jax.tree.map(np.float32, params), {"mean": np.float32(1.0), "count": np.int32(1)}


def batches():
    rng = np.random.default_rng(1)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return [{"x": draw(16, 6), "y": draw(16, 3)} for _ in range(STEPS)]


def inner():
    return optax.sgd(RATE, MOMENTUM)


@functools.cache
def made(tx, devices, **how):
    how = {"aggregator": plain_mean(), **how}
    reduction = lbopt.Aggregate(**how)
    return lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(devices), reduction=reduction)


def trained(tx, devices, steps=STEPS, given=None, change=lambda step, state: state, **how):
    """Return all states of a run."""
    step = made(tx, devices, **how)
    state = step.place(lbopt.TrainState.create(*start(), tx))
    visited = []
    for number, batch in enumerate((given or batches())[:steps]):
        state, _ = jax.block_until_ready(step(change(number, state), batch))
        visited.append(jax.tree.map(np.array, state))
    return visited


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("devices", [1, 4])
def test_rounds_are_those_of_the_transcription(devices, fragments):
    tx = lbopt.diloco(inner(), every=4, num_fragments=fragments, last_step=STEPS)
    found = trained(tx, devices, replicas_per_device=WORKERS // devices)
    # `first` has 30 numbers, `second` 15 and `bias` 3: the largest is alone.
    owners = {"first": 0, "second": fragments - 1, "bias": fragments - 1}
    offsets = {1: [0], 2: [2, 0]}[fragments]
    expected = transcribed.rounds(
        start()[0], batches(), WORKERS, 4, owners, offsets, (RATE, MOMENTUM), (0.7, 0.9)
    )
    for state, wanted in zip(found, expected, strict=True):
        for name, value in wanted.items():
            np.testing.assert_allclose(state.params[name], value, rtol=2e-5, atol=1e-6)


def broken_in_step_two(count=STEPS):
    """Return batches in which the second worker's examples of the second step are not finite."""
    given = batches()[:count]
    given[1]["x"][4:8] = np.nan
    return given


@pytest.mark.parametrize("how", ["asked for", "not finite"])
def test_a_worker_that_is_left_out_of_a_round_goes_on_in_the_next(how):
    tx = lbopt.diloco(inner(), every=4, last_step=STEPS)
    asked = how == "asked for"
    change = lambda step, state: leave_out(state, 1) if asked and step == 2 else state  # noqa: E731
    given = batches() if asked else broken_in_step_two()
    found = trained(tx, 4, given=given, change=change)

    expected = transcribed.rounds(
        start()[0],
        batches(),
        WORKERS,
        4,
        dict.fromkeys(start()[0], 0),
        [0],
        (RATE, MOMENTUM),
        (0.7, 0.9),
        {4: [0, 2, 3]},
    )
    for state, wanted in zip(found, expected, strict=True):
        for name, value in wanted.items():
            np.testing.assert_allclose(state.params[name], value, rtol=2e-5, atol=1e-6)

    assert found[4].aggregator_state.present.all()
    assert found[-1].aggregator_state.num_left_out == 1
    assert found[-1].aggregator_state.num_empty == 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found[3]))


@pytest.mark.parametrize(
    "aggregator",
    [
        lbopt.ef(topk(0.3)),
        lbopt.econtrol(identity()),
        lbopt.powersgd(1, start=0, min_rate=1.0),
        lbopt.aps(4, 3),
    ],
    ids=repr,
)
def test_what_a_left_out_worker_would_have_sent_does_not_matter(aggregator):
    tx = lbopt.diloco(inner(), every=4)
    leave = lambda step, state: leave_out(state, 1) if step == 2 else state  # noqa: E731
    one = trained(tx, 4, 8, change=leave, aggregator=aggregator)
    other = trained(tx, 4, 8, broken_in_step_two(8), aggregator=aggregator)
    counted = trained(tx, 4, 8, aggregator=aggregator)
    for name in start()[0]:
        np.testing.assert_array_equal(one[-1].params[name], other[-1].params[name])
        assert np.abs(one[-1].params[name] - counted[-1].params[name]).max() > 1e-4


@pytest.mark.parametrize("how", ["asked for", "not finite"])
def test_without_any_worker_all_goes_on_from_the_last_exchange(how):
    """What is finite stays: the numbers of `inject_hyperparams`, and with them the training."""
    asked = how == "asked for"
    tx = lbopt.diloco(optax.inject_hyperparams(optax.sgd)(RATE, MOMENTUM), every=4)

    def change(step, state):
        for worker in range(WORKERS) if asked and step == 5 else ():
            state = leave_out(state, worker)
        return state

    given = batches()
    if not asked:
        given[4]["x"][:] = np.nan
    found = trained(tx, 4, 9, given, change)
    before = found[3]
    after = found[7]
    workers = after.aggregator_state
    for name in start()[0]:
        np.testing.assert_array_equal(after.params[name], before.params[name])
        np.testing.assert_array_equal(workers.params[name][2], before.params[name])
        assert np.isfinite(workers.opt_state.inner_state[0].trace[name]).all()
        assert (found[8].aggregator_state.params[name][0] != before.params[name]).any()
    assert workers.num_left_out == WORKERS
    assert (before.aggregator_state.num_empty, workers.num_empty) == (0, 1)
    assert after.model_state["mean"] == before.model_state["mean"]
    assert np.isfinite(workers.model_state["mean"]).all()
    for value, wanted in (("learning_rate", RATE), ("momentum", MOMENTUM)):
        assert workers.opt_state.hyperparams[value] == pytest.approx([wanted] * WORKERS)


def test_a_worker_whose_model_state_is_not_finite_is_left_out_too():
    """Its optimizer has skipped the gradient, so that its parameters are finite."""
    tx = lbopt.diloco(lbopt.skip_bad_updates(inner()), every=4)
    found = trained(tx, 4, 4, broken_in_step_two(4))[3]
    assert np.isfinite(found.model_state["mean"])
    assert np.isfinite(found.aggregator_state.model_state["mean"]).all()


def in_eight_bits():
    return lbopt.compress_state(optax.adam(RATE), min_size=0, min_length=1)


@pytest.mark.parametrize("devices", [1, 4])
def test_a_left_out_worker_has_codes_with_the_scales_that_belong_to_them(devices):
    tx = lbopt.diloco(in_eight_bits(), every=4)
    given = batches()[:4]
    given[2]["x"][:4] = np.nan  # of the first worker
    found = trained(tx, devices, 4, given, replicas_per_device=WORKERS // devices)
    before, after = (found[number].aggregator_state.opt_state for number in (2, 3))
    sound = trained(tx, devices, 4, replicas_per_device=WORKERS // devices)[3]
    for x, wanted in zip(
        *map(jax.tree.leaves, (after, sound.aggregator_state.opt_state)), strict=True
    ):
        np.testing.assert_array_equal(x, wanted[[1, 1, 2, 3]])

    rebuilt = rebuilt_workers(found[2], 2).aggregator_state.opt_state
    for x, wanted in zip(*map(jax.tree.leaves, (rebuilt, before)), strict=True):
        np.testing.assert_array_equal(x, wanted[[1, 1]])


@pytest.mark.parametrize("bound", [np.inf, np.nan])
def test_a_model_state_that_is_not_finite_from_the_start_leaves_no_worker_out(bound):
    def bounded(params, model_state, batch, rng):
        loss, (seen, metrics) = loss_fn(params, model_state, batch, rng)
        return loss, ({**seen, "bound": model_state["bound"]}, metrics)

    params, model_state = start()
    tx = lbopt.diloco(inner(), every=2)
    step = lbopt.make_train_step(bounded, tx, lbopt.make_mesh(4))
    state = step.place(lbopt.TrainState.create(params, {**model_state, "bound": bound}, tx))
    for batch in batches()[:4]:
        state, _ = jax.block_until_ready(step(state, batch))
    assert (np.asarray(state.params["first"]) != params["first"]).all()
    assert state.aggregator_state.num_left_out == 0
    assert rebuilt_workers(state, 2).aggregator_state.params["first"].shape == (2, 6, 5)


def test_other_workers_do_not_start_from_a_broken_one():
    tx = lbopt.diloco(inner(), every=4)
    state = trained(tx, 4, 3, broken_in_step_two(3))[2]
    workers = state.aggregator_state
    assert not np.isfinite(workers.params["first"][1]).all()
    for number, rows in ((2, [0, 2, 3]), (3, [0, 3])):
        left = workers._replace(present=np.arange(WORKERS) != 2) if number == 3 else workers
        rebuilt = rebuilt_workers(state.replace(aggregator_state=left), number).aggregator_state
        mean = workers.params["first"][rows].mean(0)
        np.testing.assert_allclose(rebuilt.params["first"], [mean] * number, rtol=1e-6)

    nobody = state.replace(aggregator_state=workers._replace(present=np.zeros(4, bool)))
    nobody = rebuilt_workers(nobody, 2).aggregator_state
    np.testing.assert_array_equal(nobody.params["first"][1], state.params["first"])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(nobody))


def test_the_model_state_is_that_of_all_workers_after_a_round():
    tx = lbopt.diloco(inner(), every=4)
    found = trained(tx, 2, 4, replicas_per_device=2)
    means = np.full(WORKERS, 1.0)
    for batch in batches()[:4]:
        means = 0.5 * means + 0.5 * batch["x"].reshape(WORKERS, -1).mean(1)
    np.testing.assert_allclose(found[3].model_state["mean"], means.mean(), rtol=1e-5)
    np.testing.assert_allclose(
        found[3].aggregator_state.model_state["mean"], [means.mean()] * 4, 1e-5
    )
    assert found[2].model_state["mean"] == 1.0
    assert found[3].model_state["count"] == 3


def test_one_step_of_sgd_and_a_whole_outer_step_are_the_ordinary_step():
    rounds = trained(lbopt.diloco(optax.sgd(RATE), optax.sgd(1.0), every=1), 4)
    plain = trained(optax.sgd(RATE), 4)
    for name in start()[0]:
        np.testing.assert_allclose(rounds[-1].params[name], plain[-1].params[name], rtol=1e-5)


def test_every_step_alone_is_the_ordinary_step_bit_for_bit(problem, batches, trajectory):
    loss, state_of = problem(MLP(widths=(24,)))
    mesh = lbopt.make_mesh(4)
    runs = []
    for tx in (lbopt.lamb(0.02), lbopt.diloco(lbopt.lamb(0.02), every=1)):
        step = lbopt.make_train_step(loss, tx, mesh, reduction=lbopt.ef(topk(0.1)))
        runs.append(trajectory(step, step.place(state_of(tx)), batches[:3])[-1])
    jax.tree.map(np.testing.assert_array_equal, *runs)


@pytest.fixture
def two_slices(monkeypatch):
    """Present the four devices as two slices of two."""
    monkeypatch.setattr(_mesh, "slice_of", lambda device: device.id // 2)


@pytest.mark.parametrize(
    "aggregator", [None, lbopt.econtrol(identity()), lbopt.powersgd(1, start=0)], ids=repr
)
def test_a_slice_is_a_worker(two_slices, aggregator, problem, batches, trajectory, relative_gap):
    """The devices of a slice send a shard each, or all the same; one device has whole leaves."""
    loss, state_of = problem(MLP(widths=(24,)))
    tx = lbopt.diloco(lbopt.lamb(0.02), every=2)
    between = aggregator and lbopt.Aggregate(aggregator, over="slices")
    step = lbopt.make_train_step(loss, tx, lbopt.make_mesh(4), reduction=between)
    found = trajectory(step, step.place(state_of(tx)), batches[:4])
    assert len(found[-1].aggregator_state.present) == 2

    alone = lbopt.Aggregate(aggregator or plain_mean(), replicas_per_device=2)
    step = lbopt.make_train_step(loss, tx, lbopt.make_mesh(1), reduction=alone)
    other = trajectory(step, step.place(state_of(tx)), batches[:4])
    assert relative_gap(found[0], found[-1], other[-1]) < 1e-5


def test_a_worker_has_random_numbers_of_its_own_on_any_number_of_devices():
    def noisy(params, model_state, batch, rng):
        drawn = jax.random.normal(rng, params["w"].shape)
        return jnp.sum(params["w"] * drawn) + 0 * batch["x"].sum(), (model_state, {})

    tx = lbopt.diloco(optax.sgd(1.0), every=8)
    rows = []
    for devices in (1, 4):
        workers = lbopt.Aggregate(plain_mean(), WORKERS // devices)
        step = lbopt.make_train_step(noisy, tx, lbopt.make_mesh(devices), reduction=workers)
        state = step.place(lbopt.TrainState.create({"w": jnp.zeros(3)}, {}, tx))
        state, _ = step(state, {"x": np.zeros((4, 1), np.float32)})
        rows.append(np.asarray(state.aggregator_state.params["w"]))
    np.testing.assert_array_equal(*rows)
    assert len({*map(tuple, rows[0])}) == WORKERS


def test_bytes_are_those_of_a_round_over_its_steps():
    params = {"w": jnp.zeros((64, 64)), "b": jnp.zeros(64)}
    for fragments in (1, 2):
        tx = lbopt.diloco(inner(), every=8, num_fragments=fragments)
        step = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(4))
        wire = step.aggregation.wire_bytes(params)
        ring = 2 * 3 / 4 * 4 * (64 * 64 + 64)
        assert wire == (ring / 8, ring)


def test_the_first_worker_tells_of_the_inner_optimizer():
    tx = lbopt.diloco(lbopt.lamb(0.02), every=4)
    step = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(2))
    state = step.place(lbopt.TrainState.create(*start(), tx))
    assert lbopt.optimizer_metrics(first_worker(state)).keys() >= {"learning_rate"}
    assert isinstance(state.aggregator_state, LocalState)
    plain = lbopt.TrainState.create(*start(), inner())
    assert first_worker(plain) is plain.opt_state


@pytest.mark.parametrize(
    ("field", "value", "code", "options"),
    [
        ("backend", "pmap", "conflict", {"backend": "pmap"}),
        ("shard_update", True, "conflict", {"shard_update": True}),
        ("reduction", lbopt.AllReduce(), "conflict", {"reduction": lbopt.AllReduce()}),
        ("measure_noise", True, "conflict", {"measure_noise": True}),
    ],
)
def test_options_that_do_not_go_with_workers_are_refused(field, value, code, options):
    with refused(field, value, code):
        lbopt.make_train_step(loss_fn, lbopt.diloco(inner()), lbopt.make_mesh(4), **options)


def test_an_aggregator_that_the_outer_optimizer_must_follow_is_refused():
    tx = lbopt.diloco(inner())
    agvm = lbopt.agvm({"first": "first", "rest": ""}, "rest", 1, 0)
    step = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(4), reduction=agvm)
    with refused("aggregator", agvm, "conflict"):
        step.place(lbopt.TrainState.create(*start(), tx))


@pytest.mark.parametrize(
    ("field", "value", "arguments"),
    [
        ("every", 0, {"every": 0}),
        ("num_fragments", 5, {"every": 4, "num_fragments": 5}),
        ("last_step", 0, {"last_step": 0}),
    ],
)
def test_numbers_out_of_range_are_refused(field, value, arguments):
    with refused(field, value):
        lbopt.diloco(inner(), **arguments)


def test_more_fragments_than_parameters_are_refused():
    tx = lbopt.diloco(inner(), every=8, num_fragments=4)
    with refused("num_fragments", 4):
        lbopt.TrainState.create(*start(), tx)


def test_a_state_without_workers_is_refused():
    tx = lbopt.diloco(inner(), every=8)
    step = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(4))
    with refused("aggregator", "diloco", "missing"):
        step(lbopt.TrainState.create(*start(), tx), batches()[0])


@pytest.mark.parametrize("change", [leave_out, rebuilt_workers])
def test_changing_workers_needs_workers(change):
    with refused("state", "tuple", "type"):
        change(lbopt.TrainState.create(*start(), inner()), 1)


@pytest.mark.parametrize("aggregator", [plain_mean(), lbopt.ef(topk(0.3))], ids=repr)
def test_the_error_about_other_workers_names_the_function_that_makes_them(aggregator):
    tx = lbopt.diloco(inner(), every=2)
    state = made(tx, 4, aggregator=aggregator).place(lbopt.TrainState.create(*start(), tx))
    step = made(tx, 2, aggregator=aggregator)
    with pytest.raises(UserError, match=r"use lbopt\.parallel\.rebuilt_workers") as caught:
        step(state, batches()[0])
    assert caught.value.code == "mismatch"

    state = rebuilt_workers(state, 2)
    for batch in batches()[:2]:
        state, _ = jax.block_until_ready(step(state, batch))
    assert len(state.aggregator_state.params["first"]) == 2
    assert np.isfinite(state.params["first"]).all()


@pytest.mark.parametrize(
    ("keeping", "state"),
    [
        (lbopt.muloco(0.1), "OuterState"),
        (lbopt.muown(0.1), "MuownState"),
        (lbopt.adamh(0.1), "SphereState"),
        (optax.chain(inner(), lbopt.hyperball(2.0)), "SphereState"),
        (optax.contrib.cocob(), "COCOBState"),
        (optax.contrib.madgrad(0.1), "MadgradState"),
        (optax.contrib.mechanize(inner()), "MechanicState"),
        (optax.contrib.sam(inner(), inner()), "SAMState"),
        (optax.chain(inner(), lbopt.track_ema()), "EmaState"),
        (optax.contrib.schedule_free_sgd(0.1), "ScheduleFreeState"),
        (lbopt.compress_state(lbopt.muloco(0.1)), "OuterState"),
    ],
)
def test_an_inner_optimizer_with_a_copy_of_the_parameters_is_refused(keeping, state):
    with refused("inner", state, "conflict"):
        lbopt.TrainState.create(*start(), lbopt.diloco(keeping, every=2))


AGGREGATORS = {
    "mean": (plain_mean(), None),
    "aps": (lbopt.aps(4, 3), None),
    # Error feedback sends later what it leaves out, and outer momentum would repeat it.
    "ef": (lbopt.ef(topk(0.1)), optax.sgd(1.0)),
    "econtrol": (lbopt.econtrol(topk(0.1)), optax.sgd(1.0)),
    "powersgd": (lbopt.powersgd(4, start=0), optax.sgd(1.0)),
}


@pytest.mark.everyday("powersgd")
@pytest.mark.parametrize("name", AGGREGATORS)
def test_eight_local_steps_of_four_slices_train_the_digits_cnn(name, problem, batches, monkeypatch):
    monkeypatch.setattr(_mesh, "slice_of", lambda device: device.id)
    loss, state_of = problem(CNN(widths=(8, 16), hidden=32))
    aggregator, outer = AGGREGATORS[name]
    tx = lbopt.diloco(optax.adamw(3e-3), outer, every=8)
    between = lbopt.Aggregate(aggregator, over="slices")
    step = lbopt.make_train_step(loss, tx, lbopt.make_mesh(4), reduction=between)
    state = step.place(state_of(tx))
    for number in range(240):
        state, _ = jax.block_until_ready(step(state, batches[number % len(batches)]))
    evaluated = jax.jit(lambda state, batch: loss(state.params, state.model_state, batch, None))
    correct, count = evaluated(state, batches[0])[1][1]["accuracy"]
    assert correct / count > 0.9, (name, correct / count)
