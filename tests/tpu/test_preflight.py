"""The preflight counts processes and devices, checks sums and buckets, and survives a lost peer."""

import pathlib
import subprocess
import sys
import time

import pytest
from forked import Forked
from jobs import free_ports, on_devices

pytestmark = pytest.mark.process

SCRIPT = pathlib.Path(__file__).parents[2] / "tpu" / "worker" / "preflight.py"


def test_all_is_well(cloud):
    cloud.ready()
    done = cloud.tpu("preflight")
    assert done.returncode == 0, f"{done}\n{cloud.everything()}"
    assert "user@example.com may write, read and remove in gs://bucket" in done.stdout
    assert "all 2 workers answer" in done.stdout
    for worker in (0, 1):
        assert f"worker 0-{worker}: ok " in done.stdout
        assert f"process {worker} of 2, 4 of 8 devices, cpu, sum 28" in done.stdout
    assert done.stdout.endswith("2 processes and 8 devices: ready for tpu/run\n")
    # The checks removed their files.
    assert not [
        path
        for path in (cloud.root / "buckets/bucket/lbopt/lamb/preflight").rglob("*")
        if path.is_file()
    ]


@pytest.mark.slow
def test_a_worker_may_not_write_to_the_bucket(cloud):
    cloud.set(ACCELERATOR="v4-8")  # one machine
    cloud.ready()
    cloud.script(forbidden=["worker cp"])
    done = cloud.tpu("preflight")
    assert done.returncode == 3
    assert done.stderr == (
        "tpu/preflight: worker 0 of 1 (counted from 0): failed: "
        "gs://bucket/lbopt/lamb/preflight/0-0: ERROR: (gcloud.storage.cp) "
        "HTTPError 403: worker@example.com does not have storage access.; "
        "grant the machines' service account roles/storage.objectAdmin\n"
    )


@pytest.mark.slow
def test_while_a_run_has_the_devices(cloud):
    cloud.set(COMMAND="python stand_in.py $WORKDIR 400 --sleep=0.1")
    cloud.ready()
    cloud.tpu("run")
    done = cloud.tpu("preflight")
    assert done.returncode == 3
    assert done.stderr.count("a run is going on here; tpu/stop first") == 2


def test_before_the_machines_are_there(cloud):
    done = cloud.tpu("preflight")
    assert done.returncode == 3
    assert (
        done.stderr
        == "tpu/preflight: NAME=lamb: there is no such queued resource; tpu/create makes it\n"
    )


def test_another_number_of_devices(tmp_path):
    done = _preflight(0, 1, "--expect-processes=1", "--expect-devices=16")
    assert done.returncode == 3
    assert "sees 1 processes and 2 devices (cpu), 1 and 16 were expected" in done.stdout
    assert done.stdout.count("\n") == 1


def test_a_missing_peer_ends_it(tmp_path):
    begin = time.monotonic()
    done = _preflight(0, 2, "--expect-processes=2", "--expect-devices=4", "--timeout-s=1")
    assert done.returncode == 3, done
    assert "the 2 processes did not find each other within 1 s" in done.stdout
    assert time.monotonic() - begin < 30


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    done = _preflight(
        0, 1, "--expect-processes=1", "--expect-devices=2", f"--bucket-dir={tmp_path / 'file'}"
    )
    assert done.returncode == 3
    assert "cannot be used" in done.stdout


def test_it_knows_nothing_of_lbopt():
    assert "lbopt" not in {
        line.split()[1].split(".")[0]
        for line in SCRIPT.read_text().splitlines()
        if line.strip().startswith(("import ", "from "))
    }


def _preflight(process, processes, *flags):
    environment = on_devices(2) | {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_ports()}",
        "JAX_NUM_PROCESSES": str(processes),
        "JAX_PROCESS_ID": str(process),
    }
    command = [sys.executable, SCRIPT, "--name=0-0", *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with Forked(command, env=environment, **pipes) as process:
        said = process.communicate(timeout=120)
    return subprocess.CompletedProcess(command, process.returncode, *said)
