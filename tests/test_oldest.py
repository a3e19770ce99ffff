"""The lower bounds of pyproject.toml are the versions that scripts/test --oldest installs."""

import pathlib
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = pathlib.Path(__file__).parents[1]
UNTESTED = {"bench", "dev", "docs"}
"""Extras for work on lbopt itself, used with the newest versions only."""


def test_lower_bounds_are_the_versions_that_are_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    lines = (ROOT / "scripts" / "constraints-oldest.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    # The oldest wheels of some packages are for Python 3.11 only; later Pythons have other lines.
    oldest = {
        canonicalize_name(pin.name): _lowest(pin)
        for pin in pins
        if pin.marker is None or pin.marker.evaluate({"python_version": "3.11"})
    }
    wrong = [
        f"{line} of extra {extra!r}"
        for extra in extras.keys() - UNTESTED
        for line in extras[extra]
        for needed in [Requirement(line)]
        if needed.name != "lbopt" and _lowest(needed) != oldest[canonicalize_name(needed.name)]
    ]
    assert not wrong, wrong


def _lowest(requirement):
    bounds = [one.version for one in requirement.specifier if one.operator in (">=", "==")]
    return Version(bounds[0]) if bounds else None
