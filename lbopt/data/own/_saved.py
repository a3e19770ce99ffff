"""Data sets that Hugging Face's `datasets` saved in a folder, read by pyarrow where they lie."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from lbopt.data._damaged import DamagedRecord
from lbopt.data.own._joined import JoinedArrays, OtherColumn, TextColumn
from lbopt.data.own._split_names import stated_splits
from lbopt.errors import MissingPackage, UserError, require

_WHOLE = "state.json"
_FEATURES = "dataset_info.json"
_SPLITS = "dataset_dict.json"


def is_saved(path: pathlib.Path) -> bool:
    """Return whether a folder was written by `save_to_disk`."""
    is_one = all((path / name).is_file() for name in (_WHOLE, _FEATURES))
    return is_one or (path / _SPLITS).is_file()


class SavedTable:
    """A data set that was saved by `save_to_disk`, with all its splits, memory-mapped.

    Args:
      root: Its folder.
      field: Parameter that holds it, for errors.

    Attributes:
      features: Column -> its description by `datasets`.
      class_names: Column of the kind ClassLabel -> names of its classes.

    Raises:
      UserError: If a file is missing or damaged, or if it has other splits than train, validation
        and test.
    """

    def __init__(self, root: pathlib.Path, field: str = "path"):
        self._root = root
        self._field = field
        self._folders = self._found_splits()
        first = next(iter(self._folders.values()))
        self.features: dict[str, Any] = self._entry(first / _FEATURES, "features") or {}
        self.class_names = {
            name: tuple(feature["names"])
            for name, feature in self.features.items()
            if kind_of(feature) == "ClassLabel"
        }

    def __getstate__(self) -> dict[str, Any]:
        # A reading process maps the files itself.
        return {name: value for name, value in vars(self).items() if name != "_tables"}

    @functools.cached_property
    def _tables(self) -> dict[str, Any]:
        return {split: self._opened(folder) for split, folder in self._folders.items()}

    def table(self) -> Any:
        """Return the records of all splits, one after another, as a table of pyarrow."""
        import pyarrow

        try:
            return pyarrow.concat_tables(self._tables.values())
        except pyarrow.ArrowInvalid as error:
            raise self._damaged(error) from error

    def split_of(self) -> np.ndarray:
        """Return the split of each record, "" where none is stated."""
        return np.repeat(list(self._tables), [len(table) for table in self._tables.values()])

    def columns(self) -> dict[str, Any]:
        """Return the columns by name: arrays of numbers where each record has the same shape."""
        table = self.table()
        return {
            name: _column(table.column(name), self.features.get(name, {}))
            for name in table.column_names
        }

    def _found_splits(self) -> dict[str, pathlib.Path]:
        if not (self._root / _SPLITS).is_file():
            return {"": self._root}
        names = self._entry(self._root / _SPLITS, "splits")
        found = stated_splits(names, self._field, str(self._root))
        return {split: self._root / name for split, name in found.items()}

    def _entry(self, file: pathlib.Path, name: str, *default: Any) -> Any:
        """Return an entry of a JSON file, or the default if one is given and there is none."""
        try:
            found = json.loads(file.read_text())
            return found.get(name, *default) if default else found[name]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(error) from error

    def _opened(self, folder: pathlib.Path) -> Any:
        """Return the table of a split. Its files are streams of Arrow's record batches."""
        try:
            import pyarrow
        except ImportError as error:
            fix = f"it reads tables, and is not installed ({error}): pip install 'lbopt[tables]'"
            raise MissingPackage("pyarrow", reason=fix) from error
        state = folder / _WHOLE
        fix = "its rows have an index beside them; save it again after flatten_indices()"
        plain = not self._entry(state, "_indices_data_files", None)
        require(plain, self._field, str(folder), fix, code="type")

        files = [str(folder / one["filename"]) for one in self._entry(state, "_data_files")]
        try:
            return pyarrow.concat_tables(
                pyarrow.ipc.open_stream(pyarrow.memory_map(file)).read_all() for file in files
            )
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> UserError:
        cause = " ".join(str(error).split())[:200]
        fix = f"it cannot be read ({cause}); save it again"
        return UserError(self._field, str(self._root), fix, code="damaged")


class SavedImages:
    """Records of a saved data set with encoded images.

    Args:
      saved: The data set.
      image: Column of the kind Image.
      label: Column of the kind ClassLabel.
    """

    def __init__(self, saved: SavedTable, image: str, label: str):
        self._saved = saved
        self._names = (image, label)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_columns"}

    @functools.cached_property
    def _columns(self) -> tuple[Any, Any]:
        image, label = (self._saved.table().column(name) for name in self._names)
        return image, label

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        image, label = (column[index].as_py() for column in self._columns)
        if image is None or label is None:
            raise DamagedRecord("its image or label is missing")
        data = image["bytes"]
        file = image["path"] or ""
        if data is None:
            data = pathlib.Path(file).read_bytes()
        return {"image": data, "label": label, "file_name": file}


def kind_of(feature: Any) -> str:
    """Return the kind of a column by its description, "Image" for instance."""
    return feature.get("_type", "") if isinstance(feature, Mapping) else ""


def _column(column: Any, feature: Any) -> Any:
    """Return a column [records, ...] as an array where it lies, or a description of it."""
    import pyarrow.types as kinds

    if column.null_count:
        return OtherColumn(f"{column.null_count} missing values", len(column))
    if kinds.is_string(column.type) or kinds.is_large_string(column.type):
        return TextColumn(column)
    if kind_of(feature) == "Image":
        return OtherColumn("images (use ImageFolderConfig)", len(column))

    chunks = [chunk for chunk in column.chunks if len(chunk)]
    arrays = [array for chunk in chunks if (array := _dense(chunk)) is not None]
    shapes = {array.shape[1:] for array in arrays}
    if len(arrays) < len(chunks) or len(shapes) != 1:
        return OtherColumn(f"values of type {column.type}, or of various lengths", len(column))
    return arrays[0] if len(arrays) == 1 else JoinedArrays(arrays)


def _dense(chunk: Any) -> np.ndarray | None:
    """Return numbers, or nested lists of equal lengths, as an array; None for anything else."""
    import pyarrow.types as kinds

    shape = [len(chunk)]
    chunk = getattr(chunk, "storage", chunk)  # a type of `datasets`, if that is imported
    while kinds.is_nested(chunk.type):
        if kinds.is_fixed_size_list(chunk.type):
            shape.append(chunk.type.list_size)
        elif kinds.is_list(chunk.type) or kinds.is_large_list(chunk.type):
            lengths = np.unique(np.diff(chunk.offsets.to_numpy()))
            if len(lengths) != 1:
                return None
            shape.append(int(lengths[0]))
        else:
            return None
        chunk = chunk.flatten()
    plain = (kinds.is_integer, kinds.is_floating, kinds.is_boolean)
    if chunk.null_count or not any(is_kind(chunk.type) for is_kind in plain):
        return None
    return chunk.to_numpy(zero_copy_only=False).reshape(shape)
