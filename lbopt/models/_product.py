r"""1 x 1 convolutions with batch norm that never store the convolution's own output.

Let R = X W be the output of a 1 x 1 convolution, which is normalized and used once, as
Y = R * factor + shift. Its moments follow from those of X:

    E[R] = E[X] W,        E[R^2] = diag(W^T E[X^T X] W).

With G the gradient of Y, the other gradients follow from one product P = X^T G:

    dW = factor * P + ...,        d factor = sum_rows(W * P),        d shift = sum(G).

Neither pass needs R except to compute Y, so R is neither written nor read. Where X has fewer
channels than R, this avoids most of the memory traffic of a normalized convolution.
"""

from __future__ import annotations

import functools
import string

import flax.linen as nn
import jax
import jax.numpy as jnp

from lbopt.models._scope import View


class Kernel(nn.Module):
    """The kernel of a 1 x 1 convolution, without the convolution.

    Attributes:
      width: Output channels.
      init: Initializer of [1, 1, channels, width].
    """

    width: int
    init: nn.initializers.Initializer

    @nn.compact
    def __call__(self, channels: int) -> jax.Array:
        """Return the kernel [channels, width] fp32; the parameter is [1, 1, channels, width]."""
        return self.param("kernel", self.init, (1, 1, channels, self.width), jnp.float32)[0, 0]


def normalized(x: jax.Array, kernel: jax.Array, norm: nn.Module, train: bool) -> jax.Array:
    """Return the batch norm of a 1 x 1 convolution.

    In training the two are computed together where that saves time: if the convolution increases
    the number of channels, and images are large enough for the products of moments and kernels to
    cost less than storing the convolution's output.

    Args:
      x: [batch, height, width, in].
      kernel: [in, out].
      norm: The batch norm.
      train: True normalizes by the batch.
    """
    pixels = x.shape[-3] * x.shape[-2]
    if train and 4 * pixels >= kernel.shape[1] > x.shape[-1]:
        return norm(x, use_running_average=False, kernel=kernel)
    return norm(pointwise(x, kernel), use_running_average=not train)


def pointwise(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolve `x` [..., height, width, in] with `kernel` [in, out] in the dtype of `x`."""
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
    """Return x^T y of each group, [groups, in, out] in fp32 or wider.

    `x` is [*view.shape, ..., in] and `y` [*view.shape, ..., out].
    """
    axes = string.ascii_lowercase[: x.ndim - 1]
    groups = "".join(axes[i] for i in range(len(view.shape)) if i not in view.over)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    # A TPU would take fp32 products in bf16, too coarse for the variance E[R^2] - E[R]^2.
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
      kernel: [in, out] fp32.
      factor: One factor per group and channel, [*view.shape with ones for the axes within a group,
        1, 1, out].
      shift: One shift per group and channel, in the shape of `factor`.
      view: Split of the batch axis of `x` into groups.
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
    """Multiply each group of `x` by its own matrix of `matrices` [groups, in, out]."""
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
