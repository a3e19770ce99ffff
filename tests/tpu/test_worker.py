"""A worker machine: boots, installations, archives, and the keeper of the program."""

import io
import os
import signal
import subprocess
import tarfile
import time

import pytest

pytestmark = pytest.mark.process


@pytest.mark.slow
def test_boot_installs_at_the_pinned_versions(cloud):
    cloud.set(EXTRAS="tpu,gcs")
    cloud.ready()
    source = cloud.worker(0) / "lbopt/source"
    calls = (cloud.root / "pip.txt").read_text().splitlines()
    assert len(calls) == 2
    assert any(
        f"--constraint {source.parent}/constraints.txt --editable {source}[tpu,gcs]" in call
        for call in calls
    )
    # The second time nothing is done, until the inputs change.
    assert cloud.tpu("setup", "--keep-source").returncode == 0
    assert len((cloud.root / "pip.txt").read_text().splitlines()) == 2
    cloud.set(EXTRAS="tpu")
    assert cloud.tpu("setup").returncode == 0
    assert len((cloud.root / "pip.txt").read_text().splitlines()) == 4


@pytest.mark.slow
def test_a_machine_without_a_python_says_so(cloud):
    cloud.environment["PYTHON"] = "python2"
    _program = cloud.root.parent / "bin" / "python3.11"
    _program.write_text("#!/bin/sh\nexit 1\n")
    assert cloud.tpu("create").returncode == 0
    done = cloud.tpu("setup", "--keep-source")
    assert done.returncode == 3
    assert (
        done.stderr.count(
            "no Python >= 3.11 with its venv module, and apt-get could not install python3.11-venv"
        )
        == 2
    )
    assert "install -qq --yes python3.11-venv" not in done.stderr
    assert cloud.tpu("run").stderr.count("lbopt is not installed here; tpu/setup") == 2


def test_machines_that_may_not_read_the_bucket_say_so(cloud):
    cloud.script(forbidden=["worker cp"])
    assert cloud.tpu("create").returncode == 0
    done = cloud.tpu("setup", "--keep-source")
    assert done.returncode == 3
    assert (
        done.stderr.count(
            "gs://bucket/lbopt/lamb/source.tar.gz cannot be read: "
            "ERROR: (gcloud.storage.cp) HTTPError 403"
        )
        == 2
    )


@pytest.mark.everyday("../escaped")
@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped-from-lbopt", "a/../../escaped"])
def test_an_archive_stays_in_its_folder(cloud, name):
    cloud.ready()
    archive = cloud.root / "buckets/bucket/lbopt/lamb/source.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    done = cloud.tpu("setup", "--keep-source")
    assert done.returncode == 3
    assert done.stderr.count("has a path that leaves its folder") == 2
    assert not list(cloud.root.rglob("escaped"))
    assert not os.path.exists("/tmp/escaped-from-lbopt")
    assert (cloud.worker(0) / "lbopt/source/stand_in.py").exists()  # the old file is kept


def test_a_run_outlives_the_ssh_that_started_it_and_a_second_start_does_nothing(cloud):
    cloud.set(COMMAND="python stand_in.py $WORKDIR 400 --sleep=0.1")
    cloud.ready()
    cloud.tpu("run")
    pid = int((cloud.worker(0) / "lbopt/run/pid").read_text())
    assert os.getsid(pid) == pid  # a separate session
    cloud.set(COMMAND="python stand_in.py $WORKDIR 3")
    done = cloud.tpu("run")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "tpu/run: NAME=lamb: worker 0 of 2 (counted from 0) runs another command, or this one"
    )
    assert (
        " 400 " in (cloud.root / "buckets/bucket/lbopt/lamb/wanted").read_text()
    )  # a booting machine would start this command


@pytest.mark.slow
def test_a_killed_keeper_leaves_no_program_behind(cloud):
    cloud.set(COMMAND="python stand_in.py $WORKDIR 400 --sleep=0.1")
    cloud.ready()
    cloud.tpu("run")
    run = cloud.worker(0) / "lbopt/run"
    cloud.until(lambda: len(cloud.metrics()) >= 5)
    os.kill(int((run / "pid").read_text()), signal.SIGKILL)
    cloud.until(lambda: "saved step" in (run / "log").read_text())  # it got SIGTERM
    cloud.until(lambda: "worker 0-0: lost (was running" in cloud.tpu("status").stdout)
    cloud.until(lambda: not cloud.processes_of(0))  # nor a helper, which would keep reporting a run
    assert cloud.tpu("run").returncode == 0
    cloud.until(lambda: (run / "log").read_text().count("starts at step") == 2)


@pytest.mark.slow
def test_a_notice_of_maintenance_is_passed_on(cloud):
    cloud.set(COMMAND="python stand_in.py $WORKDIR 400 --sleep=0.1")
    cloud.ready()
    cloud.tpu("run")
    log = cloud.worker(1) / "lbopt/run/log"
    cloud.until(lambda: log.exists() and "starts at step 0" in log.read_text())
    (cloud.worker(1) / "metadata/maintenance-event").write_text("TERMINATE_ON_HOST_MAINTENANCE")
    cloud.until(lambda: "ended with exit code 75" in log.read_text())
    cloud.until(lambda: (cloud.worker(1) / "lbopt/run/state").read_text().startswith("preempted"))
    assert "ended" not in (cloud.worker(0) / "lbopt/run/log").read_text()


