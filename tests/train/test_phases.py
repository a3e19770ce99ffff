"""A run of two phases: another batch and schedule, moments kept or reset, resumed in either."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from refusal import refused, run_refused
from watched_step import WatchedStep

from lbopt.cli import _train, call_get_config, main
from lbopt.data import example_indices
from lbopt.recipes import _build
from lbopt.train import Checkpoints, _device_copies
from lbopt.transforms import LearningRateState
from lbopt.transforms._moments import LambMomentsState

BUILD = _build.build_run
FIRST = 6
SECOND = 5
"""Steps of each phase."""


class Killed(BaseException):
    """Ends a run the way a kill does: nothing is saved after it."""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Return a config file whose argument is the second phase's `optimizer_state`."""
    file = tmp_path_factory.mktemp("config") / "two.py"
    file.write_text(
        f"""
from lbopt.config import *
def get_config(arg="keep"):
    return TrainConfig(
        name="two", num_steps={FIRST}, global_batch_size=64, log_every_steps=1, eval_every_steps=3,
        eval_global_batch_size=400, model=ModelConfig("cnn", widths=(4,), hidden=8),
        optimizer=OptimizerConfig("lamb", weight_decay=0.01, ema_decay=0.5, ema_ramp=False),
        schedule=ScheduleConfig(0.02, warmup_rule="none", warmup_steps=2.0),
        checkpoint=CheckpointConfig(every_steps=2), parallel=ParallelConfig(num_devices=2),
        phase2=PhaseConfig(num_steps={SECOND}, global_batch_size=128, num_microsteps=2,
            eval_global_batch_size=100,
            schedule=ScheduleConfig(
                0.01, base_batch_size=128, warmup_rule="none", warmup_steps=2.0),
            optimizer_state=arg or "keep"))
"""
    )
    return file


@pytest.fixture(scope="module")
def runs(file):
    """Return a function row -> the run, whose programs are compiled once."""
    made = {}
    return lambda row: (
        made.get(row) or made.setdefault(row, BUILD(call_get_config(f"{file}:{row}")))
    )


@pytest.fixture
def train(file, runs, monkeypatch):
    """Return a function (workdir, row, kill_at=None, nan_at=None) -> exit code.

    With `nan_at` the run may end at a loss that is not finite; the examples of that step are NaN.
    """

    def go(workdir, row="keep", kill_at=None, nan_at=None):
        run = dataclasses.replace(runs(row), stop_at_nan=nan_at is not None)
        second = dataclasses.replace(run.next_phase, stop_at_nan=nan_at is not None)
        phases = [watched(phase, kill_at, nan_at) for phase in (run, second)]
        whole = dataclasses.replace(phases[0], next_phase=phases[1])
        with monkeypatch.context() as patch:
            patch.setattr(_train, "build_run", lambda config, **_: whole)
            return main(["train", f"--config={file}:{row}", f"--workdir={workdir}"])

    return go


def watched(phase, kill_at, nan_at=None):
    def before(state, batch):
        if kill_at is not None and int(state.step) + 1 == kill_at:
            raise Killed
        if nan_at is not None and int(state.step) + 1 == nan_at:
            batch["image"] = batch["image"] * np.nan

    return dataclasses.replace(phase, train_step=WatchedStep(phase.train_step, before))


@pytest.fixture(scope="module")
def lines():
    def read(workdir):
        whole = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        return [
            {name: value for name, value in line.items() if not name.startswith("perf/")}
            for line in whole
        ]

    return read


def saved(runs, workdir, row, step):
    run = runs(row).phase_at(step)
    with Checkpoints(workdir, keep=100, read_only=True) as checkpoints:
        return jax.device_get(checkpoints.restore(run.shapes(), step))


