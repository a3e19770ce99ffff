"""Folders of `transformers`: `config.json` and `model.safetensors`, in its names and layouts."""

from __future__ import annotations

import itertools
import math
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from lbopt import errors, paths, tree, types
from lbopt._shown import one_line
from lbopt.errors import NO_VALUE, EnvironmentProblem, UserError, brief, require
from lbopt.interchange import (
    _bert,
    _decoder,
    _efficientnet,
    _files,
    _folders,
    _json_fields,
    _names,
    _resnet,
)
from lbopt.interchange._family import Family
from lbopt.interchange._files import Entry
from lbopt.interchange._names import Tensor
from lbopt.models import unstack_layers

FAMILIES = (
    _bert.PRETRAINING_FAMILY,
    _bert.QUESTION_ANSWERING_FAMILY,
    _resnet.FAMILY,
    _efficientnet.FAMILY,
    *_decoder.FAMILIES,
)
FORMER_NAMES = ((r"\.gamma$", ".weight"), (r"\.beta$", ".bias"))
"""Names of layer norms' parameters in files that were converted from TensorFlow's."""
_MOST_MISSING = 1000
"""Missing tensors after which the search for more ends; `config.json` may claim any depth."""
_OF_ONE_MODEL = "config.json and weights must be of one model: save it again"


def load_huggingface(directory: paths.GivenPath) -> tuple[nn.Module, dict[str, Any]]:
    """Read a network that `transformers` or `lbopt export --format=huggingface` saved.

    The folder holds a `BertForPreTraining`, `BertForQuestionAnswering`,
    `ResNetForImageClassification` (v1.5), `EfficientNetForImageClassification`, `GPT2LMHeadModel`,
    `LlamaForCausalLM` or `Qwen3ForCausalLM`, in one or several safetensors files of fp32, fp16 or
    bf16. The sizes in `config.json` are compared with the names and shapes in the files before any
    array is allocated or read. For a scanned Transformer, pass the parameters to
    `lbopt.models.stack_layers`.

    Args:
      directory: A folder with `config.json` and `model.safetensors`, or gs://BUCKET/FOLDER. Nothing
        is downloaded from elsewhere.

    Returns:
      The Linen module, which computes in fp32 (`module.clone(dtype=...)` for another dtype), and
      its variables in fp32: `"params"`, and `"batch_stats"` for networks with batch norm.

    Raises:
      UserError: If the folder holds another architecture or only pickles, or if a tensor is
        missing, unexpected or of another shape. The error names the file or the field.
      EnvironmentProblem: If the files cannot be read, or exceed this machine's memory.

    >>> import jax, jax.numpy as jnp, tempfile
    >>> from lbopt.interchange import save_huggingface
    >>> from lbopt.models import Bert
    >>> saved = Bert(vocab_size=20, num_layers=1, width=8, num_heads=2, max_length=4)
    >>> inputs = {"input_ids": jnp.zeros((1, 4), int)}
    >>> folder = f"{tempfile.mkdtemp()}/bert"  # or one from transformers' save_pretrained
    >>> save_huggingface(folder, saved, saved.init(jax.random.key(0), inputs, train=False))
    >>> model, variables = load_huggingface(folder)
    >>> model.clone(dtype=jnp.bfloat16).width
    8

    Note:
      EfficientNet's `batch_norm_momentum` has TensorFlow's meaning (0.99), which its authors used.
      Its `stochastic_depth_rate` is `drop_connect_rate`, but lbopt drops whole examples, as the
      paper says, where `transformers` drops elements.
    """
    folder = paths.readable(directory, "directory")
    config = _read_config(folder)
    with errors.under(f"{folder / 'config.json'}: "):
        family = _family_of(config)
        module = family.module(config)

    entries = _canonical(_files.headers(_files.weight_files(folder)), family)
    tensors = _checked(entries, family, module, config, folder)

    flat = {}
    for name, array in _files.read_floats({name: entries[name] for name in tensors}):
        flat[tensors[name].ours] = jnp.asarray(tensors[name].layout.to_ours(array))
    return module, _names.unflatten({tensor.ours: flat[tensor.ours] for tensor in tensors.values()})


