"""Which arms may be compared with each other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Arm = Mapping[str, Any]
_PROBLEM = ("data", "model", "loss")


def settings(config: Mapping[str, Any], arm: str) -> Arm:
    """Return the config of an arm.

    Args:
      config: the study's config as JSON data.
      arm: its name.
    """
    return next(one for one in config["arms"] if one["name"] == arm)


def comparable(config: Mapping[str, Any], arms: Sequence[Arm]) -> list[list[Arm]]:
    """Sort arms into groups that train the same model on the same data with the same loss.

    Args:
      config: the study's config as JSON data; what an arm does not have of its own is the study's.
      arms: of a summary.

    Returns:
      The groups, in the order of their first arms.
    """
    groups: dict[str, list[Arm]] = {}
    for arm in arms:
        groups.setdefault(_problem(config, arm["arm"]), []).append(arm)
    return list(groups.values())


def _problem(config: Mapping[str, Any], arm: str) -> str:
    own = settings(config, arm)
    effective = [own.get(name) or config["train"].get(name) for name in _PROBLEM]
    return json.dumps(effective, sort_keys=True)
