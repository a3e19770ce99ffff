"""Windows of Python's help topics compared with a slow oracle that follows run_squad.py."""

import random
import re

import numpy as np
import pytest
from refusal import refused

from lbopt.data import Splits, TrainBatches
from lbopt.data.squad import EvaluationWindows, Question, TrainingWindows
from lbopt.data.text import WordPiece, load_pydoc_topics
from lbopt.data.text._pieces import CLS, PAD, SEP, SPECIAL_TOKENS
from lbopt.evaluation import choose_answers, score_answers

SIZES = [(64, 16, 12), (48, 100, 8), (128, 32, 64), (40, 7, 12)]
"""sequence_length, doc_stride, max_query_length."""
TRANSPOSED = (
    "input_ids",
    "token_type_ids",
    "attention_mask",
    "start_position",
    "end_position",
    "may_start",
    "may_end",
)


@pytest.fixture(scope="module")
def pieces():
    return load_pydoc_topics(600).pieces


@pytest.fixture(scope="module")
def questions():
    """Return questions about spans of topics; an answer consists of whole words."""
    from pydoc_data.topics import topics

    chance = random.Random(0)
    found = []
    texts = [topics[name] for name in sorted(topics) if len(topics[name]) > 400]
    while len(found) < 60:
        text = chance.choice(texts)
        begin = chance.randrange(len(text) - 300)
        context = text[begin : begin + chance.choice([40, 150, 300, 1500])]
        words = list(re.finditer(r"[A-Za-z0-9]+", context))
        if not words:
            continue
        first = chance.randrange(len(words))
        last = min(first + chance.choice([0, 0, 1, 4]), len(words) - 1)
        start = words[first].start()
        stop = words[last].end()
        if start and context[start - 1] == "_":
            continue
        asked = " ".join(text.split()[: chance.choice([1, 4, 30])])
        if spelt_once(context, start, stop):
            found.append(
                Question(str(len(found)), asked, context, (context[start:stop],), (start,))
            )
    return found


def spelt_once(context, start, stop):
    """Return whether an answer occurs once in its words; of two, run_squad.py takes the first."""
    left = max(context.rfind(space, 0, start) for space in " \n\t") + 1
    right = min(
        (place for space in " \n\t" if (place := context.find(space, stop)) >= 0),
        default=len(context),
    )
    return context[left:right].lower().count(context[start:stop].lower()) == 1


class Slow:
    """The definitions of run_squad.py for one question, in plain lists."""

    def __init__(self, question, pieces, sequence_length, doc_stride, max_query_length):
        self.length = sequence_length
        self.query = pieces.encode([question.question]).tokens.tolist()[:max_query_length]
        self.tokens, self.answer = self.tokenized(question, pieces)
        room = sequence_length - len(self.query) - 3
        self.spans = []
        start = 0
        while start < len(self.tokens):
            size = min(room, len(self.tokens) - start)
            self.spans.append((start, size))
            if start + size == len(self.tokens):
                break
            start += min(size, doc_stride)

    @staticmethod
    def tokenized(question, pieces):
        """Return the tokens of the context, and (first, last) of the answer in run_squad.py."""
        tokens = []
        words = []
        place = 0

        for word in question.context.split():
            place = question.context.index(word, place)
            mine = pieces.encode([word]).tokens.tolist()
            words.append((place, place + len(word), len(tokens), len(tokens) + len(mine) - 1))
            tokens += mine
            place += len(word)

        start = question.answer_starts[0]
        touched = [
            word for word in words if word[0] < start + len(question.answers[0]) and word[1] > start
        ]
        first = touched[0][2]
        last = touched[-1][3]

        wanted = pieces.encode([question.answers[0]]).tokens.tolist()
        for left in range(first, last + 1):
            for right in range(last, left - 1, -1):
                if tokens[left : right + 1] == wanted:
                    return tokens, (left, right)
        return tokens, (first, last)

    def most_context(self, position):
        """Return the index of the window that gives a token of the context the most context."""
        best = None
        best_number = None
        for number, (start, size) in enumerate(self.spans):
            if not start <= position < start + size:
                continue
            value = min(position - start, start + size - 1 - position) + 0.01 * size
            if best is None or value > best:
                best = value
                best_number = number
        return best_number

    def window(self, number):
        start, size = self.spans[number]
        shift = len(self.query) + 2
        ids = [CLS, *self.query, SEP, *self.tokens[start : start + size], SEP]
        inside = self.answer[0] >= start and self.answer[1] < start + size
        answer = [place - start + shift if inside else 0 for place in self.answer]
        mine = [int(self.most_context(start + place) == number) for place in range(size)]
        rows = {
            "input_ids": ids,
            "token_type_ids": [0] * shift + [1] * (size + 1),
            "attention_mask": [1] * len(ids),
            "may_start": [0] * shift + mine,
            "may_end": [0] * shift + [1] * size,
        }
        padded = {name: row + [0] * (self.length - len(row)) for name, row in rows.items()}
        return {**padded, "start_position": answer[0], "end_position": answer[1]}


