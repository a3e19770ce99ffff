"""A model, sizes and data that do not fit together end in one line before compiling."""

import jax
import pytest
from refusal import refused

from lbopt.cli import _sweep, _train

RESNET = "digits_resnet.py:lamb-256"
EFFICIENTNET = "digits_efficientnet.py:lamb-256"
BERT = "pydoc_bert.py:lamb-256"
LSTM = "pydoc_lstm.py:lamb-256"

# Name: the config, the fields that are changed, the refused field with its value and code, and what
# else the message must name.
CASES = {
    "unknown model": (
        RESNET,
        {"model.name": "resnt"},
        ("config.model.name", "resnt", "choice"),
        "'resnet'",
    ),
    "unknown size": (
        RESNET,
        {"model.size": "20"},
        ("config.model.size", "20", "choice"),
        "101, 152, 18, 34, 50",
    ),
    "no size": (BERT, {"model.size": ""}, ("config.model.size", "", "choice"), "base, large, tiny"),
    "a size of another family": (
        LSTM,
        {"model.size": "tiny"},
        ("config.model.size", "tiny", "choice"),
        "large, medium, small",
    ),
    "a size for a model that has none": (
        "digits_cnn.py:lamb-256",
        {"model.size": "b0"},
        ("config.model.size", "b0", "unused"),
        "config.model.name = 'cnn'",
    ),
    "bert on images": (
        RESNET,
        {"model.name": "bert", "model.size": "tiny"},
        ("config.model.name", "bert", "conflict"),
        "config.data.name = 'digits'",
        "cnn",
        "efficientnet",
        "lstm",
        "mlp",
        "resnet",
    ),
    "images' model on masked text": (
        BERT,
        {"model.name": "cnn", "model.size": ""},
        ("config.model.name", "cnn", "conflict"),
        "config.data.name = 'pydoc_mlm'",
        "bert",
    ),
    "a language model on masked text": (
        LSTM,
        {"data.name": "pydoc_mlm"},
        ("config.model.name", "lstm_lm", "conflict"),
        "'pydoc_mlm'",
        "bert",
    ),
    "bert on windows": (
        BERT,
        {"data.name": "pydoc_lm"},
        ("config.model.name", "bert", "conflict"),
        "'pydoc_lm'",
        "lstm_lm",
    ),
    "misspelt data": (
        BERT,
        {"data.name": "pydoc_lmm"},
        ("config.data.name", "pydoc_lmm", "choice"),
        "'pydoc_lm'",
    ),
    "image smaller than the strides": (
        EFFICIENTNET,
        {"data.image_size": 24},
        ("config.data.image_size", (24, 24), "mismatch"),
        "32 x 32",
    ),
    "image smaller than the stem": (
        RESNET,
        {"model.stem": "conv7"},
        ("config.data.image_size", (8, 8), "mismatch"),
        "32 x 32",
        "'conv3'",
    ),
    "image size that is no multiple": (
        RESNET,
        {"data.image_size": 12},
        ("config.data.image_size", 12, "value"),
        "8",
    ),
    "image size 0": (RESNET, {"data.image_size": 0}, ("config.data.image_size", 0, "value")),
    "huge image": (
        RESNET,
        {"data.image_size": 8192},
        ("config.data.image_size", 8192, "value"),
        "1024",
    ),
    "misspelt stem": (
        RESNET,
        {"model.stem": "conv5"},
        ("config.model.stem", "conv5", "choice"),
        "conv3",
    ),
    "sequence longer than the positions": (
        BERT,
        {"data.sequence_length": 128},
        ("config.data.sequence_length", 128, "mismatch"),
        "64",
    ),
    "sequence without room for two segments": (
        BERT,
        {"data.sequence_length": 4, "data.max_predictions": 1},
        ("config.data.sequence_length", 4, "value"),
        "5",
    ),
    "sequence 0": (LSTM, {"data.sequence_length": 0}, ("config.data.sequence_length", 0, "value")),
    "sequence longer than the text": (
        LSTM,
        {"data.sequence_length": 16000},
        ("config.data.sequence_length", 16000, "value"),
    ),
    "sequence beyond counting": (
        LSTM,
        {"data.sequence_length": 2**40},
        ("config.data.sequence_length", 2**40, "value"),
        "2^31",
    ),
    "vocabulary smaller than the alphabet": (
        LSTM,
        {"data.vocab_size": 50},
        ("config.data.vocab_size", 50, "value"),
    ),
    "vocabulary 0": (LSTM, {"data.vocab_size": 0}, ("config.data.vocab_size", 0, "value")),
    "no predictions": (
        BERT,
        {"data.max_predictions": 0},
        ("config.data.max_predictions", 0, "value"),
    ),
    "more predictions than tokens": (
        BERT,
        {"data.max_predictions": 33},
        ("config.data.max_predictions", 33, "value"),
        "[1, 32]",
    ),
    "dropout 1": (BERT, {"model.dropout_rate": 1.0}, ("config.model.dropout_rate", 1.0, "value")),
    "narrow beyond nothing": (
        RESNET,
        {"model.width_coefficient": 0.0},
        ("config.model.width_coefficient", 0.0, "value"),
    ),
    "norm groups that do not divide": (
        RESNET,
        {"model.batch_norm_scope": "examples:7"},
        ("config.model.batch_norm_scope", "examples:7", "mismatch"),
        "256",
    ),
    "norm groups of replicas that are not there": (
        EFFICIENTNET,
        {"model.batch_norm_scope": "replicas:3"},
        ("config.model.batch_norm_scope", "replicas:3", "mismatch"),
    ),
    "folded examples that do not divide a replica's": (
        EFFICIENTNET,
        {"model.fold_examples": 3},
        ("config.model.fold_examples", 3, "mismatch"),
        "64",
    ),
    "no folded examples": (
        EFFICIENTNET,
        {"model.fold_examples": 0},
        ("config.model.fold_examples", 0, "value"),
    ),
    "norm groups smaller than a fold": (
        EFFICIENTNET,
        {"model.fold_examples": 8, "model.batch_norm_scope": "examples:4"},
        ("config.model.batch_norm_scope", "examples:4", "mismatch"),
        "8",
    ),
    "tiles without a torus": (
        RESNET,
        {"model.batch_norm_scope": "tiles:2x2"},
        ("config.model.batch_norm_scope", "tiles:2x2", "mismatch"),
        "tiles:2x2@HxW",
        "config.parallel.order='torus'",
    ),
    "tiles that do not divide the grid": (
        RESNET,
        {"model.batch_norm_scope": "tiles:2x2@1x4"},
        ("config.model.batch_norm_scope", "tiles:2x2@1x4", "mismatch"),
        "1 x 4",
    ),
    "a torus of devices without coordinates": (
        RESNET,
        {"parallel.order": "torus"},
        ("config.parallel.order", "torus", "conflict"),
    ),
    "a sharded update under pmap": (
        RESNET,
        {"parallel.shard_update": True, "parallel.backend": "pmap"},
        ("config.parallel.shard_update", True, "conflict"),
        "config.parallel.backend='jit'",
    ),
    "misspelt order": (
        RESNET,
        {"parallel.order": "tors"},
        ("config.parallel.order", "tors", "choice"),
        "torus",
    ),
    "misspelt running statistics": (
        RESNET,
        {"model.batch_norm_scope": "local", "model.batch_norm_running_from": "last"},
        ("config.model.batch_norm_running_from", "last", "choice"),
        "first",
    ),
    "dropout that leaves nothing": (
        EFFICIENTNET,
        {"model.dropout_rate": 0.9999999},
        ("config.model.dropout_rate", 0.9999999, "value"),
    ),
    "batch larger than the text": (
        LSTM,
        {"global_batch_size": 1_000_000},
        ("config.global_batch_size", 1_000_000, "mismatch"),
    ),
    "rematerialised layers of a scan": (
        BERT,
        {"model.scan_layers": True, "model.remat": "layer", "model.remat_layers": 1},
        ("config.model.remat_layers", 1, "unused"),
        "config.model.scan_layers",
    ),
}


