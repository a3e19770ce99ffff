"""Jobs whose processes cannot connect: one line on every process, within seconds."""

import contextlib
import errno
import fcntl
import os
import re
import socket
import threading
import time

import pytest
from jobs import free_ports, train_command

from lbopt.job._secret import HOW

pytestmark = pytest.mark.process

SECONDS = 60


def one_line(job, index):
    said = job.said(index)
    assert len(said) == 1, said
    return said[0]


def assert_refused(job, index, field, value):
    """Check that a process printed one line only, about a field and its value."""
    line = one_line(job, index)
    assert line.startswith(f"lbopt train: {field} = {value!r}: "), line
    return line


def swap(**changes):
    """Return a change of environment variables, each by a function of the index."""
    return lambda index, variables: {
        **variables,
        **{name: change(index) for name, change in changes.items()},
    }


def started(start, tmp_path, codes, **settings):
    begin = time.monotonic()
    job = start(train_command(tmp_path / "run"), **settings)
    assert job.codes(SECONDS) == codes
    assert time.monotonic() - begin < SECONDS
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").iterdir())
    return job


@pytest.mark.slow
def test_two_of_one_id(start, tmp_path):
    change = swap(JAX_PROCESS_ID=lambda index: str(min(index, 1)))
    job = started(start, tmp_path, [2, 2, 2], count=3, change=change)
    for index in range(3):
        line = assert_refused(job, index, "--process_id", 1)
        assert len(re.findall(r"process 1 of 3 \(.*?, pid \d+\)", line)) == 2


@pytest.mark.slow
def test_two_that_say_they_are_the_first(start, tmp_path):
    """The second process cannot listen, and tells the first about the conflict."""
    port = free_ports()
    begin = time.monotonic()
    change = swap(JAX_PROCESS_ID=lambda index: "0")
    job = start(train_command(tmp_path / "run"), port=port, change=change)
    codes = job.codes(SECONDS)
    assert sorted(codes) == [2, 3]
    assert time.monotonic() - begin < 30
    line = assert_refused(job, codes.index(2), "--process_id", 0)
    assert len(re.findall(r"process 0 of 2 \(.*?\)", line)) == 2
    line = assert_refused(job, codes.index(3), "--coordinator_address", f"127.0.0.1:{port}")
    assert os.strerror(errno.EADDRINUSE) in line


@pytest.mark.slow
def test_different_numbers_of_processes(start, tmp_path):
    job = started(
        start, tmp_path, [2, 2], change=swap(JAX_NUM_PROCESSES=lambda index: str(2 + index))
    )
    for index in range(2):
        line = assert_refused(job, index, "--num_processes", 3)
        assert re.search(r"process 1 of 3 \(.*\).* process 0\b.* 2\b", line)


def test_one_that_does_not_come(start, tmp_path):
    change = swap(JAX_NUM_PROCESSES=lambda index: "4", LBOPT_START_TIMEOUT_S=lambda index: "3")
    job = started(start, tmp_path, [3, 3], change=change)
    for index in range(2):
        line = assert_refused(job, index, "--start_timeout_s", 3.0)
        assert re.search(r"processes 2, 3 of 4 .*127\.0\.0\.1:\d+", line)


@pytest.mark.everyday("127.0.0.1:0-2-*")
@pytest.mark.parametrize(
    ("address", "code", "field"),
    [
        ("127.0.0.1", 2, "JAX_COORDINATOR_ADDRESS"),
        ("127.0.0.1:0", 2, "JAX_COORDINATOR_ADDRESS"),
        ("127.0.0.1:http", 2, "JAX_COORDINATOR_ADDRESS"),
        ("nowhere.invalid:1234", 2, "--coordinator_address"),
    ],
)
def test_an_address_that_is_none(start, tmp_path, address, code, field):
    job = started(
        start, tmp_path, [code, code], change=swap(JAX_COORDINATOR_ADDRESS=lambda index: address)
    )
    for index in range(2):
        assert_refused(job, index, field, address)


