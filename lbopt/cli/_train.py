"""`lbopt train`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from lbopt._shown import show
from lbopt.cli import _arguments, _process
from lbopt.config import (
    BATCH_NORMED,
    ParallelConfig,
    TrainConfig,
    completed_json,
    config_to_json,
    json_differences,
    json_without,
    naming,
    resolve_clip,
)
from lbopt.job import JOB_FLAGS, STARTING_PATIENCE, Job, PreemptionWatch
from lbopt.parallel import connect_processes
from lbopt.recipes import build_run
from lbopt.train import check_name, is_begun, train
from lbopt.transforms import is_per_layer
from lbopt.workdir import (
    CompareConfigs,
    absolute_workdir,
    check_shared_workdir,
    checkpoint_root,
    local_workdir,
    open_workdir,
    package_versions,
    read_json_lines,
    shown_path,
)

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
    given, overrides = _arguments.parse("train", argv, FLAGS, required=("config", "workdir"))
    config = _arguments.load_config(given["config"], overrides, TrainConfig)
    with PreemptionWatch(job) as watch:
        job.same("config", {"config": config_to_json(config), "versions": package_versions()}, "")
        connect_processes(job)
        with _naming_fields(), local_workdir(given["workdir"], job) as folder:
            lines = _train(config, folder, watch, _arguments.command_line("train", argv))
            where = shown_path(absolute_workdir(folder) / "metrics.jsonl")
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


def _naming_fields() -> contextlib.AbstractContextManager[None]:
    """Let errors of the training loop name the fields of the config."""
    return naming(
        "config",
        TrainConfig,
        learning_rate="config.schedule.base_learning_rate",
        max_grad_norm="config.optimizer.max_grad_norm",
        skip_limit="config.optimizer.skip_limit",
        shard_update="config.parallel.shard_update",
    )


def _train(
    config: TrainConfig, folder: str, watch: PreemptionWatch, command: str
) -> list[dict[str, Any]]:
    """Train in a local folder and return the lines of its metrics."""
    job = watch.job
    check_name(str(checkpoint_root(absolute_workdir(folder))))
    check_shared_workdir(folder, job)
    job.doing("making the data and the model ready", patience=STARTING_PATIENCE)
    plan = build_run(with_vocabulary(config, folder))
    if not is_begun(absolute_workdir(folder)):
        plan.check_initial()
    job.doing("tracing the step", patience=STARTING_PATIENCE)
    for phase in plan.phases():
        phase.check_memory()
        phase.lower()
    compare, data = comparison(config, num_devices=plan.mesh.size), config_to_json(config)
    with open_workdir(folder, "train", data, compare, plan.mesh.size, command, job) as workdir:
        if job.index == 0:
            _process.import_tensorboard_writer()
        train(plan, workdir, watch)
        return read_json_lines(workdir / "metrics.jsonl") if job.index == 0 else []


def with_vocabulary(config: TrainConfig, workdir: str) -> TrainConfig:
    """Return the config of a run whose vocabulary is in its workdir by now: what it came from may be gone or changed."""
    kept = absolute_workdir(workdir) / "vocab.txt"
    if config.data.name != "squad" or not kept.is_file():
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, vocab_file=str(kept)))


def comparison(
    config: TrainConfig, left_out: Sequence[str] = MAY_CHANGE, num_devices: int | None = None
) -> CompareConfigs:
    """Return the check that a saved run is the same one.

    Args:
      config: of this run.
      left_out: fields in which the two may differ.
      num_devices: of a run that is to go on. It may not change where batch norm or a clip counts replicas, nor between slices;
        else an aggregator's memory is rebuilt for another number of replicas. None for an evaluation, to which that is all the same.
    """
    ours = json_without(config_to_json(config), left_out)

    def compare(saved: dict[str, Any]) -> list[str]:
        theirs = json_without(completed_json(TrainConfig, saved["config"]), left_out)
        found = json_differences(ours, theirs)
        by_norm = config.model.name in BATCH_NORMED and config.model.batch_norm_scope.startswith(
            ("local", "replicas", "tiles")
        )
        # Parts of the gradient that devices of a slice have are padded to as many as there are.
        by_parts = config.aggregator.over != "replicas"
        by_clip = (
            config.optimizer.clip_stage == "replica" and resolve_clip(config.optimizer) is not None
        )
        if num_devices is not None and (by_norm or by_clip or by_parts):
            found += json_differences(
                {"num_devices": num_devices}, {"num_devices": saved.get("num_devices")}
            )
        return found

    return compare
