"""`lbopt sweep`."""

from __future__ import annotations

import contextlib
import copy
import pathlib
from collections.abc import Sequence
from typing import Any

import jax

from lbopt import paths
from lbopt._shown import show
from lbopt.cli import _arguments
from lbopt.cli._train import OF_THE_HOST
from lbopt.config import SweepConfig, completed_json, config_to_json, json_differences
from lbopt.job import JOB_FLAGS, STARTING_PATIENCE, Job, PreemptionWatch
from lbopt.parallel import available_devices, connect_processes
from lbopt.report import new_figure
from lbopt.report.study import write_study_report
from lbopt.sweep import BucketShards, deal_cells, make_cells, make_problems, run_sweep, shard_folder
from lbopt.sweep.lanes import check_cells
from lbopt.sweep.search import DRAWN_BY
from lbopt.workdir import (
    Shard,
    absolute_workdir,
    check_shared_workdir,
    copy_changes,
    local_workdir,
    open_workdir,
    package_versions,
    read_config,
    shown_path,
    starting_lock,
)

FLAGS = {
    "config": "configs/sweeps/FILE[:ROW], then --config.field=VALUE to override",
    "workdir": "folder for results.jsonl and the report; the same one resumes",
    "shard": "NUMBER/COUNT: do this part only; others do the rest in the same workdir, at any time, on any machine that shares it",
    **JOB_FLAGS,
}
NOT_COMPARED = ("num_workers", "trials_per_program", "about")


def run(argv: Sequence[str], job: Job) -> None:
    """Run what is missing of a study, or of a shard of it, and write its report.

    Args:
      argv: arguments after the command, see `FLAGS`.
      job: of which this process is one; its first process writes and prints.

    Raises:
      UserError: naming the flag or the field, if what was asked for cannot be done.
      EnvironmentProblem: if data, devices, workdir or an installed package are at fault.
      Preempted: on SIGTERM; finished trials are saved.
    """
    given, overrides = _arguments.parse("sweep", argv, FLAGS, required=("config", "workdir"))
    shard = _shard(given)
    config = _arguments.load_config(given["config"], overrides, SweepConfig)
    config.validate()
    ours, command = config_to_json(config), _arguments.command_line("sweep", argv)
    job.same("config", ours)
    connect_processes(job)
    new_figure()  # say now, not after the last trial, if nothing can be drawn
    available_devices()
    cells = make_cells(config, make_problems(config))
    together = config.trial_devices == "all"
    if together:
        check_cells(cells)

    def compare(saved: dict[str, Any]) -> list[str]:
        found = json_differences(_core(ours), _core(completed_json(SweepConfig, saved["config"])))
        return sorted(found, key=lambda said: not said.startswith("name ")) + _other_candidates(
            config, saved
        )

    num_devices = jax.device_count() if together else 1
    study = given["workdir"]
    with PreemptionWatch(job) as watch, local_workdir(shard_folder(study, shard), job) as folder:
        check_shared_workdir(folder, job)
        others = BucketShards(study, absolute_workdir(folder)) if paths.is_address(study) else None
        if others and job.index == 0:
            others.refuse_others(shard, compare)
            others.fetch()
        alone = None if others else shard  # in a bucket each shard has a folder of its own
        with open_workdir(
            folder, "sweep", ours, compare, num_devices, command, job, alone
        ) as workdir:
            part = shard.items_of(deal_cells(cells, config)) if shard else cells
            rows = run_sweep(config, part, workdir, watch)
            if job.index == 0 and not rows:
                show(
                    f"shard {shard} has none of the {len(cells)} cells of the study: nothing to do"
                )
            elif job.index == 0:
                job.doing("writing the report", patience=STARTING_PATIENCE)
                _finish(workdir, shard, others)


def _shard(given: dict[str, str]) -> Shard | None:
    if "shard" not in given:
        return None
    return Shard.parse(given["shard"])


def _finish(workdir: pathlib.Path, shard: Shard | None, others: BucketShards | None) -> None:
    """Write the report of all that is finished, in a bucket to where the whole study is."""
    if others is None or shard is None:
        with (
            starting_lock(workdir) if shard else contextlib.nullcontext()
        ):  # an older report never comes last
            _report(workdir, shard)
        return
    copy_changes(workdir)  # first: who reads the others' last sees all of them
    others.fetch()
    if _report(workdir, shard):
        others.publish()


def _report(workdir: pathlib.Path, shard: Shard | None) -> bool:
    """Write the report, and print what it says; return whether it is of the whole study."""
    saved = read_config(workdir, "sweep")
    assert saved is not None
    written = write_study_report(workdir, saved)
    lines = [*written.table.split("\n"), "", *written.findings, "", shown_path(written.file)]
    show(*lines)
    if shard and not written.study.complete:
        show(f"shard {shard} is finished; the others are not: the last one writes the whole report")
    return written.study.complete


def _other_candidates(config: SweepConfig, saved: dict[str, Any]) -> list[str]:
    """Say which packages would have a search that was begun go on with other candidates."""
    methods = {config.arm_search(index).method for index in range(len(config.arms))}
    packages = {package for method in methods for package in DRAWN_BY.get(method, ())}
    before, now = saved["versions"], package_versions()
    return [
        f"{name} is {before[name]} there and {now[name]} here, and draws the candidates; install {before[name]}"
        for name in sorted(packages)
        if before.get(name) not in (None, now[name])
    ]


def _core(config: dict[str, Any]) -> dict[str, Any]:
    """Leave out what changes no result: how a machine is used, and where data lie on it."""
    kept = {
        name: value for name, value in copy.deepcopy(config).items() if name not in NOT_COMPARED
    }
    for owner in (kept.get("train"), *kept.get("arms", ())):
        if isinstance(owner, dict) and isinstance(owner.get("data"), dict):
            owner["data"] = {
                name: value for name, value in owner["data"].items() if name not in OF_THE_HOST
            }
    return kept
