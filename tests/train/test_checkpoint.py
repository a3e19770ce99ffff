"""Retention of checkpoints, the choice of the best, and the structure after reading."""

import contextlib
import hashlib
import json
import pathlib
import re
import tarfile
import threading
import time
from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusal import numbers_in, refused, troubled

import lbopt
from lbopt.errors import NO_VALUE
from lbopt.job import SoloJob
from lbopt.parallel import make_mesh, put_replicated, replicated_sharding, with_shardings
from lbopt.train import Checkpoints, _orbax, _replica_memory, _seal
from lbopt.train._checkpoint import choose_step

pytestmark = pytest.mark.usefixtures("optimized")  # a committed checkpoint was written with it

TX = optax.adam(0.1)


def make_state(step=0, num_devices=1):
    """Return a small state of several dtypes; every value depends on the step."""
    params = {
        "Dense_0": {
            "kernel": jnp.full((3, 2), step + 0.5),
            "bias": jnp.full(2, step, jnp.bfloat16),
        },
        "scale": jnp.float32(step / 3),
    }
    state = lbopt.TrainState.create(
        params, {"batch_stats": {"mean": jnp.full(2, -1.0 * step)}}, TX, seed=step
    )
    return put_replicated(make_mesh(num_devices), state.replace(step=jnp.int32(step)))


def like():
    return jax.eval_shape(make_state)


def kept(workdir):
    return sorted(int(folder.name) for folder in (workdir / "checkpoints").iterdir())


def save_all(workdir, accuracies, keep, best_metric="eval/accuracy", name="eval/accuracy"):
    with Checkpoints(workdir, keep, best_metric) as checkpoints:
        for step, value in accuracies.items():
            checkpoints.save(make_state(step), {} if value is None else {name: value})
        checkpoints.wait()
        return checkpoints.latest_step(), checkpoints.best_step()


@pytest.mark.parametrize("reopen", [False, True])
def test_the_latest_and_the_most_accurate_are_kept(tmp_path, reopen):
    """Reopening in between is what a resumed run does; steps without a value were not evaluated."""
    accuracies = {1: None, 2: 0.5, 3: 0.9, 4: None, 5: 0.7, 6: None, 7: 0.8, 8: None}
    if reopen:
        for step, value in accuracies.items():
            latest, best = save_all(tmp_path, {step: value}, keep=2)
    else:
        latest, best = save_all(tmp_path, accuracies, keep=2)
    assert (latest, best) == (8, 3)
    assert kept(tmp_path) == [3, 7, 8]


def test_by_loss_the_lowest_is_best(tmp_path):
    losses = {1: 3.0, 2: 0.5, 3: 0.9, 4: 2.0}
    assert save_all(tmp_path, losses, keep=1, best_metric="eval/loss", name="eval/loss") == (4, 2)
    assert kept(tmp_path) == [2, 4]


def test_of_equals_the_later_is_best(tmp_path):
    assert save_all(tmp_path, {1: 0.5, 2: 0.5, 3: 0.4}, keep=1) == (3, 2)
    assert kept(tmp_path) == [2, 3]


@pytest.mark.parametrize(
    "losses", [{1: float("nan"), 2: 1.0, 3: 2.0}, {1: 1.0, 2: float("nan"), 3: 2.0}]
)
def test_a_loss_that_is_not_a_number_is_never_best(tmp_path, losses):
    _, best = save_all(tmp_path, losses, keep=3, best_metric="eval/loss", name="eval/loss")
    assert losses[best] == 1.0


@pytest.mark.parametrize("first", [True, False])
def test_a_loss_that_is_not_a_number_does_not_push_the_best_out(tmp_path, first):
    nan = float("nan")
    losses = {1: nan, 2: 1.0, 3: 2.0, 4: 3.0} if first else {1: 1.0, 2: nan, 3: 2.0, 4: 3.0}
    save_all(tmp_path, losses, keep=1, best_metric="eval/loss", name="eval/loss")
    assert kept(tmp_path) == [2 if first else 1, 4]


def test_without_an_evaluation_none_is_best(tmp_path):
    assert save_all(tmp_path, {1: None, 2: None}, keep=3) == (2, None)


