"""A study in another folder than that of the command."""

from __future__ import annotations

from lbopt.errors import require, under
from lbopt.report.study import Study, read_study
from lbopt.sweep import gather_shards, read_examples, read_results
from lbopt.workdir import absolute_workdir, local_workdir, read_config


def other_study(flag: str, workdir: str) -> Study:
    """Return the study of a folder, complete or not.

    Args:
      flag: Flag that names the folder, without dashes.
      workdir: Its value, also an address of a bucket.

    Raises:
      UserError: Naming the flag, if no study with a finished trial is there.
      EnvironmentProblem: If its files are damaged or cannot be read.
    """
    named = f"--{flag}"
    with (
        under("", **{"workdir": named, "--workdir": named}),
        local_workdir(workdir, write=False, hold=False) as folder,
    ):
        saved = read_config(folder)
        fits = saved is not None and saved["kind"] == "sweep"
        fix = "no study is there; give a folder of lbopt sweep"
        require(fits, named, workdir, fix, code="missing")
        assert saved is not None

        gather_shards(workdir, folder)
        local = absolute_workdir(folder)
        records = read_results(local, saved["config"]["name"])
        require(records, named, workdir, "no trial of it is finished", code="missing")
        return read_study(saved["config"], records, read_examples(local))
