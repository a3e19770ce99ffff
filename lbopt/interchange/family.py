"""What it takes to move networks of one family."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn

from lbopt import types
from lbopt.interchange.names import Described, Layer


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture of `transformers` and its Linen module.

    Attributes:
      architecture: name of its class.
      model_type: as `config.json` says it.
      table: every layer here and there.
      describes: whether a module is of this family.
      module: config.json -> module.
      config: (module, params, image_size) -> what config.json says of it.
      layers: (module, config.json) -> the layers that it has; nothing is made, so that they can be compared with a file first.
      also: other classes whose files have, or may have, all of its tensors.
      tied: tensor -> the one that it must equal; `transformers` writes the second only.
      ignored: regular expressions of tensors that hold nothing of the network.
    """

    architecture: str
    model_type: str
    table: tuple[Layer, ...]
    describes: Callable[[nn.Module], bool]
    module: Callable[[Mapping[str, Any]], nn.Module]
    config: Callable[[Any, types.Params, int | None], dict[str, Any]]
    layers: Callable[[Any, Mapping[str, Any]], Iterator[Described]]
    also: tuple[str, ...] = ()
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()
