"""The disagreement of two gradients, AGVM's measure of noise: in all, per leaf, per module."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from lbopt import tree, types
from lbopt.errors import require


def phi(one: types.Params, other: types.Params) -> jax.Array:
    """Return 1 - cos of the angle between two gradients, each taken as one vector.

    For gradients m + sigma n of R replicas, with standard normal n, the phi of the means over two
    halves is q / (1 + q), with q = (sigma^2 / (R / 2)) / mean(m^2).

    Args:
      one: Mean gradient of one half of the replicas.
      other: Mean gradient of the other half, a pytree of the same shapes.

    Returns:
      An fp32 scalar in [0, 2], NaN if one of the gradients is zero. It is half the squared distance
      of the unit vectors, which keeps its digits for small angles.

    >>> print(phi({"w": jnp.array([1.0, 0.0])}, {"w": jnp.array([0.0, 3.0])}))
    1.0

    References:
      Xue et al., Large-batch Optimization for Dense Visual Predictions (AGVM), arXiv:2210.11078v1.
    """
    return 0.5 * square_norm(jax.tree.map(jnp.subtract, _unit(one), _unit(other)))


def phi_layers(one: types.Params, other: types.Params) -> dict[str, jax.Array]:
    """Return `phi` of each leaf, by its path.

    Args:
      one: Mean gradient of one half of the replicas.
      other: Mean gradient of the other half, a pytree of the same shapes.

    Returns:
      Path, "Dense_0/kernel" for instance -> fp32 scalar in [0, 2], NaN if one of the gradients of
      the leaf is zero. A stack of scanned layers is one leaf.

    >>> import jax.numpy as jnp
    >>> one = {"a": jnp.array([1.0, 0.0]), "b": jnp.array([1.0, 0.0])}
    >>> other = {"a": jnp.array([0.0, 2.0]), "b": jnp.array([5.0, 0.0])}
    >>> {name: float(value) for name, value in phi_layers(one, other).items()}
    {'a': 1.0, 'b': 0.0}

    Note:
      AGVM takes whole modules (`phi_modules`). Leaves can be compared with their trust ratios.
    """
    leaves = zip(tree.leaf_names(one), jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return {name: phi(ours, theirs) for name, ours, theirs in leaves}


def phi_modules(
    labels: types.PyTree, one: types.Params, other: types.Params
) -> dict[str, jax.Array]:
    """Return `phi` of each module.

    Args:
      labels: Module of each leaf, a pytree of strings like the gradients.
      one: Mean gradient of one half of the replicas.
      other: Mean gradient of the other half, a pytree of the same shapes.

    Returns:
      Module -> fp32 scalar in [0, 2], NaN if one of its gradients is zero; in the order of the
      leaves.

    >>> import jax.numpy as jnp
    >>> one = {"conv": jnp.array([1.0, 0.0]), "head": jnp.array([1.0])}
    >>> other = {"conv": jnp.array([0.0, 2.0]), "head": jnp.array([5.0])}
    >>> found = phi_modules({"conv": "body", "head": "head"}, one, other)
    >>> {module: float(value) for module, value in found.items()}
    {'body': 1.0, 'head': 0.0}
    """
    modules: dict[str, tuple[list[jax.Array], list[jax.Array]]] = {}
    for label, ours, theirs in zip(*map(jax.tree.leaves, (labels, one, other)), strict=True):
        pair = modules.setdefault(label, ([], []))
        pair[0].append(ours)
        pair[1].append(theirs)
    return {label: phi(*pair) for label, pair in modules.items()}


def require_halves(field: str, number: int) -> None:
    """Raise `UserError` unless a number of replicas or slices has two equal halves."""
    fix = "phi compares the gradients of two halves; give an even number >= 2"
    require(number >= 2 and number % 2 == 0, field, number, fix)


def square_norm(gradient: types.PyTree) -> jax.Array:
    """Return the sum of squares of all elements, an fp32 (or wider) scalar."""
    return tree.total(map(tree.square_norm, jax.tree.leaves(gradient)))


def _unit(gradient: types.PyTree) -> types.PyTree:
    """Return a gradient divided by its norm over all leaves, in fp32 or wider."""
    norm = tree.global_norm(gradient)
    return jax.tree.map(lambda g: g.astype(tree.wide_dtype(g.dtype)) / norm, gradient)
