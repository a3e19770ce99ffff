"""Vocabularies of WordPiece as files, and whether text is lowercased for them."""

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
from lbopt.data.text._pieces import CONTINUED, SPECIAL_TOKENS, UNK
from lbopt.errors import EnvironmentProblem, UserError, brief, require

VOCABULARY_FILE, SETTINGS_FILE, TOKENIZER = "vocab.txt", "tokenizer_config.json", "tokenizer.json"
"""Files of Transformers: pieces; how text is cut; both in one."""
LONGEST_WORD = 100
"""In characters: a longer word is unknown, as to BERT."""
_STORE, _CONFIG = "store.json", "config.json"
_ONLY = {
    "do_basic_tokenize": True,
    "word_tokenizer_type": "basic",
    "subword_tokenizer_type": "wordpiece",
}
"""Settings of tokenizer_config.json that have one value here."""
_NO_LINE = re.compile("[\n\r\ud800-\udfff]")
_BRACKETED = re.compile(r"\[[^\[\]]+\]|<[^<>]+>")
"""Pieces that stand for no text: [MASK], [unused1], <S>."""


class TextNormalization(NamedTuple):
    """Changes of text before it is cut, under the names of Transformers' `BertTokenizer` and with its defaults.

    Attributes:
      do_lower_case: Text is lowercased.
      strip_accents: Accents are dropped. None to drop them where text is lowercased.
      tokenize_chinese_chars: Each Chinese character is a word of its own.
    """

    do_lower_case: bool = True
    strip_accents: bool | None = None
    tokenize_chinese_chars: bool = True

    def explicit(self) -> TextNormalization:
        """Return the same without None."""
        return self._replace(
            strip_accents=self.do_lower_case if self.strip_accents is None else self.strip_accents
        )

    def differences(self, other: TextNormalization) -> list[str]:
        """Return the names of the fields that mean another thing in `other`."""
        pairs = zip(self._fields, self.explicit(), other.explicit(), strict=True)
        return [name for name, ours, theirs in pairs if ours != theirs]

    def __str__(self) -> str:
        lower, strip, chinese = self.explicit()
        accents = "" if lower == strip else f", accents {'dropped' if strip else 'kept'}"
        return f"{'lowercased' if lower else 'cased'}{accents}{'' if chinese else ', Chinese not cut into characters'}"


UNCASED = TextNormalization()
"""The changes that an uncased BERT asks for."""


class Vocabulary(NamedTuple):
    """What a run's tokens stand for.

    Attributes:
      pieces: Pieces or words in the order of ids; empty if there is no text.
      normalization: Changes of text before it is cut into pieces; None for whole words.
    """

    pieces: tuple[str, ...] = ()
    normalization: TextNormalization | None = None

    def files(self) -> dict[str, str]:
        """Return name -> content of the files that workdirs and exported folders keep of it, as Transformers spells them.

        The vocabulary comes last, because a folder without settings is read as one of earlier versions.
        """
        found = {}
        if self.normalization is not None:
            settings = {**self.normalization._asdict(), "tokenizer_class": "BertTokenizer"}
            found[SETTINGS_FILE] = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        if self.pieces:
            found[VOCABULARY_FILE] = "".join(f"{piece}\n" for piece in self.pieces)
        return found


NO_VOCABULARY = Vocabulary()


def find_vocabulary(folder: Path) -> Path | None:
    """Return the vocabulary file of a folder: its vocab.txt, else its tokenizer.json, else None."""
    return next(
        (file for file in (folder / VOCABULARY_FILE, folder / TOKENIZER) if file.is_file()), None
    )


def read_vocabulary(path: paths.GivenPath) -> list[str]:
    """Return the pieces of a file in the order of their ids.

    Args:
      path: UTF-8, one piece a line, as `save_vocabulary` writes it; or a tokenizer.json of Transformers.

    Raises:
      UserError: Naming the file, if it is absent, empty or not UTF-8, if a line is empty or occurs twice, or if a
        tokenizer.json cuts words in another way than BERT.
    """
    file = paths.local(path, "vocabulary")
    if file.suffix == ".json":
        return _pieces_of_tokenizer(file)
    try:
        text = _typed_json.read_bytes(file, _typed_json.MOST_BYTES).decode()
    except (OSError, ValueError) as error:
        raise UserError(
            f"vocabulary = {str(path)!r}: it cannot be read as UTF-8 text ({error}); use a vocab.txt"
        ) from error
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    pieces = lines[:-1] if lines[-1] == "" else lines
    require(pieces, "vocabulary", str(path), "it is empty; use a file with one piece a line")
    require("" not in pieces, "vocabulary", str(path), "a line is empty; every line has one piece")
    twice = [piece for piece, count in collections.Counter(pieces).items() if count > 1]
    require(
        not twice,
        "vocabulary",
        str(path),
        f"{brief(twice[:3])} occur more than once; each piece has one line",
    )
    return pieces


