"""The role of a leaf told from its name, its shape and the leaves beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

Role = Literal["bias", "embedding", "norm", "vector", "weight"]
ROLES: tuple[str, ...] = get_args(Role)
Rule = Literal["by type", "by name", "by shape"]


class LeafRole(NamedTuple):
    """A role and its reason.

    Attributes:
      role: `bias`, `embedding`, `norm`, `vector` or `weight`.
      rule: "by type" (the class of the leaf's module, or a known role), "by name" (its path, or the
        names and shapes of the leaves beside it), or "by shape" (its name says nothing).

    >>> import numpy as np
    >>> from lbopt.masks import explain_roles
    >>> explain_roles({"norm": {"scale": np.ones(4)}})["norm/scale"]
    LeafRole(role='norm', rule='by name')
    """

    role: Role
    rule: Rule


Siblings = Mapping[str, tuple[int, ...]]
"""name -> shape of the arrays of one module."""

SHIFTS = ("bias", "b", "beta", "offset")
_GAINS = ("scale", "gamma", "weight", "w", "kernel")
_NORM_NAMES = {"scale", "gamma", "running_mean", "running_var"}
_TABLE_NAMES = {"embedding", "embeddings"}
"""Arrays of `Embed` in Flax and Haiku."""
_FILTER_GAINS = {"g", "weight_g", "original0"}
"""Gains of weight norm in Equinox, Haiku and PyTorch."""
_WEIGHT_WORDS = {"weight", "weights", "kernel", "kernels", "w", "lora"}
_NORM_WORD = re.compile(r"(?<!de)(?<!un)norms?$|normali[sz]ations?$|^((bn|ln|gn|grn)s?|rms)$")
_EMBED_WORD = re.compile(r"(?<!un)(?<!de)embed(s|ders?|dings?)?$|^(embs?|wte|wpe)$")
LAYER_WORDS = {"proj", "projection", "linear", "dense", "fc", "modulation"}
"""Words after a norm's name that say that the module is a layer beside it: a matrix there is a
weight, as in `norm_proj` and `adaLN_modulation`."""
_ADAPTIVE_WORDS = {"ada", "adaptive", "cond", "conditional", "film"}
"""Words of norms whose gain a projection of other features makes."""
_OUTPUT_WORDS = {"out", "output", "head", "logits"}
_NO_TABLE_WORDS = (
    LAYER_WORDS
    | _OUTPUT_WORDS
    | {"project", "mapping", "conv", "patch", "time", "hidden", "act", "mlp", "rotary"}
)
"""Words that say that a module named after embeddings makes or maps them, and is no table."""
_DISTANCE_WORDS = {"relative", "rel", "relpos", "table"}
"""Words of tables of biases, which are looked up by distance and decayed as other tables."""


def role_by_name(parts: list[str], shape: tuple[int, ...], siblings: Siblings) -> LeafRole:
    """Return the role of one leaf; the order of the rules is that of `leaf_role`.

    Args:
      parts: The parts of the leaf's path, its own name last.
      shape: Shape of the leaf.
      siblings: The arrays of the same module, the leaf included; empty if they are not known.
    """
    *parents, last = parts
    is_matrix = len(shape) >= 2

    if is_matrix and last == "kernel":
        return LeafRole("weight", "by name")
    if is_matrix and last in _TABLE_NAMES:
        return LeafRole("embedding", "by name")
    if _is_gain(last, shape) or in_norm(parents, last, shape, siblings):
        return LeafRole("norm", "by name")
    if _is_shift(parents, last, shape, siblings):
        return LeafRole("bias", "by name")

    if not is_matrix:
        # PyTorch and Equinox give a `weight` of one dimension to normalizations and to PReLU alone.
        is_norm = len(shape) == 1 and last == "weight" and not _of_activation(parents)
        return LeafRole("norm" if is_norm else "vector", "by shape")
    if _is_table(parents, last, shape, siblings):
        return LeafRole("embedding", "by name")
    return LeafRole("weight", "by name" if _says_weight(parents, last, siblings) else "by shape")


def _is_gain(last: str, shape: tuple[int, ...]) -> bool:
    if last in _NORM_NAMES or (last in _FILTER_GAINS and (len(shape) < 2 or 1 in shape)):
        return True
    # One gain per filter, in scaled weight standardization.
    return last == "gain" and len(shape) >= 2 and 1 in shape


def in_norm(parents: list[str], last: str, shape: tuple[int, ...], siblings: Siblings) -> bool:
    """Return whether a leaf belongs to a normalization.

    Its neighbours decide, else the name of its parent.
    """
    is_matrix = len(shape) >= 2
    words = words_of(_module_name(parents))

    # A gain and a shift of one shape are a norm's; other shapes are a layer's weight and bias.
    partners = _GAINS if last in SHIFTS else SHIFTS if last in _GAINS else ()
    beside = {name: siblings[name] for name in partners if name in siblings}
    if beside:
        # A shift of the shape of a kernel is a layer's too: norms have no matrix `kernel`.
        is_layer = "kernel" in beside or (bool(parents) and LAYER_WORDS & {*words_of(parents[-1])})
        return {*beside.values()} == {shape} and not (is_matrix and is_layer)

    norms = [place for place, word in enumerate(words) if _NORM_WORD.search(word)]
    if not norms or not is_matrix:
        return bool(norms)
    # Haiku's norms have no `w`, so that `norm_out/w` is a linear layer's.
    layers = LAYER_WORDS | (_OUTPUT_WORDS if last == "w" else set())
    is_layer = bool(layers & {*words[norms[-1] :], *words_of(last)})
    return not (is_layer or _ADAPTIVE_WORDS & {*words})


def _is_shift(parents: list[str], last: str, shape: tuple[int, ...], siblings: Siblings) -> bool:
    is_second_factor = len(shape) >= 2 and _is_lora_factor(parents, last, siblings)
    if (last in SHIFTS and not is_second_factor) or _is_bias(words_of(last)):
        return True
    # Beside w1 or W_Q, b1 or b_Q.
    return last.startswith("b") and bool({"w" + last[1:], "W" + last[1:]} & siblings.keys())


def _is_bias(words: list[str]) -> bool:
    """Return whether the words of a name say bias.

    The word stands at the end (`in_proj_bias`) or before an index in letters
    (`bias_ih_l0_reverse`, `pos_bias_u`).
    """
    places = {place for place, word in enumerate(words) if word in ("bias", "biases")}
    if not places or _DISTANCE_WORDS & set(words):
        return False
    return all(len(word) <= 2 or word == "reverse" for word in words[max(places) + 1 :])


def _is_lora_factor(parents: list[str], last: str, siblings: Siblings) -> bool:
    """Return whether `b` is the second matrix of a low-rank pair (LoRA)."""
    return last == "b" and ("a" in siblings or any("lora" in words_of(one) for one in parents))


def _is_table(parents: list[str], last: str, shape: tuple[int, ...], siblings: Siblings) -> bool:
    """Return whether a matrix is looked up by rows, under any name but Flax's and Haiku's."""
    # A position embedding is often of shape [1, length, dim].
    is_matrix = sum(size != 1 for size in shape) <= 2
    if not is_matrix or last in ("w", "kernel") or "lora" in words_of(last):
        return False

    # Names like `W_E` say nothing, so that their module's name decides. A table has no bias.
    in_module = last.startswith(("weight", "W_", "table")) and bool(parents)
    if in_module and {*SHIFTS} & siblings.keys():
        return False
    if parents == ["shared"]:  # in T5 and BART
        return True
    words = words_of(parents[-1] if in_module else last)
    if _DISTANCE_WORDS & {*words} and "bias" in words:
        return True
    return says_table(words)


def says_table(words: list[str]) -> bool:
    """Return whether the words of a name say that a module is a table of embeddings."""
    return any(map(_EMBED_WORD.search, words)) and not _NO_TABLE_WORDS & {*words}


def _says_weight(parents: list[str], last: str, siblings: Siblings) -> bool:
    """Return whether the name of a matrix is a weight's, so that its shape need not decide."""
    words = {*words_of(last)}
    if _WEIGHT_WORDS & words or LAYER_WORDS & words or _is_lora_factor(parents, last, siblings):
        return True
    return any("lora" in words_of(parent) for parent in parents)


def _of_activation(parents: list[str]) -> bool:
    words = words_of(_module_name(parents))
    return any("relu" in word or word in ("act", "activation") for word in words)


def _module_name(parents: list[str]) -> str:
    """Return the name of the module of a leaf, without its place in a list."""
    return next((part for part in reversed(parents) if not part.isdigit()), "")


def words_of(name: str) -> list[str]:
    """Split a name at changes of case, at digits and at underscores.

    >>> words_of("SyncBatchNorm2d_3"), words_of("layernorm_before"), words_of("ln1")
    (['sync', 'batch', 'norm', '2', 'd', '3'], ['layernorm', 'before'], ['ln', '1'])
    """
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def named_parts(name: str) -> list[str]:
    """Split a path, also in PyTorch's spelling (`layer.0.weight`).

    Numbers at the end are cut off: they count the arrays inside a named leaf (`weight/0`).
    """
    parts = re.split(r"[/.]", name)
    named = len(parts)
    while named > 1 and parts[named - 1].isdigit():
        named -= 1
    return parts[:named] if not parts[named - 1].isdigit() else parts
