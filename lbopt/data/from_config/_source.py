"""Data sets by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from lbopt import _user_code
from lbopt.config import TASKS, DataConfig, is_own
from lbopt.data._arrays import Splits
from lbopt.data._digits import NUM_CLASSES, load_digits
from lbopt.data._records import TfdsFolder
from lbopt.data.from_config import _text, _tfds_roles
from lbopt.data.from_config._naming import naming_data
from lbopt.data.own import OwnData, as_splits, describe, load_arrays
from lbopt.data.text import (
    NO_VOCABULARY,
    MaskedLMDataset,
    Vocabulary,
    load_pydoc_masked_lm,
    load_pydoc_topics,
)
from lbopt.errors import MissingPackage


class Source(NamedTuple):
    """Data of a config, with the numbers that the model and the loss need.

    Attributes:
      splits: Training, validation and test set.
      outputs: Number of the model's outputs: classes, or entries of the vocabulary.
      mean_predictions: Average number of predicted tokens of an example, for masked language
        models.
      vocabulary: Pieces or words of text, with its normalization.
      num_streams: Number of streams that carry a state from batch to batch; 0 for none.
      max_answer_length: Maximum number of tokens of an answer, for questions.
      pixel_scale: (mean, std) of pixels in [0, 1], for images that come as uint8; None for arrays
        that the model takes as they are.
      task: The task of the user's own data; "" for that of a data set of lbopt.
      target: Name of the array to predict.
      features: Names of the arrays that the model sees.
      class_names: Names of the classes; () where they are not known.
      target_variance: Variance of the training targets of a regression.
      token_bytes: Number of bytes of each token of a language model, [outputs] int32; None where
        tokens are no bytes.
    """

    splits: Splits
    outputs: int
    mean_predictions: float = 0.0
    vocabulary: Vocabulary = NO_VOCABULARY
    num_streams: int = 0
    max_answer_length: int = 30
    pixel_scale: tuple[tuple[float, ...], tuple[float, ...]] | None = ((0.0,), (1.0,))
    task: str = ""
    target: str = "label"
    features: tuple[str, ...] = ("image",)
    class_names: tuple[str, ...] = ()
    target_variance: float = 1.0
    token_bytes: np.ndarray | None = None


def load_source(
    data: DataConfig, global_batch_size: int = 1, learned: _text.Learned | None = None
) -> Source:
    """Load the data of a validated config.

    Args:
      data: The config.
      global_batch_size: Number of streams of text whose state is carried from batch to batch.
      learned: Function that opens the folder of `init_from`, for the vocabulary in it; None without
        one.

    Raises:
      UserError: If a field, named as "data.field", does not fit the data.
      EnvironmentProblem: If the data are missing or damaged.
    """
    with naming_data():
        if is_own(data.name):
            return _own(data)
        if data.name == "squad":
            return _squad(data, learned)
        if TASKS[data.name] == "language_model":
            return _language_model(data, global_batch_size)
        return _LOADERS[data.name](data)


def _own(data: DataConfig) -> Source:
    """Return the user's own data."""
    loader = _OWN_LOADERS.get(data.name, _of_function)
    return loader(data)


def _arrays(data: DataConfig) -> Source:
    found = load_arrays(
        _files_or_arrays(data),
        target=data.target,
        task=data.task,
        outputs=data.outputs,
        features=data.features,
        matrix=data.matrix,
        split_column=data.split_column,
        validation_fraction=data.validation_fraction,
        test_fraction=data.test_fraction,
        split_seed=data.split_seed,
        normalize=data.normalize,
    )
    return _source_of(found)


def _of_function(data: DataConfig) -> Source:
    given = _user_code.load(data.name, "name")
    with _user_code.naming_errors("name", data.name):
        splits = given(**data.options) if callable(given) else given
        splits = as_splits(splits, "name", data.name)
        found = describe(
            splits,
            target=data.target,
            task=data.task,
            outputs=data.outputs,
            features=data.features,
        )
    return _source_of(found)


def _source_of(found: OwnData) -> Source:
    return Source(
        found.splits,
        found.outputs,
        pixel_scale=None,
        task=found.task,
        target=found.target,
        features=found.features,
        class_names=found.class_names,
        target_variance=found.target_variance,
    )


def _files_or_arrays(data: DataConfig) -> Any:
    """Return the path of the user's files, or the arrays of the user's code."""
    if not _user_code.is_place(data.path):
        return data.path
    given = _user_code.load(data.path, "path")
    with _user_code.naming_errors("path", data.path):
        return given() if callable(given) else given


def _tfds(data: DataConfig) -> Source:
    folder = TfdsFolder(data.builder, data.data_dir)
    roles = _tfds_roles.roles_of(data, folder)
    if not roles.image:
        found = load_arrays(
            _tfds_roles.read_tensors(data, folder, roles),
            target=roles.target,
            task=data.task,
            outputs=data.outputs,
            features=roles.inputs,
            normalize=data.normalize,
        )
        return _source_of(found)

    with _image_packages("tfds"):
        from lbopt.data.from_config import _images, _measured
    _images.check_task(data, len(roles.class_names))
    names = (roles.inputs[0], roles.target)
    splits, _ = _images.load_images(data, names)
    scale: Any = (data.pixel_mean, data.pixel_std)
    if not data.pixel_mean:
        of_images = (splits.train, names[0], data.reader_threads, "builder", data.builder)
        scale = _measured.measured_scale(*of_images)
    return _source_of_images(splits, names, roles.class_names, scale)


def _image_folder(data: DataConfig) -> Source:
    with _image_packages("image_folder"):
        from lbopt.data.from_config import _image_folder
    splits, images, pixel_scale = _image_folder.load_image_folder(data)
    return _source_of_images(splits, images.names, images.class_names, pixel_scale)


def _source_of_images(
    splits: Splits, names: tuple[str, str], class_names: tuple[str, ...], pixel_scale: Any
) -> Source:
    return Source(
        splits,
        len(class_names),
        pixel_scale=pixel_scale,
        task="classification",
        target=names[1],
        features=names[:1],
        class_names=class_names,
    )


@contextlib.contextmanager
def _image_packages(name: str) -> Iterator[None]:
    """Name the packages in errors of the import of what decodes images."""
    try:
        yield
    except ImportError as error:
        fix = f"a package that decodes them is not installed ({error}): pip install 'lbopt[images]'"
        raise MissingPackage("name", name, fix) from error


def _squad(data: DataConfig, learned: _text.Learned | None) -> Source:
    splits, pieces = _text.load_questions(data, learned)
    return Source(
        splits,
        len(pieces.pieces),
        vocabulary=pieces.vocabulary,
        max_answer_length=data.max_answer_length,
    )


def _language_model(data: DataConfig, global_batch_size: int) -> Source:
    text = _text.load_running_text(data)
    return Source(
        text.splits(data, global_batch_size),
        len(text.vocabulary.pieces),
        vocabulary=text.vocabulary,
        num_streams=global_batch_size if data.carry_state else 0,
        token_bytes=text.token_bytes,
    )


def _digits(data: DataConfig) -> Source:
    return Source(load_digits(data.image_size), NUM_CLASSES)


def _images(data: DataConfig) -> Source:
    with _image_packages("images"):
        from lbopt.data.from_config import _images
    splits, class_names = _images.load_images(data)
    scale = data.pixel_mean, data.pixel_std
    return Source(splits, len(class_names), pixel_scale=scale, class_names=class_names)


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
_OWN_LOADERS = {"arrays": _arrays, "image_folder": _image_folder, "tfds": _tfds}
