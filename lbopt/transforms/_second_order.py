"""SOAP, SOAP-H, Shampoo and PSGD-Kron as finished optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import optax

from lbopt import masks, types
from lbopt.transforms import (
    _kron,
    _layerwise_options,
    _matrix_optimizer,
    _matrix_variants,
    _matrix_view,
    _shampoo,
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
      learning_rate: Number or schedule, the rate of the matrices.
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
      rest: Optimizer of the other leaves (see `lbopt.muon`).
      rest_learning_rate_ratio: Learning rate of the rest, as a multiple of `learning_rate`.
      rest_b1: Decay rate of the rest's first moment.
      rest_b2: Decay rate of the rest's second moment.
      rest_eps: Constant added to the root of the rest's second moment.
      rest_weight_decay: Weight decay of the rest; None for `weight_decay`.
      dimension_numbers: The axes of each matrix (see `scale_by_newton_schulz`).
      stacked: Leaves that are stacks of layers, each layer a matrix.

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
      b1: Decay rate of the first moment, in [0, 1).
      b2: Decay rate of the second moment, in [0, 1).
      eps: Constant >= 0 added to the root of the second moment.
      variant: Public code to follow; in full by `lbopt.describe("modded_nanogpt", "soaph")`.
      shampoo_b2: Decay rate of the factors; None for `b2`.
      every_steps: Number of updates between two changes of the basis.
      debias: Whether the moments are divided by 1 - b^t.
      kl: Whether the factors are those of KL-Shampoo.
      rest: Optimizer of the other leaves (see `lbopt.muon`).
      rest_learning_rate_ratio: Learning rate of the rest, as a multiple of `learning_rate`.
      rest_b1: Decay rate of the rest's first moment.
      rest_b2: Decay rate of the rest's second moment.
      rest_eps: Constant added to the root of the rest's second moment.
      rest_weight_decay: Weight decay of the rest; None for none.
      dimension_numbers: The axes of each matrix (see `scale_by_newton_schulz`).
      stacked: Leaves that are stacks of layers, each layer a matrix.

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


def shampoo(
    learning_rate: optax.ScalarOrSchedule,
    b1: float | jax.Array = types.default(0.9),
    b2: float | jax.Array = types.default(0.999),
    eps: float | jax.Array = types.default(1e-12),
    weight_decay: float | jax.Array = types.default(1e-5),
    variant: Literal["meta", "one_sided"] = "meta",
    *,
    every_steps: int = types.default(100),
    side: _shampoo.Sides = types.default("both"),
    root: float | None = types.default(None),
    method: Literal["eigh", "newton"] = types.default("eigh"),
    debias: bool = types.default(True),
    graft: _shampoo.Graft | None = types.default("adam"),
    graft_b2: float | jax.Array = types.default(0.999),
    graft_eps: float | jax.Array = types.default(1e-8),
    weight_decay_mask: types.Mask = types.default(None),
    rest: Any = types.default("adamw"),
    rest_learning_rate_ratio: float | jax.Array = types.default(1.0),
    rest_b1: float | jax.Array = types.default(0.9),
    rest_b2: float | jax.Array = types.default(0.999),
    rest_eps: float | jax.Array = types.default(1e-8),
    rest_weight_decay: float | jax.Array | None = types.default(None),
    dimension_numbers: _matrix_view.DimensionNumbers = None,
    stacked: types.Stacked = None,
) -> optax.GradientTransformation:
    r"""Build Shampoo: gradients between inverse roots of their second moments; the rest by AdamW.

    Directions are made by `scale_by_shampoo`. Every option from `b1` to `rest_weight_decay` has the
    value that is given, else the variant's; the defaults shown are those of "meta".

    Args:
      learning_rate: Number or schedule, the rate of the matrices.
      b1: Decay rate of the first moment, in [0, 1).
      b2: Decay rate of the factors, in [0, 1]; 1 for sums.
      eps: Constant >= 0 added to the eigenvalues of the factors.
      weight_decay: Decoupled weight decay >= 0.
      variant: Public code to follow; in full by `lbopt.describe("one_sided", "shampoo")`.
      every_steps: Number of updates between two computations of the roots.
      side: "both", "in", "out" or "shorter".
      root: The root p; None for 4, or 2 for one side.
      method: How roots are computed, "eigh" or "newton".
      debias: Whether moments and factors are divided by 1 - b^t.
      graft: Where the size of an update comes from: "adam", "rmsprop", "sgd" or None.
      graft_b2: Decay rate of the graft's second moment, in [0, 1).
      graft_eps: Constant >= 0 added to the root of the graft's second moment.
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
      An `optax.GradientTransformation` whose `update` needs `params`.

    Raises:
      UserError: For an argument that is out of range, an unknown variant, or parameters without
        matrices.

    >>> import jax.numpy as jnp
    >>> params = {"dense": {"kernel": jnp.eye(4), "bias": jnp.zeros(4)}}
    >>> tx = shampoo(0.1, weight_decay=0.0, every_steps=1)
    >>> updates, _ = tx.update(params, tx.init(params), params)
    >>> round(float(updates["dense"]["kernel"][0, 0]), 4)
    -0.1

    References:
      Gupta, Koren, Singer, Shampoo, arXiv:1802.09568v2; Shi et al., arXiv:2309.06497.
    """
    given = locals()

    def directions(
        options: _matrix_variants.ShampooOptions, numbers: Any
    ) -> list[optax.GradientTransformation]:
        return [
            _shampoo.scale_by_shampoo(
                options.b1,
                options.b2,
                options.eps,
                options.every_steps,
                side=options.side,
                root=options.root,
                method=options.method,
                debias=options.debias,
                graft=options.graft,
                graft_b2=options.graft_b2,
                graft_eps=options.graft_eps,
                dimension_numbers=numbers,
            )
        ]

    return _matrix_optimizer.build("shampoo", _matrix_variants.SHAMPOO, directions, given)


def kron(
    learning_rate: optax.ScalarOrSchedule,
    b1: float | jax.Array = types.default(0.9),
    weight_decay: float | jax.Array = types.default(0.0),
    variant: Literal["psgd"] = "psgd",
    *,
    preconditioner_rate: float | jax.Array = types.default(0.1),
    diagonal: _kron.Diagonal = types.default("long"),
    max_side: int = types.default(8192),
    probability: Any = None,
    seed: int | jax.Array = 0,
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
    r"""Build PSGD-Kron: momentum whitened by a Kronecker product; the rest by AdamW.

    Directions are made by `scale_by_kron`. Every option from `b1` to `rest_weight_decay` has the
    value that is given, else the variant's.

    Args:
      learning_rate: Number or schedule, the rate of the matrices.
      b1: Decay rate of the first moment, in [0, 1).
      weight_decay: Decoupled weight decay >= 0.
      variant: Public code to follow, "psgd".
      preconditioner_rate: Size of the steps of the factors, > 0.
      diagonal: Which sides have a diagonal factor: "long", "one" or "both".
      max_side: Longest side with a triangular factor.
      probability: Function of the number of updates so far -> share of the updates in which the
        factors follow, or that share; None for one that falls from 1 to 0.03.
      seed: Seed of the noise.
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
      An `optax.GradientTransformation` whose `update` needs `params`.

    Raises:
      UserError: For an argument that is out of range, an unknown variant, or parameters without
        matrices.

    >>> import jax.numpy as jnp
    >>> params = {"dense": {"kernel": jnp.eye(4), "bias": jnp.zeros(4)}}
    >>> tx = kron(0.1)
    >>> updates, state = tx.update(params, tx.init(params), params)

    References:
      Li, arXiv:1512.04202 and arXiv:2402.04553; evanatyourservice/psgd_jax@be955244.
    """
    given = locals()

    def directions(
        options: _matrix_variants.KronOptions, numbers: Any
    ) -> list[optax.GradientTransformation]:
        return [
            _kron.scale_by_kron(
                options.b1,
                options.preconditioner_rate,
                probability=probability,
                diagonal=options.diagonal,
                max_side=options.max_side,
                seed=seed,
                dimension_numbers=numbers,
            )
        ]

    return _matrix_optimizer.build("kron", _matrix_variants.KRON, directions, given)


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
