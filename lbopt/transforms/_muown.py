"""Muown: directions of rows by Muon, their magnitudes by Adam."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from lbopt import _scalars, masks, tree, types
from lbopt.linalg import Coefficients, newton_schulz, resolve_coefficients
from lbopt.transforms import (
    _arguments,
    _learning_rate,
    _matrix_optimizer,
    _matrix_variants,
    _matrix_view,
    _moments,
    _per_path,
)

_SMALLEST_NORM = 1e-12


class MuownState(NamedTuple):
    """The momentum of the directions, and the magnitudes with their moments.

    Attributes:
      rate: The step of the schedule, and the rate of the last update.
      count: int32 scalar, number of updates so far.
      momentum: Momentum of the directions, a pytree shaped like the parameters.
      magnitude: Path of each matrix -> fp32 array [matrices, out], the norms of its outputs' rows.
      length: Likewise, the norms of the vectors that give rows their directions.
      mu: Likewise, first moments of the magnitudes.
      nu: Likewise, second moments.
    """

    rate: _learning_rate.LearningRateState
    count: jax.Array  # type: ignore[assignment]
    momentum: types.PyTree
    magnitude: dict[str, jax.Array]
    length: dict[str, jax.Array]
    mu: dict[str, jax.Array]
    nu: dict[str, jax.Array]


def scale_by_muown(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float | jax.Array = 0.95,
    weight_decay: float | jax.Array = 0.0,
    *,
    b1: float | jax.Array = 0.9,
    b2: float | jax.Array = 0.95,
    adam_eps: float | jax.Array = 1e-8,
    coefficients: Coefficients = "quintic",
    steps: int | None = None,
    dtype: DTypeLike | None = None,
    eps: float | jax.Array = 1e-15,
    shape_factor: float | jax.Array = 1.0,
    weight_decay_mask: types.Mask = None,
    dimension_numbers: _matrix_view.DimensionNumbers = None,
    stacked: types.Stacked = None,
) -> optax.GradientTransformation:
    r"""Move each matrix by Muown: rows are magnitudes times directions, with a rule for each.

        row of an output:  w = g u ,  u = v / ||v||
        dg = <D, u> ;   dv = (g / ||v||) (D - dg u) ,  D the gradient
        m = b m + (1 - b) dv ;   v <- v - lr f sqrt(max(in, out)) U V^T ,  m = U S V^T
        g <- (g - lr Adam(dg)) (1 - lr wd)

    The learning rate is inside, so nothing comes behind it. Leaves that are no matrices pass
    unchanged. Gradients beyond 2^40 (1e12) count as 2^40, so that their squares stay finite.

    Args:
      learning_rate: Number or schedule.
      momentum: Decay rate b of the momentum, in [0, 1).
      weight_decay: Decay wd >= 0 of the magnitudes.
      b1: Decay rate of the first moment of the magnitudes, in [0, 1).
      b2: Decay rate of their second moment, in [0, 1).
      adam_eps: Constant >= 0 added to the root of their second moment.
      coefficients: Polynomials of the orthogonalization (see `lbopt.linalg.newton_schulz`).
      steps: Number of its steps; None for that of the coefficients.
      dtype: Dtype of its products; None for that of the updates.
      eps: Constant >= 0 added to the Frobenius norm.
      shape_factor: Number f >= 0 that the updates of the directions are multiplied by.
      weight_decay_mask: The matrices that are decayed (see `lbopt.types.Mask`); None for all.
      dimension_numbers: The axes of each matrix (see `scale_by_newton_schulz`).
      stacked: Leaves that are stacks of layers, each layer a matrix.

    Returns:
      A transform whose state is `MuownState` and whose `update` needs `params`; its output are
      updates that `optax.apply_updates` adds, in the dtype of the updates.

    Raises:
      UserError: For an argument that is out of range, or axes that do not fit the parameters.

    >>> import jax.numpy as jnp
    >>> tx = scale_by_muown(0.1)
    >>> params = {"dense": {"kernel": jnp.eye(4)}}
    >>> updates, _ = tx.update({"dense": {"kernel": jnp.ones((4, 4))}}, tx.init(params), params)
    >>> new = params["dense"]["kernel"] + updates["dense"]["kernel"]
    >>> [round(float(norm), 4) for norm in jnp.linalg.norm(new, axis=0)]
    [0.9, 0.9, 0.9, 0.9]

    References:
      NVIDIA-NeMo/Emerging-Optimizers@fd772926: emerging_optimizers/contrib/muown.py.

    Note:
      In the public code a row of zeros without a gradient becomes NaN; here it stays zero.
    """
    for argument, number in (("momentum", momentum), ("b1", b1), ("b2", b2)):
        _scalars.require_decay_rate(argument, number)
    for argument, number in (
        ("weight_decay", weight_decay),
        ("adam_eps", adam_eps),
        ("eps", eps),
        ("shape_factor", shape_factor),
    ):
        _scalars.require_at_least(argument, number, 0)
    resolve_coefficients(coefficients, steps)
    _arguments.require_float_dtype("dtype", dtype)
    rates = _learning_rate.scale_by_learning_rate(learning_rate)
    matrices = _matrix_view.Matrices(dimension_numbers, stacked)

    def init_fn(params: types.Params) -> MuownState:
        zero = jnp.zeros((), jnp.int32)
        if _per_path.is_placeholder(params):
            unknown = [_per_path.UNKNOWN_PARAMS] * 4
            return MuownState(rates.init(params), zero, params, *unknown)
        _arguments.require_arrays(params, "the magnitudes are those of the parameters")
        _arguments.require_real_leaves(params, "scale_by_muown")
        matrices.record(params)
        views = matrices.views(params)

        def length(p: jax.Array, view: _matrix_view.MatrixView | None) -> jax.Array | None:
            if view is None:
                return None
            return _lengths(view.split(_per_path.replicated(p)).astype(tree.wide_dtype(p.dtype)))

        lengths = _per_path.collect(params, jax.tree.map(length, params, views))

        def collect(change: Any) -> dict[str, jax.Array]:
            return {name: change(value) for name, value in lengths.items()}

        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, tree.wide_dtype(p.dtype)), params)
        changes = (jnp.array, jnp.array, jnp.zeros_like, jnp.zeros_like)
        kept = [collect(change) for change in changes]
        return MuownState(rates.init(params), zero, zeros, *kept)

    def step(
        t: jax.Array,
        rate: jax.Array,
        d: jax.Array,
        w: jax.Array,
        m: jax.Array,
        decay: jax.Array,
        g: jax.Array,
        length: jax.Array,
        mu: jax.Array,
        nu: jax.Array,
    ) -> tuple[jax.Array, ...]:
        wide = _matrix_view.bounded(d.astype(m.dtype))
        rate = rate.astype(m.dtype)
        weights = w.astype(m.dtype)
        u = weights / jnp.where(g == 0, 1, g)[:, None, :]
        v = u * length[:, None, :]
        dg = jnp.sum(wide * u, -2)
        dv = (g / length)[:, None, :] * (wide - u * dg[:, None, :])

        m = momentum * m + (1 - momentum) * dv
        scale = max(d.shape[-2:]) ** 0.5 * shape_factor
        orthogonal = newton_schulz(m, coefficients, steps, dtype=dtype, eps=eps)
        v = v - rate * scale * orthogonal

        mu = b1 * mu + (1 - b1) * dg
        nu = b2 * nu + (1 - b2) * dg**2
        below = jnp.sqrt(nu / _moments.one_minus_power(b2, t, nu.dtype)) + adam_eps
        mean = mu / _moments.one_minus_power(b1, t, mu.dtype)
        g = g - rate * mean / jnp.where(below > 0, below, 1)
        g = g * (1 - rate * weight_decay * decay)
        length = _lengths(v)
        new = g[:, None, :] * v / length[:, None, :]
        return (new - weights).astype(d.dtype), w, m, decay, g, length, mu, nu

    def update_fn(
        updates: optax.Updates, state: MuownState, params: types.Params | None = None
    ) -> tuple[optax.Updates, MuownState]:
        _arguments.require_params(params, "scale_by_muown")
        _arguments.require_state(state, MuownState)
        tree.check_updates(updates, state.momentum)
        _, rate_state = rates.update({}, state.rate)
        # The schedule's count begins anew with a phase, and the moments do not.
        count = optax.safe_increment(state.count)
        decayed = masks.resolve_mask(weight_decay_mask, params, "weight_decay_mask")
        views = matrices.views(updates)

        decay = _per_path.collect(
            updates,
            jax.tree.map(
                lambda u, view, is_decayed: (
                    view and jnp.full((view.count, 1), is_decayed, tree.wide_dtype(u.dtype))
                ),
                updates,
                views,
                decayed,
            ),
        )
        kept = [decay, state.magnitude, state.length, state.mu, state.nu]
        steps, new = _matrix_view.map_matrices(
            functools.partial(step, count, rate_state.applied_rate),
            matrices,
            updates,
            *kept,
            like=(params, state.momentum),
        )
        _, moment, _, *numbers = new
        return steps, MuownState(rate_state, count, moment, *numbers)

    return optax.GradientTransformation(init_fn, update_fn)


def _lengths(x: jax.Array) -> jax.Array:
    """Return the norms of the outputs' rows of [K, in, out], at least 1e-12."""
    return jnp.maximum(jnp.sqrt(jnp.sum(x**2, -2)), _SMALLEST_NORM)


