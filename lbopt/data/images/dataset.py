"""Labelled images on disk: decoded, cut and augmented when they are asked for."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from lbopt.data.arrays import Reading
from lbopt.data.damaged import DAMAGED, DamagedCount, DamagedRecord
from lbopt.data.images import crops
from lbopt.data.images.augment import Policy
from lbopt.data.images.decode import UnreadableImage, read_size
from lbopt.data.records import Records, read_record
from lbopt.errors import EnvironmentProblem

_STREAM = 2
"""Keeps the counters of these draws clear of the others that have the same key (see `lbopt.data.masked`)."""


@dataclasses.dataclass(frozen=True)
class Preparation:
    """What happens to an image; the fields are those of `lbopt.config.DataConfig`."""

    image_size: int
    crop_sampling: str = "by_area"
    crop_area: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True
    interpolation: str = "bilinear"
    eval_fraction: float = 0.875
    policy: Policy = dataclasses.field(default_factory=Policy)
    space_to_depth: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of what comes out."""
        side = self.image_size
        return (side // 2, side // 2, 12) if self.space_to_depth else (side, side, 3)

    def for_training(self, data: bytes, rng: np.random.Generator) -> np.ndarray:
        """Return a random part of an image, perhaps mirrored and augmented, uint8 of `shape`."""
        height, width = read_size(data)
        box = crops.random_box(rng, height, width, self.crop_area, self.crop_ratio, self.crop_sampling)
        image = crops.train_crop(data, box, self.image_size, self.interpolation)
        if self.flip and rng.random() < 0.5:
            image = crops.mirrored(image)
        return self._folded(self.policy.apply(image, rng))

    def for_evaluation(self, data: bytes) -> np.ndarray:
        """Return the central part of an image, uint8 of `shape`."""
        return self._folded(crops.eval_crop(data, self.image_size, self.eval_fraction))

    def _folded(self, image: np.ndarray) -> np.ndarray:
        """Fold 2 x 2 pixels into channels as `lbopt.models.stem.space_to_depth` does, if asked."""
        if not self.space_to_depth:
            return image
        half = self.image_size // 2
        return image.reshape(half, 2, half, 2, 3).swapaxes(1, 2).reshape(self.shape)


class ImageDataset:
    """Examples with `image`, uint8 of `Preparation.shape`, and `label` int32, read and decoded on demand.

    A damaged record (unreadable, or with a label out of range) is counted. Training takes the next good one in its place;
    evaluation leaves it out: its `mask` is False.

    Args:
      records: with `image`, an encoded file, and `label`.
      num_classes: labels are below it.
      preparation: what happens to an image.
      damaged: the count.
      reading: how it is read.
    """

    def __init__(
        self,
        records: Records,
        num_classes: int,
        preparation: Preparation,
        damaged: DamagedCount,
        reading: Reading,
    ):
        self._records, self._num_classes, self._preparation = records, num_classes, preparation
        self.damaged, self.reading = damaged, reading

    def __len__(self) -> int:
        return len(self._records)

    def take(self, indices: np.ndarray) -> dict[str, Any]:
        """Return the examples at `indices` as evaluation sees them, with `mask`, False for damaged ones."""
        batch = self._empty(len(indices))
        batch["mask"] = np.ones(len(indices), bool)
        for place, index in enumerate(indices.tolist()):
            try:
                batch["image"][place], batch["label"][place] = self._read(index, None)
            except DamagedRecord as error:
                batch[DAMAGED].append((index, str(error)))
                batch["mask"][place] = False
        return batch

    def draw(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> dict[str, Any]:
        """Return the examples at `indices`, each as training sees it in its epoch."""
        batch = self._empty(len(indices))
        for place, (index, epoch) in enumerate(zip(indices.tolist(), epochs.tolist(), strict=True)):
            batch["image"][place], batch["label"][place] = self._next_good(index, epoch, seed, batch[DAMAGED])
        return batch

    def _empty(self, count: int) -> dict[str, Any]:
        return {
            "image": np.zeros((count, *self._preparation.shape), np.uint8),
            "label": np.zeros(count, np.int32),
            DAMAGED: [],
        }

    def _next_good(self, index: int, epoch: int, seed: int, damaged: list) -> tuple[np.ndarray, int]:
        for _ in range(len(self)):
            # A generator of its own for every example of every epoch: what is drawn depends on nothing else.
            rng = np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, 0, index, _STREAM]))
            try:
                return self._read(index, rng)
            except DamagedRecord as error:
                damaged.append((index, str(error)))
                index = (index + 1) % len(self)
        raise EnvironmentProblem(f"none of {len(self)} records can be used ({damaged[-1][1]}); mend the data set")

    def _read(self, index: int, rng: np.random.Generator | None) -> tuple[np.ndarray, int]:
        record = read_record(self._records, index, self._num_classes)
        try:
            if rng is None:
                return self._preparation.for_evaluation(record["image"]), int(record["label"])
            return self._preparation.for_training(record["image"], rng), int(record["label"])
        except UnreadableImage as error:
            raise DamagedRecord(f"its image is unreadable: {error}") from error
