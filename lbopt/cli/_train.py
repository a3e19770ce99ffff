"""`lbopt train`: train a recipe, or resume its training."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lbopt._shown import show
from lbopt._user_code import is_place
from lbopt.cli import _flags, _own_files, _process
from lbopt.config import (
    BATCH_NORMED,
    ParallelConfig,
    TrainConfig,
    completed_json,
    config_from_json,
    config_to_json,
    json_differences,
    json_without,
    naming,
    resolve_clip,
    step_options,
    without_layout,
)
from lbopt.errors import UserError
from lbopt.job import JOB_FLAGS, STARTING_PATIENCE, Job, PreemptionWatch
from lbopt.parallel import Aggregate, StepOptions, TrainState, connect_processes
from lbopt.recipes import build_run
from lbopt.train import ProfiledSteps, Run, check_name, is_begun, train
from lbopt.transforms import is_per_layer
from lbopt.workdir import (
    CompareConfigs,
    OwnFiles,
    absolute_workdir,
    check_shared_workdir,
    check_trackers,
    checkpoint_root,
    local_workdir,
    open_trackers,
    open_workdir,
    package_versions,
    read_json_lines,
    shown_path,
)

FLAGS = {
    "config": "FILE[:ROW], then --config.field.sub=VALUE to override",
    "workdir": "folder for config.json, metrics, checkpoints; the same one resumes",
    "profile": "FIRST:LAST or a number of steps, traced once for xprof into WORKDIR/profile",
    **_own_files.FLAGS,
    **JOB_FLAGS,
}
OF_THE_HOST = ("data_dir", "reader_threads", "reader_processes", "max_damaged_records")
"""Fields of `config.data` that change no batch."""
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
    "trackers",
)
"""Fields that may change when a run is resumed, for instance on another machine.

