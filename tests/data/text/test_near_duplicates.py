"""Near-duplicates against a comparison of all pairs."""

import random
import re
import tracemalloc

import pytest

from lbopt.data.text import near_duplicates


def by_all_pairs(texts, similarity, size, fewest):
    """Return the near-duplicates by their definition."""
    sets = []
    for text in texts:
        words = re.findall(r"\w+", text.casefold())
        count = len(words) - size + 1 if len(words) >= max(size, fewest) else 0
        sets.append({tuple(words[place : place + size]) for place in range(count)})
    found = []
    for later, mine in enumerate(sets):
        close = (
            len(mine & sets[earlier]) / len(mine | sets[earlier]) >= similarity
            for earlier in range(later)
            if mine and sets[earlier] and not found[earlier]
        )
        found.append(any(close))
    return found


@pytest.mark.parametrize("similarity", [0.3, 0.5, 0.55, 0.8, 1.0])
def test_they_are_those_of_a_comparison_of_all_pairs(similarity):
    generator = random.Random(0)
    hits = 0
    for _ in range(40):
        size, fewest = generator.choice([(1, 1), (2, 1), (3, 6), (5, 10)])
        kinds = [generator.choices("abcdef", k=generator.randint(1, 16)) for _ in range(12)]
        texts = []
        for _ in range(40):
            words = list(generator.choice(kinds))
            for _ in range(generator.randint(0, 2)):
                words[generator.randrange(len(words))] = generator.choice("abXyz")
            texts.append(generator.choice([" ", ", "]).join(words))
        wanted = by_all_pairs(texts, similarity, size, fewest)
        assert near_duplicates(texts, similarity, size, fewest).tolist() == wanted
        hits += sum(wanted)
    assert hits > 100


def test_a_sentence_that_is_repeated_takes_little_memory():
    words = "one two three four five six seven eight nine ten"
    texts = [f"{words}{'.' * (number % 3)}" for number in range(3000)]
    texts += [f"{words} {number}" for number in range(3000)]
    tracemalloc.start()
    found = near_duplicates(["Another text.", *texts])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.tolist() == [False, False, *[True] * 5999]
    assert peak < 5000 * len(texts)  # pairs of them take gigabytes


def test_no_text_has_none():
    assert near_duplicates([]).tolist() == []
    assert near_duplicates(["", "too few words"]).tolist() == [False, False]
