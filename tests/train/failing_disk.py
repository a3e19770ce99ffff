"""Run `lbopt train` or `lbopt sweep` on a disk that fails, with failing_disk.c loaded before libc.

    python failing_disk.py FOLDER CASES ARGUMENTS...

CASES is JSON: a list of [N, number of the error, whether all later calls fail too, NAME] (see
failing_disk.c); or a number of cases, at random among all operations of a run; or "kinds" for the
first and the last operation of each kind (apart from numbers), each error in turn, once and for
good. Each start is a fork of a process that has imported everything and touched no device. A run on
a failing disk has 30 s; then the same command runs again on a disk that works.

Prints a JSON line for the run without a fault, and one for each case: {"case", "failed": the call,
"code", "seconds", "said": lines of stderr, "again": exit code of the second run, "equal": whether
it ends like the run without a fault}.
"""

import errno
import json
import os
import pathlib
import random
import re
import shutil
import sys
import time

from many_kills import start

import lbopt.cli._sweep  # noqa: F401  what every start would import

pass

ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS)
MOST_S = 30
_PROGRESS = re.compile(r"step |starting at |\d+ cells, |trial ")


def run(arguments, stderr):
    """Return the exit code, None if the run does not end, and the seconds."""
    begin = time.monotonic()
    pid = start(arguments, stderr)
    while time.monotonic() < begin + MOST_S:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), round(time.monotonic() - begin, 1)
        time.sleep(0.05)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return None, MOST_S


def outcome(workdir):
    """Return the results that a run or a study left, without values that depend on time."""
    # If even a partial file could not be removed, a start removes it once it is a minute old.
    names = sorted(
        path.name for path in workdir.iterdir() if not re.fullmatch(r"\..+\.\d+", path.name)
    )
    if (workdir / "results.jsonl").exists():
        rows = [json.loads(line) for line in (workdir / "results.jsonl").read_text().splitlines()]
        timeless = [
            {name: value for name, value in row.items() if name != "seconds"} for row in rows
        ]
        summary = json.loads((workdir / "summary.json").read_text()) | {
            "command": None
        }  # the command names the workdir
        return sorted(json.dumps(row, sort_keys=True) for row in timeless), summary, names
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    metrics = [
        {name: value for name, value in line.items() if not name.startswith("perf/")}
        for line in lines
    ]
    newest = max((workdir / "checkpoints").iterdir(), key=lambda folder: int(folder.name))
    return metrics, (newest / "seal" / "metadata").read_text(), names


def go(folder, cases, arguments):
    os.environ.pop("FAULT_FOLDER", None)
    whole = folder / "whole"
    log = folder / "log"

    os.environ.update(FAULT_FOLDER=str(whole), FAULT_AT="0", FAULT_LOG=str(log))
    code, seconds = run([*arguments, f"--workdir={whole}"], folder / "stderr")
    operations = log.read_text().splitlines()
    print(json.dumps({"code": code, "seconds": seconds, "operations": len(operations)}), flush=True)
    wanted = outcome(whole)

    if cases == "kinds":
        # A run for each call would take too long: the first and the last of each kind must do.
        # Calls whose names differ in numbers only are of one kind.
        kinds = {}
        for at, operation in enumerate(operations, 1):
            kinds.setdefault(re.sub("[0-9a-f]{8,}|[0-9]+", "#", operation), []).append(at)
        some = sorted({at for of_kind in kinds.values() for at in (of_kind[0], of_kind[-1])})
        cases = [[at, ERRORS[turn % 4], bool(turn // 4 % 2), ""] for turn, at in enumerate(some)]
        cases += [[at, error, not on, name] for at, error, on, name in cases]

    if isinstance(cases, int):
        every = [
            [at, error, on, ""]
            for at in range(1, len(operations) + 1)
            for error in ERRORS
            for on in (False, True)
        ]
        cases = random.Random(0).sample(every, min(cases, len(every)))

    for at, error, on, name in cases:
        workdir = folder / "run"
        shutil.rmtree(workdir, ignore_errors=True)
        log.unlink(missing_ok=True)
        os.environ.update(
            FAULT_FOLDER=str(workdir),
            FAULT_AT=str(at),
            FAULT_ERRNO=str(error),
            FAULT_ON=str(int(on)),
        )
        os.environ.update(FAULT_NAME=name)

        code, seconds = run([*arguments, f"--workdir={workdir}"], folder / "stderr")
        failed = (
            [line for line in log.read_text().splitlines() if line.startswith("FAILED")]
            if log.exists()
            else []
        )
        said = (folder / "stderr").read_text().splitlines()

        os.environ.update(FAULT_FOLDER="")
        again, _ = run([*arguments, f"--workdir={workdir}"], folder / "stderr2")

        found = {
            "case": [at, errno.errorcode[error], on, name],
            "failed": failed[0].removeprefix("FAILED ") if failed else None,
            "code": code,
            "seconds": seconds,
            "said": [line for line in said if not _PROGRESS.match(line)],
            "again": again,
            "equal": again == 0 and outcome(workdir) == wanted,
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    go(pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])
