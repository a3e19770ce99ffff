"""Global batches are the same for every kind of data and every number of processes."""

import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from lbopt.data import DamagedCount, EvalBatches, TrainBatches, read_batches
from lbopt.data.images import Policy, SmallImages
from lbopt.data.squad import EvaluationWindows, Question, TrainingWindows
from lbopt.data.text import TextStreams, WordPiece, make_windows
from lbopt.data.text._pieces import SPECIAL_TOKENS

RNG = np.random.default_rng(0)
TEXT = RNG.integers(0, 50, 1000)
PIECES = WordPiece([*SPECIAL_TOKENS, *"abcdefghij"])
QUESTIONS = [
    Question(
        str(number), "a b c", " ".join(RNG.choice(list("abcdefghij"), 9 + number)), ("",), (0,)
    )
    for number in range(12)
]
QUESTIONS = [question._replace(answers=(question.context[:1],)) for question in QUESTIONS]


def small_images():
    arrays = {
        "image": RNG.integers(0, 256, (23, 8, 8), dtype=np.uint8),
        "label": np.arange(23, dtype=np.int32),
    }
    return SmallImages(arrays, 2, True, Policy(), DamagedCount("here", 0))


SETS = {
    "windows of text": lambda: make_windows(TEXT, 7),
    "streams of text": lambda: TextStreams(TEXT, 12, 7),
    "small images": small_images,
    "questions to train on": lambda: TrainingWindows(QUESTIONS, PIECES, 16, 4, 6),
    "questions to answer": lambda: EvaluationWindows(QUESTIONS, PIECES, 16, 4, 6),
}


@pytest.mark.parametrize("kind", SETS)
@pytest.mark.parametrize("count", [2, 4])
def test_the_parts_of_all_processes_are_the_batches_of_one(kind, count):
    dataset = SETS[kind]()
    for make in (
        lambda parts=None: TrainBatches(dataset, 3, 12, 9, 4, parts),
        lambda parts=None: EvalBatches(dataset, 12, 4, parts),
    ):
        alone = list(read_batches(make()))
        parts = [
            list(read_batches(make(devices.tolist()))) for devices in np.split(np.arange(4), count)
        ]
        assert len(alone) > 1
        for number, batch in enumerate(alone):
            for name, array in batch.items():
                np.testing.assert_array_equal(
                    array, np.concatenate([part[number][name] for part in parts])
                )


@pytest.mark.parametrize("kind", SETS)
def test_reading_resumes_at_the_next_example(kind):
    dataset = SETS[kind]()
    straight = list(read_batches(TrainBatches(dataset, 3, 12, 9)))
    for batch, wanted in zip(
        read_batches(TrainBatches(dataset, 3, 12, 9), 4), straight[4:], strict=True
    ):
        assert all(np.array_equal(batch[name], wanted[name]) for name in wanted)


@pytest.mark.process
def test_readers_end_with_a_training_process_that_is_killed():
    program = pathlib.Path(__file__).with_name("killed_reader.py")
    process = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)
    readers = [f"/proc/{pid}/cmdline" for pid in process.stdout.readline().split()]
    spawned = [file for file in readers if "spawn_main" in pathlib.Path(file).read_text()]
    assert len(spawned) == 2
    process.kill()
    process.wait()
    until = time.monotonic() + 20
    while any(map(alive, spawned)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(map(alive, spawned))


def alive(file):
    """Return whether a process runs; an ended process has no command, even before it is reaped."""
    try:
        return bool(pathlib.Path(file).read_text())
    except OSError:
        return False
