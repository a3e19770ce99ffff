"""The axes of matrices, for optimizers that orthogonalize updates (Muon)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from lbopt import stacks, tree, types
from lbopt.errors import UserError
from lbopt.masks._names import named_parts, words_of
from lbopt.masks._roles import explain_roles

_HEAD_WORDS = {"head", "logits", "classifier", "unembed", "unembedding"}
_HEAD_NAMES = {"embed_out", "score"}
_MATRIX_NAMES = {"kernel", "w"}
"""Names that only matrices have; a `weight` may be that of a norm."""
_QUERY_NAMES = {"query", "key", "value", "qkv", "q", "k", "v"}
"""Projections of Flax's attention, whose kernels are [in, heads, dim]."""


def matrix_dimension_numbers(
    params: types.Params, stacked: types.Stacked = None, known_roles: types.PyTree = None
) -> types.PyTree:
    """Return the axes of each hidden weight as a matrix, for `optax.contrib.muon`.

    Give the tree as `muon_weight_dimension_numbers`. Muon then takes hidden weights, Adam the rest:
    embeddings, output heads as far as their names tell (`lm_head`, `classifier`), biases, norms and
    vectors.

    - A `kernel` or `w` (Flax, Haiku) is [..., in, out]: all axes but the last are reduced, so a
      convolution is one matrix. A query, key or value of Flax's attention is [in, heads, dim].
    - A `weight` (PyTorch, Equinox) is [out, in, ...].
    - Of a weight told by its shape alone, the last two axes are the matrix, the rest are batches.
      One with a single axis longer than 1, as a class token, is left to Adam.
    - Axes that count layers are batches.

    Which of the two axes is reduced changes only Muon's factor sqrt(max(1, out / in)).

    Args:
      params: All parameters, or their shapes; [any shape, any dtype].
      stacked: The parameters that are stacks of layers, as in `lbopt.lamb`.
      known_roles: Roles that are known, as in `with_known_roles`; None for none.

    Returns:
      A pytree like `params` of `optax.contrib.MuonDimensionNumbers`, with None for Adam's leaves.

    Raises:
      UserError: If leaves were taken out by `optax.masked`: roles depend on the leaves beside a
        leaf, and Muon calls a function on the matrices alone. Give it the tree instead. If no stack
        has a layer that is a matrix, but a `kernel` or `w` among them is a matrix as a whole.

    >>> import numpy as np
    >>> dense = {"kernel": np.zeros((3, 4)), "bias": np.zeros(4)}
    >>> found = matrix_dimension_numbers({"dense": dense})["dense"]
    >>> found["bias"], found["kernel"]
    (None, MuonDimensionNumbers(reduction_axis=(0,), output_axis=(1,)))
    """
    nodes = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, optax.MaskedNode))
    if any(isinstance(node, optax.MaskedNode) for node in nodes):
        fix = (
            "leaves were taken out; give the optimizer the tree that matrix_dimension_numbers "
            "makes of all parameters, not the function"
        )
        raise UserError("params", reason=fix, code="type")

    layer_axes = stacks.resolve_stacked(stacked, params)
    found = _numbers(params, layer_axes, known_roles)
    stacks_of_layers = [name for name, axes in tree.by_name(layer_axes).items() if axes]
    if stacks_of_layers and not any(map(found.get, stacks_of_layers)):
        whole = _numbers(params, jax.tree.map(lambda _: stacks.LayerAxes(0), params), known_roles)
        for name in stacks_of_layers:
            if whole[name] and named_parts(name)[-1] in _MATRIX_NAMES:
                fix = (
                    f"no layer of a stack is a matrix, but {name!r} is one as a whole; leave it "
                    "out of stacked, or give dimension_numbers"
                )
                raise UserError("stacked", stacked, fix, code="mismatch")
    return tree.map_with_name(lambda name, _: found[name], params)


def _numbers(
    params: types.Params, layer_axes: types.PyTree, known_roles: types.PyTree
) -> dict[str, optax.contrib.MuonDimensionNumbers | None]:
    """Return {path: axes of the matrix, or None} of all leaves."""
    roles = explain_roles(stacks.one_layer(params, layer_axes), known_roles)
    layers = tree.by_name(layer_axes)

    def dimensions(name: str, leaf: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        told = roles[name]
        own = [axis for axis in range(jnp.ndim(leaf)) if axis not in layers[name].axes]
        parts = named_parts(name)
        by_shape = told.rule == "by shape"
        is_vector = len(own) < 2 or (by_shape and sum(leaf.shape[axis] > 1 for axis in own) < 2)
        if told.role != "weight" or is_vector or _is_head(parts):
            return None
        reduced, output = _axes(parts, len(own), by_shape)
        return optax.contrib.MuonDimensionNumbers(
            tuple(own[axis] for axis in reduced), tuple(own[axis] for axis in output)
        )

    return {name: dimensions(name, leaf) for name, leaf in tree.by_name(params).items()}


def _is_head(parts: list[str]) -> bool:
    module = next((part for part in reversed(parts[:-1]) if not part.isdigit()), "")
    return module in _HEAD_NAMES or bool(_HEAD_WORDS & {*words_of(module)})


def _axes(parts: list[str], ndim: int, by_shape: bool) -> tuple[range, range]:
    """Return the reduced and the output axes of one layer's weight of `ndim` dimensions."""
    *parents, last = parts
    if by_shape:
        return range(ndim - 2, ndim - 1), range(ndim - 1, ndim)
    if "weight" in words_of(last):
        return range(1, ndim), range(1)
    if parents and parents[-1] in _QUERY_NAMES:
        return range(1), range(1, ndim)
    return range(ndim - 1), range(ndim - 1, ndim)
