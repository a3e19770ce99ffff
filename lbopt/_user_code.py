"""Code of the user: config files, and the functions that a config names.

A place is `module:name` or `file.py:name`. Modules and files are looked for beside the config that
was loaded last, then in the current folder. An object of the running program has a place too.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pathlib
import re
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lbopt import _given, paths
from lbopt._installed import is_of_user
from lbopt.errors import LboptError, UserError, require

_PLACE = re.compile(r"(?P<module>.+\.py|[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*)")
_OF_FILE = "lbopt_config_"
"""Beginning of the names of modules that `import_file` makes."""
_beside: dict[str, str] = {}
"""Module that a file of the user imported from `_import_folders` -> the file's folder."""
_config_folders: list[str] = []


def is_place(text: Any) -> bool:
    """Return whether a value is a text of the form of a place.

    >>> [is_place(text) for text in ("my.module:make", "../net.py:Net", "lamb", "gs://b/c.py")]
    [True, True, False, False]
    """
    is_text = isinstance(text, str)
    return is_text and _PLACE.fullmatch(text) is not None and not paths.is_address(text)


def look_beside(folders: Sequence[str]) -> None:
    """Look for the code of places in these folders first."""
    _config_folders[:] = folders


def config_folder() -> str | None:
    """Return the folder of the config file that was loaded last; None before one was."""
    return _config_folders[0] if _config_folders else None


def code_folders() -> list[str]:
    """Return the folders where the code of places is looked for, in this order."""
    return list(dict.fromkeys([*_config_folders, os.getcwd()]))


def places_of(config: Any) -> Iterator[str]:
    """Yield the places that a config names.

    Args:
      config: The config as JSON data.
    """
    if isinstance(config, dict) and is_place(config.get("name")):
        yield config["name"]
    if isinstance(config, dict | list):
        for value in config.values() if isinstance(config, dict) else config:
            yield from places_of(value)


def module_of(place: str) -> str:
    """Return the module or the file of a place, as the place has it.

    >>> module_of("my.module:make"), module_of("../net.py:Net")
    ('my.module', '../net.py')
    """
    return place.rpartition(":")[0]


def find_file(text: str) -> pathlib.Path | None:
    """Return the file that the text of a place means; None if there is none."""
    return next((file for file in _candidates(text, "place") if file.is_file()), None)


def _candidates(text: str, field: str) -> list[pathlib.Path]:
    given = paths.local(text, field)
    return [pathlib.Path(folder) / given for folder in code_folders()]


def place_of(given: Any, name: str) -> str:
    """Return the place of an object: that of its file or module, or one in this program only.

    Args:
      given: The object.
      name: Name for messages, where the object has none.
    """
    module = sys.modules.get(str(getattr(given, "__module__", "__main__")))
    last = getattr(given, "__name__", "")
    if module is None or module.__name__ == "__main__" or vars(module).get(last) is not given:
        return _given.keep(given, name)
    if not module.__name__.startswith(_OF_FILE):
        return f"{module.__name__}:{last}"
    beside = [folder for folder in code_folders() if _lies_in(folder, module)]
    file = pathlib.Path(_file_of(module))
    return f"{file.relative_to(beside[0]) if beside else file}:{last}"


def load(place: str, field: str) -> Any:
    """Return the object at a place.

    Args:
      place: `module:name` or `file.py:name`.
      field: Field that holds it, for errors.

    Raises:
      UserError: If the text is no place, or the file or the name is not there, or the file cannot
        be imported; it names the file and the line. If the object is of a program that has ended.
    """
    found = _PLACE.fullmatch(place)
    require(found, field, place, "write module:name or file.py:name")
    assert found is not None
    if found["module"] == _given.MODULE:
        try:
            return _given.find(place)
        except LookupError as error:
            fix = "it was an object of a program that has ended; put it into a file, and name that"
            raise UserError(field, place, fix, code="missing") from error
    if found["module"].endswith(".py"):
        module = _module_of_file(place, found["module"], field)
    else:
        module = _module_of_name(place, found["module"], field)
    names = ", ".join(name for name in vars(module) if not name.startswith("_")) or "no name"
    fix = f"{{file}} has no {found['name']}; it has {names[:200]}"
    if not hasattr(module, found["name"]):
        files = {"file": getattr(module, "__file__", None) or module.__name__}
        raise UserError(field, place, fix, code="missing", files=files)
    return getattr(module, found["name"])


def _module_of_file(place: str, text: str, field: str) -> Any:
    candidates = _candidates(text, field)
    file = next((file for file in candidates if file.is_file()), None)
    if file is None:
        where = " or ".join(dict.fromkeys(str(file) for file in candidates))
        fix = f"there is no {where}; give the path from the config's folder"
        raise UserError(field, place, fix, code="missing")
    known = sys.modules.get(_module_name(file))
    return import_file(file, lambda module: module, field, place) if known is None else known


def _module_of_name(place: str, name: str, field: str) -> Any:
    around = code_folders()
    with naming_errors(field, place), _imports_from(around):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            fix = f"there is no module {error.name} in {' or '.join(around)}, nor is it installed"
            raise UserError(field, place, f"{fix}; correct the name", code="missing") from error


