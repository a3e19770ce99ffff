"""The leaves that a layerwise transform treats, resolved once per call."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lbopt import masks, stacks, tree, types
from lbopt.transforms import _arguments, _exact_norm, _per_path


@dataclasses.dataclass(frozen=True)
class LeafTreatment:
    """The treatment of one leaf.

    Attributes:
      chosen: Whether the mask selects it.
      axes: The axes that count layers.
      axis_name: Mapped axis over which its norms are summed; None for none.
    """

    chosen: bool
    axes: stacks.LayerAxes
    axis_name: types.AxisName

    def against(self, value: jax.Array, w: jax.Array) -> jax.Array:
        """Return numbers, one for each layer, in a shape that broadcasts against the leaf `w`."""
        if not self.axes or not value.ndim:
            return value
        axes = self.axes.axes
        return value.reshape([w.shape[axis] if axis in axes else 1 for axis in range(w.ndim)])


@dataclasses.dataclass(frozen=True)
class Selection:
    """The arguments by which layerwise transforms choose leaves.

    Attributes:
      mask: The leaves that are treated.
      stacked: Leaves that are stacks of layers.
      axis_name: Inside `shard_map`, the axis over which leaves are split.
      sharded_mask: Mask of the leaves that are split over `axis_name`; None for all.
      argument: Name of the argument that the mask was given for, the field of errors.
    """

    mask: types.Mask
    stacked: types.Stacked = None
    axis_name: types.AxisName = None
    sharded_mask: types.Mask = None
    argument: str = "mask"

    def record(self, params: types.Params) -> None:
        """Record the choices for `lbopt.summarize_masks`; call it in `init`."""
        layers = stacks.resolve_stacked(self.stacked, params)
        masks.record_choice("stacked", layers)
        chosen = masks.resolve_mask(self.mask, params, self.argument, layers)
        masks.record_choice("trust_ratio_mask", chosen)

    def layers(self, params: types.Params) -> types.PyTree:
        """Return a `LeafTreatment` for each leaf of `params`, in a pytree of their structure.

        Raises:
          UserError: If a mask or a stack does not fit the parameters.
        """
        axes = stacks.resolve_stacked(self.stacked, params)
        chosen = masks.resolve_mask(self.mask, params, self.argument, axes)
        split = masks.resolve_split(self.sharded_mask, self.axis_name, params)
        return jax.tree.map(
            lambda c, a, s: LeafTreatment(c, a, split.axis_of(s)), chosen, axes, split.leaves
        )


def initial_norms(
    params: types.Params, layers: types.PyTree, transform: str
) -> dict[str, jax.Array]:
    """Return the norms of the chosen leaves, fp32 or wider, by path.

    Args:
      params: The parameters.
      layers: A `LeafTreatment` for each leaf.
      transform: Name of the transform that needs the norms, for the warning of zeros.

    Raises:
      UserError: If the parameters are shapes.
    """

    _arguments.require_arrays(params, "the radius is the norm of the parameter")

    def norm(name: str, p: Any, layer: LeafTreatment) -> jax.Array | None:
        if not layer.chosen:
            return None

        wide = p.astype(tree.wide_dtype(p.dtype))
        rough = tree.l2_norm(wide, layer.axes.axes, layer.axis_name)
        _arguments.warn_of_zeros(transform, name, rough)
        scale = power_of_two(rough)
        pair = _exact_norm.exact_norm(tree.scaled(wide, scale), layer.axes.axes, layer.axis_name)
        return ((pair.high + pair.low) / scale).reshape(layer.axes.layers(p.shape))

    return _per_path.collect(params, tree.map_with_name(norm, params, layers))


def power_of_two(size: jax.Array) -> jax.Array:
    """Return the power of two that brings a size into [0.5, 1); 1 for 0."""
    _, exponent = jnp.frexp(jnp.where(size > 0, size, 1))
    return jnp.ldexp(jnp.ones_like(size), -exponent)
