"""How long devices talk: a model of the torus, stated and not measured.

The compiler says what is exchanged, by whom and (on TPU) by which rings, and nothing about time. Each link carries its rate
in both directions at once, data are spread over all links of the axes that a group of devices spans, and a phase costs a
latency per hop:

    all-reduce of B bytes:                2 B (1 - 1/n) / R + 2 h L      n chips, R bytes/s out of a chip, h hops, L seconds
    reduce-scatter, all-gather:             B (1 - 1/n) / R +   h L      B of the whole
    all-to-all:                             B a / (8 l)     +   h L      along the longest axis of a chips, l a link's rate (ring)
    permutation:                            B / l           +     L

R counts two links for every axis that is a ring, one for a line (whose middle link carries all). The cores of one chip add
up before and share what arrives, which is taken to be free. Nothing is taken to overlap with computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lbopt.plan._collectives import Collective
from lbopt.plan._hardware import HOP_SECONDS
from lbopt.plan._topology import Topology, axes_spanned


def seconds(topology: Topology, devices: Sequence[Any], found: Iterable[Collective]) -> float:
    """Return the seconds of all collectives of a step, one after another.

    Args:
      topology: of the devices.
      devices: of the mesh, in its order.
      found: what is exchanged.
    """
    return sum(seconds_of(topology, devices, one) for one in found)


def seconds_of(topology: Topology, devices: Sequence[Any], one: Collective) -> float:
    """Return the seconds of one kind of exchange, all of its `count`."""
    link = topology.chip.link_bytes_per_second
    if one.op in (
        "collective-permute",
        "collective-broadcast",
    ):  # somebody's pair is far apart, if not the first
        return one.num_bytes / link + HOP_SECONDS * one.count
    spans = axes_spanned(topology, [devices[number] for number in one.group])
    if not spans:
        return 0.0
    rate = sum(2 * link if ring else link for _, ring in spans)
    hops = sum(chips // 2 if ring else chips - 1 for chips, ring in spans)
    chips = len({tuple(devices[number].coords) for number in one.group})
    part = one.num_bytes * (1 - 1 / chips)
    if one.op == "all-reduce":
        return 2 * part / rate + 2 * hops * HOP_SECONDS * one.count
    if one.op in ("reduce-scatter", "all-gather"):
        return part / rate + hops * HOP_SECONDS * one.count
    longest, ring = max(spans)  # all-to-all
    return one.num_bytes * longest / ((8 if ring else 4) * link) + hops * HOP_SECONDS * one.count
