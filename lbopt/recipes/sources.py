"""Data sets by name."""

from __future__ import annotations

from typing import NamedTuple

from lbopt.config.data import DataConfig
from lbopt.data import digits, pydoc
from lbopt.data.arrays import Splits
from lbopt.data.masked import MaskedLMDataset
from lbopt.recipes import images


class Source(NamedTuple):
    """What a config's data turn out to be.

    Attributes:
      splits: training, validation and test sets.
      outputs: of the model: classes, or tokens of the vocabulary.
      mean_predictions: of masked language models: how many tokens of an example are predicted on average.
      pixel_scale: (mean, std) of images that come as uint8, of pixels in [0, 1].
    """

    splits: Splits
    outputs: int
    mean_predictions: float = 0.0
    pixel_scale: tuple[tuple[float, ...], tuple[float, ...]] = ((0.0,), (1.0,))


def load(data: DataConfig, global_batch_size: int = 1) -> Source:
    """Load the data of a validated config, for a batch size where they are laid out by it.

    Raises:
      UserError: naming the field that does not fit the data.
      EnvironmentProblem: if the data cannot be had.
    """
    return _LOADERS[data.name](data)


def _digits(data: DataConfig) -> Source:
    return Source(digits.load_digits(data.image_size), digits.NUM_CLASSES)


def _images(data: DataConfig) -> Source:
    splits, num_classes = images.load(data)
    return Source(splits, num_classes, pixel_scale=(data.pixel_mean, data.pixel_std))


def _pydoc_mlm(data: DataConfig) -> Source:
    splits = pydoc.load_masked_lm(data.vocab_size, data.sequence_length, data.max_predictions)
    assert isinstance(splits.train, MaskedLMDataset)
    return Source(splits, _num_pieces(data), splits.train.mean_predictions)


def _pydoc_lm(data: DataConfig) -> Source:
    return Source(pydoc.load_language_model(data.vocab_size, data.sequence_length), _num_pieces(data))


def _num_pieces(data: DataConfig) -> int:
    return len(pydoc.load_topics(data.vocab_size).pieces.pieces)


_LOADERS = {"digits": _digits, "images": _images, "pydoc_lm": _pydoc_lm, "pydoc_mlm": _pydoc_mlm}
