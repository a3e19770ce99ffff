"""Written folders are read back bit for bit, by lbopt and by `transformers`."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_networks as torch_side
import transformers
from safetensors import safe_open

import lbopt
from lbopt.interchange import _huggingface, _names
from lbopt.models import (
    Bert,
    EfficientNet,
    ResNet,
    make_bert,
    make_efficientnet,
    make_resnet,
    unstack_layers,
)

SMALL = {"depths": (2, 1), "widths": (16, 32), "stem_width": 8, "num_classes": 5}
TINY = {"vocab_size": 61, "num_layers": 2, "width": 16, "num_heads": 2, "max_length": 12}
IMAGES = torch_side.images(36)
TOKENS = {"input_ids": np.arange(20).reshape(2, 10)}

# Name: the module, its inputs, the class of `transformers`, and output names there and here.
NETWORKS = {
    "bottleneck": (ResNet(**SMALL), IMAGES, "ResNetForImageClassification"),
    "basic": (ResNet(**SMALL, bottleneck=False), IMAGES, "ResNetForImageClassification"),
    "folded stem": (ResNet(**SMALL, stem="space_to_depth"), IMAGES, "ResNetForImageClassification"),
    "efficientnet": (
        EfficientNet(0.25, 0.5, num_classes=5, stages=EfficientNet().stages[:3], squeeze_ratio=0.5),
        IMAGES,
        "EfficientNetForImageClassification",
    ),
    "pretraining": (Bert(**TINY, inner_width=24), TOKENS, "BertForPreTraining"),
    "tanh": (Bert(**TINY, activation="gelu_tanh", num_segments=3), TOKENS, "BertForPreTraining"),
    "scanned": (Bert(**TINY, scan=True, remat="attention"), TOKENS, "BertForPreTraining"),
    "answers": (
        Bert(**TINY, head="question_answering", epsilon=1e-6),
        TOKENS,
        "BertForQuestionAnswering",
    ),
}
OUTPUTS = {
    "BertForPreTraining": {
        "prediction_logits": "prediction_logits",
        "seq_relationship_logits": "next_sentence_logits",
    },
    "BertForQuestionAnswering": {"start_logits": "start_logits", "end_logits": "end_logits"},
}


@pytest.fixture(params=NETWORKS)
def network(request):
    module, x, kind = NETWORKS[request.param]
    return module, torch_side.randomized_variables(module, x), x, kind


@pytest.fixture
def folder(network, tmp_path):
    module, variables, *_ = network
    size = 36 if isinstance(module, EfficientNet) else None
    _huggingface.save_huggingface(tmp_path / "out", module, variables, size, {"step": "3"})
    return tmp_path / "out"


def same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_transformers_reads_it(network, folder, evaluated):
    module, variables, x, kind = network
    model, info = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    ours = evaluated(module, variables, x)
    if kind not in OUTPUTS:
        np.testing.assert_allclose(ours, torch_side.classify(model.eval(), x), rtol=0, atol=1e-4)
        return
    theirs = model.eval()(torch.tensor(x["input_ids"]))
    for there, here in OUTPUTS[kind].items():
        np.testing.assert_allclose(ours[here], theirs[there].detach().numpy(), rtol=0, atol=1e-4)


def test_we_read_it(network, folder):
    module, variables, *_ = network
    loaded, back = lbopt.load_huggingface(folder)
    if getattr(module, "scan", False):
        variables = {"params": unstack_layers(variables["params"])}
    same_bits(back, variables)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(back))
    for name in (
        "widths",
        "depths",
        "bottleneck",
        "stages",
        "num_classes",
        "epsilon",
        "activation",
        "head",
        "num_heads",
    ):
        assert getattr(loaded, name, None) == getattr(module, name, None)


def test_the_factor_of_the_decoder_is_written_too(evaluated, tmp_path):
    """A network with the numbers of a narrower one has it, and `transformers` does not."""
    module = Bert(**TINY, readout_scale=1 / 3)
    variables = torch_side.randomized_variables(module, TOKENS)
    _huggingface.save_huggingface(tmp_path / "out", module, variables)
    ours = evaluated(module, variables, TOKENS)["prediction_logits"]

    model = transformers.BertForPreTraining.from_pretrained(tmp_path / "out").eval()
    theirs = model(torch.tensor(TOKENS["input_ids"])).prediction_logits.detach().numpy()
    back = evaluated(*lbopt.load_huggingface(tmp_path / "out"), TOKENS)["prediction_logits"]
    for others in (theirs, back):
        np.testing.assert_allclose(others, ours, rtol=0, atol=1e-5)
    assert np.std(ours) > 0.1


def test_transformers_would_write_the_same(network, folder, tmp_path):
    """Tensors and config fields equal those of `save_pretrained` after reading."""
    getattr(transformers, network[-1]).from_pretrained(folder).save_pretrained(tmp_path / "theirs")
    keys = {}
    for place in (folder, tmp_path / "theirs"):
        with safe_open(place / "model.safetensors", "np") as handle:
            names = list(handle.keys())
            keys[place] = {name: handle.get_slice(name).get_shape() for name in names}
    assert keys[folder] == keys[tmp_path / "theirs"]
    ours, theirs = (
        json.loads((place / "config.json").read_text()) for place in (folder, tmp_path / "theirs")
    )
    assert {name: theirs[name] for name in ours} == ours


def test_the_header_says_where_it_is_from(folder):
    with safe_open(folder / "model.safetensors", "np") as handle:
        assert handle.metadata() == {"format": "pt", "step": "3"}


SAVED = {
    "ResNetForImageClassification": lambda: torch_side.resnet(
        **{**_theirs(SMALL), "num_labels": 5}
    ),
    "BertForPreTraining": lambda: torch_side.bert(
        transformers.BertForPreTraining,
        vocab_size=61,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
    ),
}


def _theirs(small):
    return {
        "depths": list(small["depths"]),
        "hidden_sizes": list(small["widths"]),
        "embedding_size": 8,
    }


@pytest.mark.parametrize("kind", SAVED)
def test_shards(kind, moved, tmp_path):
    model = SAVED[kind]()
    module, whole = moved(model)
    same = moved(model, max_shard_size="6KB")
    assert len(list(tmp_path.glob("saved1/*.safetensors"))) > 2
    assert not (tmp_path / "saved1" / "model.safetensors").exists()
    assert same[0] == module
    same_bits(same[1], whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_are_read_to_fp32(dtype, moved):
    model = SAVED["ResNetForImageClassification"]().to(dtype)
    _, back = moved(model)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(back))
    weight = model.classifier[1].weight.detach().to(torch.float32).numpy()
    np.testing.assert_array_equal(back["params"]["head"]["kernel"], weight.T)


def test_names_from_tensorflow_and_tied_copies(tmp_path):
    """google-bert's files have `gamma` and `beta`, a copy of the embedding, and another class."""
    model = SAVED["BertForPreTraining"]()
    model.save_pretrained(tmp_path / "new")
    _, expected = lbopt.load_huggingface(tmp_path / "new")

    state = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma"): x
        for name, x in model.state_dict().items()
    }
    state = {
        name.replace("LayerNorm.bias", "LayerNorm.beta"): x.clone() for name, x in state.items()
    }
    state["bert.embeddings.position_ids"] = torch.arange(512)[None]

    config = json.loads((tmp_path / "new" / "config.json").read_text()) | {
        "architectures": ["BertForMaskedLM"]
    }

    for place, drop in (
        ("both", ()),
        ("one", ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias")),
    ):
        (tmp_path / place).mkdir()
        (tmp_path / place / "config.json").write_text(json.dumps(config))
        kept = {name: x for name, x in state.items() if name not in drop}
        torch_side.save_file(kept, tmp_path / place / "model.safetensors")
        same_bits(lbopt.load_huggingface(tmp_path / place)[1], expected)


@pytest.mark.parametrize(
    ("module", "x"),
    [
        *((module, x) for module, x, _ in NETWORKS.values() if not getattr(module, "scan", False)),
        *((make_resnet(size, num_classes=9), IMAGES) for size in ("18", "50")),
        *((make_efficientnet(size), IMAGES) for size in ("b0", "b1", "b5")),
        (make_bert("base", inner_width=5, max_length=77), TOKENS),
        (make_bert("tiny", head="question_answering"), TOKENS),
        (ResNet((1, 1), (64, 64), False, stem="space_to_depth"), IMAGES[..., :1]),
    ],
)
def test_layers_are_described_as_the_module_makes_them(module, x):
    """A file is compared with these names and shapes before the module has variables."""
    family = next(family for family in _huggingface.FAMILIES if family.describes(module))
    made = _names.flatten(jax.eval_shape(lambda: module.init(jax.random.key(0), x, train=False)))
    tensors = list(_names.tensors(family.table, family.layers(module, _config_of(module, x))))
    assert {tensor.ours: tensor.shape for tensor in tensors} == {
        name: leaf.shape for name, leaf in made.items()
    }
    assert {tensor.ours: (tensor.theirs, tensor.layout) for tensor in tensors} == {
        name: _names.counterpart(family.table, name) for name in made
    }
    assert len({tensor.theirs for tensor in tensors}) == len(tensors)


def _config_of(module, x):
    if isinstance(module, Bert):
        return {}
    return {"num_channels": x.shape[-1], "num_labels": module.num_classes}
