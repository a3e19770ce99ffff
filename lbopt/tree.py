"""Names and norms of parameter trees."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lbopt import types


def path_name(path: tuple[Any, ...]) -> str:
    """Return a key path as `a/b/c`, the form in which masks and messages name a leaf.

    >>> import jax
    >>> [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path({"dense": {"bias": 0, "kernel": 0}})]
    ['dense/bias', 'dense/kernel']
    """
    return "/".join(path_parts(path))


def path_parts(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the names of the keys on a path, the inside of a box left out."""
    if len(path) > 1 and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value":
        path = path[:-1]  # the inside of a box: flax.linen.Partitioned, the variables of flax.nnx
    return tuple(_key_name(key) for key in path)


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


def by_name(tree: types.PyTree) -> dict[str, Any]:
    """Return {name: leaf} of all leaves, in leaf order."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def some(names: list[str]) -> str:
    """Return the first few names, for messages."""
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def is_function(given: Any) -> bool:
    """Return whether an argument is a function to call, and not a pytree that is callable, as every Equinox module is."""
    values = [] if isinstance(given, jax.tree_util.Partial) else jax.tree.leaves(given)
    return callable(given) and all(callable(value) for value in values)


def spread(given: types.PyTree, params: types.Params, argument: str) -> types.PyTree:
    """Return a pytree shaped like `params` from one that gives a value per leaf or per subtree, as Optax takes its masks.

    Leaves are matched by name, so a container may be of another type and a box may be there on one side only. A value may stand where `params` has
    an empty subtree (None, `optax.MaskedNode`).

    Raises:
      ValueError: if a leaf gets no value, or a value no place.

    >>> spread({"body": True, "head": {"bias": False}}, {"body": {"bias": 0, "kernel": 0}, "head": {"bias": 0}}, "mask")
    {'body': {'bias': True, 'kernel': True}, 'head': {'bias': False}}
    """
    values = {path_parts(path): value for path, value in jax.tree_util.tree_leaves_with_path(given)}
    leaves = [path_parts(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    starts = [next((leaf[:n] for n in range(len(leaf), -1, -1) if leaf[:n] in values), None) for leaf in leaves]
    without = [leaf for leaf, start in zip(leaves, starts, strict=True) if start is None]
    astray = [place for place in values.keys() - set(starts) if not any(_meet(place, hole) for hole in _holes(params))]
    if without or astray:
        names = sorted("/".join(parts) for parts in (*without, *astray))
        raise ValueError(
            f"{argument} has another structure than params (they differ at {', '.join(names[:4]) or 'the root'}): "
            "give one value per parameter, or per subtree"
        )
    structure: Any = jax.tree.structure(params)
    return structure.unflatten([values[start] for start in starts if start is not None])


def _holes(params: types.Params) -> list[tuple[str, ...]]:
    """Return the paths of what holds no array: None, empty containers, what `optax.masked` took out."""

    def is_empty(node: Any) -> bool:
        return not jax.tree.leaves(node)

    nodes = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_empty)
    return [path_parts(path) for path, node in nodes if is_empty(node)]


def _meet(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def check_structure(selected: types.PyTree, params: types.Params, argument: str) -> None:
    """Raise ValueError unless a pytree given for `argument` has one leaf per parameter."""
    ours: Any = jax.tree.structure(selected)
    if ours != jax.tree.structure(params):
        unknown = sorted(set(leaf_names(selected)) ^ set(leaf_names(params)))
        raise ValueError(
            f"{argument} has another structure than params (they differ at {', '.join(unknown[:4]) or 'the root'}): give one value per parameter"
        )


def check_updates(updates: types.PyTree, params: types.PyTree) -> None:
    """Raise ValueError unless updates have the structure and the shapes of the parameters (or of the state)."""
    check_structure(updates, params, "updates")

    def check(name: str, update: Any, param: Any) -> None:
        if jnp.shape(update) != jnp.shape(param):
            raise ValueError(
                f"updates at {name!r} have shape {jnp.shape(update)}, the parameter has {jnp.shape(param)}: "
                "give the gradients of these parameters"
            )
        if jnp.iscomplexobj(update) and not jnp.iscomplexobj(param):
            raise ValueError(
                f"updates at {name!r} are {update.dtype}, the parameter is {param.dtype}: give real gradients"
            )

    check_inexact(updates, "the gradient")
    map_with_name(check, updates, params)


def check_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the patterns, or raise ValueError if there are none or one is not a regular expression."""
    if not patterns:
        raise ValueError("patterns = (): give at least one regular expression")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(f"pattern = {pattern!r}: not a regular expression ({error})") from error
    return patterns


