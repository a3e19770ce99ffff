"""Labelled images of one small size: all of them in memory."""

from __future__ import annotations

import numpy as np

from lbopt.data._arrays import ArrayDataset
from lbopt.data._damaged import DamagedCount, DamagedRecord
from lbopt.data._draws import Draws
from lbopt.data._records import Records, read_record
from lbopt.data.images._augment import Policy
from lbopt.data.images._decode import UnreadableImage, decode
from lbopt.errors import EnvironmentProblem

_STREAM = 3
"""Of these draws; see `lbopt.data._draws`."""
LARGEST_IN_MEMORY_BYTES = 2**31
"""Of a split in memory; a larger one is decoded on demand."""


class SmallImages(ArrayDataset):
    """Examples with `image` uint8 [side, side] or [side, side, 3] and `label` int32.

    Training cuts a random part out of the zero-padded image (He et al., arXiv 1512.03385, section 4.2) and mirrors half
    of them, if asked.

    Args:
      arrays: `image` and `label`.
      padding: pixels on each side; 0 for none.
      flip: mirror.
      policy: augmentation of images in colour.
      damaged: the count of records left out.
    """

    def __init__(
        self,
        arrays: dict[str, np.ndarray],
        padding: int,
        flip: bool,
        policy: Policy,
        damaged: DamagedCount,
    ):
        super().__init__(arrays)
        self._padding, self._flip, self._policy, self.damaged = padding, flip, policy, damaged
        self.same_in_every_epoch = not (padding or flip or policy.changes)

    def draw(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        """Return the examples at `indices`, each as training sees it in its epoch."""
        batch = self.take(indices)
        if self.same_in_every_epoch:
            return batch
        draws = Draws(_STREAM)
        examples = zip(batch["image"], indices.tolist(), epochs.tolist(), strict=True)
        images = [
            self._drawn(image, draws.at(seed, epoch, index)) for image, index, epoch in examples
        ]
        return {**batch, "image": np.stack(images)}

    def _drawn(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if self._padding:
            image = _padded_crop(image, self._padding, rng)
        if self._flip and rng.random() < 0.5:
            image = image[:, ::-1]
        return self._policy.apply(image, rng)


def _padded_crop(image: np.ndarray, padding: int, rng: np.random.Generator) -> np.ndarray:
    """Move an image by up to `padding` pixels; what comes in is black."""
    padded = np.pad(image, [(padding, padding), (padding, padding), *[(0, 0)] * (image.ndim - 2)])
    top, left = rng.integers(2 * padding + 1, size=2)
    return padded[top : top + image.shape[0], left : left + image.shape[1]]


def load_image_arrays(
    records: Records, shape: tuple[int, ...], num_classes: int, damaged: DamagedCount
) -> dict[str, np.ndarray]:
    """Decode all records of one size.

    Args:
      records: with `image`, an encoded file, and `label`.
      shape: (height, width, channels) of every image; one channel is left out.
      num_classes: labels are below it.
      damaged: counts records that cannot be used; they are left out.

    Raises:
      EnvironmentProblem: if too many of them cannot be used.
    """
    images, labels = [], []
    for index in range(len(records)):
        try:
            image, label = _read(records, index, shape, num_classes)
        except DamagedRecord as error:
            damaged.add(index, str(error))
            continue
        images.append(image)
        labels.append(label)
    if not images:
        raise EnvironmentProblem(f"none of {len(records)} records can be used; mend the data set")
    return {"image": np.stack(images), "label": np.asarray(labels, np.int32)}


def _read(
    records: Records, index: int, shape: tuple[int, ...], num_classes: int
) -> tuple[np.ndarray, int]:
    record = read_record(records, index, num_classes)
    try:
        image = decode(record["image"])
    except UnreadableImage as error:
        raise DamagedRecord(f"its image is unreadable: {error}") from error
    if image.shape[:2] != shape[:2]:
        raise DamagedRecord(
            f"its image is {image.shape[0]} x {image.shape[1]}, not {shape[0]} x {shape[1]}"
        )
    return (image[..., 0] if shape[2] == 1 else image), int(record["label"])
