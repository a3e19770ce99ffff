"""States that an earlier version saved: read by the names of their leaves, in any containers."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from typing import Any

import jax

from lbopt import tree

NESTED = 1
"""The earlier layout: trust ratios and norms nested like the parameters, each rate with a count."""
NOW = 2
"""The layout of this version."""

_RENAMED = {"learning_rate": "applied_rate", "count": "schedule_count"}
_FLAX_LARS = re.compile(r"(.*)/([12])/inner_state/[01]/(.*)")
"""Leaves of LARS, variant "flax", in the earlier layout.

It kept adapted leaves and the others in two links of a chain, each with a velocity and a rate.
"""


def renamed(saved: Mapping[str, Any], like: Any) -> dict[str, Any]:
    """Return saved values by the names that their leaves have in the state `like` today."""
    names = set(tree.leaf_names(like))
    return {_name_now(name, names): value for name, value in saved.items()}


def _name_now(name: str, names: Container[str]) -> str:
    """Return today's name of a leaf; `names` are those that there are."""
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
      described: A leaf for each saved array, in the containers of the earlier layout.
      like: Shapes, dtypes and shardings of the state today.
      read_arrays: Function of shapes, in the same containers, that returns the arrays.

    Returns:
      A state like `like`.

    Raises:
      ValueError: Naming leaves, if the saved ones are not those of `like`.
    """
    shapes = tree.by_name(like)
    names = [_name_now(name, shapes) for name in tree.leaf_names(described)]
    if set(names) != shapes.keys():
        raise ValueError(f"its arrays differ at {tree.some(sorted(set(names) ^ shapes.keys()))}")
    target = jax.tree.unflatten(jax.tree.structure(described), [shapes[name] for name in names])
    found = dict(zip(names, jax.tree.leaves(read_arrays(target)), strict=True))
    return tree.map_with_name(lambda name, _: found[name], like)
