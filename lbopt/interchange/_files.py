"""Safetensors files: headers are read and checked first, arrays only when all headers are right."""

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

from lbopt import _typed_json
from lbopt._regular import open_regular
from lbopt._shown import one_line
from lbopt.errors import NO_VALUE, EnvironmentProblem, UserError, require
from lbopt.interchange._folders import writing

WEIGHTS_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack")
FLOATS = ("F64", "F32", "F16", "BF16")
MOST_TENSORS = 1 << 16
"""Tensors in one file, at most; the largest networks that are read here have about a thousand."""


class _TensorHeader(TypedDict):
    dtype: str
    shape: list[_typed_json.Count]
    data_offsets: tuple[_typed_json.Count, _typed_json.Count]


class Entry(NamedTuple):
    """A tensor's entry in the header of a file.

    Attributes:
      file: The file.
      name: The tensor's name in it.
      shape: The tensor's shape.
      dtype: The tensor's dtype as safetensors spells it, for instance "BF16".
      part: (number, count) where this is one of equal parts of the tensor along its last axis, and
        `shape` is that of the part; None for the whole tensor.
    """

    file: pathlib.Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    part: tuple[int, int] | None = None


def weight_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """Return the safetensors files of a `transformers` folder: one, or those that its index lists.

    Raises:
      UserError: If there are none. Pickles are not read, because reading one can run its code.
    """
    if path_exists(directory / WEIGHTS_FILE):
        return [directory / WEIGHTS_FILE]
    if path_exists(directory / INDEX):
        return [_shard(directory, name) for name in _shard_names(directory / INDEX)]
    for name in PICKLES:
        if path_exists(directory / name):
            raise UserError(
                str(directory / name),
                NO_VALUE,
                "only safetensors are read; load it with transformers and save it again "
                "(save_pretrained(folder, safe_serialization=True))",
                code="type",
            )
    raise UserError(
        str(directory),
        NO_VALUE,
        f"it has no {WEIGHTS_FILE}; give the folder that save_pretrained wrote",
        code="missing",
    )


def _shard_names(index: pathlib.Path) -> list[str]:
    names = read_json(index).get("weight_map")
    is_map = isinstance(names, dict) and all(isinstance(name, str) for name in names.values())
    if not is_map or not names:
        raise UserError(
            f"{index}: weight_map", names, "it names no files; save the model again", code="damaged"
        )
    return sorted(set(names.values()))


def path_exists(path: pathlib.Path) -> bool:
    """Return whether a file or folder exists.

    Raises:
      UserError: If the path is too long for the file system.
      EnvironmentProblem: If the system refuses to look.
    """
    try:
        return path.exists()
    except OSError as error:
        too_long = error.errno == errno.ENAMETOOLONG
        raise (UserError if too_long else EnvironmentProblem)(
            "path",
            str(path),
            f"it cannot be looked for ({error.strerror}); use another path",
            code="value" if too_long else "resource",
        ) from error


