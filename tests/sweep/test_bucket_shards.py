"""Shards that share only a bucket make one study."""

import functools
import json
import time

import pytest
from buckets import objects, read, serving, start_lbopt
from refusal import names_in, refused

from lbopt.sweep import BucketShards, _bucket_shards
from lbopt.sweep._results import REQUIRED, read_results
from lbopt.workdir import Shard

STUDY = "gs://bucket/studies/tiny"
SHORT = "--config.train.num_epochs=3.0"


@pytest.fixture
def cloud():
    with serving() as found:
        yield found


@pytest.fixture
def lbopt(cloud):
    """Return a function (*arguments) -> a process of `lbopt` that finds the bucket."""

    return functools.partial(start_lbopt, cloud[1])


def without_time(lines):
    return sorted(json.dumps({**json.loads(line), "seconds": None}) for line in lines.splitlines())


@pytest.mark.process
@pytest.mark.slow
def test_two_shards_in_a_bucket_are_one_study(lbopt, cloud, config_file, tmp_path):
    """The shard that ends last writes all trials, and the report, into the study's folder."""
    address, _ = cloud
    sweep = ["sweep", f"--config={config_file}", SHORT]
    shards = [lbopt(*sweep, f"--workdir={STUDY}", f"--shard={number}/2") for number in (1, 2)]
    whole = lbopt(*sweep, f"--workdir={tmp_path / 'whole'}")
    said = [process.communicate(timeout=300) for process in (*shards, whole)]
    assert [process.returncode for process in (*shards, whole)] == [0, 0, 0], said

    expected = (tmp_path / "whole" / "results.jsonl").read_text()
    found = objects(address)
    assert {
        f"studies/tiny/{name}"
        for name in ("results.jsonl", "report.html", "summary.json", "config.json")
    } <= set(found)
    assert without_time(read(address, "studies/tiny/results.jsonl")) == without_time(expected)

    shares = [
        read(address, f"studies/tiny/shards/{number}-of-2/results.jsonl").splitlines()
        for number in (1, 2)
    ]
    assert all(shares)
    assert sum(map(len, shares)) == len(expected.splitlines())  # no trial runs twice

    summaries = [
        read(address, "studies/tiny/summary.json"),
        (tmp_path / "whole" / "summary.json").read_text(),
    ]
    assert json.loads(summaries[0])["arms"] == json.loads(summaries[1])["arms"]

    report = lbopt("report", f"--workdir={STUDY}")
    output, errors = report.communicate(timeout=120)
    assert report.returncode == 0, errors
    assert f"{STUDY}/report.html" in output


@pytest.fixture
def study(monkeypatch, tmp_path):
    """Return a folder that replaces a study's bucket, where shard 1 of 2 has started."""
    folder = tmp_path / "study"
    shard = folder / "shards" / "1-of-2"
    shard.mkdir(parents=True)
    (shard / "config.json").write_text(json.dumps({"config": {"name": "tiny"}}))
    (shard / "results.jsonl").write_text(
        json.dumps(finished(1)) + "\n" + json.dumps(finished(2)) + "\n" + '{"torn'
    )
    monkeypatch.setattr(_bucket_shards, "bucket_path", lambda named: folder)
    return folder


def finished(seed):
    return {**dict.fromkeys(REQUIRED, 1), "arm": "ours", "phase": "search", "seed": seed}


def lease(folder, renewed):
    (folder / ".lease.json").write_text(
        json.dumps({"host": "another", "pid": 1, "space": "x", "renewed": renewed})
    )


def same(saved):
    return []


def test_one_division_at_a_time(study, tmp_path):
    others = BucketShards(STUDY, tmp_path)
    lease(study / "shards" / "1-of-2", time.time())
    others.refuse_others(Shard(2, 2), same)
    for shard in (Shard(2, 3), None):
        with refused("shard", str(shard), "conflict"):
            others.refuse_others(shard, same)
    lease(study / "shards" / "1-of-2", time.time() - 60)
    others.refuse_others(Shard(2, 3), same)
    lease(study, time.time())
    others.refuse_others(None, same)
    with refused("shard", "2/2", "conflict"):
        others.refuse_others(Shard(2, 2), same)


def test_a_shard_of_another_study_is_refused(study, tmp_path):
    with refused("workdir", STUDY, "exists") as caught:
        BucketShards(STUDY, tmp_path).refuse_others(
            Shard(2, 2), lambda saved: [f"name is {saved['config']['name']} there"]
        )
    assert "tiny" in names_in(caught)


def test_what_others_have_finished_is_there_once_and_not_as_ones_own(study, tmp_path):
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    (mirror / "results.jsonl").write_text(
        json.dumps(finished(2)) + "\n" + json.dumps(finished(3)) + "\n"
    )
    others = BucketShards(STUDY, mirror)
    others.fetch()
    assert [row["seed"] for row in read_results(mirror)] == [2, 3, 1]
    assert (mirror / "results.jsonl").read_text().count("\n") == 2
    others.publish()
    assert [
        json.loads(line)["seed"] for line in (study / "results.jsonl").read_text().splitlines()
    ] == [2, 3, 1]
    others.fetch()
    assert [row["seed"] for row in read_results(mirror)] == [2, 3, 1]
