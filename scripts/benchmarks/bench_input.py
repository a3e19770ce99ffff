"""What the input costs: images beside `tf.data`, text beside a plain loop, memory, and what a pod's hosts would need.

Images and text are measured on one core, ours and the peer in turn on the same JPEG bytes or the same text. Every part has a
process of its own, so that no library's threads stay behind and memory begins at zero.
"""

import concurrent.futures
import contextlib
import functools
import gc
import io
import multiprocessing
import os
import pathlib
import statistics
import tempfile
import time
from typing import Any, NamedTuple

import cv2
import input_images
import input_text
import numpy as np
import pairs
import simplejpeg

from lbopt.data import DamagedCount, Reading, TfdsFolder, TrainBatches, read_batches
from lbopt.data.images import ImageDataset, Policy, Preparation

IMAGES, PIECE = 288, 32
"""In the data set, and in a slice as recipes have it."""
ROUNDS, CHILD_ROUNDS = 11, 3
RATE = "images/s/core"
SIDE = 224
TF_RECORDS = "images.tfrecord"
ONE_THREAD = Reading(1, 0, PIECE)
READERS = (("2 reader threads", Reading(2, 0, PIECE)), ("2 worker processes", Reading(1, 2, PIECE)))
LENGTHS = ((128, 20), (512, 80))
TEXT_BATCH = 1024
MEMORY_BATCH, MEMORY_THREADS, MEMORY_BATCHES = 1024, 16, 5
PIECES_AHEAD = 4
"""For each thread, if those are more than a batch, beside the batch that is put together: see `lbopt.data.read_batches`."""
SLACK = 0.5
"""Batches, 77 MB, for the decoders' images (0.6 MB in each thread) and for what the allocator keeps of freed slices."""


class Case(NamedTuple):
    """Images as one core makes them; beside `tf.data` where there is no policy."""

    name: str
    interpolation: str
    side: int = SIDE
    policy: str = "none"
    training: bool = True


CASES = (
    Case("image 224: crop and flip, bilinear", "bilinear"),
    Case("image 224: crop and flip, bicubic", "bicubic"),
    Case("image 224: the same and AutoAugment", "bicubic", policy="autoaugment"),
    Case("image 224: the same and RandAugment", "bicubic", policy="randaugment"),
    Case("image 224: evaluation, ours antialiased", "bicubic", training=False),
    Case("image 456: crop and flip, bicubic", "bicubic", 456),
    Case("image 456: the same and AutoAugment", "bicubic", 456, "autoaugment"),
)


class Need(NamedTuple):
    """A run on a pod: how fast its hosts have to read.

    Attributes:
      name: recipe, batch and slice.
      step_ms: estimated by the TPU compiler's cycles: `scripts/bench models`, README "Measured". Nobody ran it.
      global_batch_size: examples in a step.
      hosts: of the slice, 8 cores each.
      measured: name of the row that says how fast a core is.
    """

    name: str
    step_ms: float
    global_batch_size: int
    hosts: int
    measured: str


NEEDS = (
    Need("ResNet-50 32768 on v3:16x32", 35.7, 32768, 128, CASES[0].name),
    Need(
        "EfficientNet-B5 65536 on v3:16x32, 456 px, AutoAugment", 779.0, 65536, 128, CASES[-1].name
    ),
    Need(
        "BERT-Large 65536 x 128 on v3:32x32",
        210.9,
        65536,
        256,
        "text 128: pairs of segments, masked",
    ),
    Need(
        "BERT-Large 32768 x 512 on v3:32x32",
        566.8,
        32768,
        256,
        "text 512: pairs of segments, masked",
    ),
)
HOST_CORES = 48
"""Cores of a TPU v3 host: 96 hardware threads [recalled 85%: no source read], two to a core."""


def run() -> list[dict]:
    """Return the rows of all parts; the hosts' needs are also printed as a table of their own."""
    os.environ.update(
        TF_CPP_MIN_LOG_LEVEL="3", TF_ENABLE_ONEDNN_OPTS="0"
    )  # no chatter; neither touches images
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        files = input_images.jpegs(IMAGES)
        size = f"{input_images.WIDTH} x {input_images.HEIGHT}, {sum(map(len, files)) / IMAGES / 1e3:.1f} KB on average"
        _in_a_process(False, _write, files, folder)
        rows = _in_a_process(True, _images, folder)
        rows += _pipelines(folder)
        rows += _in_a_process(True, _text, folder)
        rows.append(_in_a_process(False, _memory, folder))
    print(f"{IMAGES} JPEGs of {size}, colours at half resolution\n")
    return rows + _needs(rows)


