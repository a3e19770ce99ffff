"""Speed and memory of the input pipeline, and the read rates that the hosts of a pod need.

Images are compared with `tf.data` and text with a plain loop, on one core, in turn, on the same
JPEG files and the same text. Every part runs in its own process, so that no library's threads are
left over and memory is counted from the process's start.
"""

import concurrent.futures
import contextlib
import functools
import gc
import io
import json
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

IMAGES = 288
"""Number of images in the data set."""
PIECE = 32
"""Number of images that a thread reads at once, the default of recipes."""
ROUNDS = 11
CHILD_ROUNDS = 3
RATE = "images/s/core"
SIDE = 224
TF_RECORDS = "images.tfrecord"
ONE_THREAD = Reading(1, 0, PIECE)
READERS = (("2 reader threads", Reading(2, 0, PIECE)), ("2 worker processes", Reading(1, 2, PIECE)))
LENGTHS = ((128, 20), (512, 80))
TEXT_BATCH = 1024
MEMORY_BATCH = 1024
MEMORY_THREADS = 16
MEMORY_BATCHES = 5
PIECES_AHEAD = 4
"""Pieces that each thread reads ahead, at least a batch in all, beside the batch being joined; see
`lbopt.data.read_batches`."""
SLACK = 0.5
"""Batches of memory (77 MB) allowed for the decoders' images, 0.6 MB per thread, and for freed
memory that the allocator keeps."""


class ImageCase(NamedTuple):
    """One way to prepare images; compared with `tf.data` if it has no augmentation policy."""

    name: str
    interpolation: str
    side: int = SIDE
    policy: str = "none"
    training: bool = True


CASES = (
    ImageCase("image 224: crop and flip, bilinear", "bilinear"),
    ImageCase("image 224: crop and flip, bicubic", "bicubic"),
    ImageCase("image 224: the same and AutoAugment", "bicubic", policy="autoaugment"),
    ImageCase("image 224: the same and RandAugment", "bicubic", policy="randaugment"),
    ImageCase("image 224: evaluation, ours antialiased", "bicubic", training=False),
    ImageCase("image 456: crop and flip, bicubic", "bicubic", 456),
    ImageCase("image 456: the same and AutoAugment", "bicubic", 456, "autoaugment"),
)


class Need(NamedTuple):
    """A run on a pod, from which the read rate of its hosts follows.

    Attributes:
      name: Recipe, batch size and slice.
      step: Case of `scripts/bench models` whose recorded step time is taken: an estimate by the TPU
        compiler's cycles, not measured.
      global_batch_size: Examples in a step.
      hosts: Number of hosts of the slice, 8 TPU cores each.
      measured: Name of the row with the read rate of one CPU core.
    """

    name: str
    step: str
    global_batch_size: int
    hosts: int
    measured: str


NEEDS = (
    Need(
        "ResNet-50 32768 on v3:16x32",
        "ResNet-50, batch 32768, sharded update, v3:16x32",
        32768,
        128,
        CASES[0].name,
    ),
    Need(
        "EfficientNet-B5 65536 on v3:16x32, 456 px, AutoAugment",
        "EfficientNet-B5, batch 65536, v3:16x32",
        65536,
        128,
        CASES[-1].name,
    ),
    Need(
        "BERT-Large 65536 x 128 on v3:32x32",
        "BERT-Large, batch 65536 x 128, sharded update, v3:32x32",
        65536,
        256,
        "text 128: pairs of segments, masked",
    ),
    Need(
        "BERT-Large 32768 x 512 on v3:32x32",
        "BERT-Large, batch 32768 x 512, sharded update, v3:32x32",
        32768,
        256,
        "text 512: pairs of segments, masked",
    ),
)
STEPS = pathlib.Path(__file__).parents[2] / "docs" / "results" / "benchmarks" / "models.json"
HOST_CORES = 48
"""CPU cores of a TPU v3 host: 96 hardware threads [recalled 85%: no source read], two per core."""


def run() -> list[dict]:
    """Return the rows of all parts; print the hosts' needs also as a table."""
    # Keep TensorFlow from logging. Neither variable changes how it reads images.
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", TF_ENABLE_ONEDNN_OPTS="0")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        files = input_images.jpegs(IMAGES)
        average_kb = sum(map(len, files)) / IMAGES / 1e3
        size = f"{input_images.WIDTH} x {input_images.HEIGHT}, {average_kb:.1f} KB on average"
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
    """Bind this process, and every thread that it starts later, to one core."""
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
    """Measure images/s of one core, including the reading of records."""
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
        # In evaluation only lbopt antialiases, which is more work: there is no aim.
        aim = ("ratio", ">=", 1.0) if case.training else None
        rows.append(
            pairs.row(case.name, RATE, IMAGES / ours_s, IMAGES / peer_s, input_tf.NAME, ratio, aim)
        )
    return rows + _parts(folder)


