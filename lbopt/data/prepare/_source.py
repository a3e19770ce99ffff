"""What describes a data set that is made here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

Examples = Iterable[tuple[str, dict[str, Any]]]
"""Keys, each of them once in a split, and records."""


class GeneratedDataset(NamedTuple):
    """A data set before it is written.

    Attributes:
      name: in small letters, as TensorFlow Datasets names its own.
      description: what it is.
      features: given the module `tensorflow_datasets.features`, the kind of each field of a record.
      splits: what makes the examples of each split.
      version: a new one when the examples change.
    """

    name: str
    description: str
    features: Callable[[Any], dict[str, Any]]
    splits: Mapping[str, Callable[[], Examples]]
    version: str = "1.0.0"
