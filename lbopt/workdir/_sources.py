"""Source files of the user's code: those that a config names, and those that they import.

They are found by their import statements, and nothing is imported: the record of a run can be
compared by programs that do not run its code.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import posixpath
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lbopt import _user_code
from lbopt._installed import is_of_user
from lbopt.errors import UserError


class Sources(NamedTuple):
    """The user's code.

    Attributes:
      files: Name -> content. A name is a path from the folder of the code, "net.py" or
        "my/module.py", and the same wherever that folder is.
      packages: Top-level names of the installed packages that they import.
    """

    files: dict[str, bytes]
    packages: set[str]


class _Module(NamedTuple):
    """A source file, and how its imports are understood.

    Attributes:
      name: Its name among the sources.
      file: The file.
      package: The dotted package that its relative imports start from; "" for none.
      roots: (beginning of names, folder) of the folders that imports look into first.
    """

    name: str
    file: pathlib.Path
    package: str
    roots: tuple[tuple[str, str], ...]


def read_sources(config: Any) -> Sources:
    """Return the files of the places in a config, and the user's files that they import.

    A file that is missing is left out: loading it says so.

    Args:
      config: The config as JSON data.
    """
    found = Sources({}, set())
    seen: set[str] = set()
    waiting = [module for place in _user_code.places_of(config) for module in _entries(place)]
    while waiting:
        module = waiting.pop()
        real = os.path.realpath(module.file)
        if real in seen or not is_of_user(real):
            continue
        seen.add(real)
        with contextlib.suppress(OSError):
            content = module.file.read_bytes()
            found.files[module.name if module.name not in found.files else real] = content
            waiting += _imported(module, content, found.packages)
    return Sources(dict(sorted(found.files.items())), found.packages)


def versions_of(packages: set[str]) -> dict[str, str | None]:
    """Return the versions of installed packages, by the names under which they are installed."""
    found: dict[str, str | None] = {}
    for package in sorted(packages):
        for name in _installed_names(package):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(name)
    return found


def _installed_names(package: str) -> list[str]:
    """Return the names under which a package is installed: dm-haiku for haiku."""
    try:
        importlib.metadata.version(package)
        return [package]
    except importlib.metadata.PackageNotFoundError:
        return _distributions().get(package, [])


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """Return the names of distributions by package; slow, as it reads the files of all."""
    return importlib.metadata.packages_distributions()


def digest(content: bytes) -> str:
    """Return the SHA-256 of a file's content."""
    return hashlib.sha256(content).hexdigest()


def is_same_code(before: bytes, now: bytes) -> bool:
    """Return whether two Python files differ in comments, docstrings and layout at most.

    A `get_config` does not count either: its result is compared, field by field.
    """
    if before == now:
        return True
    try:
        return ast.dump(_code_of(before)) == ast.dump(_code_of(now))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def unified_diff(name: str, before: bytes, now: bytes) -> list[str]:
    """Return the lines of a unified diff of two versions of a file."""
    old, new = (each.decode("utf-8", "replace").splitlines() for each in (before, now))
    shown = (f"{name} (recorded)", f"{name} (now)")
    return list(difflib.unified_diff(old, new, *shown, lineterm=""))


def _code_of(content: bytes) -> ast.Module:
    """Return the tree of a file without what does not matter for results."""
    tree = ast.parse(content)
    tree.body = [node for node in tree.body if not _is_get_config(node)]
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
    return tree


def _is_get_config(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "get_config"


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


# ---- from imports to files


def _entries(place: str) -> list[_Module]:
    """Return the modules that loading a place imports."""
    text = _user_code.module_of(place)
    if not text.endswith(".py"):
        roots = tuple(("", folder) for folder in _user_code.code_folders())
        return _modules_of(text, roots, set())
    try:
        file = _user_code.find_file(text)
    except UserError:  # as loading it will say
        file = None
    if file is None:
        return []
    name = posixpath.normpath(pathlib.PurePath(text).as_posix())
    own = file.resolve().parent
    above = posixpath.dirname(name)
    roots = tuple(
        (posixpath.normpath(posixpath.join(above, os.path.relpath(folder, own))), folder)
        for folder in _user_code.import_folders(file)
    )
    return [_Module(name, file, "", roots)]


def _imported(module: _Module, content: bytes, packages: set[str]) -> Iterator[_Module]:
    """Yield the modules of the user that a file imports; add other packages to `packages`."""
    try:
        body = ast.parse(content).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # loading it says so
    nodes = [each for node in body if not _is_get_config(node) for each in ast.walk(node)]
    for name in sorted({name for node in nodes for name in _names_in(node, module.package)}):
        yield from _modules_of(name, module.roots, packages)


def _names_in(node: ast.AST, package: str) -> Iterator[str]:
    """Yield the dotted names that an import statement may import, modules or not."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parts = package.split(".") if package else []
        above = parts[: len(parts) - node.level + 1] if node.level else []
        base = ".".join([*above, *filter(None, [node.module])])
        yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names)


def _modules_of(name: str, roots: Sequence[tuple[str, str]], packages: set[str]) -> list[_Module]:
    """Return the files of the user that importing a dotted name would run.

    These are the packages above it too. A name after the last module is that of an object.
    """
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top == "lbopt":
        return []
    for above, folder in roots:
        if found := _modules_in(folder, above, name, roots):
            return found
    for folder in _installed_folders(top, packages):
        if found := _modules_in(folder, "", name, roots):
            return found
    return []


def _modules_in(
    folder: str, above: str, name: str, roots: Sequence[tuple[str, str]]
) -> list[_Module]:
    """Return the modules on the way to a dotted name in a folder, from the outermost package on.

    Args:
      folder: The folder.
      above: Beginning of the names of its sources.
      name: The dotted name.
      roots: The roots of the modules.
    """
    found = []
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        path = "/".join(parts[:count])
        for ending, depth in (("/__init__.py", count), (".py", count - 1)):
            file = pathlib.Path(folder, path + ending)
            if file.is_file():
                shown = posixpath.normpath(posixpath.join(above, path + ending))
                found.append(_Module(shown, file, ".".join(parts[:depth]), tuple(roots)))
                break
    return found


def _installed_folders(top: str, packages: set[str]) -> list[str]:
    """Return the folders on Python's path in which a module of the user lies.

    Args:
      top: Name of the module or package.
      packages: Gets the name, if it is an installed package.
    """
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    files = [spec.origin] if spec.has_location and spec.origin else []
    places = list(spec.submodule_search_locations or files)
    if places and not is_of_user(os.path.join(places[0], "__init__.py")):
        packages.add(top)
        return []
    return [os.path.dirname(place) for place in places]
