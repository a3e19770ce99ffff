"""Names and norms of parameter trees."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lbopt import errors, types


def path_name(path: tuple[Any, ...]) -> str:
    """Return a key path as `a/b/c`, the form in which masks and messages name a leaf.

    >>> import jax
    >>> [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path({"dense": {"bias": 0, "kernel": 0}})]
    ['dense/bias', 'dense/kernel']
    """
    return "/".join(path_parts(path))


def path_parts(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the names of the keys on a path, the inside of a box left out."""
    if (
        len(path) > 1
        and isinstance(path[-1], jax.tree_util.GetAttrKey)
        and path[-1].name == "value"
    ):
        path = path[:-1]  # the inside of a box: flax.linen.Partitioned, the variables of flax.nnx
    return tuple(_key_name(key) for key in path)


def _key_name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            name = getattr(key, attribute)
            return (
                "/".join(map(str, name)) if isinstance(name, tuple) else str(name)
            )  # flax.traverse_util.flatten_dict
    return str(key)


def map_with_name(fn: Callable[..., Any], tree: types.PyTree, *rest: types.PyTree) -> types.PyTree:
    """Map `fn(name, leaf, *rest_leaves)` over a tree; `name` is `path_name` of the leaf."""
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: fn(path_name(path), *leaves), tree, *rest
    )


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


def check_takes(fn: Callable[..., Any], number: int, argument: str, what: str) -> None:
    """Raise ValueError unless a function given for `argument` can be called with this number of arguments, `what` for the message."""
    try:
        inspect.signature(fn).bind(*range(number))
    except TypeError as error:
        raise ValueError(f"{argument} = {said(fn)}: give a function that takes {what}") from error
    except ValueError:  # some of those written in C have no signature
        return


def said(value: Any) -> str:
    """Return a value in one short line, for messages.

    >>> import numpy as np
    >>> said(True), said(np.zeros((1000, 2)))
    ('True', 'an array of shape (1000, 2)')
    """
    return errors.brief(value)


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
    starts = [
        next((leaf[:n] for n in range(len(leaf), -1, -1) if leaf[:n] in values), None)
        for leaf in leaves
    ]
    without = [leaf for leaf, start in zip(leaves, starts, strict=True) if start is None]
    astray = [
        place
        for place in values.keys() - set(starts)
        if not any(_meet(place, hole) for hole in _holes(params))
    ]
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
        if jnp.iscomplexobj(update) != jnp.iscomplexobj(param):
            wanted = "complex" if jnp.iscomplexobj(param) else "real"
            raise ValueError(
                f"updates at {name!r} are {update.dtype}, the parameter is {param.dtype}: give {wanted} gradients"
            )

    check_inexact(updates, "the gradient")
    map_with_name(check, updates, params)


def check_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the patterns, or raise ValueError if there are none or one is not a regular expression."""
    if not patterns:
        raise ValueError("patterns = (): give at least one regular expression")
    for pattern in patterns:
        try:
            re.compile(pattern).search("")
        except (re.error, TypeError) as error:
            raise ValueError(
                f"pattern = {said(pattern)}: not a regular expression ({error})"
            ) from error
    return patterns


def wide_dtype(dtype: Any) -> Any:
    """Return fp32, or the dtype itself where it is wider: the precision of norms, moments and accumulators."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return jnp.dtype(jnp.float32)  # JAX promotes none of 8 bits or less
    with jax.numpy_dtype_promotion(
        "standard"
    ):  # widening is meant, also where a program forbids it by accident
        return jnp.promote_types(dtype, jnp.float32)


def real_dtype(dtype: Any) -> Any:
    """Return the dtype of a norm: fp32, or the wider dtype; of complex numbers the dtype of their parts."""
    return jnp.finfo(wide_dtype(dtype)).dtype


def total(parts: Iterable[jax.Array]) -> jax.Array:
    """Return the sum of arrays, in fp32 or the widest of their dtypes."""
    with jax.numpy_dtype_promotion("standard"):  # see above
        return sum(parts, jnp.zeros((), jnp.float32))


def check_inexact(leaves: types.PyTree, what: str) -> None:
    """Raise ValueError naming the first leaf that holds neither floating-point nor complex numbers."""

    def check(name: str, leaf: Any) -> None:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            kind = "float0 (the gradient of an integer)" if dtype == jax.dtypes.float0 else dtype
            is_number = dtype is None and isinstance(leaf, (float, complex))
            fix = (
                "make it one with jnp.asarray"
                if is_number
                else "take the leaf out with optax.masked"
            )
            raise ValueError(
                f"{what} at {name!r} is {kind or type(leaf).__name__}, not a floating-point array: {fix}"
            )

    map_with_name(check, leaves)


