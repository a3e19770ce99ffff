"""Answers chosen by the scores of their spans, and the metrics of SQuAD v1.1."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lbopt.data.squad import EvaluationWindows, Question, normalize_answer
from lbopt.errors import require


def exact_match(prediction: str, gold: str) -> bool:
    """Return whether two answers are equal except for case, punctuation, articles and spaces.

    The punctuation is ASCII's.

    Args:
      prediction: The answer that is judged.
      gold: The answer that it is compared with.

    References:
      Rajpurkar et al., arXiv 1606.05250v3, section 6.1; the official evaluate-v1.1.py. They are the
      sources of `f1_score` and `score_answers`, too.

    >>> exact_match("The U.S. army", "us  Army")
    True
    """
    return normalize_answer(prediction) == normalize_answer(gold)


def f1_score(prediction: str, gold: str) -> float:
    """Return the harmonic mean of precision and recall of the words of an answer.

    Words are compared without the differences that `exact_match` ignores, and counted as often as
    they occur. The score is 0 if the answers have no word in common, or no word at all.

    Args:
      prediction: The answer that is judged.
      gold: The answer that it is compared with.

    >>> f1_score("a red red car", "the red car!")
    0.8
    """
    ours, theirs = (
        collections.Counter(normalize_answer(text).split()) for text in (prediction, gold)
    )
    common = (ours & theirs).total()
    return 2 * common / (ours.total() + theirs.total()) if common else 0.0


def score_answers(
    predictions: Mapping[str, str], questions: Sequence[Question]
) -> dict[str, float]:
    """Return `exact_match` and `f1` in percent, averaged over all questions.

    A prediction is compared with the reference answer that fits best.

    Args:
      predictions: Id of a question -> predicted answer. A missing one scores 0.
      questions: Questions with their reference answers, at least one.

    Raises:
      UserError: If there is no question.
    """
    fix = "there is nothing to score; give at least one"
    require(questions, "questions", len(questions), fix, code="missing")
    return {
        "exact_match": _percentage(exact_match, predictions, questions),
        "f1": _percentage(f1_score, predictions, questions),
    }


def choose_answers(
    dataset: EvaluationWindows, scores: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> dict[str, str]:
    """Return the answer to each question: the best span of its best window.

    Args:
      dataset: Windows of the questions.
      scores: [windows] score of the best span of each window, -inf if it has none. The first of
        equal scores wins.
      starts: [windows] int, place of the first token of that span.
      ends: [windows] int, place of the last token of that span.

    Returns:
      Id of a question -> answer as it stands in the context. Questions without a finite score are
      left out.

    Raises:
      UserError: If an array has another length than the data set.
    """
    lengths = (len(scores), len(starts), len(ends))
    fix = f"these are the lengths; the data set has {len(dataset)} windows"
    require(set(lengths) == {len(dataset)}, "scores, starts, ends", lengths, fix, code="mismatch")

    best: dict[int, int] = {}
    for window in np.flatnonzero(np.isfinite(scores)):
        question = int(dataset.question_of[window])
        if question not in best or scores[window] > scores[best[question]]:
            best[question] = int(window)
    return {
        dataset.questions[question].id: dataset.text(window, int(starts[window]), int(ends[window]))
        for question, window in best.items()
    }


def _percentage(
    measure: Callable[[str, str], float],
    predictions: Mapping[str, str],
    questions: Sequence[Question],
) -> float:
    total = sum(
        max(measure(predictions[question.id], gold) for gold in question.answers)
        for question in questions
        if question.id in predictions
    )
    return 100.0 * total / len(questions)
