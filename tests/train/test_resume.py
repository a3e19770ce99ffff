"""A run that was killed and restarted ends bit for bit like an uninterrupted one."""

import functools
import json
import pathlib
import re
import shutil
import signal

import jax
import numpy as np
import pytest

import lbopt
from lbopt.cli import main
from lbopt.interchange import WEIGHTS_FILE, load_safetensors

KILLED_RUN = pathlib.Path(__file__).with_name("killed_run.py")
PMAP = ("--config.parallel.num_devices=4", "--config.parallel.backend=pmap")
WATCHED = (
    "--config.optimizer.variant=albert",
    "--config.optimizer.clip_stage=mean",
    "--config.optimizer.ema_decay=0.9",
    "--config.optimizer.skip_limit=3",
    "--config.optimizer.mu_dtype=bfloat16",
    "--config.optimizer.monitor_layers=True",
    "--config.optimizer.track_noise_scale=True",
    "--config.parallel.num_microsteps=2",
)

SPREAD = (
    "--config.parallel.num_devices=4",
    "--config.model.hidden=512",
    "--config.optimizer.ema_decay=0.9",
)
SHARDED = (*SPREAD, "--config.parallel.shard_update=True")

AGGREGATED = (
    "--config.aggregator.name=econtrol",
    "--config.aggregator.fraction=0.1",
    "--config.optimizer.skip_limit=3",
    "--config.parallel.num_devices=4",
)

# Name: place and step of the kill, and the run's flags.
KILLS = {
    "one device": ("step", 10, ()),
    "pmap on four devices": ("step", 10, PMAP),
    "before the first checkpoint": ("step", 2, ()),
    "while a checkpoint is being saved": ("save", 9, ()),
    "everything watched": ("step", 10, WATCHED),
    "sharded update": ("step", 10, SHARDED),
    "error feedback": ("step", 10, AGGREGATED),
}


@pytest.fixture(scope="module")
def killed(command, start_process, tmp_path_factory):
    """Return a function name -> the workdir of a killed process."""

    @functools.cache
    def run(name):
        where, step, overrides = KILLS[name]
        workdir = tmp_path_factory.mktemp("killed") / "run"
        process = start_process(KILLED_RUN, where, step, *command(workdir, *overrides))
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL, f"{name}: {stderr}"
        return workdir

    return run


@pytest.fixture
def workdir(killed, tmp_path):
    """Return a function name -> a copy of that killed workdir."""
    return lambda name: shutil.copytree(killed(name), tmp_path / "run")


def whole_checkpoints(workdir):
    return sorted(
        int(folder.name)
        for folder in (workdir / "checkpoints").glob("[0-9]*")
        if folder.name.isdigit()
    )


@pytest.mark.everyday("while a checkpoint is being saved")
@pytest.mark.process
@pytest.mark.parametrize("name", KILLS)
def test_the_same_command_ends_in_the_same_state(
    name, workdir, train, reference, bits, saved_state, logged
):
    overrides = KILLS[name][2]
    workdir = workdir(name)
    assert train(workdir, *overrides) == 0
    whole = reference(*overrides)
    for step in (12, 20):
        resumed, straight = (
            bits(saved_state(folder, *overrides, step=step)) for folder in (workdir, whole)
        )
        assert resumed == straight
    assert any(name.startswith("opt_state/") for name in straight)
    assert any(name.startswith("model_state/batch_stats/") for name in straight)
    assert {"step", "rng"} < straight.keys()
    assert any(name.startswith("aggregator_state/local/") for name in straight) == (
        name == "error feedback"
    )
    assert logged(workdir) == logged(whole)
    assert [line["step"] for line in logged(workdir)] == list(range(1, 21))


@pytest.mark.slow
@pytest.mark.process
def test_on_fewer_devices_what_replicas_remember_is_rebuilt(workdir, train, saved_state, capsys):
    """Nothing else changes: the next step starts from the mean of the saved replicas."""
    workdir = workdir("error feedback")
    seen = {}
    two = (*AGGREGATED, "--config.parallel.num_devices=2")

    def watch(step, state, batch):
        seen.setdefault("first", jax.tree.map(np.asarray, state))

    newest = whole_checkpoints(workdir)[-1]
    saved = jax.tree.map(np.asarray, saved_state(workdir, *AGGREGATED, step=newest))
    assert train(workdir, *two, before=watch) == 0
    said = capsys.readouterr().err
    assert "warning: 4 replicas saved this state and there are 2 now: " in said
    assert whole_checkpoints(workdir)[-1] == 20
    first = seen["first"]
    jax.tree.map(np.testing.assert_array_equal, first.params, saved.params)
    jax.tree.map(
        np.testing.assert_array_equal,
        first.aggregator_state.mirrored,
        saved.aggregator_state.mirrored,
    )
    for was, now in zip(
        jax.tree.leaves(saved.aggregator_state.local),
        jax.tree.leaves(first.aggregator_state.local),
        strict=True,
    ):
        assert len(was) == 4
        np.testing.assert_allclose(
            now, np.broadcast_to(was.mean(0), (2, *was.shape[1:])), rtol=1e-6, atol=1e-9
        )
    assert train(workdir, *two) == 0


@pytest.mark.process
def test_the_command_as_a_process_ends_in_the_same_state(
    workdir, command, start_process, reference, bits, saved_state, logged
):
    workdir = workdir("one device")
    process = start_process("-m", "lbopt", *command(workdir))
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert re.search(r"^resuming at step [369] of 20", stderr, re.MULTILINE)
    assert bits(saved_state(workdir)) == bits(saved_state(reference()))
    assert logged(workdir) == logged(reference())


