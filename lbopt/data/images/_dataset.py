"""Labelled images on disk, decoded, cropped and augmented on demand."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lbopt.data._arrays import Reading
from lbopt.data._damaged import DAMAGED, DamagedCount, DamagedRecord
from lbopt.data._draws import Draws
from lbopt.data._records import Records, read_record
from lbopt.data.images import _crops
from lbopt.data.images._augment import Policy
from lbopt.data.images._boxes import random_box
from lbopt.data.images._decode import damaged_if_unreadable, read_size
from lbopt.data.images._layout import image_shape
from lbopt.errors import EnvironmentProblem

_STREAM = 2
"""Stream of these random numbers, see `Draws`."""


@dataclasses.dataclass(frozen=True)
class Preparation:
    """Crops and augmentation of an image. The fields are those of `lbopt.config.DataConfig`."""

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
        """Shape of a prepared image."""
        return image_shape(self.image_size, self.space_to_depth)

    def for_training(self, data: bytes, rng: np.random.Generator, out: np.ndarray) -> None:
        """Write a random crop of an image, mirrored and augmented as the fields say.

        Args:
          data: Bytes of the image file.
          rng: Source of the random choices.
          out: uint8 of `shape`, contiguous, for the result.
        """
        height, width = read_size(data)
        box = random_box(rng, height, width, self.crop_area, self.crop_ratio, self.crop_sampling)
        crop_is_result = not (self.policy.changes or self.space_to_depth)
        image = _crops.train_crop(
            data, box, self.image_size, self.interpolation, out if crop_is_result else None
        )
        if self.flip and rng.random() < 0.5:
            _crops.mirror(image)
        if not crop_is_result:
            self._write(self.policy.apply(image, rng), out)

    def for_evaluation(self, data: bytes, out: np.ndarray) -> None:
        """Write the central crop of an image into `out`, uint8 of `shape`, contiguous."""
        self._write(_crops.eval_crop(data, self.image_size, self.eval_fraction), out)

    def _write(self, image: np.ndarray, out: np.ndarray) -> None:
        """Copy an image, in the layout of `lbopt.models.space_to_depth` if the field says so."""
        if self.space_to_depth:
            half = self.image_size // 2
            out = out.reshape(half, half, 2, 2, 3).swapaxes(1, 2)
            image = image.reshape(out.shape)
        out[...] = image


def image_size_of(record: Mapping[str, Any]) -> tuple[int, int]:
    """Return (height, width) of a record's image, from the header of its file alone.

    Raises:
      DamagedRecord: If there is no header.
    """
    with damaged_if_unreadable(record):
        return read_size(record["image"])


class ImageDataset:
    """Examples that are read and decoded on demand.

    An example has `image`, uint8 of `Preparation.shape`, and `label` int32; `names` may change
    both names.

    A damaged record is unreadable, or its label is out of range. Training uses the next good record
    in its place; evaluation gives it `mask` False. Training does not notice damage below a crop.

    Args:
      records: Records with `image`, the bytes of a file, and `label`.
      num_classes: Number of classes; labels are below it.
      preparation: Crops and augmentation of the images.
      damaged: Count of the damaged records, kept by the reader of the batches.
      reading: Number of threads and processes that read.
      names: Names of the image and of the label in a batch.
    """

    def __init__(
        self,
        records: Records,
        num_classes: int,
        preparation: Preparation,
        damaged: DamagedCount,
        reading: Reading,
        names: tuple[str, str] = ("image", "label"),
    ):
        self._records = records
        self._num_classes = num_classes
        self._preparation = preparation
        self.damaged = damaged
        self.reading = reading
        self._names = names

    def __len__(self) -> int:
        return len(self._records)

    def take(self, indices: np.ndarray) -> dict[str, Any]:
        """Return the examples at `indices` for evaluation; `mask` is False for damaged records."""
        batch = self._unfilled(len(indices))
        image, label = self._names
        batch["mask"] = np.ones(len(indices), bool)
        for place, index in enumerate(indices.tolist()):
            try:
                batch[label][place] = self._read(index, None, batch[image][place])
            except DamagedRecord as error:
                batch[DAMAGED].append((index, str(error)))
                batch["mask"][place] = False
                batch[label][place] = 0
                batch[image][place] = 0
        return batch

    def draw(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> dict[str, Any]:
        """Return the examples at `indices`, augmented as training sees each in its epoch."""
        batch = self._unfilled(len(indices))
        image, label = self._names
        draws = Draws(_STREAM)
        for place, (index, epoch) in enumerate(zip(indices.tolist(), epochs.tolist(), strict=True)):
            rng_of = functools.partial(draws.at, seed, epoch)
            batch[label][place] = self._read_next_good(
                index, rng_of, batch[image][place], batch[DAMAGED]
            )
        return batch

    def _unfilled(self, count: int) -> dict[str, Any]:
        image, label = self._names
        return {
            image: np.empty((count, *self._preparation.shape), np.uint8),
            label: np.empty(count, np.int32),
            DAMAGED: [],
        }

    def _read_next_good(
        self,
        index: int,
        rng_of: Callable[[int], np.random.Generator],
        out: np.ndarray,
        damaged: list,
    ) -> int:
        """Write the image of the first good record from `index` on into `out`; return its label.

        Args:
          index: Number of the record.
          rng_of: Index of a record -> its random numbers.
          out: uint8, for the image.
          damaged: List of (index, reason) to which the damaged records are added.
        """
        for _ in range(len(self)):
            try:
                return self._read(index, rng_of(index), out)
            except DamagedRecord as error:
                damaged.append((index, str(error)))
                index = (index + 1) % len(self)
        reason = damaged[-1][1]
        fix = f"none of them can be used ({reason}); repair the data set"
        raise EnvironmentProblem("records", len(self), fix, code="damaged")

    def _read(self, index: int, rng: np.random.Generator | None, out: np.ndarray) -> int:
        """Write a record's image into `out`; return its label. `rng` is None in evaluation."""
        record = read_record(self._records, index, self._num_classes)
        with damaged_if_unreadable(record):
            if rng is None:
                self._preparation.for_evaluation(record["image"], out)
            else:
                self._preparation.for_training(record["image"], rng, out)
        return int(record["label"])
