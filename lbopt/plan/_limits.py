"""The words that a step sends, compared with the fewest that any cut of its layers would send."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from lbopt.plan import _bounds
from lbopt.plan._collectives import Collective
from lbopt.plan._count import LayerSizes
from lbopt.plan._hlo_program import BYTES


@dataclasses.dataclass(frozen=True)
class Limits:
    """Words that a step of a network sends, and their bounds, for a batch size and device count.

    Attributes:
      dp_limit: The most devices for which cutting only the batch is communication-optimal for every
        layer.
      dp_limit_of_half: The most devices for which it is optimal for half of the weights, those of
        the layers with the largest limits.
      narrowest: Path of the layer with the smallest limit.
      data_parallel_words: Words that a device receives if only the batch is cut.
      bound_words: Words that a device receives with the best grid for each layer.
      moved_words: Words that a device receives in the compiled step's collectives.
    """

    dp_limit: int
    dp_limit_of_half: int
    narrowest: str
    data_parallel_words: float
    bound_words: float
    moved_words: float


def limits(
    layers: Iterable[LayerSizes],
    global_batch_size: int,
    num_devices: int,
    found: Iterable[Collective],
) -> Limits:
    """Compare a step with its bound.

    Every layer is a nest of the loops token, in and out (see `lbopt.plan._bounds`). A step runs
    through it three times: forward, and backward for the gradients of the inputs and of the
    weights. A device keeps the words that it has received, and sends each sum once, so a step
    receives twice the words of one pass.

    Args:
      layers: The layers, with the sizes for one example.
      global_batch_size: Number of examples in the step.
      num_devices: Number of devices.
      found: The collectives of the compiled step.
    """
    layers = [_of_batch(layer, global_batch_size) for layer in layers]
    num_weights = sum(layer.weights for layer in layers)

    # Add layers, the largest limits first, until they hold half of the weights.
    ranked = sorted(layers, key=lambda layer: -layer.dp_limit)
    half = 1
    so_far = 0
    for layer in ranked:
        so_far += layer.weights
        half = layer.dp_limit
        if 2 * so_far >= num_weights:
            break

    return Limits(
        dp_limit=ranked[-1].dp_limit,
        dp_limit_of_half=half,
        narrowest=ranked[-1].path,
        data_parallel_words=2 * num_weights * (1 - 1 / num_devices),
        bound_words=2 * sum(fewest_words(layer, num_devices) for layer in layers),
        moved_words=sum(map(words_received, found)),
    )


def _of_batch(layer: LayerSizes, size: int) -> LayerSizes:
    return dataclasses.replace(
        layer, flops=layer.flops * size, inputs=layer.inputs * size, outputs=layer.outputs * size
    )


def fewest_words(layer: LayerSizes, num_devices: int) -> float:
    """Return the words that a device receives with the best grid over (token, in, out).

    A convolution is treated as the dense layer with the same numbers of inputs, weights and
    outputs.

    Args:
      layer: The layer, with the sizes for a whole batch.
      num_devices: Number of devices.
    """
    inputs = layer.inputs
    weights = layer.weights
    outputs = layer.outputs
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
    """Return the words that a device receives in a collective.

    An all-reduce counts as a reduce-scatter and an all-gather.
    """
    words = one.num_bytes / BYTES[one.dtype]
    if one.op in ("collective-permute", "collective-broadcast"):
        return words
    words *= 1 - 1 / one.group_size
    return 2 * words if one.op == "all-reduce" else words
