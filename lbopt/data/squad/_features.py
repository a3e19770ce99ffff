"""Windows of questions and contexts, the examples of BERT on SQuAD."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lbopt.data._arrays import Reading
from lbopt.data.squad._examples import Question
from lbopt.data.text import WordPiece
from lbopt.errors import require

# Numbers of tokens: max_seq_length, doc_stride and max_query_length in
# google-research/bert@eedf5716ce1268e56f0a50264a88cafad334ac61:run_squad.py.
SEQUENCE_LENGTH = 384
DOC_STRIDE = 128
MAX_QUERY_LENGTH = 64
NUM_SPECIAL_POSITIONS = 3
"""Number of special tokens in [CLS] question [SEP] context [SEP]."""

_SIZE_WEIGHT = 0.01
"""Weight of a window's size in the choice of the window with maximum context (run_squad.py)."""
_NOWHERE = -1
"""Place of an answer that is not in the tokens."""


class _Texts(NamedTuple):
    """Tokens of all questions and contexts in one array. Equal contexts are stored once.

    Attributes:
      tokens: [tokens] int32.
      offsets: [tokens, 2] int64, (start, stop) of each token in characters of its text.
      questions: [questions, 2] int64, first token and number of tokens of each question.
      contexts: [questions, 2] int64, first token and number of tokens of each question's context.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    questions: np.ndarray
    contexts: np.ndarray


class _Windows(NamedTuple):
    """Spans of the contexts, in tokens of `_Texts`.

    Attributes:
      question: [windows] int64, number of the question.
      start: [windows] int64, first token of the span.
      size: [windows] int64, number of tokens of the span.
      own: [windows, 2] int64, (start, stop) of the tokens that have their maximum context in this
        window.
    """

    question: np.ndarray
    start: np.ndarray
    size: np.ndarray
    own: np.ndarray


def check_windows(doc_stride: int, max_query_length: int) -> None:
    """Raise `UserError` for numbers of tokens that no windows have."""
    for field, value in (("doc_stride", doc_stride), ("max_query_length", max_query_length)):
        require(value >= 1, field, value, "give a number >= 1")


def check_answer_length(max_answer_length: int) -> None:
    """Raise `UserError` for a number of tokens that no longest answer has."""
    require(max_answer_length >= 1, "max_answer_length", max_answer_length, "give a number >= 1")


class _QuestionWindows:
    """Examples `[CLS] question [SEP] span of the context [SEP]`.

    A long context gives a question several windows.
    """

    reading = Reading()

    def __init__(
        self,
        questions: Sequence[Question],
        pieces: WordPiece,
        sequence_length: int,
        doc_stride: int,
        max_query_length: int,
    ):
        check_windows(doc_stride, max_query_length)
        fix = "there is no question; give at least one"
        require(questions, "questions", len(questions), fix, code="missing")
        self.questions = tuple(questions)
        self._length = sequence_length
        self._special = pieces.special
        self._texts = _encode(questions, pieces, max_query_length)

        longest = int(self._texts.questions[:, 1].max())
        least = longest + NUM_SPECIAL_POSITIONS + 1
        fix = f"a question of {longest} tokens leaves no room for its context; use at least {least}"
        require(sequence_length >= least, "sequence_length", sequence_length, fix)
        limits = sequence_length - NUM_SPECIAL_POSITIONS - self._texts.questions[:, 1]
        self._windows = _cut(self._texts.contexts, limits, doc_stride)
        fix = "no context has a token; give text"
        require(len(self), "questions", len(questions), fix)
        self._answers = _answers(self.questions, self._texts)

    def __len__(self) -> int:
        return len(self._windows.question)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the windows at `indices` as one batch."""
        return self._pack(indices)

    def draw(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        """Return the windows at `indices` as one batch, the same in every epoch."""
        del epochs, seed
        return self.take(indices)

    def _pack(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return questions and contexts with their special tokens, and the answers."""
        special = self._special
        place = np.arange(self._length)[None]
        begin, end = self._bounds(indices)
        ids = self._texts.tokens[np.clip(self._sources(indices), 0, len(self._texts.tokens) - 1)]
        ids = np.where(place == 0, special.cls, ids)
        ids = np.where((place == begin - 1) | (place == end), special.sep, ids)
        start, stop = self._labels(indices)
        return {
            "input_ids": np.where(place > end, special.pad, ids).astype(np.int32),
            "token_type_ids": ((place >= begin) & (place <= end)).astype(np.int32),
            "attention_mask": (place <= end).astype(np.int32),
            "start_position": start.astype(np.int32),
            "end_position": stop.astype(np.int32),
        }

    def _bounds(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of the first token of the context and of the last [SEP].

        Returns:
          Two arrays [windows, 1] int64.
        """
        question_size = self._texts.questions[self._windows.question[indices], 1]
        begin = question_size + NUM_SPECIAL_POSITIONS - 1
        return begin[:, None], (begin + self._windows.size[indices])[:, None]

    def _sources(self, indices: np.ndarray) -> np.ndarray:
        """Return the index in `_Texts.tokens` of the token at each place of the windows.

        Returns:
          [windows, sequence_length] int64; entries at the places of special tokens have no meaning.
        """
        place = np.arange(self._length)[None]
        begin, _ = self._bounds(indices)
        question = self._texts.questions[self._windows.question[indices], :1]
        context = self._windows.start[indices][:, None]
        return np.where(place < begin, question + place - 1, context + place - begin)

    def _labels(self, indices: np.ndarray) -> np.ndarray:
        """Return the places of the first and the last token of the answer [2, windows].

        Both are 0 if the answer is not wholly inside the window.
        """
        windows = self._windows
        start = windows.start[indices]
        size = windows.size[indices]
        first, last = self._answers[windows.question[indices]].T
        inside = (first >= start) & (last < start + size)
        shift = self._bounds(indices)[0][:, 0] - start
        return np.where(inside, np.stack([first, last]) + shift, 0)


class TrainingWindows(_QuestionWindows):
    """Windows for training, the same in every epoch.

    An example has `input_ids`, `token_type_ids` and `attention_mask` [sequence_length] int32, and
    `start_position` and `end_position` int32: the places of the first and the last token of the
    question's first answer, or 0 ([CLS]) for both if the answer is not wholly inside the window.

    Args:
      questions: Questions of the training set.
      pieces: Tokenizer.
      sequence_length: Tokens of an example, special tokens and padding included.
      doc_stride: Tokens of context between the beginnings of two windows of a question.
      max_query_length: Maximum number of tokens of a question. Longer questions are cut off.

    Attributes:
      questions: Questions whose first answer is where the record says.
      num_dropped: Number of the other questions, which are dropped.

    Raises:
      UserError: If no question is left, or if one leaves no room for its context.

    Note:
      run_squad.py takes the words (between white space) of the answer and looks in them for the
      tokens of the answer alone; if they are not there, it keeps the words. Here the answer is all
      tokens that share a character with it. The two differ where that search fails, and where it
      finds an earlier match. run_squad.py drops a question only if its answer is nowhere in the
      words; here the answer must be where the record says.

    References:
      Devlin et al., arXiv 1810.04805v2, section 4.2.
      google-research/bert@eedf5716ce1268e56f0a50264a88cafad334ac61:run_squad.py,
      convert_examples_to_features.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        pieces: WordPiece,
        sequence_length: int = SEQUENCE_LENGTH,
        doc_stride: int = DOC_STRIDE,
        max_query_length: int = MAX_QUERY_LENGTH,
    ):
        kept = [question for question in questions if question.span() is not None]
        self.num_dropped = len(questions) - len(kept)
        super().__init__(kept, pieces, sequence_length, doc_stride, max_query_length)


class EvaluationWindows(_QuestionWindows):
    """Windows of all questions for evaluation, with the places where an answer may start and end.

    An example has the arrays of `TrainingWindows`, and `may_start` and `may_end` [sequence_length]
    int32. An answer may end at any token of the context. It may start at the tokens that have more
    context in this window than in the question's other windows. The context of a token is
    min(tokens to its left, tokens to its right) + 0.01 x tokens of the window; the first of equal
    windows wins.

    Args:
      questions: Questions with different ids.
      pieces: Tokenizer.
      sequence_length: Tokens of an example, special tokens and padding included.
      doc_stride: Tokens of context between the beginnings of two windows of a question.
      max_query_length: Maximum number of tokens of a question. Longer questions are cut off.

    Attributes:
      questions: All questions, in their order.
      question_of: [windows] int64, number of each window's question.

    Raises:
      UserError: If there is no question, if two have the same id, or if one leaves no room for its
        context.

    References:
      google-research/bert@eedf5716ce1268e56f0a50264a88cafad334ac61:run_squad.py,
      _check_is_max_context and write_predictions.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        pieces: WordPiece,
        sequence_length: int = SEQUENCE_LENGTH,
        doc_stride: int = DOC_STRIDE,
        max_query_length: int = MAX_QUERY_LENGTH,
    ):
        distinct = len({question.id for question in questions})
        fix = f"they have only {distinct} ids; give each its own"
        require(distinct == len(questions), "questions", len(questions), fix, code="conflict")
        super().__init__(questions, pieces, sequence_length, doc_stride, max_query_length)
        self.question_of = self._windows.question

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the windows at `indices` as one batch."""
        place = np.arange(self._length)[None]
        begin, end = self._bounds(indices)
        in_context = (place >= begin) & (place < end)

        source = self._sources(indices)
        own_start, own_stop = self._windows.own[indices].T[..., None]
        is_own = (source >= own_start) & (source < own_stop)
        return {
            **self._pack(indices),
            "may_start": (in_context & is_own).astype(np.int32),
            "may_end": in_context.astype(np.int32),
        }

    def text(self, window: int, start: int, end: int) -> str:
        """Return the text of the context from one token to another.

        Args:
          window: Number of the window.
          start: Place of the first token in the window.
          end: Place of the last token in the window, not before `start`.

        Raises:
          UserError: If the places are not in the context of the window, or not in order.
        """
        begin, context_end = self._bounds(np.asarray([window]))
        first = int(begin.item())
        last = int(context_end.item()) - 1
        fix = f"give ascending places from {first} to {last}, the context of window {window}"
        require(first <= start <= end <= last, "start, end", (start, end), fix)

        shift = self._windows.start[window] - first
        offsets = self._texts.offsets
        context = self.questions[self.question_of[window]].context
        return context[offsets[start + shift, 0] : offsets[end + shift, 1]]


def _encode(questions: Sequence[Question], pieces: WordPiece, max_query_length: int) -> _Texts:
    """Return the tokens of questions, cut off at a maximum length, and of their contexts."""
    tokens: list[np.ndarray] = []
    offsets: list[np.ndarray] = []
    bounds: list[tuple[int, int]] = []
    known: dict[str, tuple[int, int]] = {}
    total = 0

    def add(text: str, limit: int | None) -> tuple[int, int]:
        nonlocal total
        ids, places = pieces.encode_with_offsets(text)
        tokens.append(ids[:limit])
        offsets.append(places[:limit])
        total += len(tokens[-1])
        return total - len(tokens[-1]), len(tokens[-1])

    # SQuAD asks about five questions of a paragraph, whose tokens are stored once for all.
    for question in questions:
        bounds.append(add(question.question, max_query_length))
        if question.context not in known:
            known[question.context] = add(question.context, None)
    contexts = [known[question.context] for question in questions]
    return _Texts(
        np.concatenate(tokens), np.concatenate(offsets), np.asarray(bounds), np.asarray(contexts)
    )


def _cut(contexts: np.ndarray, limits: np.ndarray, doc_stride: int) -> _Windows:
    """Return the windows of all contexts; a context without tokens has none.

    Args:
      contexts: [questions, 2] int64, first token and number of tokens of each context.
      limits: [questions] int64, maximum number of tokens of a window of each question.
      doc_stride: Tokens between the beginnings of two windows.
    """
    found = []
    for number, ((begin, size), limit) in enumerate(zip(contexts, limits, strict=True)):
        step = min(limit, doc_stride)
        count = 1 + -(-max(0, size - limit) // step) if size else 0
        starts = np.arange(count) * step
        sizes = np.minimum(limit, size - starts)
        question = np.full(count, number)
        found.append(_Windows(question, begin + starts, sizes, begin + _own(starts, sizes)))
    return _Windows(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _own(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the tokens that have their maximum context in each window of one context.

    Args:
      starts: [windows] int64, first token of each window.
      sizes: [windows] int64, number of tokens of each window.

    Returns:
      [windows, 2] int64, (start, stop).
    """
    if len(starts) < 2:
        return np.stack([starts, sizes], 1)
    # The context of a token in a window is the smaller number of tokens on either side.
    left = np.arange(starts[-1] + sizes[-1]) - starts[:, None]
    nearest = np.minimum(left, sizes[:, None] - 1 - left)
    context = np.where(nearest >= 0, nearest + _SIZE_WEIGHT * sizes[:, None], -1)
    # The best window of a token never comes before that of the token before, so each window owns
    # consecutive tokens.
    owner = np.argmax(context, 0)
    edges = np.searchsorted(owner, np.arange(len(starts) + 1))
    return np.stack([edges[:-1], edges[1:]], 1)


def _answers(questions: Sequence[Question], texts: _Texts) -> np.ndarray:
    """Return the first and the last token of each question's answer, [questions, 2] int64.

    They are the tokens that share a character with the answer; `_NOWHERE` if there are none.
    """
    found = np.full((len(questions), 2), _NOWHERE)
    for number, (question, (begin, size)) in enumerate(zip(questions, texts.contexts, strict=True)):
        if (span := question.span()) is None:
            continue
        offsets = texts.offsets[begin : begin + size]
        first = np.searchsorted(offsets[:, 1], span[0], "right")
        last = np.searchsorted(offsets[:, 0], span[1], "left") - 1
        if first <= last:
            found[number] = begin + first, begin + last
    return found
