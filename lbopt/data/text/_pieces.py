"""A WordPiece vocabulary, learned the same way in every process and on every machine."""

from __future__ import annotations

import collections
import heapq
import itertools
from collections.abc import Mapping

from lbopt.errors import require

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNK, CLS, SEP, MASK = range(len(SPECIAL_TOKENS))
CONTINUED = "##"
"""Before a piece that does not begin a word."""

Pair = tuple[str, str]


def learn_pieces(words: Mapping[str, int], vocab_size: int) -> list[str]:
    """Learn a vocabulary: the alphabet, then again and again the most frequent pair of neighbours as one piece.

    The trainer of the `tokenizers` library goes through hash maps in an order that differs between processes, so that
    two hosts of one run could number (and, at ties, choose) pieces differently. Here ties go to the pair that comes
    first in the alphabet. Pairs that occur once are not merged.

    Args:
      words: how often each word occurs.
      vocab_size: special tokens included.

    Returns:
      At most `vocab_size` pieces in the order of their ids, special tokens first.

    Raises:
      UserError: if the alphabet alone needs more.

    References:
      Sennrich et al., Neural Machine Translation of Rare Words with Subword Units, arXiv 1508.07909, algorithm 1.

    >>> learn_pieces({"abab": 3, "ab": 1}, 9)[5:]
    ['##a', '##b', 'a', 'ab']
    """
    spelt = [_spell(word) for word in sorted(words)]
    counts = [words[word] for word in sorted(words)]
    pieces = [*SPECIAL_TOKENS, *sorted({symbol for word in spelt for symbol in word})]
    require(
        vocab_size >= len(pieces),
        "config.data.vocab_size",
        vocab_size,
        f"special tokens and the alphabet alone take {len(pieces)}; use at least that",
    )
    known = set(pieces)
    merges = _Pairs(spelt, counts)
    while len(pieces) < vocab_size and (best := merges.most_frequent()) is not None:
        merged = best[0] + best[1].removeprefix(CONTINUED)
        merges.join(best, merged)
        if merged not in known:
            known.add(merged)
            pieces.append(merged)
    return pieces


def _spell(word: str) -> list[str]:
    return [word[0], *(CONTINUED + character for character in word[1:])]


class _Pairs:
    """How often each pair of neighbours occurs, kept up to date while pairs are joined."""

    def __init__(self, words: list[list[str]], counts: list[int]):
        self._words, self._word_counts = words, counts
        self._counts: collections.Counter[Pair] = collections.Counter()
        self._where: dict[Pair, set[int]] = collections.defaultdict(set)
        for number in range(len(words)):
            self._count(number, 1)
        self._heap = [(-count, pair) for pair, count in self._counts.items()]
        heapq.heapify(self._heap)

    def most_frequent(self) -> Pair | None:
        """Return the pair to join next; None if every pair occurs once."""
        while self._heap:
            count, pair = self._heap[0]
            if -count == self._counts[pair]:
                return pair if -count > 1 else None
            heapq.heappop(self._heap)  # it has changed since, and its new count is in the heap too
        return None

    def join(self, pair: Pair, merged: str) -> None:
        """Replace a pair by one piece everywhere."""
        changed: set[Pair] = set()
        for number in sorted(self._where[pair]):
            changed |= self._count(number, -1)
            self._words[number] = _joined(self._words[number], pair, merged)
            changed |= self._count(number, 1)
        for other in sorted(changed):
            heapq.heappush(self._heap, (-self._counts[other], other))

    def _count(self, number: int, sign: int) -> set[Pair]:
        """Add or take away the pairs of a word; return them."""
        word = self._words[number]
        pairs = list(itertools.pairwise(word))
        for pair in pairs:
            self._counts[pair] += sign * self._word_counts[number]
            if sign > 0:
                self._where[pair].add(number)
            else:
                self._where[pair].discard(number)
        return set(pairs)


def _joined(word: list[str], pair: Pair, merged: str) -> list[str]:
    result: list[str] = []
    for symbol in word:
        if result and (result[-1], symbol) == pair:
            result[-1] = merged
        else:
            result.append(symbol)
    return result
