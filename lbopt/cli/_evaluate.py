"""`lbopt evaluate`: the metrics of a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from lbopt._shown import show
from lbopt.cli import _flags, _own_files
from lbopt.cli._train import MAY_CHANGE, OF_THE_HOST, comparison, saved_config, with_vocabulary
from lbopt.config import TrainConfig, config_to_json, naming
from lbopt.job import JOB_FLAGS, STARTING_PATIENCE, Job
from lbopt.parallel import TrainState, available_devices, connect_processes
from lbopt.recipes import build_run
from lbopt.train import Checkpoints, Run, check_vocabulary, restore_chosen, said_by_first
from lbopt.workdir import (
    absolute_workdir,
    finite_or_none,
    local_workdir,
    read_config,
    refuse_another_run,
)

FLAGS = {
    "config": "the config the workdir was trained with (default: the one it keeps)",
    "workdir": "a folder of lbopt train",
    "checkpoint": "latest (default), best, or a step",
    **JOB_FLAGS,
}

UNUSED_BY_EVALUATION = (
    *MAY_CHANGE,
    "parallel",
    "global_batch_size",
    "batch_schedule",
    "phase2.global_batch_size",
    "phase2.num_microsteps",
    "phase2.remat",
    "model.batch_norm_running_from",
    "model.batch_norm_scope",
    "model.remat",
    "model.remat_layers",
    "aggregator.over",
    "aggregator.replicas_per_device",
    "log_every_steps",
    "eval_every_steps",
    "eval_every_epochs",
    "checkpoint",
)
"""Fields that suit the devices of training, or say how often training logs, evaluates and saves."""


def run(argv: Sequence[str], job: Job) -> None:
    """Print validation and test metrics of a checkpoint as one JSON line.

    Args:
      argv: Arguments after the command, see `FLAGS`.
      job: The job that this process is part of; its first process prints.

    Raises:
      UserError: If a flag or a field of the config is wrong, or the workdir holds another run.
      EnvironmentProblem: If data, devices, workdir or an installed package are at fault.
    """
    given, overrides = _flags.parse("evaluate", argv, FLAGS, required=("workdir",))
    config = None
    if "config" in given:
        config = _flags.load_config(given["config"], overrides, TrainConfig)
        job.same("config", config_to_json(config))
    connect_processes(job)
    available_devices()  # fails early if there are none

    job.doing("reading the checkpoint", patience=STARTING_PATIENCE)
    with local_workdir(given["workdir"], job, write=False) as folder:
        which = given.get("checkpoint", "latest")
        training, state = _restore(config, overrides, folder, which, job)

    job.doing("evaluating")
    step = int(state.step)
    phase = training.phase_at(step)
    with naming("config", TrainConfig):
        scores = {f"validation/{name}": value for name, value in phase.evaluate(state).items()}
        scores |= {f"test/{name}": value for name, value in phase.evaluate_test(state).items()}
    if job.index == 0:
        finite = {name: finite_or_none(score) for name, score in scores.items()}
        show(json.dumps({"step": step, **finite}))


def _restore(
    given: TrainConfig | None, overrides: Sequence[str], folder: str, which: str, job: Job
) -> tuple[Run, TrainState]:
    """Return the run in a workdir and the state of a checkpoint.

    Args:
      given: The config that the command names; None for that of the run.
      overrides: `--config.field=VALUE` arguments, which apply to the latter.
      folder: The local workdir.
      which: The checkpoint.
      job: The job of this process.
    """
    workdir = absolute_workdir(folder)
    config = given
    if config is None:
        config = _flags.with_overrides(_on_these_devices(folder), overrides)
        job.same("config", config_to_json(config))
    config.validate()

    saved = refuse_another_run(workdir, "train", comparison(config, UNUSED_BY_EVALUATION))
    found = _for_this_host(saved_config(saved, folder), config)
    assert saved is not None
    if given is None:
        found = _own_files.found_from(found, saved)
    _own_files.warn_of_changes(saved, folder, job, data=True)
    training = build_run(with_vocabulary(found, folder), trains=False)
    check_vocabulary(training, workdir)

    def shapes_at(step: int) -> TrainState:
        return training.phase_at(step).shapes()

    with Checkpoints(
        workdir, training.keep_checkpoints, training.best_metric, read_only=True, job=job
    ) as checkpoints:
        return training, restore_chosen(checkpoints, which, shapes_at, said_by_first(job))


def _on_these_devices(folder: str) -> TrainConfig:
    """Return the config of the run in a workdir, for all devices that there are here."""
    config = saved_config(read_config(folder, "train"), folder)
    config.parallel.num_devices = None
    return config


def _for_this_host(found: TrainConfig, config: TrainConfig) -> TrainConfig:
    """Return a saved config with another config's fields for evaluation and machine."""
    found.parallel = config.parallel
    found.eval_global_batch_size = config.eval_global_batch_size
    if found.phase2 is not None and config.phase2 is not None:
        found.phase2.eval_global_batch_size = config.phase2.eval_global_batch_size
    of_this_host = {name: getattr(config.data, name) for name in OF_THE_HOST}
    found.data = dataclasses.replace(found.data, **of_this_host)
    return found
