"""The seconds of collectives, by a model of the torus that is stated here and not measured.

The compiler says what is exchanged, by which devices and (on TPU) by which rings, but not how long
it takes. The model: each link carries its rate in both directions at once, data are spread over all
links of the axes that a group of devices spans, and a phase costs a latency per hop.

    all-reduce                     2 B (1 - 1/n) / R + 2 h L
    reduce-scatter, all-gather       B (1 - 1/n) / R +   h L
    all-to-all                       B a / (8 l)     +   h L
    permutation                      B / l           +     L

B is the number of bytes of the whole array, n the number of chips, R the bytes per second out of a
chip, l those of one link, h the number of hops, L the seconds of a hop, and a the number of chips
along the longest axis, if that is a ring.

R counts two links for each axis that is a ring and one for a line, whose middle link carries
everything. Sums within a chip and copies between its cores count as free. Nothing overlaps with
computation.
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
      topology: The topology of the devices.
      devices: The devices in the order of the mesh.
      found: The collectives.
    """
    return sum(seconds_of(topology, devices, one) for one in found)


def seconds_of(topology: Topology, devices: Sequence[Any], one: Collective) -> float:
    """Return the seconds of all collectives of one kind."""
    link = topology.chip.link_bytes_per_second
    # The first pair of a permutation may be close together, but others are not.
    if one.op in ("collective-permute", "collective-broadcast"):
        return one.num_bytes / link + HOP_SECONDS * one.count

    spans = axes_spanned(topology, [devices[number] for number in one.group])
    if not spans:
        return 0.0
    rate = sum(2 * link if ring else link for _, ring in spans)
    hops = sum(chips // 2 if ring else chips - 1 for chips, ring in spans)
    chips = len({tuple(devices[number].coords) for number in one.group})
    from_others = one.num_bytes * (1 - 1 / chips)
    if one.op == "all-reduce":
        return 2 * from_others / rate + 2 * hops * HOP_SECONDS * one.count
    if one.op in ("reduce-scatter", "all-gather"):
        return from_others / rate + hops * HOP_SECONDS * one.count
    longest, ring = max(spans)  # all-to-all
    return one.num_bytes * longest / ((8 if ring else 4) * link) + hops * HOP_SECONDS * one.count
