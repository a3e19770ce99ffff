"""Arrays of the user, split, checked, normalized, with the task that their target sets."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lbopt import paths
from lbopt.data._arrays import ArrayDataset, Dataset, Reading, Splits
from lbopt.data.own import _columns
from lbopt.data.own._joined import JoinedArrays
from lbopt.data.own._saved import SavedTable, is_saved
from lbopt.data.own._split_names import SPLIT_NAMES
from lbopt.errors import UserError, require, require_choice

TARGETS = ("label", "labels", "target", "targets", "y", "class")
"""Names of the array to predict, where none is given."""
_OF_CLASSES = ("label", "labels", "class")
"""Those of `TARGETS` that are classes; floats in them are a mistake, unless a task is stated."""
TASKS = ("classification", "language_model", "multi_label", "regression")
TOKENS = "tokens"
"""The array of a language model."""
MATRIX = "features"
"""The array that the columns of a table make."""
_CHUNK_BYTES = 2**26
_SEEN = 64
"""Number of examples of each split that are checked, where a data set is no array."""
_LARGEST_IN_MEMORY_BYTES = 2**31
"""Size up to which the normalized arrays of a split are held in memory."""

Arrays = Mapping[str, np.ndarray]


class Statistics(NamedTuple):
    """Mean and standard deviation of a feature on the training split, fp32, by which it is
    normalized; they broadcast against an example."""

    mean: np.ndarray
    std: np.ndarray


@dataclasses.dataclass(frozen=True)
class OwnData:
    """Data of the user.

    Attributes:
      splits: Training, validation and test set.
      task: One of `TASKS`.
      target: Name of the array to predict; "" for a language model.
      features: Names of the arrays that the model sees.
      outputs: Number of classes, labels, numbers or tokens.
      class_names: Names of the classes, where labels are text.
      target_variance: Variance of the training targets of a regression; 1 otherwise.
    """

    splits: Splits
    task: str
    target: str
    features: tuple[str, ...]
    outputs: int
    class_names: tuple[str, ...] = ()
    target_variance: float = 1.0


class Columns(NamedTuple):
    """Arrays or columns of all splits together.

    Attributes:
      arrays: Name -> [examples, ...].
      split_of: [examples], "train", "validation" or "test", or "" where no split is stated.
      in_table: Whether they are columns of a table.
      class_names: Name -> names of the classes, where they are stated.
    """

    arrays: Arrays
    split_of: np.ndarray
    in_table: bool = False
    class_names: Mapping[str, tuple[str, ...]] = {}


class MappedArrays(ArrayDataset):
    """Arrays that stay on disk, normalized as they are read.

    Args:
      arrays: Name -> [all examples, ...], memory-mapped.
      rows: Numbers of the examples that belong to the split, ascending.
      statistics: Statistics of the features to normalize, by name.
    """

    reading = Reading(threads=4, examples_per_slice=256)
    same_in_every_epoch = False  # too large for a device: batches are read as they are needed

    def __init__(self, arrays: Arrays, rows: np.ndarray, statistics: Mapping[str, Statistics]):
        super().__init__(arrays)
        self._rows = rows
        self._statistics = statistics

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the examples at `indices` as one batch."""
        rows = self._rows[indices]
        return {
            name: _prepared(array[rows], self._statistics.get(name))
            for name, array in self.arrays.items()
        }


