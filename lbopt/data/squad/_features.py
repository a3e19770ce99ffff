"""Questions with as much of their context as fits, as BERT is trained and asked on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lbopt.data._arrays import Reading
from lbopt.data.squad._examples import Question
from lbopt.data.text import WordPiece
from lbopt.errors import require

SEQUENCE_LENGTH, DOC_STRIDE, MAX_QUERY_LENGTH = 384, 128, 64
"""In tokens: max_seq_length, doc_stride and max_query_length of google-research/bert, run_squad.py."""
NUM_SPECIAL_POSITIONS = 3
"""[CLS] question [SEP] context [SEP]."""

_OF_SIZE = 0.01  # what each token of a window adds in the choice of maximum context (run_squad.py)
_NOWHERE = -1


class _Texts(NamedTuple):
    """The tokens of all questions and contexts, one text after another; a context that occurs twice is kept once.

    Attributes:
      tokens: [tokens] int32.
      offsets: [tokens, 2] the characters of its text that a token stands for, (start, stop).
      questions: [questions, 2] the first token of each question, and how many there are.
      contexts: [questions, 2] likewise of its context.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    questions: np.ndarray
    contexts: np.ndarray


class _Windows(NamedTuple):
    """Stretches of context; tokens are counted as in `_Texts`.

    Attributes:
      question: [windows] the number of the question.
      start: [windows] the first token of context.
      size: [windows] how many there are.
      own: [windows, 2] the tokens that have their maximum context in this window, (start, stop).
    """

    question: np.ndarray
    start: np.ndarray
    size: np.ndarray
    own: np.ndarray


