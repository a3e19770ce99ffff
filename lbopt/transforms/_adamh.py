"""AdamH: Adam's directions on spheres; every weight keeps its norm."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax.typing import DTypeLike

from lbopt import _scalars, masks, types
from lbopt.transforms import (
    _learning_rate,
    _moments,
    _per_path,
    _precision,
    _relative,
    _selection,
)

_WEIGHTS = masks.weights_only & masks.exclude_roles("embedding")


def adamh(
    learning_rate: optax.ScalarOrSchedule,
    b1: float | jax.Array = 0.9,
    b2: float | jax.Array = 0.95,
    eps: float | jax.Array = 1e-8,
    *,
    sphere_mask: types.Mask = types.default(_WEIGHTS),
    rest_learning_rate_ratio: float | jax.Array = 1.0,
    stacked: types.Stacked = None,
    axis_name: types.AxisName = None,
    sharded_mask: types.Mask = None,
    mu_dtype: DTypeLike | None = None,
    nu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    r"""Build AdamH: each weight moves by lr times its norm in Adam's direction, and keeps its norm.

        w <- R (w - lr R u / ||u||) / ||...|| ,   u Adam's direction, R = ||w_0||
        the rest: w <- w - ratio lr u

    LAMB without decay, with the norm held. The learning rate is the relative size of a step; a rate
    of sqrt(lr wd) suits a model that AdamW trained with lr and wd.

    Args:
      learning_rate: Number or schedule.
      b1: Decay rate of the first moment, in [0, 1).
      b2: Decay rate of the second moment, in [0, 1).
      eps: Constant >= 0 added to the root of the second moment.
      sphere_mask: The leaves that keep their norm (see `lbopt.types.Mask`). The default leaves out
        embeddings, biases, norms and vectors.
      rest_learning_rate_ratio: Learning rate of the rest, as a multiple of `learning_rate`.
      stacked: Leaves that are stacks of layers, each layer with a norm of its own (see
        `scale_by_layerwise_trust_ratio`).
      axis_name: Inside `shard_map`, the axis over which leaves are split; norms are summed over it.
      sharded_mask: Mask of the leaves that are split over `axis_name`; None for all.
      mu_dtype: Dtype in which the first moment is kept; None for fp32.
      nu_dtype: Dtype in which the second moment is kept; None for fp32.

    Returns:
      An `optax.GradientTransformation` whose `update` needs `params`, and whose `init` needs
      parameters that are arrays.

    Raises:
      UserError: For an argument that is out of range, or a mask that does not fit the parameters.

    >>> import jax.numpy as jnp
    >>> params = {"dense": {"kernel": jnp.eye(4), "bias": jnp.zeros(4)}}
    >>> tx = adamh(0.1)
    >>> grads = {"dense": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}}
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> round(float(jnp.linalg.norm(params["dense"]["kernel"] + updates["dense"]["kernel"])), 6)
    2.0

    References:
      Wen et al., Hyperball, arXiv:2606.16899. marin-community/marin@00843426:
      lib/levanter/src/levanter/optim/adamh.py.

    Note:
      The code of marin also clips the gradients of each group to norm 1, and keeps the norm of the
      last step, which drifts by roundoff, in place of the first.
    """
    _scalars.require_at_least("rest_learning_rate_ratio", rest_learning_rate_ratio, 0)
    selection = _selection.Selection(sphere_mask, stacked, argument="sphere_mask")

    def rest(params: types.Params) -> types.PyTree:
        return jax.tree.map(lambda layer: not layer.chosen, selection.layers(params))

    where: dict[str, Any] = {
        "stacked": stacked,
        "axis_name": axis_name,
        "sharded_mask": sharded_mask,
    }
    return _precision.chain_in_wide_precision(
        _named(selection),
        _moments.scale_by_lamb_moments(b1, b2, eps, mu_dtype=mu_dtype, nu_dtype=nu_dtype),
        _relative.relative_update("weight", sphere_mask, **where),
        optax.masked(optax.scale(rest_learning_rate_ratio), rest),
        _learning_rate.scale_by_learning_rate(learning_rate),
        _relative.hyperball("initial", sphere_mask, **where),
    )


def _named(selection: _selection.Selection) -> optax.GradientTransformation:
    """Return the identity, which records the optimizer of each leaf for `summarize_masks`."""

    def init_fn(params: types.Params) -> optax.EmptyState:
        if not _per_path.is_placeholder(params):
            layers = selection.layers(params)
            names = jax.tree.map(lambda layer: "adamh" if layer.chosen else "adam", layers)
            masks.record_choice("optimizer", names)
        return optax.EmptyState()

    return optax.GradientTransformation(init_fn, optax.identity().update)
