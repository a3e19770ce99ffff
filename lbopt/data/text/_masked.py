"""Text for BERT: pairs of segments, tokens to predict, and whether the second segment follows the first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lbopt.data._arrays import Reading
from lbopt.data._draws import Draws
from lbopt.data.text._pieces import CLS, MASK, PAD, SEP, UNK
from lbopt.data.text._tokens import TokenStore, gather_documents
from lbopt.data.text._wordpiece import Document, SpecialIds
from lbopt.errors import EnvironmentProblem, require

MASKED_FRACTION = 0.15
"""Of a sequence's tokens that are predicted (arXiv 1810.04805, section 3.1)."""
REPLACED_BY_MASK, REPLACED = 0.8, 0.9
"""Of those: 80 % become [MASK], 10 % a random token, 10 % stay as they are (the same section)."""
NUM_SPECIAL_POSITIONS = 3
"""[CLS] first [SEP] second [SEP]."""
LEARNED_SPECIAL = SpecialIds(PAD, UNK, CLS, SEP, MASK)
"""Of vocabularies that were learned here: 0 to 4. A published one may have them elsewhere."""
MEAN_OVER = 4096
"""Examples that `MaskedLMDataset.mean_predictions` looks at."""

_STREAM = 1
"""Of these draws; see `lbopt.data._draws`."""
_BLOCK = 256
"""Examples that are made at a time: arrays of so many stay in the processor's cache."""
_PLACE_BITS = 11
"""A draw has 53 bits, so that with the place of a token it fills a word of 64."""
_FIXED_SEED = 2**32
"""Of evaluation; no run can have it."""
_CUT, _RANDOM, _WHERE = range(3)
"""Which draw of an example decides where it is cut, whether its second segment is random, and from where that is."""
_NUM_DECISIONS = 3


