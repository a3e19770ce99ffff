"""`lbopt sweep`."""

from __future__ import annotations

import contextlib
import copy
import pathlib
from collections.abc import Sequence
from typing import Any

import jax

from lbopt import paths
from lbopt.cli import arguments
from lbopt.cli.train import OF_THE_HOST
from lbopt.config import SweepConfig, checks
from lbopt.job.member import STARTING, Job
from lbopt.job.place import FLAGS as JOB_FLAGS
from lbopt.parallel import processes
from lbopt.parallel.mesh import available_devices
from lbopt.report import page
from lbopt.report.study import write_study_report
from lbopt.shown import show
from lbopt.sweep import parts, runner, trials
from lbopt.sweep.lanes import on_mesh
from lbopt.sweep.search.make import DRAWN_BY
from lbopt.train import bucket, environment, workdir as workdirs
from lbopt.train.preemption import PreemptionWatch
from lbopt.train.shard import Shard, at_the_door

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
    given, overrides = arguments.parse("sweep", argv, FLAGS, required=("config", "workdir"))
    shard = _shard(given)
    config = arguments.load_config(given["config"], overrides, SweepConfig)
    config.validate()
    ours, command = checks.to_json(config), arguments.command_line("sweep", argv)
    job.same("config", ours)
    processes.start(job)
    page.new_figure()  # say now, not after the last trial, if nothing can be drawn
    available_devices()
    cells = trials.make_cells(config, trials.make_problems(config))
    together = config.trial_devices == "all"
    if together:
        on_mesh.check_cells(cells)

    def compare(saved: dict[str, Any]) -> list[str]:
        found = checks.differences(
            _core(ours), _core(checks.completed(SweepConfig, saved["config"]))
        )
        return sorted(found, key=lambda said: not said.startswith("name ")) + _other_candidates(
            config, saved
        )

    num_devices = jax.device_count() if together else 1
    study = given["workdir"]
    with PreemptionWatch(job) as watch, bucket.opened(parts.folder_of(study, shard), job) as folder:
        workdirs.check_shared(folder, job)
        others = parts.Parts(study, workdirs.absolute(folder)) if paths.is_address(study) else None
        if others and job.index == 0:
            others.refuse_others(shard, compare)
            others.fetch()
        alone = None if others else shard  # in a bucket each shard has a folder of its own
        with workdirs.open_workdir(
            folder, "sweep", ours, compare, num_devices, command, job, alone
        ) as workdir:
            part = shard.part_of(trials.dealt(cells, config)) if shard else cells
            rows = runner.run_sweep(config, part, workdir, watch)
            if job.index == 0 and not rows:
                show(
                    f"shard {shard} has none of the {len(cells)} cells of the study: nothing to do"
                )
            elif job.index == 0:
                job.doing("writing the report", patience=STARTING)
                _finish(workdir, shard, others)


def _shard(given: dict[str, str]) -> Shard | None:
    if "shard" not in given:
        return None
    return Shard.parse(given["shard"])


def _finish(workdir: pathlib.Path, shard: Shard | None, others: parts.Parts | None) -> None:
    """Write the report of all that is finished, in a bucket to where the whole study is."""
    if others is None or shard is None:
        with (
            at_the_door(workdir) if shard else contextlib.nullcontext()
        ):  # an older report never comes last
            _report(workdir, shard)
        return
    bucket.copy_changes(workdir)  # first: who reads the others' last sees all of them
    others.fetch()
    if _report(workdir, shard):
        others.publish()


def _report(workdir: pathlib.Path, shard: Shard | None) -> bool:
    """Write the report, and print what it says; return whether it is of the whole study."""
    saved = workdirs.read_config(workdir, "sweep")
    assert saved is not None
    written = write_study_report(workdir, saved)
    lines = [*written.table.split("\n"), "", *written.findings, "", bucket.shown(written.file)]
    show(*lines)
    if shard and not written.study.complete:
        show(f"shard {shard} is finished; the others are not: the last one writes the whole report")
    return written.study.complete


def _other_candidates(config: SweepConfig, saved: dict[str, Any]) -> list[str]:
    """Say which packages would have a search that was begun go on with other candidates."""
    methods = {config.arm_search(index).method for index in range(len(config.arms))}
    packages = {package for method in methods for package in DRAWN_BY.get(method, ())}
    before, now = saved["versions"], environment.versions()
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
