"""The content of what is the user's own in a run: source files and data files.

`config.json` has checksums of both, and `sources.json` the text of every source file that the run
has had, by its checksum.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lbopt import _typed_json
from lbopt.errors import require
from lbopt.workdir import _data_files, _sources

GONE = _data_files.GONE
SOURCES_FILE = "sources.json"
CHECKSUMS = ("samples", "whole")
"""What the checksums of data files cover: samples of each, or every byte."""
_SHOWN = 3
_LARGEST_KEPT = 2**20
"""Size in bytes up to which the text of a source file is kept."""


class FileChange(NamedTuple):
    """A difference between a run's record of a file and the file.

    Attributes:
      name: Name of the source, or path of the data in the config.
      words: The difference, "has changed" for instance.
      matters: Whether results may differ; False for comments, docstrings and layout.
    """

    name: str
    words: str
    matters: bool = True


@dataclasses.dataclass(frozen=True)
class OwnFiles:
    """The user's own files of a run as they are now; see `own_files`.

    Attributes:
      sources: Name -> content of the source files.
      packages: Versions of the installed packages that they import.
      data: Path in the config -> data files.
      accepted: Names of files that may differ from the run's record, separated by commas.
    """

    sources: Mapping[str, bytes]
    packages: Mapping[str, str | None]
    data: Mapping[str, _data_files.DataFiles]
    accepted: str = ""

    def record(self) -> dict[str, Any]:
        """Return what `config.json` keeps: nothing if the run has no files of the user."""
        sources = {name: _sources.digest(content) for name, content in self.sources.items()}
        return {
            **({"sources": sources} if sources else {}),
            **({"data": dict(self.data)} if self.data else {}),
        }


def own_files(
    config: Any,
    accepted: str = "",
    checksum: str = "samples",
    folder: str = "",
    data: bool = True,
) -> OwnFiles:
    """Read the user's own files that a config names.

    Args:
      config: The config as JSON data.
      accepted: Names of files that may differ from a run's record, separated by commas.
      checksum: One of `CHECKSUMS`.
      folder: Folder where relative paths of data are looked for first; "" for none.
      data: Whether data files are read.
    """
    sources = _sources.read_sources(config)
    return OwnFiles(
        sources.files,
        _sources.versions_of(sources.packages),
        _data_files.read_data(config, checksum == "whole", folder) if data else {},
        accepted,
    )


def last_record(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the latest `sources` and `data` in a `config.json`; an old one may have neither."""
    found: dict[str, Any] = {}
    for start in (saved, *saved.get("resumed", ())):
        found |= {key: start[key] for key in ("sources", "data") if key in start}
    return found


def record_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield in words which changed files a restart accepted; the arguments are records."""
    old = before.get("sources", {})
    new = now.get("sources", old)
    yield from (
        f"{name} changed" for name in sorted({*old, *new}) if old.get(name) != new.get(name)
    )
    data = before.get("data", {})
    for path, files in now.get("data", {}).items():
        if path not in data or _data_files.differences(data[path], files):
            yield f"{path} changed"


def source_changes(
    folder: pathlib.Path, saved: Mapping[str, Any], sources: Mapping[str, bytes]
) -> list[FileChange]:
    """Return how source files differ from a run's record.

    Args:
      folder: The workdir.
      saved: Its `config.json`.
      sources: Name -> content of the files as they are now.
    """
    before = last_record(saved).get("sources")
    if before is None:
        return []
    now = {name: _sources.digest(content) for name, content in sources.items()}
    kept = kept_sources(folder)
    found = []
    for name in sorted({*before, *now}):
        if name not in now:
            found.append(FileChange(name, GONE))
        elif name not in before:
            found.append(FileChange(name, "is new"))
        elif before[name] != now[name]:
            old = kept.get(before[name])
            same = old is not None and _sources.is_same_code(old, sources[name])
            words = "has other comments or layout" if same else "has changed"
            found.append(FileChange(name, words, not same))
    return found


def data_changes(saved: Mapping[str, Any], own: OwnFiles) -> list[FileChange]:
    """Return how data files differ from a run's record."""
    return [
        FileChange(path, words)
        for path, before in last_record(saved).get("data", {}).items()
        for words in _data_files.differences(before, own.data.get(path))
    ]


