"""A recording of the leaves that transforms choose in `init`, for `lbopt.summarize_masks`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from lbopt import types


class Choices(list[tuple[str, types.PyTree]]):
    """Pairs (argument, choice per leaf) that transforms made in `init`; equal to itself only."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


# JAX keys its caches by this value, and every recording has a `Choices` of its own, so `init` is
# traced anew inside a recording, with all that is jitted in it. Elsewhere the value is None.
_RECORDING = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def recorded_choices() -> Iterator[Choices]:
    """Collect the choices of transforms whose `init` runs in this thread inside the block.

    Outside such a block, and in every update, nothing is recorded.
    """
    choices = Choices()
    with _RECORDING(choices):
        yield choices


def record_choice(argument: str, choice: types.PyTree) -> None:
    """Add one choice to the recording around this `init`, if there is one.

    Args:
      argument: Name of the transform's argument, "weight_decay_mask" for instance.
      choice: Pytree like the parameters, with the argument's value for each leaf.
    """
    choices = _RECORDING.value
    if choices is not None:
        choices.append((argument, choice))
