"""`preprocessor_config.json`: how `transformers` prepares an image as lbopt's evaluation does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lbopt.interchange import _folders

PROCESSOR_FILE = "preprocessor_config.json"
_BICUBIC = 3
"""Pillow's number of the filter, `PIL.Image.Resampling.BICUBIC`."""


def image_processor(
    side: int,
    mean: Sequence[float],
    std: Sequence[float],
    fraction: float | None = None,
    num_channels: int = 3,
) -> str:
    """Return the text of `preprocessor_config.json` for images that are prepared as in evaluation.

    Of the processors of `transformers`, Perceiver's cuts out the central square before it resizes
    it, as lbopt does. The others resize the whole image first, which gives other pixels.

    Args:
      side: Side in pixels of the images that the network sees.
      mean: Mean of pixels in [0, 1]: one number, or one for each channel.
      std: Standard deviation of pixels in [0, 1], in the same form.
      fraction: Side of the central square over the shorter side of an image; None for images that
        are neither cropped nor resized.
      num_channels: Number of channels: 3, or 1 for grey images.

    >>> import json
    >>> json.loads(image_processor(224, (0.5,), (0.25,), 0.875))["crop_size"]
    {'height': 256.0, 'width': 256.0}
    """
    # The processor cuts out int(side / crop_size * shorter side) pixels.
    crop = side / (fraction or 1.0)
    fields: dict[str, Any] = {
        "image_processor_type": "PerceiverImageProcessor",
        "do_convert_rgb": num_channels == 3,
        "do_center_crop": fraction is not None,
        "crop_size": {"height": crop, "width": crop},
        "do_resize": fraction is not None,
        "size": {"height": side, "width": side},
        "resample": _BICUBIC,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": _of_each(mean, num_channels),
        "image_std": _of_each(std, num_channels),
    }
    return _folders.json_text(fields)


def _of_each(values: Sequence[float], count: int) -> list[float]:
    return list(values) if len(values) == count else [values[0]] * count
