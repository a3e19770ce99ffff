"""Data sets that a function of the user returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lbopt.data._arrays import ArrayDataset, Dataset, Reading, Splits
from lbopt.errors import UserError, require


class SourceDataset:
    """The records of a random-access source as a data set; every epoch sees the same examples.

    Args:
      source: Numbered records, `source[index]` -> arrays by name, as Grain and PyTorch have them.
      field: Field that names the function that returned it, for errors.
      place: Its value.
    """

    reading = Reading(threads=8, examples_per_slice=64)

    def __init__(self, source: Any, field: str, place: str):
        self._source = source
        self._field = field
        self._place = place

    def __len__(self) -> int:
        return len(self._source)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the records at `indices` as one batch."""
        records = [self._source[int(index)] for index in indices]
        for record in records:
            fix = f"a record is a {type(record).__name__}; give a dict of arrays by name"
            require(isinstance(record, Mapping), self._field, self._place, fix, code="type")
        return {name: np.stack([record[name] for record in records]) for name in records[0]}

    def draw(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        """Return the records at `indices` as one batch, the same in every epoch."""
        del epochs, seed
        return self.take(indices)


class HuggingFaceDataset:
    """Hugging Face's data set, a mapping of its columns to arrays; every epoch sees the same.

    Args:
      dataset: A `datasets.Dataset`. Its records have equal shapes.
    """

    reading = Reading(threads=8, examples_per_slice=64)

    def __init__(self, dataset: Any):
        self._dataset = dataset.with_format("numpy")

    def __len__(self) -> int:
        return len(self._dataset)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the records at `indices` as one batch."""
        return dict(self._dataset[np.asarray(indices).tolist()])

    def draw(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        """Return the records at `indices` as one batch, the same in every epoch."""
        del epochs, seed
        return self.take(indices)


class _Completed:
    """A data set of the user with the defaults of `Dataset` for what it lacks."""

    def __init__(self, dataset: Any, field: str, place: str):
        self._dataset = dataset
        self._field = field
        self._place = place
        self.reading: Reading = getattr(dataset, "reading", Reading())

    def __len__(self) -> int:
        return len(self._dataset)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return self._whole(self._dataset.take(indices), "take", len(indices))

    def draw(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        if hasattr(self._dataset, "draw"):
            return self._whole(self._dataset.draw(indices, epochs, seed), "draw", len(indices))
        return self.take(indices)

    def _whole(self, found: Any, method: str, examples: int) -> dict[str, np.ndarray]:
        """Return a batch that has an example for each index."""
        batch = dict(found)
        lengths = {name: len(array) for name, array in batch.items()}
        fix = f"{method} returns {lengths} examples for {examples} indices; return one for each"
        fits = set(lengths.values()) == {examples}
        require(fits, self._field, self._place, fix, code="mismatch")
        return batch


def as_splits(found: Any, field: str, place: str) -> Splits:
    """Return the splits that a function of the user returned.

    Args:
      found: `Splits`, or another tuple of three; each a data set with `__len__` and `take`, a
        mapping of names to arrays, a random-access source (`__len__` and `__getitem__`), or a
        `datasets.Dataset` of Hugging Face.
      field: Field that names the function, for errors.
      place: Its value.

    Raises:
      UserError: If it is something else, or if the examples of the three differ in names, shapes or
        dtypes.
    """
    fix = f"it returns a {type(found).__name__}; return lbopt.data.Splits(train, validation, test)"
    is_three = isinstance(found, tuple) and len(found) == 3
    require(is_three, field, place, fix, code="type")
    splits = Splits(*(_dataset(each, field, place) for each in found))
    examples = [_example(split, field, place) for split in splits]
    for name, example in zip(Splits._fields, examples, strict=True):
        fix = f"an example of {name} is {example}, and of train {examples[0]}; make them alike"
        require(example == examples[0], field, place, fix, code="mismatch")
    return splits


def _dataset(found: Any, field: str, place: str) -> Dataset:
    if isinstance(found, Mapping):
        arrays = {name: np.asarray(array) for name, array in found.items()}
        lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
        fix = f"a split has arrays of lengths {lengths}; give arrays of one length, above 0"
        alike = len(set(lengths.values())) == 1 and min(lengths.values()) > 0
        require(alike, field, place, fix, code="mismatch")
        return ArrayDataset(arrays)
    if isinstance(found, ArrayDataset):
        return found
    if type(found).__module__.partition(".")[0] == "datasets":  # its `take` is another one
        return HuggingFaceDataset(found)

    if hasattr(found, "__len__") and hasattr(found, "take"):
        batch = found.take(np.arange(1)) if len(found) else {}
        fix = f"take(indices) returns a {type(batch).__name__}; return a dict of arrays by name"
        require(isinstance(batch, Mapping), field, place, fix, code="type")
        return _Completed(found, field, place)
    if hasattr(found, "__len__") and hasattr(found, "__getitem__") and not isinstance(found, str):
        return SourceDataset(found, field, place)
    fix = (
        f"a split is a {type(found).__name__}; give a dict of arrays, or an object with __len__ "
        "and take(indices)"
    )
    raise UserError(field, place, fix, code="type")


def _example(split: Dataset, field: str, place: str) -> dict[str, str]:
    """Return the dtype and shape of an example by name, as text."""
    fix = "a split has no example; give it some"
    require(len(split) > 0, field, place, fix)
    most = min(64, len(split))
    one = _spec(split, 1, field, place)
    many = _spec(split, most, field, place)
    fix = f"an example of take of 1 is {one}, and of {most} {many}; make them alike"
    require(one == many, field, place, fix, code="mismatch")
    return one


def _spec(split: Dataset, examples: int, field: str, place: str) -> dict[str, str]:
    batch = split.take(np.arange(examples))
    fix = "take(indices) gives no arrays with an example for each index; correct it"
    arrays = {name: np.asarray(array) for name, array in dict(batch).items()}
    fits = all(array.ndim and len(array) == examples for array in arrays.values())
    require(arrays and fits, field, place, fix, code="type")
    return {name: f"{array.dtype}{list(array.shape[1:])}" for name, array in arrays.items()}
