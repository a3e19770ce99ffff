"""Batch normalization whose statistics are shared by a chosen group of replicas or examples."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lbopt import replicas, tree
from lbopt.errors import UserError, require, require_choice
from lbopt.models import _fold, _product
from lbopt.models._fold import Fold
from lbopt.models._scope import StatsScope, View

RUNNING_FROM = ("all", "first")


class BatchNorm(nn.Module):
    r"""Batch normalization over the global batch, groups of it, or each replica's examples.

        y = (x - mean) / sqrt(var + epsilon) * scale + bias

    with mean and (biased) variance over every axis but the last, within the example's group. Under
    `jit` the groups are a reshape of the global batch; under `pmap` they are reductions over groups
    of replicas. Both give the same numbers. Statistics are computed in fp32 or wider as E[x] and
    E[x^2] - E[x]^2, in one pass and one reduction.

    The running statistics follow the mean over groups of each group's mean and variance, as in
    EfficientNet's distributed batch norm. Averaging each group's running statistics before
    evaluation, as in MLPerf's ResNet-50 in JAX, gives the same numbers. `running_from="first"`
    follows the first group only, as in code that saves the statistics of one replica.

    `lbopt.make_train_step` states the number of replicas. Trace a step of your own under
    `lbopt.replicas.tracing_for(count, axis_name)`. Otherwise one replica is assumed, and a
    hand-written `pmap` normalizes over each device's examples.

    Attributes:
      stats_scope: Groups that share statistics. "global", "local" (each replica), "replicas:N" or
        "examples:N" (contiguous groups of the global batch), or "tiles:RxC": R x C tiles of the
        mesh's grid of replicas, with replica r at row r // columns and column r % columns.
        "tiles:RxC@HxW" states a grid of H x W replicas.
      momentum: Momentum of the running statistics, in [0, 1):
        running = momentum * running + (1 - momentum) * batch.
      epsilon: Number added to the variance.
      use_scale: True learns a scale [features] fp32.
      use_bias: True learns a bias [features] fp32.
      scale_init: Initializer of the scale.
      bias_init: Initializer of the bias.
      dtype: Dtype of the output; None for that of the input.
      fold: Numbers of columns and examples that the input has folded into its last axis.
      running_from: Groups whose statistics the running statistics follow: "all" or "first".
      unbiased_running_var: True keeps the running variance with a divisor of n - 1, as PyTorch and
        TensorFlow's fused kernel do. The batch is always normalized with a divisor of n.
      use_running_average: True normalizes by the running statistics, as in evaluation. Give it here
        or at the call, as with Flax's BatchNorm.

    Raises:
      UserError: If the scope, `momentum` or `running_from` is not one of the above, if the scope
        counts replicas whose number was not stated, or if the groups do not divide the replicas or
        the batch. Raised when the module is applied.

    >>> import jax, jax.numpy as jnp
    >>> norm = BatchNorm(stats_scope="examples:32", use_running_average=False)
    >>> variables = jax.eval_shape(norm.init, jax.random.key(0), jnp.zeros((64, 8)))
    >>> variables["params"]["scale"].shape, sorted(variables["batch_stats"])
    ((8,), ['mean', 'var'])

    References:
      Ying et al., Image Classification at Supercomputer Scale, arXiv 1811.06992v2 (distributed
      batch normalization).
    """

    stats_scope: str = "global"
    momentum: float = 0.9
    epsilon: float = 1e-5
    use_scale: bool = True
    use_bias: bool = True
    scale_init: nn.initializers.Initializer = nn.initializers.ones_init()
    bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()
    dtype: Any = None
    fold: Fold = Fold()
    running_from: str = "all"
    unbiased_running_var: bool = False
    use_running_average: bool | None = None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        kernel: jax.Array | None = None,
        then: Callable[[jax.Array], jax.Array] | None = None,
    ) -> jax.Array:
        """Normalize `x`.

        Args:
          x: [batch, ..., features].
          use_running_average: True normalizes by the running statistics.
          kernel: [channels, features] or None. With a kernel, `x` is [batch, height, width,
            channels], and its 1 x 1 convolution with the kernel is normalized without being kept
            in memory (see `lbopt.models._product`).
          then: Maximum over windows, or None. It is applied before normalization, so that only
            maxima are normalized: an increasing function commutes with the maximum. With a negative
            scale the function decreases, so the caller must multiply the channels of `x` by
            `sign()`. It may fold more columns.
        """
        use_running_average = nn.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )

        scope = StatsScope.parse(self.stats_scope)
        check_running_statistics(self.momentum, self.running_from)
        shape = ((x.shape[-1] if kernel is None else kernel.shape[1]) // self.fold.by,)
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, shape, jnp.float32)
        running_var = self.variable("batch_stats", "var", jnp.ones, shape, jnp.float32)
        scale = self.param("scale", self.scale_init, shape, jnp.float32) if self.use_scale else None
        bias = self.param("bias", self.bias_init, shape, jnp.float32) if self.use_bias else None
        sign = jnp.ones(()) if then is None else self.sign()

        if use_running_average or self.is_initializing():
            y = x if kernel is None else _product.pointwise(x, kernel)
            y = y if then is None else then(y)
            y = _around(y, sign, running_mean.value, running_var.value, self.epsilon, scale, bias)
            return y.astype(self.dtype or x.dtype)

        here = _replicas(scope)
        num_examples = x.shape[0] * self.fold.examples
        view = scope.view(here, num_examples, self.fold.examples)
        if kernel is not None:
            kernel = _as_computed(kernel, x.dtype)
        with jax.named_scope(replicas.STATISTICS):
            mean, var = _moments(
                x.reshape(*view.shape, *x.shape[1:]),
                view,
                here,
                scope,
                num_examples,
                kernel,
                self.fold,
            )
        mean = mean * _to_rank(sign, mean.ndim)

        # `count` is the number of elements behind each statistic, over all replicas of a group.
        seen = num_examples * (here.count if here.axis_name else 1)
        count = (
            seen
            // scope.num_groups(here.count, seen, here.grid)
            * math.prod(x.shape[1:-1])
            * self.fold.columns
        )
        unbiased = count / max(count - 1, 1) if self.unbiased_running_var else 1.0
        for running, batch in ((running_mean, mean), (running_var, var * unbiased)):
            kept = _kept(batch, self.running_from, here)
            running.value = self.momentum * running.value + (1 - self.momentum) * kept

        y = x if then is None else then(x)
        width = y.shape[-1] if kernel is None else kernel.shape[1]
        factor, shift = _affine(mean, var, self.epsilon, scale, bias)
        factor, shift = (
            _fold.repeat(of, width) for of in (factor * _to_rank(sign, factor.ndim), shift)
        )
        grouped = y.reshape(*view.shape, *y.shape[1:])
        # The backward pass reduces the gradient's statistics here.
        with jax.named_scope(replicas.STATISTICS):
            if kernel is None:
                normal = grouped.astype(factor.dtype) * factor + shift
            else:
                normal = _product.scaled_product(grouped, kernel, factor, shift, view)
        return normal.reshape(*y.shape[:-1], width).astype(self.dtype or x.dtype)

    def sign(self) -> jax.Array:
        """Return 1, or -1 where the scale is negative: fp32 [features], or [] without a scale.

        No gradient flows through it.
        """
        scale = self.get_variable("params", "scale")
        return (
            jnp.ones(())
            if scale is None
            else jax.lax.stop_gradient(jnp.where(scale < 0, -1.0, 1.0))
        )


def check_running_statistics(momentum: float, running_from: str) -> None:
    """Raise `UserError` for options of `BatchNorm` that no running statistics follow."""
    require(0 <= momentum < 1, "momentum", momentum, "give a number in [0, 1)")
    require_choice("running_from", running_from, RUNNING_FROM)


def _around(
    x: jax.Array,
    sign: jax.Array,
    mean: jax.Array,
    var: jax.Array,
    epsilon: float,
    scale: jax.Array | None,
    bias: jax.Array | None,
) -> jax.Array:
    """Normalize by running statistics.

    The mean is subtracted first, because it may be far larger than the standard deviation.
    """

    def folded(channels: jax.Array) -> jax.Array:
        return _to_rank(_fold.repeat(channels, x.shape[-1]), x.ndim)

    y = (x * folded(sign) - folded(mean)) * folded(jax.lax.rsqrt(var + epsilon))
    y = y if scale is None else y * folded(scale)
    return y if bias is None else y + folded(bias)


def _as_computed(kernel: jax.Array, dtype: Any) -> jax.Array:
    """Round a kernel to the dtype of the product, without rounding its gradient."""
    return kernel + jax.lax.stop_gradient(kernel.astype(dtype).astype(kernel.dtype) - kernel)


def _affine(
    mean: jax.Array, var: jax.Array, epsilon: float, scale: jax.Array | None, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return the factor and the shift of each channel that normalize, scale and add the bias."""
    factor = jax.lax.rsqrt(var + epsilon)
    factor = factor if scale is None else factor * _to_rank(scale, factor.ndim)
    shift = -mean * factor
    return factor, shift if bias is None else shift + _to_rank(bias, shift.ndim)


