"""Local steps in a job of four processes, each a worker: they train, and a death ends the job."""

import os
import re
import signal

import numpy as np
import pytest
from jobs import FILE, flat, logged, steps_saved

from lbopt.cli import load_config
from lbopt.config import TrainConfig
from lbopt.recipes import build_run
from lbopt.train import Checkpoints

pytestmark = pytest.mark.process

WORKERS = 4
OPTIONS = (
    "--config.seed=7",
    "--config.global_batch_size=128",
    "--config.checkpoint.every_steps=30",
    "--config.eval_every_steps=30",
    "--config.checkpoint.keep=100",
    "--config.model.widths=(8,16)",
    "--config.model.hidden=32",
    "--config.diloco.every=8",
)
STEPS = 102
"""Steps of the run with a death. The last round has 6 steps, and step 30 is inside of a round."""
ERROR_FEEDBACK = ("--config.diloco.outer_momentum=0", "--config.diloco.outer_learning_rate=1")
AGGREGATORS = {
    "none": (),
    "mean": ("--config.aggregator.name=mean", "--config.diloco.num_fragments=3"),
    "aps": ("--config.aggregator.name=aps",),
    "ef": ("--config.aggregator.name=ef", "--config.aggregator.fraction=0.1", *ERROR_FEEDBACK),
    "econtrol": (
        "--config.aggregator.name=econtrol",
        "--config.aggregator.fraction=0.1",
        *ERROR_FEEDBACK,
    ),
    "powersgd": (
        "--config.aggregator.name=powersgd",
        "--config.aggregator.start_step=0",
        *ERROR_FEEDBACK,
    ),
}


def command(workdir, num_steps, *options):
    of_run = (*OPTIONS, f"--config.num_steps={num_steps}", *options)
    return ["train", f"--config={FILE}:adam-64", f"--workdir={workdir}", *of_run]


def final_params(workdir):
    options = [*OPTIONS, f"--config.num_steps={STEPS}", f"--config.parallel.num_devices={WORKERS}"]
    config = load_config(f"{FILE}:adam-64", options, TrainConfig)
    with Checkpoints(workdir, keep=100, read_only=True) as checkpoints:
        return flat(checkpoints.restore(build_run(config).shapes(), STEPS).params)


@pytest.mark.slow
@pytest.mark.parametrize("name", AGGREGATORS)
def test_four_processes_train_the_digits_cnn(start, tmp_path, name):
    job = start(command(tmp_path / "run", 200, *AGGREGATORS[name]), count=WORKERS, devices=1)
    assert job.codes(300) == [0] * WORKERS, job.said(0)
    assert logged(tmp_path / "run")[-1]["eval/accuracy"] > 0.9


def test_a_death_in_a_round_ends_the_job_which_goes_on_bit_for_bit(start, tmp_path):
    whole = start(command(tmp_path / "whole", STEPS), count=WORKERS, devices=1)
    assert whole.codes(300) == [0] * WORKERS, whole.said(0)

    workdir = tmp_path / "run"
    job = start(command(workdir, STEPS), count=WORKERS, devices=1)
    job.wait_for(lambda: steps_saved(workdir))
    os.kill(job.child(2), signal.SIGKILL)
    assert job.codes(60) == [3] * WORKERS
    assert re.match(r"lbopt train: process 2 of 4 \(.*\): .*SIGKILL", job.last(0))

    left = steps_saved(workdir)[-1]
    assert left < STEPS
    again = start(command(workdir, STEPS), count=WORKERS, devices=1)
    assert again.codes(300) == [0] * WORKERS, again.said(0)
    assert f"resuming at step {left} of {STEPS}" in "\n".join(again.said(0))
    np.testing.assert_array_equal(final_params(workdir), final_params(tmp_path / "whole"))