@pytest.mark.slow
def test_a_bind_address_that_is_none(start, tmp_path):
    """The refusal names the wrong one of two addresses."""
    change = swap(
        JAX_COORDINATOR_BIND_ADDRESS=lambda index: "nowhere.invalid:1234",
        LBOPT_START_TIMEOUT_S=lambda index: "3",
    )
    job = started(start, tmp_path, [2, 3], change=change)
    assert_refused(job, 0, "--coordinator_bind_address", "nowhere.invalid:1234")


@pytest.mark.slow
def test_an_address_of_another_network(start, tmp_path):
    """The address is reserved for documentation; process 0 sees that it is not its own."""
    address = f"192.0.2.1:{free_ports()}"
    change = swap(
        JAX_COORDINATOR_ADDRESS=lambda index: address,
        LBOPT_START_TIMEOUT_S=lambda index: "3" if index else "600",
    )
    job = started(start, tmp_path, [3, 3], change=change)
    assert "(3 s; " not in assert_refused(job, 0, "--coordinator_address", address)
    assert "(3 s; " in assert_refused(job, 1, "--coordinator_address", address)


@pytest.mark.slow
def test_an_address_where_nobody_listens(start, tmp_path):
    """The second process has another address than the first."""
    elsewhere = f"127.0.0.1:{free_ports()}"
    here = f"127.0.0.1:{free_ports()}"
    change = swap(
        JAX_COORDINATOR_ADDRESS=lambda index: elsewhere if index else here,
        LBOPT_START_TIMEOUT_S=lambda index: "3",
    )
    job = started(start, tmp_path, [3, 3], change=change)
    line = assert_refused(job, 0, "--start_timeout_s", 3.0)
    assert re.search(rf"process 1 of 2 .*{re.escape(here)}", line)
    assert "(3 s; " in assert_refused(job, 1, "--coordinator_address", elsewhere)


@pytest.mark.everyday("JAX_PROCESS_ID-2-*")
@pytest.mark.parametrize(
    ("variable", "value", "shown"),
    [
        ("JAX_NUM_PROCESSES", "two", "two"),
        ("JAX_PROCESS_ID", "2", "2"),
        ("JAX_PROCESS_ID", "", None),
        ("LBOPT_START_TIMEOUT_S", "soon", "soon"),
        ("LBOPT_HANG_TIMEOUT_S", "-1", "-1"),
    ],
)
def test_a_place_that_is_none(start, tmp_path, variable, value, shown):
    job = started(start, tmp_path, [2, 2], change=swap(**{variable: lambda index: value}))
    for index in range(2):
        assert_refused(job, index, variable, shown)


@pytest.mark.slow
def test_flags_come_before_the_environment(start, tmp_path):
    job = start([*train_command(tmp_path / "run"), "--process_id=7"])
    assert job.codes(SECONDS) == [2, 2]
    assert_refused(job, 0, "--process_id", "7")


def test_configs_that_differ(start, tmp_path):
    def command(index):
        return train_command(
            tmp_path / "run",
            f"--config.seed={7 + index}",
            f"--config.optimizer.weight_decay={0.1 * (1 + index)}",
        )

    begin = time.monotonic()
    job = start(command, count=2)
    assert job.codes(SECONDS) == [2, 2]
    assert time.monotonic() - begin < SECONDS
    for index in range(2):
        line = assert_refused(job, index, "config.seed", 7)
        assert re.search(r"process 0 of 2.*process 1\b.* 8\b", line)


@pytest.mark.slow
def test_a_workdir_that_not_all_see(start, tmp_path):
    job = start(lambda index: train_command(tmp_path / f"run-{index}"))
    assert job.codes(SECONDS) == [2, 2]
    for index in range(2):
        field = rf"--workdir = '{tmp_path}/run-1'"
        told = rf"lbopt train: (process 1 of 2 \(.*?\): )?{field}: .*process 1 of 2 .+"
        assert re.fullmatch(told, one_line(job, index))


