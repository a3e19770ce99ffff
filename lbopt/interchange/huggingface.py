"""Folders as `transformers` keeps them: `config.json` and `model.safetensors`, in its names and layouts."""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from lbopt import paths, tree, types
from lbopt.errors import UserError, require
from lbopt.interchange import bert, efficientnet, fields, files, folders, names, resnet
from lbopt.interchange.family import Family
from lbopt.interchange.files import Entry
from lbopt.interchange.names import Counterpart
from lbopt.models.bert import unstack_layers

FAMILIES = (bert.PRETRAINING_FAMILY, bert.QUESTION_ANSWERING_FAMILY, resnet.FAMILY, efficientnet.FAMILY)
FORMER_NAMES = ((r"\.gamma$", ".weight"), (r"\.beta$", ".bias"))
"""Of layer norms, in files that were converted from TensorFlow's."""

Shapes = Mapping[str, tuple[int, ...]]


def load_huggingface(directory: paths.GivenPath) -> tuple[nn.Module, dict[str, Any]]:
    """Read a network that `transformers` saved, or `lbopt export --format=huggingface`.

    `BertForPreTraining`, `BertForQuestionAnswering`, `ResNetForImageClassification` (v1.5) and
    `EfficientNetForImageClassification`, in one safetensors file or several, in fp32, fp16 or bf16; everything is checked
    before an array is read. A scanned BERT takes `lbopt.models.bert.stack_layers(params)`.

    Args:
      directory: with `config.json` and `model.safetensors`; nothing is fetched from anywhere.

    Returns:
      The Linen module, which computes in fp32 (`module.clone(dtype=...)` for another), and its variables in fp32,
      `{"params": ...}` and for networks with batch norm `"batch_stats"`.

    Raises:
      UserError: naming the file or the field, if this is another architecture, if a tensor is missing, unexpected or of
        another shape, or if there are only pickles.
      EnvironmentProblem: if the files cannot be read.

    Note:
      `batch_norm_momentum` of EfficientNet is TensorFlow's (0.99), as its authors meant it. Its `stochastic_depth_rate` is
      `drop_connect_rate`, but we drop whole examples, as the paper says, and `transformers` drops elements.
    """
    folder = paths.local(directory, "directory")
    config = _read_config(folder)
    try:
        family = _family_of(config)
        module = family.module(config)
    except UserError as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from error
    wanted = _wanted(family, module, family.example(config))
    entries = _canonical(files.headers(files.weight_files(folder)), family)
    _check(entries, family, wanted, config)
    theirs = {counterpart.name: (ours, counterpart) for ours, (_, counterpart) in wanted.items()}
    flat = {}
    for name, array in files.read_floats({name: entries[name] for name in theirs}):
        ours, counterpart = theirs[name]
        flat[ours] = jnp.asarray(counterpart.layout.to_ours(array))
    return module, names.unflatten({ours: flat[ours] for ours in wanted})


def save_huggingface(
    directory: paths.GivenPath,
    module: nn.Module,
    variables: Mapping[str, types.PyTree],
    image_size: int | None = None,
    metadata: Mapping[str, str] | None = None,
    field: str = "directory",
) -> None:
    """Write a folder that `transformers`' `from_pretrained` and `load_huggingface` read.

    Args:
      directory: a new or empty folder; it appears when it is whole.
      module: Bert (scanned or not), ResNet with a 7 x 7 stem, or EfficientNet.
      variables: its parameters and batch statistics.
      image_size: EfficientNet: side of the images it is for, on which its padding depends.
      metadata: strings for the header of the safetensors file.
      field: what messages call `directory`.

    Raises:
      UserError: if something is there, or if `transformers` has no such network.
      EnvironmentProblem: if it cannot be written.
    """
    folders.require_new(directory, field)
    family = next((family for family in FAMILIES if family.describes(module)), None)
    if family is None:
        kind = type(module).__name__
        raise UserError(f"module = {kind}: transformers has no such network; use format safetensors")
    if getattr(module, "scan", False):
        variables = {**variables, "params": unstack_layers(variables["params"])}
        module = module.clone(scan=False)
    described = family.config(module, variables["params"], image_size)
    config = {"architectures": [family.architecture], "model_type": family.model_type, "dtype": "float32", **described}
    arrays = _to_theirs(family, module, config, variables)
    with folders.new_folder(directory, field) as folder:
        files.write(folder / files.WEIGHTS, arrays, {**(metadata or {}), "format": "pt"})
        folders.write_json(folder / "config.json", config)


def _to_theirs(
    family: Family, module: nn.Module, config: Mapping[str, Any], variables: Mapping[str, types.PyTree]
) -> dict[str, np.ndarray]:
    wanted, given = _wanted(family, module, family.example(config)), names.flatten(variables)
    for name in sorted(wanted.keys() ^ given.keys()):
        require(name in given, "variables", name, "it is missing; give all collections of this module")
        require(
            name in wanted, "variables", name, "this module has no such variable; give the variables that belong to it"
        )
    arrays = {}
    for ours, (shape, counterpart) in wanted.items():
        require(given[ours].shape == shape, f"variables[{ours!r}].shape", given[ours].shape, f"the module has {shape}")
        arrays[counterpart.name] = counterpart.layout.to_theirs(np.asarray(given[ours], np.float32))
        if counterpart.name.endswith(".running_mean"):
            arrays[counterpart.name.replace("running_mean", "num_batches_tracked")] = np.zeros((), np.int64)
    return arrays


