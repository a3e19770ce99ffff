"""Names of the files and folders of splits."""

from __future__ import annotations

from collections.abc import Sequence

from lbopt.errors import require

SPLIT_NAMES = {"train": ("train",), "validation": ("validation", "valid", "val"), "test": ("test",)}
"""Split -> names that its file or folder may have."""
_LISTED = "train, validation (or val) and test"


def stated_splits(names: Sequence[str], field: str, value: str) -> dict[str, str]:
    """Return the name that each split has among some names; all have to be splits.

    Args:
      names: The names.
      field: Parameter whose value has them, for errors.
      value: Its value.

    Raises:
      UserError: If a name is none of a split, or if there is no training split.

    >>> stated_splits(["test", "train"], "path", "homes")
    {'train': 'train', 'test': 'test'}
    """
    known = {name: split for split, its_names in SPLIT_NAMES.items() for name in its_names}
    for name in names:
        fix = f"{name!r} is none of the splits {_LISTED}; rename it, or take it away"
        require(name in known, field, value, fix, code="choice")
    found = {known[name]: name for name in names}
    fix = f"it has {sorted(names)}; give one of each of {_LISTED}, at least train"
    require("train" in found and len(found) == len(names), field, value, fix, code="missing")
    return {split: found[split] for split in SPLIT_NAMES if split in found}
