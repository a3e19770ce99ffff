"""`lbopt evaluate`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from lbopt.cli import arguments
from lbopt.cli.train import comparison, with_vocabulary
from lbopt.config import TrainConfig, checks
from lbopt.errors import UserError
from lbopt.job.member import Alone
from lbopt.job.place import FLAGS as JOB_FLAGS
from lbopt.parallel import processes
from lbopt.recipes import build
from lbopt.train import workdir as workdirs
from lbopt.train.checkpoint import Checkpoints, restore_chosen
from lbopt.train.progress import said_by_first
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
    plan = build.build(with_vocabulary(config, given["workdir"]))
    workdir = workdirs.absolute(given["workdir"])
    if workdirs.refuse_another(workdir, "train", comparison(config, plan.mesh.size)) is None:
        raise UserError(f"--workdir = {given['workdir']!r}: no run is there; run lbopt train first")
    with Checkpoints(workdir, plan.keep_checkpoints, plan.best_metric, read_only=True, job=job) as checkpoints:
        which, say = given.get("checkpoint", "latest"), said_by_first(job)
        state = restore_chosen(checkpoints, which, lambda step: plan.phase_at(step).shapes(), say)
    step = int(state.step)
    plan = plan.phase_at(step)
    scores = {f"validation/{name}": value for name, value in plan.evaluate(state).items()}
    scores |= {f"test/{name}": value for name, value in plan.evaluate_test(state).items()}
    if job.index == 0:
        print(json.dumps({"step": step, **{name: finite(score) for name, score in scores.items()}}))
