"""Plant faults in a copy of lbopt, one at a time, and find the tests that catch them.

The faults are drawn at random, in equal numbers from each package. The tests run once without a
fault, which shows the tests that execute each line. For each fault, the tests that execute its line
run until the first failure, beginning with those nearest to the faulty module. All tests run for a
line that is executed when its module is imported. The results are kept in a JSONL file, one fault a
line; the same command resumes after a stop. If a fault makes no observable difference, set
`"equivalent": true` in its line: it then does not count as missed.
"""

import argparse
import ast
import contextlib
import dataclasses
import difflib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import pytest
from import_graph import ImportGraph
from reached_lines import ReachedLines, measure
from source_faults import SourceFault, all_faults

ROOT = pathlib.Path(__file__).parents[1]
STAGES = (40, 400, None)
"""Number of tests in the first runs of pytest; most faults are caught by the nearest tests."""
TEST_TIMEOUT_S = 300
EVERYDAY = "not slow"
SLOW = "slow and not exhaustive"


@dataclasses.dataclass
class Mutant:
    """A planted fault and its outcome.

    Args:
      file: The module, relative to the repository.
      fault: The change of its source.
      diff: The change as a diff, for readers.
      caught_by: Name of the test that failed; None if no test failed.
      kind: Kind of the tests that caught the fault, "everyday" or "slow"; "missed" if no test did,
        None before the tests ran.
      seconds: Seconds until a test failed, or of all tests.
      equivalent: Whether the fault makes no observable difference; set by hand.
    """

    file: str
    fault: SourceFault
    diff: str
    caught_by: str | None = None
    kind: str | None = None
    seconds: float = 0.0
    equivalent: bool = False

    @property
    def outcome(self) -> str:
        """The outcome in one word."""
        return "equivalent" if self.equivalent else self.kind or "not run"


def main(argv: Sequence[str]) -> int:
    """Draw the faults, run the tests and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=40, help="number of faults (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    parser.add_argument(
        "--file", type=pathlib.Path, help="file of results (default: runs/mutants-SEED.jsonl)"
    )
    parser.add_argument(
        "--also-slow", action="store_true", help="run the slow tests if the others miss a fault"
    )
    parser.add_argument("--workers", default="2", help="number of pytest processes (default: 2)")
    parser.add_argument(
        "--timeout-s", type=float, default=3600.0, help="time limit of one pytest run, in seconds"
    )
    options = parser.parse_args(argv)

    # On SIGTERM exit by an exception, so that the running tests end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    file = options.file or ROOT / "runs" / f"mutants-{options.seed}.jsonl"
    if file.exists():
        mutants = load(file)
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        mutants = draw(options.count, options.seed)
        save(file, mutants)

    with copy_of_tree() as folder:
        data = file.with_suffix(".coverage")
        if not data.exists():
            selection = "not exhaustive" if options.also_slow else EVERYDAY
            print("running the tests without a fault, to see what they execute", flush=True)
            measure(folder, data, ["-m", selection, "-n", options.workers, "--dist", "worksteal"])
        tests = Tests(folder, ReachedLines(ROOT, data), options.workers, options.timeout_s)
        for number, mutant in enumerate(mutants, 1):
            place = f"{mutant.file}:{mutant.fault.line}"
            print(f"{number}/{len(mutants)} {place} {mutant.fault.kind}", flush=True)
            run(mutant, folder, tests, options.also_slow)
            save(file, mutants)
            found = f"{mutant.outcome} {mutant.caught_by or ''}"
            print(f"    {found} {mutant.seconds:.0f} s", flush=True)
    print(table(mutants))
    print(f"results: {file}")
    return 0


def draw(count: int, seed: int) -> list[Mutant]:
    """Draw faults from the packages in turn, uniformly from all faults of a package."""
    packages: dict[str, list[tuple[pathlib.Path, SourceFault]]] = {}
    for path in sorted((ROOT / "lbopt").rglob("*.py")):
        parts = path.relative_to(ROOT / "lbopt").parts
        package = parts[0] if len(parts) > 1 else "lbopt"
        faults = ((path, fault) for fault in all_faults(path.read_text()))
        packages.setdefault(package, []).extend(faults)

    rng = random.Random(seed)
    found: dict[tuple[pathlib.Path, SourceFault], Mutant] = {}
    while len(found) < count:
        for faults in rng.sample(list(packages.values()), len(packages)):
            path, fault = rng.choice(faults)
            mutant = make_mutant(path, fault)
            if mutant is not None and len(found) < count:
                found[path, fault] = mutant
    return list(found.values())


def make_mutant(path: pathlib.Path, fault: SourceFault) -> Mutant | None:
    """Return the mutant of a module; None if the fault does not change its syntax tree."""
    source = path.read_text()
    changed = fault.plant(source)
    if ast.dump(ast.parse(source)) == ast.dump(ast.parse(changed)):
        return None
    lines = difflib.unified_diff(source.splitlines(), changed.splitlines(), lineterm="", n=0)
    return Mutant(str(path.relative_to(ROOT)), fault, "\n".join(list(lines)[2:]))


def load(file: pathlib.Path) -> list[Mutant]:
    """Read mutants.

    Raises:
      SystemExit: If a module has changed since.
    """
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    mutants = [Mutant(**{**line, "fault": SourceFault(**line["fault"])}) for line in lines]
    for mutant in mutants:
        made = make_mutant(ROOT / mutant.file, mutant.fault)
        if made is None or made.diff != mutant.diff:
            raise SystemExit(f"{file}: {mutant.file} has changed since; give another --file")
    return mutants


def save(file: pathlib.Path, mutants: Sequence[Mutant]) -> None:
    """Write all mutants, atomically."""
    text = "".join(json.dumps(dataclasses.asdict(mutant)) + "\n" for mutant in mutants)
    partial = file.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(file)


@contextlib.contextmanager
def copy_of_tree() -> Iterator[pathlib.Path]:
    """Copy the files that git tracks or would add to a temporary folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    with tempfile.TemporaryDirectory(prefix="lbopt-mutants-") as name:
        folder = pathlib.Path(name)
        for entry in filter(None, listed.stdout.split("\0")):
            if (ROOT / entry).is_file():
                (folder / entry).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / entry, folder / entry)
        yield folder