@pytest.fixture
def nothing_starts(monkeypatch):
    """Fail if a run starts or compiles a program (other than the tiny one of a random key)."""
    started = []

    def watch(event, seconds, fun_name="", **rest):
        if event.endswith("backend_compile_duration") and fun_name != "jit(_threefry_seed)":
            started.append(fun_name)

    monkeypatch.setattr(_train, "train", lambda *arguments: started.append("training"))
    monkeypatch.setattr(_sweep, "run_sweep", lambda *arguments: started.append("study"))
    jax.monitoring.register_event_duration_secs_listener(watch)
    yield started
    jax.monitoring.unregister_event_duration_listener(watch)


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_in_one_line(name, refusing, configs, tmp_path, nothing_starts):
    config, fields, fault, *named = CASES[name]
    changes = [f"--config.{field}={value}" for field, value in fields.items()]
    with refused(*fault) as caught:
        refusing("train", f"--config={configs / config}", *changes, f"--workdir={tmp_path / 'run'}")
    for part in named:
        assert part in str(caught.value)
    assert not (tmp_path / "run").exists()
    assert nothing_starts == []


def test_a_study_shuffles_its_examples(refusing, configs, tmp_path, nothing_starts):
    fields = {
        "data.name": "pydoc_lm",
        "data.carry_state": True,
        "model.name": "lstm_lm",
        "model.size": "small",
    }
    changes = [f"--config.train.{field}={value}" for field, value in fields.items()]
    study = configs / "sweeps" / "digits_limit.py"
    with refused("config.train.data.carry_state", True, "conflict"):
        refusing("sweep", f"--config={study}:smoke", *changes, f"--workdir={tmp_path / 'run'}")
    assert nothing_starts == []