@pytest.mark.slow
def test_what_the_program_leaves_behind_ends_with_it(cloud):
    cloud.set(ACCELERATOR="v4-8", COMMAND="bash leaves_a_child.sh $WORKDIR")
    (cloud.workdir).mkdir()
    script = cloud.checkout / "leaves_a_child.sh"
    script.write_text("sleep 300 &\necho $! >$1/child\n")
    try:
        assert cloud.tpu("create", "--dirty").returncode == 0
        assert cloud.tpu("setup", "--keep-source").returncode == 0
        assert cloud.tpu("run").returncode == 0
        cloud.until(lambda: (cloud.worker(0) / "lbopt/run/state").read_text() == "done\n")
        child = int((cloud.workdir / "child").read_text())
        deadline = time.monotonic() + 10
        while subprocess.run(
            ["ps", "-p", str(child), "-o", "stat="], capture_output=True, text=True
        ).stdout.strip("Z\n +s"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        script.unlink()


@pytest.mark.slow
def test_compiled_programs_outlive_the_machine(cloud):
    del cloud.environment["JAX_COMPILATION_CACHE_DIR"]  # of the tests
    show = r'python -c "print(__import__(\"os\").environ[\"JAX_COMPILATION_CACHE_DIR\"])"'
    cloud.set(ACCELERATOR="v4-8", EXTRAS="tpu,gcs", COMMAND=show)
    cloud.ready()
    for extras, ours, expected in (
        ("tpu,gcs", {}, "gs://bucket/lbopt/lamb/compiled"),
        ("tpu", {}, f"{cloud.worker(0)}/lbopt/compiled"),  # without gcsfs
        ("tpu", {"JAX_COMPILATION_CACHE_DIR": "gs://ours"}, "gs://ours"),
    ):
        cloud.set(ACCELERATOR="v4-8", EXTRAS=extras, COMMAND=show)
        (cloud.worker(0) / "lbopt/extras").write_text(extras)
        cloud.environment |= ours
        assert cloud.tpu("run").returncode == 0
        cloud.until(lambda: (cloud.worker(0) / "lbopt/run/state").read_text() == "done\n")
        assert expected in (cloud.worker(0) / "lbopt/run/log").read_text().splitlines()


@pytest.mark.slow
def test_logs_and_states_reach_the_bucket(cloud):
    cloud.set(SYNC_S=1, COMMAND="python stand_in.py $WORKDIR 400 --sleep=0.1")
    cloud.ready()
    cloud.tpu("run")
    folder = cloud.root / "buckets/bucket/lbopt/lamb/workers"
    cloud.until(
        lambda: (
            (folder / "0-1/log").exists() and "starts at step" in (folder / "0-1/log").read_text()
        )
    )
    cloud.until((folder / "0-1/state").exists)
    assert (folder / "0-1/state").read_text().startswith("running 1")


@pytest.mark.slow
def test_the_last_state_has_the_last_word_in_the_bucket(cloud):
    """A slow copy of the first state is under way at the program's end and must not land last."""
    cloud.set(SYNC_S=1, ACCELERATOR="v4-8", COMMAND="python stand_in.py $WORKDIR 40 --sleep=0.06")
    cloud.ready()
    cloud.script(slow_s=10)
    assert cloud.tpu("run").returncode == 0
    cloud.until(lambda: (cloud.worker(0) / "lbopt/run/state").read_text() == "done\n")
    assert not (cloud.root / "buckets/bucket/lbopt/lamb/workers/0-0/state").exists()
    cloud.until(lambda: not cloud.processes_of(0))
    assert (
        (cloud.root / "buckets/bucket/lbopt/lamb/workers/0-0/state")
        .read_text()
        .startswith("done of ")
    )


@pytest.mark.slow
def test_a_boot_that_has_not_come_to_its_end(cloud):
    """The files on disk are left from the previous boot."""
    cloud.set(COMMAND="python stand_in.py $WORKDIR 400 --sleep=0.1")
    cloud.ready()
    cloud.tpu("run")
    before = (cloud.worker(0) / "lbopt/booted").read_text()
    cloud.play("cloud.power_off('lamb', 0)")
    assert "worker 0-0: lost (was running" in cloud.tpu("status").stdout
    environment = cloud.worker(0) / "environment.json"
    environment.write_text(environment.read_text().replace(before.strip(), "another"))
    assert "worker 0-0: booting" in cloud.tpu("status").stdout
    cloud.play("cloud.boot('lamb', 0)")
    cloud.until(lambda: "worker 0-0: running" in cloud.tpu("status").stdout)
    cloud.until(lambda: (cloud.worker(0) / "lbopt/booted").read_text() != before)
