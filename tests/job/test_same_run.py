"""A run has the same batches, evaluation and parameters with any number of processes."""

import json

import numpy as np
import pytest
from jobs import flat, logged, saved_state, train_alone, train_command

pytestmark = pytest.mark.process

# Relative to the movement of the parameters, because gradients are summed in another order.
TOLERANCE = 1e-5


def distance(one, other):
    first, last = (flat(saved_state(one, step).params) for step in (3, 20))
    others = flat(saved_state(other, 20).params)
    return np.max(np.abs(others - last)) / np.linalg.norm(last - first)


@pytest.mark.everyday("2-1")
@pytest.mark.parametrize(("devices", "alone"), [(2, 1), (4, 8)])
def test_two_processes_find_what_one_finds(start, tmp_path, devices, alone):
    """Compare two processes with some devices each to one process with `alone` devices."""
    job = start(train_command(tmp_path / "two"), count=2, devices=devices)
    assert job.codes() == [0, 0], [job.said(0), job.said(1)]
    assert f"{2 * devices} devices of 2 processes" in "\n".join(job.said(0))
    assert job.said(1) == []
    assert train_alone(tmp_path / "one", devices=alone) == 0

    assert distance(tmp_path / "two", tmp_path / "one") < TOLERANCE
    lines = logged(tmp_path / "two")
    for ours, theirs in zip(lines, logged(tmp_path / "one"), strict=True):
        assert ours["step"] == theirs["step"]
        assert ours.get("eval/accuracy") == theirs.get("eval/accuracy")
        for metric in {"train/loss", "eval/loss"} & ours.keys():
            assert ours[metric] == pytest.approx(theirs[metric], rel=1e-5)
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert sum("eval/loss" in line for line in lines) == 4


PARTS = ("--config.parallel.shard_update=True", "--config.model.hidden=64")


@pytest.mark.slow
def test_a_state_in_parts(start, tmp_path):
    """Two processes save it and one reads it; damage to one process's file affects both."""
    job = start(train_command(tmp_path / "two", *PARTS), count=2, devices=2)
    assert job.codes() == [0, 0], [job.said(0), job.said(1)]
    assert train_alone(tmp_path / "one", *PARTS, devices=4) == 0
    ours, theirs = (
        flat(saved_state(tmp_path / name, 20, *PARTS).params) for name in ("two", "one")
    )
    assert np.max(np.abs(ours - theirs)) < TOLERANCE * np.linalg.norm(theirs)
    newest = tmp_path / "two" / "checkpoints" / "20"
    for file in newest.glob("default/ocdbt.process_1/d/*"):
        file.unlink()
    again = start(train_command(tmp_path / "two", *PARTS), count=2, devices=2)
    assert again.codes() == [0, 0], [again.said(0), again.said(1)]
    aside = tmp_path / "two" / "damaged" / "20"
    assert again.said(1) == []
    assert any(
        line.startswith(f"{newest}: ") and line.endswith(f"moved to {aside}; going back to step 18")
        for line in again.said(0)
    ), again.said(0)
    np.testing.assert_array_equal(flat(saved_state(tmp_path / "two", 20, *PARTS).params), ours)


@pytest.mark.slow
def test_evaluation_by_two_processes_is_that_of_one(start, tmp_path):
    assert train_alone(tmp_path / "run", devices=2) == 0
    command = ["evaluate", *train_command(tmp_path / "run")[1:]]
    two = start(command, count=2, devices=1)
    one = start(command, count=1, devices=1)
    assert (two.codes(), one.codes()) == ([0, 0], [0])
    assert two.said(1) == []
    assert json.loads(two.last(0)) == pytest.approx(json.loads(one.last(0)), rel=1e-6)
