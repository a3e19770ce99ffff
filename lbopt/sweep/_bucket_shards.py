"""A study in a bucket that shards share.

An object of a bucket cannot be appended to, so each shard writes to a folder of its own, and reads
those of the others.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

from lbopt import paths
from lbopt.errors import UserError, require
from lbopt.sweep import _example_scores
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
"""Name of the study's own folder among those of its shards."""


def shard_folder(study: str, shard: Shard | None) -> str:
    """Return the folder in which a shard of a study works.

    Args:
      study: The `workdir` as given.
      shard: The shard; None for the whole study.

    >>> shard_folder("gs://bucket/study", Shard(2, 4)), shard_folder("/shared/study", Shard(2, 4))
    ('gs://bucket/study/shards/2-of-4', '/shared/study')
    """
    if shard is None or not paths.is_address(study):
        return study
    return f"{study.rstrip('/')}/{_SHARDS}/{shard.number}-of-{shard.count}"


class BucketShards:
    """The shards of a study in a bucket, as seen by a process that works on one of them.

    Args:
      study: gs://BUCKET/FOLDER of the whole study.
      mirror: The local folder of this process; it gets the trials of other shards in files apart
        from its own.
    """

    def __init__(self, study: str, mirror: pathlib.Path):
        self._study = study
        self._mirror = mirror
        self._root = bucket_path(study)

    def fetch(self) -> None:
        """Copy the finished trials of other shards, and their config if there is none yet.

        Raises:
          EnvironmentProblem: If the bucket cannot be read.
        """
        places = {
            _RESULTS: self._mirror / OTHERS,
            _example_scores.EXAMPLES: self._mirror / _example_scores.OTHERS,
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
        """Check that a shard is compatible with the other shards before it starts.

        Args:
          shard: The shard that starts; None for the whole study.
          compare: Function of a saved `config.json` that returns how it differs from this study.

        Raises:
          UserError: Naming `shard`, if a shard of another division is running, or `workdir`, if
            a shard is of another study.
        """
        with bucket_errors(self._study, "read"):
            for name, folder in self._folders().items():
                with contextlib.suppress(FileNotFoundError):
                    differences = compare(read_study_config(folder / "config.json"))
                    few = "; ".join(differences[:3])
                    fix = f"it holds a sweep of another config ({few}); use another workdir"
                    require(not differences, "workdir", self._study, fix, code="exists")
                ours = _WHOLE if shard is None else f"-of-{shard.count}"
                if not name.endswith(ours) and is_folder_held(folder):
                    other = "the whole study" if name == _WHOLE else f"shard {name}"
                    fix = f"{other} is running in {self._study!r}; wait until it has ended"
                    raise UserError("shard", str(shard), fix, code="conflict")

    def publish(self) -> None:
        """Write the trials of all shards, and the report, into the folder of the study."""
        merged = {
            _RESULTS: read_results(self._mirror),
            _example_scores.EXAMPLES: _example_scores.read_packed(self._mirror),
        }
        with bucket_errors(self._study, "written"):
            for name, lines in merged.items():
                text = "".join(json.dumps(line) + "\n" for line in lines)
                (self._root / name).write_text(text)
            for file in sorted(self._mirror.iterdir()):
                if file.is_file() and not file.name.startswith(".") and file.name not in merged:
                    (self._root / file.name).write_bytes(file.read_bytes())

    def _folders(self) -> dict[str, Any]:
        """Return the folders of all shards that have started, by name, and that of the study."""
        found = {_WHOLE: self._root}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for folder in (self._root / _SHARDS).iterdir():
                if re.fullmatch(r"\d+-of-\d+", folder.name):
                    found[folder.name] = folder
        return found


def gather_shards(study: str, mirror: str) -> None:
    """Copy the trials of all shards of a study in a bucket, so that it can be read as a whole.

    Args:
      study: The `workdir` as given; nothing is done for a folder of this machine.
      mirror: The local folder of the study.
    """
    if paths.is_address(study):
        BucketShards(study, absolute_workdir(mirror)).fetch()
