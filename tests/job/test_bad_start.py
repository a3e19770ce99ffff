"""Jobs that cannot come together: one line on every process, within seconds."""

import contextlib
import fcntl
import os
import re
import socket
import threading
import time

import pytest
from jobs import free_ports, train_command

pytestmark = pytest.mark.process

SECONDS = 60


def one_line(job, index):
    said = job.said(index)
    assert len(said) == 1, said
    return said[0]


def swap(**changes):
    """Return a change of environments: variable -> function of the index."""
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


def test_two_of_one_id(start, tmp_path):
    change = swap(JAX_PROCESS_ID=lambda index: str(min(index, 1)))
    job = started(start, tmp_path, [2, 2, 2], count=3, change=change)
    for index in range(3):
        pattern = r"lbopt train: --process_id = 1: process 1 of 3 \(.*, pid \d+\) and process 1 of 3 \(.*\) have the same; give each"
        assert re.match(pattern, one_line(job, index))


def test_two_that_say_they_are_the_first(start, tmp_path):
    """The second cannot listen, and tells the first that there are two."""
    begin = time.monotonic()
    job = start(train_command(tmp_path / "run"), change=swap(JAX_PROCESS_ID=lambda index: "0"))
    assert sorted(job.codes(SECONDS)) == [2, 3]
    assert time.monotonic() - begin < 30
    first, second = sorted(
        (one_line(job, index) for index in range(2)), key=lambda line: "cannot listen" in line
    )
    assert re.match(
        r"lbopt train: --process_id = 0: process 0 of 2 \(.*\) and process 0 of 2 \(.*\) have the same",
        first,
    )
    assert re.match(
        r"lbopt train: --coordinator_address: process 0 cannot listen at port \d+ \(Address already in use",
        second,
    )


def test_different_numbers_of_processes(start, tmp_path):
    job = started(
        start, tmp_path, [2, 2], change=swap(JAX_NUM_PROCESSES=lambda index: str(2 + index))
    )
    for index in range(2):
        assert re.match(
            r"lbopt train: --num_processes = 3: so says process 1 of 3 \(.*\), process 0 says 2; give",
            one_line(job, index),
        )


def test_one_that_does_not_come(start, tmp_path):
    change = swap(JAX_NUM_PROCESSES=lambda index: "4", LBOPT_START_TIMEOUT_S=lambda index: "3")
    job = started(start, tmp_path, [3, 3], change=change)
    for index in range(2):
        assert (
            "processes 2, 3 of 4 did not come within 3 s: start them, and see that they reach 127.0.0.1:"
            in one_line(job, index)
        )


@pytest.mark.everyday("127.0.0.1:0-2-*")
@pytest.mark.parametrize(
    ("address", "code", "said"),
    [
        ("127.0.0.1", 2, "JAX_COORDINATOR_ADDRESS = '127.0.0.1': give HOST:PORT of process 0"),
        ("127.0.0.1:0", 2, "JAX_COORDINATOR_ADDRESS = '127.0.0.1:0': give HOST:PORT of process 0"),
        (
            "127.0.0.1:http",
            2,
            "JAX_COORDINATOR_ADDRESS = '127.0.0.1:http': give HOST:PORT of process 0",
        ),
        (
            "nowhere.invalid:1234",
            2,
            "--coordinator_address = 'nowhere.invalid:1234': there is no host of that name",
        ),
    ],
)
def test_an_address_that_is_none(start, tmp_path, address, code, said):
    job = started(
        start, tmp_path, [code, code], change=swap(JAX_COORDINATOR_ADDRESS=lambda index: address)
    )
    for index in range(2):
        assert one_line(job, index).startswith(f"lbopt train: {said}")


def test_a_bind_address_that_is_none(start, tmp_path):
    """The one that is wrong is named."""
    change = swap(
        JAX_COORDINATOR_BIND_ADDRESS=lambda index: "nowhere.invalid:1234",
        LBOPT_START_TIMEOUT_S=lambda index: "3",
    )
    job = started(start, tmp_path, [2, 3], change=change)
    said = "lbopt train: --coordinator_bind_address = 'nowhere.invalid:1234': there is no host of that name"
    assert one_line(job, 0).startswith(said)


def test_an_address_of_another_network(start, tmp_path):
    """Reserved for documentation: no host has it. Process 0 need not wait to know that it is not its own."""
    address = f"192.0.2.1:{free_ports()}"
    change = swap(
        JAX_COORDINATOR_ADDRESS=lambda index: address,
        LBOPT_START_TIMEOUT_S=lambda index: "3" if index else "600",
    )
    job = started(start, tmp_path, [3, 3], change=change)
    assert one_line(job, 0).startswith(
        f"lbopt train: --coordinator_address = '{address}': this is process 0, and its host has no such address; give all"
    )
    assert one_line(job, 1).startswith(
        f"lbopt train: --coordinator_address = '{address}': process 0 does not answer"
    )


def test_an_address_where_nobody_listens(start, tmp_path):
    """The second process has another one than the first."""
    elsewhere = f"127.0.0.1:{free_ports()}"
    here = f"127.0.0.1:{free_ports()}"
    change = swap(
        JAX_COORDINATOR_ADDRESS=lambda index: elsewhere if index else here,
        LBOPT_START_TIMEOUT_S=lambda index: "3",
    )
    job = started(start, tmp_path, [3, 3], change=change)
    assert (
        f"process 1 of 2 did not come within 3 s: start them, and see that they reach {here}"
        in one_line(job, 0)
    )
    assert one_line(job, 1).startswith(
        f"lbopt train: --coordinator_address = '{elsewhere}': process 0 does not answer there (3 s; "
    )


