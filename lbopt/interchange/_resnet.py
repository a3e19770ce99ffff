"""ResNet v1.5 in lbopt and in `transformers`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lbopt import types
from lbopt.errors import require, require_choice
from lbopt.interchange import _json_fields
from lbopt.interchange._family import Family
from lbopt.interchange._json_fields import COUNT, COUNTS, Field
from lbopt.interchange._names import BATCH_NORM, CONV, DENSE, DerivedInt, Described, LayerNames
from lbopt.models import ResNet

_OUR_BLOCK = "stage{s}_block{b}"
_THEIR_BLOCK = "resnet.encoder.stages.{s}.layers.{b}"
_EMBEDDER = "resnet.embedder.embedder"
TABLE = (
    LayerNames("stem/conv", f"{_EMBEDDER}.convolution", CONV),
    LayerNames("stem/norm", f"{_EMBEDDER}.normalization", BATCH_NORM),
    LayerNames(f"{_OUR_BLOCK}/conv1", f"{_THEIR_BLOCK}.layer.0.convolution", CONV),
    LayerNames(f"{_OUR_BLOCK}/norm1", f"{_THEIR_BLOCK}.layer.0.normalization", BATCH_NORM),
    LayerNames(f"{_OUR_BLOCK}/conv2", f"{_THEIR_BLOCK}.layer.1.convolution", CONV),
    LayerNames(f"{_OUR_BLOCK}/norm2", f"{_THEIR_BLOCK}.layer.1.normalization", BATCH_NORM),
    LayerNames(f"{_OUR_BLOCK}/conv3", f"{_THEIR_BLOCK}.layer.2.convolution", CONV),
    LayerNames(f"{_OUR_BLOCK}/norm3", f"{_THEIR_BLOCK}.layer.2.normalization", BATCH_NORM),
    LayerNames(f"{_OUR_BLOCK}/shortcut_conv", f"{_THEIR_BLOCK}.shortcut.convolution", CONV),
    LayerNames(f"{_OUR_BLOCK}/shortcut_norm", f"{_THEIR_BLOCK}.shortcut.normalization", BATCH_NORM),
    LayerNames("head", "classifier.1", DENSE),
)
FIELDS = (
    Field("embedding_size", "stem_width", 64, COUNT),
    Field("hidden_sizes", "widths", (256, 512, 1024, 2048), COUNTS),
    Field("depths", "depths", (3, 4, 6, 3), COUNTS),
)
FIXED = {
    "hidden_act": "relu",
    "downsample_in_first_stage": False,
    "downsample_in_bottleneck": False,
}
LAYER_TYPES = {"bottleneck": True, "basic": False}
EPSILON = 1e-5
"""PyTorch's default; `transformers` has no field for it."""


def _module(config: Mapping[str, Any]) -> ResNet:
    _json_fields.require_fixed(config, FIXED)
    layer_type = config.get("layer_type", "bottleneck")
    require_choice("layer_type", layer_type, LAYER_TYPES)
    attributes = _json_fields.read(FIELDS, config)
    widths = attributes["widths"]
    _json_fields.require_one_for_each("depths", attributes["depths"], "hidden_sizes", len(widths))

    bottleneck = LAYER_TYPES[layer_type]
    require(
        min(widths) >= 4 or not bottleneck,
        "hidden_sizes",
        list(widths),
        "a bottleneck is a quarter as wide; give widths of at least 4, or layer_type basic",
        code="conflict",
    )
    _json_fields.get(config, "num_channels", 3, COUNT)
    return ResNet(
        bottleneck=bottleneck,
        num_classes=int(_json_fields.num_labels(config)),
        batch_norm_unbiased_var=True,  # as PyTorch keeps it
        **attributes,
    )


def _config(module: ResNet, params: types.Params, image_size: int | None) -> dict[str, Any]:
    del image_size
    fix = (
        "transformers' stem is 7 x 7 with stride 2, as 'conv7' and 'space_to_depth' are; use "
        "format safetensors"
    )
    require(module.stem != "conv3", "stem", module.stem, fix, code="choice")
    _json_fields.require_without_field(module, "batch_norm_epsilon", EPSILON)
    return {
        **_json_fields.write(FIELDS, module),
        **FIXED,
        **_json_fields.labels(module.num_classes),
        "layer_type": "bottleneck" if module.bottleneck else "basic",
        "num_channels": params["stem"]["conv"]["kernel"].shape[2],
    }


def _layers(module: ResNet, config: Mapping[str, Any]) -> Iterator[Described]:
    before = _json_fields.sizes(FIELDS, module)["stem_width"]
    channels = DerivedInt(config.get("num_channels", 3), "num_channels")
    yield Described("stem/conv", (7, 7, channels, before))
    yield Described("stem/norm", (before,))

    for stage, (depth, wide) in enumerate(zip(module.depths, module.widths, strict=True)):
        width = DerivedInt(wide, "hidden_sizes")
        inside = DerivedInt(wide // 4, "hidden_sizes")
        for number in range(depth):
            block = f"stage{stage}_block{number}"
            shapes = [(3, 3, before, width), (3, 3, width, width)]
            if module.bottleneck:
                shapes = [(1, 1, before, inside), (3, 3, inside, inside), (1, 1, inside, width)]

            for conv, shape in enumerate(shapes, 1):
                yield Described(f"{block}/conv{conv}", shape, ("depths",))
                yield Described(f"{block}/norm{conv}", shape[-1:], ("depths",))
            # A block has a shortcut if it halves the sides, or changes the width.
            if number == 0 and (stage > 0 or before != width):
                because = ("depths", "hidden_sizes", *before.fields)
                yield Described(f"{block}/shortcut_conv", (1, 1, before, width), because)
                yield Described(f"{block}/shortcut_norm", (width,), because)
            before = width

    yield Described("head", (before, _json_fields.num_labels(config)))


FAMILY = Family(
    "ResNetForImageClassification",
    "resnet",
    TABLE,
    describes=lambda module: isinstance(module, ResNet),
    module=_module,
    config=_config,
    layers=_layers,
    ignored=(r".*\.num_batches_tracked",),
)
