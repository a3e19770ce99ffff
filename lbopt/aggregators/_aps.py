"""Auto-precision scaling (APS): gradients reduced in few bits, scaled by a power of 2 per layer."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from lbopt import _scalars, stacks, types
from lbopt.aggregators import _aggregator, _wire_bytes
from lbopt.aggregators._aggregator import Aggregated, Aggregator, AggregatorState, Extra
from lbopt.aggregators._group import Group, Shares, largest
from lbopt.aggregators._powers_of_two import ceil_log2, ldexp
from lbopt.aggregators._quantize import OVERFLOWS, ROUNDINGS, Format, Overflow, Rounding, quantize
from lbopt.aggregators._wire_bytes import WireBytes, ring_bytes
from lbopt.errors import require_choice

Accumulate = Literal["fp32", "same", "kahan"]
ACCUMULATIONS = ("fp32", "same", "kahan")
_SEED = 1
_UNROLL = 8
"""Number of replicas that are added between two writes of a sum."""


def aps(
    exponent_bits: int = 5,
    mantissa_bits: int = 2,
    accumulate: Accumulate = "fp32",
    shift: bool = True,
    overflow: Overflow = "inf",
    rounding: Rounding = "nearest",
    stacked: types.Stacked = None,
) -> Aggregator:
    r"""Reduce gradients in a format of few bits, with a power-of-two shift per layer.

        E = max over replicas of ceil(log2(R max|g|)),   s = 2^(exponent_bits - 1) - 1 - E
        q_i = Q(2^s g_i),   sum = Q(sum of q_i),   update = 2^-s sum / R

    The shift lets the sum reach, but not pass, the format's highest exponent. It is one less where
    numbers without a mantissa are rounded stochastically, which may double them. A layer that is
    zero everywhere is not shifted.

    Few bits travel. By an all-to-all each device gets the rounded slices of all replicas that it
    sums, in the narrowest dtype that holds the format. It sums them in the order of the replicas,
    and an all-gather sends the rounded sum to all. A format of less than 8 bits still takes 8.

    Args:
      exponent_bits: Bits of the exponent, 2 to 8.
      mantissa_bits: Bits of the mantissa, 0 to 23; (8, 23) rounds nothing.
      accumulate: "fp32" rounds the sum once; "same" rounds every partial sum; "kahan" does so with
        Kahan's compensation, each of whose operations is rounded.
      shift: Whether layers are shifted; False is the format alone, s = 0.
      overflow: Value of numbers beyond the largest (see `lbopt.float_quantize`).
      rounding: Rounding of gradients and of fp32 sums (see `lbopt.float_quantize`). "same" and
        "kahan" round partial sums to nearest.
      stacked: Leaves that are stacks of layers, each layer with a shift of its own (see
        `lbopt.stacked_paths`).

    Returns:
      An `Aggregator` whose state is a count. Gradients of any floating dtype are computed in fp32;
      updates have the dtype of the gradients.

    Raises:
      UserError: For an argument that is out of range.

    >>> import jax.numpy as jnp
    >>> aggregator = aps(exponent_bits=5, mantissa_bits=2)
    >>> aggregator.wire_bytes({"w": jnp.zeros(1000)}, 8).ratio  # against the mean in fp32
    3.9840637450199203

    Note:
      The published code rounds gradients before the sum only where it shifts. Here they are also
      rounded without a shift, since nothing else could travel in few bits. The published sums are
      those of "same" and "kahan"; there a layer of zeros becomes NaN.

    References:
      Han et al., Auto-Precision Scaling for Distributed Deep Learning, arXiv:1911.08907v3.
      drcut/CPD@ddd9a67c7599214a4061ae04b28387171d29d96a:CPDtorch/utils/dist_util.py, sum_gradients.
    """
    to = Format(exponent_bits, mantissa_bits)
    require_choice("accumulate", accumulate, ACCUMULATIONS)
    _scalars.require_flag("shift", shift)
    require_choice("overflow", overflow, OVERFLOWS)
    require_choice("rounding", rounding, ROUNDINGS)
    dtype = to.carrier(overflow)
    # Rounded up at random, a number without a mantissa may double, and the highest power of two is
    # then the largest number.
    highest = to.max_exponent - (1 if rounding == "stochastic" and mantissa_bits == 0 else 0)

    def draws(key: jax.Array, leaves: list[jax.Array]) -> list[Any]:
        """Return random bits for the leaves [r, ...] of one replica, however leaves are sent."""
        if rounding != "stochastic":
            return [None] * len(leaves)
        return [
            jax.random.bits(jax.random.fold_in(key, n), x.shape[1:], jnp.uint32)
            for n, x in enumerate(leaves)
        ]

    def init(params: types.Params, num_replicas: int) -> AggregatorState:
        del params, num_replicas
        return AggregatorState(shared=jnp.zeros((), jnp.int32))

    def shifts(grads: list[jax.Array], group: Group) -> list[jax.Array]:
        """Return s of each leaf, int32 [layers, 1, ...]."""
        known = largest(group, grads)
        return [jnp.where(x > 0, highest - ceil_log2(x * group.num_replicas), 0) for x in known]

    def update(
        rows: types.PyTree, state: AggregatorState, group: Group, extra: Extra
    ) -> Aggregated:
        del extra
        leaves, structure = jax.tree.flatten(rows)
        layers = stacks.leading(stacked, jax.tree.map(lambda x: x[0], rows), "aps")
        grads = [
            _aggregator.as_layers(x, axes).astype(jnp.float32)
            for x, axes in zip(leaves, layers, strict=True)
        ]

        key = group.key(_SEED, state.shared)
        if shift:
            by = shifts(grads, group)
            grads = [ldexp(g, s) for g, s in zip(grads, by, strict=True)]
        # A replica's random bits depend on its number, and not on the device that runs it.
        drawn = jax.vmap(lambda number: draws(jax.random.fold_in(key, number), grads))(
            group.numbers()
        )
        rounded = [
            quantize(g, to, overflow, noise).astype(dtype)
            for g, noise in zip(grads, drawn, strict=True)
        ]

        shares = Shares(rounded, group.num_devices)
        totals = [_added(group.exchange(x), to, overflow, accumulate) for x in shares.pack(rounded)]

        # Sums in fp32 are rounded, to travel in the format as the gradients did.
        if accumulate == "fp32":
            noises: list[Any] = [None] * len(totals)
            if rounding == "stochastic":
                # The key after those of the replicas is the same on all devices.
                last = draws(jax.random.fold_in(key, group.num_replicas), grads)
                noises = [group.shard(x[0]) for x in shares.pack([x[None] for x in last])]
            totals = [
                quantize(x, to, overflow, noise) for x, noise in zip(totals, noises, strict=True)
            ]
        sums = [
            x.astype(jnp.float32)
            for x in shares.unpack([group.join(x.astype(dtype)) for x in totals])
        ]
        if shift:
            sums = [ldexp(x, -s) for x, s in zip(sums, by, strict=True)]

        updates = [
            x.reshape(leaf.shape[1:]) / group.num_replicas
            for x, leaf in zip(sums, leaves, strict=True)
        ]
        updates = _aggregator.cast_like(jax.tree.unflatten(structure, updates), rows)
        return Aggregated(updates, AggregatorState(shared=state.shared + 1), {})

    def sent(params: types.Params, num_replicas: int) -> WireBytes:
        layers = stacks.leading(stacked, params, "aps")
        leaves = zip(jax.tree.leaves(params), layers, strict=True)
        vectors = (_aggregator.vectors(jnp.shape(p), axes)[0] for p, axes in leaves)
        maxima = sum(vectors) if shift else 0
        twice = 2 * _wire_bytes.scattered(
            dtype.itemsize * _wire_bytes.elements(params), num_replicas
        )
        return WireBytes(
            twice + _wire_bytes.reduced(_wire_bytes.FP32 * maxima, num_replicas),
            ring_bytes(params, num_replicas),
        )

    name = (
        f"aps({exponent_bits}, {mantissa_bits}, {accumulate!r}{'' if shift else ', shift=False'})"
    )
    return Aggregator(name, init, update, sent, takes_parts=stacked is None)


def _added(rows: jax.Array, to: Format, overflow: Overflow, accumulate: Accumulate) -> jax.Array:
    """Sum [R, ...] in the order of replicas; fp32 [...]."""
    zeros = jnp.zeros(rows.shape[1:], jnp.float32)

    def q(x: jax.Array) -> jax.Array:
        return quantize(x, to, overflow)

    def plain(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return total + x.astype(jnp.float32), None

    def same(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return q(total + x.astype(jnp.float32)), None

    def kahan(
        carry: tuple[jax.Array, jax.Array], x: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        total, lost = carry
        # Every operation is rounded, as an adder of this format would round it.
        y = q(x.astype(jnp.float32) - lost)
        after = q(total + y)
        return (after, q(q(after - total) - y)), None

    if accumulate == "kahan":
        return jax.lax.scan(kahan, (zeros, zeros), rows, unroll=_UNROLL)[0][0]
    return jax.lax.scan(same if accumulate == "same" else plain, zeros, rows, unroll=_UNROLL)[0]
