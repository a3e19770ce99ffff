"""Random numbers of an example, independent of the reading process and of the order of reading."""

from __future__ import annotations

import numpy as np


class Draws:
    """Random numbers that depend on (seed, epoch, example) alone.

    One generator is set to the place where an example's numbers begin. NumPy takes far longer to
    make a new generator, because it asks the system for entropy first.

    Args:
      stream: Number that separates the random numbers of one purpose from those of others with the
        same seed. 0 belongs to the order of examples.

    References:
      Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011): Philox 4x64-10, keyed
      with (seed, epoch).

    >>> draws = Draws(stream=7)
    >>> first = draws.at(seed=0, epoch=2, example=5).random()
    >>> _ = draws.at(seed=0, epoch=3, example=5).random(3)
    >>> draws.at(seed=0, epoch=2, example=5).random() == first
    True
    """

    def __init__(self, stream: int):
        self._stream = stream
        self._generator = np.random.Generator(np.random.Philox(0))

    def at(self, seed: int, epoch: int, example: int) -> np.random.Generator:
        """Return the generator, set to the beginning of an example's numbers.

        It is the same object every time, so the next call changes it.
        """
        # An empty buffer (position 4) makes the first number that of the counter.
        self._generator.bit_generator.state = {
            "bit_generator": "Philox",
            "state": {"counter": (0, 0, example, self._stream), "key": (seed, epoch)},
            "buffer": (0, 0, 0, 0),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }
        return self._generator