@pytest.mark.everyday("one device")
@pytest.mark.process
@pytest.mark.parametrize("name", ["one device", "while a checkpoint is being saved"])
def test_every_step_after_a_resume_sees_what_it_sees_in_one_run(
    name, workdir, train, bits, tmp_path
):
    """The step sees the same state, and the same examples in the same order."""

    def record(seen):
        return lambda step, state, batch: seen.update({step: (bits(state), bits(batch))})

    straight = {}
    resumed = {}
    assert train(tmp_path / "straight", before=record(straight)) == 0
    assert train(workdir(name), before=record(resumed)) == 0
    assert sorted(straight) == list(range(1, 21))
    assert sorted(resumed) in [list(range(first, 21)) for first in (4, 7, 10)]
    for step, (state, batch) in resumed.items():
        assert state == straight[step][0]
        assert batch == straight[step][1]
    assert batch.keys() == {"image", "label"}
    assert straight[7][1]["image"] != straight[8][1]["image"]


@pytest.mark.slow
@pytest.mark.process
def test_a_sharded_run_goes_on_without_sharding(
    workdir, train, reference, saved_state, logged, capsys
):
    """The tolerance is 1e-6 of the distance moved: norms are summed in another order."""
    workdir = workdir("sharded update")
    assert train(workdir, *SPREAD) == 0
    assert re.search(r"^resuming at step [369] of 20", capsys.readouterr().err, re.MULTILINE)
    evaluated = [
        [line["eval/loss"] for line in logged(run) if "eval/loss" in line]
        for run in (workdir, reference(*SPREAD))
    ]
    np.testing.assert_allclose(
        *evaluated, rtol=1e-5
    )  # the average: sharded until the kill, and never sharded
    resumed, whole, killed = (
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state.params)])
        for state in (
            saved_state(workdir, *SPREAD),
            saved_state(reference(*SHARDED), *SHARDED),
            saved_state(workdir, *SPREAD, step=9),
        )
    )
    assert np.max(np.abs(resumed - whole)) < 1e-6 * np.linalg.norm(whole - killed)


def test_a_sharded_run_is_evaluated_and_exported(train, command, saved_state, tmp_path, capsys):
    """Both use the average, which is sharded."""
    workdir = tmp_path / "run"
    output = tmp_path / "exported"
    assert train(workdir, *SHARDED) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[0])
    assert main(["evaluate", *command(workdir, *SHARDED)[1:]]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["validation/loss"] == pytest.approx(last["eval/loss"], rel=1e-6)
    assert (
        main(["export", f"--workdir={workdir}", "--format=safetensors", f"--output={output}"]) == 0
    )
    variables, _ = load_safetensors(output / WEIGHTS_FILE)
    average = lbopt.ema_params(saved_state(workdir, *SHARDED).opt_state)
    jax.tree.map(np.testing.assert_array_equal, variables["params"], jax.device_get(average))


def test_the_optimizer_of_a_sharded_run_is_in_parts(plan_of):
    state = plan_of(*SHARDED).init()
    parts = [
        leaf.size // leaf.addressable_shards[0].data.size
        for leaf in jax.tree.leaves(state.opt_state)
    ]
    assert sorted(parts)[-3:] == [4, 4, 4]  # two moments and the average of one kernel
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state.params))


@pytest.mark.process
def test_a_run_killed_before_its_first_checkpoint_starts_again(
    killed, train, workdir, logged, capsys
):
    assert whole_checkpoints(killed("before the first checkpoint")) == []
    assert [line["step"] for line in logged(killed("before the first checkpoint"))] == [1, 2]
    assert train(workdir("before the first checkpoint")) == 0
    assert "starting at step 0 of 20" in capsys.readouterr().err


@pytest.mark.process
def test_a_checkpoint_cut_off_by_the_kill_is_not_used(killed, train, workdir, capsys):
    left = killed("while a checkpoint is being saved")
    assert whole_checkpoints(left) == [3, 6]
    assert len(list((left / "checkpoints").iterdir())) == 3, (
        "the unfinished one is there under another name"
    )
    workdir = workdir("while a checkpoint is being saved")
    assert train(workdir) == 0
    assert "resuming at step 6 of 20" in capsys.readouterr().err
    assert [
        folder for folder in (workdir / "checkpoints").iterdir() if not folder.name.isdigit()
    ] == []


def test_a_checkpoint_saved_in_the_background_holds_the_state_of_its_step(
    train, reference, bits, saved_state, tmp_path
):
    """The next step may write into the buffers of the saved state."""
    states = {}
    assert (
        train(
            tmp_path / "run",
            before=lambda step, state, batch: states.update({step - 1: bits(state)}),
        )
        == 0
    )
    for step in (3, 6, 9, 12, 15, 18):
        assert bits(saved_state(reference(), step=step)) == states[step]
    assert states[3] != states[6]


@pytest.mark.process
def test_a_line_torn_by_the_kill_is_written_again(workdir, train, reference, logged):
    workdir = workdir("one device")
    with open(workdir / "metrics.jsonl", "a") as stream:
        stream.write('{"step": 11, "examples_se')
    assert train(workdir) == 0
    assert logged(workdir) == logged(reference())


def test_a_finished_run_is_left_as_it_is(train, tmp_path, capsys):
    def contents():
        files = [tmp_path / "metrics.jsonl", *(tmp_path / "checkpoints").rglob("*")]
        return {file: file.read_bytes() for file in files if file.is_file()}

    def never(*arguments):
        raise AssertionError("a step was run")

    assert train(tmp_path) == 0
    before = contents()
    assert len(before) > 7
    capsys.readouterr()
    assert train(tmp_path, before=never) == 0
    assert contents() == before
    assert json.loads(capsys.readouterr().out.splitlines()[0])["step"] == 20
