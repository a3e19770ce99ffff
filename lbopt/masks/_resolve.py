"""Masks in any accepted form, turned into a bool per leaf."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lbopt import errors, stacks, tree, types
from lbopt.errors import UserError
from lbopt.masks._combine import LeafMask, check_bool, weights_only

_WEIGHTS_BY_DEFAULT = ("weight_decay_mask", "trust_ratio_mask")
"""Arguments whose default leaves out biases, normalization leaves and vectors."""


def resolve_mask(
    mask: types.Mask,
    params: types.Params,
    argument: str,
    stacked: types.PyTree = None,
) -> types.PyTree:
    """Turn a mask in any accepted form into a pytree of bools shaped like `params`.

    Args:
      mask: The mask: True or None for every leaf, False for no leaf, a pytree with a bool per leaf
        or per subtree (see `tree.spread`), or a function `params -> such a pytree`. Leaves that
        `optax.masked` took out (`optax.MaskedNode`) stay out.
      params: The parameters.
      argument: Name of the argument that the mask was given for, the field of errors.
      stacked: The layer axes of each leaf, from `stacks.resolve_stacked`; None for no stacks. A
        function gets the shapes of one layer of each stack, so that a stack of biases is not taken
        for a matrix.

    Returns:
      A pytree of Python bools with the structure of `params`.

    Raises:
      UserError: If a tree or function selects no leaf at all (give False if that is meant), if its
        structure differs from that of `params`, or if one of its leaves is not a bool.

    >>> import numpy as np
    >>> params = {"kernel": np.ones((2, 2)), "bias": np.ones(2)}
    >>> resolve_mask(weights_only, params, "weight_decay_mask")
    {'bias': False, 'kernel': True}
    >>> resolve_mask(None, params, "weight_decay_mask")
    {'bias': True, 'kernel': True}
    """
    if isinstance(mask, types.Default):
        mask = mask.value
    _check_kind(mask, params, argument)
    if mask is None or isinstance(mask, bool):
        return jax.tree.map(lambda _: mask is not False, params)

    layer = stacks.one_layer(params, stacked)
    selected = mask
    if tree.is_function(mask):
        does = "the parameters and returns a pytree of bools (by path: lbopt.select_paths)"
        tree.check_takes(mask, 1, argument, does)
        with errors.under("", mask=argument):
            selected = mask(layer)
    selected = tree.spread(selected, params, argument)
    tree.map_with_name(lambda name, chosen: check_bool(name, chosen, argument), selected)

    # A mask of exclusions replaces the default, so that biases would be decayed unnoticed.
    if argument in _WEIGHTS_BY_DEFAULT and isinstance(mask, LeafMask) and mask.only_excludes:
        _warn_of_lost_default(mask, argument, selected, layer)

    names = tree.leaf_names(params)
    if names and not any(jax.tree.leaves(selected)):
        fix = (
            f"it selects none of the {len(names)} parameters ({tree.some(names)}); pass False if "
            "no leaf is meant, or None for every leaf"
        )
        raise UserError(argument, mask, fix)
    return selected


def _check_kind(mask: types.Mask, params: types.Params, argument: str) -> None:
    """Raise `UserError` for a string, a number, or a mask by name on an array without a name."""
    if isinstance(mask, str):
        fix = f"for a pattern use lbopt.select_paths({errors.brief(mask)})"
        if mask == "as_weight_decay":
            fix = "only lbopt.lamb and lbopt.lars take it; pass the mask of the decay again"
        raise UserError(argument, mask, fix, code="type")
    if isinstance(mask, (int, float)) and not isinstance(mask, bool):
        fix = "give True, False, None, a pytree of bools, or a callable"
        raise UserError(argument, mask, fix, code="type")
    if isinstance(mask, LeafMask) and tree.leaf_names(params) == [""]:
        fix = (
            f"the parameters are one array of shape {jnp.shape(params)} without a name; put it "
            'into a dict, {"kernel": array}, or pass None (select it) or False (leave it out)'
        )
        raise UserError(argument, mask, fix, code="type")


def _warn_of_lost_default(
    mask: LeafMask, argument: str, selected: types.PyTree, params: types.Params
) -> None:
    """Warn if a mask that only excludes selects leaves that the default would leave out."""
    new = jax.tree.map(lambda chosen, usual: chosen and not usual, selected, weights_only(params))
    names = [name for name, is_new in tree.by_name(new).items() if is_new]
    if names:
        warnings.warn(
            f"{argument} = {mask!r} replaces the default and selects biases, norms or vectors "
            f"({tree.some(names)}): keep the default by weights_only & {mask!r}, or say that they "
            f"are meant by all_leaves & {mask!r}",
            stacklevel=3,
        )


class Split(NamedTuple):
    """The leaves that are split over a mapped axis.

    Attributes:
      leaves: A pytree of bools, True for leaves that are split.
      axis_name: The mapped axis; None outside of `shard_map`.
    """

    leaves: types.PyTree
    axis_name: types.AxisName

    def axis_of(self, split: bool) -> types.AxisName:
        """Return the axis to sum over for a leaf: the mapped axis if it is split, else None."""
        return self.axis_name if split else None


def resolve_split(
    sharded_mask: types.Mask, axis_name: types.AxisName, params: types.Params
) -> Split:
    """Return the leaves that are split over `axis_name`; none if that is None.

    Raises:
      UserError: As `resolve_mask`, or for a `sharded_mask` without `axis_name`.
    """
    if axis_name is None:
        if sharded_mask is not None:
            fix = "give {axis_name} too, the mapped axis over which those leaves are split"
            raise UserError("sharded_mask", sharded_mask, fix, code="conflict", also=["axis_name"])
        return Split(jax.tree.map(lambda _: False, params), None)
    return Split(resolve_mask(sharded_mask, params, "sharded_mask"), axis_name)