def muown(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float | jax.Array = types.default(0.95),
    weight_decay: float | jax.Array = types.default(0.0),
    variant: Literal["nvidia"] = "nvidia",
    *,
    b1: float | jax.Array = types.default(0.9),
    b2: float | jax.Array = types.default(0.95),
    adam_eps: float | jax.Array = types.default(1e-8),
    coefficients: Coefficients = types.default("quintic"),
    steps: int | None = types.default(None),
    products_dtype: DTypeLike | None = types.default("bfloat16"),
    eps: float | jax.Array = types.default(1e-15),
    shape_factor: float | jax.Array = types.default(1.0),
    weight_decay_mask: types.Mask = types.default(masks.weights_only),
    rest: Any = types.default("adamw"),
    rest_learning_rate_ratio: float | jax.Array = types.default(1.0),
    rest_b1: float | jax.Array = types.default(0.9),
    rest_b2: float | jax.Array = types.default(0.95),
    rest_eps: float | jax.Array = types.default(1e-8),
    rest_weight_decay: float | jax.Array | None = types.default(None),
    dimension_numbers: _matrix_view.DimensionNumbers = None,
    stacked: types.Stacked = None,
) -> optax.GradientTransformation:
    r"""Build Muown: directions of rows by Muon, their magnitudes by Adam; the rest by AdamW.

    Updates are made by `scale_by_muown`. Every option from `momentum` to `rest_weight_decay` has
    the value that is given, else the variant's.

    Args:
      learning_rate: Number or schedule, the rate of the matrices.
      momentum: Decay rate of the momentum of the directions, in [0, 1).
      weight_decay: Decay >= 0 of the magnitudes, and of the weights of the rest.
      variant: Public code to follow, "nvidia".
      b1: Decay rate of the first moment of the magnitudes, in [0, 1).
      b2: Decay rate of their second moment, in [0, 1).
      adam_eps: Constant >= 0 added to the root of their second moment.
      coefficients: Polynomials of the orthogonalization (see `lbopt.linalg.newton_schulz`).
      steps: Number of its steps; None for that of the coefficients.
      products_dtype: Dtype of its products; None for fp32.
      eps: Constant >= 0 added to the Frobenius norm.
      shape_factor: Number that the updates of the directions are multiplied by; 0.2 gives them the
        size of Adam's.
      weight_decay_mask: The leaves that are decayed (see `lbopt.types.Mask`).
      rest: Optimizer of the other leaves (see `lbopt.muon`).
      rest_learning_rate_ratio: Learning rate of the rest, as a multiple of `learning_rate`.
      rest_b1: Decay rate of the rest's first moment.
      rest_b2: Decay rate of the rest's second moment.
      rest_eps: Constant added to the root of the rest's second moment.
      rest_weight_decay: Weight decay of the rest; None for `weight_decay`.
      dimension_numbers: The axes of each matrix (see `scale_by_newton_schulz`); None for hidden
        weights by role.
      stacked: Leaves that are stacks of layers, each layer a matrix.

    Returns:
      An `optax.GradientTransformation` whose `update` needs `params`, and whose `init` needs
      parameters that are arrays.

    Raises:
      UserError: For an argument that is out of range, an unknown variant, or parameters without
        matrices.

    >>> import jax.numpy as jnp
    >>> params = {"dense": {"kernel": jnp.eye(4), "bias": jnp.zeros(4)}}
    >>> tx = muown(0.1)
    >>> updates, state = tx.update(params, tx.init(params), params)

    References:
      NVIDIA-NeMo/Emerging-Optimizers@fd772926: emerging_optimizers/contrib/muown.py.
    """
    given = locals()

    def updates_of(
        options: _matrix_variants.MuownOptions, numbers: Any, decayed: Any
    ) -> list[optax.GradientTransformation]:
        return [
            scale_by_muown(
                learning_rate,
                options.momentum,
                options.weight_decay,
                b1=options.b1,
                b2=options.b2,
                adam_eps=options.adam_eps,
                coefficients=options.coefficients,
                steps=options.steps,
                dtype=options.products_dtype,
                eps=options.eps,
                shape_factor=options.shape_factor,
                weight_decay_mask=decayed,
                dimension_numbers=numbers,
            )
        ]

    return _matrix_optimizer.build(
        "muown",
        _matrix_variants.MUOWN,
        updates_of,
        given,
        has_rate=True,
        dtype="products_dtype",
    )
