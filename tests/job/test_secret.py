"""The places of a job's secret, and its confidentiality."""

import errno
import os
import pathlib
import stat
import subprocess
import sys

import pytest
from jobs import free_ports, train_command
from refusal import refused, troubled

from lbopt.errors import NO_VALUE
from lbopt.job import MEMBER_VARIABLE as MEMBER, _secret

WORDS = "sixteen letters or more"


def written(path, text=WORDS, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_it_is_taken_out_of_the_environment():
    """Child processes and logs of their environment must not contain it."""
    environ = {"LBOPT_JOB_SECRET": f"{WORDS}\n", "HOME": "/nowhere"}
    assert _secret.find({}, environ) == WORDS.encode()
    assert environ == {"HOME": "/nowhere"}


def test_a_file_comes_before_the_variable(tmp_path):
    flags = {"job_secret_file": written(tmp_path / "flag", "that of the flag, see")}
    assert _secret.find(flags, {"LBOPT_JOB_SECRET": WORDS}) == b"that of the flag, see"
    variable = {"LBOPT_JOB_SECRET_FILE": written(tmp_path / "variable")}
    assert _secret.find({}, dict(variable)) == WORDS.encode()
    with refused("LBOPT_JOB_SECRET_FILE", variable["LBOPT_JOB_SECRET_FILE"], "conflict"):
        _secret.find({}, variable | {"LBOPT_JOB_SECRET": WORDS})


@pytest.mark.parametrize(
    ("make", "code", "shown"),
    [
        (lambda path: written(path, mode=0o640), "value", "640"),
        (lambda path: written(path, mode=0o604), "value", "604"),
        (lambda path: written(path, "short"), "value", "5 characters"),
        (lambda path: written(path, "x" * 5000), "value", "4097 characters"),
        (lambda path: str(path), "missing", ""),
        (lambda path: os.mkfifo(path) or str(path), "damaged", "FIFO"),
        (lambda path: path.mkdir() or str(path), "damaged", os.strerror(errno.EISDIR)),
    ],
)
def test_a_file_that_is_none(tmp_path, make, code, shown):
    file = make(tmp_path / "file")
    with refused("LBOPT_JOB_SECRET_FILE", file, code) as caught:
        _secret.find({}, {"LBOPT_JOB_SECRET_FILE": file})
    assert shown in caught.value.reason
    assert WORDS not in str(caught.value)


def test_what_has_no_value_is_no_file():
    """--job_secret_file=$UNSET must not select the secret of another user's job."""
    with refused("LBOPT_JOB_SECRET_FILE", "", "damaged"):
        _secret.find({}, {"LBOPT_JOB_SECRET_FILE": ""})
    with refused("--job_secret_file", "", "damaged"):
        _secret.find({"job_secret_file": ""}, {"LBOPT_JOB_SECRET": WORDS})


@pytest.mark.parametrize("value", ["", "short"])
def test_a_variable_that_is_none(value):
    with refused("LBOPT_JOB_SECRET", NO_VALUE, "value"):
        _secret.find({}, {"LBOPT_JOB_SECRET": value})


@pytest.mark.process
def test_all_of_one_home_have_one(tmp_path):
    """The first to ask makes it, readable only by the user; remains of killed processes go."""
    (tmp_path / "config" / "lbopt").mkdir(parents=True)
    (tmp_path / "config" / "lbopt" / ".job_secret.99").touch()
    os.utime(tmp_path / "config" / "lbopt" / ".job_secret.99", (0, 0))
    code = (
        "import os, sys; from lbopt.job import _secret; "
        "sys.stdout.buffer.write(_secret.find({}, os.environ))"
    )
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "PYTHONPATH": os.pathsep.join(sys.path)}
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    said = {process.communicate()[0] for process in started}
    (file,) = (tmp_path / "config" / "lbopt").iterdir()
    assert file.name == "job_secret"
    assert said == {file.read_bytes().strip()}
    assert len(file.read_bytes().strip()) == 64
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_home_that_takes_nothing(tmp_path):
    (tmp_path / "file").touch()
    file = tmp_path / "file" / "lbopt" / "job_secret"
    with troubled(str(file), code="resource") as caught:
        _secret.find({}, {"XDG_CONFIG_HOME": str(tmp_path / "file")})
    assert _secret.HOW in caught.value.reason


def listening(port):
    """Return the addresses that listen at this port, in the kernel's notation."""
    tables = [
        pathlib.Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")
    ]
    sockets = [line.split() for table in tables for line in table]
    return [
        columns[1].split(":")[0]
        for columns in sockets
        if columns[3] == "0A" and int(columns[1].split(":")[1], 16) == port
    ]


@pytest.mark.process
@pytest.mark.slow
def test_it_is_said_nowhere(start, tmp_path):
    """Neither the computing process nor a run's files contain it.

    The hub and JAX's service listen at one address.
    """
    workdir = tmp_path / "run"
    port = free_ports()
    job = start(train_command(workdir, "--config.num_epochs=2000"), port=port)
    words = b"known to the processes of a test"
    job.wait_for(
        lambda: (workdir / "metrics.jsonl").exists() and (workdir / "metrics.jsonl").read_text()
    )

    for index in range(2):
        environment = pathlib.Path(f"/proc/{job.child(index)}/environ").read_bytes()
        assert MEMBER.encode() in environment
        assert words not in environment

    for used in (port, port + 1):
        (address,) = listening(used)
        # 127.0.0.1, also as an IPv6 address
        assert address in ("0100007F", "0000000000000000FFFF00000100007F"), used

    for process in job.processes:
        process.terminate()
    assert job.codes() == [75, 75]

    files = [path for path in (*workdir.rglob("*"), *job.logs) if path.is_file()]
    assert workdir / "config.json" in files
    assert not [path for path in files if words in path.read_bytes()]