def _in_a_process(pinned: bool, function: Any, *arguments: Any) -> Any:
    """Call a function in a fresh process, on one core if `pinned`."""
    begin = _pin if pinned else None
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context, begin) as pool:
        return pool.submit(function, *arguments).result()


def _pin() -> None:
    """Stay on one core, and so with every thread that a library starts from here on."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    cv2.setNumThreads(0)


def _write(files: list[bytes], folder: pathlib.Path) -> None:
    import input_tf

    with contextlib.redirect_stdout(io.StringIO()):
        input_images.write(files, folder)
    input_tf.write(files, folder / TF_RECORDS, input_images.NUM_CLASSES)
    input_text.write_store(folder / "store")


def _dataset(
    folder: pathlib.Path, preparation: Preparation, reading: Reading = ONE_THREAD
) -> ImageDataset:
    records = TfdsFolder(input_images.BUILDER, str(folder)).open(
        "train", "split", encoded=("image",)
    )
    return ImageDataset(
        records, input_images.NUM_CLASSES, preparation, DamagedCount("here", 0), reading
    )


def _images(folder: pathlib.Path) -> list[dict]:
    """Measure images/s of one core, reading of records included."""
    import input_tf

    input_tf.one_thread()
    rows = []
    for case in CASES:
        preparation = Preparation(
            case.side, "by_height", interpolation=case.interpolation, policy=Policy(case.policy)
        )
        ours = _walk(_dataset(folder, preparation), case.training)
        if case.policy != "none":
            rows.append(
                pairs.row(case.name, RATE, IMAGES / _median_seconds(ours), None, None, None, None)
            )
            continue
        file = folder / TF_RECORDS
        theirs = input_tf.batches(file, case.side, case.interpolation, case.training, PIECE)
        ours_s, peer_s, ratio = pairs.in_turn(ours, functools.partial(_take, theirs), ROUNDS)
        limit = 1.0 if case.training else None
        rows.append(
            pairs.row(
                case.name, RATE, IMAGES / ours_s, IMAGES / peer_s, input_tf.NAME, ratio, limit
            )
        )
    return rows + _parts(folder)


def _parts(folder: pathlib.Path) -> list[dict]:
    """Measure what no reader can leave out, and where the decoder's scaling begins to pay."""
    records = TfdsFolder(input_images.BUILDER, str(folder)).open(
        "train", "split", encoded=("image",)
    )
    files = [records[index]["image"] for index in range(IMAGES)]

    def at(eighths: int) -> Any:
        height, width = input_images.HEIGHT * eighths // 8, input_images.WIDTH * eighths // 8
        return lambda: [
            simplejpeg.decode_jpeg(file, min_height=height, min_width=width).shape for file in files
        ]

    rows = []
    for eighths, why in (
        (1, ", nearly all of it Huffman decoding"),
        (4, ""),
        (5, ""),
        (6, ""),
        (7, ""),
    ):
        seconds, whole, ratio = pairs.in_turn(at(eighths), at(8), ROUNDS)
        name = f"decoding a whole JPEG at {eighths}/8{why}"
        rows.append(
            pairs.row(name, RATE, IMAGES / seconds, IMAGES / whole, "at full size", ratio, None)
        )
    return rows


def _walk(dataset: ImageDataset, training: bool) -> Any:
    """Return what reads the data set once, slice by slice, every time another epoch."""
    epoch = [0]

    def walk() -> None:
        epoch[0] += 1
        for start in range(0, IMAGES, PIECE):
            indices = np.arange(start, start + PIECE)
            if training:
                dataset.draw(indices, np.full(PIECE, epoch[0]), 0)
            else:
                dataset.take(indices)

    return walk


