"""A run that is killed at 30 random moments ends bit for bit where an uninterrupted one does."""

import json
import pathlib
import re

import pytest

pytestmark = pytest.mark.process

KILLS = 30
MANY_KILLS = pathlib.Path(__file__).with_name("many_kills.py")
LONGER = (
    "--config.num_epochs=25",
    "--config.eval_every_steps=40",
    "--config.checkpoint.every_steps=2",
    "--config.checkpoint.keep=3",
)


@pytest.mark.slow
def test_many_kills(command, start_process, reference, bits, saved_state, logged, tmp_path):
    workdir = tmp_path / "run"
    process = start_process(MANY_KILLS, KILLS, 1, workdir, *command(workdir, *LONGER), stdout=True)
    stdout, stderr = process.communicate(timeout=400)
    assert process.returncode == 0, stderr
    found = json.loads(stdout.splitlines()[-1])
    assert found.pop("exit") == 0
    assert sum(found.values()) == KILLS
    assert found.get("saving", 0) > 2, found
    resumed_at = [
        int(step) for step in re.findall(r"^resuming at step (\d+) of 400", stderr, re.MULTILINE)
    ]
    assert resumed_at == sorted(resumed_at)
    assert len(set(resumed_at)) > KILLS // 3, (
        resumed_at
    )  # at least the kills that waited for a checkpoint
    assert bits(saved_state(workdir, *LONGER)) == bits(saved_state(reference(*LONGER), *LONGER))
    assert logged(workdir) == logged(reference(*LONGER))
    assert not (workdir / "damaged").exists()