def square_norm(
    x: jax.Array, layer_axes: tuple[int, ...] = (), axis_name: types.AxisName = None
) -> jax.Array:
    """Return the sum of squares, of |x|^2 for complex numbers, in fp32 or wider whatever the dtype of `x`.

    Args:
      x: any array.
      layer_axes: the axes that count layers and are kept: one sum per layer.
      axis_name: mapped axis or axes over which `x` is split, when this runs inside `shard_map` on one part of it.

    Returns:
      An array with as many axes as `x`, of size 1 but for the layers, ready to be multiplied with `x`; a scalar if there are no `layer_axes`.
      In fp32 it is infinite for norms from 1.8e19 on and 0 below 1e-23: a norm is `l2_norm`, not its root.
    """
    wide = x.astype(wide_dtype(x.dtype))
    axes = tuple(axis for axis in range(x.ndim) if axis not in layer_axes)
    norm = jnp.sum(square(wide), axes, keepdims=bool(layer_axes))
    return norm if axis_name is None else jax.lax.psum(norm, axis_name)


def square(x: jax.Array) -> jax.Array:
    """Return x^2, or |x|^2 for complex numbers, a real array."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.square(x.real) + jnp.square(x.imag)
    return jnp.square(x)


class Squares(NamedTuple):
    """A sum of squares taken twice, as no fp32 number holds the square of 1e20 or of 1e-25.

    The scales are powers of two, so the root is that of the plain sum bit for bit where that is in range: up to norms of 2^15 it is `up`'s.
    `down` serves above; what is too small for it is below 2^-28 of the norm.

    Attributes:
      up: sum of |2^48 x|^2, fp32 or wider.
      down: sum of |2^-50 x|^2.
    """

    up: jax.Array
    down: jax.Array

    def norm(self) -> jax.Array:
        """Return the root of the sum of squares; in fp32 right from 1e-33 to 1e34."""
        is_small = self.up < 2.0**126
        back = jnp.where(is_small, 1 / _UP, 1 / _DOWN).astype(self.up.dtype)
        return jnp.sqrt(jnp.where(is_small, self.up, self.down)) * back

    def over(self, axis_name: types.AxisName) -> Squares:
        """Return the sums over a mapped axis, by one collective; themselves without one."""
        return self if axis_name is None else Squares(*jax.lax.psum(jnp.stack(self), axis_name))


_UP, _DOWN = 2.0**48, 2.0**-50


def squares(leaves: Iterable[jax.Array], layer_axes: tuple[int, ...] = ()) -> Squares:
    """Return the sum of squares of all numbers of all leaves, or one per layer; see `square_norm` for the shape."""

    def of_all(scale: float) -> jax.Array:
        return total(_scaled_square_norm(leaf, scale, layer_axes) for leaf in leaves)

    leaves = list(leaves)
    return Squares(of_all(_UP), of_all(_DOWN))


def _scaled_square_norm(x: jax.Array, scale: float, layer_axes: tuple[int, ...]) -> jax.Array:
    wide = x.astype(wide_dtype(x.dtype))
    return square_norm(
        scaled(wide, scale), layer_axes
    )  # times a complex number infinity is not a number


def map_parts(fn: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Apply `fn` to an array, or to the real and the imaginary parts of a complex one."""
    return jax.lax.complex(fn(x.real), fn(x.imag)) if jnp.iscomplexobj(x) else fn(x)


def scaled(x: jax.Array, factor: float | jax.Array) -> jax.Array:
    """Return a real or complex array times a real number, in the array's dtype; strict promotion multiplies neither a complex one nor another dtype."""
    return map_parts(lambda part: part * jnp.asarray(factor, part.dtype), x)


def l2_norm(
    x: jax.Array, layer_axes: tuple[int, ...] = (), axis_name: types.AxisName = None
) -> jax.Array:
    """Return the L2 norm, or one per layer of a stack, in fp32 or wider whatever the dtype; see `square_norm` for the arguments.

    In fp32 it is right from 1e-33 to 1e34 (`Squares`), for the price of a second sum in the same pass. `optax.scale_by_trust_ratio` and
    `optax.global_norm` add up plain squares, which are infinite from norms of 1.8e19 and 0 below 1e-23; and in the dtype of
    the parameters, so that with bf16 parameters ratios are off by up to half a percent.
    """
    return squares([x], layer_axes).over(axis_name).norm()


def global_norm(gradient: types.PyTree) -> jax.Array:
    """Return the L2 norm over every leaf together, a scalar in fp32 or wider; see `l2_norm`."""
    return squares(jax.tree.leaves(gradient)).norm()


def norm_near_one(
    x: jax.Array, layer_axes: tuple[int, ...] = (), axis_name: types.AxisName = None
) -> jax.Array:
    """Return `l2_norm` by one sum, right in fp32 from 1e-27 to 6e10: of what is computed on the way, as the directions of Adam.

    XLA computes such directions again in the pass that applies them; with two sums it writes them to memory in between, and
    LANS takes 16 words of traffic per parameter instead of 12 (TPU v3).
    """
    norm = _scaled_square_norm(x, _NEAR_ONE, layer_axes)
    return jnp.sqrt(norm if axis_name is None else jax.lax.psum(norm, axis_name)) / _NEAR_ONE


_NEAR_ONE = 2.0**28


def unzip_pairs(like: types.PyTree, pairs: types.PyTree) -> tuple[types.PyTree, types.PyTree]:
    """Turn a tree of pairs into a pair of trees; `like` has the structure above the pairs."""
    structure: Any = jax.tree.structure(like)
    flat = structure.flatten_up_to(pairs)
    return structure.unflatten([first for first, _ in flat]), structure.unflatten(
        [second for _, second in flat]
    )
