"""`lbopt report`: the page of a run or a study."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from lbopt import _user_code
from lbopt._shown import show
from lbopt.cli import _flags, _own_files
from lbopt.cli._other_study import other_study
from lbopt.errors import UserError, require
from lbopt.report import write_training_report
from lbopt.report.study import Study, write_study_report
from lbopt.sweep import gather_shards
from lbopt.workdir import (
    absolute_workdir,
    had_shards,
    local_workdir,
    make_writable_folder,
    read_config,
    remove_leftovers,
    shown_path,
    starting_lock,
)

FLAGS = {
    "workdir": "a folder of lbopt train or lbopt sweep",
    "target_study": "a folder of lbopt sweep with a target, whose steps are drawn beneath the "
    "limits of this study",
}


def run(argv: Sequence[str]) -> None:
    """Write the report of a workdir, whether its run or study is finished or not.

    Args:
      argv: Arguments after the command, see `FLAGS`.

    Raises:
      UserError: If no run or study is in the workdir, or the other study does not fit.
      EnvironmentProblem: If the workdir is damaged or cannot be written.
    """
    given, _ = _flags.parse("report", argv, FLAGS, required=("workdir",))
    target = other_study("target_study", given["target_study"]) if "target_study" in given else None
    with local_workdir(given["workdir"], hold=False) as folder:
        gather_shards(given["workdir"], folder)
        _report(folder, target)


def _report(folder: str, target: Study | None) -> None:
    saved = read_config(folder)
    if saved is None:
        fix = "no run or study is there; run lbopt train or lbopt sweep first"
        raise UserError("--workdir", folder, fix, code="missing")
    workdir = absolute_workdir(folder)
    make_writable_folder(workdir)
    remove_leftovers(workdir)
    _user_code.look_beside(saved.get("code_folders", ()))
    _own_files.warn_of_changes(saved, folder)
    if saved["kind"] == "sweep":
        with starting_lock(workdir) if had_shards(workdir) else contextlib.nullcontext():
            written = write_study_report(workdir, saved, target)
        page = written.file
        show(*written.table.split("\n"))
    else:
        fix = "the workdir has a run, and no study; leave it out"
        require(target is None, "--target_study", target and target.config.name, fix)
        page = write_training_report(workdir, saved)
    show(shown_path(page))
