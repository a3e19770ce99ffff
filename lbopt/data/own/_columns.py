"""Named arrays from files: NumPy's formats, memory-mapped, and tables read by pyarrow."""

from __future__ import annotations

import pathlib
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lbopt.errors import MissingPackage, UserError, require

TABLES = (".csv", ".tsv", ".parquet", ".feather", ".arrow")
"""Suffixes of tables, whose columns are one feature each."""
FORMATS = (".npz", ".npy", *TABLES)


def read_columns(path: pathlib.Path, field: str = "path") -> dict[str, np.ndarray]:
    """Return the arrays of a file, or of the .npy files of a folder, by name.

    Arrays of .npy files and of uncompressed .npz files are memory-mapped.

    Args:
      path: The file or folder.
      field: Parameter that holds it, for errors.

    Raises:
      UserError: If it is missing, of another format or damaged, if its arrays hold Python objects,
        or if a column of a table is neither of numbers nor of text, or has missing values.
      EnvironmentProblem: If pyarrow is needed and is not installed.
    """
    fix = "there is nothing; give a file or a folder"
    require(path.exists(), field, str(path), fix, code="missing")
    fix = f"its format is unknown; give a folder of .npy files, or one of {', '.join(FORMATS)}"
    require(path.is_dir() or path.suffix in FORMATS, field, str(path), fix, code="choice")
    try:
        found = _reader(path)(path)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        if isinstance(error, UserError):
            raise
        cause = " ".join(str(error).split())[:200]
        fix = f"it cannot be read ({cause}); repair it"
        raise UserError(field, str(path), fix, code="damaged") from error
    fix = "there is no array in it; give one that has some (for images, image_folder)"
    require(found, field, str(path), fix)
    return found


def _reader(path: pathlib.Path) -> Callable[[pathlib.Path], dict[str, np.ndarray]]:
    if path.is_dir():
        return _npy_folder
    return {".npz": _npz, ".npy": _npy}.get(path.suffix, _table)


def _npy_folder(folder: pathlib.Path) -> dict[str, np.ndarray]:
    return {
        file.stem: np.load(file, mmap_mode="r", allow_pickle=False)
        for file in sorted(folder.glob("*.npy"))
    }


def _npy(file: pathlib.Path) -> dict[str, np.ndarray]:
    array = np.load(file, mmap_mode="r", allow_pickle=False)
    if array.dtype.names is None:
        raise ValueError("one array without names of columns")
    return {name: array[name] for name in array.dtype.names}


def _npz(file: pathlib.Path) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(file) as archive, np.load(file, allow_pickle=False) as loaded:
        members = {info.filename: info for info in archive.infolist()}
        return {
            name: _mapped(file, members[f"{name}.npy"])
            if members[f"{name}.npy"].compress_type == zipfile.ZIP_STORED
            else loaded[name]
            for name in loaded.files
        }


def _mapped(file: pathlib.Path, member: zipfile.ZipInfo) -> np.ndarray:
    """Return an uncompressed array of a .npz file, memory-mapped at its place."""
    with open(file, "rb") as opened:
        # The header in front of a member: 30 bytes, then its name and extra field.
        opened.seek(member.header_offset + 26)
        lengths = np.frombuffer(opened.read(4), "<u2")
        opened.seek(member.header_offset + 30 + int(lengths.sum()))
        version = np.lib.format.read_magic(opened)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }
        shape, fortran, dtype = read[version](opened)
        offset = opened.tell()
    if dtype.hasobject:
        raise ValueError("an array of Python objects")
    if 0 in shape:
        return np.empty(shape, dtype)
    order: Any = "F" if fortran else "C"
    return np.memmap(file, dtype, "r", offset, shape, order)


def _table(file: pathlib.Path) -> dict[str, np.ndarray]:
    table = _read_table(file)
    names = table.column_names
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"column {repeated[0]!r} is there twice")
    return {name: _column(name, table.column(name)) for name in names}


def _read_table(file: pathlib.Path) -> Any:
    try:
        import pyarrow.csv
        import pyarrow.feather
        import pyarrow.parquet
    except ImportError as error:
        fix = f"it reads tables, and is not installed ({error}): pip install 'lbopt[tables]'"
        raise MissingPackage("pyarrow", reason=fix) from error
    if file.suffix in (".csv", ".tsv"):
        separator = {".csv": ",", ".tsv": "\t"}[file.suffix]
        return pyarrow.csv.read_csv(
            file, parse_options=pyarrow.csv.ParseOptions(delimiter=separator)
        )
    if file.suffix == ".parquet":
        return pyarrow.parquet.read_table(file)
    return pyarrow.feather.read_table(file, memory_map=True)


def _column(name: str, column: Any) -> np.ndarray:
    """Return a column as an array [rows], of numbers, bools or text; dates are text."""
    if column.null_count:
        raise ValueError(f"column {name!r} lacks {column.null_count} values")
    import pyarrow.types as kinds

    kind = column.type
    if kinds.is_dictionary(kind):
        kind = kind.value_type
    if kinds.is_temporal(kind):
        column = column.cast("string")
        kind = column.type
    plain = (kinds.is_integer, kinds.is_floating, kinds.is_boolean)
    text = (kinds.is_string, kinds.is_large_string)
    if not any(is_kind(kind) for is_kind in (*plain, *text)):
        raise ValueError(f"column {name!r} is of {kind}, not of numbers or text")
    values = column.to_numpy()
    return values.astype(str) if any(is_kind(kind) for is_kind in text) else values


def columns_of(given: Any, field: str = "path") -> dict[str, np.ndarray]:
    """Return the arrays of a mapping, or the columns of a table of pandas, by name.

    Args:
      given: The object.
      field: Parameter that holds it, for errors.

    Raises:
      UserError: If it is something else, or has no array, or holds Python objects.
    """
    is_table = hasattr(given, "columns") and hasattr(given, "to_numpy")
    if not is_table and not isinstance(given, Mapping):
        fix = "give arrays by name, a table of pandas, a file or a folder"
        raise UserError(field, type(given).__name__, fix, code="type")
    names = list(given.columns if is_table else given)
    found = {str(name): _plain(np.asarray(given[name])) for name in names}
    require(found, field, names, "there is no array in it; give one that has some")
    for name, array in found.items():
        fix = f"{name!r} holds objects, or lacks values; give numbers or text"
        require(array.dtype.kind in "biufUS", field, str(array.dtype), fix, code="type")
    return found


def _plain(array: np.ndarray) -> np.ndarray:
    """Return an array of text for one of dates, or of objects that are all text."""
    is_text = array.dtype == object and all(isinstance(value, str) for value in array.flat)
    return array.astype(str) if is_text or array.dtype.kind == "M" else array


def lengths(columns: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Return the number of rows of each array; raise `UserError` for arrays that differ."""
    found = {name: len(array) if array.ndim else 0 for name, array in columns.items()}
    fix = "these are numbers of examples; give arrays of one length"
    require(len(set(found.values())) == 1, "path", found, fix, code="mismatch")
    return found