@pytest.mark.everyday("JAX_PROCESS_ID-2-*")
@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("JAX_NUM_PROCESSES", "two", "JAX_NUM_PROCESSES = 'two': give a whole number from 1 to"),
        ("JAX_PROCESS_ID", "2", "JAX_PROCESS_ID = '2': give a whole number from 0 to 1"),
        (
            "JAX_PROCESS_ID",
            "",
            "JAX_PROCESS_ID = None: JAX_COORDINATOR_ADDRESS is given too; give all of",
        ),
        (
            "LBOPT_START_TIMEOUT_S",
            "soon",
            "LBOPT_START_TIMEOUT_S = 'soon': give a number of seconds > 0",
        ),
        ("LBOPT_HANG_TIMEOUT_S", "-1", "LBOPT_HANG_TIMEOUT_S = '-1': give a number of seconds > 0"),
    ],
)
def test_a_place_that_is_none(start, tmp_path, variable, value, said):
    job = started(start, tmp_path, [2, 2], change=swap(**{variable: lambda index: value}))
    for index in range(2):
        assert one_line(job, index).startswith(f"lbopt train: {said}")


def test_flags_come_before_the_environment(start, tmp_path):
    job = start([*train_command(tmp_path / "run"), "--process_id=7"])
    assert job.codes(SECONDS) == [2, 2]
    assert one_line(job, 0).startswith(
        "lbopt train: --process_id = '7': give a whole number from 0 to 1"
    )


def test_configs_that_differ(start, tmp_path):
    def command(index):
        return train_command(
            tmp_path / "run",
            f"--config.seed={7 + index}",
            f"--config.optimizer.weight_decay={0.1 * (1 + index)}",
        )

    begin = time.monotonic()
    job = start(command, count=3)
    assert job.codes(SECONDS) == [2, 2, 2]
    assert time.monotonic() - begin < SECONDS
    for index in range(3):
        assert (
            "config.seed: process 0 of 3 has 7, process 1 has 8; start all with the same config"
            in one_line(job, index)
        )


@pytest.mark.slow
def test_a_workdir_that_not_all_see(start, tmp_path):
    job = start(lambda index: train_command(tmp_path / f"run-{index}"))
    assert job.codes(SECONDS) == [2, 2]
    for index in range(2):
        assert f"--workdir = '{tmp_path}/run-1': process 1 of 2" in one_line(job, index)
        assert (
            "does not see what process 0 writes there; use a folder that all hosts share"
            in one_line(job, index)
        )


@pytest.mark.slow
def test_a_process_without_a_device_of_the_mesh(start, tmp_path):
    job = start(
        train_command(tmp_path / "run", "--config.parallel.num_devices=2"), count=2, devices=2
    )
    assert job.codes(SECONDS) == [2, 2]
    for index in range(2):
        said = "config.parallel.num_devices = 2: 1 of 2 processes would have some; use more devices, or start fewer processes"
        assert said in one_line(job, index)


def test_another_secret(start, tmp_path):
    change = swap(
        LBOPT_JOB_SECRET=lambda index: f"that of process {index} alone",
        LBOPT_START_TIMEOUT_S=lambda index: "3",
    )
    job = started(start, tmp_path, [3, 3], change=change)
    assert (
        "has another secret than this process; give all processes the same LBOPT_JOB_SECRET or --job_secret_file"
        in (one_line(job, 1))
    )
    assert one_line(job, 0).endswith(
        "(1 connection without the job's secret was closed, from 127.0.0.1; give all processes the same LBOPT_JOB_SECRET or "
        "--job_secret_file)"
    )


@pytest.mark.parametrize(
    ("says", "code", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", 3, "is no process 0 of lbopt; start process 0 there"),
        (
            b'{"lbopt": 1, "nonce": "' + b"0" * 64 + b'"}\n{"proof": "' + b"0" * 64 + b'"}\n',
            3,
            "is no process 0 of lbopt",
        ),
        (
            b'{"lbopt": 2, "nonce": ""}\n',
            3,
            "has another version of lbopt than this process; install one version on all hosts",
        ),
        (
            None,
            3,
            "process 0 does not answer there (3 s; what listens there closes the connection)",
        ),
    ],
)
def test_what_listens_there_is_none_of_ours(start, tmp_path, says, code, said):
    """Process 1 alone, and somebody who says something else, or hangs up."""
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
    assert said in one_line(job, 0)


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
    assert (
        f"'{address}': process 0 does not answer there (stopped; asked, it has not answered yet)"
        in one_line(job, 0)
    )


def test_a_port_that_is_taken(start, tmp_path):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        change = swap(LBOPT_START_TIMEOUT_S=lambda index: "3")
        job = start(train_command(tmp_path / "run"), port=port, change=change)
        codes = job.codes(SECONDS)
    assert codes[0] == 3
    assert one_line(job, 0).startswith(
        f"lbopt train: --coordinator_address: process 0 cannot listen at port {port} ("
    )
    assert codes[1] == 3


@pytest.mark.slow
def test_the_second_job_in_a_workdir(start, tmp_path):
    (tmp_path / "run").mkdir()
    held = os.open(tmp_path / "run", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    job = started(start, tmp_path, [2, 2])
    os.close(held)
    assert "another process is at work there" in one_line(job, 0)
    assert "process 0 of 2" in one_line(job, 1)
    assert "another process is at work there" in one_line(job, 1)
