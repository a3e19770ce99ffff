r"""Folding of columns or examples into channels, for images of few channels.

A TPU's units work on 128 channels at a time and its memory is laid out for as many, so a layer of
24 channels leaves four fifths of both idle. There are two ways to fill them, which leave results
and parameters the same:

    columns    [batch, height, width, channels] -> [batch, height, width / n, n channels]
    examples   [batch, height, width, channels] -> [batch / n, height, width, n channels]

In the last axis columns vary slowest, then examples, then channels. A convolution of folded images
is a convolution with a kernel that holds the given one n times, with zeros between. Folding and
unfolding columns costs nothing, and a stride of two halves the fold; but a depthwise convolution of
folded columns becomes a full one. With folded examples it remains depthwise, with n times the
channels.
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
"""Number of channels that a TPU's units work on at a time."""
Padding = str | Sequence[tuple[int, int]]
"""Padding of both axes: "SAME", or numbers of zeros ((before, after), (before, after))."""


class Fold(NamedTuple):
    """Numbers of columns and examples that are folded into the last axis.

    Attributes:
      columns: Number of neighbouring columns.
      examples: Number of neighbouring examples.
    """

    columns: int = 1
    examples: int = 1

    @property
    def by(self) -> int:
        """Number of copies of each channel in the last axis."""
        return self.columns * self.examples


