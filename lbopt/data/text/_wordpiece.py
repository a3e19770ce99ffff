"""What sources of text share: cleaning, sentences, WordPiece tokens."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from lbopt.errors import EnvironmentProblem, require

_RULES = re.compile(r"([^\w\s])\1{2,}")
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+")

_OPENING = "\"'\u201c\u2018\xab(["
"""Quotation marks and brackets before a word."""
_PROSE_END = re.compile(
    r"([.!?\u2026]+)[\"'\u201d\u2019\xbb)\]]*\s+(?=[" + re.escape(_OPENING) + r"]*(\S+))"
)
_DOTTED = re.compile(r"(?:[^\W\d_]{1,3}\.)+[^\W\d_]{1,3}")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NEVER_LAST = _words(
    "mr mrs ms messrs mme dr prof rev fr hon gov sen rep gen adm col maj capt cmdr lt sgt cpl pvt st ste mt ft "
    "e.g i.e cf viz vs esp incl approx"
)
"""Abbreviations, without the last full stop, after which a sentence goes on."""
_BEFORE_NUMBERS = _words(
    "no nos nr vol vols fig figs p pp ch chap sec art eq op ca jan feb mar apr jun jul aug sep sept oct nov dec"
)
"""Those after which it goes on if a number follows."""
_SELDOM_LAST = _words("jr sr co corp inc ltd bros dept univ assoc al")
"""Those after which, as after initials and "U.S.", it goes on unless one of `_OPENERS` follows."""
_OPENERS = _words(
    "the a this that these those it its he she they his her their there in on at by for from with after before during "
    "since while when where although though however if as but and some most one both each another according"
)
"""Words that begin sentences more often than names."""


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


def split_prose(paragraph: str) -> list[str]:
    """Split English prose into sentences: after a full stop, a question or exclamation mark that white space follows.

    Closing quotation marks and brackets stay with the sentence. It goes on where a small letter follows (unless the
    paragraph has no capital at all), and after a single full stop behind titles, initials and common abbreviations; a colon
    does not end it.

    >>> split_prose('Mr. J. S. Bach wrote No. 5 in the U.S. Army (cf. p. 3). "Why?" he said. It sold 3.5 copies.')
    ['Mr. J. S. Bach wrote No. 5 in the U.S. Army (cf. p. 3).', '"Why?" he said.', 'It sold 3.5 copies.']
    """
    cased = paragraph != paragraph.lower()
    sentences, begin = [], 0
    for end in _PROSE_END.finditer(paragraph):
        following = end[2]
        if cased and following[0].islower():
            continue
        if end[1] == "." and _goes_on(
            paragraph[paragraph.rfind(" ", 0, end.start()) + 1 : end.start()], following
        ):
            continue
        sentences.append(paragraph[begin : end.end()].rstrip())
        begin = end.end()
    return [*sentences, paragraph[begin:]]


def _goes_on(word: str, following: str) -> bool:
    """Whether the full stop between two words belongs to the first of them."""
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
    """Words, punctuation apart, cut into the longest pieces of a vocabulary from the left, as BERT's are.

    Args:
      pieces: the vocabulary in the order of ids; it has every one of `SPECIAL_TOKENS`, wherever.
      normalization: changes of text before it is cut.

    Attributes:
      special: the ids of the special tokens. Text never has them: "[MASK]" in it is cut like any other text, into a bracket,
        a word and a bracket, as google-research/bert (create_pretraining_data.py) does, so that a document can neither
        end a segment nor hide a token. Transformers takes it for the special token unless `split_special_tokens=True`.

    Raises:
      UserError: if a special token is missing.
      EnvironmentProblem: if the `tokenizers` package is not installed.
    """

    def __init__(self, pieces: Sequence[str], normalization: TextNormalization = UNCASED):
        library = _tokenizers()
        vocabulary = {piece: number for number, piece in enumerate(pieces)}
        missing = [token for token in SPECIAL_TOKENS if token not in vocabulary]
        require(
            not missing,
            "vocabulary",
            len(pieces),
            f"it has no {' '.join(missing)}; use one of BERT's form",
        )
        self.special = SpecialIds(*(vocabulary[token] for token in SPECIAL_TOKENS))
        model = library.models.WordPiece(
            vocabulary,
            unk_token=SPECIAL_TOKENS[1],
            continuing_subword_prefix=CONTINUED,
            max_input_chars_per_word=LONGEST_WORD,
        )
        self.pieces, self.normalization = tuple(pieces), normalization
        self._tokenizer = library.Tokenizer(model)
        self._tokenizer.normalizer = library.normalizers.BertNormalizer(
            lowercase=normalization.do_lower_case,
            strip_accents=normalization.strip_accents,
            handle_chinese_chars=normalization.tokenize_chinese_chars,
        )
        self._tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()

    @property
    def vocabulary(self) -> Vocabulary:
        """What a workdir keeps of it."""
        return Vocabulary(self.pieces, self.normalization)

    def encode(self, sentences: Sequence[str]) -> Document:
        """Return the tokens of sentences, one after another; sentences without a token are left out."""
        return self.encode_many([sentences])[0]

    def encode_many(self, documents: Sequence[Sequence[str]]) -> list[Document]:
        """Return the tokens of documents, each a list of sentences; all cores work on them."""
        sentences = list(itertools.chain.from_iterable(documents))
        encoded = [
            one.ids
            for one in self._tokenizer.encode_batch_fast(sentences, add_special_tokens=False)
        ]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        tokens = np.fromiter(itertools.chain.from_iterable(encoded), np.int32, lengths.sum())
        begins, ends = np.cumsum(lengths) - lengths, np.cumsum([0, *map(len, documents)])
        offsets = np.append(begins, len(tokens))[ends]
        return [
            Document(tokens[start:stop], begins[first:last][lengths[first:last] > 0] - start)
            for (start, stop), (first, last) in zip(
                itertools.pairwise(offsets), itertools.pairwise(ends), strict=True
            )
        ]

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a text [tokens] int32, and (start, stop) of each in its characters [tokens, 2] int64."""
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return np.asarray(encoded.ids, np.int32), np.asarray(encoded.offsets, np.int64).reshape(
            -1, 2
        )

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return tokens as text, for people."""
        return " ".join(self.pieces[token] for token in tokens).replace(f" {CONTINUED}", "")


def learn_wordpiece(
    sentences: Iterable[str], vocab_size: int, max_alphabet: int | None = None
) -> WordPiece:
    """Learn a vocabulary of at most `vocab_size` pieces from training sentences.

    Args:
      sentences: of the training text.
      vocab_size: special tokens included.
      max_alphabet: the most frequent characters that are kept, of which each takes up to two pieces; words with other
        characters are not learned from. None for all.

    Raises:
      UserError: if the alphabet alone needs more.
      EnvironmentProblem: if the `tokenizers` package is not installed.
    """
    library = _tokenizers()
    normalizer, splitter = (
        library.normalizers.BertNormalizer(lowercase=True),
        library.pre_tokenizers.BertPreTokenizer(),
    )
    words: collections.Counter[str] = collections.Counter()
    for sentence in sentences:
        words.update(
            word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(sentence))
        )
    short = {word: n for word, n in words.items() if len(word) <= LONGEST_WORD}
    return WordPiece(
        learn_pieces(
            short if max_alphabet is None else _spelt_with(short, max_alphabet), vocab_size
        )
    )


def _spelt_with(words: Mapping[str, int], max_alphabet: int) -> dict[str, int]:
    """Return the words of frequent characters alone; between equally frequent ones the alphabet decides."""
    counts: collections.Counter[str] = collections.Counter()
    for word, n in words.items():
        for character in word:
            counts[character] += n
    alphabet = set(
        sorted(counts, key=lambda character: (-counts[character], character))[:max_alphabet]
    )
    return {word: n for word, n in words.items() if alphabet.issuperset(word)}


def load_wordpiece(
    path: paths.GivenPath,
    lowercase: bool | None = None,
    field: str = "lowercase",
    say: Callable[[str], None] | None = None,
) -> WordPiece:
    """Return what cuts text by the vocabulary of a file, such as the vocab.txt of a published BERT.

    Args:
      path: see `read_vocabulary`.
      lowercase: see `decide_normalization`.
      field: see there.
      say: see there.

    Raises:
      UserError: naming the file, if it is not a vocabulary with all special tokens, or if nothing says whether its text is
        lowercased.
      EnvironmentProblem: if the `tokenizers` package is not installed.
    """
    pieces = read_vocabulary(path)
    missing = [token for token in SPECIAL_TOKENS if token not in pieces]
    require(
        not missing,
        "vocabulary",
        str(path),
        f"it has no {' '.join(missing)}; use a vocab.txt of BERT's form",
    )
    return WordPiece(pieces, decide_normalization(path, pieces, lowercase, field, say))


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
