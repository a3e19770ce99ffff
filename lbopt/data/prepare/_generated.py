"""Description of a data set that lbopt generates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

Examples = Iterable[tuple[str | int, dict[str, Any]]]
"""Pairs of a key, unique in its split, and a record. TFDS orders records by a hash of their key."""


class GeneratedDataset(NamedTuple):
    """A data set before it is written.

    Attributes:
      name: Name in lower case with underscores, as in TensorFlow Datasets.
      description: One sentence about the data set.
      features: Module `tensorflow_datasets.features` -> kind of each field of a record.
      splits: Name of a split -> function that yields its examples.
      version: Version, to be raised when the examples change.
      metadata: Data for JSON that are kept beside the records; None for none.
      records_per_shard: Number of records of a file; None to let TFDS shuffle them all and choose
        it. TFDS needs TensorFlow for that, if they have more than 1 GB.
    """

    name: str
    description: str
    features: Callable[[Any], dict[str, Any]]
    splits: Mapping[str, Callable[[], Examples]]
    version: str = "1.0.0"
    metadata: Mapping[str, Any] | None = None
    records_per_shard: int | None = None
