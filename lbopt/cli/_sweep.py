"""`lbopt sweep`: run a study, or one shard of it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from lbopt import paths
from lbopt._shown import show
from lbopt.cli import _flags, _own_files
from lbopt.cli._other_study import other_study
from lbopt.cli._train import OF_THE_HOST
from lbopt.config import (
    SweepConfig,
    completed_json,
    config_to_json,
    json_differences,
    without_layout,
)
from lbopt.errors import Preempted, require
from lbopt.job import JOB_FLAGS, STARTING_PATIENCE, Job, PreemptionWatch
from lbopt.parallel import available_devices, connect_processes
from lbopt.recipes import LoadedProblem
from lbopt.report import new_figure
from lbopt.report.study import (
    Study,
    StudyReport,
    decision_lines,
    write_study_report,
)
from lbopt.sweep import (
    BucketShards,
    deal_cells,
    judged_by,
    make_cells,
    make_problems,
    run_sweep,
    shard_folder,
)
from lbopt.sweep.lanes import check_cells
from lbopt.sweep.search import DRAWN_BY, can_widen
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
    "config": "FILE[:ROW] of a study, then --config.field=VALUE to override",
    "workdir": "folder for results.jsonl and the report; the same one resumes",
    "shard": "NUMBER/COUNT: run this shard of the study only; other machines run the others in "
    "the same workdir",
    "pilot": "workdir of an earlier study, from whose seeds is told what this one can decide",
    **_own_files.FLAGS,
    **JOB_FLAGS,
}
NOT_COMPARED = ("num_workers", "trials_per_program", "about")
"""Fields that may change when a study is resumed."""


def run(argv: Sequence[str], job: Job) -> None:
    """Run the missing trials of a study, or of a shard of it, and write its report.

    Args:
      argv: Arguments after the command, see `FLAGS`.
      job: The job that this process is part of; its first process writes and prints.

    Raises:
      UserError: Naming the flag or the field, if a flag or the config is wrong.
      EnvironmentProblem: If data, devices, workdir or an installed package are at fault.
      Preempted: On SIGTERM; finished trials are saved.
    """
    given, overrides = _flags.parse("sweep", argv, FLAGS, required=("config", "workdir"))
    shard = Shard.parse(given["shard"]) if "shard" in given else None
    pilot = other_study("pilot", given["pilot"]) if "pilot" in given else None
    config = _flags.load_config(given["config"], overrides, SweepConfig)
    command = _flags.command_line("sweep", argv)
    written = sweep_in(given["workdir"], config, job, command, shard, given, pilot)
    if written is None:
        return

    lines = [*written.table.split("\n"), "", *written.findings, "", shown_path(written.file)]
    show(*lines)
    if shard and not written.study.complete:
        show(f"shard {shard} is finished; the others are not: the last one writes the whole report")


def sweep_in(
    study: str,
    config: SweepConfig,
    job: Job,
    command: str,
    shard: Shard | None = None,
    files: Mapping[str, str] | None = None,
    pilot: Study | None = None,
) -> StudyReport | None:
    """Run the missing trials of a study, or of a shard of it, and write its report.

    Args:
      study: The workdir: a folder, or one in a bucket.
      config: The config.
      job: The job that this process is part of; its first process writes and prints.
      command: The command line of the user, for the report.
      shard: The shard; None for the whole study.
      files: "accept" and "checksum", see `_own_files.FLAGS`; None for their defaults.
      pilot: An earlier study, for what this one can decide; None to assume its spread.

    Returns:
      The report of all finished trials; None in other processes than the first, and without any.

    Raises:
      UserError: Naming the flag or the field, if a flag or the config is wrong.
      EnvironmentProblem: If data, devices, workdir or an installed package are at fault.
      Preempted: On SIGTERM; finished trials are saved.
    """
    config.validate()
    ours = config_to_json(config)
    job.same("config", ours)
    connect_processes(job)

    # Find out before the first trial whether the study can be run and its report drawn.
    new_figure()
    available_devices()
    together = config.trial_devices == "all"
    compare = functools.partial(study_differences, config)
    num_devices = jax.device_count() if together else 1
    with PreemptionWatch(job) as watch, local_workdir(shard_folder(study, shard), job) as folder:
        check_shared_workdir(folder, job)
        others = BucketShards(study, absolute_workdir(folder)) if paths.is_address(study) else None
        if others and job.index == 0:
            others.refuse_others(shard, compare)
            others.fetch()
        own = _own_files.checked("sweep", ours, folder, compare, files or {}, job)

        # Loading the data may take minutes: another run and changed files are refused before.
        problems = make_problems(config)
        if any(job.together("data loaded", watch.requested)):
            raise Preempted("stopped before the first trial")
        cells = make_cells(config, problems)
        foreword = can_decide(config, problems, pilot) if job.index == 0 else []
        if together:
            check_cells(cells)

        alone = None if others else shard  # in a bucket each shard has a folder of its own
        with open_workdir(
            folder, "sweep", ours, compare, num_devices, command, job, alone, own
        ) as workdir:
            chosen = shard.items_of(deal_cells(cells, config)) if shard else cells
            records = run_sweep(config, chosen, workdir, watch, foreword)
            if job.index == 0 and not records:
                show(f"shard {shard} has none of the study's {len(cells)} cells: nothing to do")
            elif job.index == 0:
                job.doing("writing the report", patience=STARTING_PATIENCE)
                return _finish(workdir, shard, others)
    return None


def can_decide(
    config: SweepConfig, problems: Sequence[LoadedProblem], pilot: Study | None
) -> list[str]:
    """Return what a study can decide, in sentences, before it runs.

    Args:
      config: The config.
      problems: The problem of each arm, from `make_problems`.
      pilot: An earlier study; None to assume its spread.

    Raises:
      UserError: Naming `--pilot`, if its metric is another one.
    """
    metric = judged_by(config, problems[0])
    examples = min(len(problem.splits.test) for problem in problems)
    if pilot is not None:
        theirs = pilot.metric.name
        fix = f"it is judged by {theirs}, and this study by {metric}; give another study"
        require(theirs == metric, "--pilot", pilot.config.name, fix, code="mismatch")
    return decision_lines(config, metric, examples, pilot)


def _finish(workdir: pathlib.Path, shard: Shard | None, others: BucketShards | None) -> StudyReport:
    """Write the report of all finished trials, in a bucket to the folder of the whole study."""
    if others is None or shard is None:
        # The lock keeps a shard's older report from replacing a newer one.
        with starting_lock(workdir) if shard else contextlib.nullcontext():
            return _report(workdir)
    # Write before reading: then the last shard that reads finds the results of all.
    copy_changes(workdir)
    others.fetch()
    written = _report(workdir)
    if written.study.complete:
        others.publish()
    return written


def _report(workdir: pathlib.Path) -> StudyReport:
    saved = read_config(workdir, "sweep")
    assert saved is not None
    return write_study_report(workdir, saved)


def study_differences(config: SweepConfig, saved: dict[str, Any]) -> list[str]:
    """Return a line for each field and package that changes the results of a saved study."""
    theirs = completed_json(SweepConfig, saved["config"])
    found = json_differences(_core(config_to_json(config)), _core(theirs))
    # Studies of earlier versions have 0 there, also where it changes nothing.
    idle = {f"{place}.widen_candidates" for place in _single_candidates(config)}
    found = [difference for difference in found if difference.partition(" is ")[0] not in idle]
    name_first = sorted(found, key=lambda difference: not difference.startswith("name "))
    return name_first + _other_candidates(config, saved)


def _single_candidates(config: SweepConfig) -> list[str]:
    """Return the paths of the searches that have no edge to go beyond, with whatever budget."""
    places = {f"arms[{index}].search": arm.search for index, arm in enumerate(config.arms)}
    return [
        place
        for place, search in {"search": config.search, **places}.items()
        if search and not can_widen(dataclasses.replace(search, widen_candidates=1))
    ]


def _other_candidates(config: SweepConfig, saved: dict[str, Any]) -> list[str]:
    """Return a line for each package whose version differs and changes the search's candidates."""
    methods = {config.arm_search(index).method for index in range(len(config.arms))}
    packages = {package for method in methods for package in DRAWN_BY.get(method, ())}
    before = saved["versions"]
    now = package_versions()
    return [
        f"{name} is {before[name]} there and {now[name]} here, which changes the candidates; "
        f"install {before[name]}"
        for name in sorted(packages)
        if before.get(name) not in (None, now[name])
    ]


def _core(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config without the fields that change no result, such as the data folder."""
    kept = copy.deepcopy(config)
    kept["train"] = without_layout(kept["train"])
    kept["arms"] = [without_layout(arm) for arm in kept["arms"]]
    for name in NOT_COMPARED:
        kept.pop(name, None)
    for owner in (kept.get("train"), *kept.get("arms", ())):
        if isinstance(owner, dict) and isinstance(owner.get("data"), dict):
            for name in OF_THE_HOST:
                owner["data"].pop(name, None)
    return kept
