"""Data sets whose examples are known without being there: shapes, dtypes and how many there are.

A plan traces and compiles, and reads no data. What is known here is what a program depends on: the sets of the published
runs. Whatever else a config names has to be there, and is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from lbopt.config import TASKS, DataConfig
from lbopt.data._arrays import Reading, Splits
from lbopt.data.from_config._source import Source, load_source
from lbopt.data.from_config._text import Learned
from lbopt.data.images import image_shape
from lbopt.data.text import EvalLanes, Lanes, make_windows

IMAGES = {
    "imagenet2012": (
        {"train": 1_281_167, "validation": 50_000, "test": 100_000},
        (None, None, 3),
        1000,
    ),
    "cifar10": ({"train": 50_000, "test": 10_000}, (32, 32, 3), 10),
    "cifar100": ({"train": 50_000, "test": 10_000}, (32, 32, 3), 100),
    "mnist": ({"train": 60_000, "test": 10_000}, (28, 28, 1), 10),
}
"""Builder -> examples of each split, shape of an image, classes: the catalog of TensorFlow Datasets."""
SQUAD_QUESTIONS = {"train": 87_599, "validation": 10_570}
"""Of SQuAD v1.1 (arXiv 1606.05250). How many windows they make depends on the vocabulary; a plan takes one for each."""
PTB_TOKENS = (929_589, 73_760, 82_430)
"""Training, validation and test part of Mikolov's Penn Treebank, ends of sentences included (arXiv 1409.2329: 929k, 73k, 82k words)."""
NOMINAL = 2**31
"""Examples of a corpus that is not there: more than any run reads. Runs on one are counted in steps."""


class Blank:
    """Examples of zeros, for a trace.

    Args:
      example: name -> (shape, dtype) of one example.
      length: how many there are.
    """

    reading = Reading(in_order=True)  # the order of a corpus would take more memory than its trace

    def __init__(self, example: Mapping[str, tuple[tuple[int, ...], Any]], length: int):
        self._example, self._length = dict(example), length

    def __len__(self) -> int:
        return self._length

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return as many examples as there are indices."""
        return {
            name: np.zeros((len(indices), *shape), dtype)
            for name, (shape, dtype) in self._example.items()
        }

    def draw(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        """Return as many examples as there are indices."""
        del epochs, seed
        return self.take(indices)


def known_source(
    data: DataConfig, global_batch_size: int = 1, learned: Learned | None = None
) -> Source:
    """Return what `load_source` would, with examples of zeros; what is not known is loaded.

    Raises:
      UserError: naming the field that does not fit the data.
      EnvironmentProblem: if the data are neither known nor there.
    """
    found = None
    if data.name == "images":
        found = _images(data)
    elif data.name == "text_mlm":
        found = _masked(data)
    elif data.name == "squad" and data.builder.split("/")[0].split(":")[0] == "squad":
        found = _questions(data)
    elif data.name == "ptb":
        found = _running(data, global_batch_size)
    return found or load_source(data, global_batch_size, learned)


def has_known_length(data: DataConfig) -> bool:
    """Return whether the examples of an epoch are known without the data; a corpus may be any."""
    return TASKS[data.name] != "masked_lm" or data.name == "pydoc_mlm"


def _images(data: DataConfig) -> Source | None:
    known = IMAGES.get(re.split(r"[/:]", data.builder)[0])
    if known is None:
        return None
    sizes, image, num_classes = known
    shape: tuple[Any, ...] = image
    counts = [
        _count(getattr(data, f"{part}_split"), sizes) for part in ("train", "validation", "test")
    ]
    if None in counts or (data.train_crop != "resized" and None in shape):
        return None  # loading it says what is wrong
    if data.train_crop == "resized":
        side = data.image_size or shape[0]
        if side is None:
            return None
        shape = image_shape(side, data.space_to_depth)
    elif shape[-1] == 1:
        shape = shape[:-1]
    example = {"image": (shape, np.uint8), "label": ((), np.int32)}
    splits = Splits(*(Blank(example, count or 0) for count in counts))
    return Source(splits, num_classes, pixel_scale=(data.pixel_mean, data.pixel_std))


def _count(split: str, sizes: Mapping[str, int]) -> int | None:
    """Return how many examples a split in TFDS's notation has; None if it is not a plain one.

    >>> _count("train[:55000]", {"train": 60000}), _count("train[90%:]", {"train": 60000}), _count("test", {"train": 60000})
    (55000, 6000, None)
    """
    found = re.fullmatch(r"(\w+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?", split)
    if found is None or found[1] not in sizes:
        return None
    size = sizes[found[1]]
    start, stop = (_edge(text, size) for text in (found[2], found[3]))
    return len(range(size)[start:stop]) or None


def _edge(text: str | None, size: int) -> int | None:
    if text is None:
        return None
    return round(size * int(text[:-1]) / 100) if text.endswith("%") else int(text)


def _masked(data: DataConfig) -> Source:
    length, predictions = ((data.sequence_length,), np.int32), ((data.max_predictions,), np.int32)
    example = {
        **dict.fromkeys(("input_ids", "token_type_ids", "attention_mask"), length),
        **dict.fromkeys(("masked_positions", "masked_labels"), predictions),
        "masked_weights": ((data.max_predictions,), np.float32),
        "next_sentence_label": ((), np.int32),
    }
    corpus = Blank(example, NOMINAL)
    return Source(Splits(corpus, corpus, corpus), data.vocab_size, float(data.max_predictions))


def _questions(data: DataConfig) -> Source | None:
    counts = [
        _count(getattr(data, f"{part}_split"), SQUAD_QUESTIONS)
        for part in ("train", "validation", "test")
    ]
    if None in counts:
        return None
    length, place = ((data.sequence_length,), np.int32), ((), np.int32)
    example = {
        **dict.fromkeys(("input_ids", "token_type_ids", "attention_mask"), length),
        **dict.fromkeys(("start_position", "end_position"), place),
    }
    asked = {**example, **dict.fromkeys(("may_start", "may_end"), length)}
    train, *others = (count or 0 for count in counts)
    splits = Splits(Blank(example, train), *(Blank(asked, count) for count in others))
    return Source(splits, data.vocab_size, max_answer_length=data.max_answer_length)


def _running(data: DataConfig, num_lanes: int) -> Source:
    texts = [np.zeros(size, np.int32) for size in PTB_TOKENS]
    if data.carry_state:
        lanes = (EvalLanes(text, data.sequence_length) for text in texts[1:])
        splits = Splits(Lanes(texts[0], num_lanes, data.sequence_length), *lanes)
    else:
        splits = Splits(*(make_windows(text, data.sequence_length) for text in texts))
    return Source(splits, data.vocab_size, num_lanes=num_lanes if data.carry_state else 0)