def load_arrays(
    path: paths.GivenPath | Mapping[str, Any] | Any,
    *,
    target: str = "",
    task: str = "",
    outputs: int | None = None,
    features: Sequence[str] = (),
    matrix: bool = True,
    split_column: str = "",
    validation_fraction: float = 0.1,
    test_fraction: float = 0.1,
    split_seed: int = 0,
    normalize: bool = True,
) -> OwnData:
    """Read arrays or a table, and split, check and normalize them.

    Splits are stated by files (`train.npz`, `validation.npz`, `test.npz` in a folder, or folders of
    these names) or by a column; those that are not are drawn from the others' training examples by
    a seed, of classes in equal shares.

    Args:
      path: A file or a folder, or gs://BUCKET/PATH of one; or arrays by name, a table of pandas,
        or what was read.
      target: Array or column to predict; "" for the only one of `TARGETS` that is there.
      task: One of `TASKS`; "" for that which the target tells: integers, bools or text [examples]
        are classes, floats are numbers, and [examples, labels] of 0 and 1 are labels.
      outputs: Number of classes, labels or tokens; None for that of the training split.
      features: Arrays or columns that the model sees; () for all others.
      matrix: Whether the columns of a table make one array `MATRIX` [examples, columns].
      split_column: Column with "train", "validation" or "test"; "" for none.
      validation_fraction: Fraction of all examples that are drawn for validation.
      test_fraction: Fraction of all examples that are drawn for the test.
      split_seed: Seed by which they are drawn.
      normalize: Whether features of floats, and of pixels (uint8), get mean 0 and standard
        deviation 1 on the training split: each column of [examples, columns], each channel of
        images with up to 4, and otherwise the whole array.

    Raises:
      UserError: Naming the parameter: no such column, arrays of different lengths, values that are
        not finite, labels that are no classes, an empty split.
    """
    # The columns of all splits together, and the roles that they have.
    found = path if isinstance(path, Columns) else _read(path)
    whole, split_of, in_table, declared = found
    if split_column:
        split_of = _stated(whole, split_column)
    target, task = _target_and_task(whole, target, task, exclude=split_column)
    chosen = _features(whole, target, split_column, features, task)
    classes = _class_names(whole, target, task, split_of)
    arrays = {name: whole[name] for name in chosen}
    if target:
        arrays[target] = _coded(whole[target], target, task, classes)

    # The examples of each split, in arrays of the widths that JAX computes with.
    fractions = validation_fraction, test_fraction
    rows = split_rows(split_of, arrays.get(target), task, *fractions, split_seed)
    if in_table and matrix and task != "language_model":
        for name in chosen:  # named before they are columns of a matrix
            if arrays[name].dtype.kind == "f":
                _check_finite(name, arrays[name])
        arrays = _as_matrix(arrays, chosen, target)
        chosen = (MATRIX,)
    arrays = {name: _narrow(name, array) for name, array in arrays.items()}

    # Labels are checked and features measured on the training examples.
    predicted = arrays[target or TOKENS]
    outputs = outputs or len(declared.get(target, ())) or None
    outputs = _outputs(predicted, rows["train"], target, task, outputs)
    for name in Splits._fields:
        _check_classes(predicted, rows[name], name, target, task, outputs)
    statistics = {
        name: measured
        for name in (*chosen, *([target] if task == "regression" else []))
        for measured in [_statistics(name, arrays[name], rows["train"])]
        if measured is not None
    }
    variance = 1.0
    if task == "regression":
        variance = float(np.mean(np.square(statistics.pop(target).std))) or 1.0
    if not normalize:
        statistics = {}
    splits = Splits(*(_split(arrays, rows[name], statistics) for name in Splits._fields))
    classes = classes or declared.get(target, ())
    return OwnData(splits, task, target, chosen, outputs, classes, variance)


def describe(
    splits: Splits,
    *,
    target: str = "",
    task: str = "",
    outputs: int | None = None,
    features: Sequence[str] = (),
) -> OwnData:
    """Return splits of the user with their task; the arguments are those of `load_arrays`.

    Raises:
      UserError: As `load_arrays`; and naming `outputs`, if the training set is no `ArrayDataset`,
        whose classes could be counted.
    """
    one = splits.train.take(np.arange(1))
    target, task = _target_and_task(one, target, task)
    chosen = _features(one, target, "", features, task)
    if all(isinstance(split, ArrayDataset) for split in splits):
        return _described(splits, target, task, chosen, outputs)

    # Of data that are read as they are needed, the first examples are looked at.
    if outputs is None and task in ("multi_label", "regression"):
        outputs = int(np.prod(one[target].shape[1:], initial=1))
    fix = "the data set cannot tell; give the number of classes or tokens"
    if outputs is None:
        raise UserError("outputs", None, fix, code="missing")
    first = (ArrayDataset(split.take(np.arange(min(len(split), _SEEN)))) for split in splits)
    _described(Splits(*first), target, task, chosen, outputs)
    return OwnData(splits, task, target, chosen, outputs)


