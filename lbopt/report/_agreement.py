"""When a noise scale and a measured batch size count as in agreement."""

from __future__ import annotations

import math

WITHIN = 4.0
"""A noise scale agrees within this factor; batch sizes are factors of 2 or 4 apart."""


def disagrees(noise_scale: float, least: float, most: float) -> bool:
    """Return whether a noise scale is off by more than `WITHIN` for every size between bounds.

    Args:
      noise_scale: Gradient noise scale in examples; one that is not finite never disagrees.
      least: Measured batch size, or its lower bound.
      most: Measured batch size, or its upper bound; may be infinite.

    >>> disagrees(20, 100, 100), disagrees(20, 60, 100), disagrees(20, 60, math.inf)
    (True, False, False)
    """
    near = least / WITHIN <= noise_scale <= WITHIN * most
    return math.isfinite(noise_scale) and not near
