"""Data sets by name."""

from __future__ import annotations

from typing import NamedTuple

from lbopt.config import TASKS, DataConfig
from lbopt.data._arrays import Splits
from lbopt.data._digits import NUM_CLASSES, load_digits
from lbopt.data.from_config import _text
from lbopt.data.text import (
    NO_VOCABULARY,
    MaskedLMDataset,
    Vocabulary,
    load_pydoc_masked_lm,
    load_pydoc_topics,
)
from lbopt.errors import EnvironmentProblem


class Source(NamedTuple):
    """What a config's data turn out to be.

    Attributes:
      splits: training, validation and test sets.
      outputs: of the model: classes, or tokens of the vocabulary.
      mean_predictions: of masked language models: how many tokens of an example are predicted on average.
      vocabulary: of text: the pieces or words, and how text is changed for them.
      num_lanes: of text that is read in lanes; 0 for none.
      max_answer_length: of questions: tokens of an answer, at most.
      pixel_scale: (mean, std) of images that come as uint8, of pixels in [0, 1].
    """

    splits: Splits
    outputs: int
    mean_predictions: float = 0.0
    vocabulary: Vocabulary = NO_VOCABULARY
    num_lanes: int = 0
    max_answer_length: int = 30
    pixel_scale: tuple[tuple[float, ...], tuple[float, ...]] = ((0.0,), (1.0,))


def load_source(
    data: DataConfig, global_batch_size: int = 1, learned: _text.Learned | None = None
) -> Source:
    """Load the data of a validated config.

    Args:
      data: which.
      global_batch_size: for text that is laid out by it.
      learned: opens the folder of what the run starts from, for the vocabulary in it.

    Raises:
      UserError: naming the field that does not fit the data.
      EnvironmentProblem: if the data cannot be had.
    """
    if data.name == "squad":
        splits, pieces = _text.load_questions(data, learned)
        return Source(
            splits,
            len(pieces.pieces),
            vocabulary=pieces.vocabulary,
            max_answer_length=data.max_answer_length,
        )
    if TASKS[data.name] == "language_model":
        splits, vocabulary = _text.load_running_text(data, global_batch_size)
        return Source(
            splits,
            len(vocabulary.pieces),
            0.0,
            vocabulary,
            global_batch_size if data.carry_state else 0,
        )
    return _LOADERS[data.name](data)


def _digits(data: DataConfig) -> Source:
    return Source(load_digits(data.image_size), NUM_CLASSES)


def _images(data: DataConfig) -> Source:
    try:
        from lbopt.data.from_config import _images
    except ImportError as error:
        raise EnvironmentProblem(
            f"config.data.name = 'images': images are decoded by packages that are not installed ({error}): pip install 'lbopt[images]'"
        ) from error
    splits, num_classes = _images.load_images(data)
    return Source(splits, num_classes, pixel_scale=(data.pixel_mean, data.pixel_std))


def _pydoc_mlm(data: DataConfig) -> Source:
    splits = load_pydoc_masked_lm(data.vocab_size, data.sequence_length, data.max_predictions)
    return _masked(splits, load_pydoc_topics(data.vocab_size).pieces.vocabulary)


def _text_mlm(data: DataConfig) -> Source:
    splits, pieces = _text.load_masked_text(data)
    return _masked(splits, pieces.vocabulary)


def _masked(splits: Splits, vocabulary: Vocabulary) -> Source:
    assert isinstance(splits.train, MaskedLMDataset)
    return Source(splits, len(vocabulary.pieces), splits.train.mean_predictions, vocabulary)


_LOADERS = {"digits": _digits, "images": _images, "pydoc_mlm": _pydoc_mlm, "text_mlm": _text_mlm}
