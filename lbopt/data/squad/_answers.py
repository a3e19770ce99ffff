"""From scores of stretches to answers, and how right these are by SQuAD v1.1's own measures."""

from __future__ import annotations

import collections
import re
import string
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lbopt.data.squad._examples import Question
from lbopt.data.squad._features import EvaluationWindows
from lbopt.errors import require

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(prediction: str, gold: str) -> bool:
    """Return whether two answers are the same but for case, ASCII punctuation, articles and white space.

    References:
      Rajpurkar et al., arXiv 1606.05250, section 6.1; the official evaluate-v1.1.py. So of `f1_score` and `score_answers`.

    >>> exact_match("The U.S. army", "us  Army")
    True
    """
    return _normalize(prediction) == _normalize(gold)


def f1_score(prediction: str, gold: str) -> float:
    """Return the harmonic mean of precision and recall of the words that two answers share, each as often as in both.

    Words are counted after what `exact_match` leaves out is left out; without a common word (with no word at all, too) it
    is 0.

    >>> f1_score("a red red car", "the red car!")
    0.8
    """
    ours, theirs = (collections.Counter(_normalize(text).split()) for text in (prediction, gold))
    common = (ours & theirs).total()
    return 2 * common / (ours.total() + theirs.total()) if common else 0.0


def score_answers(
    predictions: Mapping[str, str], questions: Sequence[Question]
) -> dict[str, float]:
    """Return `exact_match` and `f1_score` in percent over all questions, each against the answer that fits best.

    Args:
      predictions: id of a question -> answer; one that is missing counts 0.
      questions: at least one.

    Raises:
      UserError: if there is no question.
    """
    require(questions, "questions", len(questions), "there is nothing to score; give at least one")
    return {
        "exact_match": _percentage(exact_match, predictions, questions),
        "f1": _percentage(f1_score, predictions, questions),
    }


def choose_answers(
    dataset: EvaluationWindows, scores: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> dict[str, str]:
    """Return the answer of each question by its id: the best stretch of its best window, as the context has it.

    Args:
      dataset: the windows.
      scores: [windows] of each window's best stretch, -inf if it has none; the first of equals wins.
      starts: [windows] int, the place of its first token.
      ends: [windows] int, the place of its last token.

    Returns:
      Id -> answer; a question none of whose windows has a finite score is left out.

    Raises:
      ValueError: if there are not as many as windows.
    """
    if not len(scores) == len(starts) == len(ends) == len(dataset):
        raise ValueError(
            f"{len(scores)}, {len(starts)}, {len(ends)} scores, starts, ends: give {len(dataset)} of each"
        )
    best: dict[int, int] = {}
    for window in np.flatnonzero(np.isfinite(scores)):
        question = int(dataset.question_of[window])
        if question not in best or scores[window] > scores[best[question]]:
            best[question] = int(window)
    return {
        dataset.questions[question].id: dataset.text(window, int(starts[window]), int(ends[window]))
        for question, window in best.items()
    }


def _normalize(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


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
