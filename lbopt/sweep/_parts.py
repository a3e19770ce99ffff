"""A study in a bucket that shards share: an object cannot be appended to, so each has a folder of its own and reads the others'."""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

from lbopt import paths
from lbopt.errors import UserError
from lbopt.sweep import _examples
from lbopt.sweep._results import OTHERS, read_results
from lbopt.workdir import (
    Shard,
    absolute_workdir,
    bucket_errors,
    bucket_path,
    is_folder_held,
    read_study_config,
)

_SHARDS = "shards"
_RESULTS = "results.jsonl"
_WHOLE = "whole"


def shard_folder(study: str, shard: Shard | None) -> str:
    """Return where a shard of a study works.

    Args:
      study: the --workdir as given.
      shard: None for the whole study.

    >>> shard_folder("gs://bucket/study", Shard(2, 4)), shard_folder("/shared/study", Shard(2, 4))
    ('gs://bucket/study/shards/2-of-4', '/shared/study')
    """
    if shard is None or not paths.is_address(study):
        return study
    return f"{study.rstrip('/')}/{_SHARDS}/{shard.number}-of-{shard.count}"


class Parts:
    """What the shards of a study have in a bucket, as seen from the folder in which one of them works.

    Args:
      study: gs://BUCKET/FOLDER of the whole study.
      mirror: the local folder of this process; it gets the others' trials, and is never shown them as its own.
    """

    def __init__(self, study: str, mirror: pathlib.Path):
        self._study, self._mirror = study, mirror
        self._root = bucket_path(study)

    def fetch(self) -> None:
        """Copy the others' finished trials, and their config where there is none yet.

        Raises:
          EnvironmentProblem: if the bucket cannot be read.
        """
        places = {
            _RESULTS: self._mirror / OTHERS,
            _examples.EXAMPLES: self._mirror / _examples.OTHERS,
        }
        for place in places.values():
            place.mkdir(exist_ok=True)
        with bucket_errors(self._study, "read"):
            for name, folder in self._folders().items():
                for file, place in places.items():
                    with contextlib.suppress(FileNotFoundError):
                        (place / f"{name}.jsonl").write_bytes((folder / file).read_bytes())
                config = self._mirror / "config.json"
                if not config.exists():
                    with contextlib.suppress(FileNotFoundError):
                        config.write_bytes((folder / config.name).read_bytes())

    def refuse_others(
        self, shard: Shard | None, compare: Callable[[dict[str, Any]], list[str]]
    ) -> None:
        """Look at the other shards before one begins.

        Args:
          shard: that begins; None for the whole study.
          compare: the saved `config.json` of a study -> how it differs from this one.

        Raises:
          UserError: naming `--shard`, if a part of another division is being run, or `--workdir`, if a shard is of another study.
        """
        with bucket_errors(self._study, "read"):
            for name, folder in self._folders().items():
                with contextlib.suppress(FileNotFoundError):
                    differences = compare(read_study_config(folder / "config.json"))
                    if differences:
                        raise UserError(
                            f"--workdir = {self._study!r}: it holds a sweep of another config ({'; '.join(differences[:3])}); "
                            "use another --workdir"
                        )
                ours = _WHOLE if shard is None else f"-of-{shard.count}"
                if not name.endswith(ours) and is_folder_held(folder):
                    begun = "the whole study" if name == _WHOLE else f"shard {name}"
                    raise UserError(
                        f"--shard = {str(shard)!r}: {begun} is being run in {self._study!r}; one division at a time"
                    )

    def publish(self) -> None:
        """Put the whole study where its --workdir is: all trials, in one file, and the report beside them."""
        merged = {
            _RESULTS: read_results(self._mirror),
            _examples.EXAMPLES: _examples.read_packed(self._mirror),
        }
        with bucket_errors(self._study, "written"):
            for name, lines in merged.items():
                text = "".join(json.dumps(line) + "\n" for line in lines)
                (self._root / name).write_text(text)
            for file in sorted(self._mirror.iterdir()):
                if file.is_file() and not file.name.startswith(".") and file.name not in merged:
                    (self._root / file.name).write_bytes(file.read_bytes())

    def _folders(self) -> dict[str, Any]:
        """Return name -> folder of every shard that has begun, and "whole" -> that of the study."""
        found = {_WHOLE: self._root}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for folder in (self._root / _SHARDS).iterdir():
                if re.fullmatch(r"\d+-of-\d+", folder.name):
                    found[folder.name] = folder
        return found


def gather_shards(study: str, mirror: str) -> None:
    """Make a folder of a bucket that has shards, but nothing of its own, readable as a study.

    Args:
      study: the --workdir as given.
      mirror: its local folder.
    """
    if paths.is_address(study):
        Parts(study, absolute_workdir(mirror)).fetch()
