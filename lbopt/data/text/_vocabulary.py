"""Files of WordPiece vocabularies, and the text normalization that belongs to them."""

from __future__ import annotations

import collections
import contextlib
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

from lbopt import _typed_json, paths
from lbopt._shown import one_line
from lbopt.data.text._byte_pairs import END_OF_DOCUMENT
from lbopt.data.text._pieces import CONTINUED, SPECIAL_TOKENS, UNK
from lbopt.errors import Code, EnvironmentProblem, UserError, brief, place_of, require

VOCABULARY_FILE = "vocab.txt"
SETTINGS_FILE = "tokenizer_config.json"
TOKENIZER = "tokenizer.json"
"""Files of Transformers: the pieces, the settings of the tokenizer, and both in one file."""
LONGEST_WORD = 100
"""Maximum number of characters of a word. A longer word becomes [UNK], as in BERT."""
_STORE = "store.json"
_CONFIG = "config.json"
"""Files of lbopt: description of a token store, and config of a run."""
_REQUIRED_SETTINGS = {
    "do_basic_tokenize": True,
    "word_tokenizer_type": "basic",
    "subword_tokenizer_type": "wordpiece",
}
"""Settings of tokenizer_config.json for which lbopt knows one value only."""
_NO_LINE = re.compile("[\n\r\ud800-\udfff]")
_BRACKETED = re.compile(r"\[[^\[\]]+\]|<[^<>]+>")
"""Pieces that are no text: [MASK], [unused1], <S>."""


class TextNormalization(NamedTuple):
    """Changes of text before it is split into tokens.

    Names and defaults are those of Transformers' `BertTokenizer`.

    Attributes:
      do_lower_case: Whether text is lowercased.
      strip_accents: Whether accents are removed; None for the value of `do_lower_case`.
      tokenize_chinese_chars: Whether each Chinese character is a word of its own.
    """

    do_lower_case: bool = True
    strip_accents: bool | None = None
    tokenize_chinese_chars: bool = True

    def explicit(self) -> TextNormalization:
        """Return the same normalization without None."""
        strip = self.do_lower_case if self.strip_accents is None else self.strip_accents
        return self._replace(strip_accents=strip)

    def differences(self, other: TextNormalization) -> list[str]:
        """Return the names of the fields whose effect differs from that in `other`."""
        pairs = zip(self._fields, self.explicit(), other.explicit(), strict=True)
        return [name for name, ours, theirs in pairs if ours != theirs]

    def __str__(self) -> str:
        lower, strip, chinese = self.explicit()
        words = ["lowercased" if lower else "cased"]
        if lower != strip:
            words.append(f"accents {'dropped' if strip else 'kept'}")
        if not chinese:
            words.append("Chinese not split into characters")
        return ", ".join(words)


UNCASED = TextNormalization()
"""Normalization of an uncased BERT."""


class Vocabulary(NamedTuple):
    """Meaning of the tokens of a run.

    Attributes:
      pieces: Pieces or words in the order of their ids; empty for data without text.
      normalization: Changes of the text before it is split into pieces; None for whole words, and
        for bytes.
      tokenizer_json: Tokenizer of byte-level pieces, see `BytePairs`; "" for others.
    """

    pieces: tuple[str, ...] = ()
    normalization: TextNormalization | None = None
    tokenizer_json: str = ""

    def files(self) -> dict[str, str]:
        """Return name -> content of its files in a workdir or an exported folder.

        They are in the format of Transformers. The vocabulary comes last, because a vocabulary
        without settings is read as one of earlier versions of lbopt.
        """
        found = {}
        if self.tokenizer_json:
            settings = {
                "eos_token": END_OF_DOCUMENT,
                "tokenizer_class": "PreTrainedTokenizerFast",
            }
            return {
                SETTINGS_FILE: json.dumps(settings, indent=2) + "\n",
                TOKENIZER: self.tokenizer_json,
            }
        if self.normalization is not None:
            settings = {**self.normalization._asdict(), "tokenizer_class": "BertTokenizer"}
            found[SETTINGS_FILE] = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        if self.pieces:
            found[VOCABULARY_FILE] = "".join(f"{piece}\n" for piece in self.pieces)
        return found


NO_VOCABULARY = Vocabulary()


