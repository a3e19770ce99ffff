"""The configuration of the data."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses
import re
from typing import Any

from lbopt import _user_code, errors, paths
from lbopt.config._checks import at_least, in_range, require_place_or_choice, require_seed
from lbopt.config._fields import (
    PLACE,
    Condition,
    applicability,
    default_of,
    only,
    only_default,
)
from lbopt.data.images import central_box, check_boxes, check_interpolation, check_policy
from lbopt.data.own import holds_images
from lbopt.data.squad import check_answer_length, check_windows
from lbopt.errors import require, require_choice

TASKS = {
    "digits": "classification",
    "images": "classification",
    "ptb": "language_model",
    "pydoc_lm": "language_model",
    "pydoc_mlm": "masked_lm",
    "squad": "question_answering",
    "text_lm": "language_model",
    "text_mlm": "masked_lm",
}
"""The task of each data set."""
OF_TASK = {
    task: tuple(name for name, its_task in TASKS.items() if its_task == task)
    for task in sorted(set(TASKS.values()))
}
"""The data sets of each task."""
CLASSIFICATION = OF_TASK["classification"]
TEXT = tuple(name for name in TASKS if name not in CLASSIFICATION)
FILES = ("arrays", "image_folder")
"""Kinds of your own data that are read from files."""
OWN_TASKS = ("classification", "language_model", "multi_label", "regression")
"""The tasks of your own data."""
OWN_KINDS = (*FILES, "tfds")
"""Kinds of your own data that are no function."""
PHOTOGRAPHS = ("images", "image_folder", "tfds")
"""Data whose images are decoded, cropped and augmented on demand."""
DRAWN_ANEW = (*PHOTOGRAPHS, "pydoc_mlm", "text_mlm")
"""Data whose examples are different in every epoch."""
_TFDS = "tfds:"
"""Beginning of a text that names a data set of TFDS."""
TRAIN_CROPS = ("resized", "padded", "none")
LARGEST_IMAGE = 1024
LONGEST = 2**14
LARGEST_VOCABULARY = 2**17
"""Largest side of an image, sequence and vocabulary: a typo is refused before it fills memory."""


def is_own(name: str) -> bool:
    """Return whether a name of data means the user's own: files, or a function at a place."""
    return name in OWN_KINDS or _user_code.is_place(name)


def task_of(name: str, task: str) -> str:
    """Return the task of data of this name; of the user's own the stated one, "" for none stated.

    >>> task_of("digits", ""), task_of("arrays", "regression"), task_of("data.py:load", "")
    ('classification', 'regression', '')
    """
    return task if is_own(name) else TASKS[name]


OWN = Condition("your own", is_own)
OF_CLASSES = Condition("of classes", lambda name: name in CLASSIFICATION or is_own(name))
_PREPARED = ("images", "squad", "text_lm", "text_mlm", "tfds")
_MEASURED = ("image_folder", "tfds")
"""Data whose statistics of pixels can be measured."""
_IMAGES = {"name": PHOTOGRAPHS}
_RESIZED = {"name": PHOTOGRAPHS, "train_crop": ("resized",)}
_RANDAUGMENT = {"name": PHOTOGRAPHS, "augmentation": ("randaugment",)}
_SQUAD = {"name": ("squad",)}


