"""The digits of scikit-learn: 1,797 scans of 8 x 8 pixels with 17 grey levels.

They ship with the package.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib

import numpy as np

from lbopt.data._arrays import ArrayDataset, Splits
from lbopt.errors import EnvironmentProblem, MissingPackage

NUM_CLASSES = 10
SIDE = 8
NUM_TRAIN = 1024
NUM_VALIDATION = 386
NUM_TEST = 387
_WHITE = 16
"""The largest grey level of a pixel."""
_SPLIT_KEY = 1797  # an arbitrary number; another one would change every published figure


@functools.cache
def load_digits(image_size: int | None = None) -> Splits:
    """Return the digits in a fixed random split: 1,024 to train, 386 to validate, 387 to test.

    The size of the training set is a power of two, so any pod divides a batch of the whole set.

    Args:
      image_size: Side of the images, a multiple of 8. A pixel becomes a square of equal pixels, for
        networks with strides. None for 8.

    Returns:
      `Splits` with `image` [examples, image_size, image_size] fp32 in [0, 1] and `label` [examples]
      int32.

    Raises:
      EnvironmentProblem: If scikit-learn is not installed.

    >>> digits = load_digits()  # doctest: +SKIP
    >>> digits.train.arrays["image"].shape, digits.train.arrays["label"].dtype  # doctest: +SKIP
    ((1024, 8, 8), dtype('int32'))
    """
    scans = _read()
    order = np.argsort(np.random.Philox(key=_SPLIT_KEY).random_raw(len(scans)), kind="stable")
    pixels, labels = np.split(scans[order], [SIDE * SIDE], axis=1)
    labels = labels[:, 0].astype(np.int32)
    images = (pixels / _WHITE).astype(np.float32).reshape(-1, SIDE, SIDE)
    scale = (image_size or SIDE) // SIDE
    images = np.kron(images, np.ones((1, scale, scale), np.float32))

    edges = np.cumsum([NUM_TRAIN, NUM_VALIDATION])
    splits = zip(np.split(images, edges), np.split(labels, edges), strict=True)
    return Splits(*(ArrayDataset({"image": image, "label": label}) for image, label in splits))


def _read() -> np.ndarray:
    """Return [1797, 65]: 64 pixels and the label.

    The file is read without importing scikit-learn, which takes longer than a small run's first
    step.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        fix = "it is not installed, and the digits ship with it: pip install 'lbopt[demo]'"
        raise MissingPackage("scikit-learn", reason=fix)
    file = pathlib.Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not file.is_file():
        fix = "the file with the digits is missing; install scikit-learn again"
        raise EnvironmentProblem(str(file), reason=fix, code="installation")
    return np.loadtxt(file, delimiter=",")
