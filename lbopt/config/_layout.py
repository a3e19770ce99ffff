"""What of a config is layout: fields that change no parameter, and updates by rounding only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OF_DATA = ("name", "builder", "path", "options", "target")
_OF_MODEL = ("fold_columns", "fold_examples", "patch_convolutions")
_SAME_STEMS = ("auto", "space_to_depth")
"""Stems that compute the function of "conv7"."""


def without_layout(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config, as JSON data, without the fields that suit it to its devices.

    Runs whose configs differ in these alone can resume each other.

    >>> without_layout({"model": {"stem": "auto", "fold_columns": None}, "seed": 0})
    {'model': {'stem': 'conv7'}, 'seed': 0}
    """
    found = dict(config)
    if isinstance(found.get("model"), Mapping):
        model = {name: value for name, value in found["model"].items() if name not in _OF_MODEL}
        if model.get("stem") in _SAME_STEMS:
            model["stem"] = "conv7"
        found["model"] = model
    if isinstance(found.get("data"), Mapping):
        found["data"] = {
            name: value for name, value in found["data"].items() if name != "space_to_depth"
        }
    return found


def data_and_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a noise scale or a critical batch belongs to, of a config as JSON data.

    Of the path of data it has the last part, as the data may lie elsewhere on another machine.

    >>> config = {"data": {"name": "arrays", "path": "/a/b.csv"}, "model": {"name": "mlp"}}
    >>> data_and_model(config)
    {'config': {'data': {'name': 'arrays', 'path': 'b.csv'}, 'model': {'name': 'mlp'}}}
    """
    found = without_layout(config)
    data = {name: found["data"][name] for name in _OF_DATA if name in found["data"]}
    data["path"] = data["path"].rstrip("/").rpartition("/")[2]
    return {"config": {"data": data, "model": found["model"]}}
