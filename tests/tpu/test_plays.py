"""Failures of the fake cloud: the run ends as if undisturbed, or reports the reason."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, checkout):
    """Return the metrics of an undisturbed run."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    subprocess.run(
        [sys.executable, checkout / "stand_in.py", folder, "40", "--sleep=0"],
        check=True,
        env=os.environ | {"JAX_PROCESS_ID": "0"},
    )
    return (folder / "metrics.jsonl").read_text().splitlines()


def test_capacity_refused_twice_then_granted(cloud):
    cloud.script(grants=["refused", "refused", "granted"])
    done = cloud.tpu("create")
    assert done.returncode == 0, done
    assert done.stdout.count("refused: There is no more capacity in the zone") == 2
    assert "lamb is ACTIVE" in done.stdout
    assert len(cloud.calls("gcloud", "compute", "tpus", "queued-resources", "create")) == 3
    assert len(cloud.calls("gcloud", "compute", "tpus", "queued-resources", "delete")) == 2
    again = cloud.tpu("create")  # they exist already, so nothing is requested
    assert again.returncode == 0
    assert len(cloud.calls("gcloud", "compute", "tpus", "queued-resources", "create")) == 3


def test_capacity_refused_at_once_by_the_call_itself(cloud):
    cloud.script(grants=["error RESOURCE_EXHAUSTED: no capacity", "granted"])
    done = cloud.tpu("create")
    assert done.returncode == 0, done
    assert (
        "refused: ERROR: (gcloud.compute.tpus.queued-resources.create) RESOURCE_EXHAUSTED"
        in done.stdout
    )


def test_capacity_never_granted_ends(cloud):
    cloud.set(MAX_CREATE_TRIES=2)
    cloud.script(grants=["refused"] * 9)
    done = cloud.tpu("create")
    assert done.returncode == 3
    assert done.stderr == (
        "tpu/create: MAX_CREATE_TRIES=2: no capacity for v4-16 (spot) in us-central2-b; "
        "run this again later, or take another ZONE or CAPACITY\n"
    )


def test_a_request_that_waiting_does_not_mend_is_made_once(cloud):
    cloud.script(grants=["error PERMISSION_DENIED: tpu.queuedResources.create", "granted"])
    done = cloud.tpu("create")
    assert done.returncode == 3
    assert "PERMISSION_DENIED" in done.stderr
    assert done.stderr.count("\n") == 1


def test_preempted_with_notice_and_replaced(cloud, uninterrupted):
    cloud.hold()
    babysit = cloud.start("babysit")
    for worker in (0, 1):
        (cloud.worker(worker) / "metadata" / "preempted").write_text("TRUE")
    # The notice reaches the program, which saves at its current step.
    kept = cloud.root / "buckets/bucket/lbopt/lamb/workers/0-0/log"
    cloud.until(lambda: kept.exists() and "saved step" in kept.read_text())
    cloud.go()
    cloud.preempt()
    done = cloud.finish(babysit)
    assert done.returncode == 0, f"{done}\n{cloud.everything()}"
    assert "1 preemptions, 0 failures" in done.stdout
    assert cloud.metrics() == uninterrupted
    log = (cloud.worker(0) / "lbopt/run/log").read_text()
    assert log.count("starts at step") == 2  # the new machine appends to the old one's log
    start = int(log.split("starts at step ")[2].split()[0])
    assert 10 <= start < 40


@pytest.mark.slow
def test_preempted_without_notice(cloud, uninterrupted):
    cloud.hold()
    babysit = cloud.start("babysit")
    cloud.preempt()  # SIGKILL to all, and the disks are gone
    cloud.go()
    done = cloud.finish(babysit)
    assert done.returncode == 0, f"{done}\n{cloud.everything()}"
    assert cloud.metrics() == uninterrupted
    # The new machines took the source with which the run began: it was sent once.
    assert (
        len(
            [
                call
                for call in cloud.calls("gcloud", "storage", "cp")
                if call[-2].endswith("source.tar.gz")
            ]
        )
        == 1
    )


