"""Initial parameters of a run that another run, or another program, has trained."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NotRequired, TypedDict, cast

import jax
import numpy as np

from lbopt import _typed_json, errors, paths, tree, types
from lbopt._regular import read_regular
from lbopt.config import TRANSFORMERS, ModelConfig, TrainConfig, naming
from lbopt.data.text import (
    VOCABULARY_FILE,
    Normalization,
    TextNormalization,
    Vocabulary,
    find_vocabulary,
    pieces_of,
    read_vocabulary,
    stated_normalization,
)
from lbopt.errors import EnvironmentProblem, UserError, brief, require
from lbopt.interchange import (
    load_huggingface,
    load_safetensors,
    path_exists,
    read_safetensors_metadata,
)
from lbopt.models import (
    BERT_SIZES,
    DECODER_SIZES,
    DecoderLM,
    bert_layer_names,
    stack_layers,
    unstack_layers,
)
from lbopt.parallel import TrainState
from lbopt.recipes import _networks
from lbopt.train import read_variables
from lbopt.workdir import absolute_workdir, checkpoint_root, local_workdir, read_config

TEXT_NORMALIZATION_KEY = "text_normalization"
"""Key in the metadata of `lbopt export`: how text was normalized before it was tokenized."""
_HEADS = {
    "bert": r"^(span|pooler|next_sentence|prediction)",
    "efficientnet": r"^head/",
    "resnet": r"^head/",
}
"""Model -> paths of the parameters of its task, which may be missing or have another shape."""
_POSITIONS = "position_embedding/embedding"
"""Parameter of a Transformer with a row for each of `model.max_length` positions."""


@dataclasses.dataclass(frozen=True)
class StoredInitialValues:
    """Parameters and model state from `config.init_from`, read when they are needed.

    Attributes:
      place: A workdir, a file or a folder, see `read`.
      model: The model of the run that starts from them.
    """

    place: str
    model: ModelConfig

    def check(self, shapes: TrainState, vocabulary: Vocabulary) -> None:
        """Raise `UserError` unless the values fit a state of these shapes, and the text."""
        with naming("config", TrainConfig):
            check_text(self.place, vocabulary)
        self.read(shapes)

    def read(self, shapes: TrainState) -> tuple[types.Params, types.ModelState]:
        """Return parameters and model state, with None for leaves that start fresh."""
        with naming("config", TrainConfig):
            found = read(self.place, self.model)
            params, _ = merged(shapes.params, found["params"], self.model, self.place)
            stats = {name: found[name] for name in shapes.model_state if name in found}
            known = {name: shapes.model_state[name] for name in stats}
            return params, merged(known, stats, self.model, self.place)[0]


def of_config(config: TrainConfig) -> StoredInitialValues | None:
    """Return the values that a run starts from; None for fresh ones."""
    return None if config.init_from is None else StoredInitialValues(config.init_from, config.model)


def read(place: str, model: ModelConfig) -> dict[str, Any]:
    """Read variables: {"params": ..., "batch_stats": ...}.

    Args:
      place: A workdir, a safetensors file of `lbopt export`, or a folder of Transformers; on this
        machine or in a bucket.
      model: The network that starts from them. The layers of a Transformer are returned stacked if
        it has them so, and parameters make up for other factors of the output, of branches or of
        attention.

    Raises:
      UserError: If the place is none of these, or if its network has another activation, which
        shapes do not show.
      EnvironmentProblem: If it cannot be read.
    """
    with opened(place) as path:
        variables, stated = _read(path, place)
    fix = "no parameters are in it; give a file of lbopt export or a workdir of lbopt train"
    require(isinstance(variables.get("params"), Mapping), "init_from", place, fix, code="missing")
    activation = stated.get("activation")
    fix = f"{brief(place)} was trained with {activation!r}, and shapes do not tell; use that"
    agrees = model.name != "bert" or activation in (None, model.activation)
    require(agrees, "model.activation", model.activation, fix, code="mismatch")
    if model.name not in TRANSFORMERS:
        return variables
    _check_form(stated, model, place)
    params = _as_decoded(variables["params"], model, stated, place)
    return {**variables, "params": _as_scanned(params, model, place)}


_UNSEEN = ("num_heads", "activation", "epsilon", "rope_theta", "rope_scaling")
"""Attributes of a decoder that the shapes of its parameters do not show."""


def _check_form(stated: Mapping[str, Any], model: ModelConfig, place: str) -> None:
    """Raise `UserError` if a decoder differs where the shapes of its parameters do not show it."""
    if model.name != "decoder_lm":
        return
    network = _stated_decoder(stated, model, place)
    if network is None:
        return
    ours = _networks.make_network(model, network.vocab_size)
    for name in _UNSEEN:
        values = [getattr(one, name) for one in (network, ours)]
        fix = f"{brief(place)} has {name} = {values[0]!r}, and this size {values[1]!r}; give the "
        fix += "size of that"
        same = values[0] == values[1]
        require(same, "model.size", model.size, fix, code="mismatch")


def _stated_decoder(stated: Mapping[str, Any], model: ModelConfig, place: str) -> DecoderLM | None:
    """Return a decoder with the attributes of `_UNSEEN` that a place states; None if it does not.

    Args:
      stated: Fields of the config of the place's network, or the network itself.
      model: The model that starts from it.
      place: The place, for messages.
    """
    if isinstance(stated.get("network"), DecoderLM):
        return stated["network"]
    if stated.get("name") != "decoder_lm" or "size" not in stated:
        return None
    size = stated["size"]
    wide = stated.get("width_coefficient")
    fix = f"its network has size {brief(size)} and width_coefficient {wide}; export it again"
    known = size in DECODER_SIZES and (wide is None or 0 < wide <= 64)
    require(known, "init_from", place, fix, code="damaged")
    own = dataclasses.replace(model, size=size, width_coefficient=wide, base_size="")
    return cast(DecoderLM, _networks.make_network(own, 1))


@contextlib.contextmanager
def opened(place: str) -> Iterator[pathlib.Path]:
    """Context manager that gives the path of `config.init_from`.

    For a workdir in a bucket it is a local copy of the workdir's small files, and for another place
    in a bucket a copy of the whole.

    Raises:
      UserError: If an address is not a folder of a bucket.
      EnvironmentProblem: If the bucket, or within the block the place, cannot be read.
    """
    with contextlib.ExitStack() as stack:
        with _naming(place):
            workdir = f"{place}/checkpoints"
            if paths.is_address(place) and not paths.exists_in_bucket(workdir, "init_from"):
                path = paths.readable(place, "init_from")
            else:
                path = absolute_workdir(stack.enter_context(local_workdir(place, write=False)))
            path_exists(path)  # or its name is too long to be looked for
        try:
            yield path
        except OSError as error:
            fix = f"it cannot be read ({error.strerror or error}); make it readable or use another"
            raise EnvironmentProblem("init_from", place, fix, code="resource") from error


@contextlib.contextmanager
def opened_folder(place: str) -> Iterator[pathlib.Path]:
    """Context manager that gives the path of the initial values, to look for their vocabulary.

    Raises:
      UserError: If nothing is there.
      EnvironmentProblem: As in `opened`.
    """
    with opened(place) as path:
        fix = (
            "nothing is there; give a workdir of lbopt train or a folder of Transformers, whose "
            "vocabulary is taken too"
        )
        require(path_exists(path), "init_from", place, fix, code="missing")
        yield path


def _as_scanned(params: types.Params, model: ModelConfig, place: str) -> types.Params:
    """Return parameters of a Transformer with its layers stacked as the model has them.

    Parameters of another network are returned unchanged.
    """
    if model.scan_layers:
        layers = [tree.by_name(params[name]) for name in bert_layer_names(params)]
        shapes = [{name: np.shape(leaf) for name, leaf in layer.items()} for layer in layers]
        count = len(layers) if shapes == shapes[:1] * len(layers) else 0
        change = stack_layers
    else:
        lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(params.get("layers"))}
        count = sum(*lengths) if len(lengths) == 1 else 0
        change = unstack_layers
    if count == 0:
        return params
    wanted = _networks.num_layers(model)
    fix = f"that has {wanted} layers, and {brief(place)} has {count}; give the size of that"
    require(count == wanted, "model.size", model.size, fix, code="mismatch")
    return change(params)


def _as_decoded(
    params: types.Params, model: ModelConfig, stated: Mapping[str, Any], place: str
) -> types.Params:
    """Return parameters of a Transformer that compute in the model what they do in their own.

    Args:
      params: The parameters.
      model: The model that starts from them.
      stated: Fields of their own network's config that are known.
      place: Place of the parameters, for messages.
    """
    base_size = stated.get("base_size") or ""
    sizes = BERT_SIZES if model.name == "bert" else DECODER_SIZES
    fix = f"its network takes the numbers of {brief(base_size)}, which is no size; export it again"
    require(base_size in ("", *sizes), "init_from", place, fix, code="damaged")
    own = dataclasses.replace(model, base_size=base_size)
    if model.name == "decoder_lm":
        theirs, ours = (_networks.plain_factors(one, params) for one in (own, model))
        return jax.tree.map(lambda x, a, b: _scaled(x, a / b), params, theirs, ours)

    factor = _networks.readout_scale(own) / _networks.readout_scale(model)
    if factor == 1 or "prediction_norm" not in params:
        return params
    # The decoder is linear in what this norm gives it.
    norm = jax.tree.map(lambda x: _scaled(x, factor), params["prediction_norm"])
    return {**params, "prediction_norm": norm}


def _scaled(x: Any, factor: float) -> Any:
    return x if factor == 1 else (x * factor).astype(x.dtype)


def _read(path: pathlib.Path, place: str) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return variables, and the fields of their network's config that are known."""
    if path.is_file():
        with _naming(place):
            variables, metadata = load_safetensors(path)
        return variables, _exported_model(metadata.get("model", "{}"), place)
    if (checkpoint_root(path) / "checkpoints").is_dir():
        with _naming(place):
            saved = read_config(path, "train") or {}
            variables = read_variables(path)
        return variables, saved.get("config", {}).get("model", {})
    fix = "give a workdir of lbopt train, a file of lbopt export, or a folder of Transformers"
    require((path / "config.json").is_file(), "init_from", place, fix, code="missing")
    with _naming(place):
        network, variables = load_huggingface(path)
    stated = {"activation": getattr(network, "activation", None), "network": network}
    return dict(variables), stated


