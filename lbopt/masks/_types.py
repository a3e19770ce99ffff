"""Roles told from the classes of modules: NNX, Equinox, Haliax and other trees of objects."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from lbopt import stacks, tree, types
from lbopt.errors import UserError
from lbopt.masks._names import LAYER_WORDS, SHIFTS, Role, named_parts, says_table, words_of

_NORM_CLASS = re.compile(r"(Norm|Normalization)(\dd)?$")
_NO_NORMS = ("WeightNorm", "SpectralNorm")
_ADAPTIVE_CLASS = re.compile(r"^(Ada|Adaptive|Cond|Conditional)(?![a-z])")
_LAYER_CLASS = re.compile(
    r"(Linear|Dense|Conv|ConvTranspose|Embed|Embedding|Einsum|LinearGeneral|DenseGeneral)(\dd)?$"
)
_MATRIX_NAMES = ("kernel", "weight", "w", "embedding", "embeddings")
_LORA_NAMES = ("lora_a", "lora_b", "lora_A", "lora_B")


def role_by_type(module: type | None, last: str, shape: tuple[int, ...]) -> Role | None:
    """Return the role of an array from the class of its module; None if that does not tell.

    Subclasses count as their base. A projection that a norm has, and arrays that layers do not
    have, are left to their names.

    Args:
      module: The class, of any framework; None for none.
      last: Name of the array in the module.
      shape: Shape of one layer.
    """
    classes = [] if module is None else [kind.__name__ for kind in module.__mro__]
    is_matrix = len(shape) >= 2
    if "LoRA" in classes and last in _LORA_NAMES:
        return "weight"

    if any(map(_NORM_CLASS.search, classes)) and not {*_NO_NORMS} & {*classes}:
        if is_matrix and (last == "kernel" or LAYER_WORDS & {*words_of(last)}):
            return None
        # An adaptive norm projects other features to its gain: the matrix is no gain.
        is_gain = not is_matrix or last in SHIFTS or not _ADAPTIVE_CLASS.search(classes[0])
        return "norm" if is_gain else "weight"

    if not any(map(_LAYER_CLASS.search, classes)):
        return None
    if last in SHIFTS:
        return "bias"
    if last not in _MATRIX_NAMES or not is_matrix:
        return None
    return "embedding" if any(says_table(words_of(name)) for name in classes) else "weight"


def module_roles(module: Any, stacked: types.Stacked = None) -> dict[str, Any]:
    """Return the roles that the types of modules tell, for `with_known_roles` and `tree_roles`.

    A norm, an embedding or a linear layer is known by its class, whatever its attribute is called.
    Subclasses count as their base.

    Args:
      module: An `nnx.Module`, an Equinox module, or another pytree of objects; its arrays may be
        `jax.ShapeDtypeStruct`s.
      stacked: The parameters that are stacks of layers, as in `lbopt.lamb`.

    Returns:
      For NNX a nested dict like `nnx.to_pure_dict` of the `nnx.Param`s; for other trees a flat one,
      path -> role. Parameters of modules of unknown types are left out: their names decide.

    Raises:
      UserError: If `module` is a dict of parameters, say, where the types of modules are lost.

    >>> from flax import nnx
    >>> layer = nnx.LayerNorm(4, rngs=nnx.Rngs(0))
    >>> module_roles(layer)
    {'bias': 'norm', 'scale': 'norm'}
    """
    nnx: Any = sys.modules.get("flax.nnx")
    is_nnx = nnx is not None and isinstance(module, nnx.Module)
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param)) if is_nnx else module

    # An Equinox module has functions, numbers and arrays of integers among its leaves.
    params = jax.tree.map(lambda leaf: leaf if _is_trained(leaf) else None, params)
    layers = stacks.one_layer(params, stacks.resolve_stacked(stacked, params))
    leaves = jax.tree_util.tree_leaves_with_path(layers)
    owners = [module_class(module, path) for path, _ in leaves]
    if leaves and not is_nnx and not any(owners):
        fix = f"a {type(module).__name__} without modules that have arrays; give the model itself"
        raise UserError("module", reason=fix, code="type")

    told = {
        path: role_by_type(owner, named_parts(tree.path_name(path))[-1], jnp.shape(leaf))
        for (path, leaf), owner in zip(leaves, owners, strict=True)
    }
    known = {path: role for path, role in told.items() if role is not None}
    if is_nnx:
        keys = {tuple(key.key for key in path): role for path, role in known.items()}
        return _nested(keys)
    return {tree.path_name(path): role for path, role in known.items()}


def _is_trained(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _nested(flat: Mapping[tuple[Any, ...], Any]) -> dict[Any, Any]:
    nested: dict[Any, Any] = {}
    for (*parents, last), value in flat.items():
        inside = nested
        for parent in parents:
            inside = inside.setdefault(parent, {})
        inside[last] = value
    return nested


def module_class(root: Any, path: tuple[Any, ...]) -> type | None:
    """Return the class of the object that has the leaf as an attribute; None without one.

    Such objects are the modules of Equinox, Haliax and NNX. An item of a list counts as an
    attribute of the list's owner, an item of a dict does not.
    """
    node = root
    found = None
    in_box = tree.path_name(path) == tree.path_name(path[:-1])

    for key in path[:-1] if in_box else path:
        place: Any = next(
            (getattr(key, at) for at in ("name", "key", "idx") if hasattr(key, at)), None
        )
        is_dict = isinstance(key, jax.tree_util.DictKey)
        # The dict of an NNX module's parameters has attributes of the module as keys.
        in_nnx = is_dict and isinstance(place, str) and not isinstance(node, Mapping)
        if isinstance(key, jax.tree_util.GetAttrKey) or (in_nnx and hasattr(node, place)):
            found = type(node)
            node = getattr(node, place, None)
        elif is_dict or isinstance(key, jax.tree_util.SequenceKey):
            found = None if is_dict else found
            try:
                node = node[place]
            except (KeyError, IndexError, TypeError):
                return None
        else:  # inside a box, such as Haliax's named array
            break
    return found
