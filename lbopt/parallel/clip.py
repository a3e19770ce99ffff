"""What happens to a gradient before it is averaged: clipping at a named stage, and a look at its size."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp

from lbopt import replicas, scalars, types
from lbopt.errors import require, require_choice
from lbopt.parallel import reduction
from lbopt.transforms import clipping

STAGES = ("replica", "mean", "accumulated")
_SMALL_SQUARE = "gradient_square/small"


@dataclasses.dataclass(frozen=True)
class GradientClip:
    """Clipping of the global gradient norm, and where in the step it happens.

    Attributes:
      max_norm: the largest norm that passes unchanged, > 0.
      stage: "replica": each replica's gradient of each microstep, before the mean over replicas (ALBERT, You, MLPerf:
        the clip then depends on the examples per replica). "mean": each microstep's gradient after the mean over
        replicas. "accumulated": the step's whole gradient, after accumulation (the PyTorch ports).
    """

    max_norm: float
    stage: str = "accumulated"

    def __post_init__(self) -> None:
        fix = "give a finite number > 0, or leave the clip out"
        object.__setattr__(self, "max_norm", scalars.known(self.max_norm))
        number = isinstance(self.max_norm, numbers.Real)
        require(number and 0 < self.max_norm < math.inf, "max_grad_norm", self.max_norm, fix)
        require_choice("clip_stage", self.stage, STAGES)


def clipped(grads: types.Params, clip: GradientClip) -> tuple[types.Params, types.Metrics]:
    """Return the clipped gradients, and `gradient_norm/<stage>` before the clip as a metric."""
    norm = clipping.global_norm(grads)
    metrics = {f"gradient_norm/{clip.stage}": (norm.astype(jnp.float32), jnp.ones(()))}
    return clipping.scale_to(grads, norm, clip.max_norm), metrics


def make_microstep_hook(
    clip: GradientClip | None, measure: bool, axis_name: str | None, reduce_dtype: Any = None
) -> Any:
    """Return what is done to the gradient of each microstep: grads -> (grads, metrics); None for nothing.

    With `measure`, the squared norm of what goes into the mean is among the metrics, for `taken_noise`.
    """
    early = clip is not None and clip.stage != "accumulated"
    if not early and not measure:
        return None

    def hook(grads: types.Params) -> tuple[types.Params, types.Metrics]:
        metrics: types.Metrics = {}
        if clip is not None and clip.stage == "mean" and axis_name is not None:
            with jax.named_scope(replicas.GRADIENTS):
                grads = reduction.mean(axis_name, reduce_dtype, grads)
        if clip is not None and early:
            grads, metrics = clipped(grads, clip)
        if measure:
            square = jnp.square(clipping.global_norm(grads)).astype(jnp.float32)
            # After a clip of the mean all replicas hold the same part: they count as one.
            after_mean = clip is not None and clip.stage == "mean" and axis_name is not None
            same = jax.lax.axis_size(axis_name) if after_mean else 1
            metrics = {**metrics, _SMALL_SQUARE: (square / same, jnp.ones(()) / same)}
        return grads, metrics

    return hook


def taken_noise(metrics: types.Metrics) -> tuple[types.Metrics, dict[str, jax.Array]]:
    """Take the measured norms of parts out of a step's metrics, as arguments for `lbopt.track_noise_scale`."""
    if _SMALL_SQUARE not in metrics:
        return metrics, {}
    rest = {name: pair for name, pair in metrics.items() if name != _SMALL_SQUARE}
    total, count = metrics[_SMALL_SQUARE]
    return rest, {"small_square_norm": total / count, "num_small": count}