def check_text(place: str, vocabulary: Vocabulary) -> None:
    """Raise `UserError` if the initial values are known to belong to another tokenization.

    Args:
      place: Place of the initial values, as in `read`.
      vocabulary: Vocabulary of the run's data.
    """
    with opened(place) as path:
        if vocabulary.pieces and path.is_dir():
            _check_pieces(path, place, vocabulary)

        if (normalization := vocabulary.normalization) is None:
            return
        with _naming(place):
            stated, source = _stated_text(path)

        # Nothing is known of a tokenization that no file states.
        known = TextNormalization(**stated)
        names = known.differences(normalization) if source else []
        if names:
            theirs, ours = (
                json.dumps(getattr(one.explicit(), names[0])) for one in (known, normalization)
            )
            fix = (
                f"{{source}} says {names[0]} = {theirs}, and the data have {ours}; cut text as the "
                "network knows it: prepare it with this vocabulary, or leave {lowercase} and "
                "{vocab_file} None"
            )
            also = {"lowercase": "data.lowercase", "vocab_file": "data.vocab_file"}
            files = {"source": source}
            raise UserError("init_from", place, fix, code="mismatch", also=also, files=files)


def _check_pieces(path: pathlib.Path, place: str, vocabulary: Vocabulary) -> None:
    """Raise `UserError` if a token has another number in the vocabulary of the initial values.

    A token [unused...] of that vocabulary may stand for any other.
    """
    file = find_vocabulary(path)
    by_bytes = bool(vocabulary.tokenizer_json)
    their_bytes = by_bytes
    theirs: Sequence[str] = []
    if file is not None:
        # lbopt cannot read it: nothing to compare with
        with contextlib.suppress(UserError, OSError, ValueError, KeyError, TypeError):
            their_bytes = _has_byte_tokens(file)
            theirs = pieces_of(read_regular(file).decode()) if by_bytes else read_vocabulary(file)
    if their_bytes != by_bytes:
        those = "are bytes, and those of the data are not"
        if by_bytes:
            those = "are not bytes, and those of the data are"
        fix = f"its tokens ({{file}}) {those}; start from a network that learned those of the data"
        raise UserError("init_from", place, fix, code="mismatch", files={"file": file})

    pairs = list(zip(theirs, vocabulary.pieces, strict=False))
    wrong = [
        number
        for number, (a, b) in enumerate(pairs)
        if a != b and not re.fullmatch(r"\[unused\d+\]", a)
    ]
    if wrong:
        words = " and the data have ".join(map(brief, pairs[wrong[0]]))
        fix = (
            f"token {wrong[0]} is {words} ({len(wrong)} differ); prepare the data with {{file}}, "
            "or start from a network that learned their vocabulary"
        )
        raise UserError("init_from", place, fix, code="mismatch", files={"file": file})


