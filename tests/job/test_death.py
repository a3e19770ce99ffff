"""If a process dies, hangs or is asked to stop, the job ends soon and reports why."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from jobs import (
    LONG,
    Job,
    environment,
    flat,
    free_ports,
    logged,
    saved_state,
    steps_saved,
    train_alone,
    train_command,
)

pytestmark = pytest.mark.process

STATED_S = 60


@pytest.mark.everyday("guard-1-*")
@pytest.mark.parametrize(
    ("whom", "index", "named"),
    [
        ("child", 0, r"process 0 of 2 \(.*\): .*SIGKILL"),
        ("guard", 1, r"process 1 of 2 \(.*\) is gone: "),
        ("guard", 0, r"process 0 of 2 \(.*\) is gone: "),
    ],
)
def test_one_that_is_killed_ends_the_other(start, tmp_path, whom, index, named):
    job = start(train_command(tmp_path / "run", *LONG))
    job.wait_for(lambda: steps_saved(tmp_path / "run"))
    children = [job.child(0), job.child(1)]
    os.kill(children[index] if whom == "child" else job.processes[index].pid, signal.SIGKILL)
    begin = time.monotonic()
    codes = job.codes(STATED_S)
    assert time.monotonic() - begin < STATED_S
    assert codes[1 - index] == 3
    assert re.match(f"lbopt train: {named}", job.last(1 - index))
    assert codes[index] == (3 if whom == "child" else -signal.SIGKILL)
    for child in children:
        assert (
            not os.path.exists(f"/proc/{child}/cmdline")
            or not pathlib.Path(f"/proc/{child}/cmdline").read_text()
        )


@pytest.mark.slow
def test_one_whose_machine_lost_its_power_ends_the_other(start, tmp_path):
    """The machine's connections stay open but are silent."""
    job = start(train_command(tmp_path / "run", *LONG))
    job.wait_for(lambda: steps_saved(tmp_path / "run"))
    for pid in (job.child(0), job.processes[0].pid):
        os.kill(pid, signal.SIGSTOP)
    assert job.processes[1].wait(STATED_S) == 3
    assert re.match(r"lbopt train: process 0 of 2 \(.*\) is gone: .* 30 s", job.last(1))


FIVE = ("--config.num_epochs=5",)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the workdir of an uninterrupted run."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    assert train_alone(workdir, *FIVE, devices=4) == 0
    return workdir


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Return the workdir of a job of two whose second process was killed."""
    folder = tmp_path_factory.mktemp("killed")
    port = free_ports()
    job = Job(
        [train_command(folder / "run", *FIVE)] * 2,
        [environment(i, 2, 2, port) for i in range(2)],
        folder,
    )
    try:
        job.wait_for(lambda: len(steps_saved(folder / "run")) > 2)
        os.kill(job.child(1), signal.SIGKILL)
        assert job.codes(STATED_S) == [3, 3]
        assert re.match(r"lbopt train: process 1 of 2 \(.*\): .*SIGKILL", job.last(0))
    finally:
        job.end()
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4])
def test_after_a_death_another_number_of_processes_goes_on(start, killed, whole, tmp_path, count):
    """The job resumes at the last checkpoint and ends with an uninterrupted run's parameters."""
    workdir = shutil.copytree(killed, tmp_path / "run")
    left = steps_saved(workdir)[-1]
    assert left < 80
    again = start(train_command(workdir, *FIVE), count=count, devices=4 // count)
    assert again.codes() == [0] * count, again.said(0)
    assert f"resuming at step {left} of 80" in "\n".join(again.said(0))
    ours, theirs, first = (
        flat(saved_state(*each, *FIVE).params) for each in ((workdir, 80), (whole, 80), (whole, 3))
    )
    assert np.max(np.abs(ours - theirs)) < 1e-4 * np.linalg.norm(theirs - first)
    assert [line["step"] for line in logged(workdir)] == list(range(1, 81))


@pytest.mark.slow
@pytest.mark.parametrize(("whom", "index"), [("child", 1), ("guard", 0)])
def test_asked_to_stop_all_save_the_same_step(start, tmp_path, whom, index):
    job = start(train_command(tmp_path / "run", *LONG))
    job.wait_for(lambda: steps_saved(tmp_path / "run"))
    os.kill(job.child(index) if whom == "child" else job.processes[index].pid, signal.SIGTERM)
    assert job.codes(60) == [75, 75]
    stopped = re.match(r"lbopt train: stopped at step (\d+) of 32000", job.last(0))
    step = int(stopped[1])
    assert steps_saved(tmp_path / "run")[-1] == step == logged(tmp_path / "run")[-1]["step"]


@pytest.mark.slow
def test_one_that_is_interrupted_ends_all(start, tmp_path):
    job = start(train_command(tmp_path / "run", *LONG))
    job.wait_for(lambda: steps_saved(tmp_path / "run"))
    os.kill(job.processes[1].pid, signal.SIGINT)
    assert job.codes(60) == [130, 130]
    assert re.match(r"lbopt train: process 1 of 2 \(.*\): \w", job.last(0))
    assert "Traceback" not in "\n".join(job.said(0) + job.said(1))


@pytest.mark.slow
def test_what_saves_nothing_ends_when_one_is_asked_to_stop(start):
    # A process whose flags need no check has only one child, which computes.
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    job = start(
        ["doctor"], change=lambda index, variables: variables | flags, popen=subprocess.Popen
    )
    job.wait_for(
        lambda: pathlib.Path(
            f"/proc/{job.processes[1].pid}/task/{job.processes[1].pid}/children"
        ).read_text()
    )
    os.kill(job.processes[1].pid, signal.SIGTERM)
    assert job.codes(30) == [143, 143]
    assert re.match(r"lbopt doctor: process 1 of 2 \(.*\): \w", job.last(0))


@pytest.mark.slow
def test_one_that_hangs_ends_the_job_and_is_named(start, tmp_path):
    job = start(train_command(tmp_path / "run", *LONG, "--hang_timeout_s=5"))
    job.wait_for(lambda: steps_saved(tmp_path / "run"))
    os.kill(job.child(1), signal.SIGSTOP)
    begin = time.monotonic()
    assert job.codes(60) == [3, 3]
    assert time.monotonic() - begin > 3
    said = [line for line in job.said(0) if line.startswith("lbopt train: ")]
    assert re.match(r"lbopt train: --hang_timeout_s = 5\.0: .*process 1 of 2 \(", said[0])
    assert "lbopt/train/_loop.py" in "\n".join(job.said(0)), "where it waited"


@pytest.mark.slow
def test_a_failure_of_one_is_said_by_all(start, tmp_path):
    """Only the second process finds it: the first one has the file."""
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import os\ndef get_config(arg=''):\n    1 / (1 - int(os.environ['WHICH']))\n"
    )

    command = [*train_command(tmp_path / "run")]
    job = start(
        lambda index: [
            command[0],
            f"--config={broken if index else command[1].partition('=')[2]}",
            *command[2:],
        ],
        change=lambda index, variables: {**variables, "WHICH": str(index)},
    )

    assert job.codes(60) == [2, 2]
    assert [len(job.said(index)) for index in range(2)] == [1, 1]

    where = f"{broken}, line 3: ZeroDivisionError: division by zero"
    said = f"lbopt train: --config = {str(broken)!r}: {where}"
    assert job.said(1)[0].startswith(said)
    assert re.match(
        r"lbopt train: process 1 of 2 \(.*\): --config = .*ZeroDivisionError", job.said(0)[0]
    )
