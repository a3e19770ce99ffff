"""Decoders: initial values, rematerialisation, precision, and what optimizers make of them.

That they compute what `transformers` computes is held by tests/interchange/test_parity_decoder.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused

import lbopt
from lbopt.models import DecoderLM

SIZE = {"vocab_size": 50, "num_layers": 2, "width": 16, "num_heads": 4, "inner_width": 24}
TOKENS = {"tokens": np.random.default_rng(0).integers(0, 50, (2, 9))}
GPT2 = {"norm": "layer", "positions": "learned", "activation": "gelu_tanh", "has_bias": True}


def shapes_of(module):
    return jax.eval_shape(lambda: module.init(jax.random.key(0), TOKENS, train=False))["params"]


def random_params(module):
    """Return parameters without zeros or ones, so that every one of them matters."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: jnp.float32(rng.normal(0, 0.3, leaf.shape)), shapes_of(module))


@pytest.mark.everyday("layer")
@pytest.mark.parametrize("remat", ["attention", "layer"])
def test_rematerialisation_changes_no_gradient(remat):
    """With dropout this also shows that the recomputation repeats the forward pass's draws."""
    drops = {"dropout_rate": 0.3, "attention_dropout_rate": 0.2}
    plain = DecoderLM(**SIZE, num_kv_heads=2, qk_norm=True, **drops)
    params = random_params(plain)

    def gradient(module):
        def loss(params):
            rngs = {"example": jax.random.key(3)}
            logits = module.apply({"params": params}, TOKENS, True, rngs=rngs)["logits"]
            return jnp.mean(jnp.sin(logits))

        return jax.grad(loss)(params)

    wanted, found = (gradient(module) for module in (plain, plain.clone(remat=remat)))
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(wanted))
    compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * scale)  # noqa: E731
    jax.tree.map(compare, found, wanted)
    without = gradient(plain.clone(dropout_rate=0.0, attention_dropout_rate=0.0))
    gaps = jax.tree.map(lambda a, b: np.abs(a - b).max() > 1e-4 * scale, without, wanted)
    assert np.mean(jax.tree.leaves(gaps)) > 0.9, "dropout has no effect"


def test_bf16_is_near_to_fp32_with_logits_and_parameters_in_fp32():
    module = DecoderLM(**SIZE, num_kv_heads=2)
    params = random_params(module)
    logits, rounded = (
        one.apply({"params": params}, TOKENS, train=False)["logits"]
        for one in (module, module.clone(dtype=jnp.bfloat16))
    )
    assert rounded.dtype == jnp.float32
    gap = np.linalg.norm(rounded - logits) / np.linalg.norm(logits)
    assert 1e-4 < gap < 0.03
    wide = shapes_of(module.clone(dtype=jnp.bfloat16))
    assert {leaf.dtype for leaf in jax.tree.leaves(wide)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize(("branch_scale", "std"), [(1.0, 0.02), (0.25, 0.05)])
def test_initial_values(branch_scale, std):
    """The last matrix of each branch starts smaller, by the depth of the base network."""
    module = DecoderLM(vocab_size=500, num_layers=8, width=64, num_heads=2, tied=False, scan=True)
    assert module.init_std == 0.02
    module = module.clone(branch_scale=branch_scale, init_std=std)
    params = module.init(jax.random.key(0), TOKENS, train=False)["params"]
    last = std / np.sqrt(2 * 8 * branch_scale)
    for name in ("query", "key", "value", "gate", "inner", "attention_output", "output"):
        (leaf,) = params["layers"][name].values()
        wanted = last if "output" in name else std
        assert np.std(leaf) == pytest.approx(wanted, rel=0.03), name
    for leaf in (params["word_embedding"]["embedding"], params["head"]["kernel"]):
        assert np.std(leaf) == pytest.approx(std, rel=0.03)
    plain = module.clone(residual_init=False, num_layers=4)
    params = plain.init(jax.random.key(0), TOKENS, train=False)["params"]
    assert np.std(params["layers"]["output"]["kernel"]) == pytest.approx(std, rel=0.03)


HIDDEN = {
    "attention_output/kernel": (1, 2),
    "gate/kernel": (1, 2),
    "inner/kernel": (1, 2),
    "key/weight": (2, 1),
    "output/kernel": (1, 2),
    "query/weight": (2, 1),
    "value/weight": (2, 1),
}
"""Matrices of a stack of layers, with the axes of their inputs and outputs."""


def test_matrix_optimizers_take_the_matrices_of_layers_alone():
    params = shapes_of(DecoderLM(**SIZE, tied=False, qk_norm=True, scan=True))
    stacked = lbopt.stacked_paths("^layers/")
    numbers = lbopt.masks.matrix_dimension_numbers(params, stacked)
    leaves = jax.tree.leaves_with_path(
        numbers, is_leaf=lambda x: x is None or hasattr(x, "_asdict")
    )
    found = {lbopt.tree.path_name(path): axes for path, axes in leaves}
    axes = {
        name.removeprefix("layers/"): (*one.reduction_axis, *one.output_axis)
        for name, one in found.items()
        if one is not None
    }
    assert axes == HIDDEN


@pytest.mark.parametrize("form", [{}, {**GPT2, "activation": "gelu"}])
def test_biases_norms_and_no_matrices_are_left_out_of_the_decay(form):
    params = shapes_of(DecoderLM(**SIZE, **form))
    roles = lbopt.masks.explain_roles(params)
    for name, found in roles.items():
        module, last = name.split("/")[-2:]
        role = {"scale": "norm", "embedding": "embedding"}.get(last, "weight")
        if last == "bias":
            role = "norm" if "norm" in module else "bias"
        assert found.role == role, name


@pytest.mark.parametrize(
    ("options", "field", "value", "code"),
    [
        ({"num_heads": 3}, "num_heads", 3, "value"),
        ({"num_kv_heads": 3}, "num_kv_heads", 3, "value"),
        ({"head_width": 5}, "head_width", 5, "value"),
        ({"norm": "batch"}, "norm", "batch", "choice"),
        ({"positions": "alibi"}, "positions", "alibi", "choice"),
        ({"activation": "swigl"}, "activation", "swigl", "choice"),
        ({"max_length": 8}, "sequence_length", 9, "mismatch"),
        ({"scan": True, "remat_layers": 1, "remat": "layer"}, "remat_layers", 1, "conflict"),
    ],
)
def test_refusals(options, field, value, code):
    with refused(field, value, code):
        shapes_of(DecoderLM(**{**SIZE, **options}))
