"""A damaged checkpoint is never used: a run resumes from the previous one, deleting nothing."""

import gc
import json
import shutil
import time

import gcsfs.retry
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusal import names_in, numbers_in, troubled

import lbopt
from lbopt.cli import _process, main
from lbopt.errors import NO_VALUE, EnvironmentProblem
from lbopt.train import Checkpoints, _checkpoint, _orbax, read_variables
from lbopt.train._faults import Damaged


def make_state(step=0):
    params = {"kernel": jnp.arange(600.0).reshape(20, 30), "bias": jnp.arange(30.0)}
    return lbopt.TrainState.create(params, {}, optax.adam(0.1)).replace(step=jnp.int32(step))


def shapes(make=make_state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), make()
    )


def data_files(folder):
    return [file for file in folder.rglob("*") if file.is_file() and file.parent.name == "d"]


def all_files(folder):
    return [file for file in folder.rglob("*") if file.is_file()]


def truncate(folder):
    for file in data_files(folder):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(folder):
    for file in all_files(folder):
        file.write_bytes(b"")


def zero(folder):
    for file in data_files(folder):
        file.write_bytes(bytes(file.stat().st_size))


def delete_data(folder):
    for file in data_files(folder):
        file.unlink()


def delete_manifests(folder):
    for file in folder.rglob("manifest.ocdbt"):
        file.unlink()


def delete_metadata(folder):
    (folder / "default" / "_METADATA").unlink()


def put_a_folder_in_the_place_of_the_seal(folder):
    (folder / "seal" / "metadata").unlink()
    (folder / "seal" / "metadata").mkdir()


def link_to_nothing(folder):
    shutil.rmtree(folder)
    folder.symlink_to("nowhere")


def link_in_a_loop(folder):
    shutil.rmtree(folder)
    folder.symlink_to(folder.name)


DAMAGES = [truncate, empty, zero, delete_data, delete_manifests, delete_metadata, link_to_nothing]


def fingerprint(folder):
    return {file: file.read_bytes() for file in all_files(folder)}