@pytest.fixture(scope="module")
def straight(tmp_path_factory, file, runs):
    """Return a function row -> workdir of an uninterrupted run."""
    made = {}

    def go(row):
        if row not in made:
            workdir = tmp_path_factory.mktemp("straight") / row
            patch = pytest.MonkeyPatch()
            with patch.context() as inner:
                inner.setattr(_train, "build_run", lambda config, **_: runs(row))
                assert main(["train", f"--config={file}:{row}", f"--workdir={workdir}"]) == 0
            made[row] = workdir
        return made[row]

    return go


def test_the_second_phase_goes_on_with_its_own_batch_and_warms_up_from_zero(straight, lines):
    seen = lines(straight("keep"))
    assert [line["step"] for line in seen] == list(range(1, FIRST + SECOND + 1))
    sizes = [64] * FIRST + [128] * SECOND
    assert [line["examples_seen"] for line in seen] == np.cumsum(sizes).tolist()
    rates = [line["train/learning_rate"] for line in seen]
    first = rates[:FIRST]
    second = rates[FIRST:]
    # Warmup of two steps; updates count from 1, and the decay ends one step after the last.
    assert first == pytest.approx(
        [0.01, 0.02, *(0.02 * (1 - k / 5) for k in range(1, 5))], rel=1e-6
    )
    assert second == pytest.approx(
        [0.005, 0.01, *(0.01 * (1 - k / 4) for k in range(1, 4))], rel=1e-6
    )
    evaluated = [line["step"] for line in seen if "eval/loss" in line]
    assert evaluated == [3, 6, 9, 11]  # every three steps of a phase, and at its end


@pytest.mark.parametrize("row", ["keep", "reset"])
def test_moments_are_kept_or_reset(row, straight, runs):
    workdir = straight(row)
    before = saved(runs, workdir, row, FIRST)
    after = runs(row).next_phase.enter(before)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after.params), before.params)
    count = [part for part in jax.tree.leaves(after.opt_state, is_leaf=is_rate) if is_rate(part)]
    assert [int(part.schedule_count) for part in count] == [0]
    kept = [np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(moments(after.opt_state))]
    assert all(kept) if row == "keep" else not any(kept)
    assert int(after.step) == FIRST


def is_rate(part):
    return isinstance(part, LearningRateState)


def moments(opt_state):
    parts = jax.tree.leaves(opt_state, is_leaf=lambda part: isinstance(part, LambMomentsState))
    (found,) = [part for part in parts if isinstance(part, LambMomentsState)]
    return found.mu


def test_kept_and_reset_moments_make_another_run(straight, lines):
    kept, reset = (lines(straight(row)) for row in ("keep", "reset"))
    assert [line["train/loss"] for line in kept[: FIRST + 1]] == [
        line["train/loss"] for line in reset[: FIRST + 1]
    ]
    assert kept[-1]["train/loss"] != reset[-1]["train/loss"]


@pytest.mark.everyday("4-keep")
@pytest.mark.parametrize("row", ["keep", "reset"])
@pytest.mark.parametrize("kill_at", [4, FIRST + 1, FIRST + 4])
def test_killed_in_either_phase_it_ends_in_the_same_state(
    row, kill_at, train, straight, runs, lines, tmp_path
):
    with pytest.raises(Killed):
        train(tmp_path / "run", row, kill_at)
    assert train(tmp_path / "run", row) == 0
    assert lines(tmp_path / "run") == lines(straight(row))
    last = FIRST + SECOND
    ours, theirs = (
        saved(runs, workdir, row, last) for workdir in (tmp_path / "run", straight(row))
    )
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_room_for_a_copy_is_looked_for_once_a_phase_after_steps_have_run(
    train, straight, runs, lines, tmp_path, monkeypatch
):
    """A run without memory for a copy ends like one with it."""
    asked = []

    def has_room(leaves):
        asked.append({int(leaf) for leaf in leaves if leaf.ndim == 0 and leaf.dtype == np.int32})
        return False

    monkeypatch.setattr(_device_copies, "has_room", has_room)
    assert train(tmp_path) == 0
    assert [max(numbers) for numbers in asked] == [2, FIRST + 2]  # saved every two steps
    assert lines(tmp_path) == lines(straight("keep"))
    ours, theirs = (
        saved(runs, workdir, "keep", FIRST + SECOND) for workdir in (tmp_path, straight("keep"))
    )
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_the_second_phase_sees_the_examples_that_come_next(runs):
    first, second = runs("keep").phases()
    size = len(first.batches.dataset)
    assert second.batches.first_example == FIRST * 64
    wanted = first.batches.dataset.take(example_indices(size, 0, FIRST * 64, 128))
    np.testing.assert_array_equal(second.batches[0]["image"], wanted["image"])


