"""Leaves as rows that the devices of a slice divide among them, and back."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from lbopt.aggregators import matrix_width, row_padding


def shape_of_rows(shape: tuple[int, ...], devices: int) -> tuple[int, ...]:
    """Return the shape of `leaf_as_rows`: [m, n] for a matrix, [m] for a small or narrow leaf.

    The number of devices divides m.
    """
    size = math.prod(shape)
    width = matrix_width(shape)
    if size and width:
        height = math.prod(shape) // width
        padding = row_padding(height, devices)
        if padding is not None:
            return height + padding, width

    # Each device has a row even of a leaf without numbers.
    size = max(size, 1)
    return (size + -size % devices,)


def leaf_as_rows(x: jax.Array, devices: int) -> jax.Array:
    """Return a leaf as rows that the devices divide, padded with zeros."""
    shape = shape_of_rows(x.shape, devices)
    rows = x.reshape(-1, *shape[1:])
    return jnp.pad(rows, [(0, shape[0] - len(rows))] + [(0, 0)] * (len(shape) - 1))


def leaf_from_rows(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Undo `leaf_as_rows`."""
    height = math.prod(shape) // math.prod(rows.shape[1:])
    return rows[:height].reshape(shape)
