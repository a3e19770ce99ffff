"""Names, roles, masks and norms of parameter trees."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from lbopt import types

Role = Literal["bias", "norm", "vector", "weight"]

_BIAS_NAMES = {"bias", "b", "beta", "offset"}
_NORM_NAMES = {"scale", "gamma"}
_WEIGHT_NAMES = {"kernel", "embedding"}
_NORM_MODULE = re.compile(
    r"(^|_)((batch|layer|group|instance|rms)_?norm(alization)?|norm|bn|ln|gn)(_?\d+)?$", re.IGNORECASE
)


def path_name(path: tuple[Any, ...]) -> str:
    """Return a key path as `a/b/c`, the form in which masks and messages name a leaf.

    >>> import jax
    >>> [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path({"dense": {"bias": 0, "kernel": 0}})]
    ['dense/bias', 'dense/kernel']
    """
    return "/".join(_key_name(key) for key in path)


def _key_name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def map_with_name(fn: Callable[..., Any], tree: types.PyTree, *rest: types.PyTree) -> types.PyTree:
    """Map `fn(name, leaf, *rest_leaves)` over a tree; `name` is `path_name` of the leaf."""
    return jax.tree_util.tree_map_with_path(lambda path, *leaves: fn(path_name(path), *leaves), tree, *rest)


def leaf_names(tree: types.PyTree) -> list[str]:
    """Return the names of all leaves, in leaf order."""
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def leaf_role(name: str, leaf: Any) -> Role:
    """Say what a leaf is to an optimizer: `bias`, `norm`, `vector` or `weight`.

    The name decides first: a last part `bias`, `b`, `beta`, `offset` is a bias; a last part `scale`, `gamma`, or
    any parent that is a normalization module (`BatchNorm_0`, `layer_norm`, `stem_bn`, ...) makes it a norm; a matrix called
    `kernel` or `embedding` is a weight wherever it is. A leaf with fewer than two dimensions whose name says nothing is a `vector`: in practice a shift or a gain under another name.

    >>> import numpy as np
    >>> leaf_role("Dense_0/kernel", np.zeros((3, 3))), leaf_role("Dense_0/bias", np.zeros(3))
    ('weight', 'bias')
    >>> leaf_role("BatchNorm_0/scale", np.zeros(3)), leaf_role("prelu/slope", np.zeros(3))
    ('norm', 'vector')
    """
    *parents, last = name.split("/")
    is_matrix = jnp.ndim(leaf) >= 2
    if last in _WEIGHT_NAMES and is_matrix:
        return "weight"
    if last in _NORM_NAMES or any(_NORM_MODULE.search(part) for part in parents):
        return "norm"
    if last in _BIAS_NAMES:
        return "bias"
    return "weight" if is_matrix else "vector"


def weights_only(params: types.Params) -> types.PyTree:
    """Return the default mask of lbopt: True on weights, False on biases, normalization leaves and vectors.

    This is the rule of the LAMB and LARS codes that exclude by role (ALBERT, TFA, MLPerf): what is not decayed is not
    adapted either.

    >>> import numpy as np
    >>> weights_only({"kernel": np.zeros((2, 2)), "bias": np.zeros(2)})
    {'bias': False, 'kernel': True}
    """
    if leaf_names(params) == [""]:
        raise ValueError(
            "weights_only needs a tree of named parameters; inside optax.inject_hyperparams, name the mask in static_args, "
            "or it is taken for a schedule"
        )
    return map_with_name(lambda name, leaf: leaf_role(name, leaf) == "weight", params)


def resolve_mask(mask: types.Mask | types.Unset, params: types.Params, argument: str) -> types.PyTree:
    """Turn a mask in any accepted form into a pytree of bools shaped like `params`.

    Args:
      mask: not given (`weights_only`), None or True (every leaf), False (no leaf), a pytree of bools, or a callable `params -> pytree of bools`.
        Leaves that `optax.masked` took out (`optax.MaskedNode`) stay out, unless the mask is a pytree, which has to
        leave them out itself.
      params: the parameters.
      argument: the name of the argument, for messages.

    Returns:
      A pytree of Python bools with the structure of `params`.

    Raises:
      ValueError: if a tree or callable selects no leaf at all (say False if that is meant), if its structure differs
        from `params`, or if a leaf of it is not a bool.
    """
    if isinstance(mask, types.Unset):
        mask = weights_only
    if mask is None or isinstance(mask, bool):
        return jax.tree.map(lambda _: mask is not False, params)
    selected = mask(params) if callable(mask) else mask
    _check_structure(selected, params, argument)
    map_with_name(lambda name, chosen: _check_bool(name, chosen, argument), selected)
    if jax.tree.leaves(params) and not any(jax.tree.leaves(selected)):
        raise ValueError(
            f"{argument} selects none of the {len(jax.tree.leaves(params))} parameters ({', '.join(leaf_names(params)[:4])}, ...): "
            f"pass {argument}=False if no leaf is meant, or {argument}=None for every leaf"
        )
    return selected


def _check_structure(selected: types.PyTree, params: types.Params, argument: str) -> None:
    ours: Any = jax.tree.structure(selected)
    if ours != jax.tree.structure(params):
        unknown = sorted(set(leaf_names(selected)) ^ set(leaf_names(params)))
        raise ValueError(
            f"{argument} has another structure than params (they differ at {', '.join(unknown[:4]) or 'the root'}): give one bool per parameter"
        )


def _check_bool(name: str, chosen: Any, argument: str) -> None:
    if not isinstance(chosen, (bool, np.bool_)):
        raise ValueError(f"{argument} at {name!r} is {chosen!r}: give True or False")


def wide_dtype(dtype: Any) -> Any:
    """Return fp32, or the dtype itself where it is wider: the precision of norms, moments and accumulators."""
    return jnp.promote_types(dtype, jnp.float32)


def l2_norm(x: jax.Array) -> jax.Array:
    """Return the L2 norm of the flattened array, computed in fp32 or wider whatever the dtype of `x`.

    `optax.scale_by_trust_ratio` takes norms in the parameter dtype; with bf16 parameters its ratios are off by up to
    half a percent.
    """
    wide = x.astype(wide_dtype(x.dtype))
    return jnp.sqrt(jnp.sum(jnp.square(wide)))


def unzip_pairs(like: types.PyTree, pairs: types.PyTree) -> tuple[types.PyTree, types.PyTree]:
    """Turn a tree of pairs into a pair of trees; `like` has the structure above the pairs."""
    structure: Any = jax.tree.structure(like)
    flat = structure.flatten_up_to(pairs)
    return structure.unflatten([first for first, _ in flat]), structure.unflatten([second for _, second in flat])
