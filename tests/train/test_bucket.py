"""A workdir in a bucket: real clients of Google Cloud Storage and a local server."""

import json
import os
import pathlib
import re
import signal
import time

import pytest
from buckets import objects, read, remove, serving, start_lbopt
from jobs import train_command
from refusal import names_in, troubled

from lbopt.data.text import Vocabulary
from lbopt.data.text._vocabulary import UNCASED
from lbopt.errors import EnvironmentProblem
from lbopt.workdir import _bucket, read_config

pytestmark = pytest.mark.process

RARELY = "--config.checkpoint.every_steps=9"


@pytest.fixture
def cloud():
    with serving() as found:
        yield found


@pytest.fixture
def lbopt(cloud):
    """Return a function (*arguments) -> a running or finished process of `lbopt`."""

    def run(*arguments, wait=True):
        process = start_lbopt(cloud[1], *arguments)
        return (process.communicate(timeout=120), process.returncode) if wait else process

    return run


@pytest.mark.slow
def test_a_run_in_a_bucket_is_that_of_a_folder(lbopt, cloud, command, reference, logged):
    """It is killed, resumed and reported."""
    address, _ = cloud
    arguments = command("gs://bucket/runs/one", RARELY)
    first = lbopt(*arguments, wait=False)

    until = time.monotonic() + 90
    while (
        not any(
            re.search(r"checkpoints/\d+/commit_success.txt$", name) for name in objects(address)
        )
        and time.monotonic() < until
    ):
        time.sleep(0.1)

    os.kill(first.pid, signal.SIGKILL)
    first.communicate()

    (out, err), code = lbopt(*arguments)
    assert code == 0, err
    assert out.splitlines()[-1] == "gs://bucket/runs/one/metrics.jsonl"
    assert "resuming at step" in err

    lines = [json.loads(line) for line in read(address, "runs/one/metrics.jsonl").splitlines()]
    ours = [
        {name: value for name, value in line.items() if not name.startswith("perf/")}
        for line in lines
    ]
    assert ours == logged(reference())

    names = set(objects(address))
    assert {"runs/one/config.json", "runs/one/metrics.jsonl"} <= names
    assert any(name.startswith("runs/one/tensorboard/events") for name in names)
    assert "runs/one/.lease.json" not in names

    (out, err), code = lbopt("report", "--workdir=gs://bucket/runs/one")
    assert (code, out) == (0, "gs://bucket/runs/one/report.html\n"), err
    assert "<html" in read(address, "runs/one/report.html")


@pytest.mark.slow
def test_a_run_in_a_bucket_is_evaluated_and_mended(lbopt, cloud, command):
    """It is evaluated, damaged and trained again."""
    address, _ = cloud
    arguments = command("gs://bucket/runs/one", RARELY)
    (_, err), code = lbopt(*arguments)
    assert code == 0, err
    last = json.loads(read(address, "runs/one/metrics.jsonl").splitlines()[-1])
    (out, err), code = lbopt("evaluate", *arguments[1:])
    assert code == 0, err
    assert json.loads(out)["validation/loss"] == pytest.approx(last["eval/loss"])

    for name in objects(address):
        if re.search(r"checkpoints/20/default/.*/?d/", name):
            remove(address, name)
    (out, err), code = lbopt(*arguments)
    assert code == 0, err
    assert "gs://bucket/runs/one/checkpoints/20: " in err
    assert "; moved to gs://bucket/runs/one/damaged/20; going back to step 18\n" in err
    assert any(name.startswith("runs/one/damaged/20/default/") for name in objects(address))
    assert "runs/one/checkpoints/20/commit_success.txt" in objects(address), "saved anew"
    other = [argument.replace("seed=7", "seed=8") for argument in arguments]
    (_, err), code = lbopt(*other)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("lbopt train: --workdir = 'gs://bucket/runs/one': ")
    assert re.search(r"\bseed\b.* 7 .* 8\b", err)


def test_what_a_run_keeps_of_its_vocabulary_is_read_from_a_bucket_again():
    """A vocabulary without settings comes from an earlier version, which lowercased all text."""
    assert Vocabulary(("a",), UNCASED).files().keys() <= set(_bucket._KEPT)


