"""Which data, and how they are prepared."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses

from lbopt.errors import require, require_choice

TASKS = {"digits": "classification", "pydoc_lm": "language_model", "pydoc_mlm": "masked_lm"}
"""What each data set is for."""
DRAWN_ANEW = ("pydoc_mlm",)
"""Data whose examples are different in every epoch."""
LARGEST_IMAGE = 1024
LONGEST = 2**14
LARGEST_VOCABULARY = 2**17


@dataclasses.dataclass
class DataConfig:
    """Where examples come from. Fields that a data set does not have are ignored by it.

    Attributes:
      name: "digits" (images of classes), "pydoc_mlm" (Python's help topics as masked pairs of segments, for bert) or
        "pydoc_lm" (the same as windows of text, for lstm_lm).
      image_size: side of the images, a multiple of the source's: each pixel is repeated. None for the source's (digits: 8).
      sequence_length: tokens of an example (pydoc_mlm, pydoc_lm).
      vocab_size: pieces of words, learned from the training part, special tokens included (pydoc_mlm, pydoc_lm).
      max_predictions: tokens of an example that are predicted, at most (pydoc_mlm).
    """

    name: str = "digits"
    image_size: int | None = None
    sequence_length: int = 32
    vocab_size: int = 1024
    max_predictions: int = 5


def validate_data(data: DataConfig, prefix: str) -> None:
    """Check the data's fields."""
    require_choice(f"{prefix}.name", data.name, TASKS)
    size = data.image_size
    require(
        size is None or (size % 8 == 0 and 0 < size <= LARGEST_IMAGE),
        f"{prefix}.image_size",
        size,
        f"give a multiple of 8 up to {LARGEST_IMAGE}, or None for 8",
    )
    length = data.sequence_length
    require(1 <= length <= LONGEST, f"{prefix}.sequence_length", length, f"give a number in [1, {LONGEST}]")
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