def save_huggingface(
    directory: paths.GivenPath,
    module: nn.Module,
    variables: Mapping[str, types.PyTree],
    image_size: int | None = None,
    metadata: Mapping[str, str] | None = None,
    field: str = "directory",
    beside: Mapping[str, str] | None = None,
    class_names: Sequence[str] = (),
) -> None:
    """Write a folder that `transformers`' `from_pretrained` and `load_huggingface` read.

    Args:
      directory: A new or empty folder, which appears only when it is complete; or
        gs://BUCKET/FOLDER, where `config.json` appears last.
      module: A Bert or a DecoderLM (scanned or not), a ResNet with a 7 x 7 stem, or an
        EfficientNet. A Bert's `readout_scale` is multiplied into its last norm, `prediction_norm`,
        and the scales of a DecoderLM into the parameters before them.
      variables: The module's parameters and batch statistics.
      image_size: Side of the images in pixels, on which an EfficientNet's padding depends.
      metadata: Strings for the header of the safetensors file.
      field: The name of `directory` in messages.
      beside: Texts of further files, by their names.
      class_names: Names of an image classifier's classes; () for LABEL_0, LABEL_1 and so on.

    Raises:
      UserError: If the folder is not new, if `transformers` has no such network, or if the names
        are not one for each class.
      EnvironmentProblem: If the folder cannot be written.

    >>> import jax, lbopt, os, tempfile
    >>> from lbopt.models import Bert
    >>> model = Bert(vocab_size=20, num_layers=1, width=8, num_heads=2, max_length=4)
    >>> inputs = {"input_ids": np.zeros((1, 4), int)}
    >>> shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), inputs, train=False))
    >>> variables = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    >>> folder = f"{tempfile.mkdtemp()}/bert"
    >>> save_huggingface(folder, model, variables)
    >>> sorted(os.listdir(folder))
    ['config.json', 'model.safetensors']
    >>> lbopt.load_huggingface(folder)[0].width
    8
    """
    _folders.require_new_folder(directory, field)
    family = next((family for family in FAMILIES if family.describes(module)), None)
    if family is None:
        fix = "transformers has no such network; use format safetensors"
        raise UserError("module", type(module).__name__, fix, code="choice")

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
    if class_names and "id2label" in described:
        config |= _json_fields.labels(len(described["id2label"]), class_names)
    # All checks come before the folder is made, so that a refused network leaves nothing behind.
    arrays = _to_theirs(family, module, config, variables)

    with _folders.new_folder(directory, field) as folder:
        _files.write(folder / _files.WEIGHTS_FILE, arrays, {**(metadata or {}), "format": "pt"})
        _folders.write_json(folder / "config.json", config)
        for name, text in (beside or {}).items():
            (folder / name).write_text(text, "utf-8")


def _to_theirs(
    family: Family,
    module: nn.Module,
    config: Mapping[str, Any],
    variables: Mapping[str, types.PyTree],
) -> dict[str, np.ndarray]:
    """Return the arrays of a network by their names in PyTorch, checked against the module."""
    given = _names.flatten(variables)
    wanted = {
        tensor.ours: tensor
        for tensor in _names.tensors(family.table, family.layers(module, config))
    }
    for name in sorted(wanted.keys() ^ given.keys()):
        fix = "it is missing; give all collections of this module"
        require(name in given, "variables", name, fix, code="missing")
        fix = "this module has no such variable; give the variables that belong to it"
        require(name in wanted, "variables", name, fix, code="unused")

    arrays = {}
    for ours, tensor in sorted(wanted.items()):
        shape = given[ours].shape
        fix = f"the module has {tensor.shape}; give the variables that belong to it"
        require(shape == tensor.shape, f"variables[{ours!r}].shape", shape, fix, code="mismatch")
        array = np.asarray(given[ours], np.float32)
        factor = family.factor(module, ours)
        scaled = array if factor == 1 else array * np.float32(factor)
        arrays[tensor.theirs] = tensor.layout.to_theirs(scaled)
        # PyTorch's batch norm counts batches, and `from_pretrained` expects the count.
        if tensor.theirs.endswith(".running_mean"):
            counter = tensor.theirs.removesuffix("running_mean") + "num_batches_tracked"
            arrays[counter] = np.zeros((), np.int64)
    return _joined(arrays, family)


def _joined(arrays: Mapping[str, np.ndarray], family: Family) -> dict[str, np.ndarray]:
    """Return the arrays of a network with its joined tensors made of their parts."""
    joined: dict[str, list[np.ndarray]] = {}
    for part in family.parts:
        for name, array in arrays.items():
            if _whole_name(name, family) != name and f".{part}." in name:
                joined.setdefault(_whole_name(name, family), []).append(array)
    kept = {name: x for name, x in arrays.items() if _whole_name(name, family) == name}
    return kept | {name: np.concatenate(parts, axis=-1) for name, parts in joined.items()}