def _described(
    splits: Any, target: str, task: str, features: tuple[str, ...], outputs: int | None
) -> OwnData:
    """Return splits in memory with their task; check their values."""
    for split in splits:
        for name in features:
            if split.arrays[name].dtype.kind == "f":
                _check_finite(name, split.arrays[name])
    trained = splits.train.arrays[target or TOKENS]
    outputs = _outputs(trained, np.arange(len(trained)), target, task, outputs)
    for split, dataset in zip(Splits._fields, splits, strict=True):
        array = dataset.arrays[target or TOKENS]
        _check_classes(array, np.arange(len(array)), split, target, task, outputs)
        if task == "multi_label":
            _check_labels(array, target)
        if task == "regression":
            _require_numbers(array, target, "biuf", "numbers")
            _check_finite(target, array, "target")
    variance = float(np.var(trained, axis=0).mean()) if task == "regression" else 1.0
    return OwnData(splits, task, target, features, outputs, (), variance or 1.0)


# ---- reading


def _read(source: Any) -> Columns:
    if not isinstance(source, str | os.PathLike):
        columns = _columns.columns_of(source)
        _columns.lengths(columns)
        size = len(next(iter(columns.values())))
        return Columns(columns, np.repeat([""], size), not isinstance(source, Mapping))

    path = paths.readable(source, "path")
    if is_saved(path):
        found = SavedTable(path)
        return Columns(found.columns(), found.split_of(), class_names=found.class_names)
    stated = _stated_files(path)
    files = stated or {"": path}
    parts = {name: _columns.read_columns(file) for name, file in files.items()}
    for columns in parts.values():
        _columns.lengths(columns)
    whole = {name: _joined([part[name] for part in parts.values()]) for name in _names(parts, path)}
    counts = [len(next(iter(columns.values()))) for columns in parts.values()]
    in_table = all(file.suffix in _columns.TABLES for file in files.values())
    return Columns(whole, np.repeat(list(parts), counts), in_table)


