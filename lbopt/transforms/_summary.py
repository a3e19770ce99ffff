"""Print which leaf gets what from an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from lbopt import masks, stacks, tree, types
from lbopt._shown import printable, show


def summarize_masks(params: types.Params, tx: Any) -> None:
    """Print which leaf of `params` is decayed, adapted and stacked by the transforms in `tx`.

    Args:
      params: arrays or `jax.ShapeDtypeStruct`s.
      tx: any Optax transformation; lbopt's transforms in it are found under chains, `masked`, `multi_transform` and
        the other wrappers. `-` stands for what they do not say, as of the decay of `optax.adamw`.

    Raises:
      ValueError: if `tx` is no transformation.

    >>> import jax, lbopt
    >>> shapes = {"dense": {"kernel": jax.ShapeDtypeStruct((3, 4), "float32"), "bias": jax.ShapeDtypeStruct((4,), "float32")}}
    >>> lbopt.summarize_masks(shapes, lbopt.lamb(0.1, weight_decay=0.01))
    parameter     shape   role    decayed  adapted  layers
    dense/bias    (4,)    bias    no       no       -
    dense/kernel  (3, 4)  weight  yes      yes      -
    2 parameters (16 numbers): 1 decayed (12), 1 adapted (12)
    """
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise ValueError(
            f"tx is of type {type(tx).__name__}: give an Optax transformation, summarize_masks(params, tx); of an nnx.Optimizer its tx"
        )
    with masks.recorded_choices() as choices_made:
        jax.eval_shape(tx.init, params)
    chosen: dict[str, dict[str, Any]] = {
        argument: {} for argument in ("weight_decay_mask", "trust_ratio_mask", "stacked")
    }
    for argument, choices in choices_made:
        for path, value in jax.tree_util.tree_leaves_with_path(choices):
            name = tree.path_name(path)
            seen = chosen.setdefault(argument, {})
            seen[name] = max(value, seen.get(name, value))
    lines: list[tuple[str, ...]] = [("parameter", "shape", "role", "decayed", "adapted", "layers")]
    sizes = {}
    layer_axes = tree.map_with_name(
        lambda name, _: chosen["stacked"].get(name, stacks.LayerAxes(0)), params
    )
    roles = masks.tree_roles(stacks.one_layer(params, layer_axes))
    columns = (tree.leaf_names(params), *map(jax.tree.leaves, (params, layer_axes, roles)))
    for name, leaf, axes, role in zip(*columns, strict=True):
        sizes[name] = int(np.prod(leaf.shape))
        answers = (
            _yes(chosen[argument].get(name))
            for argument in ("weight_decay_mask", "trust_ratio_mask")
        )
        layers = " x ".join(str(size) for size in axes.layers(leaf.shape)) or "-"
        lines.append((printable(name), str(tuple(leaf.shape)), role, *answers, layers))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        show(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )
    counts = [
        _count(word, chosen[argument], sizes)
        for word, argument in (("decayed", "weight_decay_mask"), ("adapted", "trust_ratio_mask"))
    ]
    show(f"{len(sizes)} parameters ({sum(sizes.values()):,} numbers): {', '.join(counts)}")


def _yes(choice: bool | None) -> str:
    return "-" if choice is None else "yes" if choice else "no"


def _count(word: str, chosen: Mapping[str, bool], sizes: Mapping[str, int]) -> str:
    if not chosen.keys() & sizes.keys():
        return f"- {word}"
    names = [name for name in sizes if chosen.get(name)]
    return f"{len(names)} {word} ({sum(sizes[name] for name in names):,})"
