"""Which files are of Python and of installed packages, which the user's, and which lbopt's own."""

from __future__ import annotations

import os
import pathlib
import site
import sysconfig


def is_of_user(file: str) -> bool:
    """Return whether a file is neither Python's, nor of lbopt or another installed package."""
    if file.startswith("<"):
        return False
    real = os.path.realpath(file)
    return not any(real.startswith(folder + os.sep) for folder in _installed())


def _installed() -> list[str]:
    """Return the folders of Python, of installed packages and of lbopt."""
    packages = [*site.getsitepackages(), site.getusersitepackages()]
    python = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    own = os.path.dirname(__file__)
    return [os.path.realpath(folder) for folder in (*packages, *python, own)]


def shipped(name: str) -> pathlib.Path:
    """Return a file or folder that comes with lbopt beside its modules, such as `configs`.

    A wheel has them in `lbopt/_shipped`. In a checkout they are beside the package.
    """
    own = pathlib.Path(__file__).parent
    in_wheel = own / "_shipped"
    return (in_wheel if in_wheel.is_dir() else own.parent) / name
