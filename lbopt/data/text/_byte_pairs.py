"""Byte-level byte-pair encoding: every text is encoded, and decoded to the same bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lbopt.errors import MissingPackage, require

END_OF_DOCUMENT = "<|endoftext|>"
"""The token after each document, GPT-2's. It is no text: it has no bytes."""
FEWEST_TOKENS = 2**8 + 1
"""Tokens of the smallest vocabulary: the 256 bytes and the end of a document."""


class BytePairs:
    """A tokenizer whose tokens are sequences of bytes, and one token for the end of a document.

    Text that reads like the end of a document is encoded as text.

    Args:
      tokenizer_json: Content of a tokenizer.json of the `tokenizers` library, as
        `learn_byte_pairs` makes it.

    Attributes:
      tokenizer_json: The argument.
      pieces: The tokens in the order of their ids, each byte spelt as a character as in GPT-2.
      end: Id of the end of a document.
      num_bytes: Number of bytes of each token, [tokens] int32; 0 for the end of a document.

    Raises:
      EnvironmentProblem: If the `tokenizers` package is not installed.

    >>> pairs = learn_byte_pairs(["naïve and naive", "naïve"], 270)
    >>> tokens = pairs.encode_many(["a naïve café"])[0]
    >>> pairs.decode(tokens), int(pairs.num_bytes[tokens].sum())
    ('a naïve café', 14)
    """

    def __init__(self, tokenizer_json: str):
        self.tokenizer_json = tokenizer_json
        self._tokenizer = _library().Tokenizer.from_str(tokenizer_json)
        self._tokenizer.encode_special_tokens = True  # those in the text are text
        self.pieces = pieces_of(tokenizer_json)
        self.end = self.pieces.index(END_OF_DOCUMENT)
        self.num_bytes = bytes_of(self.pieces)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text, [tokens] int32, without the end of a document."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of tokens; the end of a document is left out."""
        return self._tokenizer.decode(list(map(int, tokens)), skip_special_tokens=True)


def learn_byte_pairs(texts: Iterable[str], vocab_size: int) -> BytePairs:
    """Learn a tokenizer of at most `vocab_size` tokens.

    Text is cut into words, numbers and marks as by GPT-2, and pairs within them are merged, the
    most frequent first, until the vocabulary is full or every pair that is left occurs once. The
    result is the same in every process.

    Args:
      texts: Texts of the training set.
      vocab_size: Maximum number of tokens; the 256 bytes and the end of a document are among them.

    Raises:
      UserError: If the vocabulary is too small for the bytes.
      EnvironmentProblem: If the `tokenizers` package is not installed.

    References:
      Radford et al., Language Models are Unsupervised Multitask Learners, 2019, section 2.2.
    """
    check_vocab_size(vocab_size)
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return BytePairs(json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, indent=1))


def check_vocab_size(vocab_size: int) -> None:
    """Raise `UserError` unless a vocabulary has room for the bytes and the end of a document."""
    fix = f"256 bytes and the end of a document take {FEWEST_TOKENS}; use at least that"
    require(vocab_size >= FEWEST_TOKENS, "vocab_size", vocab_size, fix)


def pieces_of(tokenizer_json: str) -> tuple[str, ...]:
    """Return the tokens of a tokenizer of `learn_byte_pairs` in the order of their ids."""
    ids = json.loads(tokenizer_json)["model"]["vocab"]
    return tuple(sorted(ids, key=ids.__getitem__))


def bytes_of(pieces: Sequence[str]) -> np.ndarray:
    """Return the number of bytes of each token, [tokens] int32; 0 for the end of a document.

    >>> bytes_of(["<|endoftext|>", "a", "Ã©"]).tolist()
    [0, 1, 2]
    """
    lengths = [0 if piece == END_OF_DOCUMENT else len(piece) for piece in pieces]
    return np.asarray(lengths, np.int32)


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        fix = "it splits text into tokens, and is not installed: pip install 'lbopt[text]'"
        raise MissingPackage("tokenizers", reason=fix) from error
    return tokenizers