def _has_byte_tokens(vocabulary: pathlib.Path) -> bool:
    """Return whether the tokens of a vocab.txt or a tokenizer.json are sequences of bytes."""
    if vocabulary.name == VOCABULARY_FILE:
        return False
    decoder = _typed_json.read_file(vocabulary, dict).get("decoder")
    return isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"


def _stated_text(path: pathlib.Path) -> tuple[dict[str, Any], pathlib.Path | None]:
    if not path.is_file():
        return stated_normalization(path / VOCABULARY_FILE)
    stated = read_safetensors_metadata(path).get(TEXT_NORMALIZATION_KEY)
    if stated is None:
        return {}, None
    try:
        return {**_typed_json.decode(stated.encode(), Normalization)}, path
    except ValueError as error:
        fix = f"{TEXT_NORMALIZATION_KEY} in its metadata: {error}; export it again"
        raise UserError("init_from", str(path), fix, code="damaged") from error


class _ExportedModel(TypedDict):
    name: NotRequired[str]
    activation: NotRequired[str | None]
    size: NotRequired[str]
    base_size: NotRequired[str]
    width_coefficient: NotRequired[float | None]


def _exported_model(model: str, place: str) -> Mapping[str, Any]:
    """Return the config of the network in the metadata of `lbopt export`."""
    try:
        return _typed_json.decode(model.encode(), _ExportedModel)
    except ValueError as error:
        fix = f"model in its metadata: {error}; export it again"
        raise UserError("init_from", place, fix, code="damaged") from error


