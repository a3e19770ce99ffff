"""Error feedback: the part of a gradient that a compressor drops is sent in later steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lbopt import _scalars, stacks, types
from lbopt.aggregators import _aggregator, _compress
from lbopt.aggregators._aggregator import Aggregated, Aggregator, AggregatorState, Extra
from lbopt.aggregators._compress import Compressor
from lbopt.aggregators._group import Group
from lbopt.aggregators._wire_bytes import WireBytes, ring_bytes

_SEED = 0
"""Seed of the compressors' random numbers; every step and leaf has a key of its own."""


class Memory(NamedTuple):
    """The memory of the replicas: pytrees like the parameters with a leading axis of replicas.

    Fields that a rule does not keep are ().

    Attributes:
      error: e, the total of gradients that was not sent yet.
      estimate: h, the estimate of this replica's gradient that its messages add up to.
      velocity: v, the running mean of this replica's gradients.
    """

    error: Any = ()
    estimate: Any = ()
    velocity: Any = ()


def ef(compressor: Compressor, stacked: types.Stacked = None) -> Aggregator:
    r"""Error feedback: the part of a gradient that is not sent is added to the next one.

        u = C(e + g),   e <- e + g - u,   update = mean(u)

    If replicas have different minima, it stops at a distance from the minimum of their mean;
    `ef21` and `econtrol` do not.

    Args:
      compressor: `topk`, `randk`, `sign`, `cast` or `identity`.
      stacked: Leaves that are stacks of layers, each layer compressed alone (see
        `lbopt.stacked_paths`).

    Returns:
      An `Aggregator` that keeps one fp32 copy of the parameters per replica.

    Raises:
      UserError: If `compressor` is no compressor.

    >>> import jax, jax.numpy as jnp, lbopt, optax
    >>> from lbopt.aggregators import topk
    >>> tx = lbopt.aggregate(ef(topk(k=1)), optax.sgd(1.0), num_replicas=2)
    >>> grads = {"w": jnp.array([[4.0, 1.0], [4.0, 3.0]])}  # one row for each replica
    >>> updates, (memory, _) = jax.jit(tx.update)(grads, tx.init({"w": jnp.zeros(2)}))
    >>> print(updates["w"], memory.local.error[0][:, 1])  # what a later step sends
    [-4. -0.] [1. 3.]

    References:
      Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Karimireddy et al.,
      arXiv:1901.09847v1; in the form of Gao et al., ICLR 2024, arXiv:2311.05645.
    """
    _compress.require_compressor(compressor)

    def to_send(g: jax.Array, memory: Memory) -> jax.Array:
        return memory.error + g

    def remembered(g: jax.Array, memory: Memory, message: jax.Array) -> Memory:
        return Memory(error=memory.error + g - message)

    return _feedback(f"ef({compressor.name})", compressor, stacked, to_send, remembered, ("error",))


def ef21(
    compressor: Compressor,
    momentum: float = 0.0,
    dense_start: bool = False,
    stacked: types.Stacked = None,
) -> Aggregator:
    r"""EF21: each replica sends the compressed change of its gradient since its last estimate.

        v <- momentum v + (1 - momentum) g,   d = C(v - h),   h <- h + d,   update = mean(h)

    h is the replica's estimate, whose mean over replicas all of them hold.
    Without noise it converges to the minimum; with noisy gradients it stays at a floor that no
    number of replicas lowers. With `momentum` it is EF21-SGDM.

    Args:
      compressor: `topk`, `randk`, `sign`, `cast` or `identity`.
      momentum: Decay rate of the running mean v, in [0, 1); the first v is the first gradient.
      dense_start: Whether h starts at the first gradient, which is sent whole once, instead of 0.
      stacked: Leaves that are stacks of layers, each layer compressed alone.

    Returns:
      An `Aggregator` that keeps one fp32 copy of the parameters per replica (two with momentum),
      and one more.

    Raises:
      UserError: For an argument that is out of range.

    >>> import jax.numpy as jnp
    >>> from lbopt.aggregators import sign
    >>> aggregator = ef21(sign(), momentum=0.9)
    >>> aggregator, round(aggregator.wire_bytes({"w": jnp.zeros(10_000)}, 8).ratio, 2)
    (ef21(sign(), momentum=0.9), 7.97)

    References:
      Richtarik et al., EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
      Feedback, arXiv:2106.05203v1; Fatkhullin et al., Momentum Provably Improves Error Feedback!,
      Advances in Neural Information Processing Systems 36 (NeurIPS 2023), also arXiv:2305.15155.
    """
    _compress.require_compressor(compressor)
    _scalars.require_decay_rate("momentum", momentum)

    def averaged(g: jax.Array, memory: Memory, first: jax.Array) -> jax.Array:
        return jnp.where(first, g, momentum * memory.velocity + (1 - momentum) * g)

    def to_send(g: jax.Array, memory: Memory) -> jax.Array:
        return g - memory.estimate

    def remembered(g: jax.Array, memory: Memory, message: jax.Array) -> Memory:
        return Memory(estimate=memory.estimate + message, velocity=g if momentum else ())

    kept = ("estimate", "velocity") if momentum else ("estimate",)
    name = f"ef21({compressor.name}{f', momentum={momentum}' if momentum else ''})"
    average = averaged if momentum else None
    return _feedback(name, compressor, stacked, to_send, remembered, kept, average, dense_start)


