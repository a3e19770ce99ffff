"""Decoders compute what Llama, Qwen3 and GPT-2 of `transformers` compute, and so do gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_networks as torch_side
import transformers

import lbopt
from lbopt.interchange import _huggingface, _names, save_huggingface
from lbopt.models import DecoderLM, RopeScaling, stack_layers, unstack_layers

VOCABULARY = 53
LENGTH = 70
"""Longer than a block of causal attention."""
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
SHAPE |= {"intermediate_size": 40, "max_position_embeddings": 128, "num_attention_heads": 4}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SMALL_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 80}
SMALL_GPT2 |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def llama(**options):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SHAPE, **options}))


def qwen3(**options):
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**SHAPE, **options}))


def gpt2(**options):
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**SMALL_GPT2, **options}))


THEIRS = {
    "llama": (llama, {}),
    "grouped queries": (llama, {"num_key_value_heads": 2}),
    "tied, wide heads": (llama, {"tie_word_embeddings": True, "head_dim": 12}),
    "rotary positions of Llama 3.1": (llama, {"rope_parameters": LLAMA3}),
    "qwen3": (qwen3, {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}),
    "gpt2": (gpt2, {}),
    "gpt2, untied, exact": (
        gpt2,
        {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 24},
    ),
}


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, VOCABULARY, (2, LENGTH))


@pytest.fixture(scope="module")
def weights():
    """Return weights of the summed logits, so that every one of them matters."""
    return np.random.default_rng(1).normal(size=(2, LENGTH, VOCABULARY)).astype(np.float32)


def as_theirs(params, module):
    """Return our arrays under the names of `transformers`, in its layouts."""
    family = next(family for family in _huggingface.FAMILIES if family.describes(module))
    arrays = {}
    for name, leaf in _names.flatten({"params": params}).items():
        found = _names.counterpart(family.table, name)
        arrays[found.name] = found.layout.to_theirs(np.asarray(leaf))
    return _huggingface._joined(arrays, family)


def assert_equal_functions(model, module, params, tokens, weights):
    """Compare logits and all gradients of a weighted sum of their sines."""

    def loss(params):
        logits = module.apply({"params": params}, {"tokens": tokens}, train=True)["logits"]
        return jnp.sum(jnp.asarray(weights) * jnp.sin(logits)), logits

    (_, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    expected = model.train()(input_ids=torch.tensor(tokens)).logits
    model.zero_grad()
    (torch.tensor(weights) * torch.sin(expected)).sum().backward()
    expected = expected.detach().numpy()
    assert expected.std() > 0.3
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * np.abs(expected).max())

    if module.scan:
        gradients = unstack_layers(gradients)
    ours = as_theirs(gradients, module)
    wanted = {name: leaf.grad.numpy() for name, leaf in model.named_parameters()}
    assert ours.keys() == wanted.keys()
    for name, gradient in wanted.items():
        limit = 1e-4 * np.abs(gradient).max()
        # A bias of the keys shifts all scores of a query, which softmax ignores.
        if "c_attn.bias" in name:
            limit += 1e-5 * np.abs(wanted[name.replace("bias", "weight")]).max()
        np.testing.assert_allclose(ours[name], gradient, rtol=0, atol=limit, err_msg=name)


@pytest.mark.parametrize("case", THEIRS)
def test_their_weights_in_our_network(case, moved, tokens, weights):
    make, options = THEIRS[case]
    model = torch_side.randomized(make(**options))
    module, variables = moved(model)
    params = variables["params"]
    assert_equal_functions(model, module, params, tokens, weights)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == torch_side.count(model)


FORM = {"vocab_size": VOCABULARY, "num_layers": 2, "width": 32, "num_heads": 4, "inner_width": 40}
FORM |= {"max_length": 128}
GPT2_FORM = {**FORM, "norm": "layer", "positions": "learned", "activation": "gelu_tanh"}
GPT2_FORM |= {"has_bias": True}
OURS = {
    "llama": (
        {"num_kv_heads": 2, "tied": False, "rope_scaling": RopeScaling(4.0, 1.0, 4.0, 32)},
        transformers.LlamaForCausalLM,
    ),
    "qwen3": ({"qk_norm": True, "head_width": 16}, transformers.Qwen3ForCausalLM),
    "gpt2": (GPT2_FORM, transformers.GPT2LMHeadModel),
}


@pytest.mark.parametrize("case", OURS)
def test_our_weights_in_their_network(case, tmp_path, tokens, weights):
    """The layers are scanned here, and a folder that was written is read as it was."""
    options, kind = OURS[case]
    module = DecoderLM(**{**FORM, **options})
    inputs = {"tokens": tokens}
    variables = torch_side.randomized_variables(module, inputs)
    scanned = module.clone(scan=True)
    stacked = {"params": stack_layers(variables["params"])}
    save_huggingface(tmp_path / "saved", scanned, stacked)

    model, found = kind.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(found.values()), found
    assert_equal_functions(model, scanned, stacked["params"], tokens, weights)

    again, read = lbopt.load_huggingface(tmp_path / "saved")
    assert again == module.clone(
        num_kv_heads=again.num_kv_heads,
        head_width=again.head_width,
        residual_init=again.residual_init,
    )
    jax.tree.map(np.testing.assert_array_equal, read["params"], variables["params"])


@pytest.mark.parametrize("qk_norm", [False, True])
def test_scales_are_multiplied_into_the_weights(qk_norm, tmp_path, tokens):
    """Networks that take the numbers of narrower, shallower ones have scales beside weights."""
    module = DecoderLM(**FORM, qk_norm=qk_norm, readout_scale=0.3, branch_scale=0.6)
    module = module.clone(attention_scale=0.5)
    variables = torch_side.randomized_variables(module, {"tokens": tokens})
    save_huggingface(tmp_path / "saved", module, variables)
    kind = transformers.Qwen3ForCausalLM if qk_norm else transformers.LlamaForCausalLM
    model = kind.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor(tokens)).logits.numpy()
    logits = module.apply(variables, {"tokens": tokens}, train=False)["logits"]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_a_folder_of_gpt2_as_openai_saved_it(tmp_path, tokens):
    """Its tensors lack the prefix, and the masks of attention are among them."""
    model = torch_side.randomized(gpt2())
    model.save_pretrained(tmp_path)
    arrays = {
        name.removeprefix("transformer."): value.contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    arrays["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    torch_side.save_file(arrays, tmp_path / "model.safetensors", {"format": "pt"})
    module, variables = lbopt.load_huggingface(tmp_path)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor(tokens)).logits.numpy()
    logits = module.apply(variables, {"tokens": tokens}, train=False)["logits"]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