@pytest.mark.slow
def test_lost_between_two_looks_is_a_preemption(cloud, uninterrupted):
    """The request is ACTIVE, then nothing runs on the workers, then the request is gone."""
    cloud.hold(MAX_FAILURES=0)
    cloud.play("cloud.power_off('lamb')")
    cloud.script(lost_after_ssh=1)
    cloud.go()
    done = cloud.tpu("babysit")
    assert done.returncode == 0, f"{done}\n{cloud.everything()}"
    assert "1 preemptions, 0 failures" in done.stdout
    assert cloud.metrics() == uninterrupted


@pytest.mark.slow
def test_done_before_its_machines_were_lost(cloud):
    cloud.ready()
    assert cloud.tpu("run").returncode == 0
    cloud.until(lambda: all(cloud.said(worker).startswith("done of ") for worker in (0, 1)))

    cloud.preempt()
    cloud.script(busy={"user cat": 3})  # asked until the bucket answers
    done = cloud.tpu("babysit")

    assert done.returncode == 0, done
    assert done.stdout.count("HTTPError 503") == 3
    assert "0 preemptions, 0 failures" in done.stdout
    assert "all workers are done" in done.stdout
    assert not (cloud.root / "buckets/bucket/lbopt/lamb/wanted").exists()
    assert len(cloud.calls("gcloud", "compute", "tpus", "queued-resources", "create")) == 1

    # Another request for a run starts another run; reports about the earlier one do not count.
    cloud.set(COMMAND="python stand_in.py $WORKDIR 50 --hold-at=45")
    cloud.play("with cloud.state() as value:\n    value['requests'].clear()")
    cloud.ready()
    assert cloud.tpu("run").returncode == 0
    cloud.preempt()
    cloud.go()

    done = cloud.tpu("babysit")
    assert done.returncode == 0, done
    assert "1 preemptions, 0 failures" in done.stdout
    assert len(cloud.metrics()) == 50


@pytest.mark.slow
def test_gcloud_fails_while_machines_are_replaced(cloud, uninterrupted):
    cloud.hold(MAX_FAILURES=0)
    cloud.preempt()
    cloud.go()
    cloud.script(undeletable=2, unavailable_after_delete=3, busy={"user rm": 1})
    done = cloud.tpu("babysit")
    assert done.returncode == 0, f"{done}\n{cloud.everything()}"
    assert "1 preemptions, 0 failures" in done.stdout
    assert done.stdout.count("UNAVAILABLE") == 5
    assert done.stdout.count("HTTPError 503") == 1
    assert cloud.metrics() == uninterrupted


@pytest.mark.slow
def test_gcloud_never_deletes(cloud):
    cloud.ready()
    assert cloud.tpu("run").returncode == 0
    cloud.preempt()
    (cloud.workdir / "go").touch()
    cloud.script(undeletable=99)
    cloud.set(COMMAND="python stand_in.py $WORKDIR 40 --sleep=0.5")
    done = cloud.tpu("babysit")
    assert done.returncode == 3
    assert done.stdout.count("UNAVAILABLE") == 10
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_going_down_is_no_failure(cloud, uninterrupted):
    """The machines notify keep, answer two more status queries, and disappear."""
    cloud.hold(MAX_FAILURES=0)
    for worker in (0, 1):
        cloud.terminate_keep(worker)
    cloud.go()
    cloud.script(lost_after_ssh=2)
    done = cloud.tpu("babysit")
    assert done.returncode == 0, f"{done}\n{cloud.everything()}"
    assert "1 preemptions, 0 failures" in done.stdout
    assert cloud.metrics() == uninterrupted


@pytest.mark.slow
def test_a_worker_that_stays_stopped_is_started(cloud, uninterrupted):
    cloud.hold(MAX_FAILURES=1)
    cloud.terminate_keep(0)
    cloud.go()
    done = cloud.tpu("babysit")
    assert done.returncode == 0, f"{done}\n{cloud.everything()}"
    assert "0 preemptions, 1 failures" in done.stdout
    assert cloud.metrics() == uninterrupted