def econtrol(
    compressor: Compressor,
    eta: float = 0.1,
    dense_start: bool = False,
    stacked: types.Stacked = None,
) -> Aggregator:
    r"""EControl: EF21 with error feedback of strength `eta`.

        d = C(eta e + g - h),   e <- e + g - h - d,   h <- h + d,   update = mean(h)

    with the old h in the second equation. eta = 0 is EF21. Without noise it is exact; with a good
    eta the noise of the mean is as small as in plain gradient descent.

    Args:
      compressor: `topk`, `randk`, `sign`, `cast` or `identity`.
      eta: Strength of the feedback, >= 0. In theory it is delta / 400; in practice it is tuned (one
        implementation has 0.001 as its default and 0.1 in its text).
      dense_start: Whether h starts at the first gradient, which is sent whole once, instead of 0.
      stacked: Leaves that are stacks of layers, each layer compressed alone.

    Returns:
      An `Aggregator` that keeps two fp32 copies of the parameters per replica, and one more.

    Raises:
      UserError: For an argument that is out of range.

    >>> from lbopt import Aggregate
    >>> from lbopt.aggregators import topk
    >>> Aggregate(econtrol(topk(0.01), eta=0.1), over=4).aggregator  # between slices of 4 devices
    econtrol(topk(0.01), eta=0.1)

    References:
      Gao, Islamov, Stich, EControl: Fast Distributed Optimization with Compression and Error
      Control, ICLR 2024, arXiv:2311.05645.
    """
    _compress.require_compressor(compressor)
    _scalars.require_at_least("eta", eta, 0)

    def to_send(g: jax.Array, memory: Memory) -> jax.Array:
        return g - memory.estimate + eta * memory.error

    def remembered(g: jax.Array, memory: Memory, message: jax.Array) -> Memory:
        estimate = memory.estimate + message
        return Memory(memory.error + (g - estimate), estimate)

    name = f"econtrol({compressor.name}, eta={eta:g})"
    return _feedback(
        name, compressor, stacked, to_send, remembered, ("error", "estimate"), None, dense_start
    )


