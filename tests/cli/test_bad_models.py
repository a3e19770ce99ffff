"""A model, sizes and data that do not fit together end in one line before compiling."""

import jax
import pytest

from lbopt.cli import _sweep, _train

RESNET = "digits_resnet.py:lamb-256"
EFFICIENTNET = "digits_efficientnet.py:lamb-256"
BERT = "pydoc_bert.py:lamb-256"
LSTM = "pydoc_lstm.py:lamb-256"

# Name: the config, the fields that are changed, and what the message must contain.
CASES = {
    "unknown model": (
        RESNET,
        {"model.name": "resnt"},
        ["config.model.name = 'resnt'", "did you mean 'resnet'?"],
    ),
    "unknown size": (
        RESNET,
        {"model.size": "20"},
        ["config.model.size = '20'", "101, 152, 18, 34, 50"],
    ),
    "no size": (BERT, {"model.size": ""}, ["config.model.size = ''", "base, large, tiny"]),
    "a size of another family": (
        LSTM,
        {"model.size": "tiny"},
        ["config.model.size = 'tiny'", "large, medium, small"],
    ),
    "a size for a model that has none": (
        "digits_cnn.py:lamb-256",
        {"model.size": "b0"},
        ["config.model.size = 'b0'", "config.model.name = 'cnn'"],
    ),
    "bert on images": (
        RESNET,
        {"model.name": "bert", "model.size": "tiny"},
        [
            "config.model.name = 'bert'",
            "config.data.name = 'digits'",
            "cnn or efficientnet or lstm or mlp or resnet",
        ],
    ),
    "images' model on masked text": (
        BERT,
        {"model.name": "cnn", "model.size": ""},
        ["config.model.name = 'cnn'", "config.data.name = 'pydoc_mlm' is for bert"],
    ),
    "a language model on masked text": (
        LSTM,
        {"data.name": "pydoc_mlm"},
        ["config.model.name = 'lstm_lm'", "'pydoc_mlm' is for bert"],
    ),
    "bert on windows": (
        BERT,
        {"data.name": "pydoc_lm"},
        ["config.model.name = 'bert'", "'pydoc_lm' is for lstm_lm"],
    ),
    "misspelt data": (
        BERT,
        {"data.name": "pydoc_lmm"},
        ["config.data.name = 'pydoc_lmm'", "did you mean"],
    ),
    "image smaller than the strides": (
        EFFICIENTNET,
        {"data.image_size": 24},
        ["config.data.image_size = (24, 24)", "at least 32 x 32"],
    ),
    "image smaller than the stem": (
        RESNET,
        {"model.stem": "conv7"},
        ["config.data.image_size = (8, 8)", "at least 32 x 32", "'conv3'"],
    ),
    "image size that is no multiple": (
        RESNET,
        {"data.image_size": 12},
        ["config.data.image_size = 12", "multiple of 8"],
    ),
    "image size 0": (RESNET, {"data.image_size": 0}, ["config.data.image_size = 0"]),
    "huge image": (RESNET, {"data.image_size": 8192}, ["config.data.image_size = 8192", "1024"]),
    "misspelt stem": (RESNET, {"model.stem": "conv5"}, ["config.model.stem = 'conv5'", "conv3"]),
    "sequence longer than the positions": (
        BERT,
        {"data.sequence_length": 128},
        ["config.data.sequence_length = 128", "64 positions"],
    ),
    "sequence without room for two segments": (
        BERT,
        {"data.sequence_length": 4, "data.max_predictions": 1},
        ["config.data.sequence_length = 4", "at least 5"],
    ),
    "sequence 0": (LSTM, {"data.sequence_length": 0}, ["config.data.sequence_length = 0"]),
    "sequence longer than the text": (
        LSTM,
        {"data.sequence_length": 16000},
        ["config.data.sequence_length = 16000", "a part of the text has"],
    ),
    "sequence beyond counting": (
        LSTM,
        {"data.sequence_length": 2**40},
        ["config.data.sequence_length", "2^31"],
    ),
    "vocabulary smaller than the alphabet": (
        LSTM,
        {"data.vocab_size": 50},
        ["config.data.vocab_size = 50", "the alphabet alone take"],
    ),
    "vocabulary 0": (LSTM, {"data.vocab_size": 0}, ["config.data.vocab_size = 0"]),
    "no predictions": (BERT, {"data.max_predictions": 0}, ["config.data.max_predictions = 0"]),
    "more predictions than tokens": (
        BERT,
        {"data.max_predictions": 33},
        ["config.data.max_predictions = 33", "[1, 32]"],
    ),
    "dropout 1": (BERT, {"model.dropout_rate": 1.0}, ["config.model.dropout_rate = 1.0"]),
    "narrow beyond nothing": (
        RESNET,
        {"model.width_coefficient": 0.0},
        ["config.model.width_coefficient = 0.0"],
    ),
    "norm groups that do not divide": (
        RESNET,
        {"model.batch_norm_scope": "examples:7"},
        ["config.model.batch_norm_scope = 'examples:7'", "256"],
    ),
    "norm groups of replicas that are not there": (
        EFFICIENTNET,
        {"model.batch_norm_scope": "replicas:3"},
        ["config.model.batch_norm_scope = 'replicas:3'", "4 replicas"],
    ),
    "folded examples that do not divide a replica's": (
        EFFICIENTNET,
        {"model.fold_examples": 3},
        ["config.model.fold_examples = 3", "64 examples"],
    ),
    "no folded examples": (
        EFFICIENTNET,
        {"model.fold_examples": 0},
        ["config.model.fold_examples = 0"],
    ),
    "norm groups smaller than a fold": (
        EFFICIENTNET,
        {"model.fold_examples": 8, "model.batch_norm_scope": "examples:4"},
        ["config.model.batch_norm_scope = 'examples:4'", "8 folded"],
    ),
    "tiles without a torus": (
        RESNET,
        {"model.batch_norm_scope": "tiles:2x2"},
        [
            "config.model.batch_norm_scope = 'tiles:2x2'",
            "tiles:2x2@HxW",
            "config.parallel.order='torus'",
        ],
    ),
    "tiles that do not divide the grid": (
        RESNET,
        {"model.batch_norm_scope": "tiles:2x2@1x4"},
        ["config.model.batch_norm_scope = 'tiles:2x2@1x4'", "grid of 1 x 4"],
    ),
    "a torus of devices without coordinates": (
        RESNET,
        {"parallel.order": "torus"},
        ["config.parallel.order = 'torus'", "no coordinates"],
    ),
    "a sharded update under pmap": (
        RESNET,
        {"parallel.shard_update": True, "parallel.backend": "pmap"},
        ["config.parallel.shard_update = True", "config.parallel.backend='jit'"],
    ),
    "misspelt order": (
        RESNET,
        {"parallel.order": "tors"},
        ["config.parallel.order = 'tors'", "torus"],
    ),
    "misspelt running statistics": (
        RESNET,
        {"model.batch_norm_running_from": "last"},
        ["config.model.batch_norm_running_from = 'last'", "first"],
    ),
    "dropout that leaves nothing": (
        EFFICIENTNET,
        {"model.dropout_rate": 0.9999999},
        ["config.model.dropout_rate = 0.9999999"],
    ),
    "batch larger than the text": (
        LSTM,
        {"global_batch_size": 1_000_000},
        ["config.global_batch_size = 1000000", "the training set has"],
    ),
    "rematerialised layers of a scan": (
        BERT,
        {"model.scan_layers": True, "model.remat": "layer", "model.remat_layers": 1},
        ["config.model.remat_layers = 1", "config.model.scan_layers"],
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


def refused(code, out, err, named):
    assert code == 2, err
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    assert out == ""
    for part in named:
        assert part in err


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_in_one_line(name, lbopt, configs, tmp_path, nothing_starts):
    config, fields, named = CASES[name]
    changes = [f"--config.{field}={value}" for field, value in fields.items()]
    code, out, err = lbopt(
        "train", f"--config={configs / config}", *changes, f"--workdir={tmp_path / 'run'}"
    )
    refused(code, out, err, named)
    assert not (tmp_path / "run").exists()
    assert nothing_starts == []


def test_a_study_shuffles_its_examples(lbopt, configs, tmp_path, nothing_starts):
    fields = {
        "data.name": "pydoc_lm",
        "data.carry_state": True,
        "model.name": "lstm_lm",
        "model.size": "small",
    }
    changes = [f"--config.train.{field}={value}" for field, value in fields.items()]
    study = configs / "sweeps" / "digits_limit.py"
    code, out, err = lbopt(
        "sweep", f"--config={study}:smoke", *changes, f"--workdir={tmp_path / 'run'}"
    )
    refused(code, out, err, ["config.train.data.carry_state = True", "shuffles its examples"])
    assert nothing_starts == []