@pytest.mark.slow
def test_a_process_without_a_device_of_the_mesh(start, tmp_path):
    job = start(
        train_command(tmp_path / "run", "--config.parallel.num_devices=2"), count=2, devices=2
    )
    assert job.codes(SECONDS) == [2, 2]
    for index in range(2):
        line = assert_refused(job, index, "config.parallel.num_devices", 2)
        assert re.search(r"\b1 of 2\b", line)


def test_another_secret(start, tmp_path):
    change = swap(
        LBOPT_JOB_SECRET=lambda index: f"that of process {index} alone",
        LBOPT_START_TIMEOUT_S=lambda index: "3",
    )
    job = started(start, tmp_path, [3, 3], change=change)
    line = one_line(job, 1)
    assert line.startswith("lbopt train: --coordinator_address = '127.0.0.1:")
    assert HOW in line
    line = assert_refused(job, 0, "--start_timeout_s", 3.0)
    assert re.search(rf"\(1 connection .*127\.0\.0\.1; {HOW}\)$", line)


@pytest.mark.parametrize(
    ("says", "code", "named"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", 3, "port"),
        (
            b'{"lbopt": 1, "nonce": "' + b"0" * 64 + b'"}\n{"proof": "' + b"0" * 64 + b'"}\n',
            3,
            "port",
        ),
        (b'{"lbopt": 2, "nonce": ""}\n', 3, "version"),
        (None, 3, "(3 s; "),
    ],
)
def test_another_program_listens_there(start, tmp_path, says, code, named):
    """Process 1 is alone with a program that answers wrongly, or closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    if says:
                        connection.sendall(says)
                        connection.recv(4096)
                    connection.close()

        threading.Thread(target=answer, daemon=True).start()
        port = str(listener.getsockname()[1])
        change = swap(
            JAX_PROCESS_ID=lambda index: "1",
            LBOPT_START_TIMEOUT_S=lambda index: "3",
            JAX_NUM_PROCESSES=lambda index: "2",
            JAX_COORDINATOR_ADDRESS=lambda index: f"127.0.0.1:{port}",
        )
        job = started(start, tmp_path, [code], count=1, change=change)
        listener.shutdown(socket.SHUT_RDWR)
    line = assert_refused(job, 0, "--coordinator_address", f"127.0.0.1:{port}")
    assert [name for name in ("port", "version", "(3 s; ") if name in line] == [named]


@pytest.mark.slow
def test_stopped_before_process_0_has_answered(start, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        change = swap(
            JAX_PROCESS_ID=lambda index: "1",
            JAX_NUM_PROCESSES=lambda index: "2",
            JAX_COORDINATOR_ADDRESS=lambda index: address,
        )
        job = start(train_command(tmp_path / "run"), count=1, change=change)
        connection, _ = listener.accept()
        job.processes[0].terminate()
        begun = time.monotonic()
        assert job.codes(SECONDS) == [3]
        assert time.monotonic() - begun < 5
        connection.close()
    assert "(stopped; " in assert_refused(job, 0, "--coordinator_address", address)


def test_a_port_that_is_taken(start, tmp_path):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        change = swap(LBOPT_START_TIMEOUT_S=lambda index: "3")
        job = start(train_command(tmp_path / "run"), port=port, change=change)
        codes = job.codes(SECONDS)
    assert codes == [3, 3]
    assert_refused(job, 0, "--coordinator_address", f"127.0.0.1:{port}")


@pytest.mark.slow
def test_the_second_job_in_a_workdir(start, tmp_path):
    (tmp_path / "run").mkdir()
    held = os.open(tmp_path / "run", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    job = started(start, tmp_path, [2, 2])
    os.close(held)
    field = f"--workdir = '{tmp_path / 'run'}': "
    assert one_line(job, 0).startswith(f"lbopt train: {field}")
    assert re.search(rf"process 0 of 2 .*{re.escape(field)}", one_line(job, 1))