def wide_dtype(dtype: Any) -> Any:
    """Return fp32, or the dtype itself where it is wider: the precision of norms, moments and accumulators."""
    with jax.numpy_dtype_promotion("standard"):  # widening is meant, also where a program forbids it by accident
        return jnp.promote_types(dtype, jnp.float32)


def real_dtype(dtype: Any) -> Any:
    """Return the dtype of a norm: fp32, or the wider dtype; of complex numbers the dtype of their parts."""
    return jnp.finfo(wide_dtype(dtype)).dtype


def check_inexact(leaves: types.PyTree, what: str) -> None:
    """Raise ValueError naming the first leaf that holds neither floating-point nor complex numbers."""

    def check(name: str, leaf: Any) -> None:
        dtype = getattr(leaf, "dtype", None)
        if dtype is not None and not jnp.issubdtype(dtype, jnp.inexact):
            kind = "float0 (the gradient of an integer)" if dtype == jax.dtypes.float0 else dtype
            raise ValueError(
                f"{what} at {name!r} is {kind}, not a floating-point array: take the leaf out with optax.masked"
            )

    map_with_name(check, leaves)


def square_norm(x: jax.Array, layer_axes: tuple[int, ...] = (), axis_name: types.AxisName = None) -> jax.Array:
    """Return the sum of squares, of |x|^2 for complex numbers, in fp32 or wider whatever the dtype of `x`.

    Args:
      x: any array.
      layer_axes: the axes that count layers and are kept: one sum per layer.
      axis_name: mapped axis or axes over which `x` is split, when this runs inside `shard_map` on one part of it.

    Returns:
      An array with as many axes as `x`, of size 1 but for the layers, ready to be multiplied with `x`; a scalar if there are no `layer_axes`.
    """
    wide = x.astype(wide_dtype(x.dtype))
    axes = tuple(axis for axis in range(x.ndim) if axis not in layer_axes)
    total = jnp.sum(square(wide), axes, keepdims=bool(layer_axes))
    return total if axis_name is None else jax.lax.psum(total, axis_name)


def square(x: jax.Array) -> jax.Array:
    """Return x^2, or |x|^2 for complex numbers, a real array."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.square(x.real) + jnp.square(x.imag)
    return jnp.square(x)


def l2_norm(x: jax.Array, layer_axes: tuple[int, ...] = (), axis_name: types.AxisName = None) -> jax.Array:
    """Return the L2 norm, or one per layer of a stack, in fp32 or wider whatever the dtype; see `square_norm`.

    `optax.scale_by_trust_ratio` takes norms in the parameter dtype; with bf16 parameters its ratios are off by up to
    half a percent.
    """
    return jnp.sqrt(square_norm(x, layer_axes, axis_name))


def unzip_pairs(like: types.PyTree, pairs: types.PyTree) -> tuple[types.PyTree, types.PyTree]:
    """Turn a tree of pairs into a pair of trees; `like` has the structure above the pairs."""
    structure: Any = jax.tree.structure(like)
    flat = structure.flatten_up_to(pairs)
    return structure.unflatten([first for first, _ in flat]), structure.unflatten([second for _, second in flat])
