"""`lbopt report`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from lbopt.cli import arguments
from lbopt.errors import UserError
from lbopt.report import training
from lbopt.report.study import write_study_report
from lbopt.shown import show
from lbopt.sweep import parts
from lbopt.train import bucket, shard, workdir as workdirs

FLAGS = {"workdir": "a folder of lbopt train or lbopt sweep"}


def run(argv: Sequence[str]) -> None:
    """Draw the report of a workdir, finished or not."""
    given, _ = arguments.parse("report", argv, FLAGS, required=("workdir",))
    with bucket.opened(given["workdir"], hold=False) as folder:
        parts.of_whole(given["workdir"], folder)
        _report(folder)


def _report(folder: str) -> None:
    saved = workdirs.read_config(folder)
    if saved is None:
        raise UserError(
            f"--workdir = {folder!r}: no run or study is there; run lbopt train or lbopt sweep first"
        )
    workdir = workdirs.absolute(folder)
    workdirs.make_writable(workdir)
    workdirs.remove_leftovers(workdir)
    if saved["kind"] == "sweep":
        with shard.at_the_door(workdir) if shard.were_in(workdir) else contextlib.nullcontext():
            written = write_study_report(workdir, saved)
        page = written.file
        show(*written.table.split("\n"))
    else:
        page = training.write_training_report(workdir, saved)
    show(bucket.shown(page))
