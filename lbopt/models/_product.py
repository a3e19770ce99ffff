r"""1 x 1 convolutions with batch norm, arranged so that the convolution's own output is never kept.

Let R = X W be the output of a 1 x 1 convolution, to be normalised and used once, as Y = R * factor + shift. Its moments
follow from those of X,

    E[R] = E[X] W,        E[R^2] = diag(W^T E[X^T X] W),

so R need not be looked at before it is normalised, and the gradients follow from one product P = X^T G with the gradient
G of Y,

    dW = factor * P + ...,        d factor = sum_rows(W * P),        d shift = sum(G),

so R need not be looked at afterwards either. Where X has fewer channels than R this spares most of the memory traffic
of a normalised convolution: R is neither written nor read.
"""

from __future__ import annotations

import functools
import string

import flax.linen as nn
import jax
import jax.numpy as jnp

from lbopt.models._scope import View


class Kernel(nn.Module):
    """The kernel of a 1 x 1 convolution that somebody else computes.

    Attributes:
      width: output channels.
      init: initializer of [1, 1, channels, width].
    """

    width: int
    init: nn.initializers.Initializer

    @nn.compact
    def __call__(self, channels: int) -> jax.Array:
        """Return [channels, width] fp32, kept as [1, 1, channels, width]."""
        return self.param("kernel", self.init, (1, 1, channels, self.width), jnp.float32)[0, 0]


def normalized(x: jax.Array, kernel: jax.Array, norm: nn.Module, train: bool) -> jax.Array:
    """Return the batch norm of the 1 x 1 convolution of `x` [batch, height, width, in] with `kernel` [in, out].

    In training the two are one where that pays: where channels grow, and images are not so small that products of moments
    and kernels cost more than the convolution's output.
    """
    pixels = x.shape[-3] * x.shape[-2]
    if train and 4 * pixels >= kernel.shape[1] > x.shape[-1]:
        return norm(x, use_running_average=False, kernel=kernel)
    return norm(pointwise(x, kernel), use_running_average=not train)


def pointwise(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolve `x` [..., height, width, in] with `kernel` [in, out]; the result has the dtype of `x`."""
    flat = x.reshape(-1, *x.shape[-3:])
    y = jax.lax.conv_general_dilated(
        flat,
        kernel.astype(x.dtype)[None, None],
        (1, 1),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return y.reshape(*x.shape[:-1], kernel.shape[1])


def contract(x: jax.Array, y: jax.Array, view: View) -> jax.Array:
    """Return x^T y of each group, fp32 or wider: [groups, in, out] for `x` [*view.shape, ..., in], `y` [..., out]."""
    axes = string.ascii_lowercase[: x.ndim - 1]
    groups = "".join(axes[i] for i in range(len(view.shape)) if i not in view.over)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    exact = jax.lax.Precision.HIGHEST if x.dtype == wide else None
    equation = f"{axes}Y,{axes}Z->{groups}YZ"
    product = jnp.einsum(
        equation, x, y.astype(x.dtype), precision=exact, preferred_element_type=wide
    )
    return product.reshape(-1, x.shape[-1], y.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def second_moment(x: jax.Array, view: View) -> jax.Array:
    """Return the mean of x x^T of each group: [groups, in, in], fp32 or wider."""
    return contract(x, x, view) / _count(x, view)


def _second_moment_forward(x, view):
    return second_moment(x, view), x


def _second_moment_backward(view, x, gradient):
    symmetric = (gradient + gradient.swapaxes(1, 2)) / _count(x, view)
    return (_pointwise_by_group(x, symmetric, view),)


second_moment.defvjp(_second_moment_forward, _second_moment_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def scaled_product(
    x: jax.Array, kernel: jax.Array, factor: jax.Array, shift: jax.Array, view: View
) -> jax.Array:
    """Return (x kernel) * factor + shift in fp32 or wider, keeping only `x` for the backward pass.

    Args:
      x: [*view.shape, height, width, in].
      kernel: [in, out], fp32.
      factor: [*group axes with ones elsewhere, 1, 1, out]: one per group and channel.
      shift: likewise.
      view: how the batch axis of `x` is split.
    """
    return pointwise(x, kernel).astype(factor.dtype) * factor + shift


def _scaled_product_forward(x, kernel, factor, shift, view):
    return scaled_product(x, kernel, factor, shift, view), (x, kernel, factor)


def _scaled_product_backward(view, kept, gradient):
    x, kernel, factor = kept
    products = contract(x, gradient, view)
    by_group = factor.reshape(-1, 1, factor.shape[-1])
    d_kernel = jnp.sum(products * by_group, 0)
    d_factor = jnp.sum(products * kernel[None], 1).reshape(factor.shape)
    axes = tuple(
        axis
        for axis in range(gradient.ndim - 1)
        if factor.shape[axis] == 1 and gradient.shape[axis] > 1
    )
    d_shift = jnp.sum(gradient, axes, keepdims=True)
    d_x = pointwise((gradient * factor).astype(x.dtype), kernel.T)
    return d_x, d_kernel, d_factor, d_shift


scaled_product.defvjp(_scaled_product_forward, _scaled_product_backward)


def _pointwise_by_group(x: jax.Array, matrices: jax.Array, view: View) -> jax.Array:
    """Multiply every group of `x` with its own matrix [groups, in, out]."""
    if matrices.shape[0] == 1:
        return pointwise(x, matrices[0])
    axes = string.ascii_lowercase[: x.ndim - 1]
    kept = [i for i in range(len(view.shape)) if i not in view.over]
    groups = "".join(axes[i] for i in kept)
    shaped = matrices.reshape(*(view.shape[i] for i in kept), *matrices.shape[1:]).astype(x.dtype)
    return jnp.einsum(f"{axes}Y,{groups}YZ->{axes}Z", x, shaped)


def _count(x: jax.Array, view: View) -> int:
    groups = 1
    for axis, size in enumerate(view.shape):
        groups *= 1 if axis in view.over else size
    return x.size // x.shape[-1] // groups
