"""The batch script for Slurm, with an srun that starts real processes and a recording scontrol."""

import os
import pathlib
import random
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

SCRIPT = pathlib.Path(__file__).parents[2] / "tpu" / "slurm"
# All tasks run on this machine, under one of its own names.
SRUN = """#!/usr/bin/env bash
[ "$1" = --kill-on-bad-exit=0 ] || exit 99
shift
export SLURM_NTASKS=2 SLURM_STEP_NUM_NODES=2 SLURM_LOCALID=0 SLURM_STEP_NODELIST=localhost
SLURM_PROCID=0 "$@" & first=$!
SLURM_PROCID=1 "$@" & second=$!
wait $first; one=$?
wait $second; other=$?
exit $((one > other ? one : other))
"""


@pytest.fixture
def batch(tmp_path):
    """Return a function (command, variables) -> (the finished script, scontrol's arguments)."""
    for name, text in {"srun": SRUN, "scontrol": '#!/bin/sh\necho "$@" >>"$ASKED"\n'}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*command, **variables):
        # JAX derives the port from the job's number; this number gives a free port that no other
        # test uses.
        job = str(random.SystemRandom().randrange(0, 4000, 2))

        environment = os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "ASKED": str(tmp_path / "asked"),
        }
        environment |= {
            "SLURM_JOB_ID": job,
            "XDG_CONFIG_HOME": str(tmp_path / "nowhere"),
            "JAX_NUM_CPU_DEVICES": "1",
        }
        environment.pop("XLA_FLAGS", None)

        done = subprocess.run(
            ["bash", SCRIPT, *command],
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=120,
        )

        asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
        return done, asked.replace(job, "JOB")

    return run


@pytest.mark.slow
def test_the_processes_of_a_job_know_each_other(batch, tmp_path):
    done, asked = batch(
        sys.executable, "-m", "lbopt", "doctor", LBOPT_JOB_SECRET_FILE=str(tmp_path / "nowhere")
    )
    assert done.returncode == 0, done
    assert "process 0 of 2" in done.stdout
    assert asked == ""
    assert not (tmp_path / "nowhere" / "lbopt").exists()  # the job had its own secret


@pytest.mark.parametrize(
    ("code", "restarts", "again"),
    [(75, "50", True), (3, "9", True), (3, "10", False), (2, "0", False), (1, "0", False)],
)
def test_what_is_queued_again(batch, code, restarts, again):
    done, asked = batch("sh", "-c", f"exit {code}", SLURM_RESTART_COUNT=restarts)
    assert done.returncode == code
    assert asked == ("requeue JOB\n" if again else "")


def test_the_data_are_handed_to_the_command(batch, tmp_path):
    show = ("sh", "-c", "echo $TFDS_DATA_DIR")
    done, _ = batch(*show, DATA_DIR=str(tmp_path))
    assert (done.returncode, done.stdout.split()) == (0, [str(tmp_path)] * 2)
    done, asked = batch(*show, DATA_DIR=str(tmp_path / "nowhere"))
    assert (done.returncode, done.stderr.count("\n"), asked) == (2, 1, "")


def test_no_command(batch):
    done, _ = batch()
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
