"""EfficientNet in lbopt and in `transformers`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from lbopt import types
from lbopt.errors import UserError, require, require_choice
from lbopt.interchange import _json_fields
from lbopt.interchange._family import Family
from lbopt.interchange._json_fields import (
    COUNT,
    COUNTS,
    INDICES,
    ODD_COUNTS,
    POSITIVE,
    RATE,
    STRIDES,
    Field,
)
from lbopt.interchange._names import (
    BATCH_NORM,
    CONV,
    DENSE,
    DENSE_AS_CONV,
    DerivedInt,
    Described,
    LayerNames,
)
from lbopt.models import EFFICIENTNET_STAGES, EfficientNet, Stage, symmetric_blocks

_OURS = "block{i}"
_THEIRS = "efficientnet.encoder.blocks.{i}"
TABLE = (
    LayerNames("stem_conv", "efficientnet.embeddings.convolution", CONV),
    LayerNames("stem_norm", "efficientnet.embeddings.batchnorm", BATCH_NORM),
    LayerNames(f"{_OURS}/expand_conv", f"{_THEIRS}.expansion.expand_conv", CONV),
    LayerNames(f"{_OURS}/expand_norm", f"{_THEIRS}.expansion.expand_bn", BATCH_NORM),
    LayerNames(f"{_OURS}/depthwise_conv", f"{_THEIRS}.depthwise_conv.depthwise_conv", CONV),
    LayerNames(f"{_OURS}/depthwise_norm", f"{_THEIRS}.depthwise_conv.depthwise_norm", BATCH_NORM),
    LayerNames(f"{_OURS}/squeeze_excite/reduce", f"{_THEIRS}.squeeze_excite.reduce", DENSE_AS_CONV),
    LayerNames(f"{_OURS}/squeeze_excite/expand", f"{_THEIRS}.squeeze_excite.expand", DENSE_AS_CONV),
    LayerNames(f"{_OURS}/project_conv", f"{_THEIRS}.projection.project_conv", CONV),
    LayerNames(f"{_OURS}/project_norm", f"{_THEIRS}.projection.project_bn", BATCH_NORM),
    LayerNames("head_conv", "efficientnet.encoder.top_conv", CONV),
    LayerNames("head_norm", "efficientnet.encoder.top_bn", BATCH_NORM),
    LayerNames("head", "classifier", DENSE),
)
FIELDS = (
    Field("width_coefficient", "width_coefficient", 2.0, POSITIVE),
    Field("depth_coefficient", "depth_coefficient", 3.1, POSITIVE),
    Field("depth_divisor", "depth_divisor", 8, COUNT),
    Field("squeeze_expansion_ratio", "squeeze_ratio", 0.25, POSITIVE),
    Field("depthwise_padding", "symmetric_blocks", (), INDICES),
    Field("batch_norm_eps", "batch_norm_epsilon", 1e-3, POSITIVE),
    # TensorFlow's momentum, as in lbopt. `transformers` passes it on to PyTorch, where it means
    # 1 - momentum.
    Field("batch_norm_momentum", "batch_norm_momentum", 0.99, RATE),
    Field("dropout_rate", "dropout_rate", 0.5, RATE),
    Field("drop_connect_rate", "stochastic_depth_rate", 0.2, RATE),
)
STAGE_FIELDS = (
    Field(
        "kernel_sizes", "kernel", tuple(stage.kernel for stage in EFFICIENTNET_STAGES), ODD_COUNTS
    ),
    Field("strides", "stride", tuple(stage.stride for stage in EFFICIENTNET_STAGES), STRIDES),
    Field(
        "expand_ratios",
        "expansion",
        tuple(stage.expansion for stage in EFFICIENTNET_STAGES),
        COUNTS,
    ),
    Field("out_channels", "width", tuple(stage.width for stage in EFFICIENTNET_STAGES), COUNTS),
    Field(
        "num_block_repeats", "depth", tuple(stage.depth for stage in EFFICIENTNET_STAGES), COUNTS
    ),
)
"""The stages' defaults are those of B0, and the coefficients' those of B7, as in `transformers`."""
FIXED = {"pooling_type": "mean"}
ACTIVATIONS = ("swish", "silu")
STEM_WIDTH = 32
HEAD_WIDTH = 1280
"""Widths before scaling, for which `transformers` has no fields."""


def _module(config: Mapping[str, Any]) -> EfficientNet:
    _json_fields.require_fixed(config, FIXED)
    require_choice("hidden_act", config.get("hidden_act", "swish"), ACTIVATIONS)
    _json_fields.get(config, "num_channels", 3, COUNT)

    network = EfficientNet(
        stages=_stages(config),
        stem_width=STEM_WIDTH,
        head_width=HEAD_WIDTH,
        num_classes=int(_json_fields.num_labels(config)),
        batch_norm_unbiased_var=True,  # as PyTorch keeps it
        **_json_fields.read(FIELDS, config),
    )

    blocks = sum(math.ceil(network.depth_coefficient * stage.depth) for stage in network.stages)
    padded = list(network.symmetric_blocks or ())
    require(
        all(number < blocks for number in padded),
        "depthwise_padding",
        padded,
        f"give numbers of blocks, below {blocks}",
        code="conflict",
    )
    return network


def _stages(config: Mapping[str, Any]) -> tuple[Stage, ...]:
    columns = _json_fields.read(STAGE_FIELDS, config)
    count = len(columns["width"])
    for field in STAGE_FIELDS:
        _json_fields.require_one_for_each(field.theirs, columns[field.ours], "out_channels", count)
    return tuple(
        Stage(**dict(zip(columns, values, strict=True)))
        for values in zip(*columns.values(), strict=True)
    )


def _config(module: EfficientNet, params: types.Params, image_size: int | None) -> dict[str, Any]:
    _json_fields.require_without_field(module, "stem_width", STEM_WIDTH)
    _json_fields.require_without_field(module, "head_width", HEAD_WIDTH)

    module = module.clone(symmetric_blocks=_symmetric_blocks(module, image_size))
    stages = [Stage(*stage) for stage in module.stages]
    columns = {
        field.theirs: [getattr(stage, field.ours) for stage in stages] for field in STAGE_FIELDS
    }
    return {
        **_json_fields.write(FIELDS, module),
        **columns,
        **FIXED,
        **_json_fields.labels(module.num_classes),
        "in_channels": [STEM_WIDTH, *columns["out_channels"][:-1]],
        "hidden_act": "swish",
        "hidden_dim": params["head"]["kernel"].shape[0],
        "num_channels": params["stem_conv"]["kernel"].shape[2],
        **({} if image_size is None else {"image_size": image_size}),
    }


def _symmetric_blocks(module: EfficientNet, image_size: int | None) -> tuple[int, ...]:
    """Return the numbers of the blocks that pad evenly, for images of one size.

    `transformers` stores these numbers, where lbopt derives them from the size of each image.
    """
    if module.symmetric_blocks is not None:
        return tuple(module.symmetric_blocks)
    if image_size is None:
        fix = "padding follows from it; give the side of the images that the network is for"
        raise UserError("image_size", None, fix, code="missing")
    fix = "transformers' stem pads only right and bottom, which fits even sides; give an even side"
    require(image_size % 2 == 0, "image_size", image_size, fix)
    return symmetric_blocks(module, image_size)


def _layers(module: EfficientNet, config: Mapping[str, Any]) -> Iterator[Described]:
    scaled = ("width_coefficient", "depth_divisor")
    depth = ("depth_coefficient", "num_block_repeats")
    before = DerivedInt(module.scaled(module.stem_width), *scaled)

    yield Described(
        "stem_conv", (3, 3, DerivedInt(config.get("num_channels", 3), "num_channels"), before)
    )
    yield Described("stem_norm", (before,))
    for number, block in enumerate(module.each_block()):
        inside = DerivedInt(before * block.expansion, "expand_ratios", *before.fields)
        # The width of the squeeze follows the block's input, not its expansion.
        squeeze = DerivedInt(
            max(1, int(before * module.squeeze_ratio)), "squeeze_expansion_ratio", *before.fields
        )
        width = DerivedInt(block.width, "out_channels", *scaled)
        kernel = DerivedInt(block.kernel, "kernel_sizes")

        if block.expansion != 1:
            yield Described(
                f"block{number}/expand_conv", (1, 1, before, inside), ("expand_ratios", *depth)
            )
            yield Described(f"block{number}/expand_norm", (inside,), ("expand_ratios", *depth))
        for name, shape in (
            ("depthwise", (kernel, kernel, 1, inside)),
            ("project", (1, 1, inside, width)),
        ):
            yield Described(f"block{number}/{name}_conv", shape, depth)
            yield Described(f"block{number}/{name}_norm", shape[-1:], depth)
        yield Described(f"block{number}/squeeze_excite/reduce", (inside, squeeze), depth)
        yield Described(f"block{number}/squeeze_excite/expand", (squeeze, inside), depth)
        before = width

    head = DerivedInt(module.scaled(module.head_width), *scaled)
    yield Described("head_conv", (1, 1, before, head))
    yield Described("head_norm", (head,))
    yield Described("head", (head, _json_fields.num_labels(config)))


FAMILY = Family(
    "EfficientNetForImageClassification",
    "efficientnet",
    TABLE,
    describes=lambda module: isinstance(module, EfficientNet),
    module=_module,
    config=_config,
    layers=_layers,
    ignored=(r".*\.num_batches_tracked",),
)