They change no batch, and the updates by no more than rounding.
"""


def run(argv: Sequence[str], job: Job) -> None:
    """Train to the end, resuming from the last checkpoint in the workdir.

    Args:
      argv: Arguments after the command, see `FLAGS`.
      job: The job that this process is part of; its first process writes and prints.

    Raises:
      UserError: If a flag or a field of the config is wrong, or the workdir holds another run.
      EnvironmentProblem: If data, devices, workdir or an installed package are at fault.
      Preempted: On SIGTERM; the state is saved.
    """
    given, overrides = _flags.parse("train", argv, FLAGS, required=("config", "workdir"))
    profile = ProfiledSteps.parse(given["profile"]) if "profile" in given else None
    config = _flags.load_config(given["config"], overrides, TrainConfig)
    config.validate()
    ours = config_to_json(config)
    with PreemptionWatch(job) as watch:
        job.same("config", {"config": ours, "versions": package_versions()}, "")
        connect_processes(job)
        with local_workdir(given["workdir"], job) as folder:
            command = _flags.command_line("train", argv)
            trained = train_in(folder, config, watch, command, profile=profile, files=given)
            lines = trained.lines
            where = shown_path(absolute_workdir(folder) / "metrics.jsonl")

    if job.index:
        return
    for last in lines[-1:]:
        names = [name for name in last if not is_per_layer(name.removeprefix("train/"))]
        show(json.dumps({name: last[name] for name in names}))
    show(where)


def _naming_fields() -> contextlib.AbstractContextManager[None]:
    """Let errors of the training loop name the fields of the config."""
    places = {
        "learning_rate": "config.schedule.base_learning_rate",
        "next_phase.learning_rate": "config.phase2.schedule.base_learning_rate",
        "max_grad_norm": "config.optimizer.max_grad_norm",
        "skip_limit": "config.optimizer.skip_limit",
        "shard_update": "config.parallel.shard_update",
    }
    return naming("config", TrainConfig, **places)


class Trained(NamedTuple):
    """A finished run.

    Attributes:
      run: Its last phase.
      state: The final state.
      lines: The lines of `metrics.jsonl`; [] in processes of a job other than the first.
    """

    run: Run
    state: TrainState
    lines: list[dict[str, Any]]


def train_in(
    folder: str,
    config: TrainConfig,
    watch: PreemptionWatch,
    command: str,
    on_metrics: Sequence[Any] = (),
    profile: ProfiledSteps | None = None,
    files: Mapping[str, str] | None = None,
) -> Trained:
    """Train in a local folder, resuming from its last checkpoint.

    Args:
      folder: The workdir.
      config: The config, validated.
      watch: The watch for SIGTERM, which knows the job.
      command: The command line of the user, for the report.
      on_metrics: Functions (step, metrics), and writers, that get the lines of metrics.jsonl.
      profile: Steps to trace for xprof; None for none.
      files: "accept" and "checksum", see `_own_files.FLAGS`; None for their defaults.

    Raises:
      UserError: If a field of the config is wrong, or the workdir holds another run.
      EnvironmentProblem: If data, devices, workdir or an installed package are at fault.
      Preempted: On SIGTERM; the state is saved.
    """
    absolute_workdir(folder)  # refuses an address
    with _naming_fields():
        saved = config_to_json(config)
        compare = comparison(config)
        own = _own_files.checked("train", saved, folder, compare, files or {}, watch.job)
        return _train_in(folder, config, watch, command, on_metrics, profile, own)


def _train_in(
    folder: str,
    config: TrainConfig,
    watch: PreemptionWatch,
    command: str,
    on_metrics: Sequence[Any],
    profile: ProfiledSteps | None,
    own: OwnFiles | None,
) -> Trained:
    job = watch.job
    check_name(str(checkpoint_root(absolute_workdir(folder))))
    check_shared_workdir(folder, job)

    job.doing("making the data and the model ready", patience=STARTING_PATIENCE)
    training = build_run(with_vocabulary(config, folder))
    if profile is not None:
        profile.check(training.phases()[-1].last_step)
    if job.index == 0:
        check_trackers(config.trackers)
    if not is_begun(absolute_workdir(folder)):
        training.check_initial()

    # Trace all phases now: a fault in the last one must not show after days of the first. Of those
    # that differ in the batch alone the largest shows it.
    job.doing("tracing the step", patience=STARTING_PATIENCE)
    growing = training.growth.candidates[-1:] if training.growth else ()
    for phase in (*training.phases(), *growing):
        phase.check_memory()
        if phase.is_end or not phase.continues:
            phase.lower()

    num_devices = training.mesh.size
    compare = comparison(config, num_devices=num_devices)
    saved = config_to_json(config)
    with open_workdir(
        folder, "train", saved, compare, num_devices, command, job, None, own
    ) as workdir:
        if job.index == 0:
            _process.import_tensorboard_writer()
        job.doing("opening the trackers", patience=STARTING_PATIENCE)
        with open_trackers(config.trackers, workdir, saved, job) as hooks:
            state = train(training, workdir, watch, [*hooks, *on_metrics], profile)
        lines = read_json_lines(workdir / "metrics.jsonl") if job.index == 0 else []
        return Trained(training.phases()[-1], state, lines)


def saved_config(saved: Mapping[str, Any] | None, workdir: str) -> TrainConfig:
    """Return the config of a run.

    Args:
      saved: The data of the workdir's config.json; None if there is none.
      workdir: The workdir, for the message.

    Raises:
      UserError: If there is no run, or it has a field that lbopt does not know.
    """
    if saved is None:
        fix = "no run is there; run lbopt train first"
        raise UserError("--workdir", workdir, fix, code="missing")
    written_by = str(saved["versions"].get("lbopt"))
    return config_from_json(TrainConfig, completed_json(TrainConfig, saved["config"]), written_by)


def with_vocabulary(config: TrainConfig, workdir: str) -> TrainConfig:
    """Return the config with the vocabulary that the run keeps in its workdir, if there is one.

    The file that the vocabulary came from may be gone, or may have changed.
    """
    kept = absolute_workdir(workdir) / "vocab.txt"
    if config.data.name != "squad" or not kept.is_file():
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, vocab_file=str(kept)))


def comparison(
    config: TrainConfig, left_out: Sequence[str] = MAY_CHANGE, num_devices: int | None = None
) -> CompareConfigs:
    """Return a function that compares this run with a saved one.

    Args:
      config: Config of this run.
      left_out: Fields in which the two runs may differ.
      num_devices: Number of devices of a run to resume. It must stay the same where the update
        depends on it: with batch norm or a clip per replica, with shards of slices compressed
        each for itself, or with layers of others that see one device. An aggregator's memory is
        rebuilt for another number of replicas. None for an evaluation, which may use any number
        of devices.
    """
    ours = json_without(without_layout(config_to_json(config)), left_out)

    def compare(saved: dict[str, Any]) -> list[str]:
        theirs = completed_json(TrainConfig, saved["config"])
        theirs = json_without(without_layout(theirs), left_out)
        found = json_differences(ours, theirs)
        if num_devices is not None and _depends_on_devices(config):
            found += json_differences(
                {"num_devices": num_devices}, {"num_devices": saved.get("num_devices")}
            )
        return found

    return compare


def _depends_on_devices(config: TrainConfig) -> bool:
    """Return whether another number of devices would change the updates by more than rounding."""
    by_norm = config.model.name in BATCH_NORMED and config.model.batch_norm_scope.startswith(
        ("local", "replicas", "tiles")
    )
    by_clip = (
        config.optimizer.clip_stage == "replica" and resolve_clip(config.optimizer) is not None
    )
    options = step_options(config)
    # Layers of others normalize, and draw, over what a device sees.
    mapped = options.mapped or config.diloco.every > 1
    by_others = is_place(config.model.name) and mapped
    return by_norm or by_clip or _compresses_shards(options) or by_others


def _compresses_shards(options: StepOptions) -> bool:
    """Return whether each device of a slice compresses its own shard of a leaf.

    With a stated number of devices shards stay the same on any number of groups. Slices may be of
    another size in another pod.
    """
    found = options.reduction
    if not isinstance(found, Aggregate) or found.over != "slices":
        return False
    return found.aggregator.takes_parts and found.aggregator.compresses