def test_an_empty_folder_has_no_checkpoint(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        assert (checkpoints.latest_step(), checkpoints.best_step()) == (None, None)
        for which in ("latest", "best", "newest", "-1", "1.5"):
            with refused("checkpoint", which, "missing"):
                choose_step(checkpoints, which)


def test_a_checkpoint_is_chosen_by_name_or_step(tmp_path):
    save_all(tmp_path, {1: 0.5, 2: 0.9, 3: 0.7}, keep=3)
    with Checkpoints(tmp_path) as checkpoints:
        chosen = [choose_step(checkpoints, which) for which in ("latest", "best", "1")]
    assert chosen == [3, 2, 1]


@pytest.mark.parametrize(("num_devices", "on"), [(1, 1), (4, 4), (1, 4), (4, 2)])
def test_values_dtypes_and_layout_come_back(tmp_path, num_devices, on):
    state = make_state(7, num_devices)
    mesh = make_mesh(on)

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, None)
        checkpoints.wait()
        restored = checkpoints.restore(
            with_shardings(like(), jax.tree.map(lambda _: replicated_sharding(mesh), like())), 7
        )

    assert jax.tree.structure(restored) == jax.tree.structure(state)

    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        assert (after.dtype, after.shape) == (before.dtype, before.shape)
        assert np.asarray(after).tobytes() == np.asarray(before).tobytes()
        assert after.sharding.is_equivalent_to(replicated_sharding(mesh), after.ndim)
        assert len(after.addressable_shards) == on
        for shard in after.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.asarray(before).tobytes()

    assert {str(leaf.dtype) for leaf in jax.tree.leaves(restored)} == {
        "int32",
        "float32",
        "bfloat16",
        "uint32",
    }


class Device:
    """A stand-in for a device that reports its memory size and usage."""

    def __init__(self, device):
        self.device = device
        self.stats = {}

    def __eq__(self, other):
        return self.device == other

    __hash__ = None

    def memory_stats(self):
        return self.stats


@pytest.mark.parametrize(
    ("free_bytes", "copied"),
    [(0, True), (-1, False)],
    ids=["room for it", "one byte too few for it"],
)
def test_the_state_is_copied_on_devices_if_there_is_room_beside_what_steps_use(
    tmp_path, monkeypatch, free_bytes, copied
):
    """With a copy, a thread writes. Before the first step there would be room in either case."""
    devices = [Device(device) for device in jax.local_devices()[:2]]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    state = make_state(1, num_devices=2)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(make_state()))

    for device in devices:
        device.stats = {"bytes_limit": 1000 + size, "peak_bytes_in_use": size, "bytes_in_use": size}
    threads = []

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.prepare(state)
        # A step has run, and this device has used the most memory.
        devices[1].stats["peak_bytes_in_use"] = 1000 - free_bytes
        checkpoints.save(state, None, before=lambda: threads.append(threading.current_thread()))
        checkpoints.wait()

        # The peak includes the copy now, but room is not checked again.
        devices[1].stats["peak_bytes_in_use"] = 1000 + size
        checkpoints.save(
            make_state(2, num_devices=2),
            None,
            before=lambda: threads.append(threading.current_thread()),
        )
        checkpoints.wait()

    assert [thread is not threading.main_thread() for thread in threads] == [copied, copied]
    assert kept(tmp_path) == [1, 2]


class SlowFolder(SoloJob):
    """A job of two whose second process sees the newest checkpoint only after several checks."""

    count = 2

    def __init__(self, looks):
        self.looks = looks

    def together(self, key, value):
        if key != "steps of checkpoints":
            return [value, value]
        self.looks -= 1
        return [value, value if self.looks < 0 else value[:-1]]


def test_a_folder_that_shows_what_is_new_late_is_looked_at_again(tmp_path, monkeypatch):
    save_all(tmp_path, {1: 0.5, 2: 0.6}, keep=3)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    job = SlowFolder(3)
    with Checkpoints(tmp_path, job=job) as checkpoints:
        assert checkpoints.steps() == [1, 2]
        assert job.looks == -1
    with troubled(str(tmp_path / "checkpoints"), NO_VALUE, "mismatch") as caught:
        Checkpoints(tmp_path, job=SlowFolder(10**6))
    assert re.findall(r"\[.*?\]", caught.value.reason) == ["[1, 2]", "[1]"]
    assert numbers_in(caught)[:5] == [0, 1, 2, 1, 1]  # the processes, each before its steps


