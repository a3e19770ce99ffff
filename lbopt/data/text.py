"""What sources of text share: cleaning, sentences, WordPiece tokens."""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lbopt.data.pieces import CONTINUED, SPECIAL_TOKENS, learn_pieces
from lbopt.errors import EnvironmentProblem, require

_RULES = re.compile(r"([^\w\s])\1{2,}")
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+")
_LONGEST_WORD = 100


class Document(NamedTuple):
    """A text as tokens.

    Attributes:
      tokens: [tokens] int32.
      sentences: [sentences] int64, where each begins; the first is 0.
    """

    tokens: np.ndarray
    sentences: np.ndarray


class SpecialIds(NamedTuple):
    """Where a vocabulary has the tokens that are not text."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int


def split_paragraphs(text: str) -> list[str]:
    """Split at blank lines, put each paragraph on one line, and shorten rules of three equal marks or more to one.

    >>> split_paragraphs("A title\\n*******\\n\\n  >>> 1\\n  1")
    ['A title *', '> 1 1']
    """
    paragraphs = (" ".join(_RULES.sub(r"\1", part).split()) for part in re.split(r"\n\s*\n", text))
    return [paragraph for paragraph in paragraphs if paragraph]


def split_sentences(paragraph: str) -> list[str]:
    """Split after a full stop, a question or exclamation mark or a colon that white space follows.

    >>> split_sentences("It is 3.5. Is it? Yes: it is")
    ['It is 3.5.', 'Is it?', 'Yes:', 'it is']
    """
    return _SENTENCE_END.split(paragraph)


class WordPiece:
    """Lower-cased words, punctuation apart, cut into the longest pieces of a vocabulary from the left, as BERT's are.

    Args:
      pieces: the vocabulary in the order of ids; it has every one of `SPECIAL_TOKENS`, wherever.

    Attributes:
      special: the ids of the special tokens.

    Raises:
      UserError: if a special token is missing.
      EnvironmentProblem: if the `tokenizers` package is not installed.
    """

    def __init__(self, pieces: Sequence[str]):
        library = _tokenizers()
        vocabulary = {piece: number for number, piece in enumerate(pieces)}
        missing = [token for token in SPECIAL_TOKENS if token not in vocabulary]
        require(not missing, "vocabulary", len(pieces), f"it has no {' '.join(missing)}; use one of BERT's form")
        self.special = SpecialIds(*(vocabulary[token] for token in SPECIAL_TOKENS))
        model = library.models.WordPiece(
            vocabulary,
            unk_token=SPECIAL_TOKENS[1],
            continuing_subword_prefix=CONTINUED,
            max_input_chars_per_word=_LONGEST_WORD,
        )
        self.pieces = tuple(pieces)
        self._tokenizer = library.Tokenizer(model)
        self._tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=True)
        self._tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()

    def encode(self, sentences: Sequence[str]) -> Document:
        """Return the tokens of sentences, one after another; sentences without a token are left out."""
        encoded = self._tokenizer.encode_batch(list(sentences), add_special_tokens=False)
        parts = [np.asarray(one.ids, np.int32) for one in encoded if one.ids]
        begins = np.cumsum([0, *(len(part) for part in parts)])[:-1]
        return Document(np.concatenate([np.zeros(0, np.int32), *parts]), begins)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a text [tokens] int32, and (start, stop) of each in its characters [tokens, 2] int64."""
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return np.asarray(encoded.ids, np.int32), np.asarray(encoded.offsets, np.int64).reshape(-1, 2)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return tokens as text, for people."""
        return " ".join(self.pieces[token] for token in tokens).replace(f" {CONTINUED}", "")


def learn_wordpiece(sentences: Sequence[str], vocab_size: int) -> WordPiece:
    """Learn a vocabulary of at most `vocab_size` pieces from training sentences.

    Raises:
      UserError: if the alphabet alone needs more.
      EnvironmentProblem: if the `tokenizers` package is not installed.
    """
    library = _tokenizers()
    normalizer, splitter = library.normalizers.BertNormalizer(lowercase=True), library.pre_tokenizers.BertPreTokenizer()
    words: collections.Counter[str] = collections.Counter()
    for sentence in sentences:
        words.update(word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(sentence)))
    return WordPiece(learn_pieces({word: n for word, n in words.items() if len(word) <= _LONGEST_WORD}, vocab_size))


def _tokenizers() -> Any:
    try:
        import tokenizers
        import tokenizers.models
        import tokenizers.normalizers
        import tokenizers.pre_tokenizers
    except ImportError as error:
        raise EnvironmentProblem(
            "text is cut into pieces by the tokenizers package, which is not installed: pip install 'lbopt[text]'"
        ) from error
    return tokenizers
