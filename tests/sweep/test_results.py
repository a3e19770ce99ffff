"""results.jsonl with several writers, some of which die, and in a bucket."""

import json
import pathlib
import subprocess
import sys
import time

import pytest
from forked import Forked

from lbopt.errors import EnvironmentProblem
from lbopt.sweep import read_results
from lbopt.sweep._results import REQUIRED, Results
from lbopt.workdir import _bucket

WRITER = """
import pathlib, sys
from lbopt.sweep import _results
workdir = pathlib.Path(sys.argv[1])
who = int(sys.argv[2])
rows = int(sys.argv[3])
dies = sys.argv[4] == "dies"
known = _results.Results(workdir)
print("begun", flush=True)
sys.stdin.readline()
for number in range(rows):
    row = dict.fromkeys(_results.REQUIRED, 1)
    row |= {"arm": "x" * 3000, "phase": "search", "seed": 1000 * who + number}
    known.add([row, {**row, "phase": "final"}])
if dies:
    import os, signal
    with _results._alone_in(workdir / "results.jsonl") as stream:
        stream.write(b'{"arm": "cut')
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.process
def test_four_writers_of_which_two_die_in_a_line(tmp_path):
    """Each writer's records are complete, in order, and adjacent per write; there are no others."""
    rows = {0: 40, 1: 40, 2: 10, 3: 20}
    writers = [
        Forked(
            [
                sys.executable,
                "-c",
                WRITER,
                str(tmp_path),
                str(who),
                str(count),
                "dies" if who > 1 else "lives",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for who, count in rows.items()
    ]

    assert [writer.stdout.readline() for writer in writers] == ["begun\n"] * 4
    # A line lets a writer begin: all write at the same time.
    for writer in writers:
        writer.stdin.write("\n")
        writer.stdin.flush()

    ends = [(writer.communicate(timeout=120), writer.returncode)[1] for writer in writers]
    assert ends == [0, 0, -9, -9]

    found = [(row["seed"], row["phase"]) for row in read_results(tmp_path)]
    assert found[1::2] == [(seed, "final") for seed, _ in found[::2]]
    for who, count in rows.items():
        ours = [seed for seed, _ in found[::2] if seed // 1000 == who]
        assert ours == [1000 * who + number for number in range(count)]
    assert len(found) == 2 * sum(rows.values())


@pytest.fixture
def cloud(monkeypatch, tmp_path):
    """Return a folder that replaces a bucket's."""
    folder = tmp_path / "cloud"
    folder.mkdir()
    monkeypatch.setattr(_bucket, "bucket_path", lambda named: folder)
    monkeypatch.setattr(_bucket, "_SOON_S", 0.05)
    monkeypatch.setattr(_bucket, "_SETTLE_S", 0.0)
    return folder


def row(seed):
    return dict.fromkeys(REQUIRED, 1) | {"arm": "ours", "phase": "search", "seed": seed}


def test_the_last_trial_before_a_long_wait_is_soon_in_the_bucket(cloud):
    """No later trial triggers its upload."""
    with _bucket.local_workdir("gs://bucket/study") as folder:
        results = Results(pathlib.Path(folder))
        assert _bucket.checkpoint_root(pathlib.Path(folder)) == cloud
        for seed in range(3):
            results.add([row(seed)])
        wait_until(lambda: seeds_in(cloud) == [0, 1, 2])
        results.add([row(3)])
        wait_until(lambda: seeds_in(cloud) == [0, 1, 2, 3])
        results.add([row(4)])
    assert seeds_in(cloud) == [0, 1, 2, 3, 4]


def test_a_copy_that_fails_is_told_at_the_next_trial(cloud, monkeypatch):
    with _bucket.local_workdir("gs://bucket/study") as folder:
        results = Results(pathlib.Path(folder))
        gone = EnvironmentProblem("workdir", "gs://bucket/study", "it is gone")
        failing = [gone]

        def upload(mirror):
            if failing:
                raise failing.pop()

        with monkeypatch.context() as patched:
            patched.setattr(_bucket._Mirror, "upload", upload)
            results.add([row(0)])
            wait_until(lambda: _bucket._MIRRORS[pathlib.Path(folder)]._failed)
            with pytest.raises(EnvironmentProblem) as caught:
                results.add([row(1)])
            assert caught.value is gone
    assert seeds_in(cloud) == [0, 1]


def seeds_in(cloud):
    file = cloud / "results.jsonl"
    return (
        [json.loads(line)["seed"] for line in file.read_text().splitlines()]
        if file.exists()
        else []
    )


def wait_until(done):
    until = time.monotonic() + 30
    while not done():
        assert time.monotonic() < until
        time.sleep(0.01)
