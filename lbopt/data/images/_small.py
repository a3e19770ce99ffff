"""Labelled images of one small size, all held in memory."""

from __future__ import annotations

import numpy as np

from lbopt.data._arrays import ArrayDataset
from lbopt.data._damaged import DamagedCount, DamagedRecord
from lbopt.data._draws import Draws
from lbopt.data._records import Records, read_record
from lbopt.data.images._augment import Policy
from lbopt.data.images._decode import damaged_if_unreadable, decode
from lbopt.errors import EnvironmentProblem

_STREAM = 3
"""Stream of these random numbers, see `Draws`."""
LARGEST_IN_MEMORY_BYTES = 2**31
"""Largest size of a split that is held in memory."""


class SmallImages(ArrayDataset):
    """Examples with images, uint8 [side, side] or [side, side, 3], and a label.

    Training uses random crops of the zero-padded images (He et al., arXiv 1512.03385v1, section
    4.2), and mirrors half of them.

    Args:
      arrays: Images and labels of all examples.
      padding: Pixels of padding on each side; 0 for no crops.
      flip: Whether half of the images are mirrored.
      policy: Augmentation of colour images.
      damaged: Count of the records that were skipped in loading.
      image: Name of the array of images.
    """

    def __init__(
        self,
        arrays: dict[str, np.ndarray],
        padding: int,
        flip: bool,
        policy: Policy,
        damaged: DamagedCount,
        image: str = "image",
    ):
        super().__init__(arrays)
        self._padding = padding
        self._flip = flip
        self._policy = policy
        self.damaged = damaged
        self._image = image
        self.same_in_every_epoch = not (padding or flip or policy.changes)

    def draw(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        """Return the examples at `indices`, augmented as training sees each in its epoch."""
        batch = self.take(indices)
        if self.same_in_every_epoch:
            return batch
        draws = Draws(_STREAM)
        examples = zip(batch[self._image], indices.tolist(), epochs.tolist(), strict=True)
        images = [
            self._augmented(image, draws.at(seed, epoch, index)) for image, index, epoch in examples
        ]
        return {**batch, self._image: np.stack(images)}

    def _augmented(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if self._padding:
            image = _padded_crop(image, self._padding, rng)
        if self._flip and rng.random() < 0.5:
            image = image[:, ::-1]
        return self._policy.apply(image, rng)


def _padded_crop(image: np.ndarray, padding: int, rng: np.random.Generator) -> np.ndarray:
    """Return an image moved by up to `padding` pixels, black beyond its edges."""
    padded = np.pad(image, [(padding, padding), (padding, padding), *[(0, 0)] * (image.ndim - 2)])
    top, left = rng.integers(2 * padding + 1, size=2)
    return padded[top : top + image.shape[0], left : left + image.shape[1]]


def load_image_arrays(
    records: Records, shape: tuple[int, ...], num_classes: int, damaged: DamagedCount
) -> dict[str, np.ndarray]:
    """Return `image` and `label` of all records that can be decoded.

    Args:
      records: Records with `image`, the bytes of a file, and `label`.
      shape: (height, width, channels) of every image. A single channel is dropped from the result.
      num_classes: Number of classes; labels are below it.
      damaged: Count of the damaged records, which are skipped.

    Raises:
      EnvironmentProblem: If too many records are damaged, or all.
    """
    images = []
    labels = []
    for index in range(len(records)):
        try:
            image, label = _read(records, index, shape, num_classes)
        except DamagedRecord as error:
            damaged.add(index, str(error))
            continue
        images.append(image)
        labels.append(label)
    if not images:
        fix = "none of them can be used; repair the data set"
        raise EnvironmentProblem("records", len(records), fix, code="damaged")
    return {"image": np.stack(images), "label": np.asarray(labels, np.int32)}


def _read(
    records: Records, index: int, shape: tuple[int, ...], num_classes: int
) -> tuple[np.ndarray, int]:
    record = read_record(records, index, num_classes)
    with damaged_if_unreadable(record):
        image = decode(record["image"])
    height, width, channels = shape
    if image.shape[:2] != (height, width):
        found = f"{image.shape[0]} x {image.shape[1]}"
        raise DamagedRecord(f"its image is {found}, not {height} x {width}")
    return (image[..., 0] if channels == 1 else image), int(record["label"])
