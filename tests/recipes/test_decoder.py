"""Decoders as a config says: their shape, what they take from another size, and what is refused."""

import json
import pathlib

import jax
import numpy as np
import pytest
import torch_networks as torch_side
from refusal import refused

from lbopt.cli import call_get_config
from lbopt.config import DataConfig, LossConfig, ModelConfig, TrainConfig, config_to_json
from lbopt.interchange import save_huggingface, save_safetensors
from lbopt.models import DecoderLM
from lbopt.recipes import _initial, make_network, make_problem

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "decoder_lm.py"
TEXT = DataConfig("pydoc_lm", sequence_length=16, vocab_size=256)
TOKENS = {"tokens": np.arange(12).reshape(2, 6)}


def decoder(**fields):
    return ModelConfig("decoder_lm", **{"size": "1m", "max_length": 16, **fields})


def validate(model, **fields):
    fields = {"data": TEXT, "optimizer": "adamw", "num_steps": 2, **fields}
    TrainConfig(model=model, **fields).validate()


def test_the_shape_follows_the_coefficients():
    wide = make_network(decoder(width_coefficient=1.5, depth_coefficient=0.5, tied=False), 256)
    assert (wide.width, wide.num_heads, wide.each_head) == (192, 6, 32)
    assert (wide.num_layers, wide.inner_width, wide.tied) == (2, 576, False)
    llama = make_network(decoder(size="llama3-8b", width_coefficient=0.125), 256)
    assert (llama.num_heads, llama.num_kv_heads, llama.each_head) == (4, 1, 128)


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({"size": "gpt2-xl", "width_coefficient": 0.28}, (48, 448, 7)),
        ({"size": "0.5m", "depth_coefficient": 0.3333333}, (1, 96, 3)),
    ],
)
def test_a_coefficient_has_as_many_digits_as_are_written(fields, shape):
    model = decoder(**fields)
    validate(model)
    network = make_network(model, 256)
    assert (network.num_layers, network.width, network.num_heads) == shape


def test_scales_follow_the_base():
    """They are 1 without a base, and of the heads where those are wider than the base's."""
    plain = make_network(decoder(size="4m"), 256)
    assert (plain.readout_scale, plain.branch_scale, plain.attention_scale) == (1, 1, None)
    scaled = make_network(decoder(size="4m", base_size="1m", depth_coefficient=2.0), 256)
    assert (scaled.readout_scale, scaled.branch_scale, scaled.attention_scale) == (0.5, 0.5, None)
    untied = make_network(decoder(size="4m", base_size="1m", tied=False), 256)
    assert untied.readout_scale == 1
    llama = decoder(size="llama2-7b", base_size="1m", width_coefficient=1 / 32)
    assert make_network(llama, 256).attention_scale == pytest.approx(32**0.5 / 128)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("wide", [1.0, 2.0])
def test_the_numbers_follow_width_and_depth(wide, scan):
    """Half of the layers, of one width and of twice the width."""
    model = decoder(base_size="1m", width_coefficient=wide, depth_coefficient=0.5, scan_layers=scan)
    problem = make_problem(TEXT, model, LossConfig())
    assert problem.transfer.depth == 0.5
    lines = problem.transfer.lines(problem.params)
    (hidden,) = [line for line in lines if "output/kernel" in line]
    assert f"learning rate x {1 / wide:g}, eps x {2 / wide:g}, weight decay x {wide:g}" in hidden
    for line in lines:
        for name in ("word_embedding", "final_norm"):
            if name in line:
                assert "learning rate x 1," in line


@pytest.mark.parametrize("wide", [False, True])
def test_a_base_of_other_ties_and_initial_values(wide):
    """The base is tied as the network is, and the network starts in the base's way."""
    fields = {"size": "1m", "base_size": "llama2-7b"}
    if wide:
        fields = {"size": "llama2-7b", "base_size": "1m", "width_coefficient": 1 / 32}
    model = decoder(**fields)
    validate(model)
    problem = make_problem(TEXT, model, LossConfig())
    names = problem.transfer.lines(problem.params)
    assert any("head/kernel" in name for name in names) is wide
    network = make_network(model, 256)
    assert network.residual_init is wide
    assert network.init_std == ((2 / (5 * 128)) ** 0.5 if wide else 0.02)
    assert make_network(decoder(**fields, init_std=0.1), 256).init_std == 0.1


@pytest.mark.parametrize(
    ("fields", "field", "value", "code"),
    [
        ({"width_coefficient": 0.3}, "config.model.width_coefficient", 0.3, "value"),
        ({"depth_coefficient": 0.3}, "config.model.depth_coefficient", 0.3, "value"),
        ({"init_std": 0.0}, "config.model.init_std", 0.0, "value"),
        ({"depth_coefficient": 1e-9}, "config.model.depth_coefficient", 1e-9, "value"),
        (
            {"size": "llama3-8b", "width_coefficient": 1 / 32},
            "config.model.width_coefficient",
            1 / 32,
            "value",
        ),
        ({"base_size": "gpt2"}, "config.model.base_size", "gpt2", "conflict"),
        ({"base_size": "tiny"}, "config.model.base_size", "tiny", "choice"),
        ({"activation": "relu"}, "config.model.activation", "relu", "unused"),
        ({"max_length": 0}, "config.model.max_length", 0, "value"),
    ],
)
def test_refusals(fields, field, value, code):
    with refused(field, value, code):
        validate(decoder(**fields))


