"""A table of an optimizer's treatment of each leaf: decay, trust ratio, layers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lbopt import masks, stacks, tree, types
from lbopt._shown import printable, show
from lbopt.errors import UserError
from lbopt.transforms._arguments import is_transformation

_Recorded = Sequence[tuple[str, Any]]
_HEADER = ("parameter", "shape", "role", "rule", "decayed", "adapted", "layers")


def summarize_masks(params: types.Params, tx: Any) -> None:
    """Print which leaf of `params` is decayed, adapted and stacked by the transforms in `tx`.

    The rule says how the role was told: by the type of the leaf's module, by its name, or by its
    shape alone. Lines below the table name leaves whose shape does not go with their role.

    Args:
      params: Arrays or `jax.ShapeDtypeStruct`s.
      tx: Any Optax transformation. lbopt's transforms in it are found under chains, `masked`,
        `multi_transform` and the other wrappers; `-` stands for facts that no transform tells, such
        as the decay of `optax.adamw`. Where an optimizer splits the leaves, as `lbopt.muon` does, a
        last column names the optimizer of each.

    Raises:
      UserError: If `tx` is no transformation; for an `nnx.Optimizer` give its `tx`.

    >>> import jax, lbopt
    >>> kernel = jax.ShapeDtypeStruct((3, 4), "float32")
    >>> bias = jax.ShapeDtypeStruct((4,), "float32")
    >>> shapes = {"dense": {"kernel": kernel, "bias": bias}}
    >>> lbopt.summarize_masks(shapes, lbopt.lamb(0.1, weight_decay=0.01))
    parameter     shape   role    rule     decayed  adapted  layers
    dense/bias    (4,)    bias    by name  no       no       -
    dense/kernel  (3, 4)  weight  by name  yes      yes      -
    2 parameters (16 numbers): 1 decayed (12), 1 adapted (12)
    """
    if not is_transformation(tx):
        fix = f"a {type(tx).__name__}; give an Optax transformation, for an nnx.Optimizer its tx"
        raise UserError("tx", reason=fix, code="type")

    # `init` resolves all masks; tracing it allocates no state.
    with masks.recorded_choices() as recorded:
        jax.eval_shape(tx.init, params)
    decayed = _chosen(recorded, "weight_decay_mask")
    adapted = _chosen(recorded, "trust_ratio_mask")
    stacked = _chosen(recorded, "stacked")

    optimizer = _chosen(recorded, "optimizer")
    header = (*_HEADER, "optimizer") if optimizer else _HEADER

    layer_axes = tree.map_with_name(lambda name, _: stacked.get(name, stacks.LayerAxes(0)), params)
    layers = stacks.one_layer(params, layer_axes)
    known = _chosen(recorded, "known_roles")
    # Inside a wrapper, as of lookahead, the transforms' paths are not those of `params`.
    names = tree.leaf_names(params)
    roles = masks.explain_roles(layers, {name: known[name] for name in names if name in known})
    lines: list[tuple[str, ...]] = [header]
    sizes = {}
    columns = (*map(jax.tree.leaves, (params, layer_axes)), roles.items())
    for leaf, axes, (name, told) in zip(*columns, strict=True):
        sizes[name] = int(np.prod(leaf.shape))
        answers = (_yes(decayed.get(name)), _yes(adapted.get(name)))
        number = " x ".join(str(size) for size in axes.layers(leaf.shape)) or "-"
        last = (optimizer.get(name, "-"),) if optimizer else ()
        lines.append((printable(name), str(tuple(leaf.shape)), *told, *answers, number, *last))

    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        show("  ".join(cells).rstrip())
    counts = f"{_count('decayed', decayed, sizes)}, {_count('adapted', adapted, sizes)}"
    show(f"{len(sizes)} parameters ({sum(sizes.values()):,} numbers): {counts}")
    for name, layer in tree.by_name(layers).items():
        for doubt in _doubts(name, layer.shape, roles[name], recorded):
            show(printable(f"warning: {name}: {doubt}"))


def _doubts(
    name: str, shape: tuple[int, ...], told: masks.LeafRole, recorded: _Recorded
) -> Iterator[str]:
    """Yield what looks wrong about a leaf's role, and what to do.

    Args:
      name: Path of the leaf.
      shape: Shape of one layer.
      told: Its role.
      recorded: The choices of all transforms.
    """
    known = {one.get(name) for argument, one in recorded if argument == "known_roles"} - {None}
    if len(known) > 1:
        yield f"masks know it as {' and as '.join(sorted(known))}; give all the same roles"

    is_long = sum(size > 1 for size in shape) >= 2
    is_named_weight = "weight" in re.split(r"[/.]", name)[-2:]  # `weight/0` in Haliax
    known_as = f"give masks.with_known_roles(mask, {{{name!r}: %r}})"
    if told.rule != "by type" and told.role == "norm" and is_long:
        fix = f"if it is a matrix, {known_as % 'weight'}, if a stack of layers, `stacked`"
        yield f"a norm of two dimensions; {fix}"
    elif told == ("norm", "by shape") and is_named_weight:
        yield f"a weight of one dimension, taken for a norm; if it is none, {known_as % 'vector'}"
    elif told == ("weight", "by shape") and not is_long:
        yield f"a weight of one dimension; if it is a gain or a shift, {known_as % 'vector'}"


def _chosen(recorded: _Recorded, argument: str) -> dict[str, Any]:
    """Return {path: value} of an argument, the largest value if several transforms have one."""
    chosen: dict[str, Any] = {}
    for choices in (one for name, one in recorded if name == argument):
        for name, value in tree.by_name(choices).items():
            chosen[name] = max(value, chosen.get(name, value))
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
