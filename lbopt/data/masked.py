"""Text for BERT: pairs of segments, tokens to predict, and whether the second segment follows the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lbopt.data.pieces import CLS, MASK, PAD, SEP, SPECIAL_TOKENS
from lbopt.data.text import Document
from lbopt.errors import require

MASKED_FRACTION = 0.15
"""Of a sequence's tokens that are predicted (arXiv 1810.04805, section 3.1)."""
REPLACED_BY_MASK, REPLACED = 0.8, 0.9
"""Of those: 80 % become [MASK], 10 % a random token, 10 % stay as they are (the same section)."""
NUM_SPECIAL_POSITIONS = 3
"""[CLS] first [SEP] second [SEP]."""

_FIXED_SEED = 2**32
"""Of evaluation; no run can have it."""
_CUT, _RANDOM, _WHERE = range(3)
"""Which draw of an example decides where it is cut, whether its second segment is random, and from where that is."""
_NUM_DECISIONS = 3


class _Chunks(NamedTuple):
    """Stretches of text, each from one document, that make an example.

    Attributes:
      start: [chunks] the first token.
      stop: [chunks] behind the last token.
      first_of_document: [chunks] the first chunk of the same document.
      num_of_document: [chunks] how many chunks that document has.
      cuts: where chunks may be cut in two, those of one chunk after those of another.
      first_cut: [chunks] the chunk's first one in `cuts`.
      num_cuts: [chunks] how many it has.
    """

    start: np.ndarray
    stop: np.ndarray
    first_of_document: np.ndarray
    num_of_document: np.ndarray
    cuts: np.ndarray
    first_cut: np.ndarray
    num_cuts: np.ndarray


class MaskedLMDataset:
    """Examples `[CLS] first [SEP] second [SEP]`, drawn anew in every epoch.

    The text of a document is cut into chunks that fill a sequence, and a chunk is an example. An example is cut in two at
    the beginning of a sentence; in half of the cases the second segment is replaced by text from another document. Then
    15 % of its tokens, but at most `max_predictions`, are chosen for prediction. All of it is a function of (seed, epoch,
    number of the example), and of the number alone in evaluation.

    An example has `input_ids`, `token_type_ids` and `attention_mask` [sequence_length] int32; `masked_positions` and
    `masked_labels` [max_predictions] int32 and `masked_weights` [max_predictions] fp32, 1 for predictions and 0 for those
    that are not used; `next_sentence_label` int32, 1 if the second segment is random.

    Args:
      documents: at least two.
      sequence_length: tokens of an example, special ones and padding included.
      vocab_size: random tokens are drawn from all but the special ones.
      max_predictions: see above.

    Raises:
      UserError: if there is no room for two segments, or if fewer than two documents have any.

    References:
      Devlin et al., arXiv 1810.04805, section 3.1 and appendix A.2; google-research/bert, create_pretraining_data.py, which
      draws a few versions of each example beforehand and now and then makes sequences short.
    """

    def __init__(self, documents: Sequence[Document], sequence_length: int, vocab_size: int, max_predictions: int):
        room = sequence_length - NUM_SPECIAL_POSITIONS
        require(
            room >= 2,
            "config.data.sequence_length",
            sequence_length,
            f"two segments and their {NUM_SPECIAL_POSITIONS} special tokens do not fit; use at least 5",
        )
        documents = [document for document in documents if len(document.tokens) >= 2]
        require(
            len(documents) >= 2,
            "config.data.name",
            len(documents),
            "the second segment is taken from another document; give at least two",
        )
        self._length, self._vocab_size, self._max_predictions = sequence_length, vocab_size, max_predictions
        self._tokens = np.concatenate([document.tokens for document in documents])
        self._chunks = _cut_into_chunks(documents, room)

    def __len__(self) -> int:
        return len(self._chunks.start)

    @property
    def mean_predictions(self) -> float:
        """How many tokens of an example are predicted, on average over the data set in evaluation."""
        return float(self.take(np.arange(len(self)))["masked_weights"].sum() / len(self))

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the examples at `indices` as evaluation sees them: the same every time."""
        return self.draw(indices, np.zeros_like(indices), _FIXED_SEED)

    def draw(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        """Return the examples at `indices`, each as training sees it in its epoch."""
        count = _NUM_DECISIONS + self._length + 2 * self._max_predictions
        uniform = uniform_draws(indices, epochs, seed, count)
        decisions, order, changes, tokens = np.split(
            uniform, np.cumsum([_NUM_DECISIONS, self._length, self._max_predictions]), axis=1
        )
        batch = self._pack(indices, decisions)
        return {**batch, **self._mask(batch["input_ids"], order, changes, tokens)}

    def _pack(self, indices: np.ndarray, decisions: np.ndarray) -> dict[str, np.ndarray]:
        """Put two segments between the special tokens."""
        chunks = self._chunks
        start, stop = chunks.start[indices], chunks.stop[indices]
        cut = chunks.cuts[chunks.first_cut[indices] + _below(decisions[:, _CUT], chunks.num_cuts[indices])]
        random = decisions[:, _RANDOM] < 0.5
        other = self._another(indices, decisions[:, _WHERE])
        second = np.where(random, chunks.start[other], cut)
        second_stop = np.where(random, np.minimum(chunks.stop[other], second + stop - cut), stop)
        first_length, second_length = (cut - start)[:, None], (second_stop - second)[:, None]

        place = np.arange(self._length)[None]
        middle = first_length + 1
        end = middle + second_length + 1
        in_second = (place > middle) & (place <= end)
        source = np.where(in_second, second[:, None] + place - middle - 1, start[:, None] + place - 1)
        ids = self._tokens[np.clip(source, 0, len(self._tokens) - 1)]
        ids = np.where((place == middle) | (place == end), SEP, np.where(place == 0, CLS, ids))
        return {
            "input_ids": np.where(place > end, PAD, ids).astype(np.int32),
            "token_type_ids": in_second.astype(np.int32),
            "attention_mask": (place <= end).astype(np.int32),
            "next_sentence_label": random.astype(np.int32),
        }

    def _another(self, indices: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """Choose a chunk of another document: every one of them is as likely."""
        first, size = self._chunks.first_of_document[indices], self._chunks.num_of_document[indices]
        chosen = _below(uniform, len(self) - size)
        return chosen + np.where(chosen >= first, size, 0)

    def _mask(
        self, ids: np.ndarray, order: np.ndarray, changes: np.ndarray, tokens: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Choose tokens to predict, and hide most of them."""
        special = ids < len(SPECIAL_TOKENS)
        wanted = np.round(MASKED_FRACTION * np.sum(ids != PAD, 1))
        wanted = np.minimum(np.maximum(wanted, 1), np.minimum(self._max_predictions, np.sum(~special, 1)))
        places = np.argsort(np.where(special, 2.0, order), 1, kind="stable")[:, : self._max_predictions]
        used = np.arange(places.shape[1])[None] < wanted[:, None]
        places = np.sort(np.where(used, places, self._length), 1)
        positions = np.where(used, places, 0)
        labels = np.where(used, np.take_along_axis(ids, positions, 1), PAD)
        others = len(SPECIAL_TOKENS) + _below(tokens, self._vocab_size - len(SPECIAL_TOKENS))
        shown = np.where(changes < REPLACED_BY_MASK, MASK, np.where(changes < REPLACED, others, labels))
        hidden = np.concatenate([ids, np.zeros((len(ids), 1), ids.dtype)], 1)  # what is not used goes behind the end
        np.put_along_axis(hidden, places, shown.astype(ids.dtype), 1)
        return {
            "input_ids": hidden[:, :-1],
            "masked_positions": positions.astype(np.int32),
            "masked_labels": labels.astype(np.int32),
            "masked_weights": used.astype(np.float32),
        }


