"""SOAP and SOAP-H as finished optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import optax

from lbopt import masks, types
from lbopt.transforms import (
    _layerwise_options,
    _matrix_optimizer,
    _matrix_variants,
    _matrix_view,
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
    return _soap_family("soap", _matrix_variants.SOAP, locals())


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
    return _soap_family("soaph", _matrix_variants.SOAPH, locals())


def _soap_family(
    name: str,
    variants: Mapping[str, _layerwise_options.Variant[_matrix_variants.SoapOptions]],
    given: Mapping[str, Any],
) -> optax.GradientTransformation:
    def directions(
        options: _matrix_variants.SoapOptions, numbers: Any
    ) -> list[optax.GradientTransformation]:
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

    return _matrix_optimizer.build(name, variants, directions, given)
