"""States as an earlier version saved them: read by the names of their leaves, whatever containers these lay in."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from typing import Any

import jax

from lbopt import tree

NESTED = 1
"""The layout in which trust ratios and norms lay in the parameters' containers, and every learning rate beside a `count`."""
NOW = 2


_RENAMED = {"learning_rate": "applied_rate", "count": "schedule_count"}
_FLAX_LARS = re.compile(r"(.*)/([12])/inner_state/[01]/(.*)")
"""Where LARS of the variant "flax" kept adapted leaves and the others apart: two links, each with a velocity and a rate."""


def renamed(saved: Mapping[str, Any], like: Any) -> dict[str, Any]:
    """Return what was saved under each leaf's name under the name that the leaf has in the state `like` today."""
    names = set(tree.leaf_names(like))
    return {_name_now(name, names): value for name, value in saved.items()}


def _name_now(name: str, names: Container[str]) -> str:
    apart = _FLAX_LARS.fullmatch(name)
    if apart and name not in names:
        chain, link, rest = apart.groups()
        middle = f"{chain}/2/{rest}"
        name = middle if middle in names else f"{chain}/{1 if link == '2' else 3}/{rest}"
    head, _, last = name.rpartition("/")
    new = f"{head}/{_RENAMED.get(last, last)}"
    return new if new in names else name


def read(described: Any, like: Any, read_arrays: Callable[[Any], Any]) -> Any:
    """Read a state of the layout `NESTED`.

    Args:
      described: a leaf for each array that was saved, in the containers in which it was.
      like: the state of today: shapes, dtypes and shardings.
      read_arrays: shapes -> arrays, in the same containers.

    Returns:
      A state like `like`.

    Raises:
      ValueError: naming leaves, if others were saved.
    """
    shapes = tree.by_name(like)
    names = [_name_now(name, shapes) for name in tree.leaf_names(described)]
    if set(names) != shapes.keys():
        raise ValueError(f"its arrays differ at {tree.some(sorted(set(names) ^ shapes.keys()))}")
    target = jax.tree.unflatten(jax.tree.structure(described), [shapes[name] for name in names])
    found = dict(zip(names, jax.tree.leaves(read_arrays(target)), strict=True))
    return tree.map_with_name(lambda name, _: found[name], like)