@pytest.mark.parametrize("sizes", SIZES)
def test_windows_equal_the_slow_ones(questions, pieces, sizes):
    dataset = EvaluationWindows(questions, pieces, *sizes)
    wanted = []
    question_of = []
    for number, question in enumerate(questions):
        slow = Slow(question, pieces, *sizes)
        wanted += [slow.window(window) for window in range(len(slow.spans))]
        question_of += [number] * len(slow.spans)
    assert dataset.question_of.tolist() == question_of
    batch = dataset.take(np.arange(len(dataset)))
    assert set(batch) == set(TRANSPOSED)
    for name in TRANSPOSED:
        np.testing.assert_array_equal(batch[name], [window[name] for window in wanted], name)
        assert batch[name].dtype == np.int32


def test_the_oracle_meets_every_case(questions, pieces):
    """Questions have several windows, and short and long answers inside and outside of them."""
    dataset = EvaluationWindows(questions, pieces, *SIZES[0])
    start, end = (
        dataset.take(np.arange(len(dataset)))[f"{name}_position"] for name in ("start", "end")
    )
    assert np.bincount(dataset.question_of).max() > 10
    assert np.bincount(dataset.question_of).min() == 1
    assert (start == 0).sum() > 20
    assert (start > 0).sum() > 20
    assert (end > start + 3).any()
    assert ((end == start) & (start > 0)).any()
    inner = [one for one in questions if one.answers[0] not in one.context.split()]
    assert len(inner) > 10
    assert any(len(pieces.encode([one.question]).tokens) > SIZES[0][2] for one in questions)


@pytest.mark.parametrize("sizes", SIZES)
def test_every_token_is_in_a_window_and_has_most_context_in_one(questions, pieces, sizes):
    dataset = EvaluationWindows(questions, pieces, *sizes)
    batch = dataset.take(np.arange(len(dataset)))
    stride = sizes[1]
    for number, question in enumerate(questions):
        rows = np.flatnonzero(dataset.question_of == number)
        size = len(pieces.encode([question.context]).tokens)
        seen = np.zeros(size, int)
        owned = np.zeros(size, int)
        begin = 0
        for row in rows:
            context = np.flatnonzero(batch["may_end"][row])
            seen[begin : begin + len(context)] += 1
            owned[begin : begin + len(context)] += batch["may_start"][row][context]
            begin += min(stride, len(context))
        assert seen.min() >= 1
        assert (owned == 1).all()
        assert (batch["may_start"][rows] <= batch["may_end"][rows]).all()