def _take(batches: Any) -> None:
    for _ in range(IMAGES // PIECE):
        next(batches)


def _median_seconds(fn: Any) -> float:
    times = []
    for _ in range(ROUNDS + 1):
        begin = time.perf_counter()
        fn()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _pipelines(folder: pathlib.Path) -> list[dict]:
    """Measure images/s of all of the machine's cores through `read`, threads and processes in turn."""
    found: dict[str, list[float]] = {name: [] for name, _ in READERS}
    for _ in range(CHILD_ROUNDS):
        for name, reading in READERS:
            found[name].append(_in_a_process(False, _read_rate, folder, reading))
    rates = {name: statistics.median(seen) for name, seen in found.items()}
    return [
        pairs.row(f"image 224: batches of 256, {name}", "images/s", rate, None, None, None, None)
        for name, rate in rates.items()
    ]


def _read_rate(
    folder: pathlib.Path, reading: Reading, size: int = 256, warm: int = 3, count: int = 10
) -> float:
    cv2.setNumThreads(0)
    dataset = _dataset(folder, Preparation(SIDE, "by_height", interpolation="bicubic"), reading)
    batches = read_batches(
        TrainBatches(dataset, 0, size, warm + count + 8)
    )  # never near the end, where less is read ahead
    for _ in range(warm):
        next(batches)
    begin = time.perf_counter()
    for _ in range(count):
        next(batches)
    seconds = time.perf_counter() - begin
    batches.close()
    return size * count / seconds


def _text(folder: pathlib.Path) -> list[dict]:
    """Measure tokens/s of one core; padding counts on both sides, of which both have as much."""
    rows = []
    for length, max_predictions in LENGTHS:
        dataset = input_text.open_ours(folder / "store", length, max_predictions)
        pieces = input_text.open_store(folder / "store").pieces
        texts = input_text.as_text(dataset, pieces)
        theirs = input_text.plain_batches(texts, pieces, length, max_predictions, TEXT_BATCH)
        batches = iter(range(10**6))

        def draw(dataset=dataset, batches=batches) -> None:
            first = next(batches) * TEXT_BATCH + np.arange(TEXT_BATCH)
            dataset.draw(first % len(dataset), first // len(dataset), 0)

        ours, peer, ratio = pairs.in_turn(draw, lambda theirs=theirs: next(theirs), ROUNDS)
        tokens, name = TEXT_BATCH * length, f"text {length}: pairs of segments, masked"
        rows.append(
            pairs.row(
                name, "tokens/s/core", tokens / ours, tokens / peer, input_text.NAME, ratio, 1.0
            )
        )
    return rows


def _memory(folder: pathlib.Path) -> dict:
    """Measure by how many batches the process grows while a slow consumer lets the reader run as far ahead as it can."""
    cv2.setNumThreads(0)
    reading = Reading(MEMORY_THREADS, 0, PIECE)
    dataset = _dataset(folder, Preparation(SIDE, "by_height", interpolation="bicubic"), reading)
    list(
        read_batches(TrainBatches(dataset, 0, PIECE, 20))
    )  # code and buffers that stay, however large the batch
    gc.collect()
    before = _resident("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    batch_bytes = MEMORY_BATCH * SIDE * SIDE * 3
    batches = read_batches(TrainBatches(dataset, 0, MEMORY_BATCH, MEMORY_BATCHES + 2))
    for _ in range(MEMORY_BATCHES):
        next(batches)
        time.sleep(2.5)
    held = (_resident("VmHWM") - before) / batch_bytes
    batches.close()
    bound = 1 + max(1, PIECES_AHEAD * MEMORY_THREADS * PIECE / MEMORY_BATCH)
    name = f"bytes held / batch bytes, {MEMORY_BATCH} images, {MEMORY_THREADS} threads"
    return pairs.row(name, "batches", held, None, None, None, bound + SLACK)


def _resident(field: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


def _needs(measured: list[dict]) -> list[dict]:
    """Print and return what hosts need; step times are estimates, a core is one of this machine's."""
    rates = {row["name"]: row["ours"] for row in measured}
    for length, _ in LENGTHS:
        rates[f"text {length}: pairs of segments, masked"] /= length
    print(
        "What the input of a pod needs (step times are the TPU compiler's estimates; a core is one of this machine)"
    )
    header = (
        "recipe",
        "step, ms",
        "batch",
        "hosts",
        "needed, examples/s/host",
        "measured, examples/s/core",
        "cores",
    )
    line = "{:<58}{:>9}{:>8}{:>7}{:>25}{:>27}{:>8}"
    print(line.format(*header))
    rows = []
    for need in NEEDS:
        needed, rate = (
            need.global_batch_size / need.step_ms * 1e3 / need.hosts,
            rates[need.measured],
        )
        figures = (f"{needed:.0f}", f"{rate:.0f}", f"{needed / rate:.2f}")
        print(line.format(need.name, need.step_ms, need.global_batch_size, need.hosts, *figures))
        rows.append(
            pairs.row(f"{need.name}: a host", "cores", needed / rate, None, None, None, HOST_CORES)
        )
    print()
    return rows
