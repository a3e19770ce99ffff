"""Compressors: what a replica says of a vector in fewer bytes.

A compressor works along the last axis of [..., n], one message for each vector; what comes before are replicas and layers. The messages of
several leaves travel together, in one collective for each array of a message.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from lbopt.aggregators import wire
from lbopt.aggregators.group import Group, Packing, largest
from lbopt.aggregators.quantize import Format, quantize
from lbopt.aggregators.scaling import ceil_log2, ldexp
from lbopt.transforms import arguments

Route = Literal["sum", "gather", "exchange"]
Message = dict[str, jax.Array]


class Known(NamedTuple):
    """What all replicas know of a vector before anything is said of it.

    Attributes:
      key: for what is drawn, the same for all of them.
      largest: of all their numbers, [..., 1] fp32, where the compressor asks for it.
    """

    key: jax.Array
    largest: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Compressor:
    """How vectors of n numbers are said in fewer bytes.

    Attributes:
      name: for messages.
      compress: (x [..., n], known) -> message, arrays [..., m].
      decompress: (message, n, known) -> [..., n] fp32.
      route: "sum": messages add up, and an all-reduce does it. "gather": every replica sees every message. "exchange": a message is a
        `payload` [..., n] of few bits; each device sums a piece of all payloads in fp32.
      message_bytes: n -> bytes of the arrays that grow with n.
      delta: n -> the contraction, ||C(x) - x||^2 <= (1 - delta) ||x||^2 (in expectation, where it draws); of `cast`, for numbers that are
        normal in its format.
      scaled: whether it looks at `Known.largest`.
    """

    name: str
    compress: Callable[[jax.Array, Known], Message]
    decompress: Callable[[Message, int, Known], jax.Array]
    route: Route
    message_bytes: Callable[[int], float]
    delta: Callable[[int], float]
    scaled: bool = False

    def wire_bytes(self, sizes: list[int], num_replicas: int) -> float:
        """Return what a replica sends so that all know the mean of what all said.

        Args:
          sizes: n of each vector.
          num_replicas: that take part.
        """
        message = sum(self.message_bytes(n) for n in sizes)
        if self.route == "sum":
            return wire.reduced(message, num_replicas)
        if self.route == "gather":
            return wire.gathered(message, num_replicas)
        return wire.scattered(message + wire.FP32 * sum(sizes), num_replicas)


def identity() -> Compressor:
    """Return the compressor that says everything: with any error feedback, plain gradient descent."""
    return Compressor(
        "identity()",
        lambda x, known: {"payload": x},
        lambda message, n, known: message["payload"],
        "sum",
        lambda n: wire.FP32 * n,
        lambda n: 1.0,
    )


def topk(fraction: float | None = None, k: int | None = None) -> Compressor:
    """Return the compressor that keeps the k largest numbers of each leaf (of each layer of a stack), with their places.

    A message is k fp32 values and k int32 places. All replicas see all messages, R k of them: against a ring all-reduce it wins while
    8 R k < 8 n, that is while k / n < 1 / R.

    Args:
      fraction: k / n, in (0, 1]; k is rounded up.
      k: the number itself, instead.

    Raises:
      ValueError: unless exactly one of both is given, in its range.
    """
    count = _count(fraction, k)

    def compress(x: jax.Array, known: Known) -> Message:
        del known
        _, places = jax.lax.top_k(jnp.abs(x), count(x.shape[-1]))
        return {"values": jnp.take_along_axis(x, places, -1), "places": places.astype(jnp.int32)}

    def decompress(message: Message, n: int, known: Known) -> jax.Array:
        del known
        values, places = message["values"], message["places"]
        lead = values.shape[:-1]
        rows = jnp.arange(values.size // values.shape[-1])[:, None]
        flat = jnp.zeros((len(rows), n), values.dtype)
        flat = flat.at[rows, places.reshape(len(rows), -1)].set(values.reshape(len(rows), -1), unique_indices=True)
        return flat.reshape(*lead, n)

    name = f"topk({fraction})" if k is None else f"topk(k={k})"
    return Compressor(name, compress, decompress, "gather", lambda n: 8.0 * count(n), lambda n: count(n) / n)


def randk(fraction: float | None = None, k: int | None = None) -> Compressor:
    """Return the compressor that keeps k numbers of each leaf (of each layer of a stack), drawn anew at every step.

    All replicas draw the same places, so a message is k fp32 values and an all-reduce sums them: it wins by n / k on any number of
    replicas. Values are not blown up by n / k: in expectation it is a contraction.

    Args:
      fraction: k / n, in (0, 1]; k is rounded up.
      k: the number itself, instead.

    Raises:
      ValueError: unless exactly one of both is given, in its range.
    """
    count = _count(fraction, k)

    def places(n: int, key: jax.Array) -> jax.Array:
        return jax.lax.top_k(jax.random.bits(key, (n,), jnp.uint32), count(n))[1]

    def compress(x: jax.Array, known: Known) -> Message:
        return {"payload": x[..., places(x.shape[-1], known.key)]}

    def decompress(message: Message, n: int, known: Known) -> jax.Array:
        values, blank = message["payload"], jnp.zeros((*message["payload"].shape[:-1], n), message["payload"].dtype)
        return blank.at[..., places(n, known.key)].set(values, unique_indices=True)

    name = f"randk({fraction})" if k is None else f"randk(k={k})"
    return Compressor(name, compress, decompress, "sum", lambda n: 4.0 * count(n), lambda n: count(n) / n)


def sign() -> Compressor:
    """Return the compressor that keeps one bit a number: sign(x) mean|x|, of each leaf (of each layer of a stack).

    Zero counts as positive. All replicas see all messages, n / 8 bytes each: against a ring all-reduce it wins below 64 replicas.
    """

    def compress(x: jax.Array, known: Known) -> Message:
        del known
        return {"bits": _packed(x >= 0), "scale": jnp.abs(x).mean(-1, keepdims=True)}

    def decompress(message: Message, n: int, known: Known) -> jax.Array:
        del known
        return jnp.where(_unpacked(message["bits"], n), message["scale"], -message["scale"])

    return Compressor("sign()", compress, decompress, "gather", lambda n: -(-n // 8) + 4.0, lambda n: 1 / n)


def _packed(positive: jax.Array) -> jax.Array:
    """Pack bools [..., n] into bytes [..., ceil(n / 8)]; bit b of byte j is number b ceil(n / 8) + j, so that rows stay long."""
    length = -(-positive.shape[-1] // 8)
    padded = jnp.pad(positive, [(0, 0)] * (positive.ndim - 1) + [(0, 8 * length - positive.shape[-1])])
    rows = padded.reshape(*positive.shape[:-1], 8, length).astype(jnp.uint8)
    return (rows << jnp.arange(8, dtype=jnp.uint8)[:, None]).sum(-2, dtype=jnp.uint8)


def _unpacked(packed: jax.Array, n: int) -> jax.Array:
    rows = (packed[..., None, :] >> jnp.arange(8, dtype=jnp.uint8)[:, None]) & 1
    return rows.reshape(*packed.shape[:-1], -1)[..., :n] == 1


def cast(exponent_bits: int, mantissa_bits: int) -> Compressor:
    """Return the compressor that rounds to a format of few bits, at the largest power of two that all replicas' vectors allow.

    Each replica sends pieces of its numbers, in the narrowest dtype that holds the format, to the devices that sum them, and these send
    the fp32 sums to all.

    Args:
      exponent_bits: 2 to 8.
      mantissa_bits: 0 to 23.

    Raises:
      ValueError: naming the argument that is out of range.
    """
    to = Format(exponent_bits, mantissa_bits)
    dtype = to.carrier()

    def shift(known: Known) -> jax.Array:
        assert known.largest is not None
        return to.max_exponent - ceil_log2(known.largest)

    def compress(x: jax.Array, known: Known) -> Message:
        return {"payload": quantize(ldexp(x, shift(known)), to).astype(dtype)}

    def decompress(message: Message, n: int, known: Known) -> jax.Array:
        del n
        return ldexp(message["payload"].astype(jnp.float32), -shift(known))

    size = float(dtype.itemsize)
    name = f"cast({exponent_bits}, {mantissa_bits})"
    return Compressor(
        name, compress, decompress, "exchange", lambda n: size * n, lambda n: 1 - 4.0 ** -(mantissa_bits + 1), True
    )


def _count(fraction: float | None, k: int | None) -> Callable[[int], int]:
    """Return n -> k."""
    if (fraction is None) == (k is None):
        raise ValueError(f"fraction = {fraction!r}, k = {k!r}: give one of both")
    if k is not None:
        arguments.require_at_least("k", k, 1)
        wanted = int(k)
        return lambda n: min(n, wanted)
    part = fraction
    if not arguments.is_number(part) or part is None or not 0 < part <= 1:
        raise ValueError(f"fraction = {part!r}: give a number in (0, 1]")
    return lambda n: min(n, max(1, math.ceil(part * n - 1e-9)))


def known_of(compressor: Compressor, group: Group, vectors: list[jax.Array], keys: list[jax.Array]) -> list[Known]:
    """Return what all replicas know of each leaf's vectors [r, layers, n]; the largest numbers take a small all-reduce."""
    if not compressor.scaled:
        return [Known(key) for key in keys]
    return [Known(key, one) for key, one in zip(keys, largest(group, vectors), strict=True)]