def _shard(directory: pathlib.Path, name: str) -> pathlib.Path:
    field = f"{directory / INDEX}: weight_map"
    if pathlib.PurePath(name).name != name or name in ("", ".."):
        fix = "that is not the name of a file in this folder; save the model again"
        raise UserError(field, name, fix, code="damaged")

    try:
        exists = (directory / name).exists()
    except OSError as error:
        fix = f"{error.strerror}; save the model again"
        raise UserError(field, name, fix, code="damaged") from error
    fix = "this file is missing; copy it too, or save the model again"
    require(exists, field, name, fix, code="missing")
    return directory / name


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
      UserError: If the file is not JSON, or contains something other than an object.
      EnvironmentProblem: If the file cannot be read.
    """
    try:
        data = _typed_json.read_file(file)
    except OSError as error:
        raise EnvironmentProblem(
            str(file),
            NO_VALUE,
            f"cannot be read ({error.strerror}); make it readable or use another folder",
            code="resource",
        ) from error
    except ValueError as error:
        raise UserError(
            str(file), NO_VALUE, f"{error}; save the model again", code="damaged"
        ) from error
    fix = f"it contains a {type(data).__name__}, not an object; save the model again"
    require(isinstance(data, dict), str(file), NO_VALUE, fix, code="damaged")
    return data


def headers(files: list[pathlib.Path]) -> list[Entry]:
    """Return the entries of all tensors in the files; no array is read."""
    found = []
    for file in files:
        with opened(file) as handle:
            for name in handle.keys():  # noqa: SIM118 -- it is no mapping
                view = handle.get_slice(name)
                found.append(Entry(file, name, tuple(view.get_shape()), str(view.get_dtype())))
    return found


def read_floats(entries: Mapping[str, Entry]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each key with its tensor converted to fp32."""
    for file in sorted({entry.file for entry in entries.values()}):
        with opened(file) as handle:
            for key, entry in entries.items():
                if entry.file == file:
                    array = tensor(handle, file, entry.name)
                    if entry.part is not None:
                        number, count = entry.part
                        array = np.split(array, count, axis=-1)[number]
                    yield key, array.astype(np.float32)


def tensor(handle: Any, file: pathlib.Path, name: str) -> np.ndarray:
    """Return a tensor of an opened file.

    Raises:
      UserError: If NumPy has no array of its dtype or shape.
    """
    try:
        return handle.get_tensor(name)
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"{file}: {one_line(name[:100])}",
            NO_VALUE,
            f"NumPy has no such array ({error}); save the model again in {FLOATS[1]}",
            code="type",
        ) from error


@contextlib.contextmanager
def opened(file: pathlib.Path) -> Iterator[Any]:
    """Open a safetensors file, and close it at the end.

    Raises:
      UserError: If the file is incomplete or damaged.
      EnvironmentProblem: If the file cannot be read.
    """
    try:
        _check_header(file)
        with safetensors.safe_open(file, framework="np") as handle:
            yield handle
    except (safetensors.SafetensorError, _DamagedHeaderError) as error:
        cause = one_line(str(error)[:200])
        raise UserError(
            str(file),
            NO_VALUE,
            f"not a whole safetensors file ({cause}); fetch or save it again",
            code="damaged",
        ) from error
    except OSError as error:
        raise EnvironmentProblem(
            str(file),
            NO_VALUE,
            f"cannot be read ({error.strerror or error}); make it readable or use another folder",
            code="resource",
        ) from error


class _DamagedHeaderError(Exception):
    """A header that is not one of safetensors; its message says why."""


def _check_header(file: pathlib.Path) -> None:
    """Check that the file is regular, and the sizes and types in its header.

    safetensors itself checks the offsets.
    """
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        (length,) = struct.unpack("<Q", stream.read(8).ljust(8, b"\0"))
        if length > min(size - 8, _typed_json.MOST_BYTES):
            raise _DamagedHeaderError(f"a header of {length} bytes in a file of {size}")
        header = stream.read(length)
    try:
        tensors = _typed_json.decode(header, dict[str, Any])
        _typed_json.convert(tensors.pop("__metadata__", None) or {}, dict[str, str])
        _typed_json.convert(tensors, dict[str, _TensorHeader])
    except ValueError as error:
        raise _DamagedHeaderError(str(error)) from error
    if len(tensors) > MOST_TENSORS:
        raise _DamagedHeaderError(f"{len(tensors)} tensors, of {MOST_TENSORS} at most")


def write(
    file: pathlib.Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Write one safetensors file.

    Raises:
      EnvironmentProblem: If the file cannot be written.
    """
    with writing(str(file), errors=(safetensors.SafetensorError, OSError)):
        # `ascontiguousarray` turns scalars into vectors; the reshape turns them back.
        contiguous = {
            name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()
        }
        file.touch()
        mode = file.stat().st_mode  # safetensors would let only the owner read the file
        safetensors_numpy.save_file(contiguous, file, dict(metadata))
        file.chmod(mode)
