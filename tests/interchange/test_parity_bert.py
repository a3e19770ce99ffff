"""BERT computes what `transformers` computes from the same weights, and so do its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_networks as torch_side
from transformers import BertForPreTraining, BertForQuestionAnswering

from lbopt.interchange import _huggingface, _names
from lbopt.models import stack_layers

TINY = {"vocab_size": 211, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"intermediate_size": 512, "max_position_embeddings": 32}
BASE = {**TINY, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
"""The widths and heads of BERT-base in two layers."""
BATCH = 3
LENGTH = 17
MASKED = 4


@pytest.fixture
def inputs():
    rng = np.random.default_rng(0)
    lengths = np.array([[LENGTH], [11], [5]])
    return {
        "input_ids": rng.integers(0, TINY["vocab_size"], (BATCH, LENGTH)),
        "token_type_ids": rng.integers(0, 2, (BATCH, LENGTH)),
        "attention_mask": (np.arange(LENGTH) < lengths).astype(int),
    }


@pytest.fixture
def positions():
    return np.stack(
        [np.random.default_rng(i).choice(5, MASKED, replace=False) for i in range(BATCH)]
    )


def theirs(model, inputs, **labels):
    return model(**{name: torch.tensor(value) for name, value in {**inputs, **labels}.items()})


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=0, atol=1e-4)


def take(logits, positions):
    return torch.take_along_dim(logits, torch.tensor(positions)[..., None], 1)


@pytest.mark.parametrize("shape", [TINY, BASE], ids=["tiny", "base"])
def test_pretraining(shape, inputs, positions, moved, evaluated):
    model = torch_side.bert(BertForPreTraining, **shape)
    module, variables = moved(model)
    out = evaluated(module, variables, inputs)
    expected = theirs(model, inputs)
    close(out["prediction_logits"], expected.prediction_logits)
    close(out["next_sentence_logits"], expected.seq_relationship_logits)
    assert expected.seq_relationship_logits.std(0).min() > 0.05
    masked = evaluated(module, variables, {**inputs, "masked_positions": positions})
    close(masked["prediction_logits"], take(expected.prediction_logits, positions))
    # The decoder is the word embedding, counted once on both sides.
    assert sum(leaf.size for leaf in jax.tree.leaves(variables["params"])) == torch_side.count(
        model
    )


@pytest.mark.parametrize("shape", [TINY, BASE], ids=["tiny", "base"])
def test_question_answering(shape, inputs, moved, evaluated):
    model = torch_side.bert(BertForQuestionAnswering, **shape)
    module, variables = moved(model)
    out = evaluated(module, variables, inputs)
    expected = theirs(model, inputs)
    close(out["start_logits"], expected.start_logits)
    close(out["end_logits"], expected.end_logits)
    assert sum(leaf.size for leaf in jax.tree.leaves(variables["params"])) == torch_side.count(
        model
    )


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu"])
def test_activations(activation, inputs, moved, evaluated):
    model = torch_side.bert(BertForPreTraining, **TINY, hidden_act=activation)
    module, variables = moved(model)
    close(
        evaluated(module, variables, inputs)["prediction_logits"],
        theirs(model, inputs).prediction_logits,
    )


def test_without_mask_and_token_types(inputs, moved, evaluated):
    model = torch_side.bert(BertForPreTraining, **TINY)
    module, variables = moved(model)
    only = {"input_ids": inputs["input_ids"]}
    close(
        evaluated(module, variables, only)["prediction_logits"],
        theirs(model, only).prediction_logits,
    )


def test_a_scanned_network(inputs, moved, evaluated):
    model = torch_side.bert(BertForPreTraining, **TINY)
    module, variables = moved(model)
    stacked = {"params": stack_layers(variables["params"])}
    out = evaluated(module.clone(scan=True), stacked, inputs)
    close(out["prediction_logits"], theirs(model, inputs).prediction_logits)


def test_gradients_of_pretraining(inputs, positions, moved):
    # Mean cross entropy at the masked positions plus that of the next sentence, as both define it.
    model = torch_side.bert(BertForPreTraining, **TINY).train()
    module, variables = moved(model)
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, TINY["vocab_size"], (BATCH, MASKED))
    follows = rng.integers(0, 2, BATCH)
    labels = np.full((BATCH, LENGTH), -100)
    np.put_along_axis(labels, positions, tokens, 1)

    def loss(params):
        out = module.apply(
            {"params": params}, {**inputs, "masked_positions": positions}, train=True
        )
        pairs = (out["prediction_logits"], tokens), (out["next_sentence_logits"], follows)
        return sum(
            -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x), y[..., None], -1))
            for x, y in pairs
        )

    value, gradients = jax.jit(jax.value_and_grad(loss))(variables["params"])
    expected = theirs(model, inputs, labels=labels, next_sentence_label=follows).loss
    expected.backward()
    assert abs(float(value) - float(expected.detach())) < 1e-4
    ours = _as_theirs(gradients)
    wanted = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    assert ours.keys() == wanted.keys()
    largest = max(np.linalg.norm(gradient) for gradient in wanted.values())
    for name, gradient in wanted.items():
        # Softmax is invariant to a shift of all keys: their bias has no gradient, up to rounding.
        scale = largest if name.endswith("key.bias") else np.linalg.norm(gradient)
        assert np.linalg.norm(ours[name] - gradient) < 1e-4 * scale, name
        assert scale > 1e-4 * largest, name


def _as_theirs(params):
    found = {}
    for name, leaf in _names.flatten({"params": params}).items():
        there = _names.counterpart(_huggingface.FAMILIES[0].table, name)
        found[there.name] = there.layout.to_theirs(np.asarray(leaf))
    return found
