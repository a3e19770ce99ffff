"""How far a step is from the fewest words that any way of cutting its layers would send."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from lbopt.plan import _bounds
from lbopt.plan._collectives import Collective
from lbopt.plan._count import Layer
from lbopt.plan._program import BYTES


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of one step of a network at one batch on one number of devices.

    Attributes:
      dp_limit: devices up to which cutting the batch alone is communication-optimal for every layer.
      dp_limit_of_half: the same for the layers that hold half of the weights, those with the largest limits.
      narrowest: path of the layer with the smallest limit.
      data_parallel_words: that a device receives if only the batch is cut.
      bound_words: of the best grid for each layer.
      moved_words: that a device receives by the compiled step's collectives.
    """

    dp_limit: int
    dp_limit_of_half: int
    narrowest: str
    data_parallel_words: float
    bound_words: float
    moved_words: float


def limits(
    layers: Iterable[Layer], global_batch_size: int, num_devices: int, found: Iterable[Collective]
) -> Limits:
    """Compare a step with its bound.

    Every layer is one nest of tokens, in and out (see `lbopt.plan._bounds`), which a step runs through three times: forward,
    and backward for the gradients of its inputs and of its weights. What a device has received once it keeps, and what it
    adds up it sends once, so a step receives twice the words of a pass.

    Args:
      layers: of one example.
      global_batch_size: examples of the step.
      num_devices: P.
      found: collectives of the compiled step.
    """
    whole = [_of_batch(layer, global_batch_size) for layer in layers]
    ranked = sorted(whole, key=lambda layer: -layer.dp_limit)
    half, sum_of_weights, so_far = 1, sum(layer.weights for layer in whole), 0
    for layer in ranked:
        so_far += layer.weights
        half = layer.dp_limit
        if 2 * so_far >= sum_of_weights:
            break
    alone = 2 * sum(layer.weights for layer in whole) * (1 - 1 / num_devices)
    return Limits(
        ranked[-1].dp_limit,
        half,
        ranked[-1].path,
        alone,
        2 * sum(fewest_words(layer, num_devices) for layer in whole),
        sum(map(words_received, found)),
    )


def _of_batch(layer: Layer, size: int) -> Layer:
    return dataclasses.replace(
        layer, flops=layer.flops * size, inputs=layer.inputs * size, outputs=layer.outputs * size
    )


def fewest_words(layer: Layer, num_devices: int) -> float:
    """Return the words that a device receives in the best grid over (tokens, in, out) for a layer of a whole batch.

    A convolution has inputs, weights and outputs as a dense layer, and as many tokens, ins and outs as make up their numbers.
    """
    inputs, weights, outputs = layer.inputs, layer.weights, layer.outputs
    loops = {
        "token": math.sqrt(inputs * outputs / weights),
        "in": math.sqrt(inputs * weights / outputs),
        "out": math.sqrt(outputs * weights / inputs),
    }
    return _bounds.grid(
        {loop: max(1.0, size) for loop, size in loops.items()}, _DENSE, num_devices
    ).words


_DENSE = {"input": ("token", "in"), "weight": ("in", "out"), "output": ("token", "out")}


def words_received(one: Collective) -> float:
    """Return the words that a device receives in an exchange: an all-reduce is a reduce-scatter and an all-gather."""
    words = one.num_bytes / BYTES[one.dtype]
    if one.op in ("collective-permute", "collective-broadcast"):
        return words
    words *= 1 - 1 / one.group_size
    return 2 * words if one.op == "all-reduce" else words
