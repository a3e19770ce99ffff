"""Which tests execute which line of lbopt, measured by coverage in one run of the suite.

The lines of a process that a test starts belong to that test. Functions that JAX traces run once: a
later test that uses the compiled program does not execute their lines.
"""

import ast
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

import coverage
import pytest

TEST = "LBOPT_REACHING_TEST"
SETTINGS = f"""
[run]
source = lbopt
data_file = {{data}}
parallel = true
context = ${{{{{TEST}-}}}}
disable_warnings = module-not-imported,no-data-collected,module-not-measured
"""


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Give the lines of this process and of those that it starts to the test that runs."""
    os.environ[TEST] = item.nodeid
    measuring = coverage.Coverage.current()
    if measuring is not None:
        measuring.switch_context(item.nodeid)
    yield


class ReachedLines:
    """The tests that execute a line.

    Args:
      root: The tree's folder, with `lbopt/` and `tests/` in it.
      data: Coverage's data file, written by `measure`; its tree may have been another copy.
    """

    def __init__(self, root: pathlib.Path, data: pathlib.Path):
        self.root = root
        self.data = coverage.CoverageData(str(data))
        self.data.read()

    def tests(self, module: pathlib.Path, line: int) -> set[str] | None:
        """Return the ids of the tests that execute the statement on a line.

        None if it is executed as the module is imported, which is every test's concern.
        """
        span = _lines_of_statement(ast.parse((self.root / module).read_text()), line)
        if span is None:
            return None
        measured = (name for name in self.data.measured_files() if name.endswith(f"/{module}"))
        reached = [self.data.contexts_by_lineno(name) for name in measured]
        return {test for lines in reached for number in span for test in lines.get(number, ())} - {
            ""
        }


def measure(root: pathlib.Path, data: pathlib.Path, arguments: Sequence[str]) -> None:
    """Run pytest with these arguments in a tree and write which tests reach which lines."""
    settings = data.with_suffix(".ini")
    settings.write_text(SETTINGS.format(data=data))
    coverage_of_it = [sys.executable, "-m", "coverage"]
    environment = {
        **os.environ,
        TEST: "",
        "COVERAGE_PROCESS_START": str(settings),  # each process reads its own context there
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "scripts")]),
    }
    options = [f"--rcfile={settings}"]
    run = [*coverage_of_it, "run", *options, "-m", "pytest", "-p", "reached_lines", *arguments]
    subprocess.run(run, cwd=root, env=environment)  # a test that fails under coverage counts too
    subprocess.run([*coverage_of_it, "combine", "-q", *options], cwd=root, check=True)


def _lines_of_statement(tree: ast.Module, line: int) -> range | None:
    """Return the lines of the innermost statement on a line, None outside of functions."""
    around = [  # from the outermost to the innermost
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and _first_line(node) <= line <= (node.end_lineno or 0)
    ]
    *outer, statement = around
    if not any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in outer):
        return None

    body = (node for node in ast.walk(statement) if isinstance(node, ast.stmt))
    begin = _first_line(statement)
    inner = [_first_line(node) for node in body if node is not statement]
    end = max(begin, min(inner) - 1) if inner else statement.end_lineno or begin
    return range(begin, end + 1)


def _first_line(statement: ast.stmt) -> int:
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(node.lineno for node in decorators)])
