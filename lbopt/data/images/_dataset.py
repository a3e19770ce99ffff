"""Labelled images on disk: decoded, cut and augmented when they are asked for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from lbopt.data._arrays import Reading
from lbopt.data._damaged import DAMAGED, DamagedCount, DamagedRecord
from lbopt.data._draws import Draws
from lbopt.data._records import Records, read_record
from lbopt.data.images import _crops
from lbopt.data.images._augment import Policy
from lbopt.data.images._decode import UnreadableImage, read_size
from lbopt.data.images._layout import image_shape
from lbopt.errors import EnvironmentProblem

_STREAM = 2
"""Of these draws; see `lbopt.data._draws`."""


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
        return image_shape(self.image_size, self.space_to_depth)

    def for_training(self, data: bytes, rng: np.random.Generator, out: np.ndarray) -> None:
        """Write a random part of an image, perhaps mirrored and augmented, into `out`, uint8 of `shape`, contiguous."""
        height, width = read_size(data)
        box = _crops.random_box(
            rng, height, width, self.crop_area, self.crop_ratio, self.crop_sampling
        )
        final = not (self.policy.changes or self.space_to_depth)
        image = _crops.train_crop(
            data, box, self.image_size, self.interpolation, out if final else None
        )
        if self.flip and rng.random() < 0.5:
            _crops.mirror(image)
        if not final:
            self._write(self.policy.apply(image, rng), out)

    def for_evaluation(self, data: bytes, out: np.ndarray) -> None:
        """Write the central part of an image into `out`, uint8 of `shape`, contiguous."""
        self._write(_crops.eval_crop(data, self.image_size, self.eval_fraction), out)

    def _write(self, image: np.ndarray, out: np.ndarray) -> None:
        """Copy, with 2 x 2 pixels folded into channels as `lbopt.models.space_to_depth` does, if asked."""
        if self.space_to_depth:
            half = self.image_size // 2
            out = out.reshape(half, half, 2, 2, 3).swapaxes(1, 2)
            image = image.reshape(out.shape)
        out[...] = image


class ImageDataset:
    """Examples with `image`, uint8 of `Preparation.shape`, and `label` int32, read and decoded on demand.

    A damaged record (unreadable, or with a label out of range) is counted. Training takes the next good one in its place;
    evaluation leaves it out: its `mask` is False. Training does not see damage below a crop.

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
        batch = self._unfilled(len(indices))
        batch["mask"] = np.ones(len(indices), bool)
        for place, index in enumerate(indices.tolist()):
            try:
                batch["label"][place] = self._read(index, None, batch["image"][place])
            except DamagedRecord as error:
                batch[DAMAGED].append((index, str(error)))
                batch["mask"][place], batch["label"][place], batch["image"][place] = False, 0, 0
        return batch

    def draw(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> dict[str, Any]:
        """Return the examples at `indices`, each as training sees it in its epoch."""
        batch, draws = self._unfilled(len(indices)), Draws(_STREAM)
        for place, (index, epoch) in enumerate(zip(indices.tolist(), epochs.tolist(), strict=True)):
            draws_of = functools.partial(draws.at, seed, epoch)
            batch["label"][place] = self._next_good(
                index, draws_of, batch["image"][place], batch[DAMAGED]
            )
        return batch

    def _unfilled(self, count: int) -> dict[str, Any]:
        return {
            "image": np.empty((count, *self._preparation.shape), np.uint8),
            "label": np.empty(count, np.int32),
            DAMAGED: [],
        }

    def _next_good(
        self,
        index: int,
        draws_of: Callable[[int], np.random.Generator],
        out: np.ndarray,
        damaged: list,
    ) -> int:
        for _ in range(len(self)):
            try:
                return self._read(index, draws_of(index), out)
            except DamagedRecord as error:
                damaged.append((index, str(error)))
                index = (index + 1) % len(self)
        raise EnvironmentProblem(
            f"none of {len(self)} records can be used ({damaged[-1][1]}); mend the data set"
        )

    def _read(self, index: int, rng: np.random.Generator | None, out: np.ndarray) -> int:
        """Write a record's image into `out`; return its label."""
        record = read_record(self._records, index, self._num_classes)
        try:
            if rng is None:
                self._preparation.for_evaluation(record["image"], out)
            else:
                self._preparation.for_training(record["image"], rng, out)
        except UnreadableImage as error:
            raise DamagedRecord(f"its image is unreadable: {error}") from error
        return int(record["label"])
