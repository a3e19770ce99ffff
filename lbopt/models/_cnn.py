"""A small convolutional classifier with batch normalization."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lbopt import replicas, tree
from lbopt.models import _conv, _norm, _packed, _pool
from lbopt.models._head import Head


class CNN(nn.Module):
    """Convolution, batch norm, ReLU and 2 x 2 max pooling per stage, then one hidden layer.

    Pooling is applied before normalization, which gives the same result and leaves a quarter of the
    elements to normalize; see `then` of `lbopt.BatchNorm`.

    Kernels are He-normal, the head is LeCun-normal and biases are zero.

    Attributes:
      num_classes: Size of the output.
      widths: Channels of each stage; every stage halves the image.
      hidden: Width of the hidden layer.
      batch_norm_scope: `stats_scope` of `lbopt.BatchNorm`.
      batch_norm_momentum: Momentum of the running statistics.
      dtype: Dtype of the computation; parameters and statistics are fp32.
      by_patches: True computes convolutions as products of patches and kernels. If False, trials
        under `jax.vmap` are packed side by side in the channels where each has one replica and the
        "global" scope, or replicas run in turn and the "local" scope.

    >>> import jax, jax.numpy as jnp
    >>> images = jnp.zeros((2, 8, 8, 1))
    >>> variables = jax.eval_shape(
    ...     lambda: CNN(num_classes=10).init(jax.random.key(0), images, train=False)
    ... )
    >>> sorted(variables)
    ['batch_stats', 'params']
    """

    num_classes: int = 10
    widths: Sequence[int] = (16, 32)
    hidden: int = 64
    batch_norm_scope: str = "global"
    batch_norm_momentum: float = 0.9
    dtype: Any = jnp.float32
    by_patches: bool = True

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Return fp32 logits [batch, num_classes].

        Args:
          images: [batch, height, width] or [batch, height, width, channels].
          train: True normalizes by the batch and updates the running statistics.
        """
        x = images.astype(self.dtype)
        x = x[..., None] if x.ndim == 3 else x

        for width in self.widths:
            batch_norm = _norm.BatchNorm(self.batch_norm_scope, self.batch_norm_momentum)
            convolution = _conv.PatchConv(width, dtype=self.dtype, by_patches=self.by_patches)
            if train and self._packs_trials():
                x = _trained(x, convolution, batch_norm)
                continue
            x = convolution(x, batch_norm.sign())
            x = nn.relu(batch_norm(x, use_running_average=not train, then=_pool.max_pool))

        x = x.reshape(x.shape[0], -1)
        x = nn.relu(
            nn.Dense(self.hidden, dtype=self.dtype, kernel_init=nn.initializers.he_normal())(x)
        )
        return Head(self.num_classes, name="Dense_1")(x)

    def _packs_trials(self) -> bool:
        here = replicas.current() or replicas.Replicas()
        plain = self.by_patches or self.is_initializing()
        alone = "global" if here.simulated == 1 else "local"
        return not plain and self.batch_norm_scope == alone and here.count == 1


def _trained(x: jax.Array, convolution: _conv.PatchConv, batch_norm: _norm.BatchNorm) -> jax.Array:
    """Run one stage in training mode and update the running statistics."""
    params = batch_norm.variables["params"]
    running = batch_norm.variables["batch_stats"]
    kernel = convolution.get_variable("params", "kernel")
    y, *moments = _stage(x, kernel, params["scale"], params["bias"])
    for name, batch in zip(("mean", "var"), moments, strict=True):
        moved = batch_norm.momentum * running[name] + (1 - batch_norm.momentum) * batch
        batch_norm.put_variable("batch_stats", name, moved)
    return y


def _alone(
    x: jax.Array, kernel: jax.Array, scale: jax.Array, bias: jax.Array
) -> tuple[jax.Array, ...]:
    """Return a stage's output and the mean and variance of its convolution.

    The output is [batch, height / 2, width / 2, out]; mean and variance are [out].
    """
    return _normalized(_pooled, 1, x, kernel, scale, bias)


