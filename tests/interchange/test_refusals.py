"""Refusals of folders: one line with the file or field, its value and the fix."""

import fcntl
import json
import math
import os
import pickle

import numpy as np
import pytest
import torch_networks as torch_side
import transformers
from refusal import ANY, refused, troubled
from safetensors.numpy import load_file, save_file

import lbopt
from lbopt.errors import NO_VALUE
from lbopt.interchange import new_folder, require_new_folder, save_huggingface, save_safetensors
from lbopt.models import CNN, Bert, DecoderLM, EfficientNet, ResNet


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Return {name: folder}; tests must not change the folders."""
    tiny = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }

    models = {
        "bert": torch_side.bert(transformers.BertForPreTraining, vocab_size=20, **tiny),
        "answers": torch_side.bert(transformers.BertForQuestionAnswering, vocab_size=20, **tiny),
        "resnet": torch_side.resnet(depths=[1, 1], hidden_sizes=[8, 16], embedding_size=8),
        "efficientnet": torch_side.efficientnet(
            width_coefficient=0.25, depth_coefficient=0.1, hidden_dim=320
        ),
        "roberta": transformers.RobertaForMaskedLM(
            transformers.RobertaConfig(vocab_size=20, **tiny)
        ),
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=20, **tiny)),
        "qwen3": transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(vocab_size=20, head_dim=4, num_key_value_heads=2, **tiny)
        ),
        "gpt2": transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=16)
        ),
    }

    root = tmp_path_factory.mktemp("saved")
    for name, model in models.items():
        model.save_pretrained(root / name)
    return {name: root / name for name in models}


@pytest.fixture
def folder(saved, tmp_path):
    """Return a function name -> a copy to damage."""

    def copy(name):
        (tmp_path / "copy").mkdir()
        for file in saved[name].iterdir():
            (tmp_path / "copy" / file.name).write_bytes(file.read_bytes())
        return tmp_path / "copy"

    return copy


def refusal(call, field, value=ANY, code=ANY):
    """Return the reason of a refusal of this field, value and code; check its length."""
    with refused(field, value, code) as caught:
        call()
    assert len(str(caught.value)) < 500
    return caught.value.reason


# The folder, the field of config.json, its new value, and the kind of fault.
FIELDS = {
    "no architectures": ("bert", "architectures", None, "choice"),
    "architectures is text": ("bert", "architectures", "Bert", "choice"),
    "a head we lack": ("bert", "architectures", ["BertForTokenClassification"], "choice"),
    "another model type": ("bert", "model_type", "roberta", "choice"),
    "no model type": ("resnet", "model_type", None, "choice"),
    "a decoder": ("bert", "is_decoder", True, "choice"),
    "cross attention": ("bert", "add_cross_attention", True, "choice"),
    "relative positions": ("bert", "position_embedding_type", "relative_key", "choice"),
    "an untied decoder": ("bert", "tie_word_embeddings", False, "choice"),
    "an unknown activation": ("bert", "hidden_act", "gelu_fast", "choice"),
    "width as text": ("bert", "hidden_size", "8", "value"),
    "a negative depth": ("bert", "num_hidden_layers", -1, "value"),
    "heads that do not divide": ("bert", "num_attention_heads", 3, "conflict"),
    "a rate of one": ("bert", "hidden_dropout_prob", 1.0, "value"),
    "no epsilon": ("bert", "layer_norm_eps", 0, "value"),
    "a larger vocabulary": ("bert", "vocab_size", 24, "mismatch"),
    "a smaller vocabulary": ("answers", "vocab_size", 10, "mismatch"),
    "stride in the 1 x 1": ("resnet", "downsample_in_bottleneck", True, "choice"),
    "stride in the first stage": ("resnet", "downsample_in_first_stage", True, "choice"),
    "a ResNet with gelu": ("resnet", "hidden_act", "gelu", "choice"),
    "an unknown block": ("resnet", "layer_type", "basics", "choice"),
    "stages that disagree": ("resnet", "depths", [1, 1, 1], "conflict"),
    "no stages": ("resnet", "depths", [], "value"),
    "no labels": ("resnet", "id2label", [], "type"),
    "max pooling": ("efficientnet", "pooling_type", "max", "choice"),
    "an EfficientNet with relu": ("efficientnet", "hidden_act", "relu", "choice"),
    "an even kernel": ("efficientnet", "kernel_sizes", [4] * 7, "value"),
    "a stride of 3": ("efficientnet", "strides", [3] * 7, "value"),
    "too few strides": ("efficientnet", "strides", [1, 2], "conflict"),
    "a padding list of text": ("efficientnet", "depthwise_padding", "5", "value"),
    "biases in attention": ("llama", "attention_bias", True, "choice"),
    "biases beside gates": ("llama", "mlp_bias", True, "choice"),
    "a Llama with gelu": ("llama", "hidden_act", "gelu", "choice"),
    "tied by a word": ("llama", "tie_word_embeddings", "yes", "type"),
    "keys for no whole group": ("llama", "num_key_value_heads", 3, "conflict"),
    "odd heads": ("llama", "head_dim", 3, "value"),
    "a window": ("qwen3", "use_sliding_window", True, "choice"),
    "a layer with a window": ("qwen3", "layer_types", ["sliding_attention"], "choice"),
    "a layer without a name": ("llama", "layer_types", [{}], "choice"),
    "endless waves": ("llama", "rope_theta", math.inf, "value"),
    "positions as a list": ("llama", "rope_scaling", [], "type"),
    "positions as text": ("llama", "rope_scaling", "", "type"),
    "no more words": ("llama", "vocab_size", 24, "mismatch"),
    "scores by layer": ("gpt2", "scale_attn_by_inverse_layer_idx", True, "choice"),
    "two rates of dropout": ("gpt2", "embd_pdrop", 0.2, "conflict"),
    "an unknown gelu": ("gpt2", "activation_function", "gelu_fast", "choice"),
}


def change(place, **fields):
    config = json.loads((place / "config.json").read_text()) | fields
    (place / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("case", FIELDS)
def test_a_field_of_config_json(case, folder):
    name, field, value, code = FIELDS[case]
    place = folder(name)
    newer = {"rope_parameters": None} if field.startswith("rope_") else {}
    change(place, **newer, **{field: value})
    refusal(lambda: lbopt.load_huggingface(place), f"{place / 'config.json'}: {field}", value, code)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8}
# The parameters of rotary positions, the one at fault with its value, and the kind of fault.
ROPE = {
    "another type": ({"rope_type": "yarn", "factor": 2.0}, "rope_type", "yarn", "choice"),
    "an unknown parameter": ({**LLAMA3, "beta": 1}, "beta", 1, "unused"),
    "a part of a head": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", 0.5, "unused"),
    "no factor": ({**LLAMA3, "factor": -1}, "factor", -1, "value"),
    "a part of a position": (
        {**LLAMA3, "original_max_position_embeddings": 8.5},
        "original_max_position_embeddings",
        8.5,
        "value",
    ),
    "low above high": ({**LLAMA3, "low_freq_factor": 5.0}, "high_freq_factor", 4.0, "conflict"),
}


@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("case", ROPE)
def test_rotary_positions(case, field, folder):
    given, name, value, code = ROPE[case]
    place = folder("llama")
    change(place, **{"rope_parameters": None, field: given})
    about = f"{place / 'config.json'}: {field}.{name}"
    refusal(lambda: lbopt.load_huggingface(place), about, value, code)


def test_what_the_refusal_of_a_field_offers(folder):
    """It offers the size of the weights, and the nearest name."""
    place = folder("bert")
    change(place, vocab_size=24)
    field = f"{place / 'config.json'}: vocab_size"
    assert "20" in refusal(lambda: lbopt.load_huggingface(place), field)
    change(place, hidden_act="gelu_nwe")
    field = f"{place / 'config.json'}: hidden_act"
    assert "'gelu_new'" in refusal(lambda: lbopt.load_huggingface(place), field)


# Folder; change of config.json; field, kind and names of the refusal.
OTHER_NETWORKS = {
    "more layers than weights": (
        "bert",
        {"num_hidden_layers": 2},
        "",
        "missing",
        ["bert.encoder.layer.1.", "num_hidden_layers = 2"],
    ),
    "fewer positions": (
        "bert",
        {"max_position_embeddings": 64},
        "/model.safetensors: shape of bert.embeddings.position_embeddings.weight",
        "mismatch",
        ["(64, 8)", "max_position_embeddings = 64"],
    ),
    "other heads": (
        "answers",
        {"architectures": ["BertForPreTraining"]},
        "",
        "missing",
        ["cls.predictions.bias", "BertForPreTraining"],
    ),
    "the other block": ("resnet", {"layer_type": "basic"}, "", "mismatch", ["layers.0.layer.2"]),
    "another number of labels": (
        "resnet",
        {"id2label": {"0": "a"}},
        "/model.safetensors: shape of classifier.1.weight",
        "mismatch",
        ["(1, 16)", "id2label"],
    ),
    "another inner width": (
        "llama",
        {"intermediate_size": 24},
        "/model.safetensors: shape of model.layers.0.mlp.up_proj.weight",
        "mismatch",
        ["(24, 8)", "intermediate_size = 24"],
    ),
    "more layers than GPT-2 has": (
        "gpt2",
        {"n_layer": 2},
        "",
        "missing",
        ["transformer.h.1.attn.c_attn.bias", "n_layer = 2"],
    ),
    "another width": (
        "efficientnet",
        {"width_coefficient": 0.5},
        "/model.safetensors: shape of efficientnet.embeddings.convolution.weight",
        "mismatch",
        ["width_coefficient = 0.5"],
    ),
}


@pytest.mark.parametrize("case", OTHER_NETWORKS)
def test_a_config_json_of_another_network(case, folder):
    name, fields, where, code, named = OTHER_NETWORKS[case]
    place = folder(name)
    change(place, **fields)
    reason = refusal(lambda: lbopt.load_huggingface(place), f"{place}{where}", ANY, code)
    for text in named:
        assert text in reason


def edit(change):
    """Return a function that changes the tensors of a folder."""

    def damage(place):
        tensors = load_file(place / "model.safetensors")
        change(tensors)
        save_file(tensors, place / "model.safetensors", {"format": "pt"})

    return damage


def only_a_pickle(place):
    (place / "model.safetensors").unlink()
    (place / "pytorch_model.bin").write_bytes(pickle.dumps({}))


def an_index(weight_map):
    def damage(place):
        (place / "model.safetensors").unlink()
        (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return damage


POOLER = "bert.pooler.dense.weight"
INDEX = "model.safetensors.index.json: weight_map"
# Change of the folder; field (None for the folder), value and kind of the refusal.
DAMAGE = {
    "broken JSON": (
        lambda place: (place / "config.json").write_text("{,"),
        "config.json",
        NO_VALUE,
        "damaged",
    ),
    "bytes": (
        lambda place: (place / "config.json").write_bytes(b"\xff\xfe{"),
        "config.json",
        NO_VALUE,
        "damaged",
    ),
    "a list": (
        lambda place: (place / "config.json").write_text("[]"),
        "config.json",
        NO_VALUE,
        "damaged",
    ),
    "no weights": (
        lambda place: (place / "model.safetensors").unlink(),
        "",
        NO_VALUE,
        "missing",
    ),
    "only a pickle": (only_a_pickle, "pytorch_model.bin", NO_VALUE, "type"),
    "a pointer instead of weights": (
        lambda place: (place / "model.safetensors").write_text("version https://git-lfs"),
        "model.safetensors",
        NO_VALUE,
        "damaged",
    ),
    "half of the weights": (
        lambda place: (place / "model.safetensors").write_bytes(
            (place / "model.safetensors").read_bytes()[:5000]
        ),
        "model.safetensors",
        NO_VALUE,
        "damaged",
    ),
    "a missing tensor": (edit(lambda tensors: tensors.pop(POOLER)), "", NO_VALUE, "missing"),
    "an unexpected tensor": (
        edit(lambda t: t.update({"bert.extra": t[POOLER]})),
        "",
        NO_VALUE,
        "mismatch",
    ),
    "a wrong shape": (
        edit(lambda t: t.update({POOLER: np.zeros((8, 9), np.float32)})),
        f"model.safetensors: shape of {POOLER}",
        (8, 9),
        "mismatch",
    ),
    "whole numbers": (
        edit(lambda t: t.update({POOLER: np.zeros((8, 8), np.int32)})),
        f"model.safetensors: dtype of {POOLER}",
        "I32",
        "type",
    ),
    "a decoder of its own": (
        edit(lambda t: t.update({"cls.predictions.decoder.weight": np.zeros((20, 8), np.float32)})),
        "model.safetensors: cls.predictions.decoder.weight",
        NO_VALUE,
        "mismatch",
    ),
    "a missing shard": (
        an_index({POOLER: "model-1.safetensors"}),
        INDEX,
        "model-1.safetensors",
        "missing",
    ),
    "a shard elsewhere": (
        an_index({POOLER: "../model.safetensors"}),
        INDEX,
        "../model.safetensors",
        "damaged",
    ),
    "an empty index": (an_index({}), INDEX, {}, "damaged"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_folder(case, folder):
    damage, about, value, code = DAMAGE[case]
    place = folder("bert")
    damage(place)
    field = f"{place}/{about}" if about else str(place)
    refusal(lambda: lbopt.load_huggingface(place), field, value, code)


@pytest.mark.parametrize(
    ("case", "named"), [("a missing tensor", POOLER), ("an unexpected tensor", "bert.extra")]
)
def test_tensors_that_do_not_fit_are_named(case, named, folder):
    place = folder("bert")
    DAMAGE[case][0](place)
    assert named in refusal(lambda: lbopt.load_huggingface(place), str(place))


def test_no_folder(tmp_path, saved):
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "no", saved["bert"] / "config.json", tmp_path / "empty"):
        refusal(
            lambda place=place: lbopt.load_huggingface(place), "directory", str(place), "missing"
        )


def test_another_architecture(saved):
    field = f"{saved['roberta'] / 'config.json'}: architectures"
    refusal(
        lambda: lbopt.load_huggingface(saved["roberta"]), field, ["RobertaForMaskedLM"], "choice"
    )


TEXT = {"tokens": np.zeros((1, 4), int)}
DECODER = DecoderLM(20, 1, 8, 2)
NET = EfficientNet(0.25, 0.1, num_classes=3)
SAVES = {
    "no counterpart": (CNN(3), np.zeros((1, 8, 8)), {}, "module", "CNN", "choice"),
    "a small stem": (
        ResNet((1,), (8,), stem="conv3"),
        np.zeros((1, 8, 8, 3)),
        {},
        "stem",
        "conv3",
        "choice",
    ),
    "rotary positions beside layer norms": (
        DECODER.clone(norm="layer"),
        TEXT,
        {},
        "module",
        "DecoderLM",
        "choice",
    ),
    "another epsilon": (
        ResNet((1,), (8,), batch_norm_epsilon=1e-3),
        np.zeros((1, 32, 32, 3)),
        {},
        "batch_norm_epsilon",
        0.001,
        "choice",
    ),
    "no image size": (NET, np.zeros((1, 32, 32, 3)), {}, "image_size", None, "missing"),
    "an odd image size": (
        NET,
        np.zeros((1, 32, 32, 3)),
        {"image_size": 33},
        "image_size",
        33,
        "value",
    ),
    "another stem width": (
        NET.clone(stem_width=16),
        np.zeros((1, 32, 32, 3)),
        {"image_size": 32},
        "stem_width",
        16,
        "choice",
    ),
}


@pytest.mark.parametrize("case", SAVES)
def test_what_transformers_does_not_have(case, tmp_path):
    module, x, options, *fault = SAVES[case]
    variables = torch_side.randomized_variables(module, x)
    refusal(lambda: save_huggingface(tmp_path / "out", module, variables, **options), *fault)
    assert not list(tmp_path.iterdir())


def test_variables_of_another_module(tmp_path):
    module = Bert(20, 1, 8, 2)
    x = {"input_ids": np.zeros((1, 4), int)}
    variables = torch_side.randomized_variables(module, x)

    def save(module, variables):
        return save_huggingface(tmp_path / "out", module, variables)

    deeper = module.clone(num_layers=2)
    first = "params/layer1/attention_norm/bias"
    refusal(lambda: save(deeper, variables), "variables", first, "missing")
    more = {**variables, "other": {"a": np.zeros(1)}}
    refusal(lambda: save(module, more), "variables", "other/a", "unused")
    wider = module.clone(vocab_size=21)
    field = "variables['params/prediction_bias'].shape"
    assert "(21,)" in refusal(lambda: save(wider, variables), field, (20,), "mismatch")
    beside = {"no folder/vocab.txt": ""}  # the last file to be written
    with troubled("--output", str(tmp_path / "out"), "resource"):
        save_huggingface(tmp_path / "out", module, variables, None, None, "--output", beside)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_and_nothing_is_left_by_a_failure(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        refusal(
            lambda name=name: require_new_folder(tmp_path / name, "--output"),
            "--output",
            str(tmp_path / name),
            "exists",
        )

    def fail():
        with new_folder(tmp_path / "new") as partial:
            (partial / "half").write_text("half")
            assert not (tmp_path / "new").exists()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "full"]
    (tmp_path / "empty").mkdir()
    with new_folder(tmp_path / "empty") as partial:
        (partial / "whole").write_text("whole")
        # Processes in different containers may have the same pid.
        with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "empty"):
            raise ZeroDivisionError
    assert (tmp_path / "empty" / "whole").read_text() == "whole"


def test_what_killed_processes_have_left_is_removed(tmp_path):
    """Files of running processes, young files and others' files stay."""
    ours, held, young, other = (tmp_path / f".new.{n}.partial" for n in ("1", "2", "3", "x"))
    for folder in (ours, held, young, other):
        folder.mkdir()
        (folder / "half").write_text("half")

    for folder in (ours, held, other):
        os.utime(folder, (0, 0))

    descriptor = os.open(held, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with new_folder(tmp_path / "new") as partial:
            os.utime(partial, (0, 0))
            with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "new"):
                raise ZeroDivisionError
            (partial / "whole").write_text("whole")
    finally:
        os.close(descriptor)

    left = [".new.2.partial", ".new.3.partial", ".new.x.partial", "new"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == left

    save_safetensors(tmp_path / "new" / "w", {"params": {"w": np.zeros(2)}})
    assert sorted(entry.name for entry in (tmp_path / "new").iterdir()) == ["w", "whole"]
    with troubled("file", str(tmp_path / "new" / "w" / "x"), "resource"):
        save_safetensors(tmp_path / "new" / "w" / "x", {"params": {"w": np.zeros(2)}})
