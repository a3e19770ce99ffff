"""`lbopt export`."""

from __future__ import annotations

import copy
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from lbopt import errors, types
from lbopt.cli import arguments
from lbopt.cli.train import with_vocabulary
from lbopt.config import TrainConfig, checks
from lbopt.errors import UserError, require, require_choice
from lbopt.interchange import files, folders, huggingface, native
from lbopt.job.member import SoloJob
from lbopt.parallel.state import TrainState
from lbopt.recipes import build, initial, language_model, networks
from lbopt.shown import show
from lbopt.train import bucket, environment, workdir as workdirs
from lbopt.train.checkpoint import Checkpoints, restore_chosen
from lbopt.train.loop import check_vocabulary
from lbopt.train.progress import said_by_first
from lbopt.train.run import Run

FORMATS = ("huggingface", "safetensors")
HUGGINGFACE_MODELS = ("bert", "efficientnet", "resnet")
FLAGS = {
    "workdir": "a folder of lbopt train",
    "format": "safetensors (one file, our names) or huggingface (a folder for transformers)",
    "output": "a new folder",
    "checkpoint": "latest (default), best, or a step",
}


def run(argv: Sequence[str]) -> None:
    """Write the network of a checkpoint for other programs, and print the folder."""
    given, _ = arguments.parse("export", argv, FLAGS, required=("workdir", "format", "output"))
    require_choice("--format", given["format"], FORMATS)
    output = folders.require_new(given["output"], "--output")
    with bucket.opened(given["workdir"], write=False) as folder:
        _export(workdirs.absolute(folder), given, output)


def _export(workdir: pathlib.Path, given: Mapping[str, str], output: pathlib.Path) -> None:
    config = _saved_config(workdir)
    if given["format"] == "huggingface":
        fix = f"transformers has {', '.join(HUGGINGFACE_MODELS)}; use --format=safetensors"
        require(
            config.model.name in HUGGINGFACE_MODELS, "config.model.name", config.model.name, fix
        )
    plan = build.build(on_one_device(with_vocabulary(config, str(workdir))), trains=False)
    check_vocabulary(plan, workdir)
    state = _restore(plan, workdir, given.get("checkpoint", "latest"))
    averaged = config.optimizer.ema_decay is not None
    if averaged:
        state = build.with_averaged_params(state)
    metadata = {
        "lbopt_version": str(environment.versions()["lbopt"]),
        "recipe": config.name,
        "step": str(int(state.step)),
        "averaged_params": json.dumps(averaged),
        "model": json.dumps(checks.to_json(config.model)),
    }
    if plan.vocabulary.normalization is not None:
        metadata[initial.TEXT] = json.dumps(plan.vocabulary.normalization._asdict())
    kept = {
        name: value for name, value in state.model_state.items() if name != language_model.CARRY
    }
    variables = jax.device_get({"params": state.params, **kept})
    if given["format"] == "safetensors":
        with folders.new_folder(output, "--output") as folder:
            native.save_safetensors(folder / files.WEIGHTS, variables, metadata)
    else:
        _save_huggingface(output, config, plan, variables, metadata)
    show(str(output))


def _saved_config(workdir: pathlib.Path) -> TrainConfig:
    saved = workdirs.read_config(workdir, "train")
    if saved is None:
        raise UserError(f"--workdir = {str(workdir)!r}: no run is there; run lbopt train first")
    return checks.from_json(TrainConfig, saved["config"], str(saved["versions"].get("lbopt")))


def on_one_device(config: TrainConfig) -> TrainConfig:
    """Return the config of a run with the same state on one device."""
    alone = copy.deepcopy(config)
    alone.parallel.num_devices, alone.parallel.backend = 1, "jit"
    alone.parallel.shard_update = alone.parallel.reduce_scatter = False
    alone.phase2 = None  # whose state has the same shapes
    return alone


def _restore(plan: Run, workdir: pathlib.Path, which: str) -> TrainState:
    with Checkpoints(
        workdir, plan.keep_checkpoints, plan.best_metric, read_only=True
    ) as checkpoints:
        return restore_chosen(
            checkpoints, which, lambda step: plan.shapes(), said_by_first(SoloJob())
        )


def _save_huggingface(
    output: pathlib.Path,
    config: TrainConfig,
    plan: Run,
    variables: Mapping[str, types.PyTree],
    metadata: Mapping[str, str],
) -> None:
    network = networks.make_network(config.model, *outputs_and_head(variables["params"]))
    side = (
        plan.batches.piece(0, 0, 1)["image"].shape[1]
        if config.model.name == "efficientnet"
        else None
    )
    with errors.under("config.model", ("stem",)):
        huggingface.save_huggingface(
            output, network, variables, side, metadata, "--output", plan.vocabulary.files()
        )


def outputs_and_head(params: Mapping[str, Any]) -> tuple[int, str]:
    """Read from the parameters what `make_network` asks besides the config: classes or tokens, and the head of bert."""
    head = "question_answering" if "span" in params else "pretraining"
    if "word_embedding" in params:
        return params["word_embedding"]["embedding"].shape[0], head
    return params["head"]["kernel"].shape[-1], head
