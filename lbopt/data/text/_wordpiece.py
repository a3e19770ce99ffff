"""From text to tokens: paragraphs, sentences and WordPiece."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lbopt import paths
from lbopt.data.text._pieces import CONTINUED, SPECIAL_TOKENS, learn_pieces
from lbopt.data.text._vocabulary import (
    LONGEST_WORD,
    UNCASED,
    TextNormalization,
    Vocabulary,
    decide_normalization,
    read_vocabulary,
)
from lbopt.errors import MissingPackage, require

_RULES = re.compile(r"([^\w\s])\1{2,}")
"""Lines drawn with characters: three or more equal marks."""
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+")

_OPENING = "\"'\u201c\u2018\xab(["
"""Quotation marks and brackets that may come before a word."""
_PROSE_END = re.compile(
    r"([.!?\u2026]+)[\"'\u201d\u2019\xbb)\]]*\s+(?=[" + re.escape(_OPENING) + r"]*(\S+))"
)
_DOTTED = re.compile(r"(?:[^\W\d_]{1,3}\.)+[^\W\d_]{1,3}")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NEVER_LAST = _words(
    "mr mrs ms messrs mme dr prof rev fr hon gov sen rep gen adm col maj capt cmdr lt sgt cpl pvt "
    "st ste mt ft e.g i.e cf viz vs esp incl approx"
)
"""Abbreviations, without the last full stop, that never end a sentence."""
_BEFORE_NUMBERS = _words(
    "no nos nr vol vols fig figs p pp ch chap sec art eq op ca jan feb mar apr jun jul aug sep "
    "sept oct nov dec"
)
"""Abbreviations that do not end a sentence if a number follows."""
_SELDOM_LAST = _words("jr sr co corp inc ltd bros dept univ assoc al")
"""Abbreviations that end a sentence only if one of `_OPENERS` follows, like initials and "U.S."."""
_OPENERS = _words(
    "the a this that these those it its he she they his her their there in on at by for from with "
    "after before during since while when where although though however if as but and some most "
    "one both each another according"
)
"""Words with a capital that are more often the first word of a sentence than a name."""


class Document(NamedTuple):
    """A text as tokens.

    Attributes:
      tokens: [tokens] int32.
      sentences: [sentences] int64, index of the first token of each sentence.
    """

    tokens: np.ndarray
    sentences: np.ndarray


class SpecialIds(NamedTuple):
    """Ids of the special tokens in a vocabulary."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int