def find_vocabulary(folder: Path) -> Path | None:
    """Return the vocab.txt of a folder or, without it, its tokenizer.json; None without both."""
    files = (folder / VOCABULARY_FILE, folder / TOKENIZER)
    return next((file for file in files if file.is_file()), None)


def read_vocabulary(path: paths.GivenPath) -> list[str]:
    """Return the pieces of a vocabulary file in the order of their ids.

    Args:
      path: UTF-8 file with one piece on each line, as `save_vocabulary` writes it; or a
        tokenizer.json of Transformers. Either may be at gs://BUCKET/FILE.

    Raises:
      UserError: If the file is missing, empty or not UTF-8, if a line is empty or occurs twice, or
        if a tokenizer.json splits words in another way than BERT.
    """
    file = _readable(path)
    if file.suffix == ".json":
        return _pieces_of_tokenizer(file)

    try:
        text = _typed_json.read_bytes(file, _typed_json.MOST_BYTES).decode()
    except (OSError, ValueError) as error:
        fix = f"it cannot be read as UTF-8 text ({error}); use a vocab.txt"
        code: Code = "missing" if isinstance(error, FileNotFoundError) else "damaged"
        raise UserError("vocabulary", str(path), fix, code=code) from error

    # Not `splitlines`: a piece may be one of the other characters at which it splits.
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    pieces = lines[:-1] if lines[-1] == "" else lines
    twice = [piece for piece, count in collections.Counter(pieces).items() if count > 1]

    fix = ""
    if not pieces:
        fix = "it is empty; use a file with one piece on each line"
    elif "" in pieces:
        fix = "a line is empty; use a file with one piece on each line"
    elif twice:
        fix = f"{brief(twice[:3])} occur more than once; use a file with each piece on one line"
    require(not fix, "vocabulary", str(path), fix, code="damaged")
    return pieces


def _readable(path: paths.GivenPath) -> Path:
    """Return the file of a vocabulary; of one in a bucket the copy, with the files beside it."""
    return paths.readable(path, "vocabulary", (SETTINGS_FILE, TOKENIZER, _STORE, _CONFIG))


def save_vocabulary(pieces: Sequence[str], path: paths.GivenPath) -> None:
    """Write pieces in the order of their ids, one on each line, in the format of BERT's vocab.txt.

    Raises:
      EnvironmentProblem: If the file cannot be written.
    """
    text = "".join(f"{piece}\n" for piece in pieces)
    try:
        paths.local(path, "vocabulary").write_text(text, "utf-8", newline="\n")
    except OSError as error:
        fix = f"it cannot be written ({error}); use another folder"
        raise EnvironmentProblem("vocabulary", str(path), fix, code="resource") from error


def decide_normalization(
    path: paths.GivenPath,
    pieces: Sequence[str],
    lowercase: bool | None = None,
    say: Callable[[str], None] | None = None,
) -> TextNormalization:
    """Return the normalization of text for the vocabulary of a file.

    `lowercase` comes first, then the files beside the vocabulary, see `stated_normalization`. If
    neither says whether text is lowercased, it is lowercased if no piece has a capital letter, and
    a vocabulary with capitals is refused.

    Args:
      path: File of the vocabulary.
      pieces: Pieces of the vocabulary.
      lowercase: Whether the user wants text to be lowercased; None to follow the files.
      say: Function that takes a line for the user if `lowercase` overrides a file, or if the case
        of text does not fit the pieces; None for a warning.

    Raises:
      UserError: If a vocabulary with capitals is refused, or for a file that
        `stated_normalization` refuses.
    """
    say = say or _warn
    # With the wrong case, words become [UNK] and no error follows: so an unknown case is refused,
    # and a doubtful one is reported.
    stated, source = stated_normalization(path)
    capitals = _with_capitals(pieces)
    counted = f"{len(capitals)} of {len(pieces)} pieces"
    capital = f"have capitals ({', '.join(capitals[:3])})"
    if lowercase is None and source is None and capitals:
        fix = (
            f"{counted} of {{path}} {capital}, and no {SETTINGS_FILE} beside it says "
            "do_lower_case; give {lowercase}=false to keep case, {lowercase}=true to drop it"
        )
        also = ["lowercase"]
        files = {"path": path}
        raise UserError("lowercase", lowercase, fix, code="missing", also=also, files=files)

    field = place_of("lowercase")
    found = TextNormalization(**stated)
    if lowercase is not None:
        if source and lowercase != found.do_lower_case:
            ours = json.dumps(lowercase)
            theirs = json.dumps(found.do_lower_case)
            say(f"{field} = {ours} overrides {source}, which says do_lower_case = {theirs}")
        found = found._replace(do_lower_case=lowercase)

    fix = ""
    if lowercase is None:
        fix = f"; if that is wrong, give {field}={json.dumps(not found.do_lower_case)}"
    if found.do_lower_case and capitals:
        say(f"{counted} of {path} {capital}, but text is lowercased: they stay unused{fix}")
    if not found.do_lower_case and not capitals:
        say(
            f"no piece of {path} has a capital, but text is not lowercased: words with capitals "
            f"become [UNK]{fix}"
        )
    return found