def _whole_name(name: str, family: Family) -> str:
    """Return the name of the tensor that holds a part, or the name itself if it is no part."""
    for part in family.parts:
        whole = name.replace(f".{part}.", ".")
        if whole != name and re.fullmatch(family.joined, whole):
            return whole
    return name


def _read_config(folder: pathlib.Path) -> dict[str, Any]:
    fix = "no such folder; give one with config.json and model.safetensors"
    exists = _files.path_exists(folder) and folder.is_dir()
    require(exists, "directory", str(folder), fix, code="missing")
    file = folder / "config.json"
    fix = "it has no config.json; give a folder that save_pretrained wrote"
    require(_files.path_exists(file), "directory", str(folder), fix, code="missing")
    return _files.read_json(file)


def _family_of(config: Mapping[str, Any]) -> Family:
    given = config.get("architectures")
    names_given = given if isinstance(given, list) else []
    found = [
        family
        for name in names_given
        for family in FAMILIES
        if name in (family.architecture, *family.also) and family.applies(config)
    ]

    readable = ", ".join(dict.fromkeys(family.architecture for family in FAMILIES))
    fix = f"lbopt does not read this architecture; give a folder of one of {readable}"
    require(len(found) == 1, "architectures", given, fix, code="choice")
    model_type = config.get("model_type")
    require(model_type == found[0].model_type, "model_type", model_type, fix, code="choice")
    return found[0]


def _canonical(entries: Iterable[Entry], family: Family) -> dict[str, Entry]:
    """Return the tensors of a network by their current names, without those that are ignored.

    A tied tensor that is saved alone stands under the name of the tensor that it is tied to.
    """
    found: dict[str, Entry] = {}
    for entry in entries:
        name = entry.name
        for former, now in (*FORMER_NAMES, *family.former):
            name = re.sub(former, now, name)
        if not any(re.fullmatch(pattern, name) for pattern in family.ignored):
            if name in found:
                raise UserError(
                    f"{entry.file}: {_shown([entry.name])}",
                    NO_VALUE,
                    f"{_shown([found[name].name])} is in {found[name].file.name} too; keep the "
                    "right one of them",
                    code="conflict",
                )
            found[name] = entry
    for alias, source in family.tied.items():
        if alias in found and source not in found:
            found[source] = found.pop(alias)
    return _with_parts(found, family) if family.joined else found


