"""Questions about Python's help topics, in the format of SQuAD v1.1.

They ask for the text in quotation marks or in brackets.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lbopt.data.prepare._generated import Examples, GeneratedDataset
from lbopt.data.squad import normalize_answer
from lbopt.data.text import split_pydoc_topics

LARGEST = {"train": 400, "validation": 60}
"""Maximum number of questions of each split."""
QUESTIONS = {
    "What is in quotation marks?": re.compile(r'[^"]*"\s*(?P<answer>[^"]{1,40}?)\s*"[^"]*'),
    "What is in brackets?": re.compile(r"[^()]*\(\s*(?P<answer>[^()]{1,60}?)\s*\)[^()]*"),
}
"""Question -> pattern of the contexts that it is asked about: those with exactly one answer."""

_LONGEST_CONTEXT = 240
"""Maximum number of characters: question and context fit in 128 tokens of a small vocabulary."""


def _examples(split: str) -> Examples:
    train, validation, test = split_pydoc_topics()
    topics = train if split == "train" else [*validation, *test]
    for number, record in enumerate(itertools.islice(_records(topics), LARGEST[split])):
        key = f"{split}-{number:03d}"
        yield key, {"id": key, **record}


def _records(topics: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
    for topic in topics:
        for context in _contexts(topic):
            for question, pattern in QUESTIONS.items():
                found = pattern.fullmatch(context)
                # An answer of punctuation marks alone has an F1 score of 0 even against itself.
                if not found or not normalize_answer(found["answer"]):
                    continue
                answers = {"text": [found["answer"]], "answer_start": [found.start("answer")]}
                yield {
                    "title": topic[0][:60],
                    "context": context,
                    "question": question,
                    "answers": answers,
                }


def _contexts(topic: Sequence[str]) -> Iterator[str]:
    """Yield consecutive sentences joined up to the maximum length; longer ones are left out."""
    context = ""
    for sentence in topic:
        joined = f"{context} {sentence}".strip()
        if len(joined) > _LONGEST_CONTEXT:
            yield context
            joined = sentence if len(sentence) <= _LONGEST_CONTEXT else ""
        context = joined
    yield context


def _features(kinds: Any) -> dict[str, Any]:
    text = kinds.Text
    answers = kinds.Sequence({"text": text(), "answer_start": np.int32})
    return {
        "id": text(),
        "title": text(),
        "context": text(),
        "question": text(),
        "answers": answers,
    }


PYDOC_SQUAD = GeneratedDataset(
    "pydoc_squad",
    "Questions about Python's help topics in the format of SQuAD, to try a recipe for questions "
    "without a download.",
    _features,
    {"train": lambda: _examples("train"), "validation": lambda: _examples("validation")},
)