def mean(
    compressor: Compressor, group: Group, messages: list[Message], sizes: list[int], known: list[Known]
) -> list[jax.Array]:
    """Return the mean over all replicas of what their messages say.

    Args:
      compressor: that made them.
      group: the replicas.
      messages: of each leaf, arrays [r, layers, m].
      sizes: n of each leaf.
      known: of each leaf, what was known when it was compressed.

    Returns:
      [layers, n] of each leaf, fp32 or wider.
    """
    if compressor.route == "gather":
        said = {name: _gathered(group, [message[name] for message in messages]) for name in messages[0]}
        each = [{name: arrays[leaf] for name, arrays in said.items()} for leaf in range(len(messages))]
        return [_sum(compressor, *one) / group.num_replicas for one in zip(each, sizes, known, strict=True)]
    if compressor.route == "sum":
        packing = Packing(messages)
        summed = packing.unpack(group.mean(packing.pack(messages)))
    else:
        packing = Packing(messages, group.num_devices)
        piece = group.exchange(packing.pack(messages)).astype(jnp.float32).sum(0) / group.num_replicas
        summed = packing.unpack(group.join(piece))
    return [compressor.decompress(*one) for one in zip(summed, sizes, known, strict=True)]


def _gathered(group: Group, arrays: list[jax.Array]) -> list[jax.Array]:
    packing = Packing(arrays)
    return packing.unpack(group.gather(packing.pack(arrays)))


def _sum(compressor: Compressor, messages: Message, n: int, known: Known) -> jax.Array:
    """Add up what the messages [R, layers, m] say, one replica after another: no more than two vectors are in memory."""
    layers = next(iter(messages.values())).shape[1]
    first = jax.eval_shape(lambda: compressor.decompress(jax.tree.map(lambda x: x[0], messages), n, known))
    zeros = jnp.zeros((layers, n), first.dtype)
    total, _ = jax.lax.scan(lambda sum, one: (sum + compressor.decompress(one, n, known), None), zeros, messages)
    return total
