"""Questions of SQuAD v1.1 (Rajpurkar et al., arXiv 1606.05250v3).

They are read from the official file or from records of TensorFlow Datasets (TFDS).
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from lbopt import _typed_json, paths
from lbopt.errors import EnvironmentProblem, UserError, require

_FIX = "give records of SQuAD v1.1"
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Question(NamedTuple):
    """A question about a text.

    Attributes:
      id: Unique name, the key of its prediction.
      question: The question.
      context: Text that contains the answer.
      answers: Answers that people gave, at least one. Training uses the first, evaluation the one
        that fits a prediction best.
      answer_starts: Index of the first character of each answer in `context`.
    """

    id: str
    question: str
    context: str
    answers: tuple[str, ...]
    answer_starts: tuple[int, ...]

    def span(self) -> tuple[int, int] | None:
        """Return (start, stop) of the first answer in characters of the context.

        White space may differ between answer and context. The span is None if the context has
        another text in that place; the record is wrong then.

        >>> Question("1", "Who?", "It was  Ada\\tByron.", ("Ada Byron",), (8,)).span()
        (8, 17)
        """
        text = self.answers[0]
        start = self.answer_starts[0]
        words = text.split()
        if start < 0 or not words:
            return None
        if self.context.startswith(text, start):
            return start, start + len(text)
        found = re.compile(r"\s*" + r"\s+".join(map(re.escape, words))).match(self.context, start)
        return found and found.span()


def normalize_answer(text: str) -> str:
    """Return an answer in lower case, without articles and ASCII punctuation.

    References:
      Rajpurkar et al., arXiv 1606.05250v3, section 6.1; the official evaluate-v1.1.py.

    >>> normalize_answer("The U.S.  army")
    'us army'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def questions_from_records(records: Iterable[Mapping[str, Any]]) -> list[Question]:
    """Return the questions of records with the schema of TFDS's `squad`.

    Args:
      records: Records with `id`, `context` and `question` (bytes or str) and `answers`, which has
        `text` (a sequence of bytes or str) and `answer_start` (an int for each text, in characters
        of the context). Other fields are ignored.

    Raises:
      UserError: If a field of a record is missing or has a wrong type.
    """
    return [
        question_from_record(record, f"records[{number}]") for number, record in enumerate(records)
    ]


def read_json(path: paths.GivenPath) -> list[Question]:
    """Return the questions of the official file, `train-v1.1.json` or `dev-v1.1.json`.

    Raises:
      UserError: If a place in the file is missing or has a wrong type.
      EnvironmentProblem: If the file cannot be read.
    """
    file = paths.readable(path, "path")
    try:
        content = _typed_json.read_file(file, most_bytes=_typed_json.MOST_LINES_BYTES)
    except OSError as error:
        fix = f"it cannot be read ({error.strerror}); give the file of SQuAD v1.1"
        raise EnvironmentProblem("path", str(path), fix, code="resource") from error
    except ValueError as error:
        fix = f"{error}; download the file of SQuAD v1.1 again"
        raise UserError("path", str(path), fix, code="damaged") from error
    return [question_from_record(record, place) for place, record in _flattened(content, str(path))]


def _flattened(content: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each question of the official file as a place in it and a record of TFDS's schema."""
    for article_place, article in _list(content, "data", path):
        for place, paragraph in _list(article, "paragraphs", article_place):
            context = _field(paragraph, "context", place)
            for question_place, question in _list(paragraph, "qas", place):
                answers = _list(question, "answers", question_place)
                named = {
                    name: [_field(answer, name, where) for where, answer in answers]
                    for name in ("text", "answer_start")
                }
                yield question_place, {**question, "context": context, "answers": named}


def question_from_record(record: Mapping[str, Any], place: str = "record") -> Question:
    """Return the question of a record, see `questions_from_records`.

    Args:
      record: The record.
      place: Name of the record in messages.
    """
    texts = _list(_field(record, "answers", place), "text", f"{place}.answers")
    starts = _list(record["answers"], "answer_start", f"{place}.answers")
    fix = f"a question has one answer or more; {_FIX}, not of v2"
    require(texts, f"{place}.answers", 0, fix, code="missing")
    fix = f"there are {len(texts)} texts; give each its start"
    field = f"{place}.answers.answer_start"
    require(len(texts) == len(starts), field, len(starts), fix, code="mismatch")

    def text(name: str) -> str:
        return _text(_field(record, name, place), f"{place}.{name}")

    return Question(
        text("id"),
        text("question"),
        text("context"),
        tuple(_text(answer, where) for where, answer in texts),
        tuple(_whole(start, where) for where, start in starts),
    )


def _field(record: Any, name: str, place: str) -> Any:
    kind = type(record).__name__
    require(isinstance(record, Mapping), place, kind, f"use a mapping; {_FIX}", code="type")
    fix = f"there is no {name!r}; {_FIX}"
    require(name in record, place, sorted(map(str, record)), fix, code="missing")
    return record[name]


def _list(record: Any, name: str, place: str) -> list[tuple[str, Any]]:
    """Return the place and the value of each item of a field."""
    items = _field(record, name, place)
    known = isinstance(items, list | tuple) or (isinstance(items, np.ndarray) and items.ndim == 1)
    kind = type(items).__name__
    require(known, f"{place}.{name}", kind, f"use a list; {_FIX}", code="type")
    return [(f"{place}.{name}[{number}]", item) for number, item in enumerate(items)]


def _text(value: Any, place: str) -> str:
    require(isinstance(value, str | bytes), place, value, f"use text; {_FIX}", code="type")
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        fix = f"it is not UTF-8 ({error.reason}); {_FIX}"
        raise UserError(place, value[:20], fix, code="damaged") from error


def _whole(value: Any, place: str) -> int:
    known = isinstance(value, int | np.integer) and not isinstance(value, bool)
    require(known, place, value, f"use a whole number; {_FIX}", code="type")
    return int(value)
