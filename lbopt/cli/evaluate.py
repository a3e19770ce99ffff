"""`lbopt evaluate`."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence

from lbopt.cli import arguments
from lbopt.cli.train import comparison, with_vocabulary
from lbopt.config import TrainConfig, checks
from lbopt.errors import UserError
from lbopt.job.member import STARTING, Alone
from lbopt.job.place import FLAGS as JOB_FLAGS
from lbopt.parallel import processes
from lbopt.parallel.aggregation import Aggregation
from lbopt.parallel.state import TrainState
from lbopt.recipes import build
from lbopt.recipes.aggregators import group_of
from lbopt.train import bucket, workdir as workdirs
from lbopt.train.checkpoint import Checkpoints, restore_chosen
from lbopt.train.progress import said_by_first
from lbopt.train.run import Run
from lbopt.train.writers import finite

FLAGS = {
    "config": "the config the workdir was trained with",
    "workdir": "a folder of lbopt train",
    "checkpoint": "latest (default), best, or a step",
    **JOB_FLAGS,
}


def run(argv: Sequence[str], job: Alone) -> None:
    """Print validation and test metrics of a checkpoint as one JSON line."""
    given, overrides = arguments.parse("evaluate", argv, FLAGS, required=("config", "workdir"))
    config = arguments.load_config(given["config"], overrides, TrainConfig)
    job.same("config", checks.to_json(config))
    processes.start(job)
    job.doing("reading the checkpoint", patience=STARTING)
    with bucket.opened(given["workdir"], job, write=False) as folder:
        plan, state = _restore(config, folder, given.get("checkpoint", "latest"), job)
    job.doing("evaluating")
    step = int(state.step)
    plan = plan.phase_at(step)
    scores = {f"validation/{name}": value for name, value in plan.evaluate(state).items()}
    scores |= {f"test/{name}": value for name, value in plan.evaluate_test(state).items()}
    if job.index == 0:
        print(json.dumps({"step": step, **{name: finite(score) for name, score in scores.items()}}))


def _restore(config: TrainConfig, folder: str, which: str, job: Alone) -> tuple[Run, TrainState]:
    plan = build.build(on_these_devices(with_vocabulary(config, folder)))
    workdir = workdirs.absolute(folder)
    if workdirs.refuse_another(workdir, "train", comparison(config)) is None:
        raise UserError(f"--workdir = {folder!r}: no run is there; run lbopt train first")
    with Checkpoints(workdir, plan.keep_checkpoints, plan.best_metric, read_only=True, job=job) as checkpoints:
        shapes = lambda step: plan.phase_at(step).shapes()  # noqa: E731
        return plan, restore_chosen(checkpoints, which, shapes, said_by_first(job))


def on_these_devices(config: TrainConfig) -> TrainConfig:
    """Return the config of a run with the same network, whose aggregator, which has no part in an evaluation, takes any devices."""
    given = config.aggregator
    mesh, over = build.make_mesh(config.parallel), group_of(given)
    try:
        Aggregation.check_over(mesh, over)
        whole = over == "replicas" or given.name != "agvm"
    except UserError:
        whole = False
    odd = given.name == "agvm" and mesh.size * given.replicas_per_device % 2 == 1
    if whole and not odd:
        return config
    fitted = copy.deepcopy(config)
    fitted.aggregator.over = "replicas"
    if odd:
        fitted.aggregator.replicas_per_device = 2
        fitted.parallel.backend, fitted.model.batch_norm_scope = "jit", "local"
    return fitted
