"""The Simple CNN, without batch norm, in which batch sizes were compared on Fashion-MNIST."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lbopt.errors import require
from lbopt.models import _conv
from lbopt.models._head import Head
from lbopt.models._randomness import Dropout

_KERNEL = 5
_INIT = nn.initializers.glorot_uniform()
_WIDTHS = (32, 64)
_HIDDEN = 1024


class SimpleCNN(nn.Module):
    """Stages of a 5 x 5 convolution, ReLU and 2 x 2 max pooling, a hidden layer, and the logits.

        x <- relu(pool(conv(x)) + bias)        for each stage
        logits = head(dropout(relu(dense(x))))

    Convolutions have stride 1 and zero padding to the same size. Pooling is applied before bias and
    ReLU, which gives the same result on a quarter of the elements. Kernels are Glorot-uniform and
    biases zero. A network for images of 28 x 28 has 3,274,634 parameters, and one a quarter as
    wide 206,954.

    Note:
      The widths, the sizes of kernels and pools, 1024 hidden units, the rate of dropout and its
      place are those of TensorFlow's examples for these images (see References), and so are padding
      and initialization, which is the default of its layers. That the Simple CNN of Shallue et al.,
      arXiv 1811.03600, has the same widths, sizes and dropout is recalled [85%]; its padding, its
      initialization and the place of its dropout were not read in a public source.

      Where several elements of a tile have the maximum, they share its gradient evenly.

    Attributes:
      num_classes: Size of the output.
      widths: Channels of each stage; every stage halves the image.
      hidden: Width of the hidden layer.
      dropout_rate: Dropout of the hidden layer's result.
      dtype: Dtype of the computation; parameters are fp32.
      by_patches: Whether convolutions are computed as products of patches and kernels.

    References:
      tensorflow/models@059631bdea7e2d6fc7c22ffb86a7668e926e098a:official/mnist/mnist.py;
      zalandoresearch/fashion-mnist@55506a9:benchmark/convnet.py, with a test accuracy of .916 in
      the table of its README.

    >>> import jax, jax.numpy as jnp
    >>> images = jnp.zeros((2, 28, 28))
    >>> logits, variables = jax.eval_shape(
    ...     lambda: SimpleCNN().init_with_output(jax.random.key(0), images, train=False)
    ... )
    >>> logits.shape, sorted(variables["params"])
    ((2, 10), ['conv0', 'conv1', 'dense', 'head'])
    """

    num_classes: int = 10
    widths: Sequence[int] = _WIDTHS
    hidden: int = _HIDDEN
    dropout_rate: float = 0.4
    dtype: Any = jnp.float32
    by_patches: bool = True

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Return fp32 logits [batch, num_classes].

        Args:
          images: [batch, height, width] or [batch, height, width, channels].
          train: True applies dropout.
        """
        x = images.astype(self.dtype)
        x = x[..., None] if x.ndim == 3 else x
        _check_sides(x.shape[1:3], len(self.widths))

        for number, width in enumerate(self.widths):
            convolution = _conv.PatchConv(
                width,
                _KERNEL,
                self.dtype,
                self.by_patches,
                use_bias=True,
                kernel_init=_INIT,
                max_pool=True,
                name=f"conv{number}",
            )
            x = nn.relu(convolution(x))

        x = x.reshape(x.shape[0], -1)
        dense = nn.Dense(self.hidden, dtype=self.dtype, kernel_init=_INIT, name="dense")
        x = Dropout(self.dropout_rate)(nn.relu(dense(x)), train)
        return Head(self.num_classes, _INIT, name="head")(x)


def make_simple_cnn(width_coefficient: float = 1.0, **options: Any) -> SimpleCNN:
    """Build the Simple CNN with other widths.

    Args:
      width_coefficient: Channels and hidden units as a multiple of the published ones, > 0; each
        is rounded, and at least 1.
      **options: Attributes of `SimpleCNN`.

    >>> quarter = make_simple_cnn(0.25, num_classes=10)
    >>> quarter.widths, quarter.hidden
    ((8, 16), 256)
    """
    published = (*_WIDTHS, _HIDDEN)
    *widths, hidden = (max(1, round(width * width_coefficient)) for width in published)
    return SimpleCNN(**{"widths": tuple(widths), "hidden": hidden, **options})


def _check_sides(sides: tuple[int, ...], stages: int) -> None:
    step = 2**stages
    fix = f"each of the {stages} stages halves the image; give sides that are multiples of {step}"
    fits = all(side % step == 0 for side in sides)
    require(fits, "image_size", sides, fix, code="mismatch")
