"""The layout of a network on the devices at hand: the same function, computed as suits them.

A TPU computes on 128 channels at a time, so layers of few channels are folded there, and the stem
of a ResNet reads 2 x 2 pixels at once. A CPU or a GPU gains nothing by it. Small CNNs write their
convolutions as products of patches, but not on a TPU, which has convolutions of its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from lbopt.config import AUTOMATIC_STEM, PATCHED, PHOTOGRAPHS, DataConfig, TrainConfig
from lbopt.errors import UserError
from lbopt.models import StatsScope
from lbopt.replicas import Replicas

_EXAMPLES = 8
"""Examples that are folded into one: 16 channels of EfficientNet's first block become 128."""
_SUBLANES = 8
"""Folded examples that fill a TPU's registers; with fewer the planned recipes gain nothing."""


def with_layout(config: TrainConfig, platform: str, num_devices: int | None = None) -> TrainConfig:
    """Return a config whose layout fields are chosen; fields that the user has set stay.

    Args:
      config: A validated config, of one phase.
      platform: Platform of the devices, "tpu" for instance.
      num_devices: Number of devices that share a batch; None if batches of several sizes use the
        same network, whose examples then are not folded.
    """
    on_tpu = platform == "tpu"
    found = config
    if config.model.name == "resnet":
        found = _with_stem(found, on_tpu)
    if config.model.fold_columns is None and config.model.name == "resnet":
        found = _with_model(found, fold_columns=on_tpu)
    if config.model.fold_examples is None and config.model.name == "efficientnet":
        pays = on_tpu and num_devices is not None and _can_fold_examples(config, num_devices)
        found = _with_model(found, fold_examples=_EXAMPLES if pays else 1)
    if config.model.patch_convolutions is None and config.model.name in PATCHED:
        found = _with_model(found, patch_convolutions=not on_tpu)
    if found.data.space_to_depth is None and _resizes(found.data):
        folded = on_tpu and found.model.stem == "space_to_depth" and _is_even(found.data)
        data = dataclasses.replace(found.data, space_to_depth=folded)
        found = dataclasses.replace(found, data=data)
    return found


def _with_stem(config: TrainConfig, on_tpu: bool) -> TrainConfig:
    """Return a config of a ResNet whose automatic stem is chosen."""
    data = config.data
    if config.model.stem != AUTOMATIC_STEM:
        return config
    pays = data.space_to_depth is None and on_tpu and _resizes(data) and _is_even(data)
    return _with_model(config, stem="space_to_depth" if data.space_to_depth or pays else "conv7")


def _with_model(config: TrainConfig, **changes: Any) -> TrainConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))


def _resizes(data: DataConfig) -> bool:
    """Return whether the host resizes the images, and so can fold their pixels."""
    return data.name in PHOTOGRAPHS and data.train_crop == "resized"


def _is_even(data: DataConfig) -> bool:
    """Return whether the side of the images is known and even."""
    return data.image_size is not None and data.image_size % 2 == 0


def _can_fold_examples(config: TrainConfig, num_devices: int) -> bool:
    """Return whether a device's examples, and the groups of batch norm, can be folded."""
    simulated = config.aggregator.replicas_per_device
    in_turn = config.parallel.num_microsteps * simulated
    examples = config.global_batch_size // in_turn
    if config.global_batch_size % (in_turn * num_devices * _EXAMPLES * _SUBLANES):
        return False
    here = Replicas(num_devices, simulated=simulated)
    try:
        StatsScope.parse(config.model.batch_norm_scope).view(here, examples, _EXAMPLES)
    except UserError:
        return False
    return True
