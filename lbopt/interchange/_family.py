"""The description of a family of networks that can be moved between lbopt and `transformers`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn

from lbopt import types
from lbopt.interchange._names import Described, LayerNames


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture of `transformers` and its Linen module.

    Attributes:
      architecture: Name of the class in `transformers`.
      model_type: Value of `model_type` in `config.json`.
      table: Every kind of layer, with its paths in lbopt and in PyTorch.
      describes: Function that tells whether a module belongs to this family.
      module: Function that builds the module that a `config.json` describes.
      config: Function of (module, params, image_size) that returns the fields of `config.json`.
      layers: Function of (module, config.json) that yields the layers and their shapes. It
        allocates nothing, so that they can be compared with a file first.
      also: Other classes whose files have all of the tensors, or may have them.
      applies: Function that tells whether a `config.json` of this architecture is of this family.
      tied: Tied tensor -> tensor that it must equal; `transformers` saves only the second.
      former: (Regular expression, replacement) of former names of tensors.
      ignored: Regular expressions of tensors that are not part of the network.
      factor: Function of (module, name of one of our variables) that returns its multiplier in
        `transformers`, for what the module has and `transformers` lacks.
      words: Name of the tensor of word embeddings, and the default of `vocab_size`; None for none.
      joined: Regular expression with two groups, of tensors that hold several of ours side by side
        on their last axis: A.B holds A.part.B of each part. "" for none.
      parts: Names of the parts of a joined tensor, in order.
    """

    architecture: str
    model_type: str
    table: tuple[LayerNames, ...]
    describes: Callable[[nn.Module], bool]
    module: Callable[[Mapping[str, Any]], nn.Module]
    config: Callable[[Any, types.Params, int | None], dict[str, Any]]
    layers: Callable[[Any, Mapping[str, Any]], Iterator[Described]]
    also: tuple[str, ...] = ()
    applies: Callable[[Mapping[str, Any]], bool] = lambda config: True
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    former: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    factor: Callable[[Any, str], float] = lambda module, name: 1.0
    words: tuple[str, int] | None = None
    joined: str = ""
    parts: tuple[str, ...] = ()