def changes_of(
    folder: pathlib.Path, saved: Mapping[str, Any], data: bool = True
) -> list[FileChange]:
    """Return how the files that a run's config names differ from its record.

    Args:
      folder: The workdir.
      saved: Its `config.json`.
      data: Whether data files are read too.
    """
    own = own_files(saved["config"], folder=saved.get("folder", ""), data=data)
    return [
        *source_changes(folder, saved, own.sources),
        *(data_changes(saved, own) if data else ()),
    ]


def refuse_changes(folder: pathlib.Path, saved: Mapping[str, Any] | None, own: OwnFiles) -> None:
    """Raise `UserError` if the user's files differ from a run's record and were not accepted.

    Args:
      folder: The workdir.
      saved: Its `config.json`; None if there is none.
      own: The files as they are now.
    """
    record = last_record(saved or {})
    known = {*own.sources, *own.data, *record.get("sources", ()), *record.get("data", ())}
    accepted = [own.accepted] if own.accepted in known else own.accepted.split(",")
    fix = f"no file of this run is called so; it has {', '.join(sorted(known)) or 'none'}"
    is_known = not own.accepted or known.issuperset(accepted)
    require(is_known, "--accept", own.accepted, fix, code="choice")
    if saved is None:
        return

    changes = [*source_changes(folder, saved, own.sources), *data_changes(saved, own)]
    refused = [each for each in changes if each.matters and each.name not in accepted]
    few = "; ".join(f"{each.name} {each.words}" for each in refused[:_SHOWN])
    names = ",".join(dict.fromkeys(each.name for each in refused))
    fix = (
        f"its run began with other files ({few}; lbopt diff shows them); use another workdir, undo "
        f"the change, or accept it with --accept={names}"
    )
    require(not refused, "workdir", str(folder), fix, code="mismatch")


def source_diff(name: str, before: bytes | None, now: bytes | None) -> list[str]:
    """Return the lines of a unified diff of a source file; [] if one of the texts is unknown."""
    return [] if before is None or now is None else _sources.unified_diff(name, before, now)


def changed_record(folder: pathlib.Path, saved: Mapping[str, Any], own: OwnFiles) -> dict[str, Any]:
    """Return what a restart adds to the record: accepted changes, and new checksums of all bytes.

    The arguments are those of `refuse_changes`.
    """
    record = own.record()
    before = last_record(saved).get("data", {})
    adds_whole = any(
        "whole_sha256" in own.data[path].keys() - before[path].keys()
        for path in own.data.keys() & before.keys()
    )
    changed = {
        "sources": any(each.matters for each in source_changes(folder, saved, own.sources)),
        "data": adds_whole or bool(data_changes(saved, own)),
    }
    return {key: record.get(key, {}) for key, differs in changed.items() if differs}


def kept_sources(folder: pathlib.Path) -> dict[str, bytes]:
    """Return the contents of a run's source files by checksum; {} if they cannot be read."""
    try:
        kept = _typed_json.read_file(folder / SOURCES_FILE, dict[str, str])
    except (OSError, ValueError):
        return {}
    return {key: text.encode("utf-8", "surrogateescape") for key, text in kept.items()}


def texts_to_keep(
    folder: pathlib.Path, saved: Mapping[str, Any], own: OwnFiles
) -> dict[str, str] | None:
    """Return the content of `sources.json` with the recorded files; None if it has them.

    Args:
      folder: The workdir.
      saved: Its `config.json` as it is to be.
      own: The files as they are now.
    """
    kept = kept_sources(folder)
    recorded = set(last_record(saved).get("sources", {}).values()) - kept.keys()
    ours = {_sources.digest(content): content for content in own.sources.values()}
    new = {
        key: content
        for key, content in ours.items()
        if key in recorded and len(content) <= _LARGEST_KEPT
    }
    if not new:
        return None
    return {
        key: content.decode("utf-8", "surrogateescape") for key, content in {**kept, **new}.items()
    }
