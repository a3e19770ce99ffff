"""Products of matrices in the precision of their dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the product of two stacks of matrices in the precision of their dtype.

    Args:
      a: [..., n, k].
      b: [..., k, m], of the same dtype.

    Returns:
      [..., n, m].

    >>> import jax.numpy as jnp
    >>> matmul(jnp.eye(2), jnp.ones((2, 1))).shape
    (2, 1)

    Note:
      `a @ b` rounds fp32 to bf16 on TPU, and may round to TF32 on GPU. Here fp32 products are fp32
      everywhere; those of bf16 are summed in fp32 and take one pass.
    """
    is_wide = jnp.finfo(a.dtype).bits >= 32
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST if is_wide else None)