def _read_config(folder: pathlib.Path) -> dict[str, Any]:
    require(
        folder.is_dir(), "directory", str(folder), "no such folder; give one with config.json and model.safetensors"
    )
    file = folder / "config.json"
    require(file.is_file(), "directory", str(folder), "it has no config.json; give a folder that save_pretrained wrote")
    return files.read_json(file)


def _family_of(config: Mapping[str, Any]) -> Family:
    given = config.get("architectures")
    known = {name: family for family in FAMILIES for name in (family.architecture, *family.also)}
    found = [known[name] for name in given if name in known] if isinstance(given, list) else []
    fix = f"a folder of another architecture; lbopt reads {', '.join(family.architecture for family in FAMILIES)}"
    require(len(found) == 1, "architectures", given, fix)
    family = found[0]
    require(config.get("model_type") == family.model_type, "model_type", config.get("model_type"), fix)
    return family


def _wanted(family: Family, module: nn.Module, example: Any) -> dict[str, tuple[tuple[int, ...], Counterpart]]:
    """Return our name -> our shape, and what it is there."""
    init = functools.partial(module.init, train=False)
    shapes = names.flatten(jax.eval_shape(init, jax.random.key(0), example))
    return {name: (leaf.shape, names.counterpart(family.table, name)) for name, leaf in shapes.items()}


def _canonical(entries: Iterable[Entry], family: Family) -> dict[str, Entry]:
    """Return the tensors that matter by the names they have now; a tied one that is alone counts for the other."""
    found = {}
    for entry in entries:
        name = entry.name
        for former, now in FORMER_NAMES:
            name = re.sub(former, now, name)
        if not any(re.fullmatch(pattern, name) for pattern in family.ignored):
            found[name] = entry
    for alias, source in family.tied.items():
        if alias in found and source not in found:
            found[source] = found.pop(alias)
    return found


def _check(
    entries: dict[str, Entry],
    family: Family,
    wanted: Mapping[str, tuple[tuple[int, ...], Counterpart]],
    config: Mapping[str, Any],
) -> None:
    """Raise `UserError` for the first tensor that does not fit; take what is tied out of `entries`."""
    shapes = {there.name: there.layout.their_shape(shape) for shape, there in wanted.values()}
    shapes |= {alias: shapes[source] for alias, source in family.tied.items() if alias in entries}
    folder = next(iter(entries.values())).file.parent if entries else pathlib.Path(files.WEIGHTS)
    missing, unexpected = sorted(shapes.keys() - entries.keys()), sorted(entries.keys() - shapes.keys())
    _check_vocabulary(entries, config)
    if missing:
        raise UserError(
            f"{folder}: {tree.some(missing)} missing ({len(missing)} of {len(shapes)} tensors of {family.architecture}); "
            "config.json and weights must be of one model: save it again"
        )
    if unexpected:
        raise UserError(
            f"{folder}: {tree.some(unexpected)} unexpected ({len(unexpected)} tensors that {family.architecture} of this "
            "config.json does not have); config.json and weights must be of one model: save it again"
        )
    for name, shape in shapes.items():
        _check_tensor(entries[name], shape)
    _check_tied(entries, family)


def _check_vocabulary(entries: Mapping[str, Entry], config: Mapping[str, Any]) -> None:
    words = entries.get("bert.embeddings.word_embeddings.weight")
    if words is None or not words.shape:
        return
    size = fields.get(config, "vocab_size", 30522, fields.COUNT)
    fix = f"the word embeddings in {words.file} have {words.shape[0]} rows; set vocab_size to that, or give its own weights"
    require(words.shape[0] == size, f"{words.file.parent / 'config.json'}: vocab_size", size, fix)


def _check_tensor(entry: Entry, shape: tuple[int, ...]) -> None:
    fix = f"config.json says {shape}; config.json and weights must be of one model: save it again"
    require(entry.shape == shape, f"{entry.file}: shape of {entry.name}", entry.shape, fix)
    fix = f"weights are {', '.join(files.FLOATS)}; save the model again in one of them"
    require(entry.dtype in files.FLOATS, f"{entry.file}: dtype of {entry.name}", entry.dtype, fix)


def _check_tied(entries: dict[str, Entry], family: Family) -> None:
    for alias, source in family.tied.items():
        if alias in entries:
            pair = dict(files.read_floats({name: entries[name] for name in (alias, source)}))
            entry = entries.pop(alias)
            if not np.array_equal(pair[alias], pair[source]):
                raise UserError(
                    f"{entry.file}: {alias} differs from {source}: lbopt's network has one array for both; tie them and save again"
                )
