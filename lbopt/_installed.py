"""Which files are of Python and of installed packages, and which are the user's."""

from __future__ import annotations

import os
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