@pytest.fixture
def workdir(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for step in (3, 6):
            checkpoints.save(make_state(step), {"eval/accuracy": step / 10})
    return tmp_path


def restore(workdir, step):
    with Checkpoints(workdir) as checkpoints:
        return checkpoints.restore(shapes(), step)


@pytest.mark.parametrize("damage", DAMAGES)
def test_it_is_named_with_the_way_out(workdir, damage):
    folder = workdir / "checkpoints" / "6"
    assert data_files(folder)
    damage(folder)
    before = fingerprint(workdir)
    with troubled(str(folder), NO_VALUE, "damaged") as caught:
        restore(workdir, 6)
    assert numbers_in(caught)[-1] == 3  # the step before
    assert len(str(caught.value)) < 400
    assert fingerprint(workdir) == before


def test_the_way_out_works(workdir):
    folder = workdir / "checkpoints" / "6"
    delete_data(folder)
    for file in sorted(folder.rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    folder.rmdir()
    with Checkpoints(workdir) as checkpoints:
        assert checkpoints.latest_step() == 3
        state = checkpoints.restore(shapes(), 3)
    assert int(state.step) == 3


def test_without_an_earlier_one_the_run_starts_again(workdir):
    folder = workdir / "checkpoints" / "3"
    delete_data(folder)
    with troubled(str(folder), NO_VALUE, "damaged") as caught:
        restore(workdir, 3)
    assert {"another", "workdir"} <= names_in(caught)
    assert "step" not in names_in(caught)


def test_one_of_another_model_is_not_taken(workdir):
    def other():
        return lbopt.TrainState.create(
            {"kernel": jnp.zeros((20, 31)), "bias": jnp.zeros(31)}, {}, optax.adam(0.1)
        )

    with (
        Checkpoints(workdir) as checkpoints,
        troubled(str(workdir / "checkpoints" / "6"), NO_VALUE, "damaged"),
    ):
        checkpoints.restore(shapes(other), 6)


@pytest.mark.parametrize(
    ("generator", "other", "read_only"),
    [
        ("threefry2x32", "rbg", False),
        ("rbg", "threefry2x32", False),
        ("rbg", "unsafe_rbg", False),
        ("rbg", "unsafe_rbg", True),
    ],
)
def test_one_with_random_keys_of_another_generator_names_the_variable(
    generator, other, read_only, tmp_path
):
    with jax.default_prng_impl(generator), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(make_state(3), {})
    before = fingerprint(tmp_path)
    reader = Checkpoints(tmp_path, read_only=read_only, trains=True)
    with jax.default_prng_impl(other), reader as checkpoints:
        with troubled("jax_default_prng_impl", other, "mismatch") as caught:
            checkpoints.restore_newest(lambda step: shapes())
        assert not isinstance(caught.value, Damaged)
        assert {"JAX_DEFAULT_PRNG_IMPL", generator} <= names_in(caught)
    assert fingerprint(tmp_path) == before


def test_a_run_goes_back_to_the_one_before(train, reference, bits, saved_state, tmp_path, capsys):
    assert train(tmp_path) == 0
    for step in (18, 20):
        delete_data(tmp_path / "checkpoints" / str(step))
    before = fingerprint(tmp_path / "checkpoints" / "20")
    capsys.readouterr()
    assert train(tmp_path) == 0
    said = capsys.readouterr().err.splitlines()
    for line, step in zip(said, (20, 18), strict=False):
        assert line.startswith(f"{tmp_path / 'checkpoints' / str(step)}: ")
        assert line.endswith(
            f"; moved to {tmp_path / 'damaged' / str(step)}; going back to step 15"
        )
    assert said[2].startswith("resuming at step 15 of 20")
    moved = fingerprint(tmp_path / "damaged" / "20")
    assert {str(file.relative_to(tmp_path / "damaged")): data for file, data in moved.items()} == {
        str(file.relative_to(tmp_path / "checkpoints")): data for file, data in before.items()
    }
    assert bits(saved_state(tmp_path)) == bits(saved_state(reference()))


@pytest.mark.everyday("delete_data", "link_in_a_loop")
@pytest.mark.parametrize(
    "damage", [delete_data, put_a_folder_in_the_place_of_the_seal, link_to_nothing, link_in_a_loop]
)
def test_a_step_damaged_twice_is_set_aside_twice(damage, workdir):
    for _ in range(2):
        damage(workdir / "checkpoints" / "6")
        with Checkpoints(workdir) as checkpoints:
            assert int(checkpoints.restore_newest(lambda step: shapes()).step) == 3
            checkpoints.save(make_state(6), {"eval/accuracy": 0.6})
    assert sorted(folder.name for folder in (workdir / "damaged").iterdir()) == ["6", "6-2"]
    with Checkpoints(workdir) as checkpoints:
        assert (checkpoints.latest_step(), checkpoints.best_step()) == (6, 6)


def test_the_best_is_not_one_that_was_set_aside(workdir):
    delete_data(workdir / "checkpoints" / "6")
    with Checkpoints(workdir) as checkpoints:
        assert not checkpoints.would_be_best({"eval/accuracy": 0.4})
        checkpoints.restore_newest(lambda step: shapes())
        assert checkpoints.best_step() == 3
        assert checkpoints.would_be_best({"eval/accuracy": 0.4})


def test_a_run_without_an_intact_one_stops(train, tmp_path, capsys):
    assert train(tmp_path, "--config.checkpoint.keep=2") == 0
    for folder in (tmp_path / "checkpoints").iterdir():
        delete_data(folder)
    before = fingerprint(tmp_path)
    capsys.readouterr()
    assert train(tmp_path, "--config.checkpoint.keep=2") == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith(f"lbopt train: {tmp_path / 'checkpoints' / '20'}: ")
    assert fingerprint(tmp_path) == before


def test_what_is_only_read_is_left_where_it_is(train, command, tmp_path, capsys):
    assert train(tmp_path) == 0
    truncate(tmp_path / "checkpoints" / "20")
    before = fingerprint(tmp_path)
    capsys.readouterr()
    for which, code, said in (
        ("latest", 0, "; going back to step 18\n"),
        ("20", 3, "to resume at step 18\n"),
    ):
        assert main(["evaluate", *command(tmp_path)[1:], f"--checkpoint={which}"]) == code
        out, err = capsys.readouterr()
        assert err.endswith(said)
        assert (json.loads(out)["step"] if out else None) == (18 if code == 0 else None)
    assert fingerprint(tmp_path) == before


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(13, "Permission denied"),
        ValueError("UNAVAILABLE: the bucket does not answer"),
        gcsfs.retry.HttpError({"message": "Backend Error", "code": 503}),
    ],
)
def test_what_cannot_be_read_now_is_not_taken_for_damaged(workdir, error, monkeypatch):
    def refuse(*arguments):
        raise error

    monkeypatch.setattr(_orbax, "read_arrays", refuse)
    with Checkpoints(workdir) as checkpoints, pytest.raises(EnvironmentProblem) as caught:
        checkpoints.restore_newest(lambda step: shapes())
    assert not isinstance(caught.value, Damaged)
    assert not (workdir / "damaged").exists()


