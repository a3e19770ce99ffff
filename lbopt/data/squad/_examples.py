"""Questions of SQuAD v1.1 (Rajpurkar et al., arXiv 1606.05250): from the official file or from TFDS's records."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from lbopt import _typed_json, paths
from lbopt.errors import EnvironmentProblem, UserError, require

_FIX = "give records of SQuAD v1.1"


class Question(NamedTuple):
    """A question about a text.

    Attributes:
      id: by which a prediction is told from others.
      question: the question.
      context: the text that has the answer.
      answers: what people gave as the answer, one or more; the first is trained on, all of them are scored against.
      answer_starts: where each begins, in characters of `context`.
    """

    id: str
    question: str
    context: str
    answers: tuple[str, ...]
    answer_starts: tuple[int, ...]

    def span(self) -> tuple[int, int] | None:
        """Return (start, stop) of the first answer in characters of the context.

        Only white space may differ between the two. None where the context has another text there: a wrong record.

        >>> Question("1", "Who?", "It was  Ada\\tByron.", ("Ada Byron",), (8,)).span()
        (8, 17)
        """
        text, start = self.answers[0], self.answer_starts[0]
        words = text.split()
        if start < 0 or not words:
            return None
        if self.context.startswith(text, start):
            return start, start + len(text)
        found = re.compile(r"\s*" + r"\s+".join(map(re.escape, words))).match(self.context, start)
        return found and found.span()


def questions_from_records(records: Iterable[Mapping[str, Any]]) -> list[Question]:
    """Read records of the schema of TFDS's `squad`.

    Args:
      records: with `id`, `context` and `question` (bytes or str) and `answers`, which has `text` (a sequence of bytes or
        str) and `answer_start` (as many ints, characters of the context). Other fields are not read.

    Raises:
      UserError: naming the record and the field that is missing or is something else.
    """
    return [
        question_from_record(record, f"records[{number}]") for number, record in enumerate(records)
    ]


def read_json(path: paths.GivenPath) -> list[Question]:
    """Read the official file, `train-v1.1.json` or `dev-v1.1.json`.

    Raises:
      UserError: naming the place in the file that is missing or is something else.
      EnvironmentProblem: if the file cannot be read.
    """
    try:
        content = _typed_json.read_file(
            paths.local(path, "path"), most_bytes=_typed_json.MOST_LINES_BYTES
        )
    except OSError as error:
        raise EnvironmentProblem(
            f"{path}: cannot be read ({error.strerror}); give the file of SQuAD v1.1"
        ) from error
    except ValueError as error:
        raise UserError(f"{path}: {error}; fetch the file of SQuAD v1.1 again") from error
    return [question_from_record(record, place) for place, record in _flattened(content, str(path))]


def _flattened(content: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the record, as TFDS has it, of each question of the official file."""
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
    """Read one record; see `questions_from_records`. `place` is what messages call it."""
    texts = _list(_field(record, "answers", place), "text", f"{place}.answers")
    starts = _list(record["answers"], "answer_start", f"{place}.answers")
    require(texts, f"{place}.answers", 0, f"a question has one answer or more; {_FIX}, not of v2")
    require(
        len(texts) == len(starts),
        f"{place}.answers.answer_start",
        len(starts),
        f"there are {len(texts)} texts; give each its start",
    )
    name, question, context = (
        _text(_field(record, name, place), f"{place}.{name}")
        for name in ("id", "question", "context")
    )
    return Question(
        name,
        question,
        context,
        tuple(_text(text, where) for where, text in texts),
        tuple(_whole(start, where) for where, start in starts),
    )


def _field(record: Any, name: str, place: str) -> Any:
    require(
        isinstance(record, Mapping), place, type(record).__name__, f"a mapping is needed; {_FIX}"
    )
    require(name in record, place, sorted(map(str, record)), f"there is no {name!r}; {_FIX}")
    return record[name]


def _list(record: Any, name: str, place: str) -> list[tuple[str, Any]]:
    """Return the place and the value of each item of a field."""
    items = _field(record, name, place)
    known = isinstance(items, list | tuple) or (isinstance(items, np.ndarray) and items.ndim == 1)
    require(known, f"{place}.{name}", type(items).__name__, f"a list is needed; {_FIX}")
    return [(f"{place}.{name}[{number}]", item) for number, item in enumerate(items)]


def _text(value: Any, place: str) -> str:
    require(isinstance(value, str | bytes), place, value, f"text is needed; {_FIX}")
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise UserError(f"{place} = {value[:20]!r}: not UTF-8 ({error.reason}); {_FIX}") from error


def _whole(value: Any, place: str) -> int:
    known = isinstance(value, int | np.integer) and not isinstance(value, bool)
    require(known, place, value, f"a whole number is needed; {_FIX}")
    return int(value)