def uniform_draws(indices: np.ndarray, epochs: np.ndarray, seed: int, count: int) -> np.ndarray:
    """Return draws from [0, 1), [examples, count] fp64, each row a function of (seed, epoch, example) only.

    Raw words of Philox, whose stream NumPy guarantees; the counter keeps clear of the order's, which has the same key.
    """
    words = [
        np.random.Philox(key=[seed, int(epoch)], counter=[0, 0, int(index), 1]).random_raw(count)
        for index, epoch in zip(indices, epochs, strict=True)
    ]
    return (np.stack(words) >> np.uint64(11)) * 2.0**-53


def _below(uniform: np.ndarray, limit: np.ndarray | int) -> np.ndarray:
    return (uniform * limit).astype(np.int64)


def _cut_into_chunks(documents: Sequence[Document], room: int) -> _Chunks:
    rows: list[tuple[int, int, int, int]] = []
    cuts: list[np.ndarray] = []
    offset = 0
    for document in documents:
        bounds = _bounds(document, room)
        first = len(rows)
        rows += [(offset + start, offset + stop, first, len(bounds)) for start, stop in bounds]
        cuts += [offset + _places_to_cut(document, start, stop) for start, stop in bounds]
        offset += len(document.tokens)
    start, stop, first_of_document, num_of_document = np.asarray(rows).T
    num_cuts = np.asarray([len(places) for places in cuts])
    return _Chunks(
        start,
        stop,
        first_of_document,
        num_of_document,
        cuts=np.concatenate(cuts),
        first_cut=np.cumsum(num_cuts) - num_cuts,
        num_cuts=num_cuts,
    )


def _places_to_cut(document: Document, start: int, stop: int) -> np.ndarray:
    """Return where sentences begin inside a chunk; everywhere if none does."""
    inside = document.sentences[(document.sentences > start) & (document.sentences < stop)]
    return inside if len(inside) else np.arange(start + 1, stop)


def _bounds(document: Document, room: int) -> list[tuple[int, int]]:
    """Return (start, stop) of stretches of `room` tokens; a last one of a single token is left out."""
    size = len(document.tokens)
    return [(start, min(start + room, size)) for start in range(0, size - 1, room)]
