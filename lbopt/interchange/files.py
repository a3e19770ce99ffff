"""Safetensors files: headers first, arrays when everything about them is known to be right."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypedDict

import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

from lbopt import typed_json
from lbopt.errors import EnvironmentProblem, UserError, brief
from lbopt.regular import open_regular
from lbopt.shown import one_line

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack")
FLOATS = ("F64", "F32", "F16", "BF16")
MOST_TENSORS = 1 << 16
"""In one file: the largest networks that are read here have about a thousand."""


class _Tensor(TypedDict):
    dtype: str
    shape: list[typed_json.Count]
    data_offsets: tuple[typed_json.Count, typed_json.Count]


class Entry(NamedTuple):
    """What a header says of a tensor.

    Attributes:
      file: where it is.
      name: under which it is there.
      shape: of the array.
      dtype: as safetensors spells it, for instance "BF16".
    """

    file: pathlib.Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def weight_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """Return the safetensors files of a `transformers` folder: one, or those that its index lists.

    Raises:
      UserError: if there are none; also if there are only pickles, which run code when they are read.
    """
    if is_there(directory / WEIGHTS):
        return [directory / WEIGHTS]
    if is_there(directory / INDEX):
        return [_shard(directory, name) for name in _shard_names(directory / INDEX)]
    for name in PICKLES:
        if is_there(directory / name):
            raise UserError(
                f"{directory / name}: only safetensors are read; load it with transformers and save it again "
                "(save_pretrained(folder, safe_serialization=True))"
            )
    raise UserError(f"{directory}: it has no {WEIGHTS}; give the folder that save_pretrained wrote")


def _shard_names(index: pathlib.Path) -> list[str]:
    names = read_json(index).get("weight_map")
    if (
        not isinstance(names, dict)
        or not names
        or not all(isinstance(name, str) for name in names.values())
    ):
        raise UserError(
            f"{index}: weight_map = {str(names)[:60]!r}: it names no files; save the model again"
        )
    return sorted(set(names.values()))


def is_there(path: pathlib.Path) -> bool:
    """Return whether there is a file or a folder.

    Raises:
      UserError: if the name is too long for there to be one.
      EnvironmentProblem: if the system cannot look for it.
    """
    try:
        return path.exists()
    except OSError as error:
        kind = UserError if error.errno == errno.ENAMETOOLONG else EnvironmentProblem
        raise kind(
            f"{brief(str(path))}: it cannot be looked for ({error.strerror}); use another path"
        ) from error


def _shard(directory: pathlib.Path, name: str) -> pathlib.Path:
    if pathlib.PurePath(name).name != name or name in ("", ".."):
        raise UserError(
            f"{directory / INDEX}: weight_map names {brief(name)}, which is outside of the folder or no name; save the model again"
        )
    try:
        there = (directory / name).exists()
    except OSError as error:
        raise UserError(
            f"{directory / INDEX}: weight_map names {brief(name)}: {error.strerror}; save the model again"
        ) from error
    if not there:
        raise UserError(
            f"{one_line(str(directory / name))}: {INDEX} lists it and it is missing; copy it too, or save the model again"
        )
    return directory / name


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
      UserError: if it holds none.
      EnvironmentProblem: if it cannot be read.
    """
    try:
        data = typed_json.read_file(file)
    except OSError as error:
        raise EnvironmentProblem(
            f"{file}: cannot be read ({error.strerror}); mend it or use another folder"
        ) from error
    except ValueError as error:
        raise UserError(f"{file}: {error}; save the model again") from error
    if not isinstance(data, dict):
        raise UserError(
            f"{file}: it holds a {type(data).__name__}, not an object; save the model again"
        )
    return data


def headers(files: list[pathlib.Path]) -> list[Entry]:
    """Return what the files hold, reading no arrays."""
    found = []
    for file in files:
        with opened(file) as handle:
            for name in handle.keys():  # noqa: SIM118 -- it is no mapping
                part = handle.get_slice(name)
                found.append(Entry(file, name, tuple(part.get_shape()), str(part.get_dtype())))
    return found


def read_floats(entries: Mapping[str, Entry]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each key with its array in fp32, whatever precision the file has."""
    for file in sorted({entry.file for entry in entries.values()}):
        with opened(file) as handle:
            for key, entry in entries.items():
                if entry.file == file:
                    yield key, tensor(handle, file, entry.name).astype(np.float32)


def tensor(handle: Any, file: pathlib.Path, name: str) -> np.ndarray:
    """Return an array of an opened file.

    Raises:
      UserError: if NumPy has no such dtype or shape.
    """
    try:
        return handle.get_tensor(name)
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"{file}: {one_line(name[:100])} is no array of NumPy ({error}); save the model again in {FLOATS[1]}"
        ) from error


@contextlib.contextmanager
def opened(file: pathlib.Path) -> Iterator[Any]:
    """Open a safetensors file.

    Raises:
      UserError: if it is not a whole one.
      EnvironmentProblem: if it cannot be read.
    """
    try:
        _check_header(file)
        with safetensors.safe_open(file, framework="np") as handle:
            yield handle
    except (safetensors.SafetensorError, _DamagedHeaderError) as error:
        said = one_line(str(error)[:200])
        raise UserError(
            f"{file}: not a whole safetensors file ({said}); fetch or save it again"
        ) from error
    except OSError as error:
        raise EnvironmentProblem(
            f"{file}: cannot be read ({error.strerror or error}); mend it or use another folder"
        ) from error


class _DamagedHeaderError(Exception):
    """It says what is wrong."""


def _check_header(file: pathlib.Path) -> None:
    """Check sizes and types of a header, and that the file is a regular one; safetensors checks that the offsets make sense."""
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        (length,) = struct.unpack("<Q", stream.read(8).ljust(8, b"\0"))
        if length > min(size - 8, typed_json.MOST_BYTES):
            raise _DamagedHeaderError(f"a header of {length} bytes in a file of {size}")
        header = stream.read(length)
    try:
        tensors = typed_json.decode(header, dict[str, Any])
        typed_json.convert(tensors.pop("__metadata__", None) or {}, dict[str, str])
        typed_json.convert(tensors, dict[str, _Tensor])
    except ValueError as error:
        raise _DamagedHeaderError(str(error)) from error
    if len(tensors) > MOST_TENSORS:
        raise _DamagedHeaderError(f"{len(tensors)} tensors, of {MOST_TENSORS} at most")


def write(
    file: pathlib.Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Write one safetensors file."""
    try:
        whole = {
            name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()
        }
        file.touch()
        mode = file.stat().st_mode  # safetensors lets nobody but the owner read
        safetensors_numpy.save_file(whole, file, dict(metadata))
        file.chmod(mode)
    except (safetensors.SafetensorError, OSError) as error:
        raise EnvironmentProblem(
            f"{file}: cannot be written ({error}); free space or use another folder"
        ) from error
