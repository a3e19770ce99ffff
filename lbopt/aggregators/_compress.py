"""Compressors: messages for gradients in fewer bytes.

A compressor takes gradients [r, layers, *shape] and makes one message for each layer on each
replica. The messages of several leaves are packed together: one collective carries each array of
the messages, or, if messages have the shape of their leaves, all leaves of one width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lbopt import _scalars
from lbopt.aggregators import _wire_bytes
from lbopt.aggregators._group import Group, Shares, largest, matrix_width
from lbopt.aggregators._powers_of_two import ceil_log2, ldexp
from lbopt.aggregators._quantize import Format, quantize
from lbopt.errors import UserError, brief

Route = Literal["sum", "gather", "exchange"]
Message = dict[str, jax.Array]


class Known(NamedTuple):
    """Facts about a leaf that all replicas know before they compress it.

    Attributes:
      shape: Shape of one layer.
      key: Random key of the leaf at this step, the same on all replicas.
      largest: Largest magnitude over all replicas, [layers, 1, ...] fp32; None unless the
        compressor is `scaled`.
    """

    shape: tuple[int, ...]
    key: jax.Array
    largest: jax.Array | None = None

    @property
    def size(self) -> int:
        """Number of elements of one layer."""
        return math.prod(self.shape)

    def flat(self, x: jax.Array) -> jax.Array:
        """Return [..., *shape] as [..., n]."""
        return x.reshape(*x.shape[: x.ndim - len(self.shape)], self.size)

    def shaped(self, x: jax.Array) -> jax.Array:
        """Return [..., n] as [..., *shape]."""
        return x.reshape(*x.shape[:-1], *self.shape)


@dataclasses.dataclass(frozen=True)
class Compressor:
    """A rule that encodes a layer of n numbers in fewer bytes.

    Attributes:
      name: Name of the compressor with its options.
      compress: (x [r, layers, *shape], known) -> message, arrays [r, layers, ...].
      decompress: (message, known) -> [..., layers, *shape] fp32.
      route: "sum" adds messages by an all-reduce. "gather" sends every message to every replica.
        "exchange" is for messages that are a `payload` [r, layers, *shape] of few bits: each device
        sums a share of all payloads in fp32.
      message_bytes: n -> bytes of the message of one layer.
      delta: n -> contraction, ||C(x) - x||^2 <= (1 - delta) ||x||^2, in expectation for random
        compressors; for `cast`, for numbers that are normal in its format.
      scaled: Whether the compressor reads `Known.largest`.
      sum: (messages [R, layers, ...] of all replicas, known) -> [layers, *shape] fp32, the sum of
        the decompressed messages; for "gather".

    >>> compressor = topk(0.01)
    >>> compressor.name, compressor.delta(10_000)
    ('topk(0.01)', 0.01)
    >>> compressor.wire_bytes([10_000], num_replicas=8)
    5600.0
    """

    name: str
    compress: Callable[[jax.Array, Known], Message]
    decompress: Callable[[Message, Known], jax.Array]
    route: Route
    message_bytes: Callable[[int], float]
    delta: Callable[[int], float]
    scaled: bool = False
    sum: Callable[[Message, Known], jax.Array] | None = None

    def wire_bytes(self, sizes: list[int], num_replicas: int) -> float:
        """Return the bytes that a device with one replica sends per step, as a float.

        Args:
          sizes: Number of elements of each layer.
          num_replicas: Number of replicas.
        """
        message = sum(self.message_bytes(n) for n in sizes)
        maxima = (
            _wire_bytes.reduced(_wire_bytes.FP32 * len(sizes), num_replicas) if self.scaled else 0.0
        )
        if self.route == "sum":
            return maxima + _wire_bytes.reduced(message, num_replicas)
        if self.route == "gather":
            return maxima + _wire_bytes.gathered(message, num_replicas)
        return maxima + _wire_bytes.scattered(message + _wire_bytes.FP32 * sum(sizes), num_replicas)


def require_compressor(value: Any) -> None:
    """Raise `UserError` unless the value is a `Compressor`."""
    if not isinstance(value, Compressor):
        fix = "give one of lbopt.aggregators, such as topk(0.01)"
        raise UserError("compressor", value, fix, code="type")


def identity() -> Compressor:
    """Return the compressor that sends every number in fp32 or wider, as gradient descent does.

    >>> identity().message_bytes(10_000), identity().delta(10_000)
    (40000, 1.0)
    """
    return Compressor(
        "identity()",
        lambda x, known: {"payload": x},
        lambda message, known: message["payload"],
        "sum",
        lambda n: _wire_bytes.FP32 * n,
        lambda n: 1.0,
    )


def topk(fraction: float | None = None, k: int | None = None) -> Compressor:
    """Return the compressor that keeps the k largest numbers of each leaf, or layer of a stack.

    A message is k fp32 values and k int32 places. All replicas get all messages, which is less than
    a ring all-reduce sends if 8 R k < 8 n, that is if k / n < 1 / R.

    Args:
      fraction: k / n, in (0, 1]; k is rounded up.
      k: Number of numbers, instead of `fraction`; >= 1.

    Returns:
      A `Compressor` of route "gather".

    Raises:
      UserError: Unless exactly one of the two is given, in its range.

    >>> compressor = topk(0.01)
    >>> compressor.message_bytes(10_000), compressor.route
    (800.0, 'gather')

    References:
      Stich et al., Sparsified SGD with Memory, arXiv:1809.07599v2.
    """
    count = _count(fraction, k)

    def compress(x: jax.Array, known: Known) -> Message:
        x = known.flat(x)
        _, places = jax.lax.top_k(jnp.abs(x), count(known.size))
        return {"values": jnp.take_along_axis(x, places, -1), "places": places.astype(jnp.int32)}

    def decompress(message: Message, known: Known) -> jax.Array:
        values = message["values"]
        places = message["places"]
        lead = values.shape[:-1]

        # The places of a message are distinct, so that a scatter may write them in any order.
        rows = jnp.arange(math.prod(lead), dtype=jnp.int32)[:, None]
        flat = jnp.zeros((len(rows), known.size), values.dtype)
        flat = flat.at[rows, places.reshape(len(rows), -1)].set(
            values.reshape(len(rows), -1), unique_indices=True
        )
        return known.shaped(flat.reshape(*lead, known.size))

    def sum(messages: Message, known: Known) -> jax.Array:
        """Add one replica's numbers after another's, in place."""
        layers = messages["values"].shape[1]
        first = known.size * jnp.arange(layers, dtype=jnp.int32)[:, None]

        def add(total: jax.Array, one: Message) -> tuple[jax.Array, None]:
            places = (first + one["places"]).reshape(-1)
            return total.at[places].add(one["values"].reshape(-1), unique_indices=True), None

        zeros = jnp.zeros(layers * known.size, messages["values"].dtype)
        return jax.lax.scan(add, zeros, messages)[0].reshape(layers, *known.shape)

    name = f"topk({fraction})" if k is None else f"topk(k={k})"
    return Compressor(
        name,
        compress,
        decompress,
        "gather",
        lambda n: 8.0 * count(n),
        lambda n: count(n) / n,
        sum=sum,
    )


def randk(fraction: float | None = None, k: int | None = None) -> Compressor:
    """Return the compressor that keeps k random numbers of each leaf, or layer of a stack.

    The places are sampled anew at every step, the same on all replicas, so a message is k fp32
    values, which an all-reduce sums: n / k times fewer bytes for any number of replicas. Values are
    not scaled by n / k, so in expectation it is a contraction.

    Args:
      fraction: k / n, in (0, 1]; k is rounded up.
      k: Number of numbers, instead of `fraction`; >= 1.

    Returns:
      A `Compressor` of route "sum".

    Raises:
      UserError: Unless exactly one of the two is given, in its range.

    >>> compressor = randk(k=100)
    >>> compressor.message_bytes(10_000), compressor.route
    (400.0, 'sum')

    References:
      Stich et al., Sparsified SGD with Memory, arXiv:1809.07599v2.
    """
    count = _count(fraction, k)

    # The places of the largest random bits are a sample without replacement. It has a fixed size,
    # as compiled programs need, and the key is the same on all replicas, so no places are sent.
    def places(n: int, key: jax.Array) -> jax.Array:
        return jax.lax.top_k(jax.random.bits(key, (n,), jnp.uint32), count(n))[1]

    def compress(x: jax.Array, known: Known) -> Message:
        return {"payload": known.flat(x)[..., places(known.size, known.key)]}

    def decompress(message: Message, known: Known) -> jax.Array:
        values = message["payload"]
        blank = jnp.zeros((*values.shape[:-1], known.size), values.dtype)
        return known.shaped(
            blank.at[..., places(known.size, known.key)].set(values, unique_indices=True)
        )

    name = f"randk({fraction})" if k is None else f"randk(k={k})"
    return Compressor(
        name, compress, decompress, "sum", lambda n: 4.0 * count(n), lambda n: count(n) / n
    )


def sign() -> Compressor:
    """Return the compressor that keeps one bit a number: sign(x) mean|x| of each leaf or layer.

    Zero counts as positive. All replicas get all messages, of n / 8 bytes each, which is less than
    a ring all-reduce sends below 64 replicas.

    Returns:
      A `Compressor` of route "gather".

    >>> sign().message_bytes(8000)  # 1,000 bytes of bits and one number in fp32
    1004.0

    References:
      Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes,
      arXiv:1901.09847v1.
    """

    def compress(x: jax.Array, known: Known) -> Message:
        axes = tuple(range(x.ndim - len(known.shape), x.ndim))
        return {"bits": _packed(x >= 0, known), "scale": jnp.abs(x).mean(axes, keepdims=True)}

    def decompress(message: Message, known: Known) -> jax.Array:
        return jnp.where(_unpacked(message["bits"], known), message["scale"], -message["scale"])

    def sum(messages: Message, known: Known) -> jax.Array:
        return decompress(messages, known).sum(0)

    # Of delta: ||C(x) - x||^2 = ||x||^2 - ||x||_1^2 / n, and ||x||_1 >= ||x||, with equality if
    # only one number is not zero.
    return Compressor(
        "sign()",
        compress,
        decompress,
        "gather",
        lambda n: -(-n // 8) + 4.0,
        lambda n: 1 / n,
        sum=sum,
    )


_BIT = np.arange(8, dtype=np.uint8)


def _packed(positive: jax.Array, known: Known) -> jax.Array:
    """Pack bools [..., *shape] into bytes [..., ceil(n / 8)], or of a matrix [..., m / 8, width].

    A matrix keeps its layout. Bit b of byte j is number b ceil(n / 8) + j.
    """
    lead = positive.shape[: positive.ndim - len(known.shape)]
    length = -(-known.size // 8)
    matrix = _eighths(known.shape)
    if not matrix:
        positive = jnp.pad(
            known.flat(positive), [(0, 0)] * len(lead) + [(0, 8 * length - known.size)]
        )
    eighths = positive.reshape(*lead, 8, *(matrix or (length,)))
    return (eighths.astype(jnp.uint8) << _bits(len(lead), eighths.ndim)).sum(
        len(lead), dtype=jnp.uint8
    )


def _unpacked(packed: jax.Array, known: Known) -> jax.Array:
    matrix = _eighths(known.shape)
    axis = packed.ndim - (2 if matrix else 1)
    bits = (jnp.expand_dims(packed, axis) >> _bits(axis, packed.ndim + 1)) & 1
    if matrix:
        return bits.reshape(*packed.shape[:axis], *known.shape) == 1
    return known.shaped(bits.reshape(*packed.shape[:axis], -1)[..., : known.size]) == 1


def _bits(axis: int, rank: int) -> np.ndarray:
    """Return the numbers of the eight bits of a byte along one axis of `rank`."""
    return _BIT.reshape(*[1] * axis, 8, *[1] * (rank - axis - 1))


def _eighths(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an eighth of a matrix's rows; () if the leaf is packed as one vector."""
    width = matrix_width(shape)
    height = math.prod(shape) // width if width else 1
    return () if height % 8 else (height // 8, width)


def cast(exponent_bits: int, mantissa_bits: int) -> Compressor:
    """Return the compressor that rounds to a format of few bits.

    Numbers are scaled by the largest power of two that all replicas' vectors allow. Each replica
    sends slices of its numbers, in the narrowest dtype that holds the format, to the devices that
    sum them, and these send the fp32 sums to all.

    Args:
      exponent_bits: Bits of the exponent, 2 to 8.
      mantissa_bits: Bits of the mantissa, 0 to 23.

    Returns:
      A `Compressor` of route "exchange".

    Raises:
      UserError: For an argument that is out of range.

    >>> cast(5, 2).message_bytes(10_000), cast(8, 7).message_bytes(10_000)
    (10000.0, 20000.0)
    """
    to = Format(exponent_bits, mantissa_bits)
    dtype = to.carrier()

    # All replicas know the largest magnitude, so they agree on the shift without sending it.
    def shift(known: Known) -> jax.Array:
        assert known.largest is not None
        return to.max_exponent - ceil_log2(known.largest)

    def compress(x: jax.Array, known: Known) -> Message:
        return {"payload": quantize(ldexp(x, shift(known)), to).astype(dtype)}

    def decompress(message: Message, known: Known) -> jax.Array:
        return ldexp(message["payload"].astype(jnp.float32), -shift(known))

    size = float(dtype.itemsize)
    name = f"cast({exponent_bits}, {mantissa_bits})"
    return Compressor(
        name,
        compress,
        decompress,
        "exchange",
        lambda n: size * n,
        lambda n: 1 - 4.0 ** -(mantissa_bits + 1),
        True,
    )


def _count(fraction: float | None, k: int | None) -> Callable[[int], int]:
    """Return n -> k."""
    if (fraction is None) == (k is None):
        fix = f"give either this or {{k}} (which is {brief(k)}), exactly one of them"
        raise UserError("fraction", fraction, fix, code="conflict", also=["k"])
    if k is not None:
        wanted = _scalars.whole("k", k)
        return lambda n: min(n, wanted)
    part = fraction
    if not _scalars.is_number(part) or part is None or not 0 < part <= 1:
        raise UserError("fraction", part, "give a number in (0, 1]")
    # In floating point 0.07 x 100 is above 7, and rounded up it would be 8.
    return lambda n: min(n, max(1, math.ceil(part * n - 1e-9)))


def known_of(
    compressor: Compressor, group: Group, leaves: list[jax.Array], keys: list[jax.Array]
) -> list[Known]:
    """Return the `Known` of each leaf [r, layers, *shape]; largest numbers take an all-reduce."""
    shapes = [x.shape[2:] for x in leaves]
    if not compressor.scaled:
        return [Known(*one) for one in zip(shapes, keys, strict=True)]
    return [Known(*one) for one in zip(shapes, keys, largest(group, leaves), strict=True)]


def mean(
    compressor: Compressor, group: Group, messages: list[Message], known: list[Known]
) -> list[jax.Array]:
    """Return the mean over all replicas of their decompressed messages.

    Args:
      compressor: Compressor that made the messages.
      group: The replicas.
      messages: One message per leaf, with arrays [r, layers, ...].
      known: The `Known` of each leaf that its compression used.

    Returns:
      One array per leaf, [layers, *shape] in fp32 or wider.
    """
    # The places of each replica's numbers differ, so no all-reduce can add such messages.
    if compressor.sum is not None:
        gathered = {
            name: _gathered(group, [message[name] for message in messages]) for name in messages[0]
        }
        each = [
            {name: arrays[leaf] for name, arrays in gathered.items()}
            for leaf in range(len(messages))
        ]
        return [compressor.sum(*one) / group.num_replicas for one in zip(each, known, strict=True)]
    if compressor.route == "sum":
        summed = group.mean(messages)
    else:
        shares = Shares(messages, group.num_devices)
        sums = [group.exchange(x).astype(jnp.float32).sum(0) for x in shares.pack(messages)]
        summed = shares.unpack([group.join(x / group.num_replicas) for x in sums])
    return [compressor.decompress(*one) for one in zip(summed, known, strict=True)]


def _gathered(group: Group, arrays: list[jax.Array]) -> list[jax.Array]:
    """Return the messages [R, layers, ...] of all replicas; matrices keep their layout."""
    shapes = [x.shape[1:] for x in arrays]
    arrays = [x if x.ndim > 3 else x.reshape(len(x), -1) for x in arrays]
    shares = Shares(arrays, 1)
    all_of_them = shares.unpack([group.gather(x) for x in shares.pack(arrays)])
    return [x.reshape(len(x), *shape) for x, shape in zip(all_of_them, shapes, strict=True)]
