"""The content of the user's data files: sizes, times, and checksums of samples or of every byte.

Samples are enough to tell other data from the same, and take seconds for any size.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NotRequired, TypedDict

from lbopt import paths
from lbopt._regular import open_regular
from lbopt.data import store_folder
from lbopt.errors import UserError

GONE = "is gone"
_MOST_SAMPLED = 128
"""Maximum number of files of a folder whose content is sampled."""
_CHUNKS = 8
_CHUNK_BYTES = 2**16
"""Number and size of the samples of a file: its head, its tail, and those between them."""
_BLOCK_BYTES = 2**22
_TEXTS = ("text_lm", "text_mlm")
"""Kinds of data that `lbopt prepare text` makes."""
_STORES = "lbopt_text"
"""Folder of prepared texts in a folder of data sets."""


class SampledFile(TypedDict):
    """A file of the data.

    Attributes:
      bytes: Size.
      mtime_ns: Time of the last change, in nanoseconds since 1970. It is not compared.
      sha256: Checksum of the samples.
      whole_sha256: Checksum of every byte, where that was asked for.
    """

    bytes: int
    mtime_ns: int
    sha256: str
    whole_sha256: NotRequired[str]


class DataFiles(TypedDict):
    """The files at one path of a config.

    Attributes:
      files: Number of files.
      bytes: Sum of their sizes.
      names_sha256: Checksum of their names and sizes.
      samples: Name in the folder -> file, for all files, or evenly spread ones of many.
      whole_sha256: Checksum of every byte, where that was asked for.
    """

    files: int
    bytes: int
    names_sha256: str
    samples: dict[str, SampledFile]
    whole_sha256: NotRequired[str]


def read_data(config: Any, whole: bool, folder: str = "") -> dict[str, DataFiles]:
    """Return the data files that a config names, by their paths as it has them.

    Paths where nothing is, and addresses, are left out. A prepared text in the default folder of
    data sets is named without that folder, which may be another one on another machine.

    Args:
      config: The config as JSON data.
      whole: Whether every byte is read.
      folder: Folder of relative paths that are not in the current folder; "" for none.
    """
    found = {}
    for text in dict.fromkeys(_data_paths(config)):
        # What cannot be read is refused where the data are loaded.
        with contextlib.suppress(OSError, UserError):
            if not paths.is_address(text):
                found[text] = _describe(_place(text, folder), whole)
    return found


def place_of_data(text: str, folder: str) -> str:
    """Return the place of a path of a config, which may be relative to another folder.

    Args:
      text: The path.
      folder: The other folder; it counts if there is something at the path in it.
    """
    if paths.is_address(text):
        return text
    own = str(paths.local(text, "path"))
    other = os.path.join(folder, own)
    return other if folder and os.path.exists(other) else own


def _place(text: str, folder: str) -> str:
    """Return the place of a path, or of a text in the default folder of data sets."""
    store = pathlib.PurePath(text)
    if store.parent == pathlib.PurePath(_STORES):
        return str(store_folder(store.name))
    return place_of_data(text, folder)


def differences(before: DataFiles, now: DataFiles | None) -> list[str]:
    """Return how data files differ, in words; times do not count.

    Whole checksums are compared where both have them.
    """
    if now is None:
        return [GONE]
    if now["names_sha256"] != before["names_sha256"]:
        return [_other_names(before, now)]
    both_whole = "whole_sha256" in before and "whole_sha256" in now
    if both_whole and before["whole_sha256"] == now["whole_sha256"]:
        return []
    found = [
        name
        for name, file in before["samples"].items()
        if _checksums(file, both_whole) != _checksums(now["samples"][name], both_whole)
    ]
    if before["files"] == 1 or (both_whole and not found):
        return ["has another content"] * (both_whole or len(found))
    return [f"has another {name}" for name in found]


def _checksums(file: SampledFile, whole: bool) -> tuple[str, str | None]:
    return file["sha256"], file.get("whole_sha256") if whole else None


def _other_names(before: DataFiles, now: DataFiles) -> str:
    """Return in words how the names or sizes of files differ."""
    if before["files"] == now["files"] == 1:
        return f"has {now['bytes']:,} bytes, not {before['bytes']:,}"
    for name, file in before["samples"].items():
        other = now["samples"].get(name)
        if other is not None and other["bytes"] != file["bytes"]:
            return f"has a {name} of {other['bytes']:,} bytes, not {file['bytes']:,}"

    old, new = (f"{each['files']:,} files of {each['bytes']:,} bytes" for each in (before, now))
    differ = sorted(before["samples"].keys() ^ now["samples"].keys())
    # Of many files, others are sampled.
    if not differ or max(before["files"], now["files"]) > _MOST_SAMPLED:
        return f"has {new}, not {old}"
    what = GONE if differ[0] in before["samples"] else "is new"
    return f"has {new}, not {old}: {differ[0]} {what}"


def _data_paths(config: Any) -> Iterator[str]:
    """Yield the paths in the groups of a config that are called `data`.

    They are the fields `path` and `vocab_file`, a data set or text in a stated folder, and what
    options of the user's function name; in the other groups, files that their options name.
    """
    if isinstance(config, list):
        for item in config:
            yield from _data_paths(item)
    if isinstance(config, dict):
        data = config.get("data")
        given = data if isinstance(data, dict) else {}
        for field in ("path", "vocab_file"):
            if isinstance(given.get(field), str) and given[field]:
                yield given[field]
        builder = given.get("builder") or ""
        if builder and given.get("name") in _TEXTS:
            yield os.path.join(given.get("data_dir") or "", _STORES, builder)
        elif builder and given.get("data_dir"):
            yield os.path.join(given["data_dir"], builder.replace(":", os.sep))
        yield from filter(_may_be_path, _texts(given.get("options")))
        for group in ("model", "loss", "optimizer"):
            other = config.get(group)
            options = _texts(other.get("options")) if isinstance(other, dict) else ()
            yield from (text for text in options if os.path.splitext(text)[1])
        for value in config.values():
            yield from _data_paths(value)


def _texts(options: Any) -> Iterator[str]:
    """Yield the texts among options, also those in lists and dicts."""
    if isinstance(options, str):
        yield options
    if isinstance(options, dict):
        options = list(options.values())
    if isinstance(options, list):
        for each in options:
            yield from _texts(each)


def _may_be_path(text: str) -> bool:
    """Return whether a text can name data; "/" and "." rather separate words."""
    return any(map(str.isalnum, text))


def _describe(place: str, whole: bool) -> DataFiles:
    """Return the record of a file or of the files of a folder."""
    if os.path.isdir(place):
        files = sorted(_files_below(place))
    else:
        files = [(os.path.basename(place), os.stat(place).st_size)]
        place = os.path.dirname(place)
    names = hashlib.sha256()
    for name, size in files:
        names.update(f"{name}\0{size}\0".encode("utf-8", "surrogateescape"))

    chosen = [files[index][0] for index in _spread(len(files), _MOST_SAMPLED)]
    found = DataFiles(
        files=len(files),
        bytes=sum(size for _, size in files),
        names_sha256=names.hexdigest(),
        samples={_shown(name): _sampled(pathlib.Path(place, name)) for name in chosen},
    )
    if whole:
        every = hashlib.sha256()
        for name, _ in files:
            checksum = _checksum(pathlib.Path(place, name))
            every.update(checksum.encode())
            if _shown(name) in found["samples"]:
                found["samples"][_shown(name)]["whole_sha256"] = checksum
        found["whole_sha256"] = every.hexdigest()
    return found


def _shown(name: str) -> str:
    """Return a file's name as JSON can hold it."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _files_below(folder: str) -> Iterator[tuple[str, int]]:
    """Yield (path in the folder, size) of the files in a folder, without hidden ones."""
    seen = {os.path.realpath(folder)}
    waiting = [""]
    while waiting:
        inside = waiting.pop()
        with os.scandir(os.path.join(folder, inside)) as entries:
            for entry in entries:
                path = os.path.join(inside, entry.name)
                if entry.name.startswith("."):
                    continue
                if entry.is_file():
                    yield path, entry.stat().st_size
                elif entry.is_dir() and (real := os.path.realpath(entry.path)) not in seen:
                    seen.add(real)  # links may make a circle
                    waiting.append(path)


def _spread(count: int, most: int) -> Sequence[int]:
    """Return at most `most` numbers below `count`, evenly spread, with the first and the last.

    >>> list(_spread(3, 8)), list(_spread(9, 3))
    ([0, 1, 2], [0, 4, 8])
    """
    if count <= most:
        return range(count)
    return [index * (count - 1) // (most - 1) for index in range(most)]


def _sampled(file: pathlib.Path) -> SampledFile:
    with open_regular(file) as stream:
        state = os.fstat(stream.fileno())
        checksum = hashlib.sha256()
        chunks = -(-state.st_size // _CHUNK_BYTES)
        for index in _spread(chunks, _CHUNKS):
            # The last sample ends with the file.
            start = min(index * _CHUNK_BYTES, max(0, state.st_size - _CHUNK_BYTES))
            stream.seek(start)
            checksum.update(stream.read(_CHUNK_BYTES))
    return SampledFile(bytes=state.st_size, mtime_ns=state.st_mtime_ns, sha256=checksum.hexdigest())


def _checksum(file: pathlib.Path) -> str:
    checksum = hashlib.sha256()
    with open_regular(file) as stream:
        while block := stream.read(_BLOCK_BYTES):
            checksum.update(block)
    return checksum.hexdigest()
