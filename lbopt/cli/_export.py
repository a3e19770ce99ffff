"""`lbopt export`: the network of a checkpoint, for other programs."""

from __future__ import annotations

import copy
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lbopt import errors, paths, types
from lbopt._shown import show
from lbopt.cli import _flags, _own_files
from lbopt.cli._train import saved_config, with_vocabulary
from lbopt.config import TRANSFORMERS, TrainConfig, config_to_json
from lbopt.data.from_config import Source, load_source
from lbopt.errors import require, require_choice
from lbopt.interchange import (
    PROCESSOR_FILE,
    WEIGHTS_FILE,
    image_processor,
    new_folder,
    require_new_folder,
    save_huggingface,
    save_safetensors,
)
from lbopt.job import SoloJob
from lbopt.parallel import TrainState
from lbopt.recipes import (
    CARRY,
    TEXT_NORMALIZATION_KEY,
    build_run,
    make_network,
    with_averaged_params,
)
from lbopt.train import Checkpoints, Run, check_vocabulary, restore_chosen, said_by_first
from lbopt.workdir import absolute_workdir, local_workdir, package_versions, read_config

FORMATS = ("huggingface", "safetensors")
HUGGINGFACE_MODELS = ("bert", "decoder_lm", "efficientnet", "resnet")
FLAGS = {
    "workdir": "a folder of lbopt train",
    "format": "safetensors (one file, our names) or huggingface (a folder for transformers)",
    "output": "a new folder; may be gs://BUCKET/FOLDER",
    "checkpoint": "latest (default), best, or a step",
}


def run(argv: Sequence[str]) -> None:
    """Write the network of a checkpoint for other programs, and print the folder.

    Args:
      argv: Arguments after the command, see `FLAGS`.

    Raises:
      UserError: If a flag is wrong, if no run is in the workdir, or if the format does not know
        the model.
      EnvironmentProblem: If a checkpoint cannot be read or the folder cannot be written.
    """
    given, _ = _flags.parse("export", argv, FLAGS, required=("workdir", "format", "output"))
    require_choice("--format", given["format"], FORMATS)
    output = require_new_folder(given["output"], "--output")
    with local_workdir(given["workdir"], write=False) as folder:
        _export(absolute_workdir(folder), given, output)


def _export(workdir: pathlib.Path, given: Mapping[str, str], output: paths.GivenPath) -> None:
    saved = read_config(workdir, "train")
    config = saved_config(saved, str(workdir))
    assert saved is not None
    config = _own_files.found_from(config, saved)
    _own_files.warn_of_changes(saved, str(workdir))
    if given["format"] == "huggingface":
        model = config.model.name
        fix = f"transformers has {', '.join(HUGGINGFACE_MODELS)}; use --format=safetensors"
        require(model in HUGGINGFACE_MODELS, "config.model.name", model, fix)

    # The names of classes and the statistics of pixels are not in a run, but in its data.
    sources: list[Source] = []

    def load(*arguments: Any) -> Source:
        sources.append(load_source(*arguments))
        return sources[-1]

    alone = on_one_device(with_vocabulary(config, str(workdir)))
    training = build_run(alone, load=load, trains=False)
    check_vocabulary(training, workdir)
    state = _restore(training, workdir, given.get("checkpoint", "latest"))
    averaged = training.evaluates_average
    if averaged:
        state = with_averaged_params(state)

    metadata = {
        "lbopt_version": str(package_versions()["lbopt"]),
        "recipe": config.name,
        "step": str(int(state.step)),
        "averaged_params": json.dumps(averaged),
        "model": json.dumps(config_to_json(config.model)),
    }
    if training.vocabulary.normalization is not None:
        metadata[TEXT_NORMALIZATION_KEY] = json.dumps(training.vocabulary.normalization._asdict())

    # The state carried through a text belongs to a place in that text, not to the network.
    kept = {name: value for name, value in state.model_state.items() if name != CARRY}
    variables = jax.device_get({"params": state.params, **kept})
    if given["format"] == "safetensors":
        with new_folder(output, "--output") as folder:
            save_safetensors(folder / WEIGHTS_FILE, variables, metadata)
    else:
        _save_huggingface(output, config, training, sources[0], variables, metadata)
    show(str(output))


def on_one_device(config: TrainConfig) -> TrainConfig:
    """Return the config of a run on one device whose state has the same shapes."""
    alone = copy.deepcopy(config)
    alone.parallel.num_devices = 1
    alone.parallel.backend = "jit"
    alone.parallel.shard_update = False
    alone.parallel.reduce_scatter = False
    # All phases have states of the same shapes.
    alone.phase2 = None
    alone.batch_schedule = None
    return alone


def _restore(training: Run, workdir: pathlib.Path, which: str) -> TrainState:
    with Checkpoints(
        workdir, training.keep_checkpoints, training.best_metric, read_only=True
    ) as checkpoints:
        return restore_chosen(
            checkpoints, which, lambda step: training.shapes(), said_by_first(SoloJob())
        )


def _save_huggingface(
    output: paths.GivenPath,
    config: TrainConfig,
    training: Run,
    source: Source,
    variables: Mapping[str, types.PyTree],
    metadata: Mapping[str, str],
) -> None:
    network = make_network(config.model, *outputs_and_head(variables["params"]))
    beside = dict(training.vocabulary.files())
    side = None
    if config.model.name not in TRANSFORMERS:
        image = source.splits.validation.take(np.arange(1))[source.features[0]][0]
        side, channels = _side_and_channels(image)
        # Other arrays are normalized in the data set, or not at all.
        if source.pixel_scale is not None and image.dtype == np.uint8:
            fraction = config.data.eval_fraction if config.data.train_crop == "resized" else None
            of_pixels = (*source.pixel_scale, fraction, channels)
            beside[PROCESSOR_FILE] = image_processor(side, *of_pixels)
    names = source.class_names
    with errors.under("config.model", ("stem",)):
        save_huggingface(output, network, variables, side, metadata, "--output", beside, names)


def _side_and_channels(image: np.ndarray) -> tuple[int, int]:
    """Return the side in pixels and the channels of an image, whose pixels may be folded."""
    if image.ndim == 2:
        return len(image), 1
    is_folded = image.shape[-1] == 12  # 2 x 2 pixels of three channels
    return (2 * len(image), 3) if is_folded else (len(image), image.shape[-1])


def outputs_and_head(params: Mapping[str, Any]) -> tuple[int, str]:
    """Return the number of classes or tokens, and the head of BERT, for `make_network`."""
    head = "question_answering" if "span" in params else "pretraining"
    if "word_embedding" in params:
        return params["word_embedding"]["embedding"].shape[0], head
    return params["head"]["kernel"].shape[-1], head
