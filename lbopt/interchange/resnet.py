"""ResNet v1.5 here and in `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from lbopt import types
from lbopt.errors import require, require_choice
from lbopt.interchange import fields
from lbopt.interchange.family import Family
from lbopt.interchange.fields import COUNT, COUNTS, Field
from lbopt.interchange.names import BATCH_NORM, CONV, DENSE, Layer
from lbopt.models.resnet import ResNet

_OUR_BLOCK, _THEIR_BLOCK = "stage{s}_block{b}", "resnet.encoder.stages.{s}.layers.{b}"
_EMBEDDER = "resnet.embedder.embedder"
TABLE = (
    Layer("stem/conv", f"{_EMBEDDER}.convolution", CONV),
    Layer("stem/norm", f"{_EMBEDDER}.normalization", BATCH_NORM),
    Layer(f"{_OUR_BLOCK}/conv1", f"{_THEIR_BLOCK}.layer.0.convolution", CONV),
    Layer(f"{_OUR_BLOCK}/norm1", f"{_THEIR_BLOCK}.layer.0.normalization", BATCH_NORM),
    Layer(f"{_OUR_BLOCK}/conv2", f"{_THEIR_BLOCK}.layer.1.convolution", CONV),
    Layer(f"{_OUR_BLOCK}/norm2", f"{_THEIR_BLOCK}.layer.1.normalization", BATCH_NORM),
    Layer(f"{_OUR_BLOCK}/conv3", f"{_THEIR_BLOCK}.layer.2.convolution", CONV),
    Layer(f"{_OUR_BLOCK}/norm3", f"{_THEIR_BLOCK}.layer.2.normalization", BATCH_NORM),
    Layer(f"{_OUR_BLOCK}/shortcut_conv", f"{_THEIR_BLOCK}.shortcut.convolution", CONV),
    Layer(f"{_OUR_BLOCK}/shortcut_norm", f"{_THEIR_BLOCK}.shortcut.normalization", BATCH_NORM),
    Layer("head", "classifier.1", DENSE),
)
FIELDS = (
    Field("embedding_size", "stem_width", 64, COUNT),
    Field("hidden_sizes", "widths", (256, 512, 1024, 2048), COUNTS),
    Field("depths", "depths", (3, 4, 6, 3), COUNTS),
)
FIXED = {"hidden_act": "relu", "downsample_in_first_stage": False, "downsample_in_bottleneck": False}
LAYER_TYPES = {"bottleneck": True, "basic": False}
EPSILON = 1e-5
"""PyTorch's default, which `transformers` has no field for."""


def _module(config: Mapping[str, Any]) -> ResNet:
    fields.require_fixed(config, FIXED)
    layer_type = config.get("layer_type", "bottleneck")
    require_choice("layer_type", layer_type, LAYER_TYPES)
    attributes = fields.read(FIELDS, config)
    stages = len(attributes["widths"])
    require(len(attributes["depths"]) == stages, "depths", list(attributes["depths"]), f"give {stages}, one a stage")
    fields.get(config, "num_channels", 3, COUNT)
    return ResNet(
        bottleneck=LAYER_TYPES[layer_type],
        num_classes=fields.num_labels(config),
        batch_norm_unbiased_var=True,  # as PyTorch keeps it
        **attributes,
    )


def _config(module: ResNet, params: types.Params, image_size: int | None) -> dict[str, Any]:
    del image_size
    fix = (
        "transformers' stem is 7 x 7 with stride 2; only 'conv7' and 'space_to_depth' are that; use format safetensors"
    )
    require(module.stem != "conv3", "stem", module.stem, fix)
    fix = f"transformers' ResNet has {EPSILON} and no field for it; use format safetensors"
    require(module.batch_norm_epsilon == EPSILON, "batch_norm_epsilon", module.batch_norm_epsilon, fix)
    return {
        **fields.write(FIELDS, module),
        **FIXED,
        **fields.labels(module.num_classes),
        "layer_type": "bottleneck" if module.bottleneck else "basic",
        "num_channels": params["stem"]["conv"]["kernel"].shape[2],
    }


def _example(config: Mapping[str, Any]) -> jax.ShapeDtypeStruct:
    side = _module(config).total_stride
    return jax.ShapeDtypeStruct((1, side, side, config.get("num_channels", 3)), jnp.float32)


FAMILY = Family(
    "ResNetForImageClassification",
    "resnet",
    TABLE,
    describes=lambda module: isinstance(module, ResNet),
    module=_module,
    config=_config,
    example=_example,
    ignored=(r".*\.num_batches_tracked",),
)