def _stated_files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Return the files or folders of splits in a folder, by split."""
    if not folder.is_dir():
        return {}
    entries = {entry.stem: entry for entry in sorted(folder.iterdir())}
    found = {
        split: entries[name]
        for split, names in SPLIT_NAMES.items()
        for name in names
        if name in entries and entries[name].suffix in ("", *_columns.FORMATS)
    }
    found = {name: entry for name, entry in found.items() if entry.is_dir() or entry.suffix}
    # A folder of arrays may have one that is called train.
    return found if "train" in found and len(found) > 1 else {}


def _names(parts: Mapping[str, Arrays], path: Any) -> list[str]:
    first = next(iter(parts.values()))
    for split, columns in parts.items():
        fix = f"{split} has {sorted(columns)}, and train {sorted(first)}; make them alike"
        require(columns.keys() == first.keys(), "path", str(path), fix, code="mismatch")
    return list(first)


def _joined(parts: Sequence[np.ndarray]) -> Any:
    if len(parts) == 1:
        return parts[0]
    alike = len({(part.dtype, part.shape[1:]) for part in parts}) == 1
    on_disk = all(isinstance(part, np.memmap) for part in parts)
    return JoinedArrays(parts) if alike and on_disk else np.concatenate(parts)


def _stated(whole: Arrays, split_column: str) -> np.ndarray:
    """Return the split of each example that a column states."""
    require_choice("split_column", split_column, whole)
    values = np.asarray(whole[split_column]).astype(str)
    for value in np.unique(values):
        fix = f"it holds {str(value)!r}; write 'train', 'validation' or 'test'"
        require(value in SPLIT_NAMES, "split_column", split_column, fix)
    return values


# ---- target, task and features


def _target_and_task(columns: Arrays, target: str, task: str, exclude: str = "") -> tuple[str, str]:
    if task:
        require_choice("task", task, TASKS)
    if task == "language_model" or (not target and not task and set(columns) == {TOKENS}):
        fix = f"a language model reads the array {TOKENS!r}; leave it ''"
        require(not target, "target", target, fix, code="conflict")
        require_choice("features", TOKENS, columns)
        return "", "language_model"

    names = [name for name in columns if name != exclude]
    if not target:
        found = [name for name in TARGETS if name in names]
        fix = f"{len(found)} of the arrays are called {', '.join(TARGETS)}; name one of {names}"
        require(len(found) == 1, "target", target, fix, code="missing")
        target = found[0]
    require_choice("target", target, names)
    return target, task or _task_of(target, columns[target])


def _task_of(target: str, array: np.ndarray) -> str:
    if np.issubdtype(array.dtype, np.floating):
        fix = f"it holds {_kind(array)}; convert it to integers, or set {{task}} to 'regression'"
        if target in _OF_CLASSES:
            raise UserError("target", target, fix, also=["task"], code="type")
        return "regression"
    return "classification" if array.ndim == 1 else "multi_label"


def _features(
    columns: Arrays, target: str, split_column: str, features: Sequence[str], task: str
) -> tuple[str, ...]:
    if task == "language_model":
        return (TOKENS,)
    for name in features:
        require_choice("features", name, [one for one in columns if one != target])
    others = [name for name in columns if name not in (target, split_column)]
    chosen = tuple(features) or tuple(others)
    fix = f"there is no array beside the target {target!r}; give data that have some"
    require(chosen, "features", tuple(features), fix, code="missing")
    _require_numeric(columns, chosen, features)
    return chosen


def _require_numeric(columns: Arrays, chosen: Sequence[str], given: Sequence[str]) -> None:
    """Raise `UserError` for features that are no numbers; name them all, and those that are."""
    numeric = tuple(name for name in chosen if columns[name].dtype.kind in "biuf")
    others = [name for name in chosen if name not in numeric]
    if not others:
        return
    held = (f"{name!r} ({_kind(columns[name])})" for name in others)
    fix = f"features are numbers, and not {', '.join(held)}; encode them as numbers"
    if numeric:
        fix += f', or use the others: {{features}}="{numeric}"'
    raise UserError("features", tuple(given), fix, also=["features"], code="type")


def _class_names(columns: Arrays, target: str, task: str, split_of: np.ndarray) -> tuple[str, ...]:
    if task != "classification" or columns[target].dtype.kind not in "US":
        return ()
    train = split_of == "train" if "train" in split_of else np.ones(len(split_of), bool)
    labels = np.asarray(columns[target])
    empty = np.flatnonzero(labels == "")
    fix = f"example {empty[:1]} has no label; correct it, or leave it out"
    require(not empty.size, "target", target, fix)
    names = np.unique(labels[train])
    unknown = sorted(set(np.unique(labels)) - set(names))
    fix = f"class {str(unknown[:1])[1:-1]} is in no training example; add some, or leave it out"
    require(not unknown, "target", target, fix, code="mismatch")
    return tuple(map(str, names))


def _coded(array: np.ndarray, target: str, task: str, classes: tuple[str, ...]) -> np.ndarray:
    """Return the target as numbers of the dtype that its task needs."""
    if classes:
        return np.searchsorted(np.asarray(classes), np.asarray(array)).astype(np.int32)
    if task == "regression":
        _require_numbers(array, target, "biuf", "numbers")
        return np.asarray(array, np.float32)
    fix_kind = "whole numbers" if task == "classification" else "0 and 1"
    _require_numbers(array, target, "biu", fix_kind)
    if task == "classification":
        fix = f"its shape is {array.shape}; classes are one number an example"
        require(array.ndim == 1, "target", target, fix, code="type")
        return np.asarray(_narrow(target, array, "target"), np.int32)
    fix = f"its shape is {array.shape}; labels are [examples, labels]"
    require(array.ndim == 2, "target", target, fix, code="type")
    array = np.asarray(array)
    _check_labels(array, target)
    return np.asarray(array, np.int32)


def _check_labels(array: np.ndarray, target: str) -> None:
    """Raise `UserError` for several labels that are not all 0 or 1."""
    wrong = np.flatnonzero(((array != 0) & (array != 1)).reshape(len(array), -1).any(1))
    fix = f"example {wrong[:1]} has other labels than 0 and 1; correct it"
    require(not wrong.size, "target", target, fix)


def _require_numbers(array: np.ndarray, target: str, kinds: str, what: str) -> None:
    fix = f"it holds {_kind(array)}, and this task needs {what}; convert it, or give another task"
    require(array.dtype.kind in kinds, "target", target, fix, code="type")


def _kind(array: np.ndarray) -> str:
    """Return what an array or a column holds, for errors."""
    return "text" if array.dtype.kind in "US" else getattr(array, "what", str(array.dtype))


def _outputs(
    array: np.ndarray, rows: np.ndarray, target: str, task: str, outputs: int | None
) -> int:
    """Return the number of outputs: the stated one, or that of the targets at some rows."""
    if task in ("multi_label", "regression"):
        found = int(np.prod(array.shape[1:], initial=1))
        fix = f"{target!r} has {found}; leave it None"
        require(outputs in (None, found), "outputs", outputs, fix, code="mismatch")
        return found
    name = target or TOKENS
    fix = f"it holds {_kind(array)}; give whole numbers"
    require(array.dtype.kind in "biu", "target", name, fix, code="type")
    return outputs or max(int(np.max(chunk)) for _, chunk in _chunks(array, rows)) + 1


def _check_classes(
    array: np.ndarray, rows: np.ndarray, split: str, target: str, task: str, outputs: int
) -> None:
    """Raise `UserError` for a class or token beyond the outputs."""
    if task not in ("classification", "language_model"):
        return
    for start, chunk in _chunks(array, rows):
        wrong = np.argwhere((chunk < 0) | (chunk >= outputs))
        if wrong.size:
            place = rows[start + wrong[0][0]]
            value = chunk[tuple(wrong[0])]
            most = f"and {{outputs}} are 0 to {outputs - 1}; correct it, or give more"
            fix = f"example {place}, of {split}, has {value}, "
            fix += "which is below 0; correct it" if value < 0 else most
            raise UserError("target", target or TOKENS, fix, also=["outputs"])


# ---- splits


def split_rows(
    split_of: np.ndarray,
    labels: np.ndarray | None,
    task: str,
    validation_fraction: float,
    test_fraction: float,
    seed: int,
) -> dict[str, np.ndarray]:
    """Return the numbers of the examples of each split, ascending."""
    found = {name: np.flatnonzero(split_of == name) for name in Splits._fields}
    if not found["train"].size:
        found["train"] = np.flatnonzero(split_of == "")
    fractions = {"validation": validation_fraction, "test": test_fraction}
    total = len(split_of)
    groups = labels if task == "classification" else None
    for number, (name, fraction) in enumerate(fractions.items()):
        if not found[name].size:
            drawn = _drawn(found["train"], groups, round(fraction * total), (seed, number))
            found["train"] = np.setdiff1d(found["train"], drawn)
            found[name] = drawn
    sizes = {name: len(rows) for name, rows in found.items()}
    for name, size in sizes.items():
        field = "path" if name == "train" else f"{name}_fraction"
        fix = f"{name} has no example of the {total}; give more examples, or a larger fraction"
        require(size, field, fractions.get(name, sizes), fix)
    return found


def _drawn(
    rows: np.ndarray, groups: np.ndarray | None, count: int, seed: tuple[int, int]
) -> np.ndarray:
    """Return `count` of some rows, drawn by a seed; of classes in equal shares.

    Rows are shuffled, sorted by class, and taken at equal distances, so that the share of every
    class is right to within one example.
    """
    shuffled = np.random.Generator(np.random.PCG64(seed)).permutation(rows)
    if groups is not None:
        shuffled = shuffled[np.argsort(groups[shuffled], kind="stable")]
    places = (np.arange(count) * len(shuffled)) // max(count, 1)
    return np.sort(shuffled[places])


# ---- values


def _as_matrix(arrays: Arrays, chosen: Sequence[str], target: str) -> dict[str, np.ndarray]:
    columns = [np.asarray(arrays[name], np.float32) for name in chosen]
    found = {MATRIX: np.stack(columns, 1)}
    return {**found, target: arrays[target]} if target else found


def _narrow(name: str, array: np.ndarray, field: str = "features") -> np.ndarray:
    """Return an array of the widths that JAX computes with; what is on disk is narrowed later."""
    if array.dtype.kind in "iu" and array.dtype.itemsize == 8:
        bounds = np.iinfo(np.int32)
        for _, chunk in _chunks(array, np.arange(len(array))):
            fits = not chunk.size or (chunk.min() >= bounds.min and chunk.max() <= bounds.max)
            fix = "it has numbers that do not fit int32; scale or leave them out"
            require(fits, field, name, fix)
        on_disk = isinstance(array, np.memmap | JoinedArrays)
        return array if on_disk else np.asarray(array, np.int32)
    return array


def _chunks(array: np.ndarray, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the examples at some rows in chunks of bounded size, after the place of the first."""
    # Bounded in float64, to which statistics turn a chunk.
    of_one = int(np.prod(array.shape[1:], initial=1)) * max(8, array.dtype.itemsize)
    step = max(1, _CHUNK_BYTES // of_one)
    for start in range(0, len(rows), step):
        yield start, array[rows[start : start + step]]


def _statistics(name: str, array: np.ndarray, rows: np.ndarray) -> Statistics | None:
    """Return the statistics of a feature that can be normalized; check that it is finite.

    None for integers other than pixels, which may be tokens.
    """
    if array.dtype.kind == "f":
        _check_finite(name, array)
    elif array.dtype != np.uint8 or array.ndim < 3:
        return None
    kept = array.ndim == 2 or (array.ndim >= 4 and array.shape[-1] <= 4)
    axes = tuple(range(array.ndim - kept))

    # Sums in float64 around the first example, so that a large mean costs no digits.
    shift = np.asarray(array[rows[0]], np.float64) * (array.dtype != np.uint8)
    shift = shift if array.ndim - kept == 1 else shift.mean(tuple(a - 1 for a in axes if a))
    count = 0
    total = np.zeros_like(shift)
    squares = np.zeros_like(shift)
    for _, chunk in _chunks(array, rows):
        count += chunk.size // max(1, total.size)
        if array.dtype == np.uint8:  # exact in integers, and faster
            total += chunk.sum(axes, np.uint64)
            squares += np.square(chunk, dtype=np.uint16).sum(axes, np.uint64)
            continue
        moved = np.asarray(chunk, np.float64) - shift
        total += moved.sum(axes)
        squares += np.square(moved).sum(axes)
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0))
    std = np.where(std > 0, std, 1.0)
    return Statistics((mean + shift).astype(np.float32), std.astype(np.float32))