class Tests:
    """Runs the tests of a copy of the tree.

    Args:
      folder: Folder of the copy.
      reached: The tests that execute each line.
      workers: Number of pytest processes.
      timeout_s: Time limit of a run in seconds, in case more than a test hangs. A longer run counts
        as a failure.
    """

    def __init__(self, folder: pathlib.Path, reached: ReachedLines, workers: str, timeout_s: float):
        self.folder = folder
        self.reached = reached
        self.workers = workers
        self.timeout_s = timeout_s
        self.graph = ImportGraph(folder)
        self.unsound: set[str] = set()

    def first_failure(self, module: pathlib.Path, line: int, selection: str) -> str | None:
        """Return the first test that fails among those of a selection, None if all pass."""
        waiting = self.tests_of(module, line)
        for stage in STAGES:
            now = waiting[:stage]
            waiting = waiting[stage:] if stage else []
            if not now:
                return None
            deselected = [f"--deselect={test}" for test in sorted(self.unsound)]
            names = self.folder / "tests-to-run.txt"
            names.write_text("\n".join(now))
            failed = self.run(["-x", "-m", selection, "-n", self.workers, *deselected, f"@{names}"])
            if failed is not None:
                return failed
        return None

    def tests_of(self, module: pathlib.Path, line: int) -> list[str]:
        """Return the tests that execute a line, or all test files; the nearest come first."""
        near = [str(file.relative_to(self.folder)) for file in self.graph.nearest_tests({module})]
        files = [str(file.relative_to(self.folder)) for file in self.graph.tests()]
        others = [file for file in files if file not in near]
        in_order = [*near, *others, "lbopt"]

        reaching = self.reached.tests(module.relative_to(self.folder), line)
        if reaching is None:
            return in_order
        place = {file: number for number, file in enumerate(in_order)}
        return sorted(reaching, key=lambda test: (place.get(test.partition("::")[0], -1), test))

    def run(self, arguments: Sequence[str]) -> str | None:
        """Run pytest; return the first failing test or another reason, None if all passed."""
        options = ["-q", "-p", "no:cacheprovider", "-rfE"]
        # A fault may cause an endless loop: the test's process then ends, and the test fails.
        options += ["-o", f"faulthandler_timeout={TEST_TIMEOUT_S}"]
        options += ["-o", "faulthandler_exit_on_timeout=true", "--max-worker-restart=0"]
        command = [sys.executable, "-m", "pytest", *options, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=self.timeout_s)
        except subprocess.TimeoutExpired:
            return "no end"
        finally:
            # A fault can end a test before it stops its own processes.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

        if process.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            return None
        failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", output, re.MULTILINE)
        return failed[1] if failed else f"pytest ended with {process.returncode}"

    def is_sound(self, test: str) -> bool:
        """Return whether a test passes without the fault; otherwise deselect it from now on."""
        if "::" not in test or self.run([test]) is None:
            return True
        self.unsound.add(test)
        print(f"    {test} also fails without a fault: left out", flush=True)
        return False


def run(mutant: Mutant, folder: pathlib.Path, tests: Tests, also_slow: bool) -> None:
    """Run a mutant's tests, except those whose outcome is known."""
    path = folder / mutant.file
    source = path.read_text()
    selections = [EVERYDAY] if mutant.kind is None else []
    if also_slow and mutant.kind in (None, "missed"):
        selections.append(SLOW)

    for selection in selections:
        if mutant.equivalent or mutant.caught_by:
            break
        found = first_sound_failure(mutant, path, source, tests, selection)
        mutant.caught_by = found
        mutant.kind = "missed" if found is None else "everyday" if selection == EVERYDAY else "slow"


def first_sound_failure(
    mutant: Mutant, path: pathlib.Path, source: str, tests: Tests, selection: str
) -> str | None:
    """Return the first test that fails because of the fault, None if no test does."""
    while True:
        begin = time.monotonic()
        path.write_text(mutant.fault.plant(source))
        try:
            found = tests.first_failure(path, mutant.fault.line, selection)
        finally:
            path.write_text(source)
        mutant.seconds += time.monotonic() - begin
        if found is None or tests.is_sound(found):
            return found


def table(mutants: Sequence[Mutant]) -> str:
    """Return a line with the outcome of each mutant, and a last line with their counts."""
    lines = [
        f"{mutant.outcome:10} {mutant.seconds:6.0f} s  {mutant.file}:{mutant.fault.line}  "
        f"{mutant.fault.kind}  {mutant.caught_by or ''}"
        for mutant in mutants
    ]
    outcomes = [mutant.outcome for mutant in mutants]
    counts = (f"{outcomes.count(one)} {one}" for one in dict.fromkeys(sorted(outcomes)))
    return "\n".join([*lines, f"{len(mutants)} faults: {', '.join(counts)}"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