def stated_normalization(vocabulary: paths.GivenPath) -> tuple[dict[str, Any], Path | None]:
    """Return the normalization that the files beside a vocabulary state.

    The first file that states `do_lower_case` is used, in this order: tokenizer_config.json, the
    normalizer of tokenizer.json, and store.json or config.json of lbopt. Earlier versions of lbopt
    lowercased all text without stating it there.

    Args:
      vocabulary: File of the vocabulary.

    Returns:
      Fields of `TextNormalization`, and the file that states `do_lower_case`; None if none does.

    Raises:
      UserError: If a file cannot be read, or states a tokenizer that lbopt does not have.
    """
    file = _readable(vocabulary)
    folder = file.parent
    whole = _tokenizer_file(file)
    settings = _read(folder / SETTINGS_FILE, _Settings) or {}
    for name, plain in _REQUIRED_SETTINGS.items():
        given = settings.get(name, plain)
        fix = f"lbopt splits words as BERT does, with {plain!r}; use a vocabulary of that kind"
        field = f"{folder / SETTINGS_FILE}: {name}"
        require(given in (None, plain), field, given, fix, code="mismatch")

    stated = {name: settings[name] for name in TextNormalization._fields if name in settings}
    if "do_lower_case" in stated:
        return stated, folder / SETTINGS_FILE
    if (tokenizer := _read(whole, _Tokenizer)) is not None:
        return _normalizer(tokenizer, whole) | stated, whole
    if (store := _read(folder / _STORE, _Store)) is not None:
        return TextNormalization(**store.get("normalization", {}))._asdict(), folder / _STORE
    if _is_workdir(folder):
        return UNCASED._asdict(), folder / _CONFIG
    return stated, None


class Normalization(TypedDict):
    """Fields of `TextNormalization` in a JSON file."""

    do_lower_case: bool
    strip_accents: bool | None
    tokenize_chinese_chars: bool


class _Settings(TypedDict, total=False):
    do_lower_case: bool
    strip_accents: bool | None
    tokenize_chinese_chars: bool
    do_basic_tokenize: bool
    word_tokenizer_type: str | None
    subword_tokenizer_type: str | None


class _Store(TypedDict):
    normalization: NotRequired[Normalization]


class _TokenizerModel(TypedDict):
    type: NotRequired[str]
    vocab: dict[str, _typed_json.Count]
    unk_token: NotRequired[str]
    continuing_subword_prefix: NotRequired[str]
    max_input_chars_per_word: NotRequired[int]


class _Added(TypedDict):
    id: _typed_json.Count
    content: str


class _TokenizerStep(TypedDict):
    type: str
    clean_text: NotRequired[bool]
    handle_chinese_chars: NotRequired[bool]
    strip_accents: NotRequired[bool | None]
    lowercase: NotRequired[bool]


class _Tokenizer(TypedDict):
    model: _TokenizerModel
    normalizer: NotRequired[_TokenizerStep | None]
    pre_tokenizer: NotRequired[_TokenizerStep | None]
    added_tokens: NotRequired[list[_Added]]