def _module_name(file: pathlib.Path) -> str:
    beside = str(file.resolve().parent)
    return f"{_OF_FILE}{file.stem}_{zlib.crc32(os.fsencode(beside)):x}"


def import_file(
    file: pathlib.Path, ask: Callable[[Any], Any], field: str, value: str, anew: bool = False
) -> Any:
    """Import a Python file, and return `ask(module)`; both may import what lies beside the file.

    Args:
      file: The file.
      ask: Function of the module.
      field: Field that names the file, for errors.
      value: Value of that field.
      anew: Whether modules that files of other folders imported are forgotten, because this one may
        mean other modules by the same names.

    Raises:
      UserError: If the file, or `ask`, raises an error; it names the file and the line.
    """
    folders = import_folders(file)
    spec = importlib.util.spec_from_file_location(_module_name(file), file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(spec.name)
    sys.modules[spec.name] = module  # dataclasses look their annotations up there

    if anew:
        for name in [name for name, folder in _beside.items() if folder != folders[0]]:
            sys.modules.pop(name, None)
            del _beside[name]
    try:
        with naming_errors(field, value, str(file)), _imports_from(folders):
            spec.loader.exec_module(module)
            return ask(module)
    except BaseException:
        if before is None:
            sys.modules.pop(spec.name, None)
        else:
            sys.modules[spec.name] = before
        raise


@contextlib.contextmanager
def _imports_from(folders: Sequence[str]) -> Iterator[None]:
    """Let imports inside find the modules of these folders before all others of their names."""
    hidden = _hide_namesakes(folders)
    before = set(sys.modules)
    sys.path[:0] = folders
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for folder in folders:
            with contextlib.suppress(ValueError):  # the file may have removed it
                sys.path.remove(folder)
        new = {name for name in set(sys.modules) - before if name.partition(".")[0] not in before}
        _beside.update(
            (name, folders[0])
            for name in new
            if any(_lies_in(folder, sys.modules[name]) for folder in folders)
        )
        for name, namesake in hidden.items():
            sys.modules[name] = namesake
            _beside.pop(name, None)


def import_folders(file: pathlib.Path) -> list[str]:
    """Return the folders from which a file may import: its own, and perhaps the one above.

    The folder above counts if it has a `common.py` and the file's own folder has none, so that
    studies share the modules of the recipes above them. Otherwise any Python file above a user's
    config could take the place of an installed module of the same name.
    """
    own = file.resolve().parent
    here, above = (os.path.isfile(folder / "common.py") for folder in (own, own.parent))
    return [str(own), str(own.parent)] if above and not here else [str(own)]


def _hide_namesakes(folders: Sequence[str]) -> dict[str, Any]:
    """Take modules of other places that have the name of a file in `folders` out of `sys.modules`.

    A program may have imported a `common` of its own before it loads a config beside another one.
    """
    places = {
        file.stem: folder
        for folder in reversed(folders)  # of two files of one name, the first folder's is imported
        for file in pathlib.Path(folder).glob("*.py")
    }
    return {
        name: sys.modules.pop(name)
        for name in places.keys() & sys.modules.keys() - sys.stdlib_module_names
        if not _lies_in(places[name], sys.modules[name])
    }


def _lies_in(folder: str, module: Any) -> bool:
    """Return whether a module came from `folder`, but not from a longer path in it (a `.venv`)."""
    file = _file_of(module)
    above = [
        other for other in (folder, *sys.path) if file.startswith(other.rstrip(os.sep) + os.sep)
    ]
    return max(above, key=len, default=None) == folder


@contextlib.contextmanager
def naming_errors(field: str, value: Any, file: str | None = None) -> Iterator[None]:
    """Turn exceptions that the user's code raises inside into a `UserError` with file and line.

    Errors of lbopt pass.

    Args:
      field: Field that names the code.
      value: Value of that field.
      file: File to name if the exception met no line of the user's code; None where `value` tells.
    """
    try:
        yield
    except LboptError:
        raise
    except (Exception, SystemExit) as error:
        line = _line_of_user(error)
        what = " ".join(f"{type(error).__name__}: {error}{_line_refused(error)}".split())[:300]
        if line is None and file is None:
            raise UserError(field, value, f"{what}; correct it", code="damaged") from error
        where = "{file}" if line is None else f"{{file}}, line {line[1]}"
        files = {"file": file if line is None else line[0]}
        fix = f"{where}: {what}; correct it"
        raise UserError(field, value, fix, code="damaged", files=files) from error


def _line_of_user(error: BaseException) -> tuple[str, int] | None:
    """Return the file of the user and the line at which an exception was raised; None without."""
    if isinstance(error, SyntaxError) and error.filename and is_of_user(error.filename):
        return error.filename, error.lineno or 1
    frames = traceback.extract_tb(error.__traceback__)
    lines = [(frame.filename, frame.lineno or 1) for frame in frames if is_of_user(frame.filename)]
    return lines[-1] if lines else None


def _line_refused(error: BaseException) -> str:
    """Return the line that Python cannot read, in words; "" for other errors."""
    text = error.text if isinstance(error, SyntaxError) else None
    return f" in {text.strip()!r}" if text and text.strip() else ""


def _file_of(module: Any) -> str:
    """Return the file of a module; "" for None, and for a module without a file."""
    return str(getattr(module, "__file__", None) or "")
