"""Examples for BERT's pretraining: masked tokens, and prediction of the next sentence."""

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
"""Fraction of a sequence's tokens that are predicted (arXiv 1810.04805v2, section 3.1)."""
REPLACED_BY_MASK = 0.8
"""Uniform numbers in [0, 1) below this turn a predicted token into [MASK] (the same section)."""
REPLACED = 0.9
"""Uniform numbers from `REPLACED_BY_MASK` to this turn it into a random token; above, it stays."""
NUM_SPECIAL_POSITIONS = 3
"""Number of special tokens in [CLS] first [SEP] second [SEP]."""
LEARNED_SPECIAL = SpecialIds(PAD, UNK, CLS, SEP, MASK)
"""Special tokens of vocabularies that lbopt learned. In a published one they may have other ids."""
MEAN_OVER = 4096
"""Maximum number of examples that `MaskedLMDataset.mean_predictions` counts."""

_STREAM = 1
"""Stream of these random numbers, see `Draws`."""
_BLOCK = 256
"""Number of examples that are made together: their arrays stay in the processor's cache."""
_PLACE_BITS = 11
"""Bits of a token's place in a word of 64 bits beside a random number, which has 53."""
_EVALUATION_SEED = 2**32
"""Seed of evaluation, larger than any seed of a run."""
_CUT, _RANDOM, _WHERE = range(3)
"""Random numbers of an example that decide where it is cut in two, whether its second segment is
random, and where a random one comes from."""
_NUM_DECISIONS = 3


