"""Config files: by their paths, and the recipes that come with lbopt by their names.

`digits_cnn` and `sweeps/digits_limit` are names; so is `digits_limit`, as long as it means one
recipe only.
"""

from __future__ import annotations

import ast
import difflib
import os
import pathlib
import re
from collections.abc import Iterator

from lbopt import _installed, paths
from lbopt.errors import UserError

_NAME = re.compile(r"[\w-]+(/[\w-]+)*")
_NEAR = 3
"""Names that an error suggests, at most."""


def shipped_recipes() -> pathlib.Path:
    """Return the folder of the recipes that come with lbopt."""
    return _installed.shipped("configs")


def config_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the config files below a folder, sorted: the Python files that define `get_config`."""
    return [file for file in sorted(folder.rglob("*.py")) if _defines_get_config(file)]


def _defines_get_config(file: pathlib.Path) -> bool:
    try:
        body = ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError):
        return True  # loading it says what is wrong
    return any(isinstance(node, ast.FunctionDef) and node.name == "get_config" for node in body)


def name_of(file: pathlib.Path, folder: pathlib.Path) -> str:
    """Return the name of a config file below a folder of recipes."""
    return file.relative_to(folder).with_suffix("").as_posix()


def split_row(flag: str, folder: str = "") -> tuple[str, str]:
    """Return the path and the row of `FILE[:ROW]` or `NAME[:ROW]`; both may contain colons.

    A name means NAME.py or configs/NAME.py, or else the recipe of lbopt. What is neither a file nor
    a known name is returned as it is.

    Args:
      flag: The text of `--config`.
      folder: Folder where relative paths begin; "" for the current one.

    Raises:
      UserError: If FILE is an address, or if a name means several recipes.
    """
    cuts = [index for index, letter in enumerate(flag) if letter == ":"] + [len(flag)]
    for cut in cuts:
        path = os.path.join(folder, os.path.expanduser(flag[:cut]))
        if os.path.isfile(path):
            return (path if folder else flag[:cut]), flag[cut + 1 :]

    paths.local(flag, "--config")
    path = flag[: cuts[0]]
    named = _named(path, pathlib.Path(folder)) if _NAME.fullmatch(path) else None
    return str(named or path), flag[cuts[0] + 1 :]


def _named(name: str, folder: pathlib.Path) -> pathlib.Path | None:
    """Return the config file that a name means; None if there is none."""
    if (folder / f"{name}.py").is_file():
        return folder / f"{name}.py"
    for recipes in (folder / "configs", shipped_recipes()):
        found = list(_below(recipes, name))
        if len(found) > 1:
            names = " or ".join(name_of(file, recipes) for file in found)
            fix = f"{len(found)} recipes have this name; give {names}"
            raise UserError("--config", name, fix, code="choice")
        if found:
            return found[0]
    return None


def _below(recipes: pathlib.Path, name: str) -> Iterator[pathlib.Path]:
    """Yield the config files of a name in a folder: the exact one, or those of subfolders."""
    exact = recipes / f"{name}.py"
    candidates = [exact] if exact.is_file() else sorted(recipes.rglob(f"*/{name}.py"))
    yield from filter(_defines_get_config, candidates)


def hint(path: str) -> str:
    """Return what to give for a path or name of no config file."""
    recipes = shipped_recipes()
    names = [name_of(file, recipes) for file in config_files(recipes)]
    asked = path.removesuffix(".py").removeprefix("configs/")
    if asked in names:
        return f"the recipe that comes with lbopt is --config={asked}"
    last = {name.rpartition("/")[2]: name for name in names}
    near = difflib.get_close_matches(asked.rpartition("/")[2], last, n=_NEAR)
    if not near:
        return "give a file, or a name that lbopt recipes lists"
    return f"did you mean {' or '.join(last[name] for name in near)}? (lbopt recipes lists all)"