@pytest.mark.parametrize(
    ("step", "place"), [(FIRST, "config.schedule"), (FIRST + 2, "config.phase2.schedule")]
)
def test_a_diverged_phase_names_its_own_learning_rate(step, place, train, tmp_path, capsys):
    assert train(tmp_path, nan_at=step) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("lbopt train: config.stop_at_nan = True: ")
    assert re.search(rf"(?<![\w.]){place}\.base_learning_rate\b", line)


def test_a_complete_run_has_nothing_to_do(train, straight, capsys, tmp_path, fingerprint_of):
    workdir = straight("keep")
    before = fingerprint_of(workdir)
    assert train(workdir) == 0
    assert f"complete at step {FIRST + SECOND} of {FIRST + SECOND}" in capsys.readouterr().err
    assert fingerprint_of(workdir) == before


@pytest.fixture
def fingerprint_of():
    return lambda folder: {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("step", [FIRST, FIRST + SECOND])
def test_a_checkpoint_of_either_phase_is_evaluated(step, straight, file, lines, capsys):
    workdir = straight("keep")
    flags = [f"--config={file}:keep", f"--workdir={workdir}", f"--checkpoint={step}"]
    capsys.readouterr()
    assert main(["evaluate", *flags]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["validation/loss"] == pytest.approx(
        lines(workdir)[step - 1]["eval/loss"], rel=1e-6
    )


OTHERS = {
    "one phase": ("--config.phase2=None", r"\bphase2 .*None "),
    "a second phase with another batch": (
        "--config.phase2.global_batch_size=256",
        r"\bphase2\.global_batch_size .*128 .*256 ",
    ),
}
"""An override, and the field with its values there and here that the refusal names."""


@pytest.mark.parametrize("name", OTHERS)
def test_a_workdir_of_other_phases_is_refused(name, straight, file, fingerprint_of, capsys):
    override, named = OTHERS[name]
    workdir = straight("keep")
    before = fingerprint_of(workdir)
    with refused("--workdir", str(workdir), "exists") as caught:
        run_refused(capsys, "train", f"--config={file}:keep", f"--workdir={workdir}", override)
    assert re.search(named, str(caught.value))
    assert fingerprint_of(workdir) == before


# A change, the refused field with its value and code, and what else the message must name.
BAD = {
    "steps of the first phase": (
        "num_steps=6,",
        "num_epochs=3.0,",
        ("config.num_steps", None, "missing"),
    ),
    "a batch that does not divide": (
        "global_batch_size=128, num",
        "global_batch_size=127, num",
        ("config.phase2.global_batch_size", 127, "value"),
    ),
    "a warmup that is too long": (
        "warmup_steps=2.0),\n            optimizer",
        "warmup_steps=5.0),\n            optimizer",
        ("config.phase2.schedule.warmup_steps", 5.0, "conflict"),
    ),
    "another word": (
        "optimizer_state=arg",
        "optimizer_state='forget'",
        ("config.phase2.optimizer_state", "forget", "choice"),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_second_phase_that_cannot_be_is_one_line(name, file, tmp_path, capsys):
    here, there, fault = BAD[name]
    source = file.read_text()
    assert here in source
    other = tmp_path / "other.py"
    other.write_text(source.replace(here, there))
    with refused(*fault):
        run_refused(capsys, "train", f"--config={other}", f"--workdir={tmp_path / 'run'}")