@dataclasses.dataclass
class DataConfig:
    """The source of the examples, and their preparation.

    Attributes:
      name: "digits" (embedded images), "images" (any TFDS data set with `image` and `label`:
        imagenet2012, cifar10, mnist, yours), "pydoc_mlm" (Python's help topics as masked pairs of
        segments, for bert), "text_mlm" (the same of a corpus that `lbopt prepare` made), "pydoc_lm"
        (the topics as text, for language models), "text_lm" (the same of a corpus that
        `lbopt prepare` made), "ptb" (Mikolov's Penn Treebank files) or "squad" (questions, for
        bert); "arrays" (your own arrays or table, see `path`) or "image_folder"
        (your own images in folders of their classes, see `path`); "tfds" (any TFDS data set of
        tensors, or of images of any name with their class); or a function of yours,
        "module:function" or "file.py:function", that returns `lbopt.Splits` (files are looked
        for beside the config file, then here).
      builder: Name of a TFDS data set, "name[/config][:version]"; for text_mlm and text_lm the name
        that the corpus was given.
      data_dir: Folder of data sets, or gs://BUCKET/FOLDER; None for $TFDS_DATA_DIR, or
        ~/tensorflow_datasets.
      train_split: Training split in TFDS's notation, "train[:55000]" for a part.
      validation_split: Split that choices are made on.
      test_split: Split that is read once, at the end.
      image_size: Side of the images; None for the data set's own, if all have one size. For digits
        a multiple of 8, None for 8.
      train_crop: "resized" (a random box, resized), "padded" (a random place in the zero-padded
        image) or "none".
      crop_sampling: Distribution of resized crops: "by_area" (torchvision's) or "by_height"
        (TensorFlow's); see `random_box`.
      crop_area: Smallest and largest fraction of the image in a resized crop.
      crop_ratio: Smallest and largest width / height of a resized crop.
      crop_padding: Pixels on each side of a padded crop.
      flip: Whether half of the training images are mirrored.
      interpolation: Interpolation of resized crops: "bilinear" or "bicubic".
      eval_fraction: Side of the central square used in evaluation, over the shorter side of the
        image.
      space_to_depth: Whether 2 x 2 pixels are folded into channels on the host, for resnet's stem
        of that name; None to fold them for that stem on TPU, if `image_size` is even.
      augmentation: Augmentation after the crop: "none", "autoaugment" (v0) or "randaugment".
      randaugment_layers: Number of operations on an image.
      randaugment_magnitude: Strength of the operations, in [0, 10] (up to 30 in some recipes).
      pixel_mean: Mean that is subtracted from pixels in [0, 1] on the device: one number, or one
        for each channel. () for image_folder and tfds, with an empty `pixel_std`, to measure both
        on 1024 of the training images.
      pixel_std: Standard deviation that they are then divided by.
      max_damaged_records: Largest number of unreadable records of a split that are skipped; one
        more ends the run. Each process counts those that it reads, from its start on.
      reader_threads: Number of threads that decode images, in each process.
      reader_processes: Number of processes that decode images, each with `reader_threads` threads;
        0 to decode in the training process.
      sequence_length: Tokens of an example of text.
      vocab_size: Number of tokens in the vocabulary: for pydoc the number to learn, special tokens
        included; for text_mlm, text_lm and squad that of the vocabulary file; for ptb 10000.
      vocab_file: Vocabulary in BERT's form, a token per line, or a tokenizer.json of Transformers,
        here or in a bucket (gs://BUCKET/FILE); None for the vocabulary beside the parameters that
        `init_from` names.
      lowercase: Whether text is lowercased before it is split into tokens. None for the value in
        the tokenizer_config.json beside the vocabulary or, without that file, for True if no token
        has a capital letter.
      max_predictions: Largest number of predicted tokens of an example.
      carry_state: Whether the examples of a batch, and the state, continue those of the last batch.
      max_query_length: Largest number of tokens of a question.
      doc_stride: Tokens between the starts of two windows of one paragraph.
      max_answer_length: Largest number of tokens of an answer.
      path: Your own arrays: a .npz file, a folder of .npy files, a table (.csv, .tsv, .parquet,
        .feather, .arrow), a folder with one of these for each of train, validation and test, or a
        folder that Hugging Face's `save_to_disk` made; or a function of yours that returns arrays
        by name, or a table of pandas. Your own images: a folder of class folders, of train,
        validation and test with class folders in each, a folder that `lbopt prepare folder` made,
        or one of `save_to_disk` with columns of the kinds Image and ClassLabel. All of these here
        or in a bucket (gs://BUCKET/PATH), from which they are copied.
      options: Arguments of the function.
      target: Name of the array or column to predict; "" for the only one of label, labels, target,
        targets, y or class.
      task: "classification", "multi_label", "regression" or "language_model" (next tokens of the
        array `tokens`); "" for that which the target's dtype and shape tell.
      outputs: Number of classes, labels, numbers or tokens that the model gives; None for that of
        the training split.
      features: Names of the arrays or columns that the model sees; () for all but the target.
      matrix: Whether the columns of a table are one array [examples, columns]; False for an array
        of each.
      split_column: Column of a table that says "train", "validation" or "test"; "" for none.
      validation_fraction: Fraction of the examples in the validation split, where none is stated.
      test_fraction: Fraction of the examples in the test split, where none is stated.
      split_seed: Seed by which these splits are drawn.
      normalize: Whether features have mean 0 and standard deviation 1 on the training split.

    >>> from lbopt.config import TrainConfig
    >>> from lbopt.errors import UserError
    >>> TrainConfig(data=DataConfig("digits"), model="cnn").validate()
    >>> try:
    ...     TrainConfig(data=DataConfig("digits", sequence_length=64), model="cnn").validate()
    ... except UserError as error:
    ...     print(error.field, error.code)
    config.data.sequence_length unused
    """

    name: str = "digits"
    builder: str = only("", name=_PREPARED)
    data_dir: str | None = only(None, name=(*_PREPARED, "ptb"))
    train_split: str = only("train", name=("images", "squad", "tfds"))
    validation_split: str = only("validation", name=("images", "squad", "tfds"))
    test_split: str = only("test", name=("images", "squad", "tfds"))
    image_size: int | None = only(None, name=(*CLASSIFICATION, *_MEASURED))
    train_crop: str = only("resized", _IMAGES)
    crop_sampling: str = only("by_area", _RESIZED)
    crop_area: tuple[float, float] = only((0.08, 1.0), _RESIZED)
    crop_ratio: tuple[float, float] = only((3 / 4, 4 / 3), _RESIZED)
    crop_padding: int = only(4, name=PHOTOGRAPHS, train_crop=("padded",))
    flip: bool = only(True, _IMAGES)
    interpolation: str = only("bilinear", _RESIZED)
    eval_fraction: float = only(0.875, _RESIZED)
    space_to_depth: bool | None = only(None, _RESIZED)
    augmentation: str = only("none", _IMAGES)
    randaugment_layers: int = only(2, _RANDAUGMENT)
    randaugment_magnitude: float = only(10.0, _RANDAUGMENT)
    pixel_mean: tuple[float, ...] = only((0.485, 0.456, 0.406), _IMAGES)
    pixel_std: tuple[float, ...] = only((0.229, 0.224, 0.225), _IMAGES)
    max_damaged_records: int = only(0, name=(*PHOTOGRAPHS, "squad"))
    reader_threads: int = only(16, _RESIZED)
    reader_processes: int = only(0, _RESIZED)
    sequence_length: int = only(32, name=TEXT)
    vocab_size: int = only(1024, name=TEXT)
    vocab_file: str | None = only(None, _SQUAD)
    lowercase: bool | None = only(None, _SQUAD)
    max_predictions: int = only(5, name=OF_TASK["masked_lm"])
    carry_state: bool = only(False, name=OF_TASK["language_model"])
    max_query_length: int = only(64, _SQUAD)
    doc_stride: int = only(128, _SQUAD)
    max_answer_length: int = only(30, _SQUAD)
    path: str = only("", name=FILES)
    options: dict[str, Any] = only_default(dict, name=PLACE)
    target: str = only("", name=OWN)
    task: str = only("", name=OWN)
    outputs: int | None = only(None, name=OWN)
    features: tuple[str, ...] = only((), name=OWN)
    matrix: bool = only(True, name=("arrays",))
    split_column: str = only("", name=("arrays",))
    validation_fraction: float = only(0.1, name=FILES, split_column=("",))
    test_fraction: float = only(0.1, name=FILES, split_column=("",))
    split_seed: int = only(0, name=FILES, split_column=("",))
    normalize: bool = only(True, name=("arrays", "tfds"))


