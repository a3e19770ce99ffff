"""The role of a leaf for an optimizer, told from names, ranks, neighbours and classes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from lbopt import tree, types

Role = Literal["bias", "norm", "vector", "weight"]
ROLES: tuple[str, ...] = get_args(Role)

_SHIFTS = ("bias", "b", "beta", "offset")
_GAINS = ("scale", "gamma", "weight", "w", "kernel")
_NORM_NAMES = {"scale", "gamma"}
_WEIGHT_NAMES = {"kernel", "embedding"}
_FILTER_GAINS = {"g", "weight_g", "original0"}
"""Gains of weight norm in Equinox, Haiku and PyTorch."""
_NORM_WORD = re.compile(r"(?<!de)(?<!un)norms?$|normali[sz]ations?$|^((bn|ln|gn|grn)s?|rms)$")
_LAYER_WORDS = {"proj", "projection", "linear", "dense", "fc", "modulation"}
"""Words after a norm's name that say that the module is a layer beside it: a matrix there is a
weight, as in `norm_proj` and `adaLN_modulation`."""
_TABLE_WORDS = {"relative", "rel", "relpos", "table"}
"""Words of tables of biases, which are looked up by distance and decayed as weights."""
_NORM_CLASS = re.compile(r"(Norm|Normalization)(\dd)?$")
_LAYER_CLASS = re.compile(
    r"(Linear|Dense|Conv|ConvTranspose|Embed|Embedding|Einsum|LinearGeneral|DenseGeneral)(\dd)?$"
)


def leaf_role(name: str, leaf: Any) -> Role:
    """Return the role of a leaf for an optimizer: `bias`, `norm`, `vector` or `weight`.

    Only its name and shape are used. In this order:

    - A matrix called `kernel` or `embedding` is a weight wherever it is.
    - A last part `scale` or `gamma`, or a direct parent that is a normalization module
      (`BatchNorm_0`, `layernorm_before`, `bn_init`, ...), makes a leaf a norm.
    - A last part `bias`, `b`, `beta` or `offset`, or one with the word bias in it
      (`gate_up_proj_bias`, `bias_ih`), makes it a bias.
    - Another leaf is a weight with two dimensions or more, else a vector: in practice a shift or a
      gain under another name.

    `tree_roles` sees the whole tree and knows more: the classes of modules (Equinox, NNX), that
    `b1` is the bias of `w1`, and that a gain and a shift of one shape belong to a norm, as in a
    list of layers.

    >>> import numpy as np
    >>> leaf_role("Dense_0/kernel", np.zeros((3, 3))), leaf_role("Dense_0/bias", np.zeros(3))
    ('weight', 'bias')
    >>> leaf_role("BatchNorm_0/scale", np.zeros(3)), leaf_role("prelu/slope", np.zeros(3))
    ('norm', 'vector')
    """
    return _role(_named_parts(name), jnp.shape(leaf), {}, None)


def tree_roles(params: types.Params) -> types.PyTree:
    """Return the role of every leaf, from names, shapes, neighbours and classes of modules."""
    leaves: list[tuple[Any, Any]]
    structure: Any
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    parts = [_named_parts(tree.path_name(path)) for path, _ in leaves]

    siblings: dict[tuple[str, ...], dict[str, tuple[int, ...]]] = {}
    for (*parents, last), (_, leaf) in zip(parts, leaves, strict=True):
        siblings.setdefault(tuple(parents), {})[last] = jnp.shape(leaf)

    return structure.unflatten(
        _role(part, jnp.shape(leaf), siblings[tuple(part[:-1])], _module_class(params, path))
        for part, (path, leaf) in zip(parts, leaves, strict=True)
    )


def _role(
    parts: list[str],
    shape: tuple[int, ...],
    siblings: Mapping[str, tuple[int, ...]],
    module: type | None,
) -> Role:
    """Return the role of one leaf.

    Args:
      parts: The parts of the leaf's path, its own name last.
      shape: Shape of the leaf.
      siblings: name -> shape of the arrays of the same module, the leaf included.
      module: Class of the module, if it is an object.
    """
    *parents, last = parts
    is_matrix = len(shape) >= 2

    if last in _WEIGHT_NAMES and is_matrix:
        return "weight"

    if last in _NORM_NAMES or (last in _FILTER_GAINS and (not is_matrix or 1 in shape)):
        return "norm"
    # One gain per filter, in scaled weight standardization.
    if last == "gain" and is_matrix and 1 in shape:
        return "norm"
    if _in_norm(parents, last, shape, siblings, module):
        return "norm"

    is_shift = last in _SHIFTS and not (is_matrix and _is_lora_factor(parents, last, siblings))
    if is_shift or _is_bias(_words(last)):
        return "bias"
    # Beside w1 or W_Q, b1 or b_Q.
    if last.startswith("b") and {"w" + last[1:], "W" + last[1:]} & siblings.keys():
        return "bias"
    return "weight" if is_matrix else "vector"


def _in_norm(
    parents: list[str],
    last: str,
    shape: tuple[int, ...],
    siblings: Mapping[str, tuple[int, ...]],
    module: type | None,
) -> bool:
    """Return whether a leaf belongs to a normalization; the arguments are those of `_role`.

    The class of its module decides, else its neighbours do, else the name of its parent.
    """
    classes = [] if module is None else [kind.__name__ for kind in module.__mro__]
    if any(_NORM_CLASS.search(name) for name in classes):
        return not any(name in ("WeightNorm", "SpectralNorm") for name in classes)
    if any(_LAYER_CLASS.search(name) for name in classes):
        return False

    # A gain and a shift of one shape are a norm's; other shapes are a layer's weight and bias.
    partners = _GAINS if last in _SHIFTS else _SHIFTS if last in _GAINS else ()
    beside = [siblings[name] for name in partners if name in siblings]
    if beside:
        return set(beside) == {shape}

    words = _words(next((part for part in reversed(parents) if not part.isdigit()), ""))
    norms = [place for place, word in enumerate(words) if _NORM_WORD.search(word)]
    return bool(norms) and not (len(shape) >= 2 and _LAYER_WORDS & set(words[norms[-1] :]))


def _is_bias(words: list[str]) -> bool:
    """Return whether the words of a name say bias.

    The word stands at the end (`in_proj_bias`) or before an index in letters
    (`bias_ih_l0_reverse`, `pos_bias_u`).
    """
    places = {place for place, word in enumerate(words) if word in ("bias", "biases")}
    if not places or _TABLE_WORDS & set(words):
        return False
    return all(len(word) <= 2 or word == "reverse" for word in words[max(places) + 1 :])


def _is_lora_factor(parents: list[str], last: str, siblings: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether `b` is the second matrix of a low-rank pair (LoRA)."""
    return last == "b" and ("a" in siblings or any("lora" in _words(parent) for parent in parents))