@pytest.mark.parametrize(
    "row", ["gpt2-lamb-480", "1m", "1m-adamw", "1m-sgd-64", "llama2-7b-muon-64"]
)
def test_rows_of_no_form_are_refused(row):
    """Small rates and help topics are for the small sizes alone."""
    with refused("--config row", row, "choice") as caught:
        call_get_config(f"{CONFIG}:{row}")
    assert "SIZE-OPTIMIZER-SEQUENCES" in caught.value.reason


def test_it_carries_no_state():
    data = DataConfig("pydoc_lm", sequence_length=16, carry_state=True)
    with refused("config.model.name", "decoder_lm", "conflict") as caught:
        validate(decoder(), data=data)
    assert "lstm_lm" in caught.value.reason


def test_an_optimizer_without_a_rule_for_the_width_is_refused():
    with refused("config.model.base_size", "0.5m", "conflict"):
        validate(decoder(base_size="0.5m"), optimizer="lamb")


def test_sequences_longer_than_its_positions_are_refused():
    with refused("data.sequence_length", 16, "mismatch"):
        make_problem(TEXT, decoder(max_length=15), LossConfig())


@pytest.mark.parametrize("scan", [False, True])
def test_a_start_from_a_folder_of_transformers_keeps_the_logits(scan, tmp_path):
    """A network that takes numbers of another size has scales, and its parameters make up."""
    module = make_network(decoder(size="0.5m"), 40)
    variables = torch_side.randomized_variables(module, TOKENS)
    save_huggingface(tmp_path / "saved", module, variables)
    wanted = module.apply(variables, TOKENS, train=False)["logits"]

    model = decoder(size="0.5m", base_size="1m", scan_layers=scan)
    params = _initial.read(str(tmp_path / "saved"), model)["params"]
    found = make_network(model, 40).apply({"params": params}, TOKENS, train=False)["logits"]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


def test_a_start_from_another_form_is_refused(tmp_path):
    """Its shapes are the same, but its positions turn otherwise."""
    module: DecoderLM = make_network(decoder(size="0.5m"), 40).clone(rope_theta=500.0)
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), TOKENS, train=False))
    variables = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    save_huggingface(tmp_path / "saved", module, variables)
    with refused("model.size", "0.5m", "mismatch") as caught:
        _initial.read(str(tmp_path / "saved"), decoder(size="0.5m"))
    assert "rope_theta" in caught.value.reason


def saved_in(kind, folder, **fields):
    """Save a decoder's zeros as a folder of Transformers or as an export; return the place."""
    model = decoder(size="0.5m", **fields)
    module = make_network(model, 40)
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), TOKENS, train=False))
    variables = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    if kind == "folder":
        save_huggingface(folder / "saved", module, variables)
        return str(folder / "saved")
    metadata = {"model": json.dumps(config_to_json(model))}
    save_safetensors(folder / "file", variables, metadata)
    return str(folder / "file")


def start_from(place, **fields):
    model = decoder(size="0.5m", **fields)
    module = make_network(model, 40)
    ours = jax.eval_shape(lambda: module.init(jax.random.key(0), TOKENS, train=False))
    return _initial.merged(ours["params"], _initial.read(place, model)["params"], model, "there")


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("kind", ["folder", "file"])
@pytest.mark.parametrize(("field", "theirs"), [("qk_norm", True), ("tied", False)])
def test_a_start_drops_no_parameter(field, theirs, kind, scan, tmp_path):
    place = saved_in(kind, tmp_path, **{field: theirs})
    with refused(f"model.{field}", not theirs, "mismatch") as caught:
        start_from(place, scan_layers=scan, **{field: not theirs})
    assert str(theirs) in caught.value.reason
    start_from(place, scan_layers=scan, **{field: theirs})


def test_a_start_drops_no_other_parameter(tmp_path):
    model = decoder(size="0.5m")
    with refused("init_from", "there", "mismatch") as caught:
        _initial.merged({}, {"extra": {"bias": np.zeros(2)}}, model, "there")
    assert "extra/bias" in caught.value.reason


@pytest.mark.parametrize("kind", ["file", "workdir"])
def test_a_start_from_another_stated_form_is_refused(kind, tmp_path, monkeypatch):
    """Shapes are the same, but positions turn otherwise, or heads have another width."""
    variables = {"params": {"final_norm": {"scale": np.zeros(2, np.float32)}}}
    place = tmp_path / "there"

    def read(model, stated):
        if kind == "file":
            save_safetensors(place, variables, {"model": json.dumps(stated)})
        else:
            (place / "checkpoints").mkdir(parents=True, exist_ok=True)
            saved = {"config": {"model": stated}}
            monkeypatch.setattr(_initial, "read_config", lambda *arguments: saved)
            monkeypatch.setattr(_initial, "read_variables", lambda *arguments: variables)
        return _initial.read(str(place), model)

    stated = config_to_json(decoder(size="llama3-8b"))
    read(decoder(size="llama3-8b"), stated)
    with refused("model.size", "llama3.1-8b", "mismatch") as caught:
        read(decoder(size="llama3.1-8b"), stated)
    assert "rope_scaling" in caught.value.reason
    with refused("model.size", "llama2-7b", "mismatch") as caught:
        read(decoder(size="llama2-7b", width_coefficient=1 / 32), config_to_json(decoder()))
    assert "num_heads = 4" in caught.value.reason
    for wrong in ({"size": "tiny"}, {"width_coefficient": 1e308}):
        with refused("init_from", str(place), "damaged"):
            read(decoder(size="llama3-8b"), stated | wrong)
