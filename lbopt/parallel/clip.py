"""What happens to a gradient before it is averaged: clipping at a named stage, and a look at its size."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from lbopt import types
from lbopt.errors import require, require_choice
from lbopt.transforms import clipping

STAGES = ("replica", "mean", "accumulated")


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
        require(0 < self.max_norm < math.inf, "max_grad_norm", self.max_norm, fix)
        require_choice("clip_stage", self.stage, STAGES)


def clipped(grads: types.Params, clip: GradientClip) -> tuple[types.Params, types.Metrics]:
    """Return the clipped gradients, and `gradient_norm/<stage>` before the clip as a metric."""
    norm = clipping.global_norm(grads)
    metrics = {f"gradient_norm/{clip.stage}": (norm.astype(jnp.float32), jnp.ones(()))}
    return clipping.scale_to(grads, norm, clip.max_norm), metrics


def make_microstep_hook(clip: GradientClip | None, measure: bool, axis_name: str | None) -> Any:
    """Return what is done to the gradient of each microstep: grads -> (grads, metrics); None for nothing.

    With `measure`, the metric `SMALL_SQUARE` is the squared norm that goes into the mean.
    """
    early = clip is not None and clip.stage != "accumulated"
    if not early and not measure:
        return None

    def hook(grads: types.Params) -> tuple[types.Params, types.Metrics]:
        metrics: types.Metrics = {}
        if clip is not None and clip.stage == "mean" and axis_name is not None:
            grads = jax.lax.pmean(grads, axis_name)
        if clip is not None and early:
            grads, metrics = clipped(grads, clip)
        if measure:
            square = jnp.square(clipping.global_norm(grads)).astype(jnp.float32)
            metrics = {**metrics, SMALL_SQUARE: (square, jnp.ones(()))}
        return grads, metrics

    return hook


SMALL_SQUARE = "gradient_square/small"
