"""Text for language models: windows of tokens, and the tokens that follow them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from lbopt.data._arrays import ArrayDataset, Reading
from lbopt.data.text._pieces import SEP
from lbopt.data.text._wordpiece import Document
from lbopt.errors import require


def join_documents(documents: Iterable[Document], separator: int = SEP) -> np.ndarray:
    """Return the tokens of all documents [tokens] int32, [SEP] (or another id) before each and after the last."""
    end = np.asarray([separator], np.int32)
    return np.concatenate(
        [end, *(part for document in documents for part in (document.tokens, end))]
    )


def make_windows(text: Sequence[Document] | np.ndarray, sequence_length: int) -> ArrayDataset:
    """Cut text into windows that follow each other; every window is an example of its own.

    No state is carried from one window to the next, so a model sees less of the text before the first tokens of a window.
    Tokens at the end that do not fill a window are left out.

    Args:
      text: documents, or the tokens of all of them.
      sequence_length: tokens of a window.

    Returns:
      `tokens` and `next_tokens` [windows, sequence_length] int32.

    Raises:
      UserError: if the text does not fill one window.
    """
    text = text if isinstance(text, np.ndarray) else join_documents(text)
    count = (len(text) - 1) // sequence_length
    require(
        count > 0,
        "config.data.sequence_length",
        sequence_length,
        f"a part of the text has {len(text) - 1} tokens; use windows of at most that",
    )
    shape = (count, sequence_length)
    used = count * sequence_length
    return ArrayDataset(
        {"tokens": text[:used].reshape(shape), "next_tokens": text[1 : used + 1].reshape(shape)}
    )


class Lanes:
    """Text for truncated back-propagation through time: each lane is read from its beginning to its end.

    The text is cut into `num_lanes` contiguous lanes of equal length. Step s reads the tokens [s T, (s + 1) T) of every lane,
    T = `sequence_length`, so that the state a model has after step s is the one to begin step s + 1 with. Example
    s * num_lanes + lane is what a lane reads in step s: in natural order, a global batch of `num_lanes` examples is one step,
    and row r of every batch is lane r. Every window is a full one: tokens at the end of the text that would not fill one in
    every lane are left out.

    An example has `tokens` and `next_tokens` [sequence_length] int32, and `is_first` bool: the carried state is to be zero,
    because a pass over the text begins.

    Args:
      text: [tokens], any integers; it may lie on disk.
      num_lanes: the global batch.
      sequence_length: tokens of a window.

    Attributes:
      num_lanes: see above.
      num_steps: of a pass.
      num_left_out: tokens at the end of the text that are not read.

    Raises:
      UserError: if there is not one window for each lane.

    References:
      Zaremba et al., Recurrent Neural Network Regularization, arXiv 1409.2329, section 4.1: the final hidden states of a
      minibatch are the initial ones of the next.
    """

    reading = Reading(in_order=True)

    def __init__(self, text: np.ndarray, num_lanes: int, sequence_length: int):
        needed = num_lanes * sequence_length + 1
        require(
            len(text) >= needed,
            "config.global_batch_size",
            num_lanes,
            f"so many lanes of config.data.sequence_length = {sequence_length} need {needed} tokens, and a part of the text "
            f"has {len(text)}; lower one of the two",
        )
        self._text, self._length, self.num_lanes = text, sequence_length, num_lanes
        self.num_steps = (len(text) - 1) // (num_lanes * sequence_length)
        self.num_left_out = len(text) - 1 - len(self) * sequence_length

    def __len__(self) -> int:
        return self.num_steps * self.num_lanes

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the examples at `indices` as one batch."""
        step, lane = np.divmod(indices, self.num_lanes)
        start = (lane * self.num_steps + step) * self._length
        window = self._text[start[:, None] + np.arange(self._length + 1)].astype(np.int32)
        return {"tokens": window[:, :-1], "next_tokens": window[:, 1:], "is_first": step == 0}

    def draw(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        """Return the examples at `indices` as one batch, whatever the epoch."""
        del epochs, seed
        return self.take(indices)


class EvalLanes:
    """Text that is scored with a state carried through it, every token but the first exactly once.

    In how many lanes it is read, evaluation decides. A lane begins without a state, so that more of them make a perplexity
    a little worse; one lane is the definition.

    Args:
      text: [tokens] int32.
      sequence_length: tokens that are read at a time.

    Raises:
      UserError: if there is nothing to predict.
    """

    reading = Reading(in_order=True)

    def __init__(self, text: np.ndarray, sequence_length: int):
        require(
            len(text) >= 2,
            "config.data.name",
            len(text),
            "a part of the text has fewer than two tokens; use more text",
        )
        self._text, self._length = text, sequence_length

    def __len__(self) -> int:
        return -(-(len(self._text) - 1) // self._length)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return windows by number in one lane, with `mask` [windows, sequence_length], False behind the end of the text."""
        places = indices[:, None] * self._length + np.arange(self._length)
        last = len(self._text) - 1
        read = np.minimum(places, last - 1)
        return {
            "tokens": self._text[read].astype(np.int32),
            "next_tokens": self._text[read + 1].astype(np.int32),
            "is_first": indices == 0,
            "mask": places < last,
        }

    def draw(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        """Return windows by number."""
        del epochs, seed
        return self.take(indices)

    def batches(self, num_lanes: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield [num_lanes, sequence_length] windows step by step: row r goes on where row r of the step before ended."""
        steps = -(-len(self) // num_lanes)
        for step in range(steps):
            yield {
                **self.take(np.arange(num_lanes) * steps + step),
                "is_first": np.full(num_lanes, step == 0),
            }