def save_vocabulary(pieces: Sequence[str], path: paths.GivenPath) -> None:
    """Write pieces in the order of their ids, one a line, as BERT's vocab.txt has them.

    Raises:
      EnvironmentProblem: If the file cannot be written.
    """
    try:
        paths.local(path, "vocabulary").write_text(
            "".join(f"{piece}\n" for piece in pieces), "utf-8", newline="\n"
        )
    except OSError as error:
        raise EnvironmentProblem(f"the vocabulary {path} cannot be written: {error}") from error


def decide_normalization(
    path: paths.GivenPath,
    pieces: Sequence[str],
    lowercase: bool | None = None,
    field: str = "lowercase",
    say: Callable[[str], None] | None = None,
) -> TextNormalization:
    """Return what is done to text before it is cut by the vocabulary of a file. Every such decision is made here.

    `lowercase` counts first, then what `stated_normalization` finds beside the file. Where neither says whether text is
    lowercased, it is if no piece has a capital letter; a vocabulary with capitals is refused.

    Args:
      path: The vocabulary.
      pieces: Its pieces.
      lowercase: The user's word; None to follow the files beside the vocabulary.
      field: The user's name for `lowercase`.
      say: Takes a line for the user where `lowercase` overrides a file, and where case of text and pieces do not meet.
        None for a warning.

    Raises:
      UserError: If a vocabulary with capitals is refused, or see `stated_normalization`.
    """
    say = say or _warn
    stated, source = stated_normalization(path)
    capitals = _with_capitals(pieces)
    some = f"{len(capitals)} of {len(pieces)} pieces of {path} have capitals ({', '.join(capitals[:3])})"
    flag = f"--{field.removeprefix('--')}"
    fix = f"{some}, and no {SETTINGS_FILE} beside it says do_lower_case; give {flag}=false to keep case, {flag}=true to drop it"
    require(lowercase is not None or source or not capitals, field, lowercase, fix)
    found = TextNormalization(**stated)
    if lowercase is not None:
        if source and lowercase != found.do_lower_case:
            words = json.dumps(lowercase), json.dumps(found.do_lower_case)
            say(f"{field} = {words[0]} counts, though {source} says do_lower_case = {words[1]}")
        found = found._replace(do_lower_case=lowercase)
    fix = (
        ""
        if lowercase is not None
        else f"; if that is wrong, give {flag}={json.dumps(not found.do_lower_case)}"
    )
    if found.do_lower_case and capitals:
        say(f"{some}, but text is lowercased: these pieces stay unused{fix}")
    if not (found.do_lower_case or capitals):
        say(
            f"no piece of {path} has a capital, but text is not lowercased: words with capitals become [UNK]{fix}"
        )
    return found


def stated_normalization(vocabulary: paths.GivenPath) -> tuple[dict[str, Any], Path | None]:
    """Return what files beside a vocabulary say of its text.

    In this order: tokenizer_config.json; tokenizer.json, whose normalizer counts where the former does not say
    `do_lower_case`; store.json and config.json of lbopt, whose earlier versions lowercased all text and did not say so.

    Args:
      vocabulary: The file.

    Returns:
      Fields of `TextNormalization`, and the file that says `do_lower_case`; None if none does.

    Raises:
      UserError: Naming the file, if it cannot be read, or asks for what lbopt does not do.
    """
    file = paths.local(vocabulary, "vocabulary")
    folder, whole = file.parent, _tokenizer_file(file)
    settings = _read(folder / SETTINGS_FILE, _Settings) or {}
    for name, plain in _ONLY.items():
        given = settings.get(name, plain)
        fix = f"lbopt cuts words as BERT does, {plain!r} here; use a vocabulary of that kind"
        require(given in (None, plain), f"{folder / SETTINGS_FILE}: {name}", given, fix)
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
    """`TextNormalization` in a JSON file."""

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


class _Model(TypedDict):
    type: NotRequired[str]
    vocab: dict[str, _typed_json.Count]
    unk_token: NotRequired[str]
    continuing_subword_prefix: NotRequired[str]
    max_input_chars_per_word: NotRequired[int]


class _Added(TypedDict):
    id: _typed_json.Count
    content: str