@pytest.mark.slow
def test_failures_count_in_a_row(cloud):
    cloud.set(COMMAND="python stand_in.py $WORKDIR 9999 --sleep=0.1", MAX_FAILURES=1, HEALTHY_S=1)
    cloud.ready()
    assert cloud.tpu("run").returncode == 0

    shown = cloud.root / "shown.txt"
    run = cloud.worker(0) / "lbopt/run"
    with open(shown, "w") as out:
        babysit = cloud.start("babysit", out=out)
        for number in (1, 2):
            cloud.until(
                lambda: (
                    (run / "state").exists() and (run / "state").read_text().startswith("running")
                )
            )

            time.sleep(2)
            looks = len(cloud.calls("gcloud", "compute", "tpus", "tpu-vm", "ssh"))
            cloud.until(  # it is seen to run, for longer than HEALTHY_S
                lambda looks=looks: (
                    len(cloud.calls("gcloud", "compute", "tpus", "tpu-vm", "ssh")) > looks + 5
                )
            )

            os.kill(int((run / "pid").read_text()), signal.SIGKILL)
            cloud.until(
                lambda number=number: (
                    f"failure {number}: nothing runs on worker 0-0" in shown.read_text()
                )
            )
            cloud.until(
                lambda number=number: (
                    (run / "log").read_text().count("starts at step") == 1 + number
                )
            )

        assert cloud.tpu("stop").returncode == 0
        done = cloud.finish(babysit)

    assert done.returncode == 0, done
    assert "0 preemptions, 2 failures" in shown.read_text()


@pytest.mark.slow
def test_how_an_older_run_has_failed_is_no_news(cloud):
    """The second run cannot reach a worker, whose record in the bucket is the first run's end."""
    cloud.set(COMMAND="python stand_in.py $WORKDIR 40 --fail-at=0:2")
    cloud.ready()
    cloud.tpu("run")
    cloud.until(lambda: all(cloud.said(worker).startswith("failed 2 of ") for worker in (0, 1)))
    for worker in (0, 1):  # mended
        (cloud.workdir / f"state-{worker}.json").write_text('{"step": 1, "value": 1, "lines": []}')
    cloud.script(unreachable=["lamb/1"])
    assert cloud.tpu("run").returncode == 3
    assert cloud.said(1).startswith("failed 2 of ")
    assert "worker 0-1: silent; in the bucket: failed 2" in cloud.tpu("status").stdout
    cloud.script()
    done = cloud.tpu("babysit")
    assert done.returncode == 0, done
    assert "failure 1: nothing runs on worker 0-1" in done.stdout
    assert "0 preemptions, 1 failures" in done.stdout
    assert (cloud.worker(1) / "lbopt/run/log").read_text().count("starts at step") == 2


@pytest.mark.slow
def test_that_an_older_run_was_done_is_no_news(cloud):
    cloud.ready()
    assert cloud.tpu("run").returncode == 0
    cloud.until(lambda: all(cloud.said(worker).startswith("done of ") for worker in (0, 1)))
    cloud.set(COMMAND="python stand_in.py $WORKDIR 50", SETUP_S=2)
    cloud.script(unreachable=["lamb/0", "lamb/1"])
    assert cloud.tpu("run").returncode == 3
    shown = cloud.root / "shown.txt"
    with open(shown, "w") as out:
        babysit = cloud.start("babysit", out=out)
        cloud.until(lambda: "worker 0-1: silent; in the bucket: nothing" in shown.read_text())
        cloud.script()
        done = cloud.finish(babysit)
    assert done.returncode == 0, done
    assert len(cloud.metrics()) == 50