def _to_rank(x: jax.Array, rank: int) -> jax.Array:
    """Add leading axes up to a rank; a 0-d array is returned unchanged.

    NumPy's implicit promotion is an error under `jax_numpy_rank_promotion="raise"`.
    """
    return x if not x.ndim else jax.lax.broadcast_to_rank(x, rank)


def _moments(
    grouped: jax.Array,
    view: View,
    here: replicas.Replicas,
    scope: StatsScope,
    num_examples: int,
    kernel: jax.Array | None,
    fold: Fold,
) -> tuple[jax.Array, jax.Array]:
    """Return mean and variance of each group in fp32 or wider; reduced axes have length 1."""
    wide = grouped.astype(tree.wide_dtype(grouped.dtype))
    axes = (*view.over, *range(len(view.shape), grouped.ndim - 1))
    mean = jnp.mean(wide, axes, keepdims=True)
    if kernel is None:
        square = jnp.mean(jnp.square(wide), axes, keepdims=True)
    else:
        mean, square = _moments_of_product(mean, _product.second_moment(grouped, view), kernel)
    mean = _fold.mean(mean, fold)
    square = _fold.mean(square, fold)

    peers = scope.peers(here, num_examples) if here.axis_name else []
    if peers is None or peers:
        mean, square = jax.lax.pmean((mean, square), here.axis_name, axis_index_groups=peers)
    # Where a channel is constant, rounding may make the difference negative.
    return mean, jnp.maximum(square - jnp.square(mean), 0)


