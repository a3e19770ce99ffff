"""A table of an optimizer's treatment of each leaf: decay, trust ratio, layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from lbopt import masks, stacks, tree, types
from lbopt._shown import printable, show
from lbopt.errors import UserError
from lbopt.transforms._arguments import is_transformation

_HEADER = ("parameter", "shape", "role", "decayed", "adapted", "layers")


def summarize_masks(params: types.Params, tx: Any) -> None:
    """Print which leaf of `params` is decayed, adapted and stacked by the transforms in `tx`.

    Args:
      params: Arrays or `jax.ShapeDtypeStruct`s.
      tx: Any Optax transformation. lbopt's transforms in it are found under chains, `masked`,
        `multi_transform` and the other wrappers; `-` stands for facts that no transform tells, such
        as the decay of `optax.adamw`.

    Raises:
      UserError: If `tx` is no transformation; for an `nnx.Optimizer` give its `tx`.

    >>> import jax, lbopt
    >>> kernel = jax.ShapeDtypeStruct((3, 4), "float32")
    >>> bias = jax.ShapeDtypeStruct((4,), "float32")
    >>> shapes = {"dense": {"kernel": kernel, "bias": bias}}
    >>> lbopt.summarize_masks(shapes, lbopt.lamb(0.1, weight_decay=0.01))
    parameter     shape   role    decayed  adapted  layers
    dense/bias    (4,)    bias    no       no       -
    dense/kernel  (3, 4)  weight  yes      yes      -
    2 parameters (16 numbers): 1 decayed (12), 1 adapted (12)
    """
    if not is_transformation(tx):
        fix = f"a {type(tx).__name__}; give an Optax transformation, for an nnx.Optimizer its tx"
        raise UserError("tx", reason=fix, code="type")

    chosen = _choices(params, tx)
    decayed = chosen.get("weight_decay_mask", {})
    adapted = chosen.get("trust_ratio_mask", {})
    stacked = chosen.get("stacked", {})

    layer_axes = tree.map_with_name(lambda name, _: stacked.get(name, stacks.LayerAxes(0)), params)
    roles = masks.tree_roles(stacks.one_layer(params, layer_axes))
    lines: list[tuple[str, ...]] = [_HEADER]
    sizes = {}
    columns = (tree.leaf_names(params), *map(jax.tree.leaves, (params, layer_axes, roles)))
    for name, leaf, axes, role in zip(*columns, strict=True):
        sizes[name] = int(np.prod(leaf.shape))
        answers = (_yes(decayed.get(name)), _yes(adapted.get(name)))
        layers = " x ".join(str(size) for size in axes.layers(leaf.shape)) or "-"
        lines.append((printable(name), str(tuple(leaf.shape)), role, *answers, layers))

    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        show("  ".join(cells).rstrip())
    counts = f"{_count('decayed', decayed, sizes)}, {_count('adapted', adapted, sizes)}"
    show(f"{len(sizes)} parameters ({sum(sizes.values()):,} numbers): {counts}")


def _choices(params: types.Params, tx: Any) -> dict[str, dict[str, Any]]:
    """Return {argument: {path: value}}, the largest value if several transforms have one."""
    # `init` resolves all masks; tracing it allocates no state.
    with masks.recorded_choices() as recorded:
        jax.eval_shape(tx.init, params)
    chosen: dict[str, dict[str, Any]] = {}
    for argument, choices in recorded:
        seen = chosen.setdefault(argument, {})
        for path, value in jax.tree_util.tree_leaves_with_path(choices):
            name = tree.path_name(path)
            seen[name] = max(value, seen.get(name, value))
    return chosen


def _yes(choice: bool | None) -> str:
    if choice is None:
        return "-"
    return "yes" if choice else "no"


def _count(word: str, chosen: Mapping[str, bool], sizes: Mapping[str, int]) -> str:
    if not chosen.keys() & sizes.keys():
        return f"- {word}"
    names = [name for name in sizes if chosen.get(name)]
    return f"{len(names)} {word} ({sum(sizes[name] for name in names):,})"