def test_the_labelled_stretch_covers_the_answer_and_little_more(questions, pieces):
    """The labelled characters begin and end within a token of the answer."""
    dataset = EvaluationWindows(questions, pieces, *SIZES[0])
    batch = dataset.take(np.arange(len(dataset)))
    labelled = np.flatnonzero(batch["start_position"])
    for row in labelled:
        answer = questions[dataset.question_of[row]].answers[0]
        assert dataset.text(row, batch["start_position"][row], batch["end_position"][row]) == answer
    whole = EvaluationWindows(questions, pieces, 2048)
    assert (whole.take(np.arange(len(whole)))["start_position"] > 0).all()


def test_gold_positions_give_the_gold_text(questions, pieces):
    """White space and case are the context's, so a plain comparison finds them equal."""
    dataset = EvaluationWindows(questions, pieces, 384, 128)
    batch = dataset.take(np.arange(len(dataset)))
    start = batch["start_position"]
    end = batch["end_position"]
    answered = choose_answers(dataset, np.where(start > 0, 0.0, -np.inf), start, end)
    assert answered == {question.id: question.answers[0] for question in questions}
    assert any("\n" in answer or "  " in answer for answer in answered.values())
    assert score_answers(answered, questions)["exact_match"] == 100.0


def words(*pieces):
    return WordPiece([*SPECIAL_TOKENS, *pieces])


def labelled(context, answer, start, pieces):
    dataset = EvaluationWindows([Question("1", "q", context, (answer,), (start,))], pieces, 32)
    batch = dataset.take(np.arange(1))
    return dataset.text(0, int(batch["start_position"][0]), int(batch["end_position"][0]))


@pytest.mark.parametrize("size", [300, 301, 302, 310, 449, 450, 451, 700])
def test_the_size_of_a_window_counts(size):
    """The second window has 151 of 301 tokens; all but the last have more context in the first."""
    question = Question("1", "q", "x " * size, ("x",), (0,))
    pieces = words("q", "x")
    dataset = EvaluationWindows([question], pieces, 304, 150)
    slow = Slow(question, pieces, 304, 150, 64)
    own = dataset.take(np.arange(len(dataset)))["may_start"]
    np.testing.assert_array_equal(
        own, [slow.window(number)["may_start"] for number in range(len(slow.spans))]
    )
    assert size != 301 or own.sum(1).tolist() == [300, 1]


def test_an_answer_inside_a_word():
    """The labels cover all tokens that contain part of it; no token is divided."""
    pieces = words("q", "the", "japan", "##ese", "japanese2", "1895", "(", "-", "1943", ")", ".")
    assert labelled("The Japanese.", "Japan", 4, pieces) == "Japan"
    assert labelled("The Japanese.", "nese", 8, pieces) == "Japanese"
    assert labelled("The Japanese2.", "Japan", 4, pieces) == "Japanese2"
    assert labelled("The (1895-1943).", "1895", 5, pieces) == "1895"
    assert labelled("The (1895-1943).", "1895-1943)", 5, pieces) == "1895-1943)"


def test_of_two_places_the_one_that_is_meant():
    pieces = words("q", "a", "b", "-")
    dataset = EvaluationWindows([Question("1", "q", "b a-b-a a", ("a",), (6,))], pieces, 32)
    assert dataset.take(np.arange(1))["start_position"].tolist() == [3 + 5]


def test_letters_that_the_tokenizer_changes_keep_their_place():
    pieces = words("q", "zoe", "in", "koln", "中", ".")
    assert labelled("  Zoë\u00a0in Ko\u0308ln.", "Ko\u0308ln", 9, pieces) == "Ko\u0308ln"
    assert labelled("Zoë\u200b 中中.", "中", 6, pieces) == "中"


def test_a_literal_special_token_is_text():
    batch = EvaluationWindows(
        [Question("1", "q [SEP]", "x [CLS] y", ("y",), (8,))], words("q", "x", "y"), 20
    ).take(np.arange(1))
    assert (batch["input_ids"] == SEP).sum() == 2
    assert (batch["input_ids"] == CLS).sum() == 1


