"""Run the slow tests of changed files, the nearest first, for a limited time.

A test file is run if it imports, directly or through others, a file that has changed since the last
landed commit; none is run if that commit is not known. Tests that cannot begin in time are skipped,
and counted by file at the end; tests marked exhaustive are left out. `scripts/test --all` runs all
tests.
"""

import argparse
import collections
import os
import pathlib
import subprocess
import sys
import time

import pytest
from import_graph import ImportGraph

ROOT = pathlib.Path(__file__).parents[1]
DEADLINE = "LBOPT_SLOW_TESTS_UNTIL"
LATE = "no time left"


def main(argv: list[str]) -> int:
    """Run the slow tests and return the exit code of pytest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--budget-s", type=float, default=600.0, help="seconds after which no test begins"
    )
    parser.add_argument(
        "--since",
        default=os.environ.get("LBOPT_TESTED_COMMIT"),
        help="last landed commit",
    )
    parser.add_argument("--list", action="store_true", help="print the test files and exit")
    options = parser.parse_args(argv)

    base = options.since or last_landed()
    if base is None:
        print("slow tests: none, because the last landed commit is not known; give --since=COMMIT")
        return 0

    changed = changed_files(base)
    tests = list(ImportGraph(ROOT).nearest_tests(changed))
    reach = f"{len(tests)} test files reach them"
    print(f"slow tests: {len(changed)} files changed since {base}; {reach}")
    if options.list:
        print("\n".join(str(test.relative_to(ROOT)) for test in tests))
    if options.list or not tests:
        return 0

    # This file is also a plugin of pytest, which skips the tests that come too late.
    selection = ["-m", "slow and not exhaustive", "-p", "slow_tests", "-rs"]
    command = [sys.executable, "-m", "pytest", *selection]
    workers = ["-n", os.environ.get("TEST_WORKERS", "3")]
    environment = {
        **os.environ,
        DEADLINE: str(time.time() + options.budget_s),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run([*command, *workers, *map(str, tests)], cwd=ROOT, env=environment)
    return 0 if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED else done.returncode


def last_landed() -> str | None:
    """Return the last commit of the main branch below HEAD; None if it is not known.

    It is not known where the branch is at HEAD itself, as where CI checks out a submitted commit.
    """
    head = git("rev-parse", "HEAD")
    for branch in ("origin/main", "main"):
        base = git("merge-base", "HEAD", branch)
        if base and base != head:
            return base
    return None


def changed_files(base: str) -> set[pathlib.Path]:
    """Return the files that differ from a commit, including uncommitted changes."""
    names = git("diff", "--name-only", base) or ""
    return {ROOT / name for name in names.splitlines()}


def git(*arguments: str) -> str | None:
    """Return git's output, None if it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or None if done.returncode == 0 else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test after the deadline."""
    if time.time() > float(os.environ[DEADLINE]):
        pytest.skip(LATE)


def pytest_terminal_summary(terminalreporter) -> None:
    """Report the number of skipped tests by file."""
    skipped = terminalreporter.stats.get("skipped", [])
    late = collections.Counter(
        report.nodeid.partition("::")[0] for report in skipped if LATE in str(report.longrepr)
    )
    terminalreporter.write_line(f"slow tests skipped after the time limit: {late.total()}")
    for file, count in late.items():
        terminalreporter.write_line(f"  {count} of {file}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
