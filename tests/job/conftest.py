"""Jobs that end with their test."""

import os
import subprocess
import sys

import jobs
import pytest


@pytest.fixture
def start(tmp_path):
    """Return a function (command of process i | list, count, devices, ...) -> Job."""
    begun = []

    def begin(command, count=2, devices=2, port=None, change=lambda index, variables: variables):
        port = jobs.free_ports() if port is None else port
        commands = [command(index) if callable(command) else command for index in range(count)]
        environments = [change(index, jobs.environment(index, count, devices, port)) for index in range(count)]
        folder = tmp_path / f"logs-{len(begun)}"
        folder.mkdir()
        begun.append(jobs.Job(commands, environments, folder))
        return begun[-1]

    yield begin
    for job in begun:
        job.end()


@pytest.fixture
def alone(tmp_path):
    """Return a function (workdir, *overrides, devices=1) -> the exit code of a run of one process."""

    def run(workdir, *overrides, devices=1):
        variables = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
        command = [sys.executable, "-m", "lbopt", *jobs.train_command(workdir, *overrides)]
        return subprocess.run(command, env=variables, capture_output=True, timeout=120).returncode

    return run
