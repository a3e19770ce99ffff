"""Depthwise convolution, which convolves every channel separately."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class DepthwiseConv(nn.Module):
    """A convolution with a separate kernel for every channel and no bias.

    The kernel starts from a normal distribution with variance 2 / size^2, as in
    tensorflow/tpu@e380f765021a8853abfbfd53af727604039a7d8c:
    models/official/efficientnet/efficientnet_model.py, where the fan-out of a depthwise kernel is
    its area.

    Attributes:
      size: Side of the kernel.
      stride: 1 or 2.
      padding: "SAME", or rows and columns of zeros ((before, after), (before, after)).
      examples: Number of examples folded into channels, see `lbopt.models._fold`.
      dtype: Dtype of the computation; the kernel [size, size, 1, channels] is fp32.
    """

    size: int
    stride: int = 1
    padding: Any = "SAME"
    examples: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Convolve `x` [batch, height, width, channels]; sides are divided by the stride."""
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
