"""A data set is written completely or not at all, and errors of TFDS become one line."""

import fcntl
import os
import signal
import subprocess
import sys

import pytest
import tensorflow_datasets as tfds
from refusal import ANY, troubled

from lbopt.data.prepare import GeneratedDataset, _builders, prepare_source
from lbopt.data.prepare._alone import alone_in
from lbopt.errors import EnvironmentProblem


def source(examples, name="numbers", version="1.0.0"):
    def features(kinds):
        return {"text": kinds.Text()}

    return GeneratedDataset(name, "Numbers in words.", features, {"train": examples}, version)


def good():
    yield from ((str(number), {"text": f"number {number}"}) for number in range(20))


def failing(error):
    def examples():
        yield "0", {"text": "number 0"}
        raise error

    return source(examples)


def texts(prepared):
    part = prepared.folder.open("train", "split")
    return sorted(part[number]["text"].decode() for number in range(len(part)))


def test_what_fails_halfway_leaves_nothing_and_the_next_time_succeeds(tmp_path):
    with pytest.raises(ZeroDivisionError):
        prepare_source(failing(ZeroDivisionError("halfway")), str(tmp_path))
    assert list((tmp_path / "numbers").iterdir()) == []
    prepared = prepare_source(source(good), str(tmp_path))
    assert prepared.made
    assert texts(prepared) == sorted(f"number {number}" for number in range(20))
    assert [entry.name for entry in (tmp_path / "numbers").iterdir()] == ["1.0.0"]


KILLED = """
import os, signal, sys
from lbopt.data.prepare._datasets import prepare_source
from lbopt.data.prepare._generated import GeneratedDataset

def examples():
    yield "0", {"text": "number 0"}
    os.kill(os.getpid(), signal.SIGKILL)

features = lambda kinds: {"text": kinds.Text()}
prepare_source(GeneratedDataset("numbers", "", features, {"train": examples}), sys.argv[1])
"""


@pytest.mark.process
def test_what_a_killed_process_left_is_taken_away(tmp_path):
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (left,) = (tmp_path / "numbers").iterdir()
    assert left.name.startswith("incomplete.")
    assert prepare_source(source(good), str(tmp_path)).made
    assert [entry.name for entry in (tmp_path / "numbers").iterdir()] == ["1.0.0"]


def test_two_at_a_time_is_refused(tmp_path):
    (tmp_path / "numbers").mkdir()
    other = os.open(tmp_path / "numbers", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with troubled("data_dir", code="conflict"):
        prepare_source(source(good), str(tmp_path))
    os.close(other)
    assert prepare_source(source(good), str(tmp_path)).made


def test_without_locks_nothing_is_taken_away(tmp_path, monkeypatch):
    def no_locks(*arguments):
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (tmp_path / "incomplete.x").mkdir()
    with alone_in(tmp_path, "incomplete.*"):
        assert (tmp_path / "incomplete.x").is_dir()


def test_an_existing_one_is_opened_and_a_new_version_is_made_beside_it(tmp_path, fingerprint):
    prepare_source(source(good), str(tmp_path))
    before = fingerprint(tmp_path)
    again = prepare_source(failing(ZeroDivisionError()), str(tmp_path))
    assert not again.made
    assert fingerprint(tmp_path) == before
    newer = prepare_source(source(good, version="1.1.0"), str(tmp_path))
    assert (newer.made, newer.folder.folder.name) == (True, "1.1.0")


@pytest.fixture
def fingerprint():
    """Return a function folder -> {path: bytes}."""

    def read(folder):
        return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}

    return read


def test_a_folder_that_is_no_data_set_is_not_taken_for_one(tmp_path):
    (tmp_path / "numbers" / "1.0.0").mkdir(parents=True)
    with troubled("name", "numbers", "exists"):
        prepare_source(source(good), str(tmp_path))


class DownloadError(Exception):
    """An error with the name of TFDS's own."""


ERRORS = {
    "a package": (
        ModuleNotFoundError("No module named 'h5py'", name="h5py.core"),
        "h5py",
        "installation",
        "pip install h5py",
    ),
    "a full disk": (
        OSError(28, "No space left on device", "/data/x"),
        "name",
        "resource",
        "No space left on device /data/x",
    ),
    "a server": (
        DownloadError("Failed to get url http://x. HTTP code: 404."),
        "name",
        "resource",
        "HTTP code: 404",
    ),
    "a connection": (
        OSError("Max retries exceeded"),
        "name",
        "resource",
        "HTTPS_PROXY",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_is_wrong_with_the_machine_is_said_in_one_line(case, tmp_path):
    error, field, code, quoted = ERRORS[case]
    with troubled(field, "numbers" if field == "name" else ANY, code) as caught:
        prepare_source(failing(error), str(tmp_path))
    assert quoted in str(caught.value)
    assert "numbers" in str(caught.value)
    assert list((tmp_path / "numbers").iterdir()) == []


def test_our_own_errors_come_through(tmp_path):
    error = EnvironmentProblem("Pillow", reason="install it", code="installation")
    with troubled("Pillow", code="installation"):
        prepare_source(failing(error), str(tmp_path))


def test_tfds_keeps_quiet(tmp_path, capfd):
    builder = _builders.of_source(source(good), tmp_path)
    _builders.generate(builder, tmp_path)
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")


@pytest.mark.parametrize("shown", [False, True])
def test_the_progress_bars_of_tfds_are_set_as_before(shown, tmp_path):
    builder = _builders.of_source(failing(ZeroDivisionError()), tmp_path)
    utils = tfds.core.utils
    try:
        tfds.display_progress_bar(shown)
        with pytest.raises(ZeroDivisionError):
            _builders.generate(builder, tmp_path)
        assert isinstance(utils.tqdm(disable=True), utils.EmptyTqdm) != shown
    finally:
        tfds.enable_progress_bar()
