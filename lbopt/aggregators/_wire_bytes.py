"""Bytes that a replica sends in one step, compared with those of the plain mean."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lbopt import types

FP32 = 4


class WireBytes(NamedTuple):
    """Bytes that one device sends in one step, in the ring algorithms of `lbopt.plan`.

    Padding, by which devices exchange equal shares, is not counted; it is at most a twentieth.

    Attributes:
      sent: Bytes that the aggregator sends.
      ring: Bytes of a ring all-reduce of fp32 gradients, 2 (R - 1) / R x 4 bytes an element.

    >>> import jax.numpy as jnp
    >>> from lbopt.aggregators import ef, topk
    >>> wire = ef(topk(0.01)).wire_bytes({"w": jnp.zeros(10_000)}, 8)
    >>> wire, round(wire.ratio, 1)
    (WireBytes(sent=5600.0, ring=70000.0), 12.5)
    """

    sent: float
    ring: float

    @property
    def ratio(self) -> float:
        """Bytes of the plain mean over those of the aggregator; 1 if nothing is sent."""
        return self.ring / self.sent if self.sent else 1.0


def elements(params: types.Params) -> int:
    """Return the number of elements of all arrays in a tree."""
    return sum(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(params))


def reduced(num_bytes: float, num_replicas: int) -> float:
    """Return the bytes that a ring all-reduce of `num_bytes` sends: reduce-scatter, all-gather."""
    return 2 * scattered(num_bytes, num_replicas)


def scattered(num_bytes: float, num_replicas: int) -> float:
    """Return the bytes sent by an all-to-all, reduce-scatter or all-gather of `num_bytes`."""
    return num_bytes * (num_replicas - 1) / num_replicas


def gathered(num_bytes: float, num_replicas: int) -> float:
    """Return the bytes sent by an all-gather to which each replica brings `num_bytes`."""
    return num_bytes * (num_replicas - 1)


def ring_bytes(params: types.Params, num_replicas: int) -> float:
    """Return the bytes that a ring all-reduce of fp32 gradients sends."""
    return reduced(FP32 * elements(params), num_replicas)
