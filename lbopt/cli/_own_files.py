"""Files of the user that a run depends on, as the commands read, compare and look for them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from lbopt import _user_code
from lbopt._shown import shell_line
from lbopt.config import TrainConfig
from lbopt.errors import require_choice
from lbopt.job import Job, SoloJob
from lbopt.train import say
from lbopt.workdir import (
    CHECKSUMS,
    GONE,
    CompareConfigs,
    OwnFiles,
    absolute_workdir,
    changes_of,
    own_files,
    place_of_data,
    refuse_another_run,
    refuse_changes,
    shown_path,
)

FLAGS = {
    "accept": "FILE[,FILE]: resume although these files of yours have changed",
    "checksum": "of your data files: samples (default), or whole for every byte",
}


def checked(
    kind: str,
    config: Any,
    folder: str,
    compare: CompareConfigs,
    given: Mapping[str, str],
    job: Job,
) -> OwnFiles | None:
    """Return the files of the user for `open_workdir`; None in a process that does not write.

    Args:
      kind: "train" or "sweep".
      config: The config as JSON data.
      folder: The local workdir.
      compare: Function that compares a saved run with this one.
      given: The flags of the command.
      job: The job of this process.

    Raises:
      UserError: If the workdir holds another run, or if files of the user have changed since its
        run began and are not accepted.
    """
    checksum = given.get("checksum", CHECKSUMS[0])
    require_choice("--checksum", checksum, CHECKSUMS)
    if job.index:
        return None
    workdir = absolute_workdir(folder)
    saved = refuse_another_run(workdir, kind, compare)
    own = own_files(config, given.get("accept", ""), checksum)
    refuse_changes(workdir, saved, own)
    return own


def found_from(config: TrainConfig, saved: Mapping[str, Any]) -> TrainConfig:
    """Return a run's config for this folder: its code and data are found where the run found them.

    Args:
      config: The config of the run.
      saved: The data of the workdir's `config.json`.
    """
    _user_code.look_beside(saved.get("code_folders", ()))
    folder = saved.get("folder", "")
    given = {name: getattr(config.data, name) for name in ("path", "data_dir", "vocab_file")}
    places: dict[str, Any] = {
        name: place_of_data(text, folder) for name, text in given.items() if text
    }
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **places))


def warn_of_changes(
    saved: Mapping[str, Any], folder: str, job: Job | None = None, data: bool = False
) -> None:
    """Print one line if files of the user have changed since a run began.

    Args:
      saved: The data of the workdir's `config.json`.
      folder: The local workdir.
      job: The job of this process; None for a process alone.
      data: Whether data files are compared too.
    """
    job = SoloJob() if job is None else job
    if job.index or not {"sources", "data"} & saved.keys():
        return
    workdir = absolute_workdir(folder)
    # A file that is gone is missed by what needs it.
    changes = [each for each in changes_of(workdir, saved, data) if each.words != GONE]
    names = ", ".join(dict.fromkeys(each.name for each in changes if each.matters))
    if names:
        shown = os.path.dirname(shown_path(workdir / "config.json"))
        how = shell_line(["lbopt", "diff", shown])
        say(f"warning: since this run began, {names} changed ({how} shows how)")
