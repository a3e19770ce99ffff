"""Projections to and from the heads of attention, and tables of embeddings."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

# Shape suffixes: B batch, L length, D width, W width of all heads, H heads, K width of a head,
# V size of a table.

BERT_INIT = nn.initializers.truncated_normal(0.02, lower=-2.0, upper=2.0)
"""Initializer of BERT's matrices, see `lbopt.models.Bert`."""


class HeadProjection(nn.Module):
    """Project each token to all heads at once, with a weight [width out, width in] and a bias.

    The weight is the transpose of a Flax kernel, so it is not named one, and the result has tokens
    last. This is the layout in which a TPU stores heads narrower than its lanes. In Flax's layout
    the weights are transposed in every step, and their gradients before every update.

    Attributes:
      heads: Number of heads and width of each.
      dtype: Dtype of the computation; parameters are fp32.
      init: Initializer of the weight.
      has_bias: Whether there is a bias.
    """

    heads: tuple[int, int]
    dtype: Any
    init: nn.initializers.Initializer = BERT_INIT
    has_bias: bool = True

    @nn.compact
    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        """Map [B, L, D] to [B, H, K, L]."""
        width = math.prod(self.heads)
        weight = self.param("weight", self.init, (width, x_BLD.shape[-1]), jnp.float32)
        weight = weight.astype(self.dtype)
        y_BWL = jnp.einsum("BLD,WD->BWL", x_BLD.astype(self.dtype), weight)
        if self.has_bias:
            bias = self.param("bias", nn.initializers.zeros_init(), (width,), jnp.float32)
            y_BWL += bias.astype(self.dtype)[None, :, None]
        return y_BWL.reshape(-1, *self.heads, x_BLD.shape[1])


class HeadJoin(nn.Module):
    """Project all heads back to a token, with a kernel [heads * K, width] and a bias [width].

    Attributes:
      width: Width of a token's vector.
      dtype: Dtype of the computation; parameters are fp32.
      init: Initializer of the kernel.
      has_bias: Whether there is a bias.
    """

    width: int
    dtype: Any
    init: nn.initializers.Initializer = BERT_INIT
    has_bias: bool = True

    @nn.compact
    def __call__(self, y_BHKL: jax.Array) -> jax.Array:
        """Map [B, H, K, L] to [B, L, D]."""
        heads = y_BHKL.shape[1:3]
        kernel = self.param("kernel", self.init, (math.prod(heads), self.width), jnp.float32)
        kernel = kernel.astype(self.dtype)
        y_BLD = jnp.einsum("BHKL,HKD->BLD", y_BHKL.astype(self.dtype), kernel.reshape(*heads, -1))
        if self.has_bias:
            bias = self.param("bias", nn.initializers.zeros_init(), (self.width,), jnp.float32)
            y_BLD += bias.astype(self.dtype)[None, None, :]
        return y_BLD


class Embedding(nn.Module):
    """An fp32 table of vectors for lookup; its transpose serves tied decoders.

    Attributes:
      size: Number of vectors.
      width: Length of each vector.
      init: Initializer of the table.
    """

    size: int
    width: int
    init: nn.initializers.Initializer = BERT_INIT

    def setup(self) -> None:
        """Create the parameter [size, width]."""
        self.embedding = self.param("embedding", self.init, (self.size, self.width), jnp.float32)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Map integers [...] to fp32 [..., width]."""
        return jnp.take(self.embedding, ids, axis=0)

    def table(self) -> jax.Array:
        """Return the whole table [size, width]."""
        return self.embedding

    def decode(self, x: jax.Array, dtype: Any) -> jax.Array:
        """Multiply `x` [..., width] by the transposed table; the result is fp32 [..., size].

        Products are taken in `dtype` and accumulated in fp32.
        """
        return jnp.einsum(
            "...D,VD->...V",
            x.astype(dtype),
            self.embedding.astype(dtype),
            preferred_element_type=jnp.float32,
        )