def _pieces_of_tokenizer(path: Path) -> list[str]:
    """Return the pieces of a tokenizer.json in the order of their ids."""
    found = _read(path, _Tokenizer)
    if found is None:
        fix = "no such file; use a vocab.txt or a tokenizer.json"
        raise UserError("vocabulary", str(path), fix, code="missing")
    _check_splitting(found, path)
    # Added tokens in brackets are special ones. Transformers would look for others in the text
    # before it is split, which BERT's tokenizer does not do.
    added = found.get("added_tokens", [])
    words = [token["content"] for token in added if not _BRACKETED.fullmatch(token["content"])]
    fix = "text is split into pieces of the vocabulary alone; use one that has them"
    require(not words, f"{path}: added_tokens", words[:3], fix, code="mismatch")

    ids = {**found["model"]["vocab"], **{token["content"]: token["id"] for token in added}}
    pieces = sorted(ids, key=ids.__getitem__)
    broken = [piece for piece in pieces if not piece or _NO_LINE.search(piece)]
    fix = ""
    if not pieces:
        fix = "it has no pieces; use a tokenizer.json of a trained BERT"
    elif broken:
        fix = f"{brief(broken[:3])} are no lines of text; use another vocabulary"
    elif [ids[piece] for piece in pieces] != list(range(len(pieces))):
        fix = f"its {len(pieces)} pieces are not numbered from 0 on; save it again"
    require(not fix, "vocabulary", str(path), fix, code="damaged")
    return pieces


def _normalizer(found: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the fields of `TextNormalization` that a tokenizer.json gives."""
    _check_splitting(found, path)
    step = found.get("normalizer") or {"type": None}
    fix = (
        f"lbopt cleans text by 'BertNormalizer'; give a {SETTINGS_FILE} with do_lower_case, or "
        "another vocabulary"
    )
    kind = step["type"]
    require(kind == "BertNormalizer", f"{path}: normalizer", kind, fix, code="mismatch")
    cleans = step.get("clean_text", True)
    require(cleans, f"{path}: normalizer.clean_text", False, fix, code="mismatch")
    names = {
        "do_lower_case": "lowercase",
        "strip_accents": "strip_accents",
        "tokenize_chinese_chars": "handle_chinese_chars",
    }
    return {ours: step[theirs] for ours, theirs in names.items() if theirs in step}


def _check_splitting(found: Mapping[str, Any], path: Path) -> None:
    """Raise `UserError` unless a tokenizer.json splits words as BERT does."""
    plain = {
        "type": "WordPiece",
        "unk_token": SPECIAL_TOKENS[UNK],
        "continuing_subword_prefix": CONTINUED,
        "max_input_chars_per_word": LONGEST_WORD,
    }
    for name, value in plain.items():
        given = found["model"].get(name, value)
        fix = f"lbopt splits words as BERT does, with {value!r}; use a vocabulary of that kind"
        require(given == value, f"{path}: model.{name}", given, fix, code="mismatch")
    kind = (found.get("pre_tokenizer") or {"type": None})["type"]
    fix = "lbopt splits words as BERT does, with 'BertPreTokenizer'; use a vocabulary of that kind"
    require(kind == "BertPreTokenizer", f"{path}: pre_tokenizer", kind, fix, code="mismatch")


def _tokenizer_file(vocabulary: Path) -> Path:
    return vocabulary if vocabulary.suffix == ".json" else vocabulary.parent / TOKENIZER


def _read(path: Path, kind: Any) -> Any:
    """Return the content of a JSON file; None if it is missing."""
    try:
        return _typed_json.read_file(path, kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        fix = (
            f"it cannot be read ({error}), and says how text is split; repair it, or use a copy of "
            "the vocabulary in another folder"
        )
        raise UserError(str(path), reason=fix, code="damaged") from error


def _is_workdir(folder: Path) -> bool:
    """Return whether a folder has the config.json of a run of lbopt."""
    with contextlib.suppress(OSError, ValueError):
        return isinstance(_typed_json.read_file(folder / _CONFIG, dict).get("versions"), dict)
    return False


def _with_capitals(pieces: Sequence[str]) -> list[str]:
    """Return the pieces that never occur in lowercased text, those that begin words first."""
    cased = [piece for piece in pieces if piece != piece.lower()]
    found = [piece for piece in cased if not _BRACKETED.fullmatch(piece)]
    return sorted(found, key=lambda piece: piece.startswith(CONTINUED))


def _warn(line: str) -> None:
    warnings.warn(one_line(line), stacklevel=4)