class _Chunks:
    """Stretches of `room` tokens, each from one document, that make an example; a last one of a single token is left out.

    In memory is where documents begin and end and how many chunks come before each; the rest is arithmetic.

    Attributes:
      before: [documents + 1] int64, how many chunks the documents before have; at the end, how many there are.
    """

    def __init__(self, store: TokenStore, room: int):
        usable = store.stops - store.starts >= 2
        self._starts, self._stops = store.starts[usable], store.stops[usable]
        self._sentences, self._room = store.sentences, room
        self.before = np.concatenate(
            [[0], np.cumsum((self._stops - self._starts + room - 2) // room)]
        )

    @property
    def num_documents(self) -> int:
        """How many documents have a chunk."""
        return len(self._starts)

    def document(self, chunks: np.ndarray) -> np.ndarray:
        """Return the document of each chunk."""
        return np.searchsorted(self.before, chunks, side="right") - 1

    def span(self, chunks: np.ndarray, document: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first token of chunks, and the one behind their last."""
        start = self._starts[document] + (chunks - self.before[document]) * self._room
        return start, np.minimum(start + self._room, self._stops[document])

    def cut(self, start: np.ndarray, stop: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """Choose where to cut chunks in two: where a sentence begins inside, and anywhere if none does."""
        first = np.searchsorted(self._sentences, start, side="right")
        count = np.searchsorted(self._sentences, stop, side="left") - first
        anywhere = start + 1 + _below(uniform, stop - start - 1)
        if not len(self._sentences):
            return anywhere
        place = np.minimum(first + _below(uniform, count), len(self._sentences) - 1)
        return np.where(count > 0, self._sentences[place], anywhere)


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
      documents: at least two that have two tokens; a store may lie on disk.
      sequence_length: tokens of an example, special ones and padding included.
      vocab_size: random tokens are drawn from all but the special ones.
      max_predictions: see above.
      special: where the vocabulary has the special tokens.

    Raises:
      UserError: if there is no room for two segments, or if fewer than two documents have any.

    References:
      Devlin et al., arXiv 1810.04805, section 3.1 and appendix A.2; google-research/bert, create_pretraining_data.py, which
      draws a few versions of each example beforehand and now and then makes sequences short.
    """

    reading = Reading()

    def __init__(
        self,
        documents: Sequence[Document] | TokenStore,
        sequence_length: int,
        vocab_size: int,
        max_predictions: int,
        special: SpecialIds = LEARNED_SPECIAL,
    ):
        room = sequence_length - NUM_SPECIAL_POSITIONS
        require(
            room >= 2,
            "config.data.sequence_length",
            sequence_length,
            f"two segments and their {NUM_SPECIAL_POSITIONS} special tokens do not fit; use at least 5",
        )
        store = documents if isinstance(documents, TokenStore) else gather_documents(documents)
        self._chunks = _Chunks(store, room)
        require(
            self._chunks.num_documents >= 2,
            "config.data.name",
            self._chunks.num_documents,
            "the second segment is taken from another document; give at least two",
        )
        self._tokens, self._special = store.tokens, special
        self._length, self._vocab_size, self._max_predictions = (
            sequence_length,
            vocab_size,
            max_predictions,
        )

    def __len__(self) -> int:
        return int(self._chunks.before[-1])

    @property
    def mean_predictions(self) -> float:
        """How many tokens of an example are predicted in evaluation, on average over the data set.

        Exact up to `MEAN_OVER` examples; of larger data sets, the mean over so many that are evenly spaced.
        """
        count = min(len(self), MEAN_OVER)
        return float(
            self.take(np.arange(count) * len(self) // count)["masked_weights"].sum() / count
        )

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the examples at `indices` as evaluation sees them: the same every time."""
        return self.draw(indices, np.zeros_like(indices), _FIXED_SEED)

    def draw(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        """Return the examples at `indices`, each as training sees it in its epoch."""
        starts = range(0, max(len(indices), 1), _BLOCK)
        blocks = [
            self._block(indices[start : start + _BLOCK], epochs[start : start + _BLOCK], seed)
            for start in starts
        ]
        return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}

    def _block(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        count = _NUM_DECISIONS + self._length + 2 * self._max_predictions
        uniform = uniform_draws(indices, epochs, seed, count)
        decisions, order, changes, tokens = np.split(
            uniform, np.cumsum([_NUM_DECISIONS, self._length, self._max_predictions]), axis=1
        )
        batch = self._pack(indices, decisions)
        return {**batch, **self._mask(batch["input_ids"], order, changes, tokens)}

    def _pack(self, indices: np.ndarray, decisions: np.ndarray) -> dict[str, np.ndarray]:
        """Put two segments between the special tokens."""
        document = self._chunks.document(indices)
        start, stop = self._chunks.span(indices, document)
        cut = self._chunks.cut(start, stop, decisions[:, _CUT])
        random = decisions[:, _RANDOM] < 0.5
        other_start, other_stop = self._another(document, decisions[:, _WHERE])
        second = np.where(random, other_start, cut)
        second_stop = np.where(random, np.minimum(other_stop, second + stop - cut), stop)
        first_length, second_length = (cut - start)[:, None], (second_stop - second)[:, None]

        place = np.arange(self._length)[None]
        middle = first_length + 1
        end = middle + second_length + 1
        in_second = (place > middle) & (place <= end)
        source = np.where(
            in_second, second[:, None] + place - middle - 1, start[:, None] + place - 1
        )
        ids = self._tokens[np.clip(source, 0, len(self._tokens) - 1)]
        if ids.max(initial=0) >= self._vocab_size:
            fix = f"the text has a token {ids.max()}: the store is damaged; copy its whole folder again"
            raise EnvironmentProblem(f"config.data.vocab_size = {self._vocab_size}: {fix}")
        ids = np.where(
            (place == middle) | (place == end),
            self._special.sep,
            np.where(place == 0, self._special.cls, ids),
        )
        return {
            "input_ids": np.where(place > end, self._special.pad, ids).astype(np.int32),
            "token_type_ids": in_second.astype(np.int32),
            "attention_mask": (place <= end).astype(np.int32),
            "next_sentence_label": random.astype(np.int32),
        }

    def _another(self, document: np.ndarray, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Choose a chunk of another document, every one of them as likely; return where it is."""
        first, last = self._chunks.before[document], self._chunks.before[document + 1]
        chosen = _below(uniform, len(self) - (last - first))
        chosen = chosen + np.where(chosen >= first, last - first, 0)
        return self._chunks.span(chosen, self._chunks.document(chosen))

    def _mask(
        self, ids: np.ndarray, order: np.ndarray, changes: np.ndarray, tokens: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Choose tokens to predict, and hide most of them."""
        special = np.logical_or.reduce([ids == token for token in self._special])
        wanted = np.round(MASKED_FRACTION * np.sum(ids != self._special.pad, 1))
        wanted = np.minimum(
            np.maximum(wanted, 1), np.minimum(self._max_predictions, np.sum(~special, 1))
        )
        places = _smallest_first(order, special)[:, : self._max_predictions]
        used = np.arange(places.shape[1])[None] < wanted[:, None]
        places = np.sort(np.where(used, places, self._length), 1)
        positions = np.where(used, places, 0)
        labels = np.where(used, np.take_along_axis(ids, positions, 1), self._special.pad)
        others = _not_special(_below(tokens, self._vocab_size - len(self._special)), self._special)
        shown = np.where(
            changes < REPLACED_BY_MASK,
            self._special.mask,
            np.where(changes < REPLACED, others, labels),
        )
        hidden = np.concatenate(
            [ids, np.zeros((len(ids), 1), ids.dtype)], 1
        )  # what is not used goes behind the end
        np.put_along_axis(hidden, places, shown.astype(ids.dtype), 1)
        return {
            "input_ids": hidden[:, :-1],
            "masked_positions": positions.astype(np.int32),
            "masked_labels": labels.astype(np.int32),
            "masked_weights": used.astype(np.float32),
        }


def uniform_draws(indices: np.ndarray, epochs: np.ndarray, seed: int, count: int) -> np.ndarray:
    """Return draws from [0, 1), [examples, count] fp64, each row a function of (seed, epoch, example) only.

    Raw words of the bit generator, whose stream NumPy guarantees.
    """
    draws = Draws(_STREAM)
    examples = zip(indices.tolist(), epochs.tolist(), strict=True)
    words = [
        draws.at(seed, epoch, index).bit_generator.random_raw(count) for index, epoch in examples
    ]
    return (np.stack(words) >> np.uint64(11)) * 2.0**-53


def _below(uniform: np.ndarray, limit: np.ndarray | int) -> np.ndarray:
    return (uniform * limit).astype(np.int64)


def _smallest_first(draws: np.ndarray, special: np.ndarray) -> np.ndarray:
    """Return places in the order of their draws, [examples, length] int64; what is returned for special ones comes last.

    Sorted as words, a draw before its place: four times as fast as `argsort`, and draws that are equal stay in order.
    """
    if draws.shape[1] > 2**_PLACE_BITS:
        return np.argsort(np.where(special, 2.0, draws), 1, kind="stable")
    words = (draws * 2.0**53).astype(np.uint64) << np.uint64(_PLACE_BITS)
    words |= np.arange(draws.shape[1], dtype=np.uint64)
    words = np.sort(np.where(special, np.uint64(2**64 - 1), words), 1)
    return (words & np.uint64(2**_PLACE_BITS - 1)).astype(np.int64)


def _not_special(numbers: np.ndarray, special: SpecialIds) -> np.ndarray:
    """Return the ids that have these numbers, from 0, among those that are not special."""
    for token in sorted(special):
        numbers = numbers + (numbers >= token)
    return numbers
