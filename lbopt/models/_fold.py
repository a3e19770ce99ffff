r"""Images of few channels, kept with columns or examples folded into channels.

A TPU's units work on 128 channels at a time and its memory keeps as many, so a layer of 24 channels leaves four fifths
of all three idle. Two ways to fill them, with the same numbers and the same parameters:

    columns    [batch, height, width, channels] -> [batch, height, width / n, n channels]
    examples   [batch, height, width, channels] -> [batch / n, height, width, n channels]

columns slowest in the last axis, then examples. A convolution of folded images is a convolution with a kernel that holds the
given one n times and zeros between. Folding columns costs nothing where it begins and ends, and a stride of two undoes
it; but a depthwise convolution would become a full one. With examples that stays what it is, of n times the channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from lbopt import replicas
from lbopt.errors import require

LANES = 128
"""Channels that a TPU's units work on at a time."""
Padding = str | Sequence[tuple[int, int]]
"""Of both axes: "SAME", or zeros before and after."""


class Fold(NamedTuple):
    """What lies in the last axis besides channels.

    Attributes:
      columns: neighbouring ones.
      examples: neighbouring ones.
    """

    columns: int = 1
    examples: int = 1

    @property
    def by(self) -> int:
        """How often each channel is there."""
        return self.columns * self.examples