def test_a_checkpoint_from_before_there_were_aggregators_is_read(tmp_path, monkeypatch):
    class Earlier(flax.struct.PyTreeNode):
        step: jax.Array
        params: dict
        model_state: dict
        opt_state: tuple
        rng: jax.Array
        aggregator_state: ClassVar[tuple] = ()  # not saved

    now = make_state(3)
    monkeypatch.setattr(
        _replica_memory, "count", lambda state: _seal.BEFORE_AGGREGATORS
    )  # the value read from its seal
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(
            Earlier(now.step, now.params, now.model_state, now.opt_state, now.rng),
            {"eval/accuracy": 0.5},
        )
        checkpoints.wait()
    monkeypatch.undo()
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), now
    )
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        jax.tree.map(np.testing.assert_array_equal, checkpoints.restore(shapes, 3), now)
    body = json.dumps({"step": 3, "sums": {}, "metrics": {}})
    data = {"seal": body, "sha256": hashlib.sha256(body.encode()).hexdigest()}
    assert _seal.read(data).replicas == _seal.BEFORE_AGGREGATORS


STACK = lbopt.stacked_paths("^layers/")
RATE = optax.linear_schedule(0.1, 0.01, 10)
OF_BEFORE = {
    "lamb": lambda: optax.chain(
        lbopt.lamb(RATE, weight_decay=0.01, stacked=STACK), lbopt.monitor_layers(STACK)
    ),
    "lars_flax": lambda: lbopt.lars(RATE, weight_decay=0.01, variant="flax", stacked=STACK),
    "lans": lambda: lbopt.skip_bad_updates(lbopt.lans(RATE, weight_decay=0.01)),
}


@pytest.mark.everyday("lars_flax")
@pytest.mark.parametrize("name", OF_BEFORE)
def test_a_checkpoint_whose_ratios_lay_in_the_parameters_containers_is_read(name, tmp_path):
    """An earlier version made the archive by three updates of each optimizer."""
    with tarfile.open(pathlib.Path(__file__).with_name("states_in_containers.tgz")) as archive:
        archive.extractall(tmp_path, filter="data")
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731

    first = {"dense": {"kernel": draw(3, 4), "bias": draw(4)}, "layers": {"kernel": draw(2, 4, 4)}}
    tx = OF_BEFORE[name]()
    state = lbopt.TrainState.create(first, {}, tx)

    for step in range(3):
        gradients = jax.tree.map(lambda p, step=step: jnp.sin(p * (step + 1)), first)
        updates, opt_state = tx.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)

    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )

    with Checkpoints(tmp_path / name, read_only=True) as checkpoints:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, 1e-6),
            checkpoints.restore(shapes, 3),
            state,
        )
        wrong = shapes.replace(params={**shapes.params, "new": shapes.step})
        with troubled(str(tmp_path / name / "checkpoints" / "3")) as caught:
            checkpoints.restore(wrong, 3)
        assert "params/new" in str(caught.value)


def test_a_step_is_saved_once(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(make_state(3), {"eval/accuracy": 0.5})
        checkpoints.wait()
        before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
        checkpoints.save(make_state(3), {"eval/accuracy": 0.9})
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_a_checkpoint_holds_no_pickle(tmp_path):
    save_all(tmp_path, {1: 0.5}, keep=3)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) > 3
    for file in files:
        assert file.suffix not in {".pkl", ".pickle", ".npy"}
        content = file.read_bytes()
        assert not content.startswith(
            tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))
        ), file


@pytest.mark.parametrize(
    ("name", "read_only"),
    [
        *((name, False) for name in ("a[1]", "lamb[1024]/b", "a\\b", "a*b", "a?", "**/b")),
        ("a\\b", True),
    ],
)
def test_a_folder_whose_name_is_a_pattern_is_refused_before_anything_is_saved(
    name, read_only, tmp_path
):
    """If a path has a backslash, a good checkpoint would count as damaged."""
    with refused("workdir", str(tmp_path / name)):
        Checkpoints(tmp_path / name, read_only=read_only)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a[b", "a b {c} %20 ~ $HOME", "a\nb"])
def test_other_odd_names_hold_checkpoints(name, tmp_path):
    now = make_state(3)
    with Checkpoints(tmp_path / name) as checkpoints:
        checkpoints.save(now, {"eval/accuracy": 0.5})
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), now
    )
    with Checkpoints(tmp_path / name, read_only=True) as checkpoints:
        jax.tree.map(np.testing.assert_array_equal, checkpoints.restore(shapes, 3), now)


def test_the_first_checkpoint_is_read_back(tmp_path, monkeypatch):
    def missing(*_):
        raise FileNotFoundError("no such array")

    monkeypatch.setattr(_orbax, "read_array", missing)
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpoints(tmp_path))
        checkpoints.save(make_state(1), None)
        with troubled(str(tmp_path / "checkpoints" / "1"), NO_VALUE, "damaged"):
            checkpoints.save(make_state(2), None)
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["1"]