def split_paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a text, which blank lines separate, each on one line.

    Three or more equal marks, as in lines drawn with characters, become a single one.

    >>> split_paragraphs("A title\\n*******\\n\\n  >>> 1\\n  1")
    ['A title *', '> 1 1']
    """
    paragraphs = (" ".join(_RULES.sub(r"\1", part).split()) for part in re.split(r"\n\s*\n", text))
    return [paragraph for paragraph in paragraphs if paragraph]


def split_sentences(paragraph: str) -> list[str]:
    """Return the sentences of technical text.

    They end with a full stop, question mark, exclamation mark or colon before white space.

    >>> split_sentences("It is 3.5. Is it? Yes: it is")
    ['It is 3.5.', 'Is it?', 'Yes:', 'it is']
    """
    return _SENTENCE_END.split(paragraph)


def split_prose(paragraph: str) -> list[str]:
    """Return the sentences of English prose.

    They end with a full stop, question mark or exclamation mark before white space. Closing
    quotation marks and brackets belong to the sentence. A sentence does not end before a small
    letter (unless the paragraph has no capital at all), nor after the full stop of a title, an
    initial or a common abbreviation.

    >>> split_prose('Mr. J. S. Bach wrote No. 5 (cf. p. 3). "Why?" he said. It sold 3.5 copies.')
    ['Mr. J. S. Bach wrote No. 5 (cf. p. 3).', '"Why?" he said.', 'It sold 3.5 copies.']
    """
    cased = paragraph != paragraph.lower()
    sentences = []
    begin = 0
    for end in _PROSE_END.finditer(paragraph):
        following = end[2]
        if cased and following[0].islower():
            continue
        word = paragraph[paragraph.rfind(" ", 0, end.start()) + 1 : end.start()]
        if end[1] == "." and _is_abbreviation(word, following):
            continue
        sentences.append(paragraph[begin : end.end()].rstrip())
        begin = end.end()
    return [*sentences, paragraph[begin:]]


def _is_abbreviation(word: str, following: str) -> bool:
    """Return whether the full stop after a word is that of an abbreviation inside a sentence."""
    word = word.lstrip(_OPENING).lower()
    if word in _NEVER_LAST or (word in _BEFORE_NUMBERS and following[0].isdigit()):
        return True
    seldom_last = (
        word in _SELDOM_LAST
        or (len(word) == 1 and word.isalpha())
        or _DOTTED.fullmatch(word) is not None
    )
    return seldom_last and following.rstrip(",").lower() not in _OPENERS


class WordPiece:
    """BERT's tokenizer: words are split from the left into the longest pieces of a vocabulary.

    Punctuation marks are words of their own.

    Args:
      pieces: Vocabulary in the order of the ids. It has all `SPECIAL_TOKENS`, in any place.
      normalization: Changes of the text before it is split.

    Attributes:
      pieces: Vocabulary in the order of the ids.
      normalization: Changes of the text before it is split.
      special: Ids of the special tokens. No text is encoded as one of them: "[MASK]" becomes a
        bracket, a word and a bracket, as in
        google-research/bert@eedf5716ce1268e56f0a50264a88cafad334ac61:create_pretraining_data.py, so
        a document can neither end a segment nor hide a token. Transformers encodes it as the
        special token unless `split_special_tokens=True`.

    Raises:
      UserError: If a special token is missing.
      EnvironmentProblem: If the `tokenizers` package is not installed.
    """

    def __init__(self, pieces: Sequence[str], normalization: TextNormalization = UNCASED):
        library = _tokenizers()
        vocabulary = {piece: number for number, piece in enumerate(pieces)}
        missing = [token for token in SPECIAL_TOKENS if token not in vocabulary]
        fix = f"there is no {' '.join(missing)} among them; use a vocabulary in BERT's form"
        require(not missing, "pieces", len(pieces), fix, code="missing")

        self.special = SpecialIds(*(vocabulary[token] for token in SPECIAL_TOKENS))
        model = library.models.WordPiece(
            vocabulary,
            unk_token=SPECIAL_TOKENS[1],
            continuing_subword_prefix=CONTINUED,
            max_input_chars_per_word=LONGEST_WORD,
        )

        self.pieces = tuple(pieces)
        self.normalization = normalization
        # The special tokens are not added to this tokenizer, so that no text is encoded as one.
        self._tokenizer = library.Tokenizer(model)
        self._tokenizer.normalizer = library.normalizers.BertNormalizer(
            lowercase=normalization.do_lower_case,
            strip_accents=normalization.strip_accents,
            handle_chinese_chars=normalization.tokenize_chinese_chars,
        )
        self._tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()

    @property
    def vocabulary(self) -> Vocabulary:
        """Pieces and normalization, which a workdir keeps."""
        return Vocabulary(self.pieces, self.normalization)

    def encode(self, sentences: Sequence[str]) -> Document:
        """Return the tokens of a document; sentences without a token are left out."""
        return self.encode_many([sentences])[0]

    def encode_many(self, documents: Sequence[Sequence[str]]) -> list[Document]:
        """Return the tokens of documents, each a list of sentences, using all cores."""
        sentences = list(itertools.chain.from_iterable(documents))
        encodings = self._tokenizer.encode_batch_fast(sentences, add_special_tokens=False)
        ids = [encoding.ids for encoding in encodings]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        tokens = np.fromiter(itertools.chain.from_iterable(ids), np.int32, lengths.sum())

        # First token of each sentence; first sentence of each document, and the end of the last.
        sentence_starts = np.cumsum(lengths) - lengths
        document_edges = np.cumsum([0, *map(len, documents)])
        token_edges = np.append(sentence_starts, len(tokens))[document_edges]

        found = []
        for number in range(len(documents)):
            start, stop = token_edges[number : number + 2]
            own = slice(*document_edges[number : number + 2])
            starts = sentence_starts[own][lengths[own] > 0] - start
            found.append(Document(tokens[start:stop], starts))
        return found

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a text, and the characters that each stands for.

        Returns:
          [tokens] int32, and (start, stop) in characters [tokens, 2] int64.
        """
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        offsets = np.asarray(encoding.offsets, np.int64).reshape(-1, 2)
        return np.asarray(encoding.ids, np.int32), offsets

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return tokens as text for people."""
        return " ".join(self.pieces[token] for token in tokens).replace(f" {CONTINUED}", "")


def learn_wordpiece(
    sentences: Iterable[str], vocab_size: int, max_alphabet: int | None = None
) -> WordPiece:
    """Learn a vocabulary of at most `vocab_size` pieces from training sentences.

    Args:
      sentences: Sentences of the training text.
      vocab_size: Maximum number of pieces, special tokens included.
      max_alphabet: Maximum number of different characters, the most frequent ones; words with other
        characters are ignored. A character takes up to two pieces. None for no limit.

    Raises:
      UserError: If the alphabet alone needs more pieces.
      EnvironmentProblem: If the `tokenizers` package is not installed.
    """
    library = _tokenizers()
    normalizer = library.normalizers.BertNormalizer(lowercase=True)
    splitter = library.pre_tokenizers.BertPreTokenizer()
    counts: collections.Counter[str] = collections.Counter()
    for sentence in sentences:
        words = splitter.pre_tokenize_str(normalizer.normalize_str(sentence))
        counts.update(word for word, _ in words)
    counts = collections.Counter({w: n for w, n in counts.items() if len(w) <= LONGEST_WORD})
    if max_alphabet is not None:
        counts = _in_frequent_characters(counts, max_alphabet)
    return WordPiece(learn_pieces(counts, vocab_size))


def _in_frequent_characters(
    counts: collections.Counter[str], max_alphabet: int
) -> collections.Counter[str]:
    """Return the words that have only frequent characters, with their counts.

    The alphabetically first of equally frequent characters is kept.
    """
    characters: collections.Counter[str] = collections.Counter()
    for word, count in counts.items():
        for character in word:
            characters[character] += count
    by_count = sorted(characters, key=lambda character: (-characters[character], character))
    alphabet = set(by_count[:max_alphabet])
    frequent = {word: count for word, count in counts.items() if alphabet.issuperset(word)}
    return collections.Counter(frequent)


def load_wordpiece(
    path: paths.GivenPath,
    lowercase: bool | None = None,
    say: Callable[[str], None] | None = None,
) -> WordPiece:
    """Return the tokenizer of a vocabulary file, such as the vocab.txt of a published BERT.

    Args:
      path: Vocabulary file, see `read_vocabulary`.
      lowercase: Whether text is lowercased, see `decide_normalization`.
      say: Function that takes a line for the user; None for a warning.

    Raises:
      UserError: If the file is no vocabulary with all special tokens, or if it is not known whether
        its text is lowercased.
      EnvironmentProblem: If the `tokenizers` package is not installed.
    """
    pieces = read_vocabulary(path)
    missing = [token for token in SPECIAL_TOKENS if token not in pieces]
    fix = f"it has no {' '.join(missing)}; use a vocab.txt in BERT's form"
    require(not missing, "vocabulary", str(path), fix, code="missing")
    return WordPiece(pieces, decide_normalization(path, pieces, lowercase, say))


def _tokenizers() -> Any:
    try:
        import tokenizers
        import tokenizers.models
        import tokenizers.normalizers
        import tokenizers.pre_tokenizers
    except ImportError as error:
        fix = "it splits text into pieces, and is not installed: pip install 'lbopt[text]'"
        raise MissingPackage("tokenizers", reason=fix) from error
    return tokenizers
