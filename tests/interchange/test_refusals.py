"""Folders that are not read: one line that names the file or the field, the value and the fix, before anything is built."""

import fcntl
import json
import os
import pickle

import numpy as np
import pytest
import torch_networks as torch_side
import transformers
from safetensors.numpy import load_file, save_file

import lbopt
from lbopt.errors import EnvironmentProblem, UserError
from lbopt.interchange import folders, huggingface, native
from lbopt.models.bert import Bert
from lbopt.models.cnn import CNN
from lbopt.models.efficientnet import EfficientNet
from lbopt.models.resnet import ResNet


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Return {name: folder}; look, do not touch."""
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


def refused(call, *said):
    with pytest.raises(UserError) as raised:
        call()
    message = str(raised.value)
    assert "\n" not in message
    assert len(message) < 500
    for part in said:
        assert part in message, message


# Name of the folder, the fields to change, what the message must contain.
FIELDS = {
    "no architectures": (
        "bert",
        {"architectures": None},
        ["architectures = None", "BertForPreTraining"],
    ),
    "architectures is text": (
        "bert",
        {"architectures": "Bert"},
        ["architectures = 'Bert'", "another architecture"],
    ),
    "a head we lack": (
        "bert",
        {"architectures": ["BertForTokenClassification"]},
        ["BertForTokenClassification"],
    ),
    "another model type": (
        "bert",
        {"model_type": "roberta"},
        ["model_type = 'roberta'", "another architecture"],
    ),
    "no model type": ("resnet", {"model_type": None}, ["model_type = None"]),
    "a decoder": ("bert", {"is_decoder": True}, ["is_decoder = True", "False"]),
    "cross attention": ("bert", {"add_cross_attention": True}, ["add_cross_attention = True"]),
    "relative positions": (
        "bert",
        {"position_embedding_type": "relative_key"},
        ["position_embedding_type = 'relative_key'", "'absolute'"],
    ),
    "an untied decoder": ("bert", {"tie_word_embeddings": False}, ["tie_word_embeddings = False"]),
    "an unknown activation": (
        "bert",
        {"hidden_act": "gelu_fast"},
        ["hidden_act = 'gelu_fast'", "gelu_new"],
    ),
    "width as text": ("bert", {"hidden_size": "8"}, ["hidden_size = '8'", "whole number"]),
    "a negative depth": (
        "bert",
        {"num_hidden_layers": -1},
        ["num_hidden_layers = -1", "whole number"],
    ),
    "heads that do not divide": (
        "bert",
        {"num_attention_heads": 3},
        ["num_attention_heads = 3", "8"],
    ),
    "a rate of one": (
        "bert",
        {"hidden_dropout_prob": 1.0},
        ["hidden_dropout_prob = 1.0", "[0, 1)"],
    ),
    "no epsilon": ("bert", {"layer_norm_eps": 0}, ["layer_norm_eps = 0", "> 0"]),
    "a larger vocabulary": (
        "bert",
        {"vocab_size": 24},
        ["config.json: vocab_size = 24", "20 rows", "set vocab_size"],
    ),
    "a smaller vocabulary": (
        "answers",
        {"vocab_size": 10},
        ["config.json: vocab_size = 10", "20 rows"],
    ),
    "more layers than weights": (
        "bert",
        {"num_hidden_layers": 2},
        ["bert.encoder.layer.1.", "missing", "save it again"],
    ),
    "fewer positions": (
        "bert",
        {"max_position_embeddings": 64},
        ["position_embeddings.weight = (512, 8)", "(64, 8)"],
    ),
    "other heads": (
        "answers",
        {"architectures": ["BertForPreTraining"]},
        ["cls.predictions.bias", "missing", "BertForPreTraining"],
    ),
    "stride in the 1 x 1": (
        "resnet",
        {"downsample_in_bottleneck": True},
        ["downsample_in_bottleneck = True", "False"],
    ),
    "stride in the first stage": (
        "resnet",
        {"downsample_in_first_stage": True},
        ["downsample_in_first_stage = True"],
    ),
    "a ResNet with gelu": ("resnet", {"hidden_act": "gelu"}, ["hidden_act = 'gelu'", "'relu'"]),
    "an unknown block": (
        "resnet",
        {"layer_type": "basics"},
        ["layer_type = 'basics'", "did you mean 'basic'"],
    ),
    "the other block": ("resnet", {"layer_type": "basic"}, ["unexpected", "layers.0.layer.2"]),
    "stages that disagree": ("resnet", {"depths": [1, 1, 1]}, ["depths = [1, 1, 1]", "give 2"]),
    "no stages": ("resnet", {"depths": []}, ["depths = []", "list of whole numbers"]),
    "no labels": ("resnet", {"id2label": []}, ["id2label = []"]),
    "another number of labels": (
        "resnet",
        {"id2label": {"0": "a"}},
        ["shape of classifier.1.", "(7", "(1", "model.safetensors"],
    ),
    "max pooling": ("efficientnet", {"pooling_type": "max"}, ["pooling_type = 'max'", "'mean'"]),
    "an EfficientNet with relu": (
        "efficientnet",
        {"hidden_act": "relu"},
        ["hidden_act = 'relu'", "swish"],
    ),
    "an even kernel": ("efficientnet", {"kernel_sizes": [4] * 7}, ["kernel_sizes = [4, 4", "odd"]),
    "a stride of 3": ("efficientnet", {"strides": [3] * 7}, ["strides = [3, 3", "strides 1 and 2"]),
    "too few strides": ("efficientnet", {"strides": [1, 2]}, ["strides = [1, 2]", "give 7"]),
    "another width": (
        "efficientnet",
        {"width_coefficient": 0.5},
        ["shape of ", "config.json says"],
    ),
    "a padding list of text": (
        "efficientnet",
        {"depthwise_padding": "5"},
        ["depthwise_padding = '5'"],
    ),
}


@pytest.mark.parametrize("case", FIELDS)
def test_a_field_of_config_json(case, folder):
    name, change, said = FIELDS[case]
    place = folder(name)
    config = json.loads((place / "config.json").read_text()) | change
    (place / "config.json").write_text(json.dumps(config))
    refused(lambda: lbopt.load_huggingface(place), str(place), *said)


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
DAMAGE = {
    "no config.json": (
        lambda place: (place / "config.json").unlink(),
        ["no config.json", "save_pretrained"],
    ),
    "broken JSON": (
        lambda place: (place / "config.json").write_text("{,"),
        ["config.json: not JSON", "save"],
    ),
    "bytes": (
        lambda place: (place / "config.json").write_bytes(b"\xff\xfe{"),
        ["config.json: not JSON"],
    ),
    "a list": (
        lambda place: (place / "config.json").write_text("[]"),
        ["config.json: it holds a list"],
    ),
    "no weights": (
        lambda place: (place / "model.safetensors").unlink(),
        ["no model.safetensors", "save_pretrained"],
    ),
    "only a pickle": (
        only_a_pickle,
        ["pytorch_model.bin: only safetensors are read", "safe_serialization=True"],
    ),
    "a pointer instead of weights": (
        lambda place: (place / "model.safetensors").write_text("version https://git-lfs"),
        ["model.safetensors: not a whole safetensors file", "fetch or save it again"],
    ),
    "half of the weights": (
        lambda place: (place / "model.safetensors").write_bytes(
            (place / "model.safetensors").read_bytes()[:5000]
        ),
        ["model.safetensors: not a whole safetensors file"],
    ),
    "a missing tensor": (edit(lambda tensors: tensors.pop(POOLER)), [POOLER, "missing (1 of "]),
    "an unexpected tensor": (
        edit(lambda t: t.update({"bert.extra": t[POOLER]})),
        ["bert.extra", "unexpected (1 "],
    ),
    "a wrong shape": (
        edit(lambda t: t.update({POOLER: np.zeros((8, 9), np.float32)})),
        [f"shape of {POOLER} = (8, 9)", "(8, 8)"],
    ),
    "whole numbers": (
        edit(lambda t: t.update({POOLER: np.zeros((8, 8), np.int32)})),
        [f"dtype of {POOLER} = 'I32'", "BF16"],
    ),
    "a decoder of its own": (
        edit(lambda t: t.update({"cls.predictions.decoder.weight": np.zeros((20, 8), np.float32)})),
        [
            "cls.predictions.decoder.weight differs from bert.embeddings.word_embeddings.weight",
            "tie them",
        ],
    ),
    "a missing shard": (
        an_index({POOLER: "model-1.safetensors"}),
        ["model-1.safetensors", "missing", "copy it too"],
    ),
    "a shard elsewhere": (
        an_index({POOLER: "../model.safetensors"}),
        ["'../model.safetensors'", "outside"],
    ),
    "an empty index": (
        an_index({}),
        ["model.safetensors.index.json: weight_map = '{}'", "save the model again"],
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_folder(case, folder):
    damage, said = DAMAGE[case]
    place = folder("bert")
    damage(place)
    refused(lambda: lbopt.load_huggingface(place), str(place), *said)


def test_no_folder(tmp_path, saved):
    refused(lambda: lbopt.load_huggingface(tmp_path / "no"), "directory = ", "no such folder")
    refused(
        lambda: lbopt.load_huggingface(saved["bert"] / "config.json"),
        "directory = ",
        "no such folder",
    )


def test_another_architecture(saved):
    refused(
        lambda: lbopt.load_huggingface(saved["roberta"]),
        "RobertaForMaskedLM",
        "a folder of another architecture",
    )


NET = EfficientNet(0.25, 0.1, num_classes=3)
SAVES = {
    "no counterpart": (CNN(3), np.zeros((1, 8, 8)), {}, ["module = CNN", "format safetensors"]),
    "a small stem": (
        ResNet((1,), (8,), stem="conv3"),
        np.zeros((1, 8, 8, 3)),
        {},
        ["stem = 'conv3'", "7 x 7"],
    ),
    "another epsilon": (
        ResNet((1,), (8,), batch_norm_epsilon=1e-3),
        np.zeros((1, 32, 32, 3)),
        {},
        ["batch_norm_epsilon = 0.001", "1e-05"],
    ),
    "no image size": (NET, np.zeros((1, 32, 32, 3)), {}, ["image_size = None", "say the side"]),
    "an odd image size": (
        NET,
        np.zeros((1, 32, 32, 3)),
        {"image_size": 33},
        ["image_size = 33", "even"],
    ),
    "another stem width": (
        NET.clone(stem_width=16),
        np.zeros((1, 32, 32, 3)),
        {"image_size": 32},
        ["stem_width = 16", "32"],
    ),
}


@pytest.mark.parametrize("case", SAVES)
def test_what_transformers_does_not_have(case, tmp_path):
    module, x, options, said = SAVES[case]
    variables = torch_side.randomized_variables(module, x)
    refused(
        lambda: huggingface.save_huggingface(tmp_path / "out", module, variables, **options), *said
    )
    assert not list(tmp_path.iterdir())


def test_variables_of_another_module(tmp_path):
    module, x = Bert(20, 1, 8, 2), {"input_ids": np.zeros((1, 4), int)}
    variables = torch_side.randomized_variables(module, x)

    def save(module, variables):
        return huggingface.save_huggingface(tmp_path / "out", module, variables)

    refused(
        lambda: save(module.clone(num_layers=2), variables),
        "variables = 'params/layer1/",
        "missing",
    )
    refused(
        lambda: save(module, {**variables, "other": {"a": np.zeros(1)}}),
        "variables = 'other/a'",
        "no such",
    )
    refused(
        lambda: save(module.clone(vocab_size=21), variables),
        "params/prediction_bias",
        "(20,)",
        "(21,)",
    )
    beside = {"no folder/vocab.txt": ""}  # the last file that is written
    with pytest.raises(EnvironmentProblem, match=r"--output.* cannot be written"):
        huggingface.save_huggingface(
            tmp_path / "out", module, variables, None, None, "--output", beside
        )
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_and_nothing_is_left_by_a_failure(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        refused(
            lambda name=name: folders.require_new(tmp_path / name, "--output"),
            "--output = ",
            "nothing is overwritten",
        )

    def fail():
        with folders.new_folder(tmp_path / "new") as partial:
            (partial / "half").write_text("half")
            assert not (tmp_path / "new").exists()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "full"]
    (tmp_path / "empty").mkdir()
    with folders.new_folder(tmp_path / "empty") as partial:
        (partial / "whole").write_text("whole")
        with (
            pytest.raises(ZeroDivisionError),
            folders.new_folder(tmp_path / "empty"),
        ):  # of a container with the same pid
            raise ZeroDivisionError
    assert (tmp_path / "empty" / "whole").read_text() == "whole"


def test_what_killed_processes_have_left_is_removed(tmp_path):
    """Not what a process is at work in, nor what is young or another's."""
    ours, held, young, other = (tmp_path / f".new.{n}.partial" for n in ("1", "2", "3", "x"))
    for folder in (ours, held, young, other):
        folder.mkdir()
        (folder / "half").write_text("half")
    for folder in (ours, held, other):
        os.utime(folder, (0, 0))
    descriptor = os.open(held, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with folders.new_folder(tmp_path / "new") as partial:
            os.utime(partial, (0, 0))
            with pytest.raises(ZeroDivisionError), folders.new_folder(tmp_path / "new"):
                raise ZeroDivisionError
            (partial / "whole").write_text("whole")
    finally:
        os.close(descriptor)
    left = [".new.2.partial", ".new.3.partial", ".new.x.partial", "new"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == left
    native.save_safetensors(tmp_path / "new" / "w", {"params": {"w": np.zeros(2)}})
    assert sorted(entry.name for entry in (tmp_path / "new").iterdir()) == ["w", "whole"]
    with pytest.raises(EnvironmentProblem, match=r"w/x': cannot be written \(Not a directory\)"):
        native.save_safetensors(tmp_path / "new" / "w" / "x", {"params": {"w": np.zeros(2)}})