def _moments_of_product(
    mean: jax.Array, second: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Turn the moments of `x` into the mean and mean square of `x kernel`, both [..., out].

    `mean` is [..., in], `second` [groups, in, in] and `kernel` [in, out].
    """
    exact = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    square = jnp.sum(_to_rank(kernel, second.ndim) * exact(second, kernel), axis=1)
    mean = exact(mean, kernel)
    return mean, square.reshape(mean.shape)


def _kept(batch: jax.Array, running_from: str, here: replicas.Replicas) -> jax.Array:
    """Return [features]: the mean over the groups on this replica, or the first group's value."""
    flat = batch.reshape(-1, batch.shape[-1])
    if running_from == "all":
        return jnp.mean(flat, 0)
    first = flat[0]
    if here.axis_name is None:
        return first
    return jax.lax.psum(
        jnp.where(jax.lax.axis_index(here.axis_name) == 0, first, 0), here.axis_name
    )


def _replicas(scope: StatsScope) -> replicas.Replicas:
    here = replicas.current()
    if here is None and scope.kind in ("local", "replicas", "tiles"):
        fix = (
            "the number of replicas is not known; train by lbopt.make_train_step, or trace your "
            "own step under lbopt.replicas.tracing_for(count, axis_name)"
        )
        raise UserError("stats_scope", scope.text, fix, code="missing")
    return here or replicas.Replicas()
