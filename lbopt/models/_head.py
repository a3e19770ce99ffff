"""The last layer of a network, whose logits are fp32 for any dtype of the other layers."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp


class Head(nn.Module):
    """A dense layer with products in the dtype of the input and sums and result in fp32.

    Attributes:
      width: Number of logits.
      kernel_init: Initializer of the kernel [input, width].
      bias_init: Initializer of the bias [width].
      has_bias: Whether there is a bias.
    """

    width: int
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()
    has_bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [..., input] to fp32 [..., width]."""
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.width), jnp.float32)
        if not self.has_bias:
            return matmul(x, kernel)
        bias = self.param("bias", self.bias_init, (self.width,), jnp.float32)
        return matmul(x, kernel) + jax.lax.broadcast_to_rank(bias.astype(jnp.float32), x.ndim)


def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Return x @ kernel in fp32; products are taken in the dtype of `x` and accumulated in fp32."""
    return jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)