class _Step(TypedDict):
    type: str
    clean_text: NotRequired[bool]
    handle_chinese_chars: NotRequired[bool]
    strip_accents: NotRequired[bool | None]
    lowercase: NotRequired[bool]


class _Tokenizer(TypedDict):
    model: _Model
    normalizer: NotRequired[_Step | None]
    pre_tokenizer: NotRequired[_Step | None]
    added_tokens: NotRequired[list[_Added]]


def _pieces_of_tokenizer(path: Path) -> list[str]:
    found = _read(path, _Tokenizer)
    require(
        found is not None,
        "vocabulary",
        str(path),
        "no such file; use a vocab.txt or a tokenizer.json",
    )
    assert found is not None
    model, added = found["model"], found.get("added_tokens", [])
    _check_cut(found, path)
    words = [token["content"] for token in added if not _BRACKETED.fullmatch(token["content"])]
    require(
        not words,
        f"{path}: added_tokens",
        words[:3],
        "text is cut into pieces of the vocabulary alone; use one that has them",
    )
    ids = {**model["vocab"], **{token["content"]: token["id"] for token in added}}
    pieces = sorted(ids, key=ids.__getitem__)
    require(
        pieces, "vocabulary", str(path), "it has no pieces; use a tokenizer.json of a trained BERT"
    )
    broken = [piece for piece in pieces if not piece or _NO_LINE.search(piece)]
    require(
        not broken,
        "vocabulary",
        str(path),
        f"{brief(broken[:3])} are no lines of text; use another vocabulary",
    )
    numbered = [ids[piece] for piece in pieces] == list(range(len(pieces)))
    require(
        numbered,
        "vocabulary",
        str(path),
        f"its {len(pieces)} pieces are not numbered from 0 on; save it again",
    )
    return pieces


def _normalizer(found: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the fields of `TextNormalization` that a tokenizer.json gives."""
    _check_cut(found, path)
    step = found.get("normalizer") or {"type": None}
    fix = f"lbopt cleans text by 'BertNormalizer'; give a {SETTINGS_FILE} with do_lower_case, or another vocabulary"
    require(step["type"] == "BertNormalizer", f"{path}: normalizer", step["type"], fix)
    require(step.get("clean_text", True), f"{path}: normalizer.clean_text", False, fix)
    names = {
        "do_lower_case": "lowercase",
        "strip_accents": "strip_accents",
        "tokenize_chinese_chars": "handle_chinese_chars",
    }
    return {ours: step[theirs] for ours, theirs in names.items() if theirs in step}


def _check_cut(found: Mapping[str, Any], path: Path) -> None:
    """Raise `UserError` unless a tokenizer.json cuts words as BERT does."""
    model, before = found["model"], found.get("pre_tokenizer") or {"type": None}
    plain = {
        "type": "WordPiece",
        "unk_token": SPECIAL_TOKENS[UNK],
        "continuing_subword_prefix": CONTINUED,
        "max_input_chars_per_word": LONGEST_WORD,
    }
    for name, value in plain.items():
        fix = f"lbopt cuts words as BERT does, with {value!r}; use a vocabulary of that kind"
        require(model.get(name, value) == value, f"{path}: model.{name}", model.get(name), fix)
    fix = "lbopt cuts words as BERT does, with 'BertPreTokenizer'; use a vocabulary of that kind"
    require(before["type"] == "BertPreTokenizer", f"{path}: pre_tokenizer", before["type"], fix)


def _tokenizer_file(vocabulary: Path) -> Path:
    return vocabulary if vocabulary.suffix == ".json" else vocabulary.parent / TOKENIZER


def _read(path: Path, kind: Any) -> Any:
    """Return what a JSON file holds, or None if it is not there."""
    try:
        return _typed_json.read_file(path, kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: it cannot be read ({error}), and says how text is cut; mend it, or use a copy of the vocabulary elsewhere"
        ) from error


def _is_workdir(folder: Path) -> bool:
    """Return whether the config.json of a folder is that of a run of lbopt."""
    with contextlib.suppress(OSError, ValueError):
        return isinstance(_typed_json.read_file(folder / _CONFIG, dict).get("versions"), dict)
    return False


def _with_capitals(pieces: Sequence[str]) -> list[str]:
    """Return the pieces that lowercased text never has, those that begin words first."""
    found = [
        piece for piece in pieces if piece != piece.lower() and not _BRACKETED.fullmatch(piece)
    ]
    return sorted(found, key=lambda piece: piece.startswith(CONTINUED))


def _warn(line: str) -> None:
    warnings.warn(one_line(line), stacklevel=4)
