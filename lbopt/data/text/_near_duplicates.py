"""Near-duplicates among many short texts, found exactly."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SHINGLE_WORDS = 5
"""Words of a shingle."""
SIMILARITY = 0.5
"""Jaccard index from which two texts are near-duplicates."""
FEWEST_WORDS = 10
"""Texts of fewer words are no near-duplicates: "Thank you very much." may occur twice."""

_WORD = re.compile(r"\w+")


def near_duplicates(
    texts: Sequence[str],
    similarity: float = SIMILARITY,
    shingle_words: int = SHINGLE_WORDS,
    fewest_words: int = FEWEST_WORDS,
) -> np.ndarray:
    """Return which texts are near-duplicates of an earlier text that is none.

    Two texts are near-duplicates if the sets of their shingles, sequences of `shingle_words` words
    without regard to case and punctuation, have a Jaccard index of at least `similarity`. Of the
    texts that are left no two are near-duplicates.

    All pairs are found, unlike with MinHash: sets that are similar enough share one of their
    rarest shingles, so only texts that do are compared. Shingles are compared by hashes of 64 bits.

    Args:
      texts: Texts, such as sentences.
      similarity: Jaccard index in (0, 1].
      shingle_words: Words of a shingle, >= 1.
      fewest_words: Texts of fewer words are left alone; at least `shingle_words`.

    Returns:
      [texts] bool, True for the near-duplicates.

    References:
      Lee et al., Deduplicating Training Data Makes Language Models Better, arXiv 2107.06499v2,
      section 4.2: near-duplicates by the Jaccard index of 5-grams.
      Bayardo et al., Scaling Up All Pairs Similarity Search, WWW 2007: comparison of sets that
      share a rare feature only.

    >>> near_duplicates(["A b c d e f.", "Another text.", "a B c, d e f!"], fewest_words=6).tolist()
    [False, False, True]
    """
    words = _numbered_words(texts)
    found = np.zeros(len(texts), bool)

    # Copies need no comparison.
    different: dict[tuple[int, ...], int] = {}
    for number, text in enumerate(words):
        if len(text) >= max(fewest_words, shingle_words):
            found[number] = different.setdefault(text, number) != number

    # In order, because only texts that are kept count.
    numbers = list(different.values())
    sets = _shared_shingles(list(different), shingle_words)
    kept: dict[int, list[int]] = {}
    for place, shingles in sets.items():
        prefix = _prefix(shingles, similarity)
        candidates = {one for shingle in prefix for one in kept.get(shingle, ())}
        if any(_jaccard(shingles, sets[one]) >= similarity for one in candidates):
            found[numbers[place]] = True
            continue
        for shingle in prefix:
            kept.setdefault(shingle, []).append(place)
    return found


class _Shingles(NamedTuple):
    """The different shingles of a text.

    Attributes:
      size: Number of all of them.
      shared: Those that occur more than once in all texts, the rarest first.
    """

    size: int
    shared: list[int]


def _jaccard(one: _Shingles, other: _Shingles) -> float:
    common = len(set(one.shared) & set(other.shared))
    return common / (one.size + other.size - common)


def _numbered_words(texts: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the words of each text as numbers, without regard to case and punctuation."""
    numbers: dict[str, int] = {}
    return [
        tuple(numbers.setdefault(word, len(numbers)) for word in _WORD.findall(text.casefold()))
        for text in texts
    ]


def _shared_shingles(texts: Sequence[tuple[int, ...]], shingle_words: int) -> dict[int, _Shingles]:
    """Return the shingles of each text that shares one with itself or others, by its place.

    Args:
      texts: Numbers of the words of different texts, each of at least `shingle_words`.
      shingle_words: Words of a shingle.
    """
    if not texts:
        return {}
    lengths = np.asarray([len(text) for text in texts], np.int64)
    flat = np.fromiter(itertools.chain.from_iterable(texts), np.int64, lengths.sum())

    # A shingle's hash is a sum of its words' hashes, each times a factor of its place.
    generator = np.random.Philox(key=0)
    hashes = generator.random_raw(flat.max() + 1)
    factors = generator.random_raw(shingle_words) | np.uint64(1)
    windows = np.lib.stride_tricks.sliding_window_view(hashes[flat], shingle_words)
    counted = lengths - shingle_words + 1
    starts = np.cumsum(lengths) - lengths
    place = np.repeat(starts - (np.cumsum(counted) - counted), counted) + np.arange(counted.sum())
    _, ids, occurrences = np.unique(
        windows[place] @ factors, return_inverse=True, return_counts=True
    )

    of_text = np.repeat(np.arange(len(texts)), counted)
    sharing = np.unique(of_text[occurrences[ids] > 1])
    ends = np.cumsum(counted)
    found = {}
    for number in sharing.tolist():
        different = np.unique(ids[ends[number] - counted[number] : ends[number]])
        rarest_first = different[np.lexsort((different, occurrences[different]))]
        shared = rarest_first[occurrences[rarest_first] > 1].tolist()
        found[number] = _Shingles(len(different), shared)
    return found


def _prefix(shingles: _Shingles, similarity: float) -> list[int]:
    """Return the shared shingles of a text of which every text that is as similar has one in its.

    With shingles in one order, the k rarest of a set of n, k = n - ceil(similarity n) + 1, must
    share one with those of every set that is as similar: otherwise fewer than similarity n are
    common. Shingles that occur once come first in that order, and are shared with none.
    """
    size, shared = shingles
    # Rounding must not make a prefix shorter.
    length = size - math.ceil(similarity * size - 1e-6) + 1
    alone = size - len(shared)
    return shared[: max(length - alone, 0)]
