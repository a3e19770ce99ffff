"""Orthogonalized updates, and the factors that shapes and neurons give them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from lbopt import _scalars, tree, types
from lbopt.errors import require_choice
from lbopt.linalg import Coefficients, newton_schulz, resolve_coefficients
from lbopt.transforms import _arguments, _matrix_view, _per_path

ShapeRule = Literal["width", "rms", "spectral", "none"]
SHAPE_RULES: dict[str, Callable[[int, int], float]] = {
    "width": lambda fan_in, fan_out: math.sqrt(max(1.0, fan_out / fan_in)),
    "rms": lambda fan_in, fan_out: math.sqrt(max(fan_in, fan_out)),
    "spectral": lambda fan_in, fan_out: math.sqrt(fan_out / fan_in),
    "none": lambda fan_in, fan_out: 1.0,
}


def scale_by_newton_schulz(
    coefficients: Coefficients = "muon",
    steps: int | None = None,
    *,
    dtype: DTypeLike | None = None,
    eps: float | jax.Array = 0.0,
    dimension_numbers: _matrix_view.DimensionNumbers = None,
    stacked: types.Stacked = None,
) -> optax.GradientTransformation:
    r"""Replace each matrix U S V^T among the updates by nearly its orthogonal factor U V^T.

    Muon's direction: put a momentum before it and the learning rate behind. Leaves that are no
    matrices pass unchanged; `lbopt.muon` gives them to AdamW.

    Args:
      coefficients: A published set ("muon", "polar_express", "cans", ...) or triples; see
        `lbopt.linalg.newton_schulz`.
      steps: Number of steps; None for that of the set.
      dtype: Dtype of the products, "bfloat16" as published; None for that of the updates.
      eps: Constant >= 0 added to the Frobenius norm, which is taken in fp32.
      dimension_numbers: The axes of each matrix: a pytree of `optax.contrib.MuonDimensionNumbers`,
        with None for leaves that are no matrices, or a function params -> such a pytree. None for
        the hidden weights that `lbopt.masks.matrix_dimension_numbers` finds: a convolution is one
        matrix, so are a query's heads. To orthogonalize each head by itself, leave the axis of the
        heads out of both sets.
      stacked: Leaves that are stacks of layers, each layer a matrix (see
        `scale_by_layerwise_trust_ratio`).

    Returns:
      A stateless transform; its output keeps the dtype of the updates. Matrices of one shape, or
      of its transpose, are orthogonalized together; `lbopt.shard_matrices` deals them over devices.

    Raises:
      UserError: For unknown coefficients, or axes that do not fit the parameters.

    >>> import jax.numpy as jnp
    >>> tx = scale_by_newton_schulz("newton")
    >>> grads = {"dense": {"kernel": jnp.diag(jnp.array([3.0, 1.0])), "bias": jnp.ones(2)}}
    >>> updates, _ = tx.update(grads, tx.init(grads))
    >>> [round(float(u), 3) for u in jnp.diag(updates["dense"]["kernel"])], updates["dense"]["bias"]
    ([1.0, 1.0], Array([1., 1.], dtype=float32))

    References:
      Jordan et al., Muon, 2024; KellerJordan/Muon@857d1adc:muon.py.
    """
    resolve_coefficients(coefficients, steps)
    _scalars.require_at_least("eps", eps, 0)
    _arguments.require_float_dtype("dtype", dtype)

    def orthogonalize(x: jax.Array) -> tuple[jax.Array]:
        return (newton_schulz(x, coefficients, steps, dtype=dtype, eps=eps),)

    matrices = _matrix_view.Matrices(dimension_numbers, stacked)

    def init_fn(params: types.Params) -> optax.EmptyState:
        if not _per_path.is_placeholder(params):
            _arguments.require_float_leaves(params, dtype=dtype)
        return _recording(matrices)(params)

    def update_fn(
        updates: optax.Updates, state: optax.EmptyState, params: types.Params | None = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params
        tree.check_inexact(updates, "updates")
        directions, _ = _matrix_view.map_matrices(
            orthogonalize, matrices, updates, any_orientation=True
        )
        return directions, state

    return optax.GradientTransformation(init_fn, update_fn)


def scale_by_matrix_shape(
    rule: ShapeRule = "width",
    factor: float | jax.Array = 1.0,
    *,
    dimension_numbers: _matrix_view.DimensionNumbers = None,
    stacked: types.Stacked = None,
) -> optax.GradientTransformation:
    r"""Multiply each matrix among the updates by a factor of its shape.

        width     sqrt(max(1, out / in))     Muon: the update's effect on activations keeps its size
        rms       sqrt(max(in, out))         Moonlight, with factor 0.2: the RMS of AdamW's updates
        spectral  sqrt(out / in)             Scion, Dion: spectral norms of activations' changes
        none      1

    Args:
      rule: One of the rules above.
      factor: Number >= 0 that all matrices are multiplied by too.
      dimension_numbers: The axes of each matrix (see `scale_by_newton_schulz`).
      stacked: Leaves that are stacks of layers.

    Returns:
      A stateless transform; its output keeps the dtype of the updates.

    Raises:
      UserError: For an unknown rule, or axes that do not fit the parameters.

    >>> import jax.numpy as jnp
    >>> tx = scale_by_matrix_shape("rms", 0.2)
    >>> grads = {"dense": {"kernel": jnp.ones((4, 25))}}
    >>> updates, _ = tx.update(grads, tx.init(grads))
    >>> float(updates["dense"]["kernel"][0, 0])
    1.0

    References:
      KellerJordan/Muon@857d1adc:muon.py ("width"). Liu et al., Muon is Scalable, arXiv:2502.16982,
      section 2.2 ("rms"). Pethick et al., arXiv:2502.07529 ("spectral").
    """
    require_choice("rule", rule, SHAPE_RULES)
    _scalars.require_at_least("factor", factor, 0)
    matrices = _matrix_view.Matrices(dimension_numbers, stacked)

    def update_fn(
        updates: optax.Updates, state: optax.EmptyState, params: types.Params | None = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params
        tree.check_inexact(updates, "updates")

        def scale(u: jax.Array, view: _matrix_view.MatrixView | None) -> jax.Array:
            if view is None:
                return u
            wide = tree.wide_dtype(u.dtype)
            of_shape = SHAPE_RULES[rule](view.fan_in, view.fan_out) * factor
            return tree.scaled(u.astype(wide), of_shape).astype(u.dtype)

        return jax.tree.map(scale, updates, matrices.views(updates)), state

    return optax.GradientTransformation(_recording(matrices), update_fn)


class NeuronNormState(NamedTuple):
    """The mean square of each output's update.

    Attributes:
      square: Path of each matrix -> fp32 array [matrices, out].
    """

    square: dict[str, jax.Array]


def scale_by_neuron_norm(
    b2: float | jax.Array = 0.95,
    eps: float | jax.Array = 1e-10,
    *,
    dimension_numbers: _matrix_view.DimensionNumbers = None,
    stacked: types.Stacked = None,
) -> optax.GradientTransformation:
    r"""Divide the update of each output neuron by the root of its mean square over the steps.

        v = b2 v + (1 - b2) mean_in(u^2) ;   y = u / (sqrt(v) + eps)
        out = y ||u|| / (||y|| + eps)

    The Frobenius norm of each matrix stays what it was: NorMuon's step after the orthogonalization.

    Args:
      b2: Decay rate of the mean square, in [0, 1).
      eps: Constant >= 0 added to the root and to the norm.
      dimension_numbers: The axes of each matrix (see `scale_by_newton_schulz`).
      stacked: Leaves that are stacks of layers.

    Returns:
      A transform whose state is `NeuronNormState`; its output keeps the dtype of the updates.

    Raises:
      UserError: For an argument that is out of range, or axes that do not fit the parameters.

    >>> import jax.numpy as jnp
    >>> tx = scale_by_neuron_norm()
    >>> grads = {"dense": {"kernel": jnp.array([[3.0, 1.0], [3.0, 1.0]])}}
    >>> updates, _ = tx.update(grads, tx.init(grads))
    >>> [round(float(u), 4) for u in updates["dense"]["kernel"][0]]
    [2.2361, 2.2361]

    References:
      Li et al., NorMuon, arXiv:2510.05491, Algorithm 1; zichongli5/NorMuon@d45c9a42:normuon.py.
    """
    _scalars.require_decay_rate("b2", b2)
    _scalars.require_at_least("eps", eps, 0)
    matrices = _matrix_view.Matrices(dimension_numbers, stacked)

    def init_fn(params: types.Params) -> NeuronNormState:
        if _per_path.is_placeholder(params):
            return NeuronNormState(_per_path.UNKNOWN_PARAMS)
        _arguments.require_float_leaves(params)
        matrices.record(params)

        def zeros(p: jax.Array, view: _matrix_view.MatrixView | None) -> jax.Array | None:
            if view is None:
                return None
            return jnp.zeros((view.count, view.fan_out), tree.real_dtype(p.dtype))

        views = matrices.views(params)
        return NeuronNormState(_per_path.collect(params, jax.tree.map(zeros, params, views)))

    def normalize(u: jax.Array, square: jax.Array) -> tuple[jax.Array, jax.Array]:
        wide = u.astype(tree.wide_dtype(u.dtype))
        mean = jnp.mean(tree.square(wide), axis=-2)
        square = b2 * square + (1 - b2) * mean
        below = jnp.sqrt(square)[:, None, :] + eps
        y = tree.map_parts(lambda part: part / jnp.where(below > 0, below, 1), wide)
        before, after = (tree.l2_norm(x, (0,)) for x in (wide, y))
        factor = before / jnp.where(after + eps > 0, after + eps, 1)
        return tree.scaled(y, factor).astype(u.dtype), square

    def update_fn(
        updates: optax.Updates, state: NeuronNormState, params: types.Params | None = None
    ) -> tuple[optax.Updates, NeuronNormState]:
        del params
        _arguments.require_state(state, NeuronNormState)
        tree.check_inexact(updates, "updates")
        updates, (square,) = _matrix_view.map_matrices(
            normalize, matrices, updates, state.square, deal=False
        )
        return updates, NeuronNormState(square)

    return optax.GradientTransformation(init_fn, update_fn)


def _recording(matrices: _matrix_view.Matrices) -> optax.TransformInitFn:
    def init_fn(params: types.Params) -> optax.EmptyState:
        if not _per_path.is_placeholder(params):
            matrices.views(params)
            matrices.record(params)
        return optax.EmptyState()

    return init_fn
