"""The chips' clocks against their peaks."""

import pytest

from lbopt.plan._hardware import CHIPS

OPERATIONS = 2 * 128 * 128
"""A matrix unit multiplies and adds once in each of its places in a cycle."""


@pytest.mark.parametrize(
    ("generation", "matrix_units"), [("v2", 2), ("v3", 4), ("v4", 8), ("v5e", 4), ("v5p", 8)]
)
def test_the_peak_is_that_of_all_matrix_units_at_the_clock(generation, matrix_units):
    """Google Cloud's pages of each generation give the units of a core and the cores of a chip."""
    chip = CHIPS[generation]
    assert chip.flops == pytest.approx(matrix_units * OPERATIONS * chip.hertz, rel=0.005)