class _QuestionWindows:
    """Examples `[CLS] question [SEP] stretch of context [SEP]`; a question has one or more, by the length of its context."""

    reading = Reading()

    def __init__(
        self,
        questions: Sequence[Question],
        pieces: WordPiece,
        sequence_length: int,
        doc_stride: int,
        max_query_length: int,
    ):
        require(
            doc_stride >= 1, "config.data.doc_stride", doc_stride, "windows move on; use at least 1"
        )
        require(
            max_query_length >= 1,
            "config.data.max_query_length",
            max_query_length,
            "use at least 1",
        )
        require(
            questions,
            "config.data.builder",
            len(questions),
            "there is no question; give at least one",
        )
        self.questions = tuple(questions)
        self._length, self._special = sequence_length, pieces.special
        self._texts = _encode(questions, pieces, max_query_length)
        longest = int(self._texts.questions[:, 1].max())
        least = longest + NUM_SPECIAL_POSITIONS + 1
        require(
            sequence_length >= least,
            "config.data.sequence_length",
            sequence_length,
            f"a question of {longest} tokens leaves no room for its context; use at least {least}",
        )
        rooms = sequence_length - NUM_SPECIAL_POSITIONS - self._texts.questions[:, 1]
        self._windows = _cut(self._texts.contexts, rooms, doc_stride)
        require(
            len(self), "config.data.builder", len(questions), "no context has a token; give text"
        )
        self._answers = _answers(self.questions, self._texts)

    def __len__(self) -> int:
        return len(self._windows.question)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the windows at `indices` as one batch."""
        return self._pack(indices)

    def draw(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        """Return the windows at `indices` as one batch, whatever the epoch."""
        del epochs, seed
        return self.take(indices)

    def _pack(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Put question and context between the special tokens, and find the answer."""
        special, place = self._special, np.arange(self._length)[None]
        begin, end = self._bounds(indices)
        ids = self._texts.tokens[np.clip(self._sources(indices), 0, len(self._texts.tokens) - 1)]
        ids = np.where(
            (place == begin - 1) | (place == end),
            special.sep,
            np.where(place == 0, special.cls, ids),
        )
        start, stop = self._labels(indices)
        return {
            "input_ids": np.where(place > end, special.pad, ids).astype(np.int32),
            "token_type_ids": ((place >= begin) & (place <= end)).astype(np.int32),
            "attention_mask": (place <= end).astype(np.int32),
            "start_position": start.astype(np.int32),
            "end_position": stop.astype(np.int32),
        }

    def _bounds(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of the first token of context and of the [SEP] behind the last, [windows, 1] each."""
        begin = (
            self._texts.questions[self._windows.question[indices], 1] + NUM_SPECIAL_POSITIONS - 1
        )
        return begin[:, None], (begin + self._windows.size[indices])[:, None]

    def _sources(self, indices: np.ndarray) -> np.ndarray:
        """Return which token stands at each place [windows, sequence_length], where it is not a special one."""
        place, (begin, _) = np.arange(self._length)[None], self._bounds(indices)
        question = self._texts.questions[self._windows.question[indices], :1]
        return np.where(
            place < begin,
            question + place - 1,
            self._windows.start[indices][:, None] + place - begin,
        )

    def _labels(self, indices: np.ndarray) -> np.ndarray:
        """Return the places of the first and last token of the answer [2, windows]; 0 if it is not wholly inside."""
        windows = self._windows
        start, size = windows.start[indices], windows.size[indices]
        first, last = self._answers[windows.question[indices]].T
        inside = (first >= start) & (last < start + size)
        shift = self._bounds(indices)[0][:, 0] - start
        return np.where(inside, np.stack([first, last]) + shift, 0)


class TrainingWindows(_QuestionWindows):
    """Windows of the questions that have a place for their answer; every epoch sees the same.

    An example has `input_ids`, `token_type_ids` and `attention_mask` [sequence_length] int32, and `start_position` and
    `end_position` int32, the first and last token of the question's first answer, or 0 ([CLS]) for both if the answer is
    not wholly inside the window.

    Args:
      questions: of the training set.
      pieces: what cuts text.
      sequence_length: tokens of an example, special ones and padding included.
      doc_stride: by how many tokens of context a question's next window begins later.
      max_query_length: tokens of a question; what is longer is cut.

    Attributes:
      questions: those that are kept.
      num_dropped: those whose first answer is not in the context where they say.

    Raises:
      UserError: naming the field, if nothing is left or a question leaves no room for its context.

    Note:
      run_squad.py takes the words (between white space) of the answer and looks in them for the tokens that the answer alone
      is cut into; where they are not there, it keeps the words. Here the answer is the tokens that share a character with it.
      The two differ where that search fails, and where it finds an earlier match. run_squad.py drops a question only if the
      answer is nowhere in the words; here it must be where it says.

    References:
      Devlin et al., arXiv 1810.04805, section 4.2; google-research/bert, run_squad.py, convert_examples_to_features.
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
    """Windows of all questions, with the places where an answer may be, and the way back to the text.

    An example has what one of `TrainingWindows` has, and `may_start` and `may_end` [sequence_length] int32: an answer ends
    at any token of context, and starts at those that have more context here than in the question's other windows, that is,
    the greatest min(tokens on the left, tokens on the right) + 0.01 x tokens of context in the window; the first of equals.

    Args:
      questions: ids differ.
      pieces, sequence_length, doc_stride, max_query_length: see `TrainingWindows`.

    Attributes:
      questions: all of them, in their order.
      question_of: [windows] int64, the number of each window's question.

    Raises:
      UserError: as `TrainingWindows`, and if two questions have the same id.

    References:
      google-research/bert, run_squad.py, _check_is_max_context and write_predictions.
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
        require(
            distinct == len(questions),
            "config.data.builder",
            len(questions),
            f"only {distinct} ids; give each its own",
        )
        super().__init__(questions, pieces, sequence_length, doc_stride, max_query_length)
        self.question_of = self._windows.question

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the windows at `indices` as one batch."""
        place, (begin, end) = np.arange(self._length)[None], self._bounds(indices)
        source, (own_start, own_stop) = (
            self._sources(indices),
            self._windows.own[indices].T[..., None],
        )
        context, own = (place >= begin) & (place < end), (source >= own_start) & (source < own_stop)
        spans = {"may_start": (context & own).astype(np.int32), "may_end": context.astype(np.int32)}
        return {**self._pack(indices), **spans}

    def text(self, window: int, start: int, end: int) -> str:
        """Return the stretch of the context that the tokens from place `start` to place `end` of a window stand for.

        Raises:
          ValueError: if these are not two places of its context in order.
        """
        ((first,),), ((behind,),) = self._bounds(np.asarray([window]))
        if not first <= start <= end < behind:
            raise ValueError(
                f"start, end = {start}, {end}: window {window} has its context from {first} to {behind - 1}"
            )
        shift = self._windows.start[window] - first
        offsets = self._texts.offsets
        context = self.questions[self.question_of[window]].context
        return context[offsets[start + shift, 0] : offsets[end + shift, 1]]


def _encode(questions: Sequence[Question], pieces: WordPiece, max_query_length: int) -> _Texts:
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

    for question in questions:
        bounds.append(add(question.question, max_query_length))
        if question.context not in known:
            known[question.context] = add(question.context, None)
    contexts = [known[question.context] for question in questions]
    return _Texts(
        np.concatenate(tokens), np.concatenate(offsets), np.asarray(bounds), np.asarray(contexts)
    )


def _cut(contexts: np.ndarray, rooms: np.ndarray, doc_stride: int) -> _Windows:
    """Cut each context [questions, 2] into windows of at most its room [questions]; one without tokens has none."""
    parts = []
    for number, ((begin, size), room) in enumerate(zip(contexts, rooms, strict=True)):
        step = min(room, doc_stride)
        count = 1 + -(-max(0, size - room) // step) if size else 0
        starts = np.arange(count) * step
        sizes = np.minimum(room, size - starts)
        parts.append(
            _Windows(np.full(count, number), begin + starts, sizes, begin + _own(starts, sizes))
        )
    return _Windows(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _own(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return (start, stop) [windows, 2] of the tokens that have their maximum context in each window of one context."""
    if len(starts) < 2:
        return np.stack([starts, sizes], 1)
    left = np.arange(starts[-1] + sizes[-1]) - starts[:, None]
    nearest = np.minimum(left, sizes[:, None] - 1 - left)
    owner = np.argmax(
        np.where(nearest >= 0, nearest + _OF_SIZE * sizes[:, None], -1), 0
    )  # never falls
    edges = np.searchsorted(owner, np.arange(len(starts) + 1))
    return np.stack([edges[:-1], edges[1:]], 1)


def _answers(questions: Sequence[Question], texts: _Texts) -> np.ndarray:
    """Return the first and last token that share a character with each question's answer [questions, 2]."""
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
