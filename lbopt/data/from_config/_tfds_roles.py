"""Any data set of TensorFlow Datasets (TFDS): the roles of its fields, and its tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lbopt.config import DataConfig, check_no_image
from lbopt.data._arrays import Splits
from lbopt.data._damaged import DamagedCount, DamagedRecord
from lbopt.data._records import TfdsFolder, read_any_record
from lbopt.data.own import TARGETS, Columns
from lbopt.errors import require, require_choice

_LARGEST_IN_MEMORY_BYTES = 2**31


class Roles(NamedTuple):
    """Fields of a data set that a model sees and predicts.

    Attributes:
      inputs: Names of the fields that the model sees.
      target: Name of the field to predict.
      image: Whether the only input is an image.
      class_names: Names of the target's classes; () if it has none.
    """

    inputs: tuple[str, ...]
    target: str
    image: bool
    class_names: tuple[str, ...]


def roles_of(data: DataConfig, folder: TfdsFolder) -> Roles:
    """Return the roles of fields: those of the config, of the data set's statement, or by kind.

    Raises:
      UserError: Naming `target` or `features`, if a field is missing or its role is not clear.
    """
    names = list(folder.features)
    stated = folder.supervised_keys
    if not (isinstance(stated, tuple) and all(isinstance(name, str) for name in stated)):
        stated = ()
    target = data.target or (stated[1] if stated else "")
    if not target:
        found = folder.names_of("ClassLabel") or [name for name in TARGETS if name in names]
        fix = f"{len(found)} of its fields may be meant: {found}; name one of {names}"
        require(len(found) == 1, "target", target, fix, code="missing")
        target = found[0]
    require_choice("target", target, names)

    images = [name for name in folder.names_of("Image") if name != target]
    inputs = tuple(data.features) or stated[:1] or tuple(images)
    inputs = inputs or tuple(name for name in names if name != target)
    for name in inputs:
        require_choice("features", name, [one for one in names if one != target])
    image = any(name in images for name in inputs)
    fix = f"{inputs} has an image beside other fields; name one of them"
    require(len(inputs) == 1 or not image, "features", data.features, fix, code="missing")
    classes = target in folder.names_of("ClassLabel")
    fix = "an image is read with its class, and this field is of another kind; name a ClassLabel"
    require(classes or not image, "target", target, fix, code="type")
    return Roles(inputs, target, image, tuple(folder.features[target].names) if classes else ())


def read_tensors(data: DataConfig, folder: TfdsFolder, roles: Roles) -> Columns:
    """Return the fields of all records of the three splits, in memory.

    Raises:
      UserError: If a field of the config does not fit tensors, or if they need too much memory.
      EnvironmentProblem: If too many records are damaged.
    """
    check_no_image(data)
    names = (*roles.inputs, roles.target)
    parts = [_read(data, folder, names, f"{split}_split") for split in Splits._fields]
    counts = [len(part[roles.target]) for part in parts]
    whole = {name: np.concatenate([part[name] for part in parts]) for name in names}
    classes = {roles.target: roles.class_names} if roles.class_names else {}
    return Columns(whole, np.repeat(Splits._fields, counts), class_names=classes)


def _read(
    data: DataConfig, folder: TfdsFolder, names: tuple[str, ...], field: str
) -> dict[str, np.ndarray]:
    split = getattr(data, field)
    records = folder.open(split, field, encoded=folder.names_of("Image"))
    damaged = DamagedCount(f"{data.builder} {split}", data.max_damaged_records)
    found: dict[str, list[Any]] = {name: [] for name in names}
    for index in range(len(records)):
        try:
            record = read_any_record(records, index)
        except DamagedRecord as error:
            damaged.add(index, str(error))
            continue
        values = {name: _value(record[name]) for name in names}
        if not any(found.values()):
            size = sum(value.nbytes for value in values.values()) * len(records)
            fix = f"{split} takes {size / 2**30:.1f} GiB in memory; name fewer {{features}}, or "
            fix += "give a function that returns its as_data_source"
            fits = size <= _LARGEST_IN_MEMORY_BYTES
            require(fits, "builder", data.builder, fix, code="resource", also=["features"])
        for name, value in values.items():
            found[name].append(value)

    for name, several in found.items():
        shapes = sorted({value.shape for value in several})[:2]
        fix = f"{name!r} has records of the shapes {shapes}; leave it out"
        require(len(shapes) == 1, "features", names[:-1], fix, code="mismatch")
    return {name: np.stack(several) for name, several in found.items()}


def _value(value: Any) -> np.ndarray:
    return np.asarray(value.decode(errors="replace") if isinstance(value, bytes) else value)