class _Chunks:
    """Consecutive tokens of one document that fill an example. The last chunk may be shorter.

    A last chunk of a single token is left out. Only the edges of the documents and the numbers of
    their chunks are held in memory; the rest is computed on demand.

    Args:
      store: Documents.
      chunk_size: Number of tokens of a full chunk.

    Attributes:
      before: [documents + 1] int64, number of chunks in the documents before each one; the last
        entry is their total number.
    """

    def __init__(self, store: TokenStore, chunk_size: int):
        usable = store.stops - store.starts >= 2
        self._starts = store.starts[usable]
        self._stops = store.stops[usable]
        self._sentences = store.sentences
        self._chunk_size = chunk_size
        num_chunks = (self._stops - self._starts + chunk_size - 2) // chunk_size
        self.before = np.concatenate([[0], np.cumsum(num_chunks)])

    @property
    def num_documents(self) -> int:
        """Number of documents with at least one chunk."""
        return len(self._starts)

    def document(self, chunks: np.ndarray) -> np.ndarray:
        """Return the document of each chunk."""
        return np.searchsorted(self.before, chunks, side="right") - 1

    def span(self, chunks: np.ndarray, document: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first token of chunks, and the end of their last token."""
        start = self._starts[document] + (chunks - self.before[document]) * self._chunk_size
        return start, np.minimum(start + self._chunk_size, self._stops[document])

    def cut(self, start: np.ndarray, stop: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """Return the token before which each chunk is cut in two.

        The cut is at the beginning of a random sentence inside the chunk; anywhere in it if no
        sentence begins there.

        Args:
          start: [chunks] int64, the first token of each chunk.
          stop: [chunks] int64, the end of each chunk.
          uniform: [chunks] random numbers in [0, 1).
        """
        first = np.searchsorted(self._sentences, start, side="right")
        count = np.searchsorted(self._sentences, stop, side="left") - first
        anywhere = start + 1 + _below(uniform, stop - start - 1)
        if not len(self._sentences):
            return anywhere
        place = np.minimum(first + _below(uniform, count), len(self._sentences) - 1)
        return np.where(count > 0, self._sentences[place], anywhere)


class MaskedLMDataset:
    """Examples `[CLS] first [SEP] second [SEP]` with masked tokens, sampled anew in every epoch.

    A document is cut into chunks that fill a sequence; a chunk is an example. An example is cut in
    two at the beginning of a sentence. In half of the examples the second segment is replaced by
    text from another document. Then 15 % of the tokens, but at most `max_predictions`, are chosen
    for prediction. All choices are functions of (seed, epoch, number of the example), in evaluation
    of the number alone.

    An example has `input_ids`, `token_type_ids` and `attention_mask` [sequence_length] int32;
    `masked_positions` and `masked_labels` [max_predictions] int32; `masked_weights`
    [max_predictions] fp32, 1 for predictions and 0 for unused places; and `next_sentence_label`
    int32, 1 if the second segment is random.

    Args:
      documents: Documents in memory or on disk, two or more of them with at least two tokens.
      sequence_length: Tokens of an example, special tokens and padding included.
      vocab_size: Number of tokens in the vocabulary. Random tokens are any but the special ones.
      max_predictions: Maximum number of predicted tokens of an example.
      special: Ids of the special tokens.

    Raises:
      UserError: If a sequence is too short for two segments, or if fewer than two documents have
        two tokens.

    References:
      Devlin et al., arXiv 1810.04805v2, section 3.1 and appendix A.2.
      google-research/bert@eedf5716ce1268e56f0a50264a88cafad334ac61:
      create_pretraining_data.py, which makes a few versions of each example beforehand and shortens
      some sequences.
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
        chunk_size = sequence_length - NUM_SPECIAL_POSITIONS
        fix = (
            f"two segments and {NUM_SPECIAL_POSITIONS} special tokens do not fit; use at least "
            f"{NUM_SPECIAL_POSITIONS + 2}"
        )
        require(chunk_size >= 2, "sequence_length", sequence_length, fix)
        store = documents if isinstance(documents, TokenStore) else gather_documents(documents)
        self._chunks = _Chunks(store, chunk_size)
        count = self._chunks.num_documents
        fix = "the second segment comes from another document; give at least two documents"
        require(count >= 2, "documents", count, fix)
        self._tokens = store.tokens
        self._special = special
        self._length = sequence_length
        self._vocab_size = vocab_size
        self._max_predictions = max_predictions

    def __len__(self) -> int:
        return int(self._chunks.before[-1])

    @property
    def mean_predictions(self) -> float:
        """Average number of predicted tokens of an example in evaluation.

        The average is over all examples, or over `MEAN_OVER` evenly spaced ones.
        """
        count = min(len(self), MEAN_OVER)
        sample = self.take(np.arange(count) * len(self) // count)
        return float(sample["masked_weights"].sum() / count)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the examples at `indices` for evaluation, the same every time."""
        return self.draw(indices, np.zeros_like(indices), _EVALUATION_SEED)

    def draw(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        """Return the examples at `indices`, masked as training sees each in its epoch."""
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
        """Return pairs of segments with their special tokens, before any token is masked."""
        # Where the two segments begin and end in the text.
        document = self._chunks.document(indices)
        start, stop = self._chunks.span(indices, document)
        cut = self._chunks.cut(start, stop, decisions[:, _CUT])
        random = decisions[:, _RANDOM] < 0.5
        other_start, other_stop = self._other_chunk(document, decisions[:, _WHERE])
        second = np.where(random, other_start, cut)
        second_stop = np.where(random, np.minimum(other_stop, second + stop - cut), stop)

        # Where they lie in the sequence; `middle` and `end` are the places of the two [SEP].
        place = np.arange(self._length)[None]
        middle = (cut - start)[:, None] + 1
        end = middle + (second_stop - second)[:, None] + 1
        in_second = (place > middle) & (place <= end)

        source_of_first = start[:, None] + place - 1
        source_of_second = second[:, None] + place - middle - 1
        source = np.where(in_second, source_of_second, source_of_first)
        ids = self._tokens[np.clip(source, 0, len(self._tokens) - 1)]
        self._check_tokens(ids)
        ids = np.where(place == 0, self._special.cls, ids)
        ids = np.where((place == middle) | (place == end), self._special.sep, ids)
        return {
            "input_ids": np.where(place > end, self._special.pad, ids).astype(np.int32),
            "token_type_ids": in_second.astype(np.int32),
            "attention_mask": (place <= end).astype(np.int32),
            "next_sentence_label": random.astype(np.int32),
        }

    def _check_tokens(self, ids: np.ndarray) -> None:
        """Raise `EnvironmentProblem` if a token is not in the vocabulary."""
        largest = int(ids.max(initial=0))
        if largest >= self._vocab_size:
            fix = (
                f"the vocabulary has {self._vocab_size} tokens, so the token store is damaged; "
                "copy its whole folder again"
            )
            raise EnvironmentProblem("token", largest, fix, code="damaged")

    def _other_chunk(
        self, document: np.ndarray, uniform: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the span of a random chunk of any other document, all equally likely."""
        first = self._chunks.before[document]
        last = self._chunks.before[document + 1]
        chosen = _below(uniform, len(self) - (last - first))
        chosen = chosen + np.where(chosen >= first, last - first, 0)
        return self._chunks.span(chosen, self._chunks.document(chosen))

    def _mask(
        self, ids: np.ndarray, order: np.ndarray, changes: np.ndarray, tokens: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return `input_ids` with masked tokens, and the tokens to predict.

        Args:
          ids: [examples, sequence_length] tokens.
          order: [examples, sequence_length] random numbers that choose the predicted tokens.
          changes: [examples, max_predictions] random numbers that choose how each is replaced.
          tokens: [examples, max_predictions] random numbers that choose random tokens.
        """
        # The number of predicted tokens.
        special = np.logical_or.reduce([ids == token for token in self._special])
        wanted = np.round(MASKED_FRACTION * np.sum(ids != self._special.pad, 1))
        most = np.minimum(self._max_predictions, np.sum(~special, 1))
        wanted = np.minimum(np.maximum(wanted, 1), most)

        # Their places, in order. Unused places are behind the end of the sequence.
        places = _smallest_first(order, special)[:, : self._max_predictions]
        used = np.arange(places.shape[1])[None] < wanted[:, None]
        places = np.sort(np.where(used, places, self._length), 1)
        positions = np.where(used, places, 0)
        labels = np.where(used, np.take_along_axis(ids, positions, 1), self._special.pad)

        # What the model sees in their place, written with one column to spare for unused places.
        randoms = _not_special(_below(tokens, self._vocab_size - len(self._special)), self._special)
        seen = np.where(changes < REPLACED, randoms, labels)
        seen = np.where(changes < REPLACED_BY_MASK, self._special.mask, seen)
        hidden = np.concatenate([ids, np.zeros((len(ids), 1), ids.dtype)], 1)
        np.put_along_axis(hidden, places, seen.astype(ids.dtype), 1)
        return {
            "input_ids": hidden[:, :-1],
            "masked_positions": positions.astype(np.int32),
            "masked_labels": labels.astype(np.int32),
            "masked_weights": used.astype(np.float32),
        }


def uniform_draws(indices: np.ndarray, epochs: np.ndarray, seed: int, count: int) -> np.ndarray:
    """Return random numbers in [0, 1), [examples, count] fp64.

    The numbers of an example depend on (seed, epoch, example) alone. They are made of raw words of
    the bit generator, whose stream NumPy guarantees.
    """
    draws = Draws(_STREAM)
    examples = zip(indices.tolist(), epochs.tolist(), strict=True)
    words = [
        draws.at(seed, epoch, index).bit_generator.random_raw(count) for index, epoch in examples
    ]
    return (np.stack(words) >> np.uint64(11)) * 2.0**-53


def _below(uniform: np.ndarray, limit: np.ndarray | int) -> np.ndarray:
    """Return integers in [0, limit) from uniform numbers in [0, 1)."""
    return (uniform * limit).astype(np.int64)


def _smallest_first(draws: np.ndarray, special: np.ndarray) -> np.ndarray:
    """Return the places of the tokens in the order of their random numbers.

    Number and place are sorted together in one word, which is four times as fast as `argsort`.
    Equal numbers stay in order.

    Returns:
      [examples, length] int64. Entries for special tokens come last and have no meaning.
    """
    if draws.shape[1] > 2**_PLACE_BITS:
        return np.argsort(np.where(special, 2.0, draws), 1, kind="stable")
    words = (draws * 2.0**53).astype(np.uint64) << np.uint64(_PLACE_BITS)
    words |= np.arange(draws.shape[1], dtype=np.uint64)
    words = np.sort(np.where(special, np.uint64(2**64 - 1), words), 1)
    return (words & np.uint64(2**_PLACE_BITS - 1)).astype(np.int64)


def _not_special(numbers: np.ndarray, special: SpecialIds) -> np.ndarray:
    """Return the ids with these numbers in the sequence of ids that are not special."""
    for token in sorted(special):
        numbers = numbers + (numbers >= token)
    return numbers
