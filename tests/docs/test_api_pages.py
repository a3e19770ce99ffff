"""The API pages name what there is, and every public name has an example and its arguments."""

import dataclasses
import doctest
import importlib
import inspect
import pathlib
import re
import sys

import flax.linen as nn
import pytest

import lbopt

DOCS = pathlib.Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))

from _site import api  # noqa: E402

NAMES = list(api.documented())
WITH_ARGUMENTS = [name for name in NAMES if not api.is_data(name)]


def test_every_exported_name_has_an_entry():
    assert {f"lbopt.{name}" for name in lbopt.__all__} <= set(NAMES)


def test_every_module_has_a_page_and_every_page_a_place_in_the_contents():
    pages = {module.removeprefix("lbopt.") for module in api.MODULES}
    folder = DOCS / "reference" / "api"
    assert {page.stem for page in folder.glob("*.md")} == {*pages, "index"}
    contents = re.findall(r"<(\w+)>$", (folder / "index.md").read_text(), re.MULTILINE)
    assert set(contents) == pages
    for page in pages:
        module = "lbopt" if page == "lbopt" else f"lbopt.{page}"
        assert f'api("{module}")' in (folder / f"{page}.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_a_name_exists_and_has_an_example(name):
    assert ">>>" in api.docstring(name)


@pytest.mark.parametrize("name", WITH_ARGUMENTS)
def test_a_docstring_covers_the_arguments(name):
    told = set(re.findall(r"^ +\*{0,2}(\w+): ", api.docstring(name), re.MULTILINE))
    assert {argument for argument in _arguments(api.target(name)) if argument not in told} == set()


def _arguments(target):
    """Return the names of the arguments that a docstring must explain."""
    if inspect.isclass(target) and (
        issubclass(target, Exception) or getattr(target, "_is_protocol", False)
    ):
        return []  # LboptError explains those of all errors
    found = [name for name in inspect.signature(target).parameters if name[0] != "_"]
    if inspect.isclass(target) and issubclass(target, nn.Module):
        found = [name for name in found if name not in ("parent", "name")]
    if dataclasses.is_dataclass(target):
        groups = {field.name for field in dataclasses.fields(target) if _is_group(field.type)}
        found = [name for name in found if name not in groups]
    return found


def _is_group(kind):
    """Return whether a field holds a group of a config, whose own docstring explains it."""
    return dataclasses.is_dataclass(kind) and kind.__module__.startswith("lbopt.config")


@pytest.mark.parametrize("name", [name for name in NAMES if api.is_data(name)])
def test_the_example_of_a_value_runs(name):
    """pytest finds the examples of functions and classes by itself."""
    _run(name, api.docstring(name))


LONG = [name for name in NAMES if "+SKIP" in api.docstring(name)]
PLANS = [name for name in LONG if name.startswith("lbopt.plan.") or name == "lbopt.run_plan"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.tpu_compiler] if name in PLANS else [])
        for name in LONG
    ],
)
def test_an_example_that_takes_long_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name in PLANS:
        pytest.importorskip("libtpu")
    _run(name, re.sub(r" +# doctest: \+SKIP", "", api.docstring(name)))


def _run(name, text):
    target = api.target(name)
    home = getattr(inspect.unwrap(target), "__module__", None) or type(target).__module__
    space = dict(vars(importlib.import_module(home)))
    test = doctest.DocTestParser().get_doctest(text, space, name, None, 0)
    printed = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=printed.append)
    assert result.attempted
    assert not result.failed, "".join(printed)