def _feedback(
    name: str,
    compressor: Compressor,
    stacked: types.Stacked,
    to_send: Callable[[jax.Array, Memory], jax.Array],
    remembered: Callable[[jax.Array, Memory, jax.Array], Memory],
    kept: tuple[str, ...],
    averaged: Callable[[jax.Array, Memory, jax.Array], jax.Array] | None = None,
    dense_start: bool = False,
) -> Aggregator:
    """Build the aggregator of one rule.

    Args:
      name: Name of the rule, for messages.
      compressor: Compressor of the messages.
      stacked: Leaves that are stacks of layers, each layer compressed alone.
      to_send: (gradient, memory) -> array that is compressed.
      remembered: (gradient, old memory, decompressed message) -> new memory.
      kept: Fields of `Memory` that the rule keeps. With "estimate" the update is the mean of the
        estimates, which messages alone determine.
      averaged: (gradient, memory, whether it is the first step) -> array used as the gradient; None
        for the gradient itself.
      dense_start: Whether the estimate starts at the first gradient.
    """
    dense_start = _scalars.require_flag("dense_start", dense_start)
    mirrors = "estimate" in kept

    def init(params: types.Params, num_replicas: int) -> AggregatorState:
        memory = Memory(**{field: _aggregator.zero_rows(params, num_replicas) for field in kept})
        return AggregatorState(
            memory, _aggregator.zeros(params) if mirrors else (), jnp.zeros((), jnp.int32)
        )

    def update(
        rows: types.PyTree, state: AggregatorState, group: Group, extra: Extra
    ) -> Aggregated:
        del extra
        structure = jax.tree.structure(rows)
        layers = stacks.leading(stacked, jax.tree.map(lambda x: x[0], rows), name)
        leaves = jax.tree.leaves(rows)
        grads = [_aggregator.as_layers(x, axes) for x, axes in zip(leaves, layers, strict=True)]
        memories = _as_layers(state.local, grads)

        count = state.shared
        # One key for all replicas: their random places must agree for an all-reduce.
        root = group.key(_SEED, count)
        keys = [jax.random.fold_in(root, leaf) for leaf in range(len(leaves))]

        if averaged is not None:
            grads = [
                averaged(g, memory, count == 0) for g, memory in zip(grads, memories, strict=True)
            ]
        mean = [
            x.reshape(g.shape[1:])
            for x, g in zip(jax.tree.leaves(state.mirrored), grads if mirrors else [], strict=True)
        ]

        def step(
            memories: list[Memory], mean: list[jax.Array]
        ) -> tuple[list[Memory], list[jax.Array]]:
            wanted = [to_send(g, memory) for g, memory in zip(grads, memories, strict=True)]
            known = _compress.known_of(compressor, group, wanted, keys)
            messages = [compressor.compress(*one) for one in zip(wanted, known, strict=True)]
            received = _compress.mean(compressor, group, messages, known)

            # A replica's memory follows its own message, not the mean.
            own = [compressor.decompress(*one) for one in zip(messages, known, strict=True)]
            memories = [remembered(*one) for one in zip(grads, memories, own, strict=True)]
            # The mean of the estimates moves by the mean of the messages, so nothing else is sent.
            if mirrors:
                received = [a + b for a, b in zip(mean, received, strict=True)]
            return memories, received

        def whole(
            memories: list[Memory], mean: list[jax.Array]
        ) -> tuple[list[Memory], list[jax.Array]]:
            # A gradient that was sent whole is known exactly, so it is the estimate itself.
            started = [
                memory._replace(estimate=g) for g, memory in zip(grads, memories, strict=True)
            ]
            if averaged is not None:
                started = [
                    memory._replace(velocity=g) for g, memory in zip(grads, started, strict=True)
                ]
            return started, group.mean(grads)

        if dense_start and mirrors:
            memories, received = jax.lax.cond(count == 0, whole, step, memories, mean)
        else:
            memories, received = step(memories, mean)

        updates = [x.reshape(leaf.shape[1:]) for x, leaf in zip(received, leaves, strict=True)]
        updates = jax.tree.unflatten(structure, updates)
        local = _as_parameters(memories, leaves, structure)
        new_state = AggregatorState(local, updates if mirrors else (), count + 1)
        return Aggregated(_aggregator.cast_like(updates, rows), new_state, {})

    def sent(params: types.Params, num_replicas: int) -> WireBytes:
        layers = stacks.leading(stacked, params, name)
        shapes = [
            _aggregator.vectors(jnp.shape(p), axes)
            for p, axes in zip(jax.tree.leaves(params), layers, strict=True)
        ]
        sizes = [n for count, n in shapes for _ in range(count)]
        return WireBytes(
            compressor.wire_bytes(sizes, num_replicas), ring_bytes(params, num_replicas)
        )

    return Aggregator(name, init, update, sent, takes_parts=stacked is None)


def _as_layers(memory: Memory, grads: list[jax.Array]) -> list[Memory]:
    """Turn a memory of trees into a list of memories of [r, layers, *shape]."""

    def layers(field: Any) -> list[Any]:
        leaves = jax.tree.leaves(field)
        return (
            [x.reshape(g.shape) for x, g in zip(leaves, grads, strict=True)]
            if leaves
            else [()] * len(grads)
        )

    return [Memory(*of_leaf) for of_leaf in zip(*map(layers, memory), strict=True)]


def _as_parameters(memories: list[Memory], leaves: list[jax.Array], structure: Any) -> Memory:
    def tree(field: tuple[Any, ...]) -> Any:
        if any(isinstance(x, tuple) for x in field):
            return ()
        return jax.tree.unflatten(
            structure, [x.reshape(leaf.shape) for x, leaf in zip(field, leaves, strict=True)]
        )

    return Memory(*map(tree, zip(*memories, strict=True)))
