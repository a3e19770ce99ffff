"""Two machines train lbopt as one job; preempted and replaced, they match an undisturbed run."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "digits_cnn.py"
TRAIN = (
    f"env JAX_NUM_CPU_DEVICES=1 python -m lbopt train --config={CONFIG}:lamb-64 "
    "--workdir=$WORKDIR --config.seed=7 --config.num_epochs=30 "
    "--config.log_every_steps=5 --config.eval_every_steps=80 "
    "--config.checkpoint.every_steps=40 --config.model.hidden=8 "
    '"--config.model.widths=(4,)" --config.parallel.num_devices=2'
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return the metrics of an undisturbed run: one process, two devices, no cloud, no keeper."""
    workdir = tmp_path_factory.mktemp("uninterrupted")
    alone = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "JAX_COORDINATOR_ADDRESS")
    }
    command = TRAIN.replace("DEVICES=1 python", f"DEVICES=2 {sys.executable}")
    alone |= {"JAX_PLATFORMS": "cpu", "WORKDIR": str(workdir)}
    subprocess.run(["bash", "-c", command], env=alone, check=True, timeout=120)
    return _numbers(workdir)


@pytest.mark.slow
def test_preempted_and_replaced(cloud, uninterrupted):
    cloud.set(COMMAND=TRAIN, POLL_S=1)
    cloud.ready()
    assert cloud.tpu("run").returncode == 0
    babysit = cloud.start("babysit")
    cloud.until(lambda: len(cloud.metrics()) >= 4, limit=120)
    for worker in (0, 1):
        (cloud.worker(worker) / "metadata" / "preempted").write_text("TRUE")
    logs = [cloud.worker(worker) / "lbopt/run/log" for worker in (0, 1)]
    cloud.until(lambda: all("ended with exit code 75" in log.read_text() for log in logs), limit=60)
    assert 4 <= len(_numbers(cloud.workdir)) < len(uninterrupted)
    cloud.preempt()
    done = cloud.finish(babysit, limit=180)
    assert done.returncode == 0, f"{done}\n{cloud.everything()}"
    assert "1 preemptions, 0 failures" in done.stdout
    assert _numbers(cloud.workdir) == uninterrupted
    assert cloud.tpu("status").stdout.count(": done") == 2


def _numbers(workdir):
    """Return the metrics without those that depend on the clock.

    These are speeds, and the line of the last step before a preemption, which has only speeds.
    """
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    measured = [
        {key: value for key, value in line.items() if not key.startswith("perf/")} for line in lines
    ]
    return [line for line in measured if line.keys() > {"step", "examples_seen"}]
