"""`lbopt train`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from lbopt.cli import arguments, process
from lbopt.config import TrainConfig, checks
from lbopt.config.model import BATCH_NORMED
from lbopt.config.optimizer import resolve_clip
from lbopt.config.parallel import ParallelConfig
from lbopt.job.member import STARTING, Job
from lbopt.job.place import FLAGS as JOB_FLAGS
from lbopt.parallel import processes
from lbopt.recipes import build
from lbopt.shown import show
from lbopt.train import bucket, environment, loop, workdir as workdirs
from lbopt.train.checkpoint import check_name, is_begun
from lbopt.train.preemption import PreemptionWatch
from lbopt.train.writers import read_lines
from lbopt.transforms.monitoring import is_per_layer

FLAGS = {
    "config": "FILE[:ROW], then --config.field.sub=VALUE to override",
    "workdir": "folder for config.json, metrics, checkpoints; the same one resumes",
    **JOB_FLAGS,
}
OF_THE_HOST = ("data_dir", "reader_threads", "reader_processes", "max_damaged_records")
"""Fields of the data that change no batch."""
MAY_CHANGE = (
    "about",
    *(f"data.{name}" for name in OF_THE_HOST),
    *(
        f"parallel.{field.name}"
        for field in dataclasses.fields(ParallelConfig)
        if field.name != "num_microsteps"
    ),
    "eval_global_batch_size",
    "phase2.eval_global_batch_size",
    "checkpoint.keep",
    "stop_at_nan",
)
"""Fields that may change when a run is resumed, on another machine for instance: the batches and, up to rounding, the updates are the same."""


def run(argv: Sequence[str], job: Job) -> None:
    """Train to the end, or from where the workdir stands."""
    given, overrides = arguments.parse("train", argv, FLAGS, required=("config", "workdir"))
    config = arguments.load_config(given["config"], overrides, TrainConfig)
    with PreemptionWatch(job) as watch:
        job.same(
            "config", {"config": checks.to_json(config), "versions": environment.versions()}, ""
        )
        processes.start(job)
        with bucket.opened(given["workdir"], job) as folder:
            lines = _train(config, folder, watch, arguments.command_line("train", argv))
            where = bucket.shown(workdirs.absolute(folder) / "metrics.jsonl")
    if job.index:
        return
    for last in lines[-1:]:
        show(
            json.dumps(
                {
                    name: value
                    for name, value in last.items()
                    if not is_per_layer(name.removeprefix("train/"))
                }
            )
        )
    show(where)


def _train(
    config: TrainConfig, folder: str, watch: PreemptionWatch, command: str
) -> list[dict[str, Any]]:
    """Train in a local folder and return the lines of its metrics."""
    job = watch.job
    check_name(str(bucket.root_of(workdirs.absolute(folder))))
    workdirs.check_shared(folder, job)
    job.doing("making the data and the model ready", patience=STARTING)
    plan = build.build(with_vocabulary(config, folder))
    if not is_begun(workdirs.absolute(folder)):
        plan.check_start()
    job.doing("tracing the step", patience=STARTING)
    for phase in plan.phases():
        phase.check_memory()
        phase.lower()
    compare, data = comparison(config, num_devices=plan.mesh.size), checks.to_json(config)
    with workdirs.open_workdir(
        folder, "train", data, compare, plan.mesh.size, command, job
    ) as workdir:
        if job.index == 0:
            process.import_tensorboard_writer()
        loop.train(plan, workdir, watch)
        return read_lines(workdir / "metrics.jsonl") if job.index == 0 else []


def with_vocabulary(config: TrainConfig, workdir: str) -> TrainConfig:
    """Return the config of a run whose vocabulary is in its workdir by now: what it came from may be gone or changed."""
    kept = workdirs.absolute(workdir) / "vocab.txt"
    if config.data.name != "squad" or not kept.is_file():
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, vocab_file=str(kept)))


def comparison(
    config: TrainConfig, left_out: Sequence[str] = MAY_CHANGE, num_devices: int | None = None
) -> workdirs.Compare:
    """Return the check that a saved run is the same one.

    Args:
      config: of this run.
      left_out: fields in which the two may differ.
      num_devices: of a run that is to go on. It may not change where batch norm or a clip counts replicas, nor between slices;
        else an aggregator's memory is rebuilt for another number of replicas. None for an evaluation, to which that is all the same.
    """
    ours = checks.without(checks.to_json(config), left_out)

    def compare(saved: dict[str, Any]) -> list[str]:
        theirs = checks.without(checks.completed(TrainConfig, saved["config"]), left_out)
        found = checks.differences(ours, theirs)
        by_norm = config.model.name in BATCH_NORMED and config.model.batch_norm_scope.startswith(
            ("local", "replicas", "tiles")
        )
        # Parts of the gradient that devices of a slice have are padded to as many as there are.
        by_parts = config.aggregator.over != "replicas"
        by_clip = (
            config.optimizer.clip_stage == "replica" and resolve_clip(config.optimizer) is not None
        )
        if num_devices is not None and (by_norm or by_clip or by_parts):
            found += checks.differences(
                {"num_devices": num_devices}, {"num_devices": saved.get("num_devices")}
            )
        return found

    return compare
