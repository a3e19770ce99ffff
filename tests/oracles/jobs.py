"""Jobs of several processes on this machine, each with its own fake CPU devices."""

import contextlib
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from forked import Forked

from lbopt.cli import load_config
from lbopt.config import TrainConfig
from lbopt.recipes import build_run
from lbopt.train import Checkpoints

FILE = pathlib.Path(__file__).parents[2] / "configs" / "digits_cnn.py"
BRIEF = (
    "--config.seed=7",
    "--config.num_epochs=1.25",
    "--config.log_every_steps=1",
    "--config.eval_every_steps=6",
    "--config.checkpoint.every_steps=3",
    "--config.model.widths=(4,)",
    "--config.model.hidden=8",
)
SMALL = (*BRIEF, "--config.checkpoint.keep=100", "--config.model.batch_norm_scope=examples:8")
# Its threads interleave their lines, which leaves fragments such as bare numbers.
_GLOO = re.compile(r"^\[Gloo\]|peer ranks|^[\d\s:]*$")
LONG = ("--config.num_epochs=2000", "--config.checkpoint.every_steps=20")


def free_ports():
    """Return a free port whose successor is free too.

    Both are below the range that the kernel gives to outgoing connections.
    """
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000, 2)
        with socket.socket() as one, socket.socket() as other, contextlib.suppress(OSError):
            one.bind(("", port))
            other.bind(("", port + 1))
            return port


def on_devices(devices):
    """Return the environment of a process with fake CPU devices and the tests' compiler options."""
    flags = re.sub(r"(device_count)=\d+", rf"\1={devices}", os.environ["XLA_FLAGS"])
    return {**os.environ, "XLA_FLAGS": flags}


def environment(index, count, devices, port):
    return {
        **on_devices(devices),
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(index),
        "LBOPT_START_TIMEOUT_S": "60",
        "LBOPT_JOB_SECRET": "known to the processes of a test",
    }


class Job:
    """Processes that were started together.

    Args:
      commands: arguments of `lbopt`, one list per process.
      environments: environment variables, one mapping per process.
      folder: folder for the processes' output.
      popen: how a process is started, `subprocess.Popen` or `Forked`.
    """

    def __init__(self, commands, environments, folder, popen=Forked):
        self.logs = [folder / f"process-{index}.log" for index in range(len(commands))]
        self.processes = []
        for command, variables, log in zip(commands, environments, self.logs, strict=True):
            with open(log, "w") as stream:
                started = popen(
                    [sys.executable, "-m", "lbopt", *command],
                    env=variables,
                    stdout=stream,
                    stderr=stream,
                )
            self.processes.append(started)

    def codes(self, timeout_s=120):
        """Wait for all processes to end and return their exit codes."""
        until = time.monotonic() + timeout_s
        return [process.wait(max(until - time.monotonic(), 0.1)) for process in self.processes]

    def said(self, index):
        """Return a process's lines without those of JAX's transport, which may be interleaved."""
        lines = self.logs[index].read_text().splitlines()
        return [line for line in lines if line and not _GLOO.search(line)]

    def last(self, index):
        """Return the last line."""
        return (["", *self.said(index)])[-1]

    def child(self, index):
        """Return the id of the process that computes."""
        pid = self.processes[index].pid
        children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[-1])  # a server that forks may come first

    def wait_for(self, condition, timeout_s=90):
        until = time.monotonic() + timeout_s
        while not condition():
            ended = [process.poll() for process in self.processes]
            assert not any(code is not None for code in ended), (
                ended,
                [self.said(i)[-60:] for i in range(len(ended))],
            )
            assert time.monotonic() < until, [
                self.said(index)[-3:] for index in range(len(self.processes))
            ]
            time.sleep(0.05)

    def end(self):
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, OSError, ValueError, IndexError):
                    os.kill(self.child(self.processes.index(process)), signal.SIGKILL)
                process.kill()
                process.wait()


def train_command(workdir, *overrides):
    return ["train", f"--config={FILE}:lamb-64", f"--workdir={workdir}", *SMALL, *overrides]


def train_alone(workdir, *overrides, devices=1):
    """Return the exit code of a run in a single process."""
    command = [sys.executable, "-m", "lbopt", *train_command(workdir, *overrides)]
    environment = on_devices(devices)
    with Forked(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as alone:
        alone.communicate(timeout=120)
    return alone.returncode


def saved_state(workdir, step, *overrides):
    config = load_config(
        f"{FILE}:lamb-64", [*SMALL, *overrides, "--config.parallel.num_devices=1"], TrainConfig
    )
    with Checkpoints(workdir, keep=100, read_only=True) as checkpoints:
        return checkpoints.restore(build_run(config).shapes(), step)


def flat(tree):
    return np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)])


def steps_saved(workdir):
    folder = workdir / "checkpoints"
    return (
        sorted(int(entry.name) for entry in folder.glob("*") if entry.name.isdecimal())
        if folder.is_dir()
        else []
    )


def logged(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def start(tmp_path):
    """Return a function (command of process i | list, count, devices, ..., popen) -> Job."""
    begun = []

    def begin(
        command,
        count=2,
        devices=2,
        port=None,
        change=lambda index, variables: variables,
        popen=Forked,
    ):
        port = free_ports() if port is None else port
        commands = [command(index) if callable(command) else command for index in range(count)]
        environments = [
            change(index, environment(index, count, devices, port)) for index in range(count)
        ]
        folder = tmp_path / f"logs-{len(begun)}"
        folder.mkdir()
        begun.append(Job(commands, environments, folder, popen))
        return begun[-1]

    yield begin
    for job in begun:
        job.end()