@pytest.mark.slow
def test_run_waits_for_the_last_word_of_the_run_before(cloud):
    cloud.set(COMMAND="python stand_in.py $WORKDIR 40 --fail-at=0:2", ACCELERATOR="v4-8")
    cloud.ready()
    cloud.script(slow_s=5)
    cloud.tpu("run")
    cloud.until(lambda: (cloud.worker(0) / "lbopt/run/state").read_text() == "failed 2\n")
    assert cloud.said(0) == ""
    (cloud.workdir / "state-0.json").write_text('{"step": 1, "value": 1, "lines": []}')
    done = cloud.tpu("run")
    assert done.returncode == 0, done
    assert "started: running 1" in done.stdout
    done = cloud.tpu("babysit")
    assert done.returncode == 0, done
    assert "0 preemptions, 0 failures" in done.stdout


@pytest.mark.slow
def test_the_last_word_is_said_again_when_the_bucket_does_not_take_it(cloud):
    cloud.set(
        COMMAND="python stand_in.py $WORKDIR 40 --sleep=0.01 --hold-at=12",
        ACCELERATOR="v4-8",
        SYNC_S=600,
    )
    cloud.ready()
    assert cloud.tpu("run").returncode == 0
    cloud.until(lambda: cloud.said(0).startswith("running 1 "))
    cloud.script(busy={"worker cp": 2})
    cloud.go()
    cloud.until(lambda: cloud.said(0).startswith("done of "))


@pytest.mark.slow
def test_an_installation_that_fails_is_tried_again(cloud):
    cloud.set(
        COMMAND="python stand_in.py $WORKDIR 40 --sleep=0.01 --hold-at=12",
        ACCELERATOR="v4-8",
        MAX_FAILURES=1,
    )
    (cloud.root / "pip_fails").write_text("2")
    cloud.ready()  # by the third try of the boot
    assert cloud.tpu("run").returncode == 0
    cloud.until(lambda: len(cloud.metrics()) >= 10)
    cloud.preempt()
    (cloud.root / "pip_fails").write_text("3")  # the boot gives up: babysit sends setup
    cloud.go()
    done = cloud.tpu("babysit")
    assert done.returncode == 0, f"{done}\n{cloud.everything()}"
    assert "failure 1: nothing runs on worker 0-0" in done.stdout
    assert "1 preemptions, 1 failures" in done.stdout
    assert len(cloud.metrics()) == 40


@pytest.mark.slow
def test_a_notice_between_two_attempts_is_no_failure(cloud, uninterrupted):
    cloud.set(
        COMMAND="python stand_in.py $WORKDIR 40 --sleep=0 --preempt-every=20",
        MAX_FAILURES=0,
        ACCELERATOR="v4-8",
        RESTART_S=20,
    )
    cloud.ready()
    assert cloud.tpu("run").returncode == 0
    run = cloud.worker(0) / "lbopt/run"
    cloud.until(lambda: "attempt 1 ended with exit code 75" in (run / "log").read_text())
    (cloud.worker(0) / "metadata/preempted").write_text("TRUE")
    cloud.until(lambda: (run / "state").read_text() == "preempted 1\n")
    assert "attempt 2" not in (run / "log").read_text()
    cloud.preempt()
    done = cloud.tpu("babysit")
    assert done.returncode == 0, f"{done}\n{cloud.everything()}"
    assert "1 preemptions, 0 failures" in done.stdout
    assert cloud.metrics() == uninterrupted


@pytest.mark.slow
def test_a_notice_as_the_program_starts_is_no_failure(cloud):
    # It ends by SIGTERM, as lbopt does before its first line.
    waits = r'python -c "__import__(\"time\").sleep(600)"'
    cloud.set(COMMAND=waits, MAX_FAILURES=0, ACCELERATOR="v4-8")
    cloud.ready()
    assert cloud.tpu("run").returncode == 0
    (cloud.worker(0) / "metadata/preempted").write_text("TRUE")
    cloud.until(lambda: (cloud.worker(0) / "lbopt/run/state").read_text() == "preempted 1\n")


