"""Depthwise convolution: every channel by itself."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class DepthwiseConv(nn.Module):
    """Convolve every channel with a kernel of its own, without bias.

    The kernel is normal with variance 2 / size^2 (tensorflow/tpu, models/official/efficientnet: fan_out of a depthwise
    kernel is its area).

    Attributes:
      size: side of the kernel.
      stride: 1 or 2.
      padding: "SAME" or ((before, after), (before, after)).
      examples: how many are folded into channels, see `lbopt.models._fold`.
      dtype: of the computation; the kernel [size, size, 1, channels] is fp32.
    """

    size: int
    stride: int = 1
    padding: Any = "SAME"
    examples: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [batch, height, width, channels] to [batch, height / stride, width / stride, channels]."""
        channels = x.shape[-1] // self.examples
        init = nn.initializers.normal((2 / self.size**2) ** 0.5)
        kernel = self.param("kernel", init, (self.size, self.size, 1, channels), jnp.float32)
        return jax.lax.conv_general_dilated(
            x.astype(self.dtype),
            jnp.tile(kernel.astype(self.dtype), self.examples),
            (self.stride, self.stride),
            self.padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=x.shape[-1],
        )