def damage_at_random(folder, rng):
    """Truncate a file at random, or flip one of its bits; some bytes do not matter."""
    files = [file for file in all_files(folder) if file.stat().st_size]
    file = files[rng.integers(len(files))]
    data = bytearray(file.read_bytes())
    if rng.random() < 0.4:
        data = data[: rng.integers(len(data))]
    else:
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
    file.write_bytes(bytes(data))


def noisy_state(step=0):
    """Return a state of random numbers, which cannot be compressed."""
    noise = jax.random.normal(jax.random.key(step), (100, 200))
    return lbopt.TrainState.create({"kernel": noise}, {}, optax.sgd(0.1)).replace(
        step=jnp.int32(step)
    )


@pytest.fixture
def noisy(tmp_path):
    """Return a function () -> a new workdir with two checkpoints of random numbers."""
    original = tmp_path / "original"
    with Checkpoints(original) as checkpoints:
        for step in (3, 6):
            checkpoints.save(noisy_state(step), {"eval/accuracy": step / 10})

    def fresh():
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        return shutil.copytree(original, tmp_path / "copy")

    return fresh


def values(state):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def newest(workdir):
    with Checkpoints(workdir) as checkpoints:
        return checkpoints.restore_newest(lambda step: shapes(noisy_state))


@pytest.mark.slow
def test_random_damage_never_yields_other_parameters(noisy):
    """The newer checkpoint is damaged 50 times, and every second time the older one too."""
    rng = np.random.default_rng(0)
    wanted = {step: values(noisy_state(step)) for step in (3, 6)}
    outcomes = []
    for turn in range(50):
        workdir = noisy()
        damage_at_random(workdir / "checkpoints" / "6", rng)
        if turn % 2:
            damage_at_random(workdir / "checkpoints" / "3", rng)
        try:
            state = newest(workdir)
        except EnvironmentProblem:
            outcomes.append("refused")
            continue
        outcomes.append(int(state.step))
        assert values(state) == wanted[int(state.step)]
    assert set(outcomes) == {"refused", 3, 6}, outcomes


def flip_in_arrays(workdir, rng):
    """Flip a bit in the largest file of the newer checkpoint."""
    file = max(data_files(workdir / "checkpoints" / "6"), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[rng.integers(len(data))] ^= 1 << rng.integers(8)
    file.write_bytes(bytes(data))


@pytest.mark.parametrize("looked_at", [True, False])
def test_only_the_checksums_see_a_flipped_bit_of_an_array(noisy, looked_at, monkeypatch):
    """Without checksums the flipped bit would reach the parameters unnoticed."""
    if not looked_at:
        monkeypatch.setattr(_checkpoint, "mismatch", lambda state, saved: "")
    rng = np.random.default_rng(1)
    workdir = noisy()
    flip_in_arrays(workdir, rng)
    state = newest(workdir)
    assert int(state.step) == (3 if looked_at else 6)
    assert (values(state) == values(noisy_state(int(state.step)))) == looked_at


@pytest.mark.slow
def test_many_damaged_arrays_are_one_line(tmp_path, capfd):
    """Threads that are still reading other arrays print nothing."""

    def make(step=0):
        params = {f"layer_{i}": jax.random.normal(jax.random.key(i), (640, 100)) for i in range(40)}
        return lbopt.TrainState.create(params, {}, optax.adam(0.1)).replace(step=jnp.int32(step))

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(make(1), None)
        checkpoints.wait()
    shutil.copytree(tmp_path, tmp_path / "without")
    shutil.rmtree(tmp_path / "without" / "checkpoints" / "1" / "default" / "ocdbt.process_0")
    for file in data_files(tmp_path / "checkpoints"):
        file.write_bytes(b"x" * file.stat().st_size)
    capfd.readouterr()
    with _process.settings():
        with Checkpoints(tmp_path, read_only=True) as checkpoints:
            for _ in range(5):
                with pytest.raises(Damaged):
                    checkpoints.restore(shapes(make), 1)
                gc.collect()
        for _ in range(5):
            with pytest.raises(EnvironmentProblem):
                read_variables(tmp_path / "without")
            gc.collect()
        time.sleep(0.5)
    assert not capfd.readouterr().err
