"""Shapes, dtypes and sizes of data sets that need not be on this machine.

A plan traces and compiles, and reads no data. The program of a run depends only on the numbers that
this module knows, for the data sets of the published runs. Any other data set is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from lbopt.config import TASKS, DataConfig
from lbopt.data._arrays import Reading, Splits
from lbopt.data.from_config._naming import naming_data
from lbopt.data.from_config._source import Source, load_source
from lbopt.data.from_config._text import Learned, RunningText, is_stored
from lbopt.data.images import image_shape
from lbopt.data.text import NO_VOCABULARY

IMAGES: dict[str, tuple[dict[str, int], tuple[Any, ...], int]] = {
    "imagenet2012": (
        {"train": 1_281_167, "validation": 50_000, "test": 100_000},
        (None, None, 3),
        1000,
    ),
    "cifar10": ({"train": 50_000, "test": 10_000}, (32, 32, 3), 10),
    "cifar100": ({"train": 50_000, "test": 10_000}, (32, 32, 3), 100),
    "fashion_mnist": ({"train": 60_000, "test": 10_000}, (28, 28, 1), 10),
    "mnist": ({"train": 60_000, "test": 10_000}, (28, 28, 1), 10),
}
"""Builder -> examples of each split, shape of an image, number of classes.

From the catalog of TensorFlow Datasets.
"""
SQUAD_QUESTIONS = {"train": 87_599, "validation": 10_570}
"""Questions of SQuAD v1.1 (arXiv 1606.05250v3). The number of windows depends on the vocabulary; a
plan assumes one for each question."""
PTB_TOKENS = (929_589, 73_760, 82_430)
"""Tokens of the training, validation and test set of Mikolov's Penn Treebank, ends of sentences
included (arXiv 1409.2329v5: 929k, 73k and 82k words)."""
NOMINAL = 2**31
"""Assumed number of examples of an unknown corpus, larger than any run reads. The length of a run
on a corpus is given in steps."""


class Blank:
    """Examples of zeros, for a trace.

    Args:
      example: Name -> (shape, dtype) of one example.
      length: Number of examples.
    """

    # A shuffled order of a nominal corpus would not fit in memory.
    reading = Reading(in_order=True)

    def __init__(self, example: Mapping[str, tuple[tuple[int, ...], Any]], length: int):
        self._example = dict(example)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return an example of zeros for each index."""
        return {
            name: np.zeros((len(indices), *shape), dtype)
            for name, (shape, dtype) in self._example.items()
        }

    def draw(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        """Return an example of zeros for each index."""
        del epochs, seed
        return self.take(indices)


def known_source(
    data: DataConfig, global_batch_size: int = 1, learned: Learned | None = None
) -> Source:
    """Return the source of a config, with examples of zeros if the data set is known.

    A data set that is not known is loaded. The arguments are those of `load_source`.

    Raises:
      UserError: If a field, named as in `load_source`, does not fit the data.
      EnvironmentProblem: If the data are neither known nor on this machine.
    """
    found = None
    with naming_data():
        if data.name == "images":
            found = _images(data)
        elif data.name == "text_mlm":
            found = _masked(data)
        elif data.name == "squad" and _plain_name(data.builder) == "squad":
            found = _questions(data)
        elif data.name == "ptb":
            found = _running(data, global_batch_size)
        elif data.name == "text_lm" and not is_stored(data):
            found = _stored(data, global_batch_size)
    return found or load_source(data, global_batch_size, learned)


def has_known_length(data: DataConfig) -> bool:
    """Return whether the number of examples in an epoch is known without the data."""
    if data.name == "text_lm":
        return is_stored(data)
    return TASKS.get(data.name) != "masked_lm" or data.name == "pydoc_mlm"


def _plain_name(builder: str) -> str:
    """Return the name in "name[/config][:version]"."""
    return re.split(r"[/:]", builder)[0]


def _images(data: DataConfig) -> Source | None:
    known = IMAGES.get(_plain_name(data.builder))
    if known is None:
        return None
    sizes, shape, num_classes = known
    counts = _counts(data, sizes)
    if counts is None or (data.train_crop != "resized" and None in shape):
        return None  # loading it raises an error that says what is wrong

    if data.train_crop == "resized":
        side = data.image_size or shape[0]
        if side is None:
            return None
        shape = image_shape(side, bool(data.space_to_depth))
    elif shape[-1] == 1:
        shape = shape[:-1]
    example = {"image": (shape, np.uint8), "label": ((), np.int32)}
    splits = Splits(*(Blank(example, count) for count in counts))
    return Source(splits, num_classes, pixel_scale=(data.pixel_mean, data.pixel_std))


def _counts(data: DataConfig, sizes: Mapping[str, int]) -> tuple[int, int, int] | None:
    """Return the numbers of examples of the three splits; None if one of them is not known."""
    train = _count(data.train_split, sizes)
    validation = _count(data.validation_split, sizes)
    test = _count(data.test_split, sizes)
    if train is None or validation is None or test is None:
        return None
    return train, validation, test


def _count(split: str, sizes: Mapping[str, int]) -> int | None:
    """Return the number of examples of a split in TFDS's notation; None for an unknown notation.

    >>> sizes = {"train": 60000}
    >>> _count("train[:55000]", sizes), _count("train[90%:]", sizes), _count("test", sizes)
    (55000, 6000, None)
    """
    found = re.fullmatch(r"(\w+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?", split)
    if found is None or found[1] not in sizes:
        return None
    size = sizes[found[1]]
    start = _edge(found[2], size)
    stop = _edge(found[3], size)
    return len(range(size)[start:stop]) or None


def _edge(text: str | None, size: int) -> int | None:
    if text is None:
        return None
    return round(size * int(text[:-1]) / 100) if text.endswith("%") else int(text)


def _masked(data: DataConfig) -> Source:
    length = ((data.sequence_length,), np.int32)
    predictions = ((data.max_predictions,), np.int32)
    example = {
        **dict.fromkeys(("input_ids", "token_type_ids", "attention_mask"), length),
        **dict.fromkeys(("masked_positions", "masked_labels"), predictions),
        "masked_weights": ((data.max_predictions,), np.float32),
        "next_sentence_label": ((), np.int32),
    }
    corpus = Blank(example, NOMINAL)
    return Source(Splits(corpus, corpus, corpus), data.vocab_size, float(data.max_predictions))


def _questions(data: DataConfig) -> Source | None:
    counts = _counts(data, SQUAD_QUESTIONS)
    if counts is None:
        return None
    length = ((data.sequence_length,), np.int32)
    place = ((), np.int32)
    example = {
        **dict.fromkeys(("input_ids", "token_type_ids", "attention_mask"), length),
        **dict.fromkeys(("start_position", "end_position"), place),
    }
    eval_example = {**example, **dict.fromkeys(("may_start", "may_end"), length)}
    train, *others = counts
    splits = Splits(Blank(example, train), *(Blank(eval_example, count) for count in others))
    return Source(splits, data.vocab_size, max_answer_length=data.max_answer_length)


def _running(data: DataConfig, num_streams: int) -> Source:
    text = RunningText([np.zeros(size, np.int32) for size in PTB_TOKENS], NO_VOCABULARY)
    splits = text.splits(data, num_streams)
    return Source(splits, data.vocab_size, num_streams=num_streams if data.carry_state else 0)


def _stored(data: DataConfig, num_streams: int) -> Source:
    """Return the source of a corpus that is not here."""
    sizes = np.ones(data.vocab_size, np.int32)
    if data.carry_state:
        text = np.broadcast_to(np.zeros(1, np.uint16), NOMINAL)
        splits = RunningText([text, text, text], NO_VOCABULARY).splits(data, num_streams)
        return Source(splits, data.vocab_size, num_streams=num_streams, token_bytes=sizes)

    length = (data.sequence_length,)
    example = dict.fromkeys(("tokens", "next_tokens"), (length, np.int32))
    train = Blank(example, NOMINAL)
    held_out = Blank({**example, "token_mask": (length, np.bool_)}, NOMINAL)
    splits = Splits(train, held_out, held_out)
    return Source(splits, data.vocab_size, token_bytes=sizes)
