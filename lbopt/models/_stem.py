"""Convolutions with symmetric padding, and the first layers of a ResNet."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lbopt.errors import require, require_choice
from lbopt.models import _fold
from lbopt.models._activation import relu
from lbopt.models._fold import Fold

STEMS = ("conv7", "space_to_depth", "conv3")
FOLDED_CHANNELS = 12
"""Number of channels of a colour image folded by `space_to_depth`.

The stem "space_to_depth" treats images with fewer channels as unfolded.
"""
he_normal_by_fan_out = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
"""He et al., arXiv 1502.01852v1, equation 14 (backward form); not truncated."""


def conv(
    width: int, size: int, stride: int, dtype: Any, name: str, columns: tuple[int, int] = (1, 1)
) -> _fold.Conv:
    """Build a size x size convolution without bias, padded by size // 2 on every side.

    `columns` holds the numbers of columns folded in the input and in the output.
    """
    padding = ((size // 2, size // 2),) * 2
    return _fold.Conv(
        width, size, stride, padding, he_normal_by_fan_out, dtype, *columns, name=name
    )


class Stem(nn.Module):
    """Convolution, batch norm, ReLU and, unless images are small, max pooling.

    Attributes:
      kind: One of `STEMS`, described at `ResNet`.
      width: Output channels.
      norm: Constructor of a batch norm, given its name and fold.
      columns: Number of columns to fold in the result, see `lbopt.models._fold`.
      dtype: Dtype of the computation.
    """

    kind: str
    width: int
    norm: Any
    columns: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Map images [batch, height, width, channels] to `self.width` channels.

        "conv3" keeps the sides of the images; the other stems divide them by four.
        """
        check_stem(self.kind)
        if self.kind == "conv3":
            x = conv(self.width, 3, 1, self.dtype, "conv", (1, self.columns))(x)
            x = self.norm(name="norm", fold=Fold(self.columns))(x, use_running_average=not train)
            return relu(x, self.dtype)

        norm = self.norm(name="norm")
        x = WideConv(self.width, self.kind == "space_to_depth", dtype=self.dtype, name="conv")(
            x, norm.sign()
        )
        return relu(norm(x, use_running_average=not train, then=self._pool), self.dtype)

    def _pool(self, x: jax.Array) -> jax.Array:
        x = max_pool(x)
        return (
            jax.lax.optimization_barrier(_fold.fold_columns(x, self.columns))
            if self.columns > 1
            else x
        )


def check_stem(stem: str) -> None:
    """Raise `UserError` for a stem that no `ResNet` has."""
    require_choice("stem", stem, STEMS)


def max_pool(x: jax.Array) -> jax.Array:
    """Take the maximum over 3 x 3 pixels, with stride 2 and padding 1.

    `x` is [batch, height, width, channels].
    """
    return nn.max_pool(x, (3, 3), strides=(2, 2), padding=[(1, 1), (1, 1)])


class WideConv(nn.Module):
    """A 7 x 7 convolution of stride 2, padding 3, without bias.

    With `folded` it is computed as a 4 x 4 convolution of stride 1 on images whose 2 x 2 pixels are
    folded into channels. Three input channels leave most of a TPU's matrix unit idle, twelve less.
    The kernel is [7, 7, channels, width] in both cases, and the result is the same up to rounding.

    Attributes:
      width: Output channels.
      folded: True computes the convolution on folded images.
      dtype: Dtype of the computation.

    References:
      Ying et al., arXiv 1811.06992v2; MLPerf v0.6 ResNet-50 for TPU, where the host folds the
      image.
    """

    width: int
    folded: bool = False
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, sign: jax.Array | float = 1.0) -> jax.Array:
        """Map images to `self.width` channels and half of the unfolded images' sides.

        Args:
          x: [batch, height, width, channels]. With `folded`, images of `FOLDED_CHANNELS` channels
            or more are treated as already folded by `space_to_depth`.
          sign: Factor of the output channels, a number or [width].
        """
        given = self.folded and x.shape[-1] >= FOLDED_CHANNELS
        require(
            not given or x.shape[-1] % 4 == 0,
            "channels",
            x.shape[-1],
            "folded images have 4 times those of an image; give a multiple of 4",
        )

        channels = x.shape[-1] // 4 if given else x.shape[-1]
        kernel = (
            self.param("kernel", he_normal_by_fan_out, (7, 7, channels, self.width), jnp.float32)
            * sign
        )

        if not self.folded:
            return _fold.convolve(x.astype(self.dtype), kernel, 2, ((3, 3), (3, 3)))
        x = x if given else space_to_depth(x)
        return _fold.convolve(x.astype(self.dtype), _fold_kernel(kernel), 1, ((2, 1), (2, 1)))


def space_to_depth(images: jax.Array) -> jax.Array:
    """Fold 2 x 2 pixels into channels, rows slowest.

    Args:
      images: [batch, height, width, c], with an even height and width.

    Returns:
      [batch, height / 2, width / 2, 4 c], in the dtype of the images.

    >>> import jax.numpy as jnp
    >>> space_to_depth(jnp.zeros((2, 224, 224, 3))).shape
    (2, 112, 112, 12)
    """
    batch, height, width, channels = images.shape
    fix = "stem 'space_to_depth' needs even sides; crop or pad the images, or use stem 'conv7'"
    for side in (height, width):
        require(side % 2 == 0, "image_size", (height, width), fix)
    folded = images.reshape(batch, height // 2, 2, width // 2, 2, channels)
    return folded.transpose(0, 1, 3, 2, 4, 5).reshape(batch, height // 2, width // 2, 4 * channels)


def _fold_kernel(kernel: jax.Array) -> jax.Array:
    """Turn a kernel [7, 7, c, width] into its equivalent for folded images, [4, 4, 4 c, width]."""
    _, _, channels, width = kernel.shape
    # A row and a column of zeros make the kernel 8 x 8, an even number of pixels. Its padding of 3
    # becomes 4, which is the two folded pixels of `WideConv`.
    padded = jnp.pad(kernel, ((1, 0), (1, 0), (0, 0), (0, 0)))
    folded = padded.reshape(4, 2, 4, 2, channels, width).transpose(0, 2, 1, 3, 4, 5)
    return folded.reshape(4, 4, 4 * channels, width)
