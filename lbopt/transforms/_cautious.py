"""Cautious updates: no component moves against its own gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from lbopt import _scalars, tree, types
from lbopt.transforms import _arguments, _selection


def cautious(
    inner: optax.GradientTransformation,
    min_fraction: float | jax.Array = 1e-3,
    mask: types.Mask = None,
    *,
    stacked: types.Stacked = None,
    axis_name: types.AxisName = None,
    sharded_mask: types.Mask = None,
) -> optax.GradientTransformation:
    r"""Drop the components of a direction whose sign differs from the gradient's.

        u = inner(g) ;   k = [u g > 0] ;   out = u k / max(mean(k), min_fraction)

    The mean is over each layer, so the size of the update stays about the same.

    Args:
      inner: Transform that gives directions of ascent, before the learning rate, as
        `optax.scale_by_adam` or `lbopt.scale_by_newton_schulz` do.
      min_fraction: Least share of kept components to divide by, in (0, 1].
      mask: The leaves that are treated (see `lbopt.types.Mask`); None for all.
      stacked: Leaves that are stacks of layers, each layer with a share of its own.
      axis_name: Inside `shard_map`, the axis over which leaves are split; shares are summed over
        it.
      sharded_mask: Mask of the leaves that are split over `axis_name`; None for all.

    Returns:
      A transform with the state of `inner`; its output keeps the dtype of the updates. Complex
      components are compared by the sign of the real part of u conj(g).

    Raises:
      UserError: If `inner` is no transformation, or `min_fraction` is not in (0, 1].

    >>> import jax.numpy as jnp
    >>> tx = cautious(optax.trace(0.5))
    >>> state = tx.init({"w": jnp.zeros(2)})
    >>> _, state = tx.update({"w": jnp.array([1.0, 4.0])}, state)
    >>> updates, _ = tx.update({"w": jnp.array([1.0, -1.0])}, state)
    >>> [round(float(u), 6) for u in updates["w"]]
    [3.0, 0.0]

    References:
      Liang et al., Cautious Optimizers, arXiv:2411.16085, Algorithm 1.
    """
    _arguments.require_transformation("inner", inner)
    _scalars.require_above("min_fraction", min_fraction, 0)
    fits = "a number in (0, 1]"
    _scalars.checked("min_fraction", min_fraction, fits, lambda n: 0 < n <= 1, traced=True)
    selection = _selection.Selection(mask, stacked, axis_name, sharded_mask)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: types.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        tree.check_inexact(updates, "updates")
        directions, state = optax.with_extra_args_support(inner).update(
            updates, state, params, **extra_args
        )

        def keep(u: jax.Array, g: jax.Array, layer: _selection.LeafTreatment) -> jax.Array:
            if not layer.chosen:
                return u
            agrees = _agrees(u, g.astype(u.dtype))
            share = _mean(agrees, layer)
            factor = agrees / jnp.maximum(share, jnp.asarray(min_fraction, share.dtype))
            return tree.scaled(u.astype(tree.wide_dtype(u.dtype)), factor).astype(u.dtype)

        return jax.tree.map(keep, directions, updates, selection.layers(updates)), state

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def _agrees(u: jax.Array, g: jax.Array) -> jax.Array:
    """Return 1.0 where both have one sign, else 0.0; products could underflow."""
    if jnp.iscomplexobj(u):
        agrees = u.real * g.real + u.imag * g.imag > 0
    else:
        agrees = ((u > 0) & (g > 0)) | ((u < 0) & (g < 0))
    return agrees.astype(tree.real_dtype(u.dtype))


def _mean(x: jax.Array, layer: _selection.LeafTreatment) -> jax.Array:
    own = [axis for axis in range(x.ndim) if axis not in layer.axes.axes]
    total = jnp.sum(x, own, keepdims=bool(layer.axes))
    count = jnp.asarray(x.size / max(1, total.size), total.dtype)
    if layer.axis_name is not None:
        total, count = (jax.lax.psum(part, layer.axis_name) for part in (total, count))
    return total / count
