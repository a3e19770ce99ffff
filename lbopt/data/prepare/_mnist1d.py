"""MNIST-1D: signals of 40 numbers, each a moved, stretched, noisy and sheared digit of 12 numbers.

The data set of Greydanus and Kobak, "Scaling down deep learning with MNIST-1D", arXiv 2011.14439,
made again with the default arguments of its package.

References:
  greydanus/mnist1d@7878d96082abd200c546a07a4101fa90b30fdf7e:mnist1d/data.py and
  mnist1d/transform.py (Apache-2.0), released as mnist1d 0.0.2.post1.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from scipy import ndimage

from lbopt.data.prepare._generated import Examples, GeneratedDataset

NUM_CLASSES = 10
SIZES = {"train": 4000, "test": 1000}
LENGTH = 40
"""Numbers of a signal."""

_DIGITS = np.asarray(
    [
        [5, 6, 6.5, 6.75, 7, 7, 7, 7, 6.75, 6.5, 6, 5],
        [5, 3, 3, 3.4, 3.8, 4.2, 4.6, 5, 5.4, 5.8, 5, 5],
        [5, 6, 6.5, 6.5, 6, 5.25, 4.75, 4, 3.5, 3.5, 4, 5],
        [5, 6, 6.5, 6.5, 6, 5, 5, 6, 6.5, 6.5, 6, 5],
        [5, 4.4, 3.8, 3.2, 2.6, 2.6, 5, 5, 5, 5, 5, 5],
        [5, 3, 3, 3, 3, 5, 6, 6.5, 6.5, 6, 4.5, 5],
        [5, 4, 3.5, 3.25, 3, 3, 3, 3, 3.25, 3.5, 4, 5],
        [5, 7, 7, 6.6, 6.2, 5.8, 5.4, 5, 4.6, 4.2, 5, 5],
        [5, 4, 3.5, 3.5, 4, 5, 5, 4, 3.5, 3.5, 4, 5],
        [5, 4, 3.5, 3.5, 4, 5, 5, 5, 5, 4.7, 4.3, 5],
    ]
)
"""The pen's place over time in each digit, which begins and ends in the middle."""
_SEED = 42
_LEAST_PADDING = 36
_MOST_PADDING = 60
_LARGEST_SHIFT = 48
_SCALE = 0.4
_CORRELATED_NOISE = 0.25
_CORRELATION = 2.0
_INDEPENDENT_NOISE = 0.02
_SHEAR = 0.75
_NOT_ZERO = 1e-8
"""Added to a digit, so that zeros are padding, which alone gets correlated noise."""


@functools.cache
def make_signals() -> tuple[np.ndarray, np.ndarray]:
    """Return all signals, fp32 [5000, 40], and their classes; the last 1000 are for the test.

    NumPy's `RandomState` draws the same numbers in every version.
    """
    draws = np.random.RandomState(_SEED)
    total = sum(SIZES.values())
    labels = np.repeat(np.arange(NUM_CLASSES), total // NUM_CLASSES)
    templates = _templates()
    signals = np.stack([_drawn(templates[label], draws) for label in labels])

    order = draws.permutation(total)
    signals = signals[order]
    signals = (signals - signals.mean()) / signals.std()
    return signals.astype(np.float32), labels[order]


def _templates() -> np.ndarray:
    """Return the digits [10, 12], standardized, moved to begin at zero, and scaled."""
    centred = _DIGITS - _DIGITS.mean(1, keepdims=True)
    scaled = centred / centred.std(1, keepdims=True)
    return (scaled - scaled[:, :1]) / 6.0


def _drawn(digit: np.ndarray, draws: np.random.RandomState) -> np.ndarray:
    """Return a signal of a digit. The order of the draws is that of the package."""
    padding = _LEAST_PADDING + int(draws.rand() * (_MOST_PADDING - _LEAST_PADDING + 1))
    padded = np.concatenate([digit + _NOT_ZERO, np.zeros(padding)])
    signal = _resampled(padded, len(digit) + _MOST_PADDING)
    signal = signal * (1 + _SCALE * (draws.rand() - 0.5))
    signal = np.roll(signal, draws.choice(_LARGEST_SHIFT))

    correlated = _CORRELATED_NOISE * draws.randn(len(signal))
    correlated = ndimage.gaussian_filter1d(correlated, _CORRELATION)
    signal = np.where(signal == 0, correlated, signal)
    signal = signal + _INDEPENDENT_NOISE * draws.randn(len(signal))
    slope = _SHEAR * (draws.rand() - 0.5)
    return _resampled(signal - slope * np.linspace(-0.5, 0.5, len(signal)), LENGTH)


def _resampled(signal: np.ndarray, length: int) -> np.ndarray:
    """Return a signal at `length` places, interpolated linearly."""
    return np.interp(np.linspace(0, 1, length), np.linspace(0, 1, len(signal)), signal)


def _examples(split: str) -> Examples:
    signals, labels = make_signals()
    start = 0 if split == "train" else SIZES["train"]
    for number in range(start, start + SIZES[split]):
        yield str(number), {"signal": signals[number], "label": int(labels[number])}


def _features(kinds: Any) -> dict[str, Any]:
    return {
        "signal": kinds.Tensor(shape=(LENGTH,), dtype=np.float32),
        "label": kinds.ClassLabel(num_classes=NUM_CLASSES),
    }


MNIST1D = GeneratedDataset(
    "mnist1d",
    "MNIST-1D (arXiv 2011.14439): signals of 40 numbers, of 10 classes.",
    _features,
    {split: functools.partial(_examples, split) for split in SIZES},
    records_per_shard=SIZES["train"],
)
