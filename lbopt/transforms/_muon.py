"""Muon and its family as finished optimizers: NorMuon, MuonH, Scion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from lbopt import _scalars, masks, tree, types
from lbopt.errors import require_choice
from lbopt.linalg import Coefficients
from lbopt.transforms import (
    _arguments,
    _layerwise_options,
    _matrix_optimizer,
    _matrix_variants,
    _matrix_view,
    _moments,
    _newton_schulz,
)


def muon(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float | jax.Array = types.default(0.95),
    weight_decay: float | jax.Array = types.default(0.0),
    variant: Literal["keller", "moonlight", "polar", "optax"] = "keller",
    *,
    nesterov: bool = types.default(True),
    momentum_form: _matrix_variants.MomentumForm = types.default("average"),
    coefficients: Coefficients = types.default("muon"),
    steps: int | None = types.default(None),
    products_dtype: DTypeLike | None = types.default("bfloat16"),
    eps: float | jax.Array = types.default(1e-7),
    shape_rule: _newton_schulz.ShapeRule = types.default("width"),
    shape_factor: float | jax.Array = types.default(1.0),
    weight_decay_mask: types.Mask = types.default(masks.weights_only),
    cautious_weight_decay: bool = types.default(False),
    rest: Any = types.default("adamw"),
    rest_learning_rate_ratio: float | jax.Array = types.default(0.015),
    rest_b1: float | jax.Array = types.default(0.9),
    rest_b2: float | jax.Array = types.default(0.95),
    rest_eps: float | jax.Array = types.default(1e-10),
    rest_weight_decay: float | jax.Array | None = types.default(None),
    dimension_numbers: _matrix_view.DimensionNumbers = None,
    stacked: types.Stacked = None,
    momentum_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    r"""Build Muon: momentum whose matrices are orthogonalized; the rest by AdamW.

        m = b m + (1 - b) g ;   U S V^T ~ (1 - b) g + b m  (m without Nesterov's momentum)
        w <- w - lr (f U V^T + wd w) ,   f a factor of the shape

    Hidden weights, told by their role, are the matrices; embeddings, output heads, biases and norms
    are the rest. `lbopt.summarize_masks` shows which leaf goes where. Every option from `momentum`
    to `rest_weight_decay` has the value that is given, else the variant's; the defaults shown are
    those of "keller".

    Args:
      learning_rate: Number or schedule, the rate of the matrices.
      momentum: Decay rate b of the momentum, in [0, 1).
      weight_decay: Decoupled weight decay wd >= 0.
      variant: Public code to follow; in full by `lbopt.describe("keller", "muon")`.
      nesterov: Whether the momentum is Nesterov's.
      momentum_form: "average" (as above), "sum" (m = b m + g), or "debiased" (an average with
        Optax's bias correction). They differ in what `eps` means; the last also in early steps.
      coefficients: Polynomials of the orthogonalization (see `lbopt.linalg.newton_schulz`).
      steps: Number of its steps; None for that of the coefficients.
      products_dtype: Dtype of its products; None for fp32.
      eps: Constant >= 0 added to the Frobenius norm.
      shape_rule: Factor of the shape: "width", "rms", "spectral" or "none" (see
        `scale_by_matrix_shape`).
      shape_factor: Number that the factor is multiplied by.
      weight_decay_mask: The leaves that are decayed (see `lbopt.types.Mask`).
      cautious_weight_decay: Whether a component is decayed only where its update has its sign
        (arXiv:2510.12402).
      rest: Optimizer of the rest: "adamw"; "nadamw" (with Nesterov's momentum); "adamh" (output
        heads keep their norm, at the learning rate of the matrices); "sign"; or a transformation
        that gives directions before the learning rate.
      rest_learning_rate_ratio: Learning rate of the rest, as a multiple of `learning_rate`.
      rest_b1: Decay rate of its first moment.
      rest_b2: Decay rate of its second moment.
      rest_eps: Constant added to the root of its second moment.
      rest_weight_decay: Its weight decay; None for `weight_decay`.
      dimension_numbers: The axes of each matrix (see `scale_by_newton_schulz`); None for hidden
        weights by role.
      stacked: Leaves that are stacks of layers, each layer a matrix.
      momentum_dtype: Dtype in which the momentum is kept; None for fp32.

    Returns:
      An `optax.GradientTransformation` whose `update` needs `params`.

    Raises:
      UserError: For an argument that is out of range, an unknown variant, or parameters without
        matrices.

    >>> import jax.numpy as jnp, lbopt
    >>> tx = muon(0.02, weight_decay=0.01)
    >>> params = {"dense": {"kernel": jnp.ones((4, 4)), "bias": jnp.zeros(4)}}
    >>> updates, state = tx.update(params, tx.init(params), params)
    >>> lbopt.summarize_masks(params, tx)
    parameter     shape   role    rule     decayed  adapted  layers  optimizer
    dense/bias    (4,)    bias    by name  -        -        -       adamw
    dense/kernel  (4, 4)  weight  by name  yes      -        -       muon
    2 parameters (20 numbers): 1 decayed (16), - adapted

    References:
      Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024.
      Liu et al., Muon is Scalable for LLM Training, arXiv:2502.16982 ("moonlight").
      Amsel et al., The Polar Express, arXiv:2505.16932 ("polar").

    Note:
      `optax.contrib.muon` takes every leaf of two dimensions for a matrix unless told otherwise,
      keeps bf16 state for bf16 parameters, and orthogonalizes leaf by leaf on every device;
      `lbopt.shard_matrices` deals the matrices over the devices.
    """
    return _family("muon", _matrix_variants.MUON, locals())


def normuon(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float | jax.Array = types.default(0.95),
    weight_decay: float | jax.Array = types.default(0.0),
    neuron_b2: float | jax.Array = types.default(0.95),
    variant: Literal["paper"] = "paper",
    *,
    nesterov: bool = types.default(True),
    momentum_form: _matrix_variants.MomentumForm = types.default("average"),
    coefficients: Coefficients = types.default("muon"),
    steps: int | None = types.default(None),
    products_dtype: DTypeLike | None = types.default("bfloat16"),
    eps: float | jax.Array = types.default(1e-7),
    shape_rule: _newton_schulz.ShapeRule = types.default("width"),
    shape_factor: float | jax.Array = types.default(1.0),
    weight_decay_mask: types.Mask = types.default(masks.weights_only),
    cautious_weight_decay: bool = types.default(False),
    rest: Any = types.default("adamw"),
    rest_learning_rate_ratio: float | jax.Array = types.default(0.015),
    rest_b1: float | jax.Array = types.default(0.9),
    rest_b2: float | jax.Array = types.default(0.95),
    rest_eps: float | jax.Array = types.default(1e-10),
    rest_weight_decay: float | jax.Array | None = types.default(None),
    dimension_numbers: _matrix_view.DimensionNumbers = None,
    stacked: types.Stacked = None,
    momentum_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    r"""Build NorMuon: Muon whose output neurons are divided by the root of their mean square.

        O = U V^T of Muon ;   v = b2 v + (1 - b2) mean_in(O^2) ;   w <- w - lr (f N + wd w) ,
        N = O / sqrt(v), scaled back to the norm of O

    Args:
      learning_rate: Number or schedule, the rate of the matrices.
      momentum: Decay rate of the momentum, in [0, 1).
      weight_decay: Decoupled weight decay >= 0.
      neuron_b2: Decay rate b2 of the mean square, in [0, 1).
      variant: Public code to follow; in full by `lbopt.describe("paper", "normuon")`.
      nesterov: Whether the momentum is Nesterov's (see `lbopt.muon`).
      momentum_form: "average", "sum" or "debiased" (see `lbopt.muon`).
      coefficients: Polynomials of the orthogonalization (see `lbopt.linalg.newton_schulz`).
      steps: Number of its steps; None for that of the coefficients.
      products_dtype: Dtype of its products; None for fp32.
      eps: Constant >= 0 added to the Frobenius norm.
      shape_rule: Factor of the shape: "width", "rms", "spectral" or "none".
      shape_factor: Number that the factor is multiplied by.
      weight_decay_mask: The leaves that are decayed (see `lbopt.types.Mask`).
      cautious_weight_decay: Whether a component is decayed only where its update has its sign.
      rest: Optimizer of the other leaves (see `lbopt.muon`).
      rest_learning_rate_ratio: Learning rate of the rest, as a multiple of `learning_rate`.
      rest_b1: Decay rate of the rest's first moment.
      rest_b2: Decay rate of the rest's second moment.
      rest_eps: Constant added to the root of the rest's second moment.
      rest_weight_decay: Weight decay of the rest; None for `weight_decay`.
      dimension_numbers: The axes of each matrix (see `scale_by_newton_schulz`).
      stacked: Leaves that are stacks of layers, each layer a matrix.
      momentum_dtype: Dtype in which the momentum is kept; None for fp32.

    Returns:
      An `optax.GradientTransformation` whose `update` needs `params`.

    Raises:
      UserError: As `lbopt.muon`.

    >>> import jax.numpy as jnp
    >>> params = {"dense": {"kernel": jnp.eye(4), "bias": jnp.zeros(4)}}
    >>> tx = normuon(0.02)
    >>> updates, _ = tx.update(params, tx.init(params), params)
    >>> round(float(updates["dense"]["kernel"][0, 0]), 4)
    -0.0137

    References:
      Li et al., NorMuon: Making Muon more efficient and scalable, arXiv:2510.05491, Algorithm 1.
    """
    return _family("normuon", _matrix_variants.NORMUON, locals())


def muonh(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float | jax.Array = types.default(0.95),
    variant: Literal["marin", "modded_nanogpt"] = "marin",
    *,
    nesterov: bool = types.default(True),
    momentum_form: _matrix_variants.MomentumForm = types.default("sum"),
    coefficients: Coefficients = types.default("quintic"),
    steps: int | None = types.default(None),
    products_dtype: DTypeLike | None = types.default(None),
    eps: float | jax.Array = types.default(1e-8),
    rest: Any = types.default("adamh"),
    rest_learning_rate_ratio: float | jax.Array = types.default(1.0),
    rest_b1: float | jax.Array = types.default(0.9),
    rest_b2: float | jax.Array = types.default(0.95),
    rest_eps: float | jax.Array = types.default(1e-8),
    rest_weight_decay: float | jax.Array | None = types.default(0.0),
    dimension_numbers: _matrix_view.DimensionNumbers = None,
    stacked: types.Stacked = None,
    momentum_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    r"""Build MuonH: Muon's directions on a sphere; every matrix keeps its norm.

        w <- R (w - lr R O / ||O||) / ||...|| ,   O = U V^T of Muon, R = ||w_0||

    The learning rate is the relative size of a step, and weight decay has no use. It is
    `relative_update` and `hyperball` around Muon's direction.

    Args:
      learning_rate: Number or schedule, the rate of the matrices.
      momentum: Decay rate of the momentum, in [0, 1).
      variant: Public code to follow; in full by `lbopt.describe("marin", "muonh")`.
      nesterov: Whether the momentum is Nesterov's (see `lbopt.muon`).
      momentum_form: "average", "sum" or "debiased" (see `lbopt.muon`).
      coefficients: Polynomials of the orthogonalization (see `lbopt.linalg.newton_schulz`).
      steps: Number of its steps; None for that of the coefficients.
      products_dtype: Dtype of its products; None for fp32.
      eps: Constant >= 0 added to the Frobenius norm.
      rest: Optimizer of the other leaves (see `lbopt.muon`).
      rest_learning_rate_ratio: Learning rate of the rest, as a multiple of `learning_rate`; heads
        under "adamh" move at the rate of the matrices.
      rest_b1: Decay rate of the rest's first moment.
      rest_b2: Decay rate of the rest's second moment.
      rest_eps: Constant added to the root of the rest's second moment.
      rest_weight_decay: Weight decay of the rest that is on no sphere.
      dimension_numbers: The axes of each matrix (see `scale_by_newton_schulz`).
      stacked: Leaves that are stacks of layers, each layer a matrix.
      momentum_dtype: Dtype in which the momentum is kept; None for fp32.

    Returns:
      An `optax.GradientTransformation` whose `update` needs `params`, and whose `init` needs
      parameters that are arrays.

    Raises:
      UserError: As `lbopt.muon`.

    >>> import jax.numpy as jnp
    >>> params = {"dense": {"kernel": jnp.eye(4), "bias": jnp.zeros(4)}}
    >>> tx = muonh(0.1)
    >>> updates, _ = tx.update({"dense": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}},
    ...                        tx.init(params), params)
    >>> round(float(jnp.linalg.norm(params["dense"]["kernel"] + updates["dense"]["kernel"])), 6)
    2.0

    References:
      Wen et al., Hyperball, arXiv:2606.16899. The codes that the variants name.
    """
    return _family("muonh", _matrix_variants.MUONH, locals())


def scion(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float | jax.Array = types.default(0.95),
    weight_decay: float | jax.Array = types.default(1.0),
    shape_factor: float | jax.Array = types.default(1.0),
    variant: Literal["nvidia"] = "nvidia",
    *,
    nesterov: bool = types.default(False),
    momentum_form: _matrix_variants.MomentumForm = types.default("average"),
    coefficients: Coefficients = types.default("quintic"),
    steps: int | None = types.default(None),
    products_dtype: DTypeLike | None = types.default("bfloat16"),
    eps: float | jax.Array = types.default(1e-15),
    weight_decay_mask: types.Mask = types.default(None),
    rest: Any = types.default("sign"),
    rest_learning_rate_ratio: float | jax.Array = types.default(1.0),
    rest_b1: float | jax.Array = types.default(0.95),
    rest_weight_decay: float | jax.Array | None = types.default(None),
    dimension_numbers: _matrix_view.DimensionNumbers = None,
    stacked: types.Stacked = None,
    momentum_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    r"""Build Scion: Frank-Wolfe steps towards balls of operator norms.

        m = b m + (1 - b) g ;   w <- (1 - lr wd) w - lr r sqrt(out / in) U V^T ,   U S V^T = m
        the rest: w <- (1 - lr wd) w - lr sign(m)

    Args:
      learning_rate: Number or schedule, the rate of the matrices.
      momentum: Decay rate b of the momentum, in [0, 1).
      weight_decay: Decay wd; 1 for the constrained form, 0 for the unconstrained one.
      shape_factor: Radius r of the ball of the matrices.
      variant: Public code to follow; in full by `lbopt.describe("nvidia", "scion")`.
      nesterov: Whether the momentum is Nesterov's (see `lbopt.muon`).
      momentum_form: "average", "sum" or "debiased" (see `lbopt.muon`).
      coefficients: Polynomials of the orthogonalization (see `lbopt.linalg.newton_schulz`).
      steps: Number of its steps; None for that of the coefficients.
      products_dtype: Dtype of its products; None for fp32.
      eps: Constant >= 0 added to the Frobenius norm.
      weight_decay_mask: The leaves that are decayed (see `lbopt.types.Mask`).
      rest: Optimizer of the other leaves (see `lbopt.muon`).
      rest_learning_rate_ratio: Learning rate of the rest, as a multiple of `learning_rate`; it is
        also the radius of the rest's ball.
      rest_b1: Decay rate of the momentum of the rest.
      rest_weight_decay: Weight decay of the rest; None for `weight_decay`.
      dimension_numbers: The axes of each matrix (see `scale_by_newton_schulz`).
      stacked: Leaves that are stacks of layers, each layer a matrix.
      momentum_dtype: Dtype in which the momentum is kept; None for fp32.

    Returns:
      An `optax.GradientTransformation` whose `update` needs `params`.

    Raises:
      UserError: As `lbopt.muon`.

    >>> import jax.numpy as jnp
    >>> params = {"dense": {"kernel": jnp.zeros((4, 4)), "bias": jnp.zeros(4)}}
    >>> tx = scion(0.1)
    >>> grads = {"dense": {"kernel": jnp.eye(4), "bias": jnp.ones(4)}}
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> round(float(updates["dense"]["bias"][0]), 6)
    -0.1

    References:
      Pethick et al., Training Deep Learning Models with Norm-Constrained LMOs, arXiv:2502.07529v2,
      Algorithms 1 and 2.

    Note:
      With a ratio other than 1, the decay of the rest is multiplied by it too.
    """
    return _family("scion", _matrix_variants.SCION, locals())


_RENAMED: Any = {"dtype": "products_dtype", "b2": "neuron_b2", "factor": "shape_factor"}
"""Arguments of transforms -> options of optimizers."""


def _family(
    name: str,
    variants: Mapping[str, _layerwise_options.Variant[_matrix_variants.MuonOptions]],
    given: Mapping[str, Any],
) -> optax.GradientTransformation:
    dtype = given["momentum_dtype"]

    def directions(
        options: _matrix_variants.MuonOptions, numbers: Any
    ) -> list[optax.GradientTransformation]:
        require_choice("shape_rule", options.shape_rule, _newton_schulz.SHAPE_RULES)
        return [*_momentum(options, dtype), *_orthogonalized(options, numbers)]

    return _matrix_optimizer.build(name, variants, directions, given, **_RENAMED)


def _orthogonalized(
    options: _matrix_variants.MuonOptions, numbers: Any
) -> list[optax.GradientTransformation]:
    """Return the transforms after the momentum, without decay and learning rate."""
    links = [
        _newton_schulz.scale_by_newton_schulz(
            options.coefficients,
            options.steps,
            dtype=options.products_dtype,
            eps=options.eps,
            dimension_numbers=numbers,
        ),
    ]

    if options.neuron_b2 is not None:
        links.append(
            _newton_schulz.scale_by_neuron_norm(options.neuron_b2, dimension_numbers=numbers)
        )
    if not options.sphere:
        links.append(
            _newton_schulz.scale_by_matrix_shape(
                options.shape_rule, options.shape_factor, dimension_numbers=numbers
            )
        )
    return links


def _momentum(
    options: _matrix_variants.MuonOptions, dtype: DTypeLike | None
) -> list[optax.GradientTransformation]:
    require_choice("momentum_form", options.momentum_form, ("average", "sum", "debiased"))
    if options.momentum_form == "sum":
        return [
            _moments.scale_by_lars_momentum(
                options.momentum, options.nesterov, momentum_dtype=dtype
            )
        ]
    is_debiased = options.momentum_form == "debiased"
    return [_averaged(options.momentum, options.nesterov, is_debiased, dtype)]


def _averaged(
    momentum: float | jax.Array, nesterov: bool, debias: bool, dtype: DTypeLike | None
) -> optax.GradientTransformation:
    """Return an average of gradients, with debiasing that of `optax.contrib.muon` bit for bit.

    With Nesterov's momentum, it corrects the average as after one step more.
    """
    _scalars.require_decay_rate("momentum", momentum)
    _scalars.require_flag("nesterov", nesterov)
    kept = _moments.scale_by_lars_momentum(momentum, momentum_dtype=dtype)

    def init_fn(params: types.Params) -> _moments.LarsMomentumState:
        return kept.init(params)._replace(count=jnp.zeros((), jnp.int32))

    def update_fn(
        updates: optax.Updates,
        state: _moments.LarsMomentumState,
        params: types.Params | None = None,
    ) -> tuple[optax.Updates, _moments.LarsMomentumState]:
        del params
        _arguments.require_state(state, _moments.LarsMomentumState)
        tree.check_updates(updates, state.momentum)
        assert state.count is not None
        count = optax.safe_increment(state.count)

        def mean(u: jax.Array, old: jax.Array) -> jax.Array:
            wide = tree.wide_dtype(old.dtype)
            new = u.astype(wide)
            kept = old.astype(wide)
            return tree.scaled(new, 1 - momentum) + tree.scaled(kept, momentum)

        def share(step: jax.Array) -> jax.Array:
            """Return how much of an average after some steps is not the zero it started at."""
            return 1 - jax.lax.pow(jnp.asarray(momentum, jnp.float32), step)

        now = share(count)
        later = share(optax.safe_increment(count))

        def direction(u: jax.Array, m: jax.Array) -> jax.Array:
            u_wide = u.astype(m.dtype)
            if not nesterov:
                return (m / now.astype(m.dtype) if debias else m).astype(u.dtype)
            if debias:
                m = m / later.astype(m.dtype)
                u_wide = u_wide / now.astype(m.dtype)
            return (tree.scaled(m, momentum) + tree.scaled(u_wide, 1 - momentum)).astype(u.dtype)

        means = jax.tree.map(mean, updates, state.momentum)
        directions = jax.tree.map(direction, updates, means)
        means = jax.tree.map(lambda m, old: m.astype(old.dtype), means, state.momentum)
        return directions, _moments.LarsMomentumState(means, count)

    return optax.GradientTransformation(init_fn, update_fn)