def check_data(data: DataConfig) -> None:
    """Raise `UserError` for a value that no data set takes."""
    require_place_or_choice("name", data.name, (*TASKS, *OWN_KINDS), "config.data")
    _check_own(data)
    if data.name in _PREPARED:
        fix = (
            "name a prepared data set, for instance 'imagenet2012'; lbopt prepare --help lists "
            "what it can make"
        )
        require(data.builder.strip(), "builder", data.builder, fix, code="missing")
    for field in ("reader_processes", "max_damaged_records", "crop_padding"):
        at_least(field, getattr(data, field), 0)
    at_least("reader_threads", data.reader_threads, 1)
    for field in ("data_dir", "vocab_file"):
        if getattr(data, field) is not None:
            paths.local_or_bucket(getattr(data, field), field)
    _check_images(data)
    _check_text(data)


def _check_own(data: DataConfig) -> None:
    fix = "give a file or a folder, for instance 'my.npz'"
    needed = data.name in FILES
    require(data.path or not needed, "path", data.path, fix, code="missing")
    if data.path and not _user_code.is_place(data.path):
        paths.local_or_bucket(data.path, "path")
    if data.task:
        require_choice("task", data.task, OWN_TASKS)
    if data.outputs is not None:
        at_least("outputs", data.outputs, 1)
    for field in ("validation_fraction", "test_fraction"):
        in_range(field, getattr(data, field), 0, 1)
    fractions = data.validation_fraction + data.test_fraction
    fix = "with {validation_fraction} no example is left to train on; lower one of the two"
    also = ["validation_fraction"]
    require(fractions < 1, "test_fraction", data.test_fraction, fix, code="conflict", also=also)
    require_seed("split_seed", data.split_seed)


