"""Description of a data set that lbopt generates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

Examples = Iterable[tuple[str, dict[str, Any]]]
"""Pairs of a key, unique in its split, and a record."""


class GeneratedDataset(NamedTuple):
    """A data set before it is written.

    Attributes:
      name: Name in lower case with underscores, as in TensorFlow Datasets.
      description: One sentence about the data set.
      features: Module `tensorflow_datasets.features` -> kind of each field of a record.
      splits: Name of a split -> function that yields its examples.
      version: Version, to be raised when the examples change.
    """

    name: str
    description: str
    features: Callable[[Any], dict[str, Any]]
    splits: Mapping[str, Callable[[], Examples]]
    version: str = "1.0.0"