def _together(*given: jax.Array) -> tuple[jax.Array, ...]:
    """Run `_alone` for many trials at once; all arrays have a leading trial axis."""
    trials = len(given[0])
    results = _normalized(_pooled_by_hand, trials, *map(_packed.pack, given))
    return tuple(_packed.unpack(one, trials) for one in results)


_stage = _packed.batched_by(_alone, _together)


def _normalized(
    pooled: Callable[..., Any],
    trials: int,
    x: jax.Array,
    kernel: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
) -> tuple[jax.Array, ...]:
    # The maximum commutes with an increasing function only. Channels with a negative scale are
    # negated before pooling.
    sign = jax.lax.stop_gradient(jnp.where(scale < 0, -1.0, 1.0))
    top, mean, square = pooled(
        x, (kernel * jax.lax.broadcast_to_rank(sign, kernel.ndim)).astype(x.dtype), trials
    )

    mean = mean * sign
    var = jnp.maximum(square - jnp.square(mean), 0)
    factor = jax.lax.rsqrt(var + _norm.BatchNorm.epsilon) * scale
    slope, shift = (
        jax.lax.broadcast_to_rank(each, top.ndim) for each in (factor * sign, bias - mean * factor)
    )
    y = top.astype(factor.dtype) * slope + shift
    return nn.relu(y.astype(x.dtype)), mean, var


def _pooled(x: jax.Array, kernel: jax.Array, trials: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the 2 x 2 maxima of a convolution, its mean and its mean square.

    Args:
      x: [batch, height, width, trials * in].
      kernel: [size, size, in, trials * out].
      trials: Number of trials packed into the channels.

    Returns:
      The maxima [batch, height / 2, width / 2, trials * out] in the dtype of `x`; mean and mean
      square [trials * out] in fp32 or wider.
    """
    return _pooled_forward(x, kernel, trials)[0]


def _pooled_forward(x: jax.Array, kernel: jax.Array, trials: int) -> tuple[Any, Any]:
    convolved = _convolved(x, kernel, trials)
    wide = convolved.astype(tree.wide_dtype(convolved.dtype))
    top = _pool.max_pool(convolved)
    moments = jnp.mean(wide, (0, 1, 2)), jnp.mean(jnp.square(wide), (0, 1, 2))
    return (top, *moments), (x, kernel, convolved, top)


def _convolved(x: jax.Array, kernel: jax.Array, trials: int) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=layout, feature_group_count=trials
    )


def _pooled_backward(trials: int, kept: Any, gradients: Any) -> tuple[jax.Array, jax.Array]:
    x, kernel, convolved, top = kept
    by_top, by_mean, by_square = gradients
    has_it, share = _pool.shared(convolved, top, by_top)
    count = convolved.size // convolved.shape[-1]
    rest = _pool.tiles(convolved) * (2 / count * by_square) + by_mean / count

    # Both expressions are the gradient of the convolution's output, written in two ways. A TPU's
    # compiler then fuses each into the convolution that uses it. A single shared array would be
    # written and read by an operation that costs more than both convolutions.
    for_x = jnp.where(has_it, share + rest, rest)
    for_kernel = jnp.where(has_it, share, 0) + rest
    for_x, for_kernel = (
        one.reshape(convolved.shape).astype(convolved.dtype) for one in (for_x, for_kernel)
    )

    _, by_x = jax.vjp(lambda x: _convolved(x, kernel, trials), x)
    _, by_kernel = jax.vjp(lambda kernel: _convolved(x, kernel, trials), kernel)
    return *by_x(for_x), *by_kernel(for_kernel)


_pooled_by_hand = jax.custom_vjp(_pooled, nondiff_argnums=(2,))
_pooled_by_hand.defvjp(_pooled_forward, _pooled_backward)
