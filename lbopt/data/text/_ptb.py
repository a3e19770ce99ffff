"""Mikolov's preprocessing of the Penn Treebank, word by word, from its three files.

They are licensed and cannot be downloaded by a program: `lbopt prepare ptb` says where they are from and where they go.
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
END, UNKNOWN = "<eos>", "<unk>"


class Ptb(NamedTuple):
    """Text as numbers of words.

    Attributes:
      words: by descending frequency in the training part, then by the alphabet; 10000 in the original files.
      train: [tokens] int32.
      validation: likewise.
      test: likewise.
    """

    words: tuple[str, ...]
    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray


def missing_ptb_files(folder: paths.GivenPath) -> list[str]:
    """Return the names of the files that are not in a folder."""
    return [name for name in FILES.values() if not (paths.local(folder, "folder") / name).is_file()]


def load_ptb(
    folder: paths.GivenPath, expected_vocab_size: int | None = None, data_dir: str | None = None
) -> Ptb:
    """Read the three files: words between white space, and `<eos>` at the end of each line.

    Words of the other parts that the training part does not have become `<unk>`.

    Args:
      folder: of the files.
      expected_vocab_size: of the model; None to take any.
      data_dir: the folder of data sets, if the user gave it, for the message.

    Raises:
      UserError: if the training part has another number of words, or has no `<unk>` and another part needs it.
      EnvironmentProblem: if a file is missing, cannot be read, or is empty.
    """
    folder = paths.local(folder, "folder")
    if missing := missing_ptb_files(folder):
        command = prepare_command("ptb", data_dir)
        raise EnvironmentProblem(
            f"config.data.name = 'ptb': {', '.join(missing)} missing in {folder}; {command} says where to get them"
        )
    texts = {part: _read(folder / name) for part, name in FILES.items()}
    counts = collections.Counter(texts["train"])
    words = tuple(sorted(counts, key=lambda word: (-counts[word], word)))
    fix = (
        f"{folder / FILES['train']} has {len(words)} words; use that number, or the original files"
    )
    require(
        expected_vocab_size in (None, len(words)),
        "config.data.vocab_size",
        expected_vocab_size,
        fix,
    )
    ids = {word: number for number, word in enumerate(words)}
    return Ptb(words, *(_numbered(texts[part], ids, name) for part, name in FILES.items()))


def _read(path: pathlib.Path) -> list[str]:
    try:
        lines = path.read_text("utf-8").rstrip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentProblem(
            f"{path} cannot be read as text ({error}); get it again"
        ) from error
    if lines == [""]:
        raise EnvironmentProblem(f"{path} is empty; get it again")
    return [word for line in lines for word in (*line.split(), END)]


def _numbered(text: list[str], ids: Mapping[str, int], name: str) -> np.ndarray:
    if UNKNOWN not in ids:
        strange = next((word for word in text if word not in ids), None)
        if strange is not None:
            raise UserError(
                f"{name}: {strange!r} is not in {FILES['train']}, which has no {UNKNOWN}; use files that fit"
            )
    unknown = ids.get(UNKNOWN, -1)
    return np.fromiter((ids.get(word, unknown) for word in text), np.int32, len(text))
