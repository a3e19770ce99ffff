"""The gradient noise scale: how large a batch still helps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from lbopt import _scalars, masks, tree, types
from lbopt.errors import UserError
from lbopt.transforms import _arguments


class NoiseEstimate(NamedTuple):
    """Unbiased estimates from one pair of batch sizes, which scatter widely and may be negative.

    Attributes:
      square_norm: Estimate of |G|^2, the squared norm of the true gradient; a scalar.
      trace: Estimate of tr(Sigma), the summed variance of one example's gradient; a scalar.
    """

    square_norm: jax.Array
    trace: jax.Array


def estimate_noise(
    small_square_norm: jax.Array,
    big_square_norm: jax.Array,
    num_small: float | jax.Array,
    big_batch_size: float,
) -> NoiseEstimate:
    r"""Estimate signal and noise from the gradients of equal slices of a batch and of the whole.

        |G|^2     = (n |g_big|^2 - |g_small|^2) / (n - 1)
        tr(Sigma) = (|g_small|^2 - |g_big|^2) * B / (n - 1)

    The batch of B examples has n slices of B / n examples; |g_small|^2 is averaged over the slices,
    and g_big is the mean of the slices' gradients.

    Args:
      small_square_norm: Scalar, mean over the slices of the squared norm of their mean gradients.
      big_square_norm: Scalar, squared norm of the mean gradient of the whole batch.
      num_small: Number of slices n, at least 2.
      big_batch_size: Number of examples B of the whole batch.

    >>> estimate = estimate_noise(jnp.float32(3.0), jnp.float32(2.0), 2, 8)
    >>> float(estimate.square_norm), float(estimate.trace)
    (1.0, 8.0)

    References:
      McCandlish et al., An Empirical Model of Large-Batch Training, arXiv:1812.06162v1,
      appendix A.1.
    """
    return NoiseEstimate(
        (num_small * big_square_norm - small_square_norm) / (num_small - 1),
        (small_square_norm - big_square_norm) * big_batch_size / (num_small - 1),
    )


class NoiseScaleState(NamedTuple):
    """Running means of both estimates.

    Attributes:
      count: int32 scalar, number of updates in the means so far.
      square_norm: fp32 scalar, running mean of the estimates of |G|^2.
      trace: fp32 scalar, running mean of the estimates of tr(Sigma).
    """

    count: jax.Array  # type: ignore[assignment]
    square_norm: jax.Array
    trace: jax.Array

    def noise_scale(self) -> jax.Array:
        """Return tr(Sigma) / |G|^2 in examples, infinite while |G|^2 is not estimated positive."""
        positive = self.square_norm > 0
        return jnp.where(positive, self.trace / jnp.where(positive, self.square_norm, 1), jnp.inf)


class LayerNoiseState(NamedTuple):
    """Running means for all parameters, for the norms among them, and for each leaf.

    Attributes:
      whole: All parameters together.
      norms: The gains and shifts of normalization layers together; () if there are none.
      layers: Path of a leaf -> its means.
    """

    whole: NoiseScaleState
    norms: Any
    layers: dict[str, NoiseScaleState]


def track_noise_scale(
    global_batch_size: int,
    decay: float = 0.95,
    per_layer: bool = False,
    known_roles: types.PyTree = None,
) -> optax.GradientTransformationExtraArgs:
    """Keep an estimate of the simple noise scale tr(Sigma) / |G|^2, in examples.

    Near that batch size, doubling the batch no longer halves the steps. Updates pass unchanged. Put
    it first in the chain, before transforms that change the gradient. Do not use it under
    `optax.MultiSteps`, which would pass on the norm of the last microstep only; accumulate in
    `make_train_step` instead.

    Numerator and denominator are averaged separately, because the quotient of single estimates is
    biased. An update whose squared norms are not finite (in fp32: norms from 1.8e19 on) is left out
    of both means. Parts that are clipped before they are averaged are measured after that clip.

    Args:
      global_batch_size: Number of examples behind each gradient, >= 2.
      decay: Decay rate of both running means, in [0, 1).
      per_layer: Whether to keep it for each leaf too, and for the gains and shifts of normalization
        layers alone, which follow the noise scale of all and are few numbers (arXiv:2411.00999).
      known_roles: Roles that names need not tell, for the normalization layers; see
        `lbopt.masks.with_known_roles`.

    Returns:
      A transform whose `update` takes two more arguments by name: `small_square_norm`, the mean
      squared norm of the gradients of n equal slices of the batch, and `num_small`, n >= 2.
      `make_train_step` passes them with `measure_noise=True`. `optimizer_metrics` shows
      `noise_scale`. With `per_layer`, `update` takes `small_square_norms` too, the same for each
      leaf, a pytree like the parameters (`measure_noise="layers"`), and there are
      `noise_scale_of_norms` and `noise_scale/<path>`.

    Raises:
      UserError: For an argument that is out of range, or if `update` misses its arguments.

    >>> import jax.numpy as jnp, lbopt, optax
    >>> tx = optax.chain(track_noise_scale(global_batch_size=8), optax.sgd(0.1))
    >>> grads = {"w": jnp.array([1.0, 1.0])}  # the mean of two slices' gradients
    >>> small = jnp.float32(3.0)  # mean squared norm of these two
    >>> _, state = tx.update(grads, tx.init(grads), small_square_norm=small, num_small=2)
    >>> float(lbopt.optimizer_metrics(state)["noise_scale"])
    8.0

    References:
      McCandlish et al., An Empirical Model of Large-Batch Training, arXiv:1812.06162v1,
      section 2.2 and appendix A.1.
    """
    _scalars.require_at_least("global_batch_size", global_batch_size, 2)
    _scalars.require_decay_rate("decay", decay)

    def init_fn(params: types.Params) -> Any:
        if not per_layer:
            return _blank()
        norms = _blank() if any(_are_norms(params, known_roles)) else ()
        return LayerNoiseState(
            _blank(), norms, {name: _blank() for name in tree.leaf_names(params)}
        )

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: types.Params | None = None,
        *,
        small_square_norm: jax.Array | None = None,
        num_small: float | jax.Array | None = None,
        small_square_norms: types.PyTree = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        del params, extra_args
        needed = {"small_square_norm": small_square_norm, "num_small": num_small}
        if per_layer:
            needed["small_square_norms"] = small_square_norms
        _require_given(needed)
        tree.check_inexact(updates, "updates")
        _arguments.require_state(state, LayerNoiseState if per_layer else NoiseScaleState)
        squares = [tree.square_norm(leaf) for leaf in jax.tree.leaves(updates)]

        def after(old: NoiseScaleState, big: jax.Array, small: Any) -> NoiseScaleState:
            small = jnp.asarray(small, big.dtype)
            found = estimate_noise(small, big, cast(Any, num_small), global_batch_size)
            return _averaged(old, found, decay)

        whole = state.whole if per_layer else state
        whole = after(whole, tree.total(squares), small_square_norm)
        if not per_layer:
            return updates, whole

        smalls = jax.tree.leaves(small_square_norms)
        layers = {
            name: after(state.layers[name], big, small)
            for name, big, small in zip(tree.leaf_names(updates), squares, smalls, strict=True)
        }
        norms = state.norms
        if isinstance(norms, NoiseScaleState):
            chosen = _are_norms(updates, known_roles)
            pairs = [
                pair
                for pair, is_norm in zip(zip(squares, smalls, strict=True), chosen, strict=True)
                if is_norm
            ]
            bigs, few = zip(*pairs, strict=True)
            norms = after(norms, tree.total(bigs), sum(few))
        return updates, LayerNoiseState(whole, norms, layers)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _blank() -> NoiseScaleState:
    return NoiseScaleState(
        jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
    )


def _are_norms(params: types.Params, known_roles: types.PyTree) -> list[bool]:
    """Return, for each leaf, whether it is a gain or a shift of a normalization layer."""
    roles = masks.explain_roles(params, known_roles)
    return [found.role == "norm" for found in roles.values()]


def _require_given(needed: Mapping[str, Any]) -> None:
    """Raise `UserError` if an argument of `update` is missing."""
    missing = [name for name, value in needed.items() if value is None]
    if not missing:
        return
    how = "'layers'" if "small_square_norms" in needed else "True"
    fix = (
        f"track_noise_scale needs {' and '.join(f'{{{name}}}' for name in needed)}; pass them to "
        f"update, or build the step by make_train_step with measure_noise={how}"
    )
    raise UserError(missing[-1], None, fix, code="missing", also={name: name for name in needed})


def _averaged(state: NoiseScaleState, found: NoiseEstimate, decay: float) -> NoiseScaleState:
    """Return the running means after one more estimate."""
    estimate = NoiseEstimate(*(x.astype(jnp.float32) for x in found))

    # The first estimate replaces the zeros of `init`, which would bias the means.
    keep = jnp.where(state.count == 0, 0.0, decay)
    means = (keep * old + (1 - keep) * new for old, new in zip(state[1:], estimate, strict=True))
    after = NoiseScaleState(optax.safe_increment(state.count), *means)

    # A gradient that is not finite leaves the means as they are.
    is_known = jnp.isfinite(estimate.square_norm) & jnp.isfinite(estimate.trace)
    return jax.tree.map(lambda new, old: jnp.where(is_known, new, old), after, state)
