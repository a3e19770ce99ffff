"""Near-duplicates among many short texts, found exactly."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
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
    sets = _shared_shingles(texts, shingle_words, max(fewest_words, shingle_words))
    found = np.zeros(len(texts), bool)
    candidates: dict[int, set[int]] = {}
    for earlier, later in _candidates(sets, similarity):
        candidates.setdefault(later, set()).add(earlier)

    # In order, because only texts that are kept count.
    for later in sorted(candidates):
        found[later] = any(
            _jaccard(sets[later], sets[earlier]) >= similarity
            for earlier in candidates[later]
            if not found[earlier]
        )
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


def _shared_shingles(
    texts: Sequence[str], shingle_words: int, fewest_words: int
) -> dict[int, _Shingles]:
    """Return the shingles of each text that is long enough and shares one with itself or others."""
    numbers: dict[str, int] = {}
    words = [
        [numbers.setdefault(word, len(numbers)) for word in _WORD.findall(text.casefold())]
        for text in texts
    ]
    lengths = np.asarray(
        [len(text) if len(text) >= fewest_words else 0 for text in words], np.int64
    )
    flat = np.fromiter(
        itertools.chain.from_iterable(text for text in words if len(text) >= fewest_words),
        np.int64,
        lengths.sum(),
    )
    if not len(flat):
        return {}

    # A shingle's hash is a sum of its words' hashes, each times a factor of its place.
    generator = np.random.Philox(key=0)
    hashes = generator.random_raw(len(numbers))
    factors = generator.random_raw(shingle_words) | np.uint64(1)
    windows = np.lib.stride_tricks.sliding_window_view(hashes[flat], shingle_words)
    counted = np.maximum(lengths - shingle_words + 1, 0)
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


def _candidates(sets: Mapping[int, _Shingles], similarity: float) -> set[tuple[int, int]]:
    """Return the pairs (earlier, later) of texts that share a shingle of their prefixes.

    With shingles in one order, the k rarest of a set of n, k = n - ceil(similarity n) + 1, must
    share one with those of every set that is as similar: otherwise fewer than similarity n are
    common. Shingles that occur once come first in that order, and are shared with none.
    """
    groups: dict[int, list[int]] = {}
    for number, (size, shared) in sets.items():
        # Rounding must not make a prefix shorter.
        length = size - math.ceil(similarity * size - 1e-6) + 1
        alone = size - len(shared)
        for shingle in shared[: max(length - alone, 0)]:
            groups.setdefault(shingle, []).append(number)
    return {
        (earlier, later)
        for group in groups.values()
        for place, later in enumerate(group)
        for earlier in group[:place]
    }
