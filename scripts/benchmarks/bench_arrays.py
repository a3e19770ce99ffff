"""Memory and time of the user's own arrays on disk, and time of the identity of data folders."""

import os
import pathlib
import tempfile
import threading
import time

import numpy as np
import pairs

from lbopt.config import ArraysConfig
from lbopt.data import TrainBatches, read_batches
from lbopt.data.from_config import load_source
from lbopt.workdir import own_files

EXAMPLES = 3_400_000
SHAPE = (32, 32, 3)
BATCH = 256
BATCHES = 200
MEMORY_LIMIT_GIB = 1.0
IDENTITY_BYTES = 50 * 10**9
IDENTITY_FILES = (5, 500_000)
IDENTITY_LIMIT_S = 5.0
_STATUS = pathlib.Path("/proc/self/status")


def run() -> list[dict]:
    """Return the rows of memory and time, and those of identities."""
    with tempfile.TemporaryDirectory(prefix="lbopt-arrays-") as name:
        folder = pathlib.Path(name)
        write(folder / "arrays")
        return [*memory(folder / "arrays"), *identity(folder / "files")]


def write(folder: pathlib.Path) -> None:
    """Write a folder of 10.4 GB of pixels, and one label each; the pixels take no room on disk."""
    folder.mkdir()
    header = {"descr": "|u1", "fortran_order": False, "shape": (EXAMPLES, *SHAPE)}
    with open(folder / "image.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + EXAMPLES * int(np.prod(SHAPE)))
    np.save(folder / "label.npy", np.arange(EXAMPLES) % 10)


def memory(folder: pathlib.Path) -> list[dict]:
    """Load, measure and read arrays; return the rows of memory and time.

    Memory is all that the process holds beyond its start. Pages of mapped files count in the first
    row: the system takes them back when it needs them.
    """
    config = ArraysConfig(str(folder))
    base = _resident("VmRSS")
    anonymous = _Highest("RssAnon")
    begin = time.perf_counter()
    source = load_source(config)
    loading_s = time.perf_counter() - begin

    begin = time.perf_counter()
    for _ in read_batches(TrainBatches(source.splits.train, 0, BATCH, BATCHES)):
        pass
    reading_s = time.perf_counter() - begin
    peak = (_resident("VmHWM") - base) / 2**30
    own = (anonymous.stop() - base) / 2**30

    size = f"{EXAMPLES * int(np.prod(SHAPE)) / 1e9:.1f} GB of .npy"
    rate = BATCH * BATCHES / reading_s
    return [
        _row(f"{size}: memory to load, measure and read", "GiB", peak, None),
        _row(f"{size}: the same without pages of files, sampled", "GiB", own, MEMORY_LIMIT_GIB),
        _row(f"{size}: to load and measure, all in the file cache", "s", loading_s, None),
        _row(f"{size}: batches of {BATCH}, normalized", "examples/s", rate, None),
    ]


def identity(folder: pathlib.Path) -> list[dict]:
    """Time the record of folders of 50 GB, of few and of many files that take no room on disk."""
    rows = []
    for count in IDENTITY_FILES:
        place = folder / str(count)
        _write_sparse(place, count)
        saved = {"train": {"data": {"path": str(place)}}}
        begin = time.perf_counter()
        [found] = own_files(saved).data.values()
        seconds = time.perf_counter() - begin
        assert (found["files"], found["bytes"]) == (count, IDENTITY_BYTES)
        name = f"identity of 50 GB in {count:,} files"
        rows.append(_row(name, "s", seconds, IDENTITY_LIMIT_S))
    return rows


def _write_sparse(folder: pathlib.Path, count: int) -> None:
    for number in range(count):
        if number % 1000 == 0:
            part = folder / str(number // 1000)
            part.mkdir(parents=True)
        file = os.open(part / f"{number}.npy", os.O_CREAT | os.O_WRONLY)
        os.truncate(file, IDENTITY_BYTES // count)
        os.close(file)


class _Highest:
    """The highest value of a field of /proc/self/status, sampled by a thread."""

    def __init__(self, field: str):
        self._field = field
        self._highest = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self._highest = max(self._highest, _resident(self._field))

    def stop(self) -> int:
        self._ended.set()
        self._thread.join()
        return self._highest


def _resident(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"{_STATUS} has no {field}")


def _row(name: str, unit: str, value: float, most: float | None) -> dict:
    aim = None if most is None else ("lbopt", "<=", most)
    return pairs.row(name, unit, value, None, None, None, aim)
