"""A fork of the server is to its parent what an ordinary process is."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from forked import Forked

pytestmark = pytest.mark.process

ORACLES = str(pathlib.Path(__file__).parent / "oracles")
PROGRAM = """
import json, os, signal, sys
from jax_internals import xla_bridge
seen = {
    "argv": sys.argv, "folder": os.getcwd(), "parent": os.getppid(), "path": sys.path[0],
    "group": os.getpgrp(), "read": sys.stdin.read(), "module": __name__,
    "environment": dict(os.environ),
    "signals": [str(signal.getsignal(number)).split(" at ")[0] for number in signal.Signals],
    "open": sorted(os.listdir("/proc/self/fd"))[:3],
    "backends": sorted(xla_bridge._backends), "threads": len(os.listdir("/proc/self/task")),
}
print(json.dumps(seen))
sys.exit(7)
"""

WAITING = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
print("begun", flush=True)
time.sleep(60)
"""


def test_a_program_sees_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("LBOPT_FORKED", "yes")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([ORACLES, os.environ.get("PYTHONPATH", "")]))

    found = []
    for popen in (subprocess.Popen, Forked):
        with popen(
            [sys.executable, "-c", PROGRAM, "one"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=dict(os.environ),
        ) as process:
            output, _ = process.communicate("given", timeout=60)
        assert process.returncode == 7
        found.append(json.loads(output))
    assert found[1].pop("threads") <= found[0].pop("threads")
    # Imports of the server add variables.
    assert found[0].pop("environment").items() <= found[1].pop("environment").items()
    assert found[0] == found[1]
    assert found[1]["backends"] == []


def test_a_program_that_fails():
    command = [sys.executable, "-c", "print('said'); 1 / 0"]
    with Forked(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (1, "said\n")
    assert errors.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_program_that_is_ended(number):
    command = [sys.executable, "-c", WAITING]
    with Forked(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout.readline() == b"begun\n"
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(timeout=60) == -number