def _check_images(data: DataConfig) -> None:
    # The digits are scans of 8 x 8 pixels, enlarged by a whole factor.
    size = data.image_size
    step = 8 if data.name == "digits" else 1
    fits = size is None or (size % step == 0 and 0 < size <= LARGEST_IMAGE)
    what = "multiple of 8" if step > 1 else "number"
    require(fits, "image_size", size, f"give a {what} up to {LARGEST_IMAGE}, or None")
    fix = "only for an even {image_size}; the stem folds other images itself"
    even = not data.space_to_depth or (size or 1) % 2 == 0
    also = ["image_size"]
    require(even, "space_to_depth", data.space_to_depth, fix, code="conflict", also=also)

    require_choice("train_crop", data.train_crop, TRAIN_CROPS)
    check_interpolation(data.interpolation)
    with errors.under(
        "", name="augmentation", num_layers="randaugment_layers", magnitude="randaugment_magnitude"
    ):
        check_policy(data.augmentation, data.randaugment_layers, data.randaugment_magnitude)
    with errors.under("", area="crop_area", ratio="crop_ratio", sampling="crop_sampling"):
        check_boxes(data.crop_area, data.crop_ratio, data.crop_sampling)
    with errors.under("", fraction="eval_fraction"):
        central_box(8, 8, data.eval_fraction)
    _check_pixels(data)


def _check_pixels(data: DataConfig) -> None:
    mean = data.pixel_mean
    std = data.pixel_std
    for field, value in (("pixel_mean", mean), ("pixel_std", std)):
        fix = "give one number, or three: red, green, blue"
        measured = data.name in _MEASURED and not value
        require(measured or len(value) in (1, 3), field, value, fix)
    fix = f"{{pixel_std}} = {std!r} is not as long; give one number for both, or three for both"
    same = len(mean) == len(std)
    require(same, "pixel_mean", mean, fix, code="mismatch", also=["pixel_std"])
    require(min(std, default=1) > 0, "pixel_std", std, "give numbers > 0")