def _check_finite(name: str, array: np.ndarray, field: str = "features") -> None:
    for start, chunk in _chunks(array, np.arange(len(array))):
        bad = np.flatnonzero(~np.isfinite(chunk.reshape(len(chunk), -1)).all(1))
        if bad.size:
            fix = f"example {start + bad[0]} is not finite; correct it, or leave it out"
            raise UserError(field, name, fix)


def _prepared(array: np.ndarray, statistics: Statistics | None) -> np.ndarray:
    if statistics is not None:
        return (np.asarray(array, np.float32) - statistics.mean) / statistics.std
    if array.dtype.kind == "f":
        return np.asarray(array, np.float32)
    is_long = array.dtype.kind in "iu" and array.dtype.itemsize == 8
    return np.asarray(array, np.int32) if is_long else np.asarray(array)


def _split(arrays: Arrays, rows: np.ndarray, statistics: Mapping[str, Statistics]) -> Dataset:
    """Return a split, in memory if it is small."""
    size = sum(
        len(rows) * int(np.prod(array.shape[1:], initial=1)) * max(4, array.dtype.itemsize)
        for array in arrays.values()
    )
    mapped = MappedArrays(arrays, rows, statistics)
    if size > _LARGEST_IN_MEMORY_BYTES:
        return mapped
    return ArrayDataset(mapped.take(np.arange(len(rows))))