def test_special_tokens_are_where_the_vocabulary_has_them():
    """The positions are those of the published vocabularies: [PAD] is 0 and [CLS] is 101."""
    pieces = WordPiece(["q", "x", "[PAD]", "y", "[SEP]", "[MASK]", "[UNK]", "[CLS]"])
    batch = EvaluationWindows([Question("1", "q", "x y", ("y",), (2,))], pieces, 8).take(
        np.arange(1)
    )
    assert batch["input_ids"].tolist() == [[7, 0, 4, 1, 3, 4, 2, 2]]


def test_training_drops_wrong_records_and_evaluation_keeps_them():
    pieces = words("q", "x", "y")
    good = Question("1", "q", "x y", ("y",), (2,))
    wrong = Question("2", "q", "x y", ("y",), (0,))
    training = TrainingWindows([wrong, good, wrong], pieces, 8)
    assert training.num_dropped == 2
    assert len(training) == 1
    assert training.questions == (good,)
    evaluation = EvaluationWindows([wrong, good], pieces, 8)
    batch = evaluation.take(np.arange(2))
    assert batch["start_position"].tolist() == batch["end_position"].tolist() == [0, 4]
    with refused("questions", 0, "missing"):
        TrainingWindows([wrong], pieces, 8)


def test_training_has_the_same_windows(questions, pieces):
    training, evaluation = (
        kind(questions, pieces, *SIZES[0]) for kind in (TrainingWindows, EvaluationWindows)
    )
    assert training.num_dropped == 0
    ours, theirs = (dataset.take(np.arange(len(dataset))) for dataset in (training, evaluation))
    assert set(ours) == set(TRANSPOSED[:5])
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name])


def test_windows_are_a_data_set(questions, pieces):
    """Indices may come in any order; epochs are equal; global batches are supported."""
    dataset = TrainingWindows(questions, pieces, *SIZES[0])
    assert Splits(dataset, dataset, dataset).train is dataset
    indices = np.asarray([5, 0, 5, len(dataset) - 1])
    everything = dataset.take(np.arange(len(dataset)))
    for batch in (dataset.take(indices), dataset.draw(indices, np.arange(4), 7)):
        for name, array in batch.items():
            np.testing.assert_array_equal(array, everything[name][indices])
    assert TrainBatches(dataset, 0, 8, 2)[1]["input_ids"].shape == (8, 64)


def test_a_context_without_a_token_has_no_window():
    pieces = words("q", "x", "y")
    dataset = EvaluationWindows(
        [Question("1", "q", " \u200b", ("z",), (0,)), Question("2", "q", "x y", ("y",), (2,))],
        pieces,
        8,
    )
    assert dataset.question_of.tolist() == [1]
    assert choose_answers(dataset, np.zeros(1), np.asarray([3]), np.asarray([3])) == {"2": "x"}


def test_what_does_not_fit_is_refused():
    pieces = words("q", "x", "y")
    one = Question("1", "q q q q", "x y", ("y",), (2,))
    for kind in (TrainingWindows, EvaluationWindows):
        with refused("sequence_length", 7, "value"):
            kind([one], pieces, 7)
        assert len(kind([one], pieces, 8)) == 2
        assert len(kind([one], pieces, 6, max_query_length=2)) == 2
        with refused("questions", 0, "missing"):
            kind([], pieces, 8)
        with refused("doc_stride", 0, "value"):
            kind([one], pieces, 8, 0)
        with refused("max_query_length", 0, "value"):
            kind([one], pieces, 8, 1, 0)
    with refused("questions", 1, "value"):
        EvaluationWindows([one._replace(context="")], pieces, 8)
    with refused("questions", 2, "conflict"):
        EvaluationWindows([one, one], pieces, 8)


def test_padding_is_pad(questions, pieces):
    batch = TrainingWindows(questions, pieces, *SIZES[2]).take(np.arange(9))
    assert ((batch["input_ids"] == PAD) == (batch["attention_mask"] == 0)).all()
