"""The imports between files of this repository, and the distance of a test from a module."""

import ast
import collections
import functools
import pathlib
import re

TEST_FOLDERS = ("tests", "tests/oracles", "tests/plan", "tests/train")
"""Folders whose modules tests import by bare names; see `pythonpath` in pyproject.toml."""
READ = {
    "tests/docs": ("README.md", "docs"),
    "tests/test_wheel.py": ("README.md", "pyproject.toml", "setup.py"),
    "tests/tpu": ("tpu",),
}
"""Tests -> files and folders that they read or run, beside what they import."""
_MODULE = re.compile(r"lbopt(\.\w+)+\.?")


class ImportGraph:
    """The imports of all Python files of a tree.

    Args:
      root: Folder of the tree, which contains `lbopt/` and `tests/`.
    """

    def __init__(self, root: pathlib.Path):
        self.root = root
        folders = ("lbopt", "tests", "configs", "scripts", "tpu", "examples")
        paths = (path for folder in folders for path in sorted((root / folder).rglob("*.py*")))
        self.files = [path for path in paths if path.suffix in (".py", ".pyi")]
        self.modules = {self._name(path): path for path in self.files if path.suffix == ".py"}
        self.configs = {
            path.stem: path
            for path in self.files
            if "configs" in path.parts and path.stem != "common"
        }

    def distances(self, test: pathlib.Path) -> dict[pathlib.Path, int]:
        """Return all files that a test imports, also indirectly, with their distance in imports."""
        found = {test: 0}
        waiting = collections.deque([test])
        while waiting:
            path = waiting.popleft()
            for imported in self.imports(path):
                if imported not in found:
                    found[imported] = found[path] + 1
                    waiting.append(imported)
        return found

    def nearest_tests(self, changed: set[pathlib.Path]) -> dict[pathlib.Path, int]:
        """Return the test files that reach a changed file, with their distance from it.

        They are sorted by distance; at equal distance, tests of the changed package come first.
        """
        packages = {
            path.relative_to(self.root).parts[1] for path in changed if "lbopt" in path.parts
        }
        found = {}
        for test in self.tests():
            reached = self.distances(test)
            near = [reached[path] for path in changed if path in reached]
            if near:
                found[test] = min(near)

        def order(test: pathlib.Path) -> tuple[int, bool, pathlib.Path]:
            return found[test], test.relative_to(self.root).parts[1] not in packages, test

        return {test: found[test] for test in sorted(found, key=order)}

    def tests(self) -> list[pathlib.Path]:
        """Return all test files."""
        return [path for path in self.files if path.name.startswith("test_")]

    @functools.cache  # noqa: B019  the only graph lives as long as the program
    def imports(self, path: pathlib.Path) -> frozenset[pathlib.Path]:
        """Return the files that one file needs: imported modules, fixtures and named configs."""
        if path.suffix not in (".py", ".pyi"):
            return frozenset()
        text = path.read_text()
        tree = ast.parse(text)
        names = _names(tree)
        found = {file for name in names for file in self._files(name)}

        if "configs" in path.parts:  # its own folder and perhaps the one above are on the path
            modules = {f"{name.partition('.')[0]}.py" for name in names}
            beside = {folder / module for folder in path.parents[:2] for module in modules}
            found |= beside & set(self.files)
        if "tests" in path.parts:
            found |= self._fixtures(path)
            words = set(re.findall(r"\w+", text))
            found |= {file for stem, file in self.configs.items() if stem in words}
        for place, read in READ.items():
            if self.root / place in (path, *path.parents):
                found |= {file for name in read for file in _below(self.root / name)}
        return frozenset(found - {path})

    def _fixtures(self, path: pathlib.Path) -> set[pathlib.Path]:
        folders = [folder for folder in path.parents if self.root in folder.parents]
        return {file for folder in folders if (file := folder / "conftest.py").exists()}

    def _name(self, path: pathlib.Path) -> str:
        names = path.relative_to(self.root).with_suffix("").parts
        return ".".join(names[:-1] if names[-1] == "__init__" else names)

    def _files(self, name: str) -> set[pathlib.Path]:
        """Return the files of a dotted name, which may end in names that a module defines."""
        if name.endswith("."):  # a prefix that the code completes to a module's name
            return {path for module, path in self.modules.items() if module.startswith(name)}
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            module = ".".join(parts[:end])
            path = self.modules.get(module) or self._beside_tests(module)
            if path is not None:
                reexported = self._reexports(path).get(parts[end]) if end < len(parts) else None
                return {path} | (self._files(reexported) if reexported else set())
        return set()

    def _beside_tests(self, module: str) -> pathlib.Path | None:
        prefixes = (folder.replace("/", ".") for folder in TEST_FOLDERS)
        return next(
            (self.modules[n] for p in prefixes if (n := f"{p}.{module}") in self.modules), None
        )

    @functools.cache  # noqa: B019
    def _reexports(self, path: pathlib.Path) -> dict[str, str]:
        """Return a mapping from the public names of a package to dotted names of their sources."""
        if path.name != "__init__.py":
            return {}
        stub = path.with_suffix(".pyi")
        tree = ast.parse((stub if stub.exists() else path).read_text())
        here = self._name(path)
        found = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                module = f"{here}.{node.module}" if node.level else str(node.module)
                found |= {
                    alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names
                }
        return found


def _below(place: pathlib.Path) -> set[pathlib.Path]:
    """Return the files of a folder, or a file."""
    return set(place.rglob("*")) if place.is_dir() else {place}


def _names(tree: ast.Module) -> set[str]:
    """Return the dotted names that a file imports, also inside functions and by strings."""
    found = set()
    roots = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            roots |= {alias.asname or alias.name.split(".")[0]: alias for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and _MODULE.fullmatch(str(node.value)):
            found.add(str(node.value))

    # `lbopt.lamb` after `import lbopt`: the attribute decides which module the package imports.
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            alias = roots.get(node.value.id)
            if alias is not None:
                whole = alias.name if alias.asname else node.value.id
                found.add(f"{whole}.{node.attr}")
    return found
