"""Folders as `transformers` keeps them: `config.json` and `model.safetensors`, in its names and layouts."""

from __future__ import annotations

import itertools
import math
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from lbopt import paths, tree, types
from lbopt.errors import EnvironmentProblem, UserError, brief, require
from lbopt.interchange import bert, efficientnet, fields, files, folders, names, resnet
from lbopt.interchange.family import Family
from lbopt.interchange.files import Entry
from lbopt.interchange.names import Tensor
from lbopt.models.bert import unstack_layers
from lbopt.shown import one_line

FAMILIES = (
    bert.PRETRAINING_FAMILY,
    bert.QUESTION_ANSWERING_FAMILY,
    resnet.FAMILY,
    efficientnet.FAMILY,
)
FORMER_NAMES = ((r"\.gamma$", ".weight"), (r"\.beta$", ".bias"))
"""Of layer norms, in files that were converted from TensorFlow's."""
_SURPLUS = 1000
"""Tensors are looked for until more than these are missing: `config.json` may say a thousand million layers."""


def load_huggingface(directory: paths.GivenPath) -> tuple[nn.Module, dict[str, Any]]:
    """Read a network that `transformers` saved, or `lbopt export --format=huggingface`.

    `BertForPreTraining`, `BertForQuestionAnswering`, `ResNetForImageClassification` (v1.5) and
    `EfficientNetForImageClassification`, in one safetensors file or several, in fp32, fp16 or bf16. What `config.json`
    says is compared with the names and shapes in the files before an array is read; nothing of a size that is only said is
    made. A scanned BERT takes `lbopt.models.bert.stack_layers(params)`.

    Args:
      directory: with `config.json` and `model.safetensors`; nothing is fetched from anywhere.

    Returns:
      The Linen module, which computes in fp32 (`module.clone(dtype=...)` for another), and its variables in fp32,
      `{"params": ...}` and for networks with batch norm `"batch_stats"`.

    Raises:
      UserError: naming the file or the field, if this is another architecture, if a tensor is missing, unexpected or of
        another shape, or if there are only pickles.
      EnvironmentProblem: if the files cannot be read, or are larger than this machine's memory.

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
    entries = _canonical(files.headers(files.weight_files(folder)), family)
    tensors = _checked(entries, family, module, config, folder)
    flat = {}
    for name, array in files.read_floats({name: entries[name] for name in tensors}):
        flat[tensors[name].ours] = jnp.asarray(tensors[name].layout.to_ours(array))
    return module, names.unflatten({tensor.ours: flat[tensor.ours] for tensor in tensors.values()})


def save_huggingface(
    directory: paths.GivenPath,
    module: nn.Module,
    variables: Mapping[str, types.PyTree],
    image_size: int | None = None,
    metadata: Mapping[str, str] | None = None,
    field: str = "directory",
    beside: Mapping[str, str] | None = None,
) -> None:
    """Write a folder that `transformers`' `from_pretrained` and `load_huggingface` read.

    Args:
      directory: a new or empty folder; it appears when it is whole.
      module: Bert (scanned or not), ResNet with a 7 x 7 stem, or EfficientNet.
      variables: its parameters and batch statistics.
      image_size: EfficientNet: side of the images it is for, on which its padding depends.
      metadata: strings for the header of the safetensors file.
      field: what messages call `directory`.
      beside: names and texts of further files.

    Raises:
      UserError: if something is there, or if `transformers` has no such network.
      EnvironmentProblem: if it cannot be written.
    """
    folders.require_new(directory, field)
    family = next((family for family in FAMILIES if family.describes(module)), None)
    if family is None:
        kind = type(module).__name__
        raise UserError(
            f"module = {kind}: transformers has no such network; use format safetensors"
        )
    if getattr(module, "scan", False):
        variables = {**variables, "params": unstack_layers(variables["params"])}
        module = module.clone(scan=False)
    described = family.config(module, variables["params"], image_size)
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": "float32",
        **described,
    }
    arrays = _to_theirs(family, module, config, variables)
    with folders.new_folder(directory, field) as folder:
        files.write(folder / files.WEIGHTS, arrays, {**(metadata or {}), "format": "pt"})
        folders.write_json(folder / "config.json", config)
        for name, text in (beside or {}).items():
            (folder / name).write_text(text, "utf-8")


def _to_theirs(
    family: Family,
    module: nn.Module,
    config: Mapping[str, Any],
    variables: Mapping[str, types.PyTree],
) -> dict[str, np.ndarray]:
    given = names.flatten(variables)
    wanted = {
        tensor.ours: tensor for tensor in names.tensors(family.table, family.layers(module, config))
    }
    for name in sorted(wanted.keys() ^ given.keys()):
        require(
            name in given, "variables", name, "it is missing; give all collections of this module"
        )
        require(
            name in wanted,
            "variables",
            name,
            "this module has no such variable; give the variables that belong to it",
        )
    arrays = {}
    for ours, tensor in sorted(wanted.items()):
        fix = f"the module has {tensor.shape}"
        require(
            given[ours].shape == tensor.shape, f"variables[{ours!r}].shape", given[ours].shape, fix
        )
        arrays[tensor.theirs] = tensor.layout.to_theirs(np.asarray(given[ours], np.float32))
        if tensor.theirs.endswith(".running_mean"):
            arrays[tensor.theirs.replace("running_mean", "num_batches_tracked")] = np.zeros(
                (), np.int64
            )
    return arrays


def _read_config(folder: pathlib.Path) -> dict[str, Any]:
    fix = "no such folder; give one with config.json and model.safetensors"
    require(files.is_there(folder) and folder.is_dir(), "directory", str(folder), fix)
    file = folder / "config.json"
    fix = "it has no config.json; give a folder that save_pretrained wrote"
    require(files.is_there(file), "directory", str(folder), fix)
    return files.read_json(file)


def _family_of(config: Mapping[str, Any]) -> Family:
    given = config.get("architectures")
    known = {name: family for family in FAMILIES for name in (family.architecture, *family.also)}
    names_given = (
        [name for name in given if isinstance(name, str)] if isinstance(given, list) else []
    )
    found = [known[name] for name in names_given if name in known]
    fix = f"a folder of another architecture; lbopt reads {', '.join(family.architecture for family in FAMILIES)}"
    require(len(found) == 1, "architectures", given, fix)
    family = found[0]
    require(
        config.get("model_type") == family.model_type, "model_type", config.get("model_type"), fix
    )
    return family


def _canonical(entries: Iterable[Entry], family: Family) -> dict[str, Entry]:
    """Return the tensors that matter by the names they have now; a tied one that is alone counts for the other."""
    found: dict[str, Entry] = {}
    for entry in entries:
        name = entry.name
        for former, now in FORMER_NAMES:
            name = re.sub(former, now, name)
        if not any(re.fullmatch(pattern, name) for pattern in family.ignored):
            if name in found:
                twice = f"{_shown([found[name].name])} is in {found[name].file.name} too"
                raise UserError(
                    f"{entry.file}: {_shown([entry.name])}: {twice}; keep the right one of them"
                )
            found[name] = entry
    for alias, source in family.tied.items():
        if alias in found and source not in found:
            found[source] = found.pop(alias)
    return found


def _checked(
    entries: dict[str, Entry],
    family: Family,
    module: nn.Module,
    config: Mapping[str, Any],
    folder: pathlib.Path,
) -> dict[str, Tensor]:
    """Return the network's arrays by their names there.

    Raises `UserError` for the first tensor that does not fit; takes what is tied out of `entries`. However many layers are said,
    it takes no more steps than there are tensors.
    """
    _check_vocabulary(entries, config)
    described = names.tensors(family.table, family.layers(module, config))
    looked_for = itertools.islice(described, len(entries) + _SURPLUS)
    found: dict[str, Tensor] = {tensor.theirs: tensor for tensor in looked_for}
    missing = [tensor for name, tensor in found.items() if name not in entries]
    if missing:
        count = (
            f"{len(missing)} of {len(found)}"
            if len(missing) < _SURPLUS
            else f"{_SURPLUS} or more of the"
        )
        said = _said(missing[0].because, config)
        raise UserError(
            f"{folder}: {tree.some(sorted(tensor.theirs for tensor in missing))} missing ({count} tensors of {family.architecture}"
            f"{said and ' with '}{said}); config.json and weights must be of one model: save it again"
        )

    shapes = {name: tensor.layout.their_shape(tensor.shape) for name, tensor in found.items()}
    shapes |= {alias: shapes[source] for alias, source in family.tied.items() if alias in entries}
    unexpected = sorted(entries.keys() - shapes.keys())
    if unexpected:
        raise UserError(
            f"{folder}: {_shown(unexpected)} unexpected ({len(unexpected)} tensors that {family.architecture} of this "
            "config.json does not have); config.json and weights must be of one model: save it again"
        )
    for name, shape in shapes.items():
        _check_tensor(entries[name], shape, config)
    _check_memory(shapes.values(), folder)
    _check_tied(entries, family)
    return found


def _check_vocabulary(entries: Mapping[str, Entry], config: Mapping[str, Any]) -> None:
    words = entries.get("bert.embeddings.word_embeddings.weight")
    if words is None or not words.shape:
        return
    size = fields.get(config, "vocab_size", 30522, fields.COUNT)
    fix = f"the word embeddings in {words.file} have {words.shape[0]} rows; set vocab_size to that, or give its own weights"
    require(words.shape[0] == size, f"{words.file.parent / 'config.json'}: vocab_size", size, fix)


def _check_tensor(entry: Entry, shape: tuple[int, ...], config: Mapping[str, Any]) -> None:
    field = f"{entry.file}: shape of {entry.name}"
    if entry.shape != shape:
        same_rank = len(entry.shape) == len(shape)
        wrong = [
            length for i, length in enumerate(shape) if not same_rank or entry.shape[i] != length
        ]
        said = _said((name for length in wrong for name in getattr(length, "fields", ())), config)
        fix = f"config.json says {shape}{said and ' by '}{said}; config.json and weights must be of one model: save it again"
        raise UserError(f"{field} = {brief(entry.shape)}: {fix}")
    fix = f"weights are {', '.join(files.FLOATS)}; save the model again in one of them"
    require(entry.dtype in files.FLOATS, f"{entry.file}: dtype of {entry.name}", entry.dtype, fix)


def _check_memory(shapes: Iterable[tuple[int, ...]], folder: pathlib.Path) -> None:
    """Raise `EnvironmentProblem` if the arrays cannot be held: a file with holes takes no disk for them."""
    needed, there = (
        4 * sum(map(math.prod, shapes)),
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )
    if needed > there:
        raise EnvironmentProblem(
            f"{folder}: its parameters take {needed / 1e9:.0f} GB in fp32, and this machine has {there / 1e9:.0f} GB of memory; "
            "use a larger machine, or the weights of a smaller model"
        )


def _said(fields_named: Iterable[str], config: Mapping[str, Any]) -> str:
    """Return what `config.json` says in some fields."""
    known = dict.fromkeys(fields_named)
    return ", ".join(
        f"{name} = {brief(config[name], 60)}" if name in config else f"{name} left out"
        for name in known
    )


def _shown(names_there: Iterable[str]) -> str:
    """Return the first few names of tensors in files, which can be any text."""
    return tree.some([one_line(name[:100]) for name in names_there])


def _check_tied(entries: dict[str, Entry], family: Family) -> None:
    for alias, source in family.tied.items():
        if alias in entries:
            pair = dict(files.read_floats({name: entries[name] for name in (alias, source)}))
            entry = entries.pop(alias)
            if not np.array_equal(pair[alias], pair[source]):
                raise UserError(
                    f"{entry.file}: {alias} differs from {source}: lbopt's network has one array for both; tie them and save again"
                )
