"""Train by `lbopt train`, with many starts killed by SIGKILL at random moments.

    python many_kills.py KILLS SEED WORKDIR ARGUMENTS...

Each start is a fork of a process that has imported everything and touched no device. Prints, as
JSON, the numbers of kills before the first step of a start, while a checkpoint was written, and at
other times; then the run ends undisturbed.
"""

import collections
import json
import os
import pathlib
import random
import signal
import sys
import time
import warnings

from lbopt.cli import main


def start(arguments, stderr=None):
    """Fork a process that runs a command and may write its output to a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking beside JAX's threads: none is at work yet
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if stderr is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        code = main(arguments)
    finally:
        sys.stderr.flush()
        os._exit(code)


def lines(workdir):
    file = workdir / "metrics.jsonl"
    return file.stat().st_size if file.exists() else 0


def is_saving(workdir):
    folder = workdir / "checkpoints"
    return folder.is_dir() and any(not entry.name.isdecimal() for entry in folder.iterdir())


def newest(workdir):
    folder = workdir / "checkpoints"
    return max(
        (int(entry.name) for entry in folder.glob("[0-9]*") if entry.name.isdecimal()), default=0
    )


def wait_for(happened):
    until = time.monotonic() + 60
    while not happened() and time.monotonic() < until:
        time.sleep(0.002)


def kill(pid, workdir, rng, before):
    """Kill a start at a random moment, mostly soon after its first step or checkpoint."""
    kind = rng.random()
    if kind < 0.2:
        time.sleep(rng.uniform(0, 2))
    else:
        saved = newest(workdir)
        wait_for(lambda: lines(workdir) > before if kind < 0.6 else newest(workdir) > saved)
        time.sleep(rng.uniform(0, 0.15))
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the run ended before all kills"


def go(kills, seed, workdir, arguments):
    rng = random.Random(seed)
    found = collections.Counter()
    for _ in range(kills):
        before = lines(workdir)
        kill(start(arguments), workdir, rng, before)
        found[
            "starting" if lines(workdir) <= before else "saving" if is_saving(workdir) else "else"
        ] += 1
    _, status = os.waitpid(start(arguments), 0)
    print(json.dumps({**found, "exit": os.waitstatus_to_exitcode(status)}))


if __name__ == "__main__":
    go(int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3]), sys.argv[4:])
