"""SOAP, SOAP-H, Dion and MuLoCo as finished optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import optax

from lbopt import masks, types
from lbopt.errors import require_choice
from lbopt.transforms import (
    _dion,
    _layerwise_options,
    _matrix_optimizer,
    _matrix_view,
    _muon,
    _newton_schulz,
    _outer,
    _second_order_options,
    _soap,
)


def soap(
    learning_rate: optax.ScalarOrSchedule,
    b1: float | jax.Array = types.default(0.95),
    b2: float | jax.Array = types.default(0.95),
    eps: float | jax.Array = types.default(1e-8),
    weight_decay: float | jax.Array = types.default(0.01),
    variant: Literal["paper", "kl"] = "paper",
    *,
    shampoo_b2: float | jax.Array | None = types.default(None),
    every_steps: int = types.default(10),
    debias: bool = types.default(True),
    kl: bool = types.default(False),
    weight_decay_mask: types.Mask = types.default(masks.weights_only),
    rest: Any = types.default("adamw"),
    rest_learning_rate_ratio: float | jax.Array = types.default(1.0),
    rest_b1: float | jax.Array = types.default(0.95),
    rest_b2: float | jax.Array = types.default(0.95),
    rest_eps: float | jax.Array = types.default(1e-8),
    rest_weight_decay: float | jax.Array | None = types.default(None),
    dimension_numbers: _matrix_view.DimensionNumbers = None,
    stacked: types.Stacked = None,
) -> optax.GradientTransformation:
    r"""Build SOAP: Adam in the eigenbasis of Shampoo's preconditioner; the rest by AdamW.

    The direction is that of `scale_by_soap`. Every option from `b1` to `rest_weight_decay` has the
    value that is given, else the variant's; the defaults shown are those of "paper".

    Args:
      learning_rate: Number or schedule, that of the matrices.
      b1: Decay rate of the first moment, in [0, 1).
      b2: Decay rate of the second moment, in [0, 1).
      eps: Constant >= 0 added to the root of the second moment.
      weight_decay: Decoupled weight decay >= 0.
      variant: Public code to follow; in full by `lbopt.describe("kl", "soap")`.
      shampoo_b2: Decay rate of the statistics; None for `b2`.
      every_steps: Number of updates between two changes of the basis.
      debias: Whether the moments have a bias correction.
      kl: Whether the statistics are those of KL-Shampoo.
      weight_decay_mask: The leaves that are decayed (see `lbopt.types.Mask`).
      rest: That of `lbopt.muon`.
      rest_learning_rate_ratio: That of `lbopt.muon`.
      rest_b1: That of `lbopt.muon`.
      rest_b2: That of `lbopt.muon`.
      rest_eps: That of `lbopt.muon`.
      rest_weight_decay: That of `lbopt.muon`.
      dimension_numbers: That of `lbopt.muon`.
      stacked: That of `lbopt.muon`.

    Returns:
      An `optax.GradientTransformation` whose `update` needs `params`. The first update does not
      move matrices.

    Raises:
      UserError: As `lbopt.muon`.

    >>> import jax.numpy as jnp
    >>> params = {"dense": {"kernel": jnp.eye(4), "bias": jnp.zeros(4)}}
    >>> tx = soap(0.1, weight_decay=0.0)
    >>> _, state = tx.update(params, tx.init(params), params)
    >>> updates, _ = tx.update(params, state, params)
    >>> round(float(updates["dense"]["kernel"][0, 0]), 4)
    -0.1

    References:
      Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam, arXiv:2409.11321.
    """
    return _soap_like("soap", _second_order_options.SOAP, variant, locals())


def soaph(
    learning_rate: optax.ScalarOrSchedule,
    b1: float | jax.Array = types.default(0.95),
    b2: float | jax.Array = types.default(0.9),
    eps: float | jax.Array = types.default(1e-8),
    variant: Literal["modded_nanogpt", "paper"] = "modded_nanogpt",
    *,
    shampoo_b2: float | jax.Array | None = types.default(None),
    every_steps: int = types.default(1),
    debias: bool = types.default(False),
    kl: bool = types.default(True),
    rest: Any = types.default("adamw"),
    rest_learning_rate_ratio: float | jax.Array = types.default(0.5556),
    rest_b1: float | jax.Array = types.default(0.8),
    rest_b2: float | jax.Array = types.default(0.95),
    rest_eps: float | jax.Array = types.default(1e-10),
    rest_weight_decay: float | jax.Array | None = types.default(None),
    dimension_numbers: _matrix_view.DimensionNumbers = None,
    stacked: types.Stacked = None,
) -> optax.GradientTransformation:
    r"""Build SOAP-H: SOAP's directions on a sphere; every matrix keeps its norm.

        w <- R (w - lr R u / ||u||) / ||...|| ,   u SOAP's direction, R = ||w_0||

    Args:
      learning_rate: Number or schedule, that of the matrices: the relative size of a step.
      b1: That of `lbopt.soap`.
      b2: That of `lbopt.soap`.
      eps: That of `lbopt.soap`.
      variant: Public code to follow; in full by `lbopt.describe("modded_nanogpt", "soaph")`.
      shampoo_b2: That of `lbopt.soap`.
      every_steps: That of `lbopt.soap`.
      debias: That of `lbopt.soap`.
      kl: That of `lbopt.soap`.
      rest: That of `lbopt.muon`.
      rest_learning_rate_ratio: That of `lbopt.muon`.
      rest_b1: That of `lbopt.muon`.
      rest_b2: That of `lbopt.muon`.
      rest_eps: That of `lbopt.muon`.
      rest_weight_decay: Weight decay of the rest; None for none.
      dimension_numbers: That of `lbopt.muon`.
      stacked: That of `lbopt.muon`.

    Returns:
      An `optax.GradientTransformation` whose `update` needs `params`, and whose `init` needs
      parameters that are arrays.

    Raises:
      UserError: As `lbopt.muon`.

    >>> import jax.numpy as jnp
    >>> params = {"dense": {"kernel": jnp.eye(4), "bias": jnp.zeros(4)}}
    >>> tx = soaph(0.1)
    >>> grads = {"dense": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}}
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> round(float(jnp.linalg.norm(params["dense"]["kernel"] + updates["dense"]["kernel"])), 6)
    2.0

    References:
      Wen et al., Hyperball, arXiv:2606.16899. The codes that the variants name.
    """
    return _soap_like("soaph", _second_order_options.SOAPH, variant, locals())


def dion(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float | jax.Array = types.default(0.95),
    weight_decay: float | jax.Array = types.default(0.01),
    rank: int | None = types.default(None),
    rank_fraction: float = types.default(1.0),
    variant: Literal["microsoft"] = "microsoft",
    *,
    eps: float | jax.Array = types.default(1e-8),
    seed: int = 0,
    shape_rule: _newton_schulz.ShapeRule = types.default("spectral"),
    weight_decay_mask: types.Mask = types.default(None),
    rest: Any = types.default("adamw"),
    rest_learning_rate_ratio: float | jax.Array = types.default(1.0),
    rest_b1: float | jax.Array = types.default(0.9),
    rest_b2: float | jax.Array = types.default(0.95),
    rest_eps: float | jax.Array = types.default(1e-8),
    rest_weight_decay: float | jax.Array | None = types.default(None),
    dimension_numbers: _matrix_view.DimensionNumbers = None,
    stacked: types.Stacked = None,
) -> optax.GradientTransformation:
    r"""Build Dion: orthonormalized updates of low rank with error feedback; the rest by AdamW.

        w <- w - lr (sqrt(out / in) P Q^T + wd w) ,   P Q^T of `scale_by_dion`

    Args:
      learning_rate: Number or schedule, that of the matrices.
      momentum: Decay rate of the momentum, in [0, 1).
      weight_decay: Decoupled weight decay wd >= 0.
      rank: Rank of the updates; None for `rank_fraction`.
      rank_fraction: Share of the smaller side, in (0, 1].
      variant: Public code to follow; in full by `lbopt.describe("microsoft", "dion")`.
      eps: Constant >= 0 added to the norms of columns.
      seed: Seed of the first basis.
      shape_rule: That of `lbopt.muon`.
      weight_decay_mask: The leaves that are decayed (see `lbopt.types.Mask`).
      rest: That of `lbopt.muon`.
      rest_learning_rate_ratio: That of `lbopt.muon`.
      rest_b1: That of `lbopt.muon`.
      rest_b2: That of `lbopt.muon`.
      rest_eps: That of `lbopt.muon`.
      rest_weight_decay: That of `lbopt.muon`.
      dimension_numbers: That of `lbopt.muon`.
      stacked: That of `lbopt.muon`.

    Returns:
      An `optax.GradientTransformation` whose `update` needs `params`.

    Raises:
      UserError: As `lbopt.muon`, and for a rank above the smaller side of a matrix.

    >>> import jax.numpy as jnp
    >>> params = {"dense": {"kernel": jnp.eye(4), "bias": jnp.zeros(4)}}
    >>> tx = dion(0.1, weight_decay=0.0)
    >>> updates, _ = tx.update(params, tx.init(params), params)
    >>> round(float(jnp.linalg.norm(updates["dense"]["kernel"])), 4)
    0.2

    References:
      Ahn et al., Dion: Distributed Orthonormalized Updates, arXiv:2504.05295.
    """
    given = dict(locals())
    options = _choose(_second_order_options.DION, variant, given, "seed")
    require_choice("shape_rule", options.shape_rule, _newton_schulz.SHAPE_RULES)

    def directions(numbers: Any) -> list[optax.GradientTransformation]:
        where = {"dimension_numbers": numbers}
        low_rank = _dion.scale_by_dion(
            options.momentum, options.rank, options.rank_fraction, options.eps, seed=seed, **where
        )
        return [low_rank, _newton_schulz.scale_by_matrix_shape(options.shape_rule, **where)]

    directions(None)  # which checks the options
    return _optimizer("dion", directions, options, given)


def muloco(
    learning_rate: optax.ScalarOrSchedule,
    outer_learning_rate: float | jax.Array = 0.5,
    outer_momentum: float | jax.Array = 0.5,
    sync_steps: int = 30,
    inner: optax.GradientTransformation | None = None,
    **muon_options: Any,
) -> optax.GradientTransformation:
    r"""Build MuLoCo with one worker (K = 1): a Nesterov step over every `sync_steps` of Muon.

    Args:
      learning_rate: Number or schedule, that of the inner optimizer.
      outer_learning_rate: Learning rate of the outer steps.
      outer_momentum: Momentum of the outer steps, in [0, 1).
      sync_steps: Number of inner updates for each outer step.
      inner: A finished optimizer in place of Muon, with a learning rate of its own.
      **muon_options: Other arguments of `lbopt.muon`.

    Returns:
      `lbopt.nesterov_outer` around the inner optimizer.

    Raises:
      UserError: For an argument that is out of range.

    >>> import jax.numpy as jnp
    >>> params = {"dense": {"kernel": jnp.eye(4), "bias": jnp.zeros(4)}}
    >>> tx = muloco(0.02, sync_steps=10)
    >>> updates, state = tx.update(params, tx.init(params), params)

    References:
      Therien et al., MuLoCo, arXiv:2505.23725v2, Algorithm 1. The defaults are those of
      KellerJordan/modded-nanogpt@370106ff:records/track_3_optimization/results/
      20260504_muloco_normuonh.
    """
    inside = _muon.muon(learning_rate, **muon_options) if inner is None else inner
    return _outer.nesterov_outer(inside, outer_learning_rate, outer_momentum, sync_steps)


def _choose(variants: Mapping[str, Any], variant: str, given: Mapping[str, Any], *others: str):
    skipped = ("learning_rate", "variant", "dimension_numbers", "stacked", *others)
    own = {option: value for option, value in given.items() if option not in skipped}
    return _layerwise_options.choose(variants, variant, **own)


def _soap_like(
    name: str,
    variants: Mapping[str, _layerwise_options.Variant[_second_order_options.SoapOptions]],
    variant: str,
    given: Mapping[str, Any],
) -> optax.GradientTransformation:
    options = _choose(variants, variant, given)

    def directions(numbers: Any) -> list[optax.GradientTransformation]:
        return [
            _soap.scale_by_soap(
                options.b1,
                options.b2,
                options.eps,
                options.shampoo_b2,
                options.every_steps,
                debias=options.debias,
                kl=options.kl,
                dimension_numbers=numbers,
            )
        ]

    directions(None)  # which checks the options
    return _optimizer(name, directions, options, given)


def _optimizer(
    name: str, directions: Any, options: Any, given: Mapping[str, Any]
) -> optax.GradientTransformation:
    return _matrix_optimizer.MatrixOptimizer(
        name,
        directions,
        given["learning_rate"],
        options.weight_decay,
        options.weight_decay_mask,
        False,
        getattr(options, "sphere", False),
        _matrix_optimizer.RestOptions(
            options.rest,
            options.rest_learning_rate_ratio,
            options.rest_b1,
            options.rest_b2,
            options.rest_eps,
            options.rest_weight_decay,
        ),
        given["dimension_numbers"],
        given["stacked"],
    ).build()
