"""Statistics of pixels, measured on training images."""

from __future__ import annotations

import concurrent.futures
import functools

import numpy as np

from lbopt.data._arrays import Dataset
from lbopt.data._damaged import DAMAGED
from lbopt.errors import EnvironmentProblem

_MEASURED = 1024
"""Number of training images, at equal distances, on which sizes and statistics are measured."""
_SLICE = 32

PixelScale = tuple[tuple[float, ...], tuple[float, ...]]
"""(mean, standard deviation) of pixels in [0, 1], of each channel."""


def sample(length: int) -> np.ndarray:
    """Return the numbers of at most `_MEASURED` examples, at equal distances."""
    count = min(length, _MEASURED)
    return np.arange(count) * length // count


def measured_scale(train: Dataset, image: str, threads: int, field: str, value: str) -> PixelScale:
    """Measure the pixels of training images as evaluation crops them.

    Args:
      train: The training set.
      image: Name of the image in a batch.
      threads: Number of threads that read.
      field: Field that names the data set, for errors.
      value: Its value.

    Raises:
      EnvironmentProblem: If no image can be used.
    """
    chosen = sample(len(train))
    slices = np.split(chosen, range(_SLICE, len(chosen), _SLICE))
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        sums = list(pool.map(functools.partial(_sums, train, image), slices))
    count, total, squares = np.sum(sums, 0)
    if not count.all():
        reason = train.take(chosen[:1])[DAMAGED][0][1]
        fix = f"none of its training images can be used ({reason}); repair them"
        raise EnvironmentProblem(field, value, fix, code="damaged")

    mean = total / count
    std = np.sqrt(np.maximum(squares / count - np.square(mean), 0))
    std = np.where(std > 1e-6, std, 1.0)  # the difference of two sums is exact to 1e-8
    return tuple(mean.tolist()), tuple(std.tolist())


def _sums(train: Dataset, image: str, indices: np.ndarray) -> np.ndarray:
    """Return the count, the sum and the sum of squares of pixels in [0, 1], [3, channels]."""
    batch = train.take(indices)
    images = batch[image][batch.get("mask", np.ones(len(indices), bool))]
    channels = 1 if images.ndim == 3 else 3  # of which space_to_depth folds four pixels
    pixels = images.reshape(-1, channels) / 255
    count = np.full(channels, float(len(pixels)))
    return np.stack([count, pixels.sum(0), np.square(pixels).sum(0)])
