"""scikit-learn's digits: 1,797 scans of handwritten digits, 8 x 8 pixels with 17 grey levels, that ship with the package."""

from __future__ import annotations

import functools
import importlib.util
import pathlib

import numpy as np

from lbopt.data._arrays import ArrayDataset, Splits
from lbopt.errors import EnvironmentProblem

NUM_CLASSES, SIDE = 10, 8
NUM_TRAIN, NUM_VALIDATION, NUM_TEST = 1024, 386, 387
_SPLIT_KEY = 1797  # any fixed number; changing it changes every published figure


@functools.cache
def load_digits(image_size: int | None = None) -> Splits:
    """Return the digits in a fixed random split: 1,024 to train, 386 to validate, 387 to test.

    The training set is a power of two so that the whole of it is a batch that any pod divides.

    Args:
      image_size: a multiple of 8: each pixel becomes a square, for networks with strides; None for 8.

    Returns:
      `Splits` with `image` [examples, image_size, image_size] fp32 in [0, 1] and `label` [examples] int32.

    Raises:
      EnvironmentProblem: if scikit-learn is not installed.
    """
    scans = _read()
    order = np.argsort(np.random.Philox(key=_SPLIT_KEY).random_raw(len(scans)), kind="stable")
    images, labels = np.split(scans[order], [SIDE * SIDE], axis=1)
    images, labels = (
        (images / 16).astype(np.float32).reshape(-1, SIDE, SIDE),
        labels[:, 0].astype(np.int32),
    )
    images = np.kron(images, np.ones((1, *[(image_size or SIDE) // SIDE] * 2), np.float32))
    edges = np.cumsum([NUM_TRAIN, NUM_VALIDATION])
    parts = zip(np.split(images, edges), np.split(labels, edges), strict=True)
    return Splits(*(ArrayDataset({"image": image, "label": label}) for image, label in parts))


def _read() -> np.ndarray:
    """Return [1797, 65]: pixels and label. Of scikit-learn only the file is read: importing it takes longer than a small run's first step."""
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise EnvironmentProblem(
            "data.name = 'digits' ships with scikit-learn, which is not installed: pip install 'lbopt[demo]'"
        )
    file = pathlib.Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not file.is_file():
        raise EnvironmentProblem(
            f"data.name = 'digits': {file} is missing; install scikit-learn anew"
        )
    return np.loadtxt(file, delimiter=",")
