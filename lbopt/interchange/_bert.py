"""BERT in lbopt and in `transformers`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lbopt import types
from lbopt.errors import require, require_choice
from lbopt.interchange import _json_fields, _layouts
from lbopt.interchange._family import Family
from lbopt.interchange._json_fields import COUNT, POSITIVE, RATE, Field
from lbopt.interchange._names import (
    DENSE,
    EMBEDDING,
    LAYER_NORM,
    TURNED_DENSE,
    Described,
    LayerNames,
    Leaf,
)
from lbopt.models import Bert

_THEIR_LAYER = "bert.encoder.layer.{i}"
ENCODER = (
    LayerNames("word_embedding", "bert.embeddings.word_embeddings", EMBEDDING),
    LayerNames("position_embedding", "bert.embeddings.position_embeddings", EMBEDDING),
    LayerNames("segment_embedding", "bert.embeddings.token_type_embeddings", EMBEDDING),
    LayerNames("embedding_norm", "bert.embeddings.LayerNorm", LAYER_NORM),
    LayerNames("layer{i}/query", f"{_THEIR_LAYER}.attention.self.query", TURNED_DENSE),
    LayerNames("layer{i}/key", f"{_THEIR_LAYER}.attention.self.key", TURNED_DENSE),
    LayerNames("layer{i}/value", f"{_THEIR_LAYER}.attention.self.value", TURNED_DENSE),
    LayerNames("layer{i}/attention_output", f"{_THEIR_LAYER}.attention.output.dense", DENSE),
    LayerNames("layer{i}/attention_norm", f"{_THEIR_LAYER}.attention.output.LayerNorm", LAYER_NORM),
    LayerNames("layer{i}/inner", f"{_THEIR_LAYER}.intermediate.dense", DENSE),
    LayerNames("layer{i}/output", f"{_THEIR_LAYER}.output.dense", DENSE),
    LayerNames("layer{i}/output_norm", f"{_THEIR_LAYER}.output.LayerNorm", LAYER_NORM),
)
PRETRAINING = (
    LayerNames("pooler", "bert.pooler.dense", DENSE),
    LayerNames("prediction_dense", "cls.predictions.transform.dense", DENSE),
    LayerNames("prediction_norm", "cls.predictions.transform.LayerNorm", LAYER_NORM),
    LayerNames(
        "",
        "cls.predictions",
        (Leaf("params", "prediction_bias", "bias", _layouts.SAME, is_vector=True),),
    ),
    LayerNames("next_sentence", "cls.seq_relationship", DENSE),
)
QUESTION_ANSWERING = (LayerNames("span", "qa_outputs", DENSE),)

FIELDS = (
    Field("vocab_size", "vocab_size", 30522, COUNT),
    Field("num_hidden_layers", "num_layers", 12, COUNT),
    Field("hidden_size", "width", 768, COUNT),
    Field("num_attention_heads", "num_heads", 12, COUNT),
    Field("intermediate_size", "inner_width", 3072, COUNT),
    Field("max_position_embeddings", "max_length", 512, COUNT),
    Field("type_vocab_size", "num_segments", 2, COUNT),
    Field("hidden_dropout_prob", "dropout_rate", 0.1, RATE),
    Field("attention_probs_dropout_prob", "attention_dropout_rate", 0.1, RATE),
    Field("layer_norm_eps", "epsilon", 1e-12, POSITIVE),
)
FIXED = {
    "is_decoder": False,
    "add_cross_attention": False,
    "position_embedding_type": "absolute",
    "tie_word_embeddings": True,
}
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Activations by their names in `transformers`; of two names for one, the first is written."""


def _module(config: Mapping[str, Any], head: str) -> Bert:
    _json_fields.require_fixed(config, FIXED)
    activation = config.get("hidden_act", "gelu")
    require_choice("hidden_act", activation, ACTIVATIONS)
    attributes = _json_fields.read(FIELDS, config)
    width = attributes["width"]
    heads = attributes["num_heads"]
    require(
        width % heads == 0,
        "num_attention_heads",
        heads,
        f"give a number that divides hidden_size, which is {width}",
        code="conflict",
    )
    return Bert(head=head, activation=ACTIVATIONS[activation], **attributes)


def _config(module: Bert, params: types.Params, image_size: int | None) -> dict[str, Any]:
    del params, image_size
    activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == module.activation)
    config = {
        **_json_fields.write(FIELDS, module),
        **FIXED,
        "hidden_act": activation,
        "pad_token_id": 0,
    }
    del config["position_embedding_type"]  # newer `transformers` lack the field: one type is left
    return {**config, "intermediate_size": module.inner_width or 4 * module.width}


def _layers(module: Bert, config: Mapping[str, Any]) -> Iterator[Described]:
    del config
    wide = module.clone(inner_width=module.inner_width or 4 * module.width)
    # Each size knows its field of config.json, so that an error can name the field at fault.
    size = _json_fields.sizes(FIELDS, wide)
    vocabulary = size["vocab_size"]
    width = size["width"]
    inner = size["inner_width"]

    yield Described("word_embedding", (vocabulary, width))
    yield Described("position_embedding", (size["max_length"], width))
    yield Described("segment_embedding", (size["num_segments"], width))
    yield Described("embedding_norm", (width,))

    for number in range(module.num_layers):
        for name, shape in (
            ("query", (width, width)),
            ("key", (width, width)),
            ("value", (width, width)),
            ("attention_output", (width, width)),
            ("attention_norm", (width,)),
            ("inner", (width, inner)),
            ("output", (inner, width)),
            ("output_norm", (width,)),
        ):
            yield Described(f"layer{number}/{name}", shape, size["num_layers"].fields)

    if module.head == "question_answering":
        yield Described("span", (width, 2))
        return
    yield Described("pooler", (width, width))
    yield Described("prediction_dense", (width, width))
    yield Described("prediction_norm", (width,))
    yield Described("", (vocabulary,))
    yield Described("next_sentence", (width, 2))


def _factor(module: Bert, name: str) -> float:
    """Return a variable's multiplier: the decoder is linear in what the last norm gives it."""
    return module.readout_scale if name.startswith("params/prediction_norm/") else 1.0


def _family(architecture: str, head: str, table: tuple[LayerNames, ...], **options: Any) -> Family:
    return Family(
        architecture,
        "bert",
        ENCODER + table,
        describes=lambda module: isinstance(module, Bert) and module.head == head,
        module=lambda config: _module(config, head),
        config=_config,
        layers=_layers,
        factor=_factor,
        words=("bert.embeddings.word_embeddings.weight", 30522),
        **options,
    )


PRETRAINING_FAMILY = _family(
    "BertForPreTraining",
    "pretraining",
    PRETRAINING,
    # google-bert's folders say BertForMaskedLM and hold both heads; others of that class lack the
    # next-sentence head and are refused for its missing tensors.
    also=("BertForMaskedLM",),
    tied={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    ignored=(r"bert\.embeddings\.position_ids",),
)
QUESTION_ANSWERING_FAMILY = _family(
    "BertForQuestionAnswering",
    "question_answering",
    QUESTION_ANSWERING,
    # Older `transformers` saved a pooler that does not affect the answers.
    ignored=(r"bert\.embeddings\.position_ids", r"bert\.pooler\.dense\.(weight|bias)"),
)
