"""An example's random numbers equal a new generator's, whatever was read before."""

import numpy as np
import pytest

from lbopt.data._draws import Draws

PLACES = [(0, 0, 0), (5, 1, 3), (2**32, 7, 2**40), (2**63 - 1, 0, 1)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stream", [0, 3])
def test_the_numbers_are_those_of_a_new_generator(place, stream):
    seed, epoch, example = place
    draws = Draws(stream)
    # This leaves half a word and part of a block in the generator.
    draws.at(1, 1, 1).integers(9, size=3, dtype=np.uint32)
    new = np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, 0, example, stream]))
    np.testing.assert_array_equal(
        draws.at(*place).bit_generator.random_raw(9), new.bit_generator.random_raw(9)
    )
    assert draws.at(*place).integers(9, dtype=np.uint32) == np.random.Generator(
        np.random.Philox(key=[seed, epoch], counter=[0, 0, example, stream])
    ).integers(9, dtype=np.uint32)


def test_places_have_numbers_of_their_own():
    words = [
        tuple(Draws(stream).at(*place).bit_generator.random_raw(8))
        for stream in (0, 1, 2)
        for place in [*PLACES, (0, 0, 1), (0, 1, 0), (1, 0, 0)]
    ]
    assert len({word for row in words for word in row}) == 8 * len(words)