def _words(name: str) -> list[str]:
    """Split a name at changes of case, at digits and at underscores.

    >>> _words("SyncBatchNorm2d_3"), _words("layernorm_before"), _words("ln1")
    (['sync', 'batch', 'norm', '2', 'd', '3'], ['layernorm', 'before'], ['ln', '1'])
    """
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def _named_parts(name: str) -> list[str]:
    """Split a path, also in PyTorch's spelling (`layer.0.weight`).

    Numbers at the end are cut off: they count the arrays inside a named leaf (`weight/0`).
    """
    parts = re.split(r"[/.]", name)
    named = len(parts)
    while named > 1 and parts[named - 1].isdigit():
        named -= 1
    return parts[:named] if not parts[named - 1].isdigit() else parts


def _module_class(params: types.Params, path: tuple[Any, ...]) -> type | None:
    """Return the class of the object that has the leaf as an attribute; None without one.

    Such objects are the modules of Equinox, Haliax and NNX.
    """
    node = params
    found = None
    in_box = tree.path_name(path) == tree.path_name(path[:-1])
    for key in path[:-1] if in_box else path:
        if isinstance(key, jax.tree_util.GetAttrKey):
            found = type(node)
            node = getattr(node, key.name, None)
        elif isinstance(key, (jax.tree_util.DictKey, jax.tree_util.SequenceKey)):
            is_dict = isinstance(key, jax.tree_util.DictKey)
            found = None if is_dict else found
            try:
                node = node[key.key if is_dict else key.idx]
            except (KeyError, IndexError, TypeError):
                return None
        else:
            break
    return found
