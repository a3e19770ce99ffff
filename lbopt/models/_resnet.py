"""ResNet v1.5: 18, 34, 50, 101 and 152 layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lbopt.errors import UserError, require_choice
from lbopt.models import _fold, _product, _stem
from lbopt.models._activation import relu
from lbopt.models._fold import Fold
from lbopt.models._norm import BatchNorm


@dataclasses.dataclass(frozen=True)
class ResNetSize:
    """The published shape of a network.

    Attributes:
      depths: Number of blocks in each stage.
      widths: Output channels of each stage.
      bottleneck: True for blocks of 1 x 1, 3 x 3 and 1 x 1 convolutions, False for two of 3 x 3.
    """

    depths: tuple[int, ...]
    widths: tuple[int, ...]
    bottleneck: bool


_BASIC = (64, 128, 256, 512)
_BOTTLENECK = (256, 512, 1024, 2048)
RESNET_SIZES = {
    "18": ResNetSize((2, 2, 2, 2), _BASIC, False),
    "34": ResNetSize((3, 4, 6, 3), _BASIC, False),
    "50": ResNetSize((3, 4, 6, 3), _BOTTLENECK, True),
    "101": ResNetSize((3, 4, 23, 3), _BOTTLENECK, True),
    "152": ResNetSize((3, 8, 36, 3), _BOTTLENECK, True),
}
"""He et al., arXiv 1512.03385v1, Table 1."""


class ResNet(nn.Module):
    """A residual network of the form v1.5.

    In this form a stage's stride is in its first 3 x 3 convolution. Convolutions are He-normal by
    fan-out, as in He et al. As in Goyal et al., arXiv 1706.02677v2, section 5.1, the head's kernel
    is normal(0, 0.01) and the scale of the last batch norm of every block starts at zero. Padding
    is symmetric, as in PyTorch's networks; TensorFlow's differ in the max pool, which they pad on
    one side only.

    Attributes:
      depths: Number of blocks in each stage.
      widths: Output channels of each stage; every stage but the first halves the image.
      bottleneck: True for blocks of 1 x 1 (to a quarter of the width), 3 x 3 and 1 x 1
        convolutions, False for blocks of two 3 x 3.
      num_classes: Size of the output.
      stem: First layers. "conv7": a 7 x 7 convolution and a 3 x 3 max pool, both of stride 2.
        "space_to_depth": the same function and parameters, computed on 2 x 2 pixels folded into
        channels; it also takes images already folded, with four times the channels. "conv3": a
        3 x 3 convolution of stride 1, for small images.
      stem_width: Channels of the stem.
      batch_norm_scope: `stats_scope` of `lbopt.BatchNorm`.
      batch_norm_momentum: Momentum of the running statistics.
      batch_norm_epsilon: Number added to the variance.
      batch_norm_running_from: `running_from` of `lbopt.BatchNorm`.
      batch_norm_unbiased_var: `unbiased_running_var` of `lbopt.BatchNorm`; True in networks that
        `load_huggingface` returns.
      fold_columns: True folds columns of the image into channels where blocks have few channels
        inside. The result is the same up to rounding. It is faster on a TPU and only adds work on a
        CPU.
      dtype: Dtype of convolutions and of activations between layers; parameters, statistics and
        logits are fp32.

    >>> import jax, jax.numpy as jnp
    >>> model = ResNet(num_classes=10, depths=(1, 1), widths=(64, 128))
    >>> variables = jax.eval_shape(
    ...     lambda: model.init(jax.random.key(0), jnp.zeros((2, 32, 32, 3)), train=False)
    ... )
    >>> variables["params"]["head"]["kernel"].shape
    (128, 10)
    """

    depths: Sequence[int] = (3, 4, 6, 3)
    widths: Sequence[int] = _BOTTLENECK
    bottleneck: bool = True
    num_classes: int = 1000
    stem: str = "conv7"
    stem_width: int = 64
    batch_norm_scope: str = "global"
    batch_norm_momentum: float = 0.9
    batch_norm_epsilon: float = 1e-5
    batch_norm_running_from: str = "all"
    batch_norm_unbiased_var: bool = False
    fold_columns: bool = False
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Return fp32 logits [batch, num_classes].

        Args:
          images: [batch, height, width, channels] or [batch, height, width].
          train: True normalizes by the batch and updates the running statistics.
        """
        x = images if images.ndim == 4 else images[..., None]
        self._check(x)

        norm = functools.partial(
            BatchNorm,
            self.batch_norm_scope,
            self.batch_norm_momentum,
            self.batch_norm_epsilon,
            dtype=jnp.float32,
            running_from=self.batch_norm_running_from,
            unbiased_running_var=self.batch_norm_unbiased_var,
        )
        columns = self._columns(x)
        x = _stem.Stem(self.stem, self.stem_width, norm, columns[0], self.dtype, name="stem")(
            x, train
        )

        block = BottleneckBlock if self.bottleneck else BasicBlock
        before = columns[0]
        for stage, (depth, width) in enumerate(zip(self.depths, self.widths, strict=True)):
            for number in range(depth):
                # The stem has halved the image already, so the first stage keeps its size.
                stride = 2 if stage > 0 and number == 0 else 1
                folds = before, columns[stage]
                x = block(
                    width, stride, norm, folds, self.dtype, name=f"stage{stage}_block{number}"
                )(x, train)
                before = columns[stage]

        x = _fold.mean(jnp.mean(x, (1, 2), dtype=jnp.float32), Fold(before))
        return nn.Dense(
            self.num_classes,
            dtype=jnp.float32,
            kernel_init=nn.initializers.normal(0.01),
            name="head",
        )(x)

    def _columns(self, images: jax.Array) -> list[int]:
        """Return the number of columns that each stage folds.

        It is at most twice that of the next stage, because a stride of two halves the fold.
        """
        folded = 2 if self._takes_folded(images) else 1
        width = -(-images.shape[2] * folded // (1 if self.stem == "conv3" else 4))
        columns: list[int] = []
        for stage in reversed(range(len(self.widths))):
            inside = self.widths[stage] // (4 if self.bottleneck else 1)
            best = _fold.best_columns(-(-width // 2**stage), inside) if self.fold_columns else 1
            columns.insert(0, min(best, 2 * columns[0]) if columns else best)
        return columns

    def _takes_folded(self, images: jax.Array) -> bool:
        return self.stem == "space_to_depth" and images.shape[-1] >= _stem.FOLDED_CHANNELS

    def _check(self, x: jax.Array) -> None:
        folded = 2 if self._takes_folded(x) else 1
        height, width = (side * folded for side in x.shape[1:3])
        stride = self.total_stride
        if min(height, width) < stride:
            fix = (
                f"the strides reduce it {stride} times, to nothing; use images of at least "
                f"{stride} x {stride}, a stem without strides ('conv3'), or fewer stages"
            )
            raise UserError("image_size", (height, width), fix, code="mismatch")

    @property
    def total_stride(self) -> int:
        """Factor by which the network reduces the sides of an image."""
        return (1 if self.stem == "conv3" else 4) * 2 ** (len(self.widths) - 1)


def make_resnet(size: str, **options: Any) -> ResNet:
    """Build the network of a published size; `options` are attributes of `ResNet`.

    Args:
      size: "18", "34", "50", "101" or "152".
      **options: Attributes of `ResNet` that differ from its defaults.

    Raises:
      UserError: If `size` is not a published size.

    >>> make_resnet("50", num_classes=10).depths
    (3, 4, 6, 3)
    """
    require_choice("size", size, RESNET_SIZES)
    return ResNet(**{**dataclasses.asdict(RESNET_SIZES[size]), **options})


class _ResidualBlock(nn.Module):
    """Attributes and helpers of both kinds of block.

    Attributes:
      width: Output channels.
      stride: Stride of the first 3 x 3 convolution and of the shortcut.
      norm: Constructor of a batch norm, given its name and fold.
      folds: Numbers of columns folded in the input and in the output.
      dtype: Dtype of the computation.
    """

    width: int
    stride: int
    norm: Any
    folds: tuple[int, int]
    dtype: Any

    def _conv(
        self, x: jax.Array, width: int, size: int, stride: int, name: str, folds: tuple[int, int]
    ) -> jax.Array:
        return _stem.conv(width, size, stride, self.dtype, name, folds)(x)

    def _norm(self, columns: int, **options: Any) -> BatchNorm:
        return self.norm(fold=Fold(columns), **options)

    def _product(self, x: jax.Array, name: str, norm: BatchNorm, train: bool) -> jax.Array:
        """Return the normalized 1 x 1 convolution of `x`, which is folded like the output."""
        columns = self.folds[1]
        kernel = _product.Kernel(self.width, _stem.he_normal_by_fan_out, name=name)(
            x.shape[-1] // columns
        )
        return _product.normalized(x, _fold.diagonal_kernel(kernel, columns), norm, train)

    def _join(self, x: jax.Array, y: jax.Array, train: bool) -> jax.Array:
        """Add the shortcut, which is the identity or, where shapes differ, a projection."""
        if x.shape != y.shape:
            x = _fold.subsample(x, self.stride, *self.folds)
            x = self._product(
                x, "shortcut_conv", self._norm(self.folds[1], name="shortcut_norm"), train
            )
        return relu(x + y, self.dtype)


class BasicBlock(_ResidualBlock):
    """Two 3 x 3 convolutions."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Map `x` [batch, height, width, channels] to `self.width` channels, both folded.

        Sides are divided by the stride.
        """
        _, after = self.folds
        y = self._conv(x, self.width, 3, self.stride, "conv1", self.folds)
        y = nn.relu(self._norm(after, name="norm1")(y, use_running_average=not train))
        y = self._conv(y, self.width, 3, 1, "conv2", (after, after))
        norm = self._norm(after, name="norm2", scale_init=nn.initializers.zeros_init())
        return self._join(x, norm(y, use_running_average=not train), train)


class BottleneckBlock(_ResidualBlock):
    """Convolutions of 1 x 1 to a quarter of the width, 3 x 3, and 1 x 1 to the full width."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Map `x` [batch, height, width, channels] to `self.width` channels, both folded.

        Sides are divided by the stride.
        """
        before, after = self.folds
        inside = self.width // 4
        y = self._conv(x, inside, 1, 1, "conv1", (before, before))
        y = nn.relu(self._norm(before, name="norm1")(y, use_running_average=not train))
        y = self._conv(y, inside, 3, self.stride, "conv2", self.folds)
        y = relu(self._norm(after, name="norm2")(y, use_running_average=not train), self.dtype)
        norm = self._norm(after, name="norm3", scale_init=nn.initializers.zeros_init())
        return self._join(x, self._product(y, "conv3", norm, train), train)
