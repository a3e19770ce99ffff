"""Exact match and F1 compared with an oracle in exact arithmetic; the choice of answers."""

import collections
import fractions
import string

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from refusal import refused

from lbopt.data.squad import EvaluationWindows, Question
from lbopt.data.text import WordPiece
from lbopt.data.text._pieces import SPECIAL_TOKENS
from lbopt.evaluation import choose_answers, exact_match, f1_score, score_answers


def words_by_hand(text):
    """Return the words in lower case, without ASCII punctuation and articles."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    found = []
    word = ""
    for letter in kept + " ":
        if letter.isalnum():
            word += letter
            continue
        found += [" " if word in ("a", "an", "the") else word, letter]
        word = ""
    return "".join(found).split()


def f1_by_hand(prediction, gold):
    ours = words_by_hand(prediction)
    theirs = words_by_hand(gold)
    rest = list(theirs)
    common = 0
    for word in ours:
        if word in rest:
            rest.remove(word)
            common += 1
    if not common:
        return 0.0
    precision = fractions.Fraction(common, len(ours))
    recall = fractions.Fraction(common, len(theirs))
    return float(2 * precision * recall / (precision + recall))


@pytest.mark.parametrize(
    ("prediction", "gold", "same", "overlap"),
    [
        ("Denver Broncos", "Denver Broncos", True, 1.0),
        ("the Denver Broncos!", "denver  broncos", True, 1.0),
        ("a dog", "an dog", True, 1.0),
        ("theatre", "the atre", False, 0.0),
        ("U.S.", "us", True, 1.0),
        ("The-A", "thea", True, 1.0),  # punctuation goes first, so no article is left
        ("in 1,895", "in 1895", True, 1.0),
        ("Zoë", "zoe", False, 0.0),  # accents stay
        ("10\u201312", "1012", False, 0.0),  # and so does punctuation beyond ASCII
        ("10-12", "1012", True, 1.0),
        ("“the” cat", "“ ” cat", True, 1.0),
        ("", "", True, 0.0),
        ("the", "a", True, 0.0),  # nothing is left of either
        ("", "cat", False, 0.0),
        ("cat", "?!", False, 0.0),
        ("cat cat", "cat", False, 2 / 3),
        ("cat cat dog", "cat dog dog", False, 2 / 3),
        ("one two three four", "three four five", False, 4 / 7),
        ("two one", "one two", False, 1.0),
        ("a\u00a0cat", "cat", True, 1.0),
    ],
)
def test_the_measures(prediction, gold, same, overlap):
    assert exact_match(prediction, gold) is same
    assert f1_score(prediction, gold) == f1_by_hand(prediction, gold) == overlap
    assert exact_match(gold, prediction) is same
    assert f1_score(gold, prediction) == overlap


WORDS = [
    "a",
    "An",
    "THE",
    "cat",
    "Cat's",
    "dog",
    "dog",
    "“the”",
    "the.",
    "x-y",
    "xy",
    "é",
    "\u2013",
    "",
    "\t",
    "U.S.",
    "them",
]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=7).map(" ".join)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(TEXTS, TEXTS)
def test_the_measures_equal_the_oracle(prediction, gold):
    assert exact_match(prediction, gold) == (words_by_hand(prediction) == words_by_hand(gold))
    assert f1_score(prediction, gold) == f1_by_hand(prediction, gold)


def question(number, *answers):
    return Question(str(number), "?", "context", answers, (0,) * len(answers))


def test_a_score_is_in_percent_over_all_questions():
    questions = [
        question(0, "cat", "black cat"),
        question(1, "dog"),
        question(2, "red fox"),
        question(3, ""),
    ]
    predictions = {"0": "the black cat", "2": "fox", "3": "", "other": "dog", "another": "dog"}
    assert score_answers(predictions, questions) == {
        "exact_match": 50.0,
        "f1": pytest.approx(100 * (1 + 0 + 2 / 3 + 0) / 4, rel=1e-15),
    }
    assert score_answers({}, questions) == {"exact_match": 0.0, "f1": 0.0}
    right = {one.id: one.answers[-1] for one in questions[:3]}
    assert score_answers(right, questions[:3]) == {"exact_match": 100.0, "f1": 100.0}


def test_the_best_answer_of_each_measure_counts():
    """For "x y" the first answer has the better F1; none matches exactly."""
    assert score_answers({"0": "x y"}, [question(0, "x y z", "x q q q")]) == {
        "exact_match": 0.0,
        "f1": pytest.approx(80.0),
    }
    assert score_answers({"0": "x y"}, [question(0, "x q q q", "x y z")]) == {
        "exact_match": 0.0,
        "f1": pytest.approx(80.0),
    }


def test_nothing_to_score_is_refused():
    with refused("questions", 0, "missing"):
        score_answers({}, [])


CONTEXTS = ["One two\tThree  four five six.", "Six (Five)", "seven"]


@pytest.fixture(scope="module")
def dataset():
    """Return windows of at most four tokens: of the first context three, of the others one."""
    pieces = WordPiece(
        [
            *SPECIAL_TOKENS,
            "one",
            "two",
            "three",
            "four",
            "five",
            "six",
            "seven",
            "q",
            "(",
            ")",
            ".",
        ],
    )

    questions = [
        Question(f"id{n}", "q", context, ("x",), (0,)) for n, context in enumerate(CONTEXTS)
    ]
    return EvaluationWindows(questions, pieces, sequence_length=8, doc_stride=2)


def chosen(dataset, **windows):
    """Choose among (score, start, end) of some windows, `w0` and so on; the others have none."""
    rows = [windows.get(f"w{number}", (-np.inf, 0, 0)) for number in range(len(dataset))]
    scores, starts, ends = map(np.asarray, zip(*rows, strict=True))
    return choose_answers(dataset, scores.astype(np.float32), starts, ends)


def test_the_windows_of_each_question(dataset):
    assert collections.Counter(dataset.question_of.tolist()) == {0: 3, 1: 1, 2: 1}


def test_the_best_window_and_its_text(dataset):
    found = chosen(dataset, w0=(1.0, 3, 3), w1=(2.5, 3, 4), w2=(-9.0, 5, 5), w3=(-3.0, 4, 6))
    assert found == {"id0": "Three  four", "id1": "(Five)"}


def test_text_is_as_in_the_context(dataset):
    assert chosen(dataset, w0=(0.0, 3, 6)) == {"id0": "One two\tThree  four"}
    assert dataset.text(2, 3, 5) == "five six."


def test_the_first_of_equal_windows_wins(dataset):
    assert chosen(dataset, w1=(1.0, 3, 3), w2=(1.0, 3, 3)) == {"id0": "Three"}


def test_scores_that_are_not_finite_are_no_answer(dataset):
    assert chosen(
        dataset, w0=(np.nan, 3, 3), w1=(-np.inf, 3, 3), w3=(np.nan, 3, 3), w4=(0.0, 3, 3)
    ) == {"id2": "seven"}


def test_places_outside_of_the_context_are_refused(dataset):
    for start, end in ((2, 3), (4, 3), (3, 7), (0, 0)):
        with refused("start, end", (start, end), "value"):
            dataset.text(0, start, end)
    with refused("scores, starts, ends", (4, 4, 4), "mismatch"):
        choose_answers(dataset, np.zeros(4), np.zeros(4, int), np.zeros(4, int))