def _check_text(data: DataConfig) -> None:
    length = data.sequence_length
    size = data.vocab_size
    fix = f"give a number in [1, {LONGEST}]"
    require(1 <= length <= LONGEST, "sequence_length", length, fix)
    fix = f"give a number in [1, {LARGEST_VOCABULARY}]"
    require(1 <= size <= LARGEST_VOCABULARY, "vocab_size", size, fix)
    if task_of(data.name, "") == "masked_lm":
        most = data.max_predictions
        fix = f"give a number in [1, {length}], the {{sequence_length}}"
        fits = 1 <= most <= length
        require(fits, "max_predictions", most, fix, also=["sequence_length"])
    check_windows(data.doc_stride, data.max_query_length)
    check_answer_length(data.max_answer_length)


def ArraysConfig(path: str, target: str = "", **fields: Any) -> DataConfig:
    """Return the config of your own arrays or table.

    Args:
      path: File or folder, see `DataConfig`.
      target: Name of the array or column to predict; "" to find it.
      **fields: Other fields of `DataConfig`.

    >>> ArraysConfig("houses.csv", target="price", test_fraction=0.2).name
    'arrays'
    """
    return DataConfig("arrays", path=path, target=target, **fields)


def ImageFolderConfig(path: str, **fields: Any) -> DataConfig:
    """Return the config of your own images, normalized by what is measured on them.

    Args:
      path: Folder, see `DataConfig`.
      **fields: Other fields of `DataConfig`.

    >>> ImageFolderConfig("flowers", image_size=64).name
    'image_folder'
    """
    return DataConfig("image_folder", path=path, **{"pixel_mean": (), "pixel_std": (), **fields})


def TfdsConfig(builder: str, target: str = "", **fields: Any) -> DataConfig:
    """Return the config of any TFDS data set, whose images are normalized by what is measured.

    Args:
      builder: Name of the data set, see `DataConfig`.
      target: Name of the field to predict; "" for that which the data set states, or to find it.
      **fields: Other fields of `DataConfig`.

    >>> TfdsConfig("iris", validation_split="train[80%:]").name
    'tfds'
    """
    measured = {"pixel_mean": (), "pixel_std": ()}
    return DataConfig("tfds", builder=builder, target=target, **{**measured, **fields})


def check_no_image(data: DataConfig) -> None:
    """Raise `UserError` for a field about images, for data that have none."""
    for field in dataclasses.fields(data):
        kinds = [when.get("name") for when in applicability(field).alternatives]
        of_images = field.name == "image_size" or PHOTOGRAPHS in kinds
        value = getattr(data, field.name)
        default = default_of(field)
        fix = f"the records have no image; leave it {default!r}"
        # False in place of None is what the layout of a network chooses for any data set of TFDS.
        unset = value in (default, ()) or (default is None and value is False)
        require(unset or not of_images, field.name, value, fix, code="unused")


def data_of_text(text: str) -> DataConfig:
    """Return the config of data that one text names: a data set, a function, a file or a folder.

    "tfds:NAME" is a data set of TFDS. A folder whose folders hold images is one of images, any
    other one of arrays.

    >>> data_of_text("digits").name, data_of_text("my.npz").path, data_of_text("data.py:load").name
    ('digits', 'my.npz', 'data.py:load')
    """
    if text.startswith(_TFDS):
        return TfdsConfig(text.removeprefix(_TFDS))
    if text in TASKS or _user_code.is_place(text):
        return DataConfig(text)
    if not re.search(r"[./]", text):
        return DataConfig(text)
    of_images = not paths.is_address(text) and holds_images(paths.local(text, "path"))
    return ImageFolderConfig(text) if of_images else ArraysConfig(text)
