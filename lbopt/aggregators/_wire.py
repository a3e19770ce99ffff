"""Bytes that a replica sends for one step, beside those of the plain mean."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lbopt import types

FP32 = 4


class WireBytes(NamedTuple):
    """Bytes that one device sends in one step, in the ring algorithms of `lbopt.plan`.

    Zeros that are added so that devices get equal shares of what they exchange are left out; they are at most a twentieth.

    Attributes:
      sent: by the aggregator.
      ring: by a ring all-reduce of fp32 gradients, 2 (R - 1) / R x 4 bytes an element.
    """

    sent: float
    ring: float

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than the plain mean; below 1 it loses, 1 if nothing is sent at all."""
        return self.ring / self.sent if self.sent else 1.0


def elements(params: types.Params) -> int:
    """Return how many numbers a tree holds."""
    return sum(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(params))


def reduced(num_bytes: float, num_replicas: int) -> float:
    """Return what a ring all-reduce of so many bytes sends: a reduce-scatter, then an all-gather."""
    return 2 * scattered(num_bytes, num_replicas)


def scattered(num_bytes: float, num_replicas: int) -> float:
    """Return what an all-to-all, a reduce-scatter or an all-gather of so many bytes in all sends."""
    return num_bytes * (num_replicas - 1) / num_replicas


def gathered(num_bytes: float, num_replicas: int) -> float:
    """Return what an all-gather sends to which each replica brings so many bytes."""
    return num_bytes * (num_replicas - 1)


def ring_bytes(params: types.Params, num_replicas: int) -> float:
    """Return what the mean of fp32 gradients sends."""
    return reduced(FP32 * elements(params), num_replicas)
