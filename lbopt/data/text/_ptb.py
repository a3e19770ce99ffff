"""Mikolov's preprocessing of the Penn Treebank: numbers of words, read from its three files.

The files are licensed, so no program can download them. `lbopt prepare ptb` says where to get them
and where to put them.
"""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lbopt import paths
from lbopt.data._records import prepare_command
from lbopt.errors import EnvironmentProblem, UserError, require

FILES = {"train": "ptb.train.txt", "validation": "ptb.valid.txt", "test": "ptb.test.txt"}
END = "<eos>"
UNKNOWN = "<unk>"


class Ptb(NamedTuple):
    """Text as numbers of words.

    Attributes:
      words: Words in the order of their numbers: by descending frequency in the training set, then
        alphabetically. The original files have 10000.
      train: [tokens] int32, the training set.
      validation: [tokens] int32, the validation set.
      test: [tokens] int32, the test set.
    """

    words: tuple[str, ...]
    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray


def missing_ptb_files(folder: paths.GivenPath) -> list[str]:
    """Return the names of the files that are missing in a folder."""
    root = paths.readable(folder, "folder")
    return [name for name in FILES.values() if not (root / name).is_file()]


def load_ptb(
    folder: paths.GivenPath, expected_vocab_size: int | None = None, data_dir: str | None = None
) -> Ptb:
    """Read the three files: words between white space, and `<eos>` at the end of each line.

    Words that are not in the training set become `<unk>`.

    Args:
      folder: Folder of the files, or gs://BUCKET/FOLDER.
      expected_vocab_size: Number of words that the model knows; None for any.
      data_dir: Folder of data sets, if the user gave it, for the message.

    Raises:
      UserError: If the training set has another number of words, or if it lacks `<unk>` and another
        set needs it.
      EnvironmentProblem: If a file is missing, unreadable or empty.
    """
    folder = paths.readable(folder, "folder")
    missing = missing_ptb_files(folder)
    if missing:
        command = prepare_command("ptb", data_dir)
        fix = f"{', '.join(missing)} missing in {folder}; {command} says where to get them"
        raise EnvironmentProblem("ptb", reason=fix, code="missing")

    texts = {split: _read(folder / name) for split, name in FILES.items()}
    counts = collections.Counter(texts["train"])
    words = tuple(sorted(counts, key=lambda word: (-counts[word], word)))
    file = folder / FILES["train"]
    fix = f"{file} has {len(words)} words; use that number, or the original files"
    same = expected_vocab_size in (None, len(words))
    require(same, "expected_vocab_size", expected_vocab_size, fix, code="mismatch")

    ids = {word: number for number, word in enumerate(words)}
    return Ptb(words, *(_numbered(texts[split], ids, name) for split, name in FILES.items()))


def _read(path: pathlib.Path) -> list[str]:
    try:
        lines = path.read_text("utf-8").rstrip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        fix = f"it cannot be read as text ({error}); download it again"
        raise EnvironmentProblem(str(path), reason=fix, code="damaged") from error
    if lines == [""]:
        fix = "it is empty; download it again"
        raise EnvironmentProblem(str(path), reason=fix, code="damaged")
    return [word for line in lines for word in (*line.split(), END)]


def _numbered(text: list[str], ids: Mapping[str, int], name: str) -> np.ndarray:
    """Return the numbers of a text's words; `name` is that of its file."""
    if UNKNOWN not in ids:
        new = next((word for word in text if word not in ids), None)
        if new is not None:
            fix = (
                f"{name} has this word, and {FILES['train']} has neither it nor {UNKNOWN}; use "
                "files of one data set"
            )
            raise UserError("word", new, fix, code="mismatch")
    unknown = ids.get(UNKNOWN, -1)
    return np.fromiter((ids.get(word, unknown) for word in text), np.int32, len(text))
