"""Names, structure and norms of trees of parameters."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from lbopt import types
from lbopt.errors import UserError


def path_name(path: tuple[Any, ...]) -> str:
    """Return a key path as `a/b/c`, the form in which masks and messages name a leaf.

    >>> tree = {"dense": {"bias": 0, "kernel": 0}}
    >>> [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    ['dense/bias', 'dense/kernel']
    """
    return "/".join(path_parts(path))


def path_parts(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the names of the keys on a path, without the key inside a box.

    A box is `flax.linen.Partitioned` or a variable of `flax.nnx`, which keep the array in `value`.
    """
    last = path[-1] if len(path) > 1 else None
    if isinstance(last, jax.tree_util.GetAttrKey) and last.name == "value":
        path = path[:-1]
    return tuple(_key_name(key) for key in path)


def _key_name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            name = getattr(key, attribute)
            # flax.traverse_util.flatten_dict makes keys of tuples.
            return "/".join(map(str, name)) if isinstance(name, tuple) else str(name)
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
    """Return whether an argument is a function, and no callable pytree, as Equinox modules are."""
    values = [] if isinstance(given, jax.tree_util.Partial) else jax.tree.leaves(given)
    return callable(given) and all(callable(value) for value in values)


def check_takes(fn: Callable[..., Any], number: int, argument: str, does: str) -> None:
    """Raise `UserError` unless a function can be called with this number of arguments.

    Args:
      fn: The function.
      number: Number of positional arguments of the call.
      argument: Name of the argument that the function was given for.
      does: End of the sentence "give a function that takes ...", for the message.
    """
    try:
        inspect.signature(fn).bind(*range(number))
    except (TypeError, ValueError) as error:
        # Some functions written in C have no signature. Nor has a partial whose arguments do not
        # fit its function.
        in_c = fn.func if isinstance(fn, functools.partial) else fn
        if isinstance(error, ValueError) and not _has_signature(in_c):
            return
        fix = f"give a function that takes {does}"
        raise UserError(argument, fn, fix, code="type") from error


def _has_signature(fn: Callable[..., Any]) -> bool:
    try:
        inspect.signature(fn)
    except ValueError:
        return False
    return True


def spread(given: types.PyTree, params: types.Params, argument: str) -> types.PyTree:
    """Return a pytree shaped like `params` from one with a value per leaf or per subtree.

    Optax takes masks in this form. Leaves are matched by name, so containers may be of other types
    and boxes may be on one side only. A value may also stand where `params` has an empty subtree
    (None, `optax.MaskedNode`).

    Args:
      given: The values.
      params: The parameters.
      argument: Name of the argument that `given` is, for the error.

    Raises:
      UserError: If a leaf gets no value, or a value belongs to no leaf.

    >>> params = {"body": {"bias": 0, "kernel": 0}, "head": {"bias": 0}}
    >>> spread({"body": True, "head": {"bias": False}}, params, "mask")
    {'body': {'bias': True, 'kernel': True}, 'head': {'bias': False}}
    """
    values = {path_parts(path): value for path, value in jax.tree_util.tree_leaves_with_path(given)}
    leaves = [path_parts(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]

    # The longest beginning of each leaf's path that has a value.
    starts = [
        next((leaf[:n] for n in range(len(leaf), -1, -1) if leaf[:n] in values), None)
        for leaf in leaves
    ]

    missing = [leaf for leaf, start in zip(leaves, starts, strict=True) if start is None]
    unused = outside({"/".join(place) for place in values.keys() - set(starts)}, params)
    if missing or unused:
        _refuse_structure(argument, {*unused, *("/".join(leaf) for leaf in missing)})

    structure: Any = jax.tree.structure(params)
    return structure.unflatten([values[start] for start in starts if start is not None])


def outside(places: Collection[str], params: types.Params) -> list[str]:
    """Return the paths, sorted, that lead to no empty subtree: None or `optax.MaskedNode`."""
    # A key may have slashes too, as in Haiku.
    holes = ["/".join(hole).split("/") for hole in _empty_paths(params)] if places else []
    return [
        place
        for place in sorted(places)
        if not any(_overlap(place.split("/"), hole) for hole in holes)
    ]


def _empty_paths(params: types.Params) -> list[tuple[str, ...]]:
    """Return the paths of subtrees without leaves: None, empty containers, `optax.MaskedNode`."""

    def is_empty(node: Any) -> bool:
        return not jax.tree.leaves(node)

    nodes = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_empty)
    return [path_parts(path) for path, node in nodes if is_empty(node)]


def _overlap(one: list[str], other: list[str]) -> bool:
    """Return whether one path begins with the other."""
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def _refuse_structure(argument: str, differences: Iterable[str]) -> NoReturn:
    places = ", ".join(sorted(differences)[:4]) or "the root"
    fix = (
        f"its structure differs from that of the parameters, at {places}; give one value per "
        "parameter, or per subtree"
    )
    raise UserError(argument, reason=fix, code="type")


def check_structure(given: types.PyTree, params: types.Params, argument: str) -> None:
    """Raise `UserError` unless `given`, the value of `argument`, has one leaf per parameter."""
    ours: Any = jax.tree.structure(given)
    if ours != jax.tree.structure(params):
        _refuse_structure(argument, set(leaf_names(given)) ^ set(leaf_names(params)))


def check_updates(updates: types.PyTree, params: types.PyTree) -> None:
    """Raise `UserError` unless updates have the structure and shapes of the parameters (or state).

    They must be real where the parameters are real, and complex where those are complex.
    """
    check_structure(updates, params, "updates")
    check_inexact(updates, "updates")

    def check(name: str, update: Any, param: Any) -> None:
        field = f"updates/{name}"
        # A leaf of another shape might broadcast without an error.
        if jnp.shape(update) != jnp.shape(param):
            fix = (
                f"its shape is {jnp.shape(update)}, that of the parameter {jnp.shape(param)}; "
                "give the gradients of these parameters"
            )
            raise UserError(field, reason=fix, code="type")
        if jnp.iscomplexobj(update) != jnp.iscomplexobj(param):
            wanted = "complex" if jnp.iscomplexobj(param) else "real"
            fix = (
                f"its dtype is {update.dtype}, that of the parameter {param.dtype}; give {wanted} "
                "gradients"
            )
            raise UserError(field, reason=fix, code="type")

    map_with_name(check, updates, params)


def check_inexact(leaves: types.PyTree, argument: str) -> None:
    """Raise `UserError` for the first leaf that is no floating-point or complex array.

    Args:
      leaves: Any pytree.
      argument: Name of the pytree in errors, whose field is `argument/path/of/leaf`.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(leaves):
        name = path_name(path)
        dtype = getattr(leaf, "dtype", None)
        if dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
            continue
        field = f"{argument}/{name}" if name else argument
        if dtype is None and isinstance(leaf, (float, complex)):
            fix = "a number and no array; make it one with jnp.asarray"
            raise UserError(field, leaf, fix, code="type")
        is_float0 = dtype == jax.dtypes.float0
        kind = "float0 (the gradient of an integer)" if is_float0 else dtype or type(leaf).__name__
        fix = f"{kind}, not a floating-point array; take the leaf out with optax.masked"
        raise UserError(field, reason=fix, code="type")


def check_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the patterns, all of which must be regular expressions.

    Raises:
      UserError: If there is none, or one is no regular expression.
    """
    if not patterns:
        fix = "give at least one regular expression"
        raise UserError("patterns", patterns, fix, code="missing")
    for pattern in patterns:
        try:
            re.compile(pattern).search("")
        except (re.error, TypeError) as error:
            fix = f"not a regular expression ({error}); correct it, or escape it by re.escape"
            raise UserError("pattern", pattern, fix) from error
    return patterns


def wide_dtype(dtype: Any) -> Any:
    """Return fp32, or a wider `dtype` itself: the precision of norms, moments and accumulators."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return jnp.dtype(jnp.float32)  # JAX promotes no dtype of 8 bits or less
    # Widening is meant, so it is right also in a program that forbids implicit promotion.
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, jnp.float32)


def real_dtype(dtype: Any) -> Any:
    """Return the dtype of a norm of this dtype: `wide_dtype`, and for complex ones its parts'."""
    return jnp.finfo(wide_dtype(dtype)).dtype


def total(parts: Iterable[jax.Array]) -> jax.Array:
    """Return the sum of arrays, in fp32 or the widest of their dtypes."""
    with jax.numpy_dtype_promotion("standard"):  # as in `wide_dtype`
        return sum(parts, jnp.zeros((), jnp.float32))


def square_norm(
    x: jax.Array, layer_axes: tuple[int, ...] = (), axis_name: types.AxisName = None
) -> jax.Array:
    """Return the sum of squares (of |x|^2 for complex numbers), in fp32 or wider.

    Args:
      x: Array of any shape and dtype.
      layer_axes: Axes that count layers; they are kept, with one sum per layer.
      axis_name: Inside `shard_map`, the mapped axis or axes over which `x` is split; sums are taken
        over them too.

    Returns:
      A scalar without `layer_axes`, else an array with the axes of `x`, of size 1 except for the
      layers, so that it broadcasts against `x`. In fp32 it is infinite for norms from 1.8e19 on and
      0 below 1e-23, so take norms with `l2_norm`, not as a root of this.
    """
    wide = x.astype(wide_dtype(x.dtype))
    axes = tuple(axis for axis in range(x.ndim) if axis not in layer_axes)
    norm = jnp.sum(square(wide), axes, keepdims=bool(layer_axes))
    return norm if axis_name is None else jax.lax.psum(norm, axis_name)


def square(x: jax.Array) -> jax.Array:
    """Return x^2, or |x|^2 for complex numbers: a real array."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.square(x.real) + jnp.square(x.imag)
    return jnp.square(x)


# Powers of two, by which a sum of squares is scaled so that fp32 holds it.
_UP = 2.0**48
_DOWN = 2.0**-50
_NEAR_ONE = 2.0**28


class Squares(NamedTuple):
    """A sum of squares at two scales, since fp32 holds the square of neither 1e20 nor 1e-25.

    The scales are powers of two, so the root equals that of the plain sum bit for bit where fp32
    holds that sum. Norms up to 2^15 come from `up`, larger ones from `down`; what `down` loses to
    underflow is below 2^-28 of the norm.

    Attributes:
      up: Sum of |2^48 x|^2, fp32 or wider.
      down: Sum of |2^-50 x|^2, of the same shape and dtype.
    """

    up: jax.Array
    down: jax.Array

    def norm(self) -> jax.Array:
        """Return the root of the sum of squares; in fp32 right from 1e-33 to 1e34."""
        is_small = self.up < 2.0**126
        back = jnp.where(is_small, 1 / _UP, 1 / _DOWN).astype(self.up.dtype)
        return jnp.sqrt(jnp.where(is_small, self.up, self.down)) * back

    def over(self, axis_name: types.AxisName) -> Squares:
        """Return the sums over a mapped axis, by one collective; unchanged if it is None."""
        return self if axis_name is None else Squares(*jax.lax.psum(jnp.stack(self), axis_name))


def squares(leaves: Iterable[jax.Array], layer_axes: tuple[int, ...] = ()) -> Squares:
    """Return the sum of squares over all leaves together; shapes are those of `square_norm`."""
    leaves = list(leaves)

    def at_scale(scale: float) -> jax.Array:
        return total(_scaled_square_norm(leaf, scale, layer_axes) for leaf in leaves)

    return Squares(at_scale(_UP), at_scale(_DOWN))


def _scaled_square_norm(x: jax.Array, scale: float, layer_axes: tuple[int, ...]) -> jax.Array:
    wide = x.astype(wide_dtype(x.dtype))
    # By parts: an infinite complex number times a complex one is not a number.
    return square_norm(scaled(wide, scale), layer_axes)


def map_parts(fn: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Apply `fn` to a real array, or to the real and the imaginary part of a complex one."""
    return jax.lax.complex(fn(x.real), fn(x.imag)) if jnp.iscomplexobj(x) else fn(x)


def scaled(x: jax.Array, factor: float | jax.Array) -> jax.Array:
    """Return a real or complex array times a real number, in the array's dtype.

    A plain product is refused under strict promotion if `x` is complex or the dtypes differ.
    """
    return map_parts(lambda part: part * jnp.asarray(factor, part.dtype), x)


def l2_norm(
    x: jax.Array, layer_axes: tuple[int, ...] = (), axis_name: types.AxisName = None
) -> jax.Array:
    """Return the L2 norm, or one per layer of a stack, in fp32 or wider; see `square_norm`.

    In fp32 it is right from 1e-33 to 1e34 (`Squares`), for the price of a second sum in the same
    pass. `optax.scale_by_trust_ratio` and `optax.global_norm` add plain squares, whose norms are
    infinite from 1.8e19 on and 0 below 1e-23. They do so in the parameters' dtype: with bf16
    parameters, trust ratios are off by up to half a percent.
    """
    return squares([x], layer_axes).over(axis_name).norm()


def global_norm(gradient: types.PyTree) -> jax.Array:
    """Return the L2 norm over all leaves together, a scalar in fp32 or wider; see `l2_norm`."""
    return squares(jax.tree.leaves(gradient)).norm()


def norm_near_one(
    x: jax.Array, layer_axes: tuple[int, ...] = (), axis_name: types.AxisName = None
) -> jax.Array:
    """Return `l2_norm` by one sum, right in fp32 from 1e-27 to 6e10, enough for Adam's directions.

    With two sums XLA writes the directions to memory before the pass that applies them: LANS then
    moves 16 words per parameter instead of 12 (TPU v3).
    """
    norm = _scaled_square_norm(x, _NEAR_ONE, layer_axes)
    return jnp.sqrt(norm if axis_name is None else jax.lax.psum(norm, axis_name)) / _NEAR_ONE


def unzip_pairs(like: types.PyTree, pairs: types.PyTree) -> tuple[types.PyTree, types.PyTree]:
    """Turn a tree of pairs into a pair of trees; `like` has the structure above the pairs."""
    structure: Any = jax.tree.structure(like)
    flat = structure.flatten_up_to(pairs)
    firsts = structure.unflatten([first for first, _ in flat])
    return firsts, structure.unflatten([second for _, second in flat])
