"""Learning of a WordPiece vocabulary, with the same result in every process."""

from __future__ import annotations

import collections
import heapq
import itertools
from collections.abc import Mapping

from lbopt.errors import require

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNK, CLS, SEP, MASK = range(len(SPECIAL_TOKENS))
CONTINUED = "##"
"""Prefix of a piece that does not begin a word."""

Pair = tuple[str, str]


def learn_pieces(words: Mapping[str, int], vocab_size: int) -> list[str]:
    """Learn a vocabulary by merging pairs.

    It begins with the alphabet. Then the most frequent pair of adjacent pieces becomes a new piece,
    until the vocabulary is full. Pairs that occur once are not merged.

    The trainer of the `tokenizers` library iterates over hash maps, whose order differs between
    processes, so two hosts of one run could number pieces differently and choose others at ties.
    Here the alphabetically first pair wins a tie.

    Args:
      words: Word -> number of its occurrences.
      vocab_size: Maximum number of pieces, special tokens included.

    Returns:
      The pieces in the order of their ids, special tokens first; `vocab_size` or fewer.

    Raises:
      UserError: If the alphabet alone needs more pieces.

    References:
      Sennrich et al., Neural Machine Translation of Rare Words with Subword Units, arXiv
      1508.07909v5, algorithm 1.

    >>> learn_pieces({"abab": 3, "ab": 1}, 9)[5:]
    ['##a', '##b', 'a', 'ab']
    """
    spelt = [_spell(word) for word in sorted(words)]
    counts = [words[word] for word in sorted(words)]
    pieces = [*SPECIAL_TOKENS, *sorted({symbol for word in spelt for symbol in word})]
    fix = f"special tokens and the alphabet alone take {len(pieces)}; use at least that"
    require(vocab_size >= len(pieces), "vocab_size", vocab_size, fix)

    known = set(pieces)
    pairs = _Pairs(spelt, counts)
    while len(pieces) < vocab_size and (best := pairs.most_frequent()) is not None:
        merged = best[0] + best[1].removeprefix(CONTINUED)
        pairs.merge(best, merged)
        if merged not in known:
            known.add(merged)
            pieces.append(merged)
    return pieces


def _spell(word: str) -> list[str]:
    """Return the characters of a word as pieces."""
    return [word[0], *(CONTINUED + character for character in word[1:])]


class _Pairs:
    """Counts of all pairs of adjacent pieces, updated while pairs are merged.

    Args:
      words: Pieces of each word; changed in place.
      counts: Number of occurrences of each word.
    """

    def __init__(self, words: list[list[str]], counts: list[int]):
        self._words = words
        self._word_counts = counts
        self._counts: collections.Counter[Pair] = collections.Counter()
        self._where: dict[Pair, set[int]] = collections.defaultdict(set)
        for number in range(len(words)):
            self._count(number, 1)
        self._heap = [(-count, pair) for pair, count in self._counts.items()]
        heapq.heapify(self._heap)

    def most_frequent(self) -> Pair | None:
        """Return the most frequent pair; None if every pair occurs once."""
        while self._heap:
            count, pair = self._heap[0]
            if -count == self._counts[pair]:
                return pair if -count > 1 else None
            heapq.heappop(self._heap)  # an old count; the new one is in the heap, too
        return None

    def merge(self, pair: Pair, merged: str) -> None:
        """Replace a pair by one piece in all words."""
        changed: set[Pair] = set()
        for number in sorted(self._where[pair]):
            changed |= self._count(number, -1)
            self._words[number] = _merged(self._words[number], pair, merged)
            changed |= self._count(number, 1)
        for other in sorted(changed):
            heapq.heappush(self._heap, (-self._counts[other], other))

    def _count(self, number: int, sign: int) -> set[Pair]:
        """Add (`sign` 1) or remove (-1) the pairs of a word, and return them."""
        word = self._words[number]
        pairs = list(itertools.pairwise(word))
        for pair in pairs:
            self._counts[pair] += sign * self._word_counts[number]
            if sign > 0:
                self._where[pair].add(number)
            else:
                self._where[pair].discard(number)
        return set(pairs)


def _merged(word: list[str], pair: Pair, merged: str) -> list[str]:
    """Return the pieces of a word with each occurrence of a pair replaced by one piece."""
    result: list[str] = []
    for symbol in word:
        if result and (result[-1], symbol) == pair:
            result[-1] = merged
        else:
            result.append(symbol)
    return result