def repeat(channels: jax.Array, width: int) -> jax.Array:
    """Repeat per-channel values [..., channels] for a folded last axis: [..., width]."""
    return (
        channels
        if not channels.ndim or channels.shape[-1] == width
        else jnp.tile(channels, width // channels.shape[-1])
    )


def mean(folded: jax.Array, fold: Fold) -> jax.Array:
    """Return the mean over folded columns and examples, [..., channels].

    The input is [..., fold.by * channels].
    """
    return (
        jnp.mean(folded.reshape(*folded.shape[:-1], fold.by, -1), axis=-2)
        if fold.by > 1
        else folded
    )


def best_columns(width: int, channels: int) -> int:
    """Return the number of columns to fold.

    It is the largest power of two that divides `width` and gives at most `LANES` folded channels.
    """
    columns = 1
    while width % (2 * columns) == 0 and 2 * columns * channels <= LANES:
        columns *= 2
    return columns


def fold_columns(x: jax.Array, columns: int) -> jax.Array:
    """Fold columns of unfolded images [batch, height, width, channels]."""
    batch, height, width, channels = x.shape
    return x.reshape(batch, height, width // columns, columns * channels)


def unfold_columns(x: jax.Array, columns: int) -> jax.Array:
    """Undo `fold_columns`."""
    batch, height, width, channels = x.shape
    return x.reshape(batch, height, width * columns, channels // columns)


def fold_examples(x: jax.Array, examples: int) -> jax.Array:
    """Fold examples of unfolded images [batch, height, width, channels].

    Raises:
      UserError: If `examples` does not divide the number of examples of each replica.
    """
    batch, height, width, channels = x.shape
    here = replicas.current() or replicas.Replicas()
    check_fold_examples(examples, batch // (1 if here.axis_name else here.count))
    if examples == 1:
        return x
    x = x.reshape(batch // examples, examples, height, width, channels).transpose(0, 2, 3, 1, 4)
    return x.reshape(batch // examples, height, width, examples * channels)


def check_fold_examples(examples: int, replica_examples: int | None = None) -> None:
    """Raise `UserError` for a number of examples that cannot be folded into one.

    Args:
      examples: Number of examples to fold.
      replica_examples: Number of examples of each replica; None if it is not known yet.
    """
    require(examples >= 1, "fold_examples", examples, "give a number >= 1")
    fits = replica_examples is None or replica_examples % examples == 0
    fix = f"use a divisor of a replica's {replica_examples} examples, or 1"
    require(fits, "fold_examples", examples, fix)


def unfold_examples(x: jax.Array, examples: int) -> jax.Array:
    """Undo `fold_examples`."""
    batch, height, width, channels = x.shape
    if examples == 1:
        return x
    x = x.reshape(batch, height, width, examples, channels // examples).transpose(0, 3, 1, 2, 4)
    return x.reshape(batch * examples, height, width, channels // examples)


def diagonal_kernel(kernel: jax.Array, by: int) -> jax.Array:
    """Return a kernel [..., by * in, by * out] that applies `kernel` to each of `by` folded copies.

    `kernel` is [..., in, out].
    """
    *sides, channels_in, channels_out = kernel.shape
    blocks = kernel[..., None, :, None, :] * jnp.eye(by, dtype=kernel.dtype)[:, None, :, None]
    return blocks.reshape(*sides, by * channels_in, by * channels_out)


def column_kernel(
    kernel: jax.Array, stride: int, before: int, columns_in: int, columns_out: int
) -> tuple[jax.Array, int, int]:
    """Return the kernel, stride and padding of the equivalent convolution of folded columns.

    Args:
      kernel: [height, width, in, out].
      stride: Stride along the width; stride * columns_out must be a multiple of columns_in.
      before: Number of columns of zeros before the first column.
      columns_in: Number of columns folded in the input.
      columns_out: Number of columns folded in the output.

    Returns:
      A kernel [height, folded width, columns_in * in, columns_out * out], the stride along folded
      columns, and the number of folded columns of zeros before the first one.
    """
    height, width, channels_in, channels_out = kernel.shape

    # Output column c reads input columns from stride * c - before on. The padding is rounded up to
    # whole folded columns, which shifts the start of each copy of the kernel by as much.
    folded_before = -(-before // columns_in)
    starts = [
        stride * column - before + columns_in * folded_before for column in range(columns_out)
    ]
    folded_width = -(-(starts[-1] + width) // columns_in)
    spare = columns_in * folded_width - width
    copies = [jnp.pad(kernel, ((0, 0), (start, spare - start), (0, 0), (0, 0))) for start in starts]
    shape = (height, folded_width, columns_in * channels_in, columns_out * channels_out)
    return (
        jnp.stack(copies, axis=3).reshape(shape),
        stride * columns_out // columns_in,
        folded_before,
    )


def subsample(x: jax.Array, stride: int, columns_in: int, columns_out: int) -> jax.Array:
    """Take every `stride`-th row and column of images whose columns are folded.

    The input folds `columns_in` columns and the result `columns_out`.
    """
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
      stride: Stride along both axes.
      padding: Padding of both axes.
      columns_in: Number of columns folded in `x`; must divide stride * columns_out.
      columns_out: Number of columns to fold in the result; must divide the result's width.
      examples: Number of examples folded in `x` and in the result.

    Returns:
      [batch / examples, height', width' / columns_out, columns_out * examples * out] in the dtype
      of `x`.
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
    # `column_kernel` rounds the zeros before up; those after make the result as wide as unfolded.
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
      width: Output channels.
      size: Side of the kernel.
      stride: Stride along both axes.
      padding: Padding of both axes.
      kernel_init: Initializer of the kernel.
      dtype: Dtype of the computation; the kernel [size, size, channels, width] is fp32 and does not
        depend on the fold.
      columns_in: Number of columns folded in the input; must divide stride * columns_out.
      columns_out: Number of columns to fold in the result; must divide the result's width.
      examples: Number of examples folded in the input and in the result.
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
        """Convolve `x`, of the shape that `convolve` takes."""
        channels = x.shape[-1] // (self.columns_in * self.examples)
        kernel = self.param(
            "kernel", self.kernel_init, (self.size, self.size, channels, self.width), jnp.float32
        )
        folds = self.columns_in, self.columns_out, self.examples
        return convolve(x.astype(self.dtype), kernel, self.stride, self.padding, *folds)
