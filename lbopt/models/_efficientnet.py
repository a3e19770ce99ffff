"""EfficientNet-B0 to B7."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from lbopt.errors import UserError, require_choice
from lbopt.models import _fold
from lbopt.models._activation import swish
from lbopt.models._depthwise import DepthwiseConv
from lbopt.models._fold import Fold
from lbopt.models._norm import BatchNorm
from lbopt.models._randomness import Dropout, StochasticDepth


class Stage(NamedTuple):
    """A sequence of blocks of one kind, before scaling, as in Table 1 of the paper.

    Attributes:
      kernel: Side of the depthwise kernel.
      stride: Stride of the first block; the others have stride 1.
      expansion: Channels inside a block over channels at its input.
      width: Output channels.
      depth: Number of blocks.
    """

    kernel: int
    stride: int
    expansion: int
    width: int
    depth: int


EFFICIENTNET_STAGES = (
    Stage(3, 1, 1, 16, 1),
    Stage(3, 2, 6, 24, 2),
    Stage(5, 2, 6, 40, 2),
    Stage(3, 2, 6, 80, 3),
    Stage(5, 1, 6, 112, 3),
    Stage(5, 2, 6, 192, 4),
    Stage(3, 1, 6, 320, 1),
)
"""EfficientNet-B0: Tan and Le, arXiv 1905.11946v5, Table 1."""


@dataclasses.dataclass(frozen=True)
class EfficientNetSize:
    """Scaling of a published network relative to B0.

    Attributes:
      width_coefficient: Factor of the number of channels.
      depth_coefficient: Factor of the number of blocks in each stage.
      image_size: Side of the training images, in pixels.
      dropout_rate: Dropout rate before the head.
    """

    width_coefficient: float
    depth_coefficient: float
    image_size: int
    dropout_rate: float


EFFICIENTNET_SIZES = {
    "b0": EfficientNetSize(1.0, 1.0, 224, 0.2),
    "b1": EfficientNetSize(1.0, 1.1, 240, 0.2),
    "b2": EfficientNetSize(1.1, 1.2, 260, 0.3),
    "b3": EfficientNetSize(1.2, 1.4, 300, 0.3),
    "b4": EfficientNetSize(1.4, 1.8, 380, 0.4),
    "b5": EfficientNetSize(1.6, 2.2, 456, 0.4),
    "b6": EfficientNetSize(1.8, 2.6, 528, 0.5),
    "b7": EfficientNetSize(2.0, 3.1, 600, 0.5),
}
"""tensorflow/tpu@e380f765021a8853abfbfd53af727604039a7d8c:
models/official/efficientnet/efficientnet_builder.py."""

_normal_by_fan_out = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
_uniform_by_fan_out = nn.initializers.variance_scaling(1 / 3, "fan_out", "uniform")


class EfficientNet(nn.Module):
    """Inverted bottlenecks with depthwise convolutions and squeeze-excitation.

    Padding and initialisation follow
    tensorflow/tpu@e380f765021a8853abfbfd53af727604039a7d8c:
    models/official/efficientnet/efficientnet_model.py: "SAME" padding by the size of the input,
    normal kernels of variance 2 / fan_out (2 / size^2 in depthwise convolutions), and a head
    uniform within 1 / sqrt(num_classes). Every block but the first of its stage has a residual
    connection. In training, stochastic depth drops the branch beside it with probability
    `stochastic_depth_rate` * number / blocks.

    Attributes:
      width_coefficient: Factor of the number of channels.
      depth_coefficient: Factor of the number of blocks in each stage.
      dropout_rate: Dropout rate before the head.
      stochastic_depth_rate: Limit of the blocks' drop rates, which rise linearly from 0.
      num_classes: Size of the output.
      stages: Stages of the network before scaling.
      stem_width: Channels of the stem before scaling.
      head_width: Channels of the last convolution, the one before pooling, before scaling.
      squeeze_ratio: Width of the squeeze over channels at the block's input.
      depth_divisor: Number to whose multiples the number of channels is rounded.
      symmetric_blocks: Numbers of the strided blocks that pad their input evenly on all sides; the
        other strided blocks pad more at the right and bottom, and the stem pads only there. None
        pads as TensorFlow does: evenly where the input has odd sides.
      batch_norm_scope: `stats_scope` of `lbopt.BatchNorm`.
      batch_norm_momentum: Momentum of the running statistics.
      batch_norm_epsilon: Number added to the variance.
      batch_norm_running_from: `running_from` of `lbopt.BatchNorm`.
      batch_norm_unbiased_var: `unbiased_running_var` of `lbopt.BatchNorm`; True in networks that
        `load_huggingface` returns.
      fold_examples: Number of examples folded into channels in training, in the blocks before the
        first whose input has 64 channels or more, half of a TPU's lanes. It must divide each
        replica's examples. The result is the same up to rounding. `scripts/bench models` compiles 8
        of 64 for TPU v3; on a CPU folding only adds work.
      dtype: Dtype of convolutions and of activations between layers; parameters, statistics and
        logits are fp32.

    >>> model = EfficientNet(num_classes=10, width_coefficient=0.5, dropout_rate=0.1)
    >>> model.depth_coefficient
    1.0
    """

    width_coefficient: float = 1.0
    depth_coefficient: float = 1.0
    dropout_rate: float = 0.2
    stochastic_depth_rate: float = 0.2
    num_classes: int = 1000
    stages: Sequence[Stage] = EFFICIENTNET_STAGES
    stem_width: int = 32
    head_width: int = 1280
    squeeze_ratio: float = 0.25
    depth_divisor: int = 8
    symmetric_blocks: Sequence[int] | None = None
    batch_norm_scope: str = "global"
    batch_norm_momentum: float = 0.99
    batch_norm_epsilon: float = 1e-3
    batch_norm_running_from: str = "all"
    batch_norm_unbiased_var: bool = False
    fold_examples: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Return fp32 logits [batch, num_classes].

        Args:
          images: [batch, height, width, channels] or [batch, height, width].
          train: True applies dropout and stochastic depth, and normalizes by the batch.
        """
        x = images if images.ndim == 4 else images[..., None]
        self._check(x)

        norm = functools.partial(
            BatchNorm,
            self.batch_norm_scope,
            self.batch_norm_momentum,
            self.batch_norm_epsilon,
            running_from=self.batch_norm_running_from,
            unbiased_running_var=self.batch_norm_unbiased_var,
        )

        folded = self.fold_examples if train and not self.is_initializing() else 1
        x = _fold.fold_examples(x, folded)
        padding = "SAME" if self.symmetric_blocks is None else ((0, 1), (0, 1))
        width = self.scaled(self.stem_width)
        x = _fold.Conv(
            width, 3, 2, padding, _normal_by_fan_out, self.dtype, examples=folded, name="stem_conv"
        )(x)
        x = nn.swish(
            norm(name="stem_norm", fold=Fold(examples=folded))(x, use_running_average=not train)
        )

        blocks = self.blocks()
        for number, stage in enumerate(blocks):
            padding = self._padding(number, stage)
            rate = self.stochastic_depth_rate * number / len(blocks)
            skipped = stage.depth > 0
            # From here on the channels alone fill at least half of the lanes.
            if x.shape[-1] // folded >= _fold.LANES // 2:
                x = _fold.unfold_examples(x, folded)
                folded = 1
            arguments = stage, padding, self.squeeze_ratio, skipped, rate, norm, folded, self.dtype
            x = Block(*arguments, name=f"block{number}")(x, train)

        x = _fold.unfold_examples(x, folded)
        x = _pointwise(self.scaled(self.head_width), self.dtype, "head_conv")(x)
        x = nn.swish(norm(name="head_norm")(x, use_running_average=not train))
        x = Dropout(self.dropout_rate)(jnp.mean(x, (1, 2), dtype=jnp.float32), train)
        return nn.Dense(
            self.num_classes, dtype=jnp.float32, kernel_init=_uniform_by_fan_out, name="head"
        )(x)

    def blocks(self) -> list[Stage]:
        """Return each block after scaling, with its own stride and width.

        The field `depth` holds the block's number within its stage.
        """
        return list(self.each_block())

    def each_block(self) -> Iterator[Stage]:
        """Yield `blocks` one by one; a configuration read from a file may declare any number."""
        for stage in self.stages:
            width = self.scaled(stage.width)
            for number in range(math.ceil(self.depth_coefficient * stage.depth)):
                stride = stage.stride if number == 0 else 1
                yield Stage(stage.kernel, stride, stage.expansion, width, number)

    @property
    def total_stride(self) -> int:
        """Factor by which the network reduces the sides of an image."""
        return 2 * math.prod(stage.stride for stage in self.stages)

    def scaled(self, channels: int) -> int:
        """Scale channels and round to a multiple of the divisor, down by at most a tenth."""
        wanted = channels * self.width_coefficient
        divisor = self.depth_divisor
        rounded = max(divisor, int(wanted + divisor / 2) // divisor * divisor)
        return rounded + divisor if rounded < 0.9 * wanted else rounded

    def _padding(self, number: int, block: Stage) -> Any:
        if self.symmetric_blocks is None or block.stride == 1:
            return "SAME"
        after = block.kernel // 2
        before = after if number in self.symmetric_blocks else after - 1
        return ((before, after),) * 2

    def _check(self, x: jax.Array) -> None:
        stride = self.total_stride
        if min(x.shape[1:3]) < stride:
            fix = (
                f"the strides reduce it {stride} times, to nothing; use images of at least "
                f"{stride} x {stride}"
            )
            raise UserError("image_size", x.shape[1:3], fix, code="mismatch")


def make_efficientnet(size: str, **options: Any) -> EfficientNet:
    """Build the network of a published size; `options` are attributes of `EfficientNet`.

    Args:
      size: "b0" to "b7".
      **options: Attributes of `EfficientNet` that differ from the published ones.

    Raises:
      UserError: If `size` is not a published size.

    >>> make_efficientnet("b5").width_coefficient
    1.6
    """
    require_choice("size", size, EFFICIENTNET_SIZES)
    published = dataclasses.asdict(EFFICIENTNET_SIZES[size])
    del published["image_size"]
    return EfficientNet(**{**published, **options})


def symmetric_blocks(network: EfficientNet, image_size: int) -> tuple[int, ...]:
    """Return the numbers of the strided blocks whose input has odd sides.

    TensorFlow pads their input evenly; Hugging Face's configuration lists them as
    `depthwise_padding`.
    """
    side = -(-image_size // 2)
    odd = []
    for number, block in enumerate(network.blocks()):
        if block.stride == 2:
            odd += [number] if side % 2 else []
            side = -(-side // 2)
    return tuple(odd)


class Block(nn.Module):
    """Expansion, depthwise convolution, squeeze-excitation and projection.

    Attributes:
      shape: Kernel, stride, expansion and width of the block.
      padding: Padding of the depthwise convolution.
      squeeze_ratio: Width of the squeeze over channels at the block's input.
      skipped: True adds the input to the result.
      drop_rate: Rate of stochastic depth.
      norm: Constructor of a batch norm, given its name and fold.
      examples: Number of examples folded into channels.
      dtype: Dtype of the computation.
    """

    shape: Stage
    padding: Any
    squeeze_ratio: float
    skipped: bool
    drop_rate: float
    norm: Any
    examples: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Map `x` [batch, height, width, channels] to `shape.width` channels, both folded.

        Sides are divided by the stride.
        """
        channels = x.shape[-1] // self.examples
        inside = channels * self.shape.expansion
        norm = functools.partial(self.norm, fold=Fold(examples=self.examples))

        y = x
        if self.shape.expansion != 1:
            y = _pointwise(inside, self.dtype, "expand_conv", self.examples)(y)
            y = swish(norm(name="expand_norm")(y, use_running_average=not train))

        depthwise = self.shape.kernel, self.shape.stride, self.padding, self.examples, self.dtype
        y = DepthwiseConv(*depthwise, name="depthwise_conv")(y)
        y = swish(norm(name="depthwise_norm")(y, use_running_average=not train))
        # The squeeze is a share of the block's input channels, not of the expanded ones.
        y = SqueezeExcite(
            max(1, int(channels * self.squeeze_ratio)), self.examples, name="squeeze_excite"
        )(y)

        y = _pointwise(self.shape.width, self.dtype, "project_conv", self.examples)(y)
        y = norm(name="project_norm")(y, use_running_average=not train)
        if not self.skipped:
            return y
        return x + StochasticDepth(self.drop_rate, self.examples)(y, train)


class SqueezeExcite(nn.Module):
    """Scale every channel by a gate in (0, 1) that is computed from all channels' means.

    Attributes:
      width: Width of the squeeze.
      examples: Number of examples folded into channels.

    References:
      Hu et al., Squeeze-and-Excitation Networks, arXiv 1709.01507v4.
    """

    width: int
    examples: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [batch, height, width, channels] to the same shape; the gate is computed in fp32."""
        gate = jnp.mean(x, (1, 2), dtype=jnp.float32).reshape(x.shape[0], self.examples, -1)
        dense = functools.partial(nn.Dense, dtype=jnp.float32, kernel_init=_normal_by_fan_out)
        gate = dense(gate.shape[-1], name="expand")(
            nn.swish(dense(self.width, name="reduce")(gate))
        )
        return x * nn.sigmoid(gate).reshape(x.shape[0], 1, 1, -1).astype(x.dtype)


def _pointwise(width: int, dtype: Any, name: str, examples: int = 1) -> _fold.Conv:
    return _fold.Conv(width, 1, 1, "VALID", _normal_by_fan_out, dtype, examples=examples, name=name)
