"""A variant is a row of options; any option given explicitly overrides the row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lbopt import types


def choose(rows: Mapping[str, Mapping[str, Any]], variant: str, **given: Any) -> dict[str, Any]:
    """Return the row of `variant` with every option of `given` that is not `UNSET` laid over it.

    >>> choose({"paper": {"wd": 1}}, "paper", wd=types.UNSET), choose({"paper": {"wd": 1}}, "paper", wd=None)
    ({'wd': 1}, {'wd': None})
    """
    if variant not in rows:
        raise ValueError(f"variant = {variant!r}: use one of {', '.join(rows)}")
    return {**rows[variant], **{name: value for name, value in given.items() if value is not types.UNSET}}