@contextlib.contextmanager
def _naming(place: str) -> Iterator[None]:
    """Let errors about a workdir, a file or a folder name `init_from`."""
    # A workdir is the place itself, so that its reason needs no name before it.
    with errors.about("init_from", place), errors.about("init_from", place, "workdir"):
        yield


def merged(
    ours: types.PyTree, theirs: Mapping[str, Any], model: ModelConfig, place: str
) -> tuple[types.PyTree, list]:
    """Put arrays of a file into a tree of parameters, or of the model's state.

    Args:
      ours: Arrays or shapes; the result has their structure.
      theirs: The arrays of the file.
      model: The config of the model; its heads may be missing in the file.
      place: Name of the file, for messages.

    Returns:
      The tree, with None where nothing was read; and the names of these leaves.

    Raises:
      UserError: Naming the first parameter that is missing or of another shape, or that a decoder
        lacks.
    """
    read_leaves = dict(zip(tree.leaf_names(theirs), jax.tree.leaves(theirs), strict=True))
    heads = re.compile(_HEADS.get(model.name, r"^$"))
    fresh: list[str] = []

    def choose(name: str, leaf: Any) -> Any:
        found = read_leaves.get(name)
        if found is not None and np.shape(found) == tuple(leaf.shape):
            return np.asarray(found, leaf.dtype)
        if heads.search(name):
            fresh.append(name)
            return None
        what = "is not in it"
        fix = "give a checkpoint of the model that {model} describes"
        also = {"model": "model"}
        if found is not None:
            what = f"is {np.shape(found)} in it and {tuple(leaf.shape)} here"
            if name == _POSITIONS and np.shape(found)[1:] == tuple(leaf.shape)[1:]:
                fix = f"give {{max_length}} = {np.shape(found)[0]}"
                also = {"max_length": "model.max_length"}
        reason = f"parameter {name} {what}; {fix}"
        raise UserError("init_from", place, reason, code="mismatch", also=also)

    chosen = tree.map_with_name(choose, ours)
    if model.name == "decoder_lm":
        own = set(tree.leaf_names(ours))
        _check_no_more([name for name in read_leaves if name not in own], model, place)
    return chosen, fresh


def _check_no_more(names: Sequence[str], model: ModelConfig, place: str) -> None:
    """Raise `UserError` if a decoder lacks parameters of a file, without which it is another one.

    Args:
      names: Paths of the parameters that it lacks.
      model: The config of the decoder.
      place: Name of the file.
    """
    for name in names:
        reason = f"{brief(place)} has parameter {name}, which this network lacks"
        if re.search(r"(^|/)(query|key)_norm/", name):
            fix = f"{reason}; give True"
            raise UserError("model.qk_norm", model.qk_norm, fix, code="mismatch")
        if name.startswith("head/"):
            fix = f"{reason}; give False"
            raise UserError("model.tied", model.tied, fix, code="mismatch")
        fix = f"it has parameter {name}, which this network lacks; give a checkpoint of the model "
        fix += "that {model} describes"
        raise UserError("init_from", place, fix, code="mismatch", also=["model"])