@pytest.mark.slow
def test_two_processes_in_a_bucket(cloud, start):
    """Each writes its shards of the arrays, the first one the rest; both resume from the bucket."""
    address, variables = cloud
    command = train_command("gs://bucket/runs/two", RARELY)
    told = lambda index, of_job: {**variables, **of_job}  # noqa: E731
    for codes, step in (([0, 0], "starting"), ([0, 0], "step 20 of 20")):
        job = start(command, change=told)
        assert job.codes() == codes, [job.said(0), job.said(1)]
        assert step in "\n".join(job.said(0))
        assert [line for line in job.said(1) if "_FOR_TESTING" not in line] == []
    lines = [json.loads(line) for line in read(address, "runs/two/metrics.jsonl").splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert any(
        re.search(r"checkpoints/20/default/ocdbt.process_1/", name) for name in objects(address)
    )
    assert "runs/two/.lease.json" not in objects(address)


@pytest.mark.slow
def test_a_bucket_without_permission(cloud, start):
    """Both processes print one line before anything is compiled."""
    begin = time.monotonic()
    job = start(
        train_command("gs://bucket/forbidden/one"),
        change=lambda index, of_job: {**cloud[1], **of_job},
    )
    assert job.codes(60) == [3, 3]
    assert time.monotonic() - begin < 60
    for index in range(2):  # whose failure is heard first is told by both
        (said,) = job.said(index)
        place = r"--workdir = 'gs://bucket/forbidden/one'"
        assert re.match(rf"lbopt train: (process \d of 2 \(.*\): )?{place}: ", said)


@pytest.mark.parametrize(
    "workdir", ["s3://bucket/run", "gs://", "gs://bucket", "gs://bucket/", "gs://bucket/a/../b"]
)
def test_another_address_is_refused(workdir, command, capsys):
    from lbopt.cli import main

    assert main(command(workdir)) == 2
    err = capsys.readouterr().err
    assert re.fullmatch(f"lbopt train: --workdir = '{re.escape(workdir)}': .+\n", err)
    assert "gs://BUCKET/PATH" in err


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
def test_an_error_names_the_file_in_the_bucket(name, tmp_path, monkeypatch):
    """The folder on this machine is gone when the user reads the line."""
    monkeypatch.setattr(_bucket, "bucket_path", lambda address: tmp_path)
    (tmp_path / "config.json").write_text("{")

    def fail(folder):
        if name == "config.json":
            read_config(folder)
        raise EnvironmentProblem(f"{folder}/{name}: line 3", reason="it is cut off")

    with (
        pytest.raises(EnvironmentProblem) as raised,
        _bucket.local_workdir("gs://bucket/run", write=False, hold=False) as folder,
    ):
        fail(folder)
    assert f"gs://bucket/run/{name}" in str(raised.value)
    assert folder not in str(raised.value)


def test_hidden_files_of_a_mirror_stay_here(tmp_path, monkeypatch):
    monkeypatch.setattr(_bucket, "bucket_path", lambda address: tmp_path)
    with _bucket.local_workdir("gs://bucket/run", hold=False) as folder:
        mirror = pathlib.Path(folder)
        for name in (".lock", "config.json", "metrics.jsonl"):
            (mirror / name).write_text(name)
        _bucket.copy_changes(mirror)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "metrics.jsonl"}


@pytest.fixture
def leases(tmp_path, monkeypatch):
    """Return a function (machine's name) -> its lease; the object is a local file here."""
    monkeypatch.setattr(_bucket, "_RENEW_S", 0.4)
    monkeypatch.setattr(_bucket, "_SETTLE_S", 0.1)

    def take(machine):
        monkeypatch.setattr(_bucket.socket, "gethostname", lambda: machine)
        monkeypatch.setattr(_bucket, "_pid_namespace", lambda: machine)
        return _bucket._Lease(tmp_path)

    return take


def test_two_runs_in_one_folder_of_a_bucket(leases, tmp_path):
    """The second waits, sees that the lease is renewed, and is refused."""
    first = leases("host-a")
    with troubled("workdir", str(tmp_path), "conflict") as caught:
        leases("host-b")
    assert "host-a" in names_in(caught)
    first.check()
    first.release()
    assert not list(tmp_path.iterdir())
    leases("host-b").release()


def test_a_lease_that_nobody_renews_is_taken(leases, tmp_path):
    (tmp_path / ".lease.json").write_text(
        '{"host": "host-of-old", "pid": 1, "id": "x", "renewed": 0}'
    )
    begin = time.monotonic()
    leases("host").release()
    assert 0.9 < time.monotonic() - begin < 5


def test_who_stood_still_and_lost_its_lease_is_told_and_leaves_it_to_the_other(leases, tmp_path):
    first = leases("host-a")
    other = json.dumps({"host": "host-b", "pid": 7, "id": "other"})
    (tmp_path / ".lease.json").write_text(other)
    first._thread.join(5)
    assert not first._thread.is_alive()
    with troubled("workdir", str(tmp_path), "conflict") as caught:
        first.check()
    assert {"host-b", "7"} <= names_in(caught)
    first.release()
    assert (tmp_path / ".lease.json").read_text() == other


@pytest.mark.parametrize(
    "text", ['{"host": "a", "pid": 4194305, "space": "here", "id": "x"}', "{", "", "[]"]
)
def test_a_lease_of_a_process_that_has_ended_is_taken_at_once(leases, tmp_path, text, monkeypatch):
    monkeypatch.setattr(_bucket, "_RENEW_S", 30)
    (tmp_path / ".lease.json").write_text(text)
    begin = time.monotonic()
    leases("here").release()
    assert time.monotonic() - begin < 5