def repeat(channels: jax.Array, width: int) -> jax.Array:
    """Return what belongs to each channel, [..., channels], for a last axis of `width` folded ones."""
    return (
        channels
        if not channels.ndim or channels.shape[-1] == width
        else jnp.tile(channels, width // channels.shape[-1])
    )


def mean(folded: jax.Array, fold: Fold) -> jax.Array:
    """Return the mean over what is folded: [..., fold.by * channels] -> [..., channels]."""
    return (
        jnp.mean(folded.reshape(*folded.shape[:-1], fold.by, -1), axis=-2)
        if fold.by > 1
        else folded
    )


def best_columns(width: int, channels: int) -> int:
    """Return how many columns to fold: the largest power of two that divides `width` and leaves at most `LANES` channels."""
    columns = 1
    while width % (2 * columns) == 0 and 2 * columns * channels <= LANES:
        columns *= 2
    return columns


def fold_columns(x: jax.Array, columns: int) -> jax.Array:
    """Fold columns of images that are not folded yet."""
    batch, height, width, channels = x.shape
    return x.reshape(batch, height, width // columns, columns * channels)


def unfold_columns(x: jax.Array, columns: int) -> jax.Array:
    """Undo `fold_columns`."""
    batch, height, width, channels = x.shape
    return x.reshape(batch, height, width * columns, channels // columns)


def fold_examples(x: jax.Array, examples: int) -> jax.Array:
    """Fold examples of images that are not folded yet.

    Raises:
      UserError: unless `examples` divides those of each replica.
    """
    batch, height, width, channels = x.shape
    if examples == 1:
        return x
    here = replicas.current() or replicas.Replicas()
    part = batch // (1 if here.axis_name else here.count)
    require(
        part % examples == 0,
        "fold_examples",
        examples,
        f"use a divisor of a replica's {part} examples, or 1",
    )
    x = x.reshape(batch // examples, examples, height, width, channels).transpose(0, 2, 3, 1, 4)
    return x.reshape(batch // examples, height, width, examples * channels)


def unfold_examples(x: jax.Array, examples: int) -> jax.Array:
    """Undo `fold_examples`."""
    batch, height, width, channels = x.shape
    if examples == 1:
        return x
    x = x.reshape(batch, height, width, examples, channels // examples).transpose(0, 3, 1, 2, 4)
    return x.reshape(batch * examples, height, width, channels // examples)


def diagonal_kernel(kernel: jax.Array, by: int) -> jax.Array:
    """Return the kernel [..., by * in, by * out] that does to each of `by` parts what `kernel` [..., in, out] does."""
    *sides, channels_in, channels_out = kernel.shape
    blocks = kernel[..., None, :, None, :] * jnp.eye(by, dtype=kernel.dtype)[:, None, :, None]
    return blocks.reshape(*sides, by * channels_in, by * channels_out)


def column_kernel(
    kernel: jax.Array, stride: int, before: int, columns_in: int, columns_out: int
) -> tuple[jax.Array, int, int]:
    """Return the kernel, stride and padding along the width that do to folded columns what the given ones do to columns.

    Args:
      kernel: [height, width, in, out].
      stride: along the width; stride * columns_out must be a multiple of columns_in.
      before: columns of zeros before the first column.
      columns_in: how the input is folded.
      columns_out: how the output is folded.

    Returns:
      kernel [height, folded width, columns_in * in, columns_out * out], stride, and folded columns of zeros before the
      first one.
    """
    height, width, channels_in, channels_out = kernel.shape
    folded_before = -(-before // columns_in)
    starts = [
        stride * column - before + columns_in * folded_before for column in range(columns_out)
    ]
    folded_width = -(-(starts[-1] + width) // columns_in)
    room = columns_in * folded_width - width
    copies = [jnp.pad(kernel, ((0, 0), (start, room - start), (0, 0), (0, 0))) for start in starts]
    shape = (height, folded_width, columns_in * channels_in, columns_out * channels_out)
    return (
        jnp.stack(copies, axis=3).reshape(shape),
        stride * columns_out // columns_in,
        folded_before,
    )


def subsample(x: jax.Array, stride: int, columns_in: int, columns_out: int) -> jax.Array:
    """Take every `stride`-th row and column of images that fold `columns_in`, and fold `columns_out` of those columns."""
    if stride == 1 and columns_in == columns_out:
        return x
    if columns_in != stride * columns_out:
        return fold_columns(unfold_columns(x, columns_in)[:, ::stride, ::stride], columns_out)
    channels = x.shape[-1] // columns_in
    starts = range(0, x.shape[-1], stride * channels)
    return jnp.concatenate(
        [x[:, ::stride, :, start : start + channels] for start in starts], axis=-1
    )


def convolve(
    x: jax.Array,
    kernel: jax.Array,
    stride: int = 1,
    padding: Padding = "SAME",
    columns_in: int = 1,
    columns_out: int = 1,
    examples: int = 1,
) -> jax.Array:
    """Convolve folded images.

    Args:
      x: [batch / examples, height, width / columns_in, columns_in * examples * in].
      kernel: [size, size, in, out], of any dtype; it is cast to that of `x`.
      stride: along both axes.
      padding: along both axes.
      columns_in: how `x` is folded; stride * columns_out must be a multiple of it.
      columns_out: how to fold the result; it must divide the result's width.
      examples: how both are folded besides.

    Returns:
      [batch / examples, height', width' / columns_out, columns_out * examples * out] in the dtype of `x`.
    """
    size = kernel.shape[:2]
    if isinstance(padding, str):
        sides = x.shape[1], x.shape[2] * columns_in
        padding = jax.lax.padtype_to_pads(sides, size, (stride, stride), padding)
    (top, bottom), (left, right) = padding
    out_width = (x.shape[2] * columns_in + left + right - size[1]) // stride + 1
    kernel = kernel.astype(x.dtype)
    kernel = diagonal_kernel(kernel, examples) if examples > 1 else kernel
    kernel, step, before = column_kernel(kernel, stride, left, columns_in, columns_out)
    after = (out_width // columns_out - 1) * step + kernel.shape[1] - x.shape[2] - before
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (stride, step),
        ((top, bottom), (before, after)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


class Conv(nn.Module):
    """A convolution without bias of images that may be folded.

    Attributes:
      width: output channels.
      size: side of the kernel.
      stride: along both axes.
      padding: along both axes.
      kernel_init: initializer of the kernel.
      dtype: of the computation; the kernel [size, size, channels, width] is fp32, however images are folded.
      columns_in: see `convolve`.
      columns_out: see `convolve`.
      examples: see `convolve`.
    """

    width: int
    size: int
    stride: int
    padding: Padding
    kernel_init: nn.initializers.Initializer
    dtype: Any
    columns_in: int = 1
    columns_out: int = 1
    examples: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Convolve `x`: see `convolve`."""
        channels = x.shape[-1] // (self.columns_in * self.examples)
        kernel = self.param(
            "kernel", self.kernel_init, (self.size, self.size, channels, self.width), jnp.float32
        )
        folds = self.columns_in, self.columns_out, self.examples
        return convolve(x.astype(self.dtype), kernel, self.stride, self.padding, *folds)
