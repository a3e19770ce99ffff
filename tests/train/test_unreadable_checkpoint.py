"""A damaged checkpoint stops the run in one line that names it; nothing is deleted."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import lbopt
from lbopt.errors import EnvironmentProblem
from lbopt.train.checkpoint import Checkpoints


def make_state(step=0):
    params = {"kernel": jnp.arange(600.0).reshape(20, 30), "bias": jnp.arange(30.0)}
    return lbopt.TrainState.create(params, {}, optax.adam(0.1)).replace(step=jnp.int32(step))


def shapes(make=make_state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), make())


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


DAMAGES = [truncate, empty, zero, delete_data, delete_manifests, delete_metadata]


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
    with pytest.raises(EnvironmentProblem) as caught:
        restore(workdir, 6)
    said = str(caught.value)
    assert said.startswith(f"checkpoint {folder} cannot be read (")
    assert said.endswith("; remove that folder to resume at step 3")
    assert "\n" not in said
    assert len(said) < 400
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
    with pytest.raises(EnvironmentProblem, match=r"; remove that folder to start again, or use another --workdir$"):
        restore(workdir, 3)


def test_one_of_another_model_is_not_taken(workdir):
    def other():
        return lbopt.TrainState.create({"kernel": jnp.zeros((20, 31)), "bias": jnp.zeros(31)}, {}, optax.adam(0.1))

    with Checkpoints(workdir) as checkpoints, pytest.raises(EnvironmentProblem, match=re.escape("checkpoints/6")):
        checkpoints.restore(shapes(other), 6)


def test_a_run_stops_at_it(train, tmp_path, capsys):
    assert train(tmp_path) == 0
    delete_data(tmp_path / "checkpoints" / "20")
    before = fingerprint(tmp_path)
    capsys.readouterr()
    assert train(tmp_path) == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith(f"lbopt train: checkpoint {tmp_path / 'checkpoints' / '20'} cannot be read (")
    assert said.endswith("remove that folder to resume at step 18\n")
    assert fingerprint(tmp_path) == before
