"""Clipping of gradients at a stage of the step, and the measurement of their noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lbopt import _scalars, tree, types
from lbopt.errors import require_choice
from lbopt.parallel._gradients import Gradients, MicrobatchFn, MicrobatchSquares
from lbopt.transforms import clip_by_global_norm, global_norm

PER_LAYER = "layers"
"""The measurement of each leaf's noise, and not only of all together."""
CLIP_STAGES = ("replica", "mean", "accumulated")


@dataclasses.dataclass(frozen=True)
class GradientClip:
    """Clipping of the global gradient norm, and where in the step it happens.

    A run from a config has no clip of stage "accumulated" in its step: the clip is then a link of
    the optimizer, `lbopt.clip_by_global_norm`, so that the guard around the optimizer sees the norm
    before the clip.

    Attributes:
      max_norm: The largest norm that passes unchanged, > 0.
      stage: "replica": each replica's gradient of each microstep, before the mean over replicas
        (ALBERT, You, MLPerf: the clip then depends on the examples per replica). "mean": each
        microstep's gradient after the mean over replicas. "accumulated": the step's whole gradient,
        after accumulation (the PyTorch ports).
      eps: Constant >= 0 added to the norm before the division by it.

    >>> import lbopt, optax
    >>> def loss_fn(params, model_state, batch, rng):
    ...     return (batch["x"] @ params["w"]).mean(), (model_state, {})
    >>> clip = GradientClip(max_norm=1.0, stage="mean")
    >>> step = lbopt.make_train_step(loss_fn, optax.sgd(0.1), lbopt.make_mesh(1), clip=clip)
    """

    max_norm: float
    stage: str = "accumulated"
    eps: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_norm", "eps"):
            object.__setattr__(self, name, _scalars.known(getattr(self, name)))
        clip_by_global_norm(self.max_norm, self.eps)  # checks both
        require_choice("stage", self.stage, CLIP_STAGES)


def clip_at(
    stage: str, clip: GradientClip | None, grads: types.Params
) -> tuple[types.Params, types.Metrics]:
    """Clip gradients if this is the clip's stage.

    Returns:
      The gradients, and the metric `gradient_norm/<stage>` (the norm before the clip) or none.
    """
    if clip is None or clip.stage != stage:
        return grads, {}
    tx = clip_by_global_norm(clip.max_norm, clip.eps)
    clipped, state = tx.update(grads, tx.init(grads))
    return clipped, {f"gradient_norm/{stage}": (state.global_norm, jnp.ones(()))}


def treat_microbatch(
    clip: GradientClip | None,
    measure_noise: bool | str,
    reduce: Callable[[Gradients], types.Params],
    axis_name: str | None,
) -> MicrobatchFn:
    """Build the treatment of each microstep's gradient on each replica.

    Args:
      clip: Clip of the step; stage "accumulated" has no effect here.
      measure_noise: Whether to measure the squared norm of each microbatch's gradient; "layers" for
        each leaf's too.
      reduce: Function from a replica's `Gradients` to the mean over replicas, for stage "mean".
      axis_name: Axis over which replicas are mapped; None if they are not mapped.
    """
    reduces = clip is not None and clip.stage == "mean"

    def treated(gradients: Gradients) -> Gradients:
        grads, norm = clip_at("replica", clip, gradients.grads)
        gradients = gradients._replace(grads=grads, metrics={**gradients.metrics, **norm})

        # After the mean all replicas hold the same gradient: they count as one.
        copies = 1
        if reduces:
            grads, norm = clip_at("mean", clip, reduce(gradients))
            gradients = gradients._replace(grads=grads, metrics={**gradients.metrics, **norm})
        if reduces and axis_name is not None:
            copies = jax.lax.axis_size(axis_name)
            if gradients.weight is not None:
                gradients = gradients._replace(weight=jax.lax.psum(gradients.weight, axis_name))

        squares = None
        if measure_noise:
            by_leaf = measure_noise == PER_LAYER
            squares = _squares(gradients.grads, gradients.weight, copies, by_leaf)
        return gradients._replace(squares=squares)

    return treated


def _squares(
    grads: types.Params, weight: jax.Array | None, copies: int, by_leaf: bool
) -> MicrobatchSquares:
    """Return the share of one of `copies` equal replicas in the sums over microbatches."""
    square = jnp.square(global_norm(grads)).astype(jnp.float32)
    leaves: Any = ()
    if by_leaf:
        leaves = jax.tree.map(lambda g: tree.square_norm(g).astype(jnp.float32), grads)
    share = jnp.ones(()) / copies
    weight = jnp.ones(()) if weight is None else weight
    return MicrobatchSquares(
        weight * square / copies,
        weight / copies,
        share,
        jax.tree.map(lambda square: weight * square / copies, leaves),
    )


def noise_arguments(squares: MicrobatchSquares | None) -> dict[str, Any]:
    """Return measured norms as keyword arguments of an optimizer with `lbopt.track_noise_scale`.

    For n slices of the batch with unequal weights the squares are averaged by weight. Their mean is
    then |G|^2 plus n times the variance of the whole batch's gradient, as it is for n equal slices.
    """
    if squares is None:
        return {}
    found = {
        "small_square_norm": squares.total / squares.weight,
        "num_small": squares.microbatches,
    }
    if jax.tree.leaves(squares.leaves):
        means = jax.tree.map(lambda total: total / squares.weight, squares.leaves)
        found["small_square_norms"] = means
    return found