def _parts(folder: pathlib.Path) -> list[dict]:
    """Measure decoding alone, at full size and with the decoder's scaling."""
    records = TfdsFolder(input_images.BUILDER, str(folder)).open(
        "train", "split", encoded=("image",)
    )
    files = [records[index]["image"] for index in range(IMAGES)]

    def at(eighths: int) -> Any:
        height = input_images.HEIGHT * eighths // 8
        width = input_images.WIDTH * eighths // 8
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
    """Return a function that reads the data set once by slices, another epoch at each call."""
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
    """Measure images/s of `read_batches` on all cores, by threads and by processes in turn."""
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

    # The last batches are not taken: near its end the reader reads less ahead.
    batches = read_batches(TrainBatches(dataset, 0, size, warm + count + 8))
    for _ in range(warm):
        next(batches)

    begin = time.perf_counter()
    for _ in range(count):
        next(batches)
    seconds = time.perf_counter() - begin
    batches.close()
    return size * count / seconds


def _text(folder: pathlib.Path) -> list[dict]:
    """Measure tokens/s of one core; both sides count padding, in equal amounts."""
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
        tokens = TEXT_BATCH * length
        name = f"text {length}: pairs of segments, masked"
        aim = ("ratio", ">=", 1.0)
        rows.append(
            pairs.row(
                name, "tokens/s/core", tokens / ours, tokens / peer, input_text.NAME, ratio, aim
            )
        )
    return rows


def _memory(folder: pathlib.Path) -> dict:
    """Measure the memory of a reader that is as far ahead as it can be, in batches."""
    cv2.setNumThreads(0)
    reading = Reading(MEMORY_THREADS, 0, PIECE)
    dataset = _dataset(folder, Preparation(SIDE, "by_height", interpolation="bicubic"), reading)

    # Read a little first: code and buffers that do not depend on the batch size are not counted.
    list(read_batches(TrainBatches(dataset, 0, PIECE, 20)))
    gc.collect()
    before = _resident("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak of memory

    # A slow consumer leaves the reader time to fill all its buffers.
    batch_bytes = MEMORY_BATCH * SIDE * SIDE * 3
    batches = read_batches(TrainBatches(dataset, 0, MEMORY_BATCH, MEMORY_BATCHES + 2))
    for _ in range(MEMORY_BATCHES):
        next(batches)
        time.sleep(2.5)
    held = (_resident("VmHWM") - before) / batch_bytes
    batches.close()

    bound = 1 + max(1, PIECES_AHEAD * MEMORY_THREADS * PIECE / MEMORY_BATCH)
    name = f"bytes held / batch bytes, {MEMORY_BATCH} images, {MEMORY_THREADS} threads"
    return pairs.row(name, "batches", held, None, None, None, ("lbopt", "<=", bound + SLACK))


def _resident(field: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


def _needs(measured: list[dict]) -> list[dict]:
    """Print and return the cores that each host needs.

    Step times are the TPU compiler's estimates; a core is a core of this machine.
    """
    rates = {row["name"]: row["ours"] for row in measured}
    for length, _ in LENGTHS:
        rates[f"text {length}: pairs of segments, masked"] /= length  # tokens/s to examples/s

    print(
        "Needs of a pod's input (step times are the TPU compiler's estimates; "
        "a core is a core of this machine)"
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

    steps = {row["name"]: row["ours"] for row in json.loads(STEPS.read_text())}
    rows = []
    for need in NEEDS:
        step_ms = steps[f"{need.step}: step"]
        needed = need.global_batch_size / step_ms * 1e3 / need.hosts
        rate = rates[need.measured]
        figures = (f"{needed:.0f}", f"{rate:.0f}", f"{needed / rate:.2f}")
        print(
            line.format(need.name, f"{step_ms:.1f}", need.global_batch_size, need.hosts, *figures)
        )
        aim = ("lbopt", "<=", HOST_CORES)
        name = f"{need.name}: a host"
        rows.append(pairs.row(name, "cores", needed / rate, None, None, None, aim))
    print()
    return rows
