"""If the reader of a command's output closes it, only the printed text is lost."""

import io
import os
import subprocess
import sys

import pytest

from lbopt.cli import _standard_streams
from lbopt.train import Progress, say

LBOPT = [sys.executable, "-m", "lbopt"]


@pytest.fixture
def descriptor():
    """Return a function that makes a descriptor of the named kind to write to."""
    opened = []

    def make(kind):
        if kind == "full":
            opened.append(os.open("/dev/full", os.O_WRONLY))
            return opened[-1]
        reader, writer = os.pipe() if kind == "pipe" else os.openpty()
        os.close(reader)
        opened.append(writer)
        return writer

    yield make
    for one in opened:
        os.close(one)


@pytest.mark.parametrize(
    ("kind", "lost"), [("pipe", ""), ("terminal", ""), ("full", "No space left on device")]
)
def test_a_stream_outlives_its_reader(kind, lost, descriptor):
    raw = _standard_streams.Outliving(descriptor(kind))
    assert [raw.write(b"abc"), raw.write(b"de")] == [3, 2]
    assert raw.lost == lost
    if kind != "full":  # some libraries write to the descriptor directly
        assert os.write(raw.fileno(), b"abc") == 3


@pytest.mark.process
def test_a_stream_that_does_not_block_loses_nothing():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    text = b"x" * (1 << 20)
    command = [
        sys.executable,
        "-c",
        "import sys, time; time.sleep(0.1); print(len(sys.stdin.buffer.read()))",
    ]
    with subprocess.Popen(command, stdin=reader, stdout=subprocess.PIPE, text=True) as slow:
        os.close(reader)
        raw = _standard_streams.Outliving(writer)
        sent = 0
        while sent < len(text):
            sent += raw.write(text[sent:])
        os.close(writer)
        assert slow.communicate()[0] == f"{len(text)}\n"


def test_a_letter_that_an_encoding_does_not_have_is_written_as_an_escape():
    with open(os.devnull, "w", encoding="ascii", errors="strict") as before:
        written = _standard_streams._stream(1, before)
        assert (written.encoding, written.errors) == ("ascii", "backslashreplace")
        written.detach()


@pytest.mark.parametrize("kind", ["pipe", "terminal", "closed", None])
def test_progress_outlives_its_reader(kind, descriptor, monkeypatch):
    """A program that calls the library may have any kind of standard error."""
    stream = None
    if kind is not None:
        place = descriptor("pipe" if kind == "closed" else kind)
        stream = open(place, "w", closefd=False)  # noqa: SIM115
    if kind == "closed":
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(10) as progress:
        progress.say("a line")
        progress.advance()
        progress.report({"train/loss": 1.0})
        progress.expect(20, 3)
        progress.note("ETA 3 min")
    say("a line")
    if kind in ("pipe", "terminal"):
        with pytest.raises(OSError, match=r"Broken pipe|Input/output"):  # words of the system
            stream.close()


@pytest.mark.slow
@pytest.mark.process
def test_a_run_outlives_its_terminal(small, tmp_path):
    """Standard output is closed from the start, and the terminal after the first line."""
    ours, theirs = os.openpty()
    command = [*LBOPT, "train", *small, f"--workdir={tmp_path}"]
    with subprocess.Popen(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=theirs, stdin=theirs
    ) as process:
        os.close(theirs)
        os.read(ours, 1)
        os.close(ours)
        assert process.wait(120) == 0
    assert (tmp_path / "checkpoints" / "16").is_dir()
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 8


@pytest.mark.everyday("recipes-> /dev/full*", "--help-*")
@pytest.mark.process
@pytest.mark.parametrize(
    ("asked", "into", "code", "err"),
    [
        ("recipes", "| head -1", 0, ""),
        ("config", "| head -1", 0, ""),
        ("recipes", ">&-", 0, ""),
        ("recipes", "> /dev/full", 3, "lbopt: standard output: "),
        ("--help", "> /dev/full", 3, "lbopt: standard output: "),
    ],
)
def test_a_list_outlives_its_reader(asked, into, code, err, configs):
    command = [*LBOPT, asked, *([f"--configs={configs / 'sweeps'}"] if asked == "recipes" else [])]
    done = subprocess.run(
        ["bash", "-c", f'"$@" {into}; exit ${{PIPESTATUS[0]}}', "bash", *command],
        capture_output=True,
        text=True,
    )
    assert done.returncode == code
    assert done.stderr.startswith(err)
    assert done.stderr.count("\n") == bool(err)


def test_a_line_is_written_in_one_piece(monkeypatch):
    """Threads of a study print at once; a line must not be interrupted by another."""
    pieces = []
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys.stderr, "write", pieces.append)
    say("trial 1")
    say("trial 2")
    assert [piece for piece in pieces if piece] == ["trial 1\n", "trial 2\n"]
