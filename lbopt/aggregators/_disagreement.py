"""How much two gradients disagree: the noise gauge of AGVM, for a whole gradient, a leaf or a module."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from lbopt import tree, types


def phi(one: types.Params, other: types.Params) -> jax.Array:
    """Return 1 - cos of the angle between two gradients, each taken as one vector.

    For g = m + sigma n over R parts, n standard normal, phi is q / (1 + q) with q = (sigma^2 / (R / 2)) / mean(m^2).

    Args:
      one: gradient of one half of the parts.
      other: of the other half, a pytree of the same shapes.

    Returns:
      fp32 scalar in [0, 2], not a number if one of them is zero. Half the squared distance of the unit vectors, which
      keeps its digits where the angle is small.

    >>> print(phi({"w": jnp.array([1.0, 0.0])}, {"w": jnp.array([0.0, 3.0])}))
    1.0

    References:
      AGVM, arXiv 2210.11078: phi of a module, with the halves of the replicas.
    """
    return 0.5 * square_norm(jax.tree.map(jnp.subtract, _unit(one), _unit(other)))


def phi_layers(one: types.Params, other: types.Params) -> dict[str, jax.Array]:
    """Return `phi` of each leaf, by its path.

    Args:
      one: gradient of one half of the parts.
      other: of the other half, a pytree of the same shapes.

    Returns:
      Path, such as "Dense_0/kernel" -> fp32 scalar in [0, 2], not a number where a leaf is zero in one of them.

    Note:
      AGVM takes whole modules of a detector, such as its backbone: `phi_modules`. Leaves are what trust ratios belong to, and the two
      can be laid side by side. A stack of scanned layers is one leaf.
    """
    leaves = zip(tree.leaf_names(one), jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return {name: phi(ours, theirs) for name, ours, theirs in leaves}


def phi_modules(
    labels: types.PyTree, one: types.Params, other: types.Params
) -> dict[str, jax.Array]:
    """Return `phi` of each module.

    Args:
      labels: pytree of strings like the gradients, the module of each leaf.
      one: gradient of one half of the parts.
      other: of the other half, a pytree of the same shapes.

    Returns:
      Module -> fp32 scalar in [0, 2], not a number where it is zero in one of them; in the order in which the modules come.
    """
    modules: dict[str, tuple[list[jax.Array], list[jax.Array]]] = {}
    for label, ours, theirs in zip(*map(jax.tree.leaves, (labels, one, other)), strict=True):
        pair = modules.setdefault(label, ([], []))
        pair[0].append(ours)
        pair[1].append(theirs)
    return {label: phi(*pair) for label, pair in modules.items()}


def square_norm(gradient: types.PyTree) -> jax.Array:
    """Return the sum of squares of all elements, an fp32 (or wider) scalar."""
    return tree.total(map(tree.square_norm, jax.tree.leaves(gradient)))


def _unit(gradient: types.PyTree) -> types.PyTree:
    norm = tree.global_norm(gradient)
    return jax.tree.map(lambda g: g.astype(tree.wide_dtype(g.dtype)) / norm, gradient)
