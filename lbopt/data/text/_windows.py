"""Text for language models: windows of tokens, and the tokens to predict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from lbopt.data._arrays import ArrayDataset, Reading
from lbopt.data.text._pieces import SEP
from lbopt.data.text._wordpiece import Document
from lbopt.errors import require


def join_documents(documents: Iterable[Document], separator: int = SEP) -> np.ndarray:
    """Return the tokens of all documents in one array.

    Args:
      documents: The documents.
      separator: Token before each document and after the last one; [SEP] by default.

    Returns:
      [tokens] int32.
    """
    end = np.asarray([separator], np.int32)
    return np.concatenate(
        [end, *(part for document in documents for part in (document.tokens, end))]
    )


def make_windows(text: Sequence[Document] | np.ndarray, sequence_length: int) -> ArrayDataset:
    """Return consecutive windows of a text as independent examples.

    No state is carried from one window to the next, so a model sees little context before the first
    tokens of a window. Tokens at the end that do not fill a window are left out.

    Args:
      text: Documents, or their tokens in one array.
      sequence_length: Tokens of a window.

    Returns:
      Data set with `tokens` and `next_tokens` [windows, sequence_length] int32.

    Raises:
      UserError: If the text does not fill one window.
    """
    text = text if isinstance(text, np.ndarray) else join_documents(text)
    count = _num_windows(text, sequence_length)
    shape = (count, sequence_length)
    used = count * sequence_length
    return ArrayDataset(
        {"tokens": text[:used].reshape(shape), "next_tokens": text[1 : used + 1].reshape(shape)}
    )


def _num_windows(text: np.ndarray, sequence_length: int, partial: bool = False) -> int:
    """Return the number of windows of a text, see `TextWindows`."""
    _check_length(sequence_length)
    predicted = len(text) - 1
    fix = f"a part of the text has {predicted} tokens; use windows of at most that"
    fits = predicted >= (1 if partial else sequence_length)
    require(fits, "sequence_length", sequence_length, fix)
    return -(-predicted // sequence_length) if partial else predicted // sequence_length


def _check_length(sequence_length: int) -> None:
    fix = "use windows of at least 1 token"
    require(sequence_length >= 1, "sequence_length", sequence_length, fix)


def _take_windows(
    text: np.ndarray, sequence_length: int, indices: np.ndarray
) -> dict[str, np.ndarray]:
    """Return consecutive windows of a text by their numbers.

    `token_mask` [windows, sequence_length] is False beyond the end of the text.
    """
    places = np.asarray(indices)[:, None] * sequence_length + np.arange(sequence_length)
    last = len(text) - 1
    read = np.minimum(places, last - 1)
    return {
        "tokens": text[read].astype(np.int32),
        "next_tokens": text[read + 1].astype(np.int32),
        "token_mask": places < last,
    }


class TextWindows:
    """Consecutive windows of a text as independent examples, mapped from disk.

    An example has `tokens` and `next_tokens` [sequence_length] int32, as from `make_windows`. Every
    token but the first, which is context, is predicted at most once.

    Args:
      text: [tokens], integers of any dtype, in memory or mapped from disk.
      sequence_length: Tokens of a window.
      partial: Whether the last window may reach beyond the end of the text, so that evaluation
        predicts every token. Examples then have `token_mask` [sequence_length] bool, False there.
        Without, the tokens that do not fill a window are left out.

    Raises:
      UserError: If there is no window.

    >>> import numpy as np
    >>> windows = TextWindows(np.arange(6), 3, partial=True)
    >>> batch = windows.take(np.arange(2))
    >>> batch["next_tokens"].tolist()[0], batch["token_mask"].tolist()
    ([1, 2, 3], [[True, True, True], [True, True, False]])
    """

    reading = Reading()

    def __init__(self, text: np.ndarray, sequence_length: int, partial: bool = False):
        self._count = _num_windows(text, sequence_length, partial)
        self._text = text
        self._length = sequence_length
        self._partial = partial

    def __len__(self) -> int:
        return self._count

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the windows at `indices` as one batch."""
        found = _take_windows(self._text, self._length, indices)
        if not self._partial:
            del found["token_mask"]
        return found

    def draw(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        """Return the windows at `indices` as one batch, the same in every epoch."""
        del epochs, seed
        return self.take(indices)


class TextStreams:
    """Text for truncated back-propagation through time, read as parallel streams.

    The text is cut into `num_streams` contiguous streams of equal length. Step s reads the tokens
    [s T, (s + 1) T) of every stream, where T is `sequence_length`, so a model begins step s + 1
    with its state after step s. Example s * num_streams + r is the window of stream r in step s.
    Read in order, a global batch of `num_streams` examples is thus one step, and example r of every
    batch belongs to stream r. All windows are full: tokens at the end of the text that would not
    fill a window of every stream are left out.

    An example has `tokens` and `next_tokens` [sequence_length] int32, and `is_first` bool, True
    where a pass over the text begins and the carried state has to be zero.

    Args:
      text: [tokens], integers of any dtype, in memory or mapped from disk.
      num_streams: Number of streams, the global batch size.
      sequence_length: Tokens of a window.

    Attributes:
      num_streams: Number of streams.
      num_steps: Number of steps in a pass over the text.
      num_left_out: Number of tokens at the end of the text that are not read.

    Raises:
      UserError: If a window has no token, or there is less than one window for each stream.

    References:
      Zaremba et al., Recurrent Neural Network Regularization, arXiv 1409.2329v5, section 4.1: the
      final hidden states of a minibatch are the initial ones of the next.
    """

    reading = Reading(in_order=True)

    def __init__(self, text: np.ndarray, num_streams: int, sequence_length: int):
        _check_length(sequence_length)
        needed = num_streams * sequence_length + 1
        fix = (
            f"windows of {sequence_length} tokens in {num_streams} streams need {needed} tokens, "
            f"and a part of the text has {len(text)}; lower this or {{sequence_length}}"
        )
        fits = len(text) >= needed
        also = ["sequence_length"]
        require(fits, "num_streams", num_streams, fix, code="mismatch", also=also)
        self._text = text
        self._length = sequence_length
        self.num_streams = num_streams
        self.num_steps = (len(text) - 1) // (num_streams * sequence_length)
        self.num_left_out = len(text) - 1 - len(self) * sequence_length

    def __len__(self) -> int:
        return self.num_steps * self.num_streams

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the examples at `indices` as one batch."""
        step, stream = np.divmod(indices, self.num_streams)
        start = (stream * self.num_steps + step) * self._length
        window = self._text[start[:, None] + np.arange(self._length + 1)].astype(np.int32)
        return {"tokens": window[:, :-1], "next_tokens": window[:, 1:], "is_first": step == 0}

    def draw(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        """Return the examples at `indices` as one batch, the same in every epoch."""
        del epochs, seed
        return self.take(indices)


class EvalTextStreams:
    """Text for evaluation with a carried state.

    Every token but the first is predicted exactly once. Evaluation chooses the number of streams. A
    stream begins without a state, so more streams give a slightly larger perplexity; the exact one
    has a single stream.

    Args:
      text: [tokens] int32.
      sequence_length: Tokens of a window.

    Raises:
      UserError: If a window has no token, or the text none to predict.
    """

    reading = Reading(in_order=True)

    def __init__(self, text: np.ndarray, sequence_length: int):
        _check_length(sequence_length)
        fix = "a part of the text has fewer than two tokens; use more text"
        require(len(text) >= 2, "text", len(text), fix)
        self._text = text
        self._length = sequence_length

    def __len__(self) -> int:
        return -(-(len(self._text) - 1) // self._length)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return windows of a single stream by their numbers.

        `token_mask` [windows, sequence_length] is False beyond the end of the text.
        """
        found = _take_windows(self._text, self._length, indices)
        return {**found, "is_first": indices == 0}

    def draw(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        """Return windows of a single stream by their numbers."""
        del epochs, seed
        return self.take(indices)

    def batches(self, num_streams: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield batches of windows [num_streams, sequence_length].

        Window r of a batch continues window r of the batch before.
        """
        steps = -(-len(self) // num_streams)
        for step in range(steps):
            yield {
                **self.take(np.arange(num_streams) * steps + step),
                "is_first": np.full(num_streams, step == 0),
            }