@pytest.mark.slow
def test_a_node_that_is_lost_alone(cloud, uninterrupted):
    """The queued resource says that all is well."""
    cloud.hold(MAX_FAILURES=0)
    cloud.play("cloud.power_off('lamb')")
    cloud.go()
    cloud.script(node_state="PREEMPTED")
    done = cloud.tpu("babysit")
    assert done.returncode == 0, f"{done}\n{cloud.everything()}"
    assert "preemption 1: lamb is PREEMPTED" in done.stdout
    assert "1 preemptions, 0 failures" in done.stdout
    assert cloud.metrics() == uninterrupted


def test_a_login_that_ends_is_not_taken_for_want_of_capacity(cloud):
    cloud.script(grants=["refused", "error You do not currently have an active account selected."])
    done = cloud.tpu("create")
    assert done.returncode == 3
    assert done.stderr.endswith(
        "active account selected.; gcloud auth login, then run this again\n"
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_silent_and_nothing_new_in_the_bucket(cloud):
    cloud.set(
        COMMAND="python stand_in.py $WORKDIR 40 --hold-at=12",
        SETUP_S=3,
        MAX_FAILURES=0,
        SYNC_S=1,
        POLL_S=1,
    )

    cloud.ready()
    assert cloud.tpu("run").returncode == 0
    state = cloud.root / "buckets/bucket/lbopt/lamb/workers/0-1/state"
    cloud.until(state.exists)

    cloud.script(unreachable=["lamb/1"])
    babysit = cloud.start("babysit")
    first = state.read_text()
    cloud.until(lambda: state.read_text() != first)
    time.sleep(5)  # longer than SETUP_S, and its word in the bucket is news every time
    assert babysit.poll() is None

    cloud.play("cloud.power_off('lamb', 1)")
    done = cloud.finish(babysit)
    assert done.returncode == 1, done
    assert (
        "MAX_FAILURES=0 is reached: worker 1 of 2 (counted from 0) "
        "is not seen to run for SETUP_S=3 s" in done.stderr
    )
    assert "in the bucket: running 1 " in done.stderr


@pytest.mark.slow
def test_a_rebooted_machine_goes_on_by_itself(cloud, uninterrupted):
    cloud.hold()
    cloud.play("cloud.power_off('lamb', 0)\ncloud.boot('lamb', 0)")  # nobody babysits
    cloud.go()
    cloud.until(lambda: len(cloud.metrics()) == 40)
    assert cloud.metrics() == uninterrupted
    assert (
        len((cloud.root / "pip.txt").read_text().splitlines()) == 2
    )  # one per machine: the second boot installed nothing


@pytest.mark.slow
def test_preemptions_are_bounded(cloud):
    cloud.set(COMMAND="python stand_in.py $WORKDIR 40 --sleep=0.5", MAX_PREEMPTIONS=0)
    cloud.ready()
    assert cloud.tpu("run").returncode == 0
    cloud.preempt()
    done = cloud.tpu("babysit")
    assert done.returncode == 1
    assert "MAX_PREEMPTIONS=0 is reached" in done.stderr


@pytest.mark.slow
def test_ssh_of_one_worker_drops(cloud, uninterrupted):
    cloud.set(COMMAND="python stand_in.py $WORKDIR 40 --sleep=0.01 --hold-at=12")
    cloud.ready()
    assert cloud.tpu("run").returncode == 0
    cloud.script(unreachable=["lamb/1"])
    status = cloud.tpu("status")
    assert status.returncode == 0
    assert "worker 0-0: running 1" in status.stdout
    assert "worker 0-1: silent" in status.stdout
    cloud.go()
    done = cloud.tpu("babysit")
    assert done.returncode == 0, f"{done}\n{cloud.everything()}"
    assert "worker 0-1: silent" in done.stdout
    assert "0 preemptions, 0 failures" in done.stdout
    assert cloud.metrics() == uninterrupted
    logs = cloud.tpu("logs", "--worker=1", "--lines=3")
    assert "does not answer" in logs.stdout
    assert "0-1| " in logs.stdout
    assert "process 1 is done" in logs.stdout


@pytest.mark.slow
def test_gcloud_fails_now_and_then(cloud, uninterrupted):
    cloud.set(MAX_FAILURES=0)
    cloud.ready()
    assert cloud.tpu("run").returncode == 0
    cloud.script(unavailable=5)
    done = cloud.tpu("babysit")
    assert done.returncode == 0, done
    assert done.stdout.count("UNAVAILABLE") == 5
    assert cloud.metrics() == uninterrupted


def test_gcloud_fails_for_good(cloud):
    cloud.script(unavailable=99)
    done = cloud.tpu("babysit")
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    done = cloud.tpu("status")
    assert done.returncode == 3
    assert done.stderr.startswith("tpu/status: PROJECT=my-project ZONE=us-central2-b: ERROR: ")


def test_who_is_not_logged_in_is_told_at_once(cloud):
    cloud.set(POLL_S=60)
    cloud.script(logged_out=True)
    done = cloud.tpu("babysit", limit=20)
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert (
        "You do not currently have an active account selected.; "
        "gcloud auth login, then run this again" in done.stderr
    )


@pytest.mark.slow
def test_a_bucket_that_does_not_answer_is_not_taken_for_a_wish(cloud):
    cloud.script(busy={"user cat": 3})
    done = cloud.tpu("babysit")  # there are no machines
    assert done.returncode == 0, done
    assert done.stdout.count("HTTPError 503") == 3
    assert "no run is wanted" in done.stdout
    cloud.script(busy={"user cat": 99})
    done = cloud.tpu("babysit")
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert not cloud.calls("gcloud", "compute", "tpus", "queued-resources", "create")


@pytest.mark.slow
def test_logs_follow(cloud):
    cloud.set(COMMAND="python stand_in.py $WORKDIR 400 --sleep=0.1")
    cloud.ready()
    shown = cloud.root / "shown.txt"
    with open(shown, "w") as out:
        follow = cloud.start("run", "--follow", out=out)
    cloud.until(lambda: "starts at step 0" in shown.read_text())
    os.killpg(follow.pid, signal.SIGINT)  # Ctrl-C
    cloud.finish(follow)
    assert "worker 0-0: running" in cloud.tpu("status").stdout


def test_metrics_in_a_bucket(cloud):
    cloud.set(WORKDIR="gs://bucket/run")
    (cloud.root / "buckets/bucket/run").mkdir(parents=True)
    lines = [json.dumps({"step": step, "train/loss": 1.5}) for step in range(1000)]
    (cloud.root / "buckets/bucket/run/metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert f"metrics: {lines[-1]}\n" in cloud.tpu("status").stdout


@pytest.mark.slow
def test_a_worker_is_missing_at_the_start(cloud):
    cloud.ready()
    cloud.script(unreachable=["lamb/1"])
    begin = time.monotonic()

    done = cloud.tpu("preflight")
    assert done.returncode == 3
    assert time.monotonic() - begin < 15
    assert done.stderr == (
        "tpu/preflight: worker 1 of 2 (counted from 0) did not answer "
        "(ssh: connect to host 10.0.0.1 port 22: "
        "Connection timed out); tpu/setup, and if it stays so tpu/delete and tpu/create\n"
    )

    # run reports this too, and starts the other workers, which wait for the missing one.
    done = cloud.tpu("run")
    assert done.returncode == 3
    assert "worker 1 of 2 (counted from 0) did not answer" in done.stderr

    # babysit stops waiting: it requests new machines. When these may not read the bucket, it ends.
    cloud.set(SETUP_S=1, MAX_FAILURES=1)
    cloud.script(unreachable=["lamb/1"], forbidden=["worker cp"])
    done = cloud.tpu("babysit")
    assert done.returncode == 1, done
    assert len(cloud.calls("gcloud", "compute", "tpus", "queued-resources", "create")) == 2
    assert done.stderr == (
        "tpu/babysit: MAX_FAILURES=1 is reached: worker 1 of 2 (counted from 0) "
        "is not seen to run for SETUP_S=1 s ('silent; in the bucket: nothing'); "
        "tpu/setup --keep-source says why; see tpu/status and tpu/logs, or tpu/delete\n"
    )


def test_a_failing_program_ends_with_its_log(cloud):
    cloud.set(COMMAND="python stand_in.py $WORKDIR 40 --fail-at=7:1", MAX_FAILURES=2)
    cloud.ready()
    assert cloud.tpu("run").returncode == 0
    done = cloud.tpu("babysit")
    assert done.returncode == 1, done
    assert "fails at step 7" in done.stdout
    assert "failed with exit code 1" in done.stderr
    assert "0 preemptions, 0 failures" in done.stdout
    log = (cloud.worker(0) / "lbopt/run/log").read_text()
    assert log.count("fails at step 7") == 3  # the first start and two restarts
    assert not (cloud.root / "buckets/bucket/lbopt/lamb/wanted").exists()
    again = cloud.tpu("babysit")
    assert again.returncode == 1
    assert (
        again.stderr == "tpu/babysit: NAME=lamb: no run is wanted, and the last one has failed; "
        "tpu/logs, then tpu/run\n"
    )


@pytest.mark.slow
def test_a_run_that_was_stopped_is_not_started_again(cloud):
    """The stop comes between babysit's status query and its reaction."""
    cloud.set(COMMAND="python stand_in.py $WORKDIR 9999 --sleep=0.1")
    cloud.ready()
    assert cloud.tpu("run").returncode == 0
    assert cloud.tpu("stop").returncode == 0
    done = cloud.tpu("run", "--again")
    assert done.returncode == 3
    assert done.stderr == (
        "tpu/run: NAME=lamb: no run is wanted any more (tpu/stop); "
        "tpu/run without --again starts one\n"
    )
    assert not (cloud.root / "buckets/bucket/lbopt/lamb/wanted").exists()
    assert "no run is wanted" in cloud.tpu("babysit").stdout


@pytest.mark.slow
def test_stopped_while_machines_are_waited_for(cloud):
    cloud.set(COMMAND="python stand_in.py $WORKDIR 9999 --sleep=0.1")
    cloud.ready()
    assert cloud.tpu("run").returncode == 0
    cloud.preempt()
    cloud.script(grants=["waiting"])
    babysit = cloud.start("babysit")
    cloud.until(
        lambda: len(cloud.calls("gcloud", "compute", "tpus", "queued-resources", "create")) == 2
    )
    cloud.tpu("stop")
    done = cloud.finish(babysit)
    assert done.returncode == 3, done
    assert done.stderr == (
        "tpu/create: NAME=lamb: no run is wanted any more (tpu/stop); "
        "tpu/delete gives back what was requested\n"
    )
    assert cloud.tpu("delete").returncode == 0


def test_wrong_input_is_not_tried_again(cloud):
    cloud.set(COMMAND="python stand_in.py $WORKDIR 40 --fail-at=0:2")
    cloud.ready()
    cloud.tpu("run")
    cloud.until(lambda: (cloud.worker(0) / "lbopt/run/state").read_text() == "failed 2\n")
    assert (cloud.worker(0) / "lbopt/run/log").read_text().count("fails at step 0") == 1


@pytest.mark.slow
def test_preemptions_of_the_program_are_no_failures(cloud, uninterrupted):
    cloud.set(
        COMMAND="python stand_in.py $WORKDIR 40 --sleep=0 --preempt-every=6",
        MAX_FAILURES=0,
        MAX_LOST_PEERS=0,
    )
    cloud.ready()
    cloud.tpu("run")
    assert cloud.tpu("babysit").returncode == 0
    assert cloud.metrics() == uninterrupted
    log = (cloud.worker(0) / "lbopt/run/log").read_text()
    assert "done after 7 attempts (0 failures and 0 lost peers in a row, 6 preemptions)" in log


@pytest.mark.slow
def test_lost_peers_are_bounded_apart(cloud):
    cloud.set(
        COMMAND="python stand_in.py $WORKDIR 40 --fail-at=0:3", MAX_LOST_PEERS=4, MAX_FAILURES=0
    )
    cloud.ready()
    cloud.tpu("run")
    cloud.until(lambda: (cloud.worker(0) / "lbopt/run/state").read_text() == "failed 3\n")
    assert (cloud.worker(0) / "lbopt/run/log").read_text().count("fails at step 0") == 5


@pytest.mark.slow
def test_two_slices(cloud, uninterrupted):
    cloud.hold(NUM_SLICES=2, ACCELERATOR="v4-8")
    status = cloud.tpu("status")
    assert "worker 0-0: " in status.stdout
    assert "worker 1-0: " in status.stdout
    cloud.preempt()
    cloud.go()
    done = cloud.tpu("babysit")
    assert done.returncode == 0, f"{done}\n{cloud.everything()}"
    assert "1 preemptions, 0 failures" in done.stdout
    assert cloud.metrics() == uninterrupted
    assert 'metrics: {"step": 40, ' in cloud.tpu("status").stdout
    assert sorted(path.name for path in cloud.workdir.glob("state-*.json")) == [
        "state-0.json",
        "state-1.json",
    ]
    create = cloud.calls("gcloud", "compute", "tpus", "queued-resources", "create")[-1]
    assert "--node-count=2" in create
    assert "--node-prefix=lamb" in create


def test_babysit_does_not_make_machines_for_nothing(cloud):
    done = cloud.tpu("babysit")
    assert done.returncode == 0
    assert "no run is wanted" in done.stdout
    assert not cloud.calls("gcloud", "compute", "tpus", "queued-resources", "create")


@pytest.mark.slow
def test_stop_ends_its_own_processes_only_and_run_goes_on(cloud, uninterrupted):
    cloud.set(COMMAND="python stand_in.py $WORKDIR 40 --sleep=0.01 --hold-at=12")
    cloud.ready()
    assert cloud.tpu("run").returncode == 0

    # A user starts the same program by hand on the same machine.
    other = subprocess.Popen(
        [sys.executable, cloud.checkout / "stand_in.py", cloud.root / "other", "9999"]
    )

    try:
        cloud.until(lambda: len(cloud.metrics()) >= 5)
        refused = cloud.tpu("delete")
        assert refused.returncode == 2
        assert "running" in refused.stderr

        again = cloud.tpu("run")
        assert again.stdout.count("already running 1") == 2

        done = cloud.tpu("stop")
        assert done.returncode == 0, done
        assert done.stdout.count(": stopped") == 2
        assert other.poll() is None

        step = json.loads((cloud.workdir / "state-0.json").read_text())["step"]
        assert 5 <= step < 40
        assert (cloud.worker(0) / "lbopt/run/state").read_text() == "stopped\n"
        assert "saved step" in (cloud.worker(0) / "lbopt/run/log").read_text()
        assert cloud.tpu("stop").stdout.count("nothing runs here") == 2

        cloud.go()
        assert cloud.tpu("run").returncode == 0
        assert cloud.tpu("babysit").returncode == 0
        assert cloud.metrics() == uninterrupted

        assert cloud.tpu("delete").returncode == 0
        assert cloud.tpu("delete").returncode == 0  # nothing to delete
        assert (cloud.root / "buckets/bucket/lbopt/lamb/workers/0-0/log").exists()
    finally:
        other.kill()
        other.wait()


@pytest.mark.slow
def test_a_stale_pid_is_not_signalled(cloud):
    cloud.ready()
    other = subprocess.Popen(["sleep", "60"])
    try:
        (cloud.worker(0) / "lbopt/run/pid").write_text(f"{other.pid}\n")
        assert cloud.tpu("stop").stdout.count("nothing runs here") == 2
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
