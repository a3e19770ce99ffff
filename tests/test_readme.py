"""What the README shows works: its example runs, its commands exist, its table is the shipped study's."""

import pathlib
import re

import lbopt
from lbopt.cli import main

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text()


def test_the_example_trains():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 32
    space = {}
    exec(code, space)
    assert space["accuracy"] > 0.95
    assert {"learning_rate", "trust_ratio/head/kernel"} <= set(lbopt.optimizer_metrics(space["opt_state"]))


def test_every_exported_name_is_in_the_readme():
    for name in lbopt.__all__:
        assert f"`{name}`" in README or f"lbopt.{name}" in README, name


def test_every_command_is_in_the_readme():
    for name in main.COMMANDS:
        assert f"    lbopt {name}" in README, name


def test_files_that_are_linked_exist():
    for path in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (pathlib.Path(__file__).parents[1] / path).exists(), path
