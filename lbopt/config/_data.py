"""Which data, and how they are prepared."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses

from lbopt import paths
from lbopt.config._checks import at_least, in_range
from lbopt.errors import require, require_choice

TASKS = {
    "digits": "classification",
    "images": "classification",
    "ptb": "language_model",
    "pydoc_lm": "language_model",
    "pydoc_mlm": "masked_lm",
    "squad": "question_answering",
    "text_mlm": "masked_lm",
}
"""What each data set is for."""
DRAWN_ANEW = ("images", "pydoc_mlm", "text_mlm")
"""Data whose examples are different in every epoch."""
TRAIN_CROPS = ("resized", "padded", "none")
CROP_SAMPLINGS = ("by_area", "by_height")
INTERPOLATIONS = ("bilinear", "bicubic")
AUGMENTATIONS = ("none", "autoaugment", "randaugment")
LARGEST_IMAGE = 1024
LONGEST = 2**14
LARGEST_VOCABULARY = 2**17


@dataclasses.dataclass
class DataConfig:
    """Where examples come from. Fields that a data set does not have are ignored by it.

    Attributes:
      name: "digits" (embedded images), "images" (any TFDS data set with `image` and `label`: imagenet2012, cifar10, mnist,
        yours), "pydoc_mlm" (Python's help topics as masked pairs of segments, for bert), "text_mlm" (the same of a corpus
        that `lbopt prepare` made), "pydoc_lm" (the topics as text, for lstm_lm), "ptb" (Mikolov's Penn Treebank files) or
        "squad" (questions, for bert).
      builder: images, squad: the name of a TFDS data set, "name[/config][:version]". text_mlm: the name that the corpus was
        given.
      data_dir: folder of data sets; None for $TFDS_DATA_DIR, or ~/tensorflow_datasets.
      train_split: images: in TFDS's notation, "train[:55000]" for a part. squad: the same.
      validation_split: choices are made on it.
      test_split: read once, at the end.
      image_size: side of the images. images: None for the data set's own. digits: a multiple of 8, None for 8.
      train_crop: images: "resized" (a random box, resized), "padded" (a random place in the zero-padded image) or "none".
      crop_sampling: of resized crops: "by_area" (torchvision's law) or "by_height" (TensorFlow's); see `random_box`.
      crop_area: of resized crops: least and largest part of the image.
      crop_ratio: of resized crops: least and largest width / height.
      crop_padding: of padded crops: pixels on each side.
      flip: mirror half of the training images.
      interpolation: of resized crops: "bilinear" or "bicubic".
      eval_fraction: side of the central square that evaluation looks at, over the shorter side (for images of various sizes).
      space_to_depth: fold 2 x 2 pixels into channels on the host, for resnet's stem of that name.
      augmentation: "none", "autoaugment" (v0) or "randaugment", after the crop.
      randaugment_layers: operations on an image.
      randaugment_magnitude: their strength, in [0, 10] (up to 30 in some recipes).
      pixel_mean: subtracted from pixels in [0, 1] on the device, one number or one of each channel.
      pixel_std: then divided by.
      max_damaged_records: so many unreadable records of a split are skipped; one more ends the run. Each process counts those
        that it reads, from its start on.
      reader_threads: images: that decode, in each process.
      reader_processes: images: that decode, each with so many threads; 0 to decode in the training process.
      sequence_length: tokens of an example of text.
      vocab_size: pieces of words. pydoc: to learn, special tokens included. text_mlm, squad: of the vocabulary file. ptb: 10000.
      vocab_file: squad: a vocabulary in BERT's form, a piece per line, or a tokenizer.json of Transformers; None for what is
        beside what `init_from` names.
      lowercase: squad: text is lowercased before it is cut. None for what tokenizer_config.json beside the vocabulary says, or,
        where nothing does, for True if no piece has a capital letter.
      max_predictions: tokens of an example that are predicted, at most (masked language models).
      carry_state: language models: examples of a batch go on where those of the last one ended, and so does the state.
      max_query_length: squad: tokens of a question, at most.
      doc_stride: squad: tokens between two windows of one paragraph.
      max_answer_length: squad: tokens of an answer, at most.
    """

    name: str = "digits"
    builder: str = ""
    data_dir: str | None = None
    train_split: str = "train"
    validation_split: str = "validation"
    test_split: str = "test"
    image_size: int | None = None
    train_crop: str = "resized"
    crop_sampling: str = "by_area"
    crop_area: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    crop_padding: int = 4
    flip: bool = True
    interpolation: str = "bilinear"
    eval_fraction: float = 0.875
    space_to_depth: bool = False
    augmentation: str = "none"
    randaugment_layers: int = 2
    randaugment_magnitude: float = 10.0
    pixel_mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    pixel_std: tuple[float, ...] = (0.229, 0.224, 0.225)
    max_damaged_records: int = 0
    reader_threads: int = 16
    reader_processes: int = 0
    sequence_length: int = 32
    vocab_size: int = 1024
    vocab_file: str | None = None
    lowercase: bool | None = None
    max_predictions: int = 5
    carry_state: bool = False
    max_query_length: int = 64
    doc_stride: int = 128
    max_answer_length: int = 30


def validate_data(data: DataConfig, prefix: str) -> None:
    """Check the data's fields."""
    require_choice(f"{prefix}.name", data.name, TASKS)
    if data.name in ("images", "squad", "text_mlm"):
        fix = "name a prepared data set, for instance 'imagenet2012'; lbopt prepare --help lists what it can make"
        require(data.builder.strip(), f"{prefix}.builder", data.builder, fix)
    for field in ("reader_processes", "max_damaged_records", "crop_padding"):
        at_least(f"{prefix}.{field}", getattr(data, field), 0)
    at_least(f"{prefix}.reader_threads", data.reader_threads, 1)
    for field in ("data_dir", "vocab_file"):
        if getattr(data, field) is not None:
            paths.local(getattr(data, field), f"{prefix}.{field}")
    _validate_images(data, prefix)
    _validate_text(data, prefix)


def _validate_images(data: DataConfig, prefix: str) -> None:
    size, step = data.image_size, 8 if data.name == "digits" else 1
    require(
        size is None or (size % step == 0 and 0 < size <= LARGEST_IMAGE),
        f"{prefix}.image_size",
        size,
        f"give a {'multiple of 8' if step > 1 else 'number'} up to {LARGEST_IMAGE}, or None",
    )
    require_choice(f"{prefix}.train_crop", data.train_crop, TRAIN_CROPS)
    require_choice(f"{prefix}.crop_sampling", data.crop_sampling, CROP_SAMPLINGS)
    require_choice(f"{prefix}.interpolation", data.interpolation, INTERPOLATIONS)
    require_choice(f"{prefix}.augmentation", data.augmentation, AUGMENTATIONS)
    require(
        not data.space_to_depth
        or (data.train_crop == "resized" and (data.image_size or 1) % 2 == 0),
        f"{prefix}.space_to_depth",
        data.space_to_depth,
        "only for train_crop='resized' and an even image_size; the stem folds other images itself",
    )
    low, high = data.crop_area
    require(
        0 < low <= high <= 1,
        f"{prefix}.crop_area",
        data.crop_area,
        "give (low, high) with 0 < low <= high <= 1",
    )
    low, high = data.crop_ratio
    require(
        0 < low <= high < 100,
        f"{prefix}.crop_ratio",
        data.crop_ratio,
        "give (low, high) with 0 < low <= high",
    )
    require(
        0 < data.eval_fraction <= 1,
        f"{prefix}.eval_fraction",
        data.eval_fraction,
        "give a number in (0, 1]",
    )
    at_least(f"{prefix}.randaugment_layers", data.randaugment_layers, 0)
    in_range(f"{prefix}.randaugment_magnitude", data.randaugment_magnitude, 0, 31)
    for field in ("pixel_mean", "pixel_std"):
        value = getattr(data, field)
        require(
            len(value) in (1, 3),
            f"{prefix}.{field}",
            value,
            "give one number, or three: red, green, blue",
        )
    fix = f"{prefix}.pixel_std = {data.pixel_std!r} is not as long; give one number for both, or three for both"
    require(
        len(data.pixel_mean) == len(data.pixel_std), f"{prefix}.pixel_mean", data.pixel_mean, fix
    )
    require(min(data.pixel_std) > 0, f"{prefix}.pixel_std", data.pixel_std, "give numbers > 0")


def _validate_text(data: DataConfig, prefix: str) -> None:
    length = data.sequence_length
    require(
        1 <= length <= LONGEST,
        f"{prefix}.sequence_length",
        length,
        f"give a number in [1, {LONGEST}]",
    )
    require(
        1 <= data.vocab_size <= LARGEST_VOCABULARY,
        f"{prefix}.vocab_size",
        data.vocab_size,
        f"give a number in [1, {LARGEST_VOCABULARY}]",
    )
    if TASKS[data.name] == "masked_lm":
        require(
            1 <= data.max_predictions <= length,
            f"{prefix}.max_predictions",
            data.max_predictions,
            f"give a number in [1, {length}], the sequence_length",
        )
    fix = "only squad cuts its text in training; other data know how theirs was cut: leave it None"
    require(
        data.lowercase is None or data.name == "squad", f"{prefix}.lowercase", data.lowercase, fix
    )
    for field in ("max_query_length", "doc_stride", "max_answer_length"):
        at_least(f"{prefix}.{field}", getattr(data, field), 1)
    require(
        not data.carry_state or TASKS[data.name] == "language_model",
        f"{prefix}.carry_state",
        data.carry_state,
        "only language models have a state to carry; leave it False",
    )