def _with_parts(entries: Mapping[str, Entry], family: Family) -> dict[str, Entry]:
    """Return the tensors with the parts of each joined one in its place."""
    found = {}
    count = len(family.parts)
    for name, entry in entries.items():
        match = re.fullmatch(family.joined, name)
        if match is None:
            found[name] = entry
            continue
        *others, last = entry.shape or (0,)
        even = last % count == 0
        shape = (*others, last // count) if even else entry.shape
        for number, part in enumerate(family.parts):
            named = f"{match[1]}.{part}.{match[2]}"
            found[named] = entry._replace(shape=shape, part=(number, count))
    return found


def _checked(
    entries: dict[str, Entry],
    family: Family,
    module: nn.Module,
    config: Mapping[str, Any],
    folder: pathlib.Path,
) -> dict[str, Tensor]:
    """Return the network's tensors by their names in the files, after all checks.

    Tied tensors are removed from `entries` once they are known to be equal. The search for missing
    tensors is bounded by the number of tensors in the files, whatever depth `config.json` claims.

    Raises:
      UserError: If a tensor is missing, unexpected, or of another shape or dtype.
      EnvironmentProblem: If the network exceeds this machine's memory.
    """
    _check_vocabulary(entries, config, family)

    described = _names.tensors(family.table, family.layers(module, config))
    looked_for = itertools.islice(described, len(entries) + _MOST_MISSING)
    found: dict[str, Tensor] = {tensor.theirs: tensor for tensor in looked_for}
    missing = [tensor for name, tensor in found.items() if name not in entries]
    if missing:
        raise _missing(missing, len(found), family, config, folder)

    shapes = {name: tensor.layout.their_shape(tensor.shape) for name, tensor in found.items()}
    # Files may also hold a copy of a tied tensor, under its own name.
    shapes |= {alias: shapes[source] for alias, source in family.tied.items() if alias in entries}
    unexpected = sorted(entries.keys() - shapes.keys())
    if unexpected:
        raise UserError(
            str(folder),
            NO_VALUE,
            f"unexpected: {_shown(unexpected)} ({len(unexpected)} tensors that "
            f"{family.architecture} of this config.json does not have); {_OF_ONE_MODEL}",
            code="mismatch",
        )

    for name, shape in shapes.items():
        _check_tensor(entries[name], shape, config)
    _check_memory(shapes.values(), folder)
    _check_tied(entries, family)
    return found


def _missing(
    missing: list[Tensor],
    num_looked_for: int,
    family: Family,
    config: Mapping[str, Any],
    folder: pathlib.Path,
) -> UserError:
    """Return the error for missing tensors, with the fields that say how many layers there are."""
    count = f"{len(missing)} of {num_looked_for}"
    if len(missing) >= _MOST_MISSING:
        count = f"{_MOST_MISSING} or more of the"
    values = _values(missing[0].because, config)
    names = sorted({_whole_name(tensor.theirs, family) for tensor in missing})
    return UserError(
        str(folder),
        NO_VALUE,
        f"missing: {tree.some(names)} ({count} tensors of "
        f"{family.architecture}{values and ' with '}{values}); {_OF_ONE_MODEL}",
        code="missing",
    )


def _check_vocabulary(
    entries: Mapping[str, Entry], config: Mapping[str, Any], family: Family
) -> None:
    """Check `vocab_size` first: it is what users change, and has a remedy of its own."""
    name, default = family.words or ("", 0)
    words = entries.get(name)
    if words is None or not words.shape:
        return
    size = _json_fields.get(config, "vocab_size", default, _json_fields.COUNT)
    require(
        words.shape[0] == size,
        f"{words.file.parent / 'config.json'}: vocab_size",
        size,
        f"the word embeddings in {words.file} have {words.shape[0]} rows; set vocab_size to that, "
        "or give the weights that belong to it",
        code="mismatch",
    )


def _check_tensor(entry: Entry, shape: tuple[int, ...], config: Mapping[str, Any]) -> None:
    if entry.shape != shape:
        same_rank = len(entry.shape) == len(shape)
        wrong = [
            length for i, length in enumerate(shape) if not same_rank or entry.shape[i] != length
        ]
        values = _values(
            (name for length in wrong for name in getattr(length, "fields", ())), config
        )
        raise UserError(
            f"{entry.file}: shape of {entry.name}",
            entry.shape,
            f"config.json says {shape}{values and ' by '}{values}; {_OF_ONE_MODEL}",
            code="mismatch",
        )
    fix = f"weights are {', '.join(_files.FLOATS)}; save the model again in one of them"
    field = f"{entry.file}: dtype of {entry.name}"
    require(entry.dtype in _files.FLOATS, field, entry.dtype, fix, code="type")


def _check_memory(shapes: Iterable[tuple[int, ...]], folder: pathlib.Path) -> None:
    """Raise `EnvironmentProblem` if the arrays exceed this machine's memory.

    The size of the files says nothing: a sparse file takes no disk for its zeros.
    """
    needed = 4 * sum(map(math.prod, shapes))
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise EnvironmentProblem(
            str(folder),
            NO_VALUE,
            f"its parameters take {needed / 1e9:.0f} GB in fp32, and this machine has "
            f"{available / 1e9:.0f} GB of memory; use a larger machine, or the weights of a "
            "smaller model",
            code="resource",
        )


def _values(field_names: Iterable[str], config: Mapping[str, Any]) -> str:
    """Return fields of `config.json` with their values, in words."""
    return ", ".join(
        f"{name} = {brief(config[name], 60)}" if name in config else f"{name} left out"
        for name in dict.fromkeys(field_names)
    )


def _shown(tensor_names: Iterable[str]) -> str:
    """Return the first few names of tensors in files; such names can be any text."""
    return tree.some([one_line(name[:100]) for name in tensor_names])


def _check_tied(entries: dict[str, Entry], family: Family) -> None:
    for alias, source in family.tied.items():
        if alias in entries:
            pair = dict(_files.read_floats({name: entries[name] for name in (alias, source)}))
            entry = entries.pop(alias)
            require(
                np.array_equal(pair[alias], pair[source]),
                f"{entry.file}: {alias}",
                NO_VALUE,
                f"it differs from {source}, and lbopt's network has one array for both; tie them "
                "and save again",
                code="mismatch",
            )
