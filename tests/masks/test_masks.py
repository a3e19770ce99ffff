"""Roles of leaves on real Flax modules, and masks in every form."""

import collections
import dataclasses
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from refusal import refused

import lbopt
from lbopt import masks, stacks, tree
from lbopt.transforms import resolve_labels


def roles(params):
    return collections.Counter(jax.tree.leaves(masks.tree_roles(params)))


def init(module, *inputs):
    return jax.eval_shape(lambda: module.init(jax.random.key(0), *inputs))["params"]


class Network(nn.Module):
    """Every normalization layer of Flax between two convolutions, and a dense layer."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (3, 3), name="stem")(x)
        for norm in (
            nn.BatchNorm(use_running_average=True),
            nn.LayerNorm(),
            nn.GroupNorm(2),
            nn.InstanceNorm(),
            nn.RMSNorm(),
        ):
            x = norm(x)
        x = nn.Conv(4, (3, 3), use_bias=False, feature_group_count=4)(x)
        x = nn.LayerNorm(name="ln")(x)
        x = lbopt.BatchNorm(name="bn1")(x, True)
        return nn.Dense(3)(x.mean((1, 2)))


MODULES = {
    "dense": (nn.Dense(3), (np.zeros((2, 4)),), {"weight": 1, "bias": 1}),
    "conv": (nn.Conv(3, (3, 3)), (np.zeros((2, 5, 5, 4)),), {"weight": 1, "bias": 1}),
    "embed": (nn.Embed(5, 3), (np.zeros((2,), int),), {"embedding": 1}),
    "attention": (
        nn.MultiHeadDotProductAttention(2),
        (np.zeros((2, 5, 4)),),
        {"weight": 4, "bias": 4},
    ),
    "lstm": (nn.RNN(nn.LSTMCell(3)), (np.zeros((2, 5, 4)),), {"weight": 8, "bias": 4}),
    "optimized_lstm": (
        nn.RNN(nn.OptimizedLSTMCell(3)),
        (np.zeros((2, 5, 4)),),
        {"weight": 8, "bias": 4},
    ),
    "prelu": (nn.PReLU(), (np.zeros((2, 4), np.float32),), {"vector": 1}),
    "network": (Network(), (np.zeros((2, 8, 8, 3)),), {"weight": 3, "bias": 2, "norm": 13}),
}


@pytest.mark.parametrize("name", MODULES)
def test_roles_of_flax_modules(name):
    module, inputs, expected = MODULES[name]
    params = init(module, *inputs)
    assert roles(params) == expected
    chosen = expected.get("weight", 0) + expected.get("embedding", 0)
    assert sum(jax.tree.leaves(masks.weights_only(params))) == chosen


@pytest.mark.parametrize(
    "module",
    [nn.BatchNorm(use_running_average=True), nn.LayerNorm(), nn.GroupNorm(2), nn.RMSNorm()],
    ids=lambda m: type(m).__name__,
)
def test_normalization_without_a_parent_is_never_a_weight(module):
    params = init(module, np.zeros((2, 4)))
    assert set(roles(params)) <= {"norm", "bias"}
    assert not any(jax.tree.leaves(masks.weights_only(params)))


@pytest.mark.parametrize(
    ("name", "ndim", "role"),
    [
        ("BatchNorm_0/bias", 1, "norm"),
        ("block/layer_norm/bias", 1, "norm"),
        ("encoder/final_layer_norm/kernel", 1, "norm"),
        ("batch_normalization_12/beta", 1, "norm"),
        ("ln1/bias", 1, "norm"),
        ("gn_2/offset", 1, "norm"),
        ("layer1/BatchNorm2d/weight", 1, "norm"),
        ("decoder/ln_f/weight", 1, "norm"),
        ("SyncBatchNorm_3/scale", 1, "norm"),
        ("pre_norm/w", 2, "norm"),
        ("head/gamma", 1, "norm"),
        ("attention/query/bias", 2, "bias"),
        ("head/b", 1, "bias"),
        ("Dense_0/kernel", 2, "weight"),
        ("normal_dense/kernel", 2, "weight"),
        ("denorm_decoder/kernel", 2, "weight"),
        ("learn/kernel", 2, "weight"),
        ("kernel", 1, "vector"),
        ("logit_temperature", 0, "vector"),
        ("prediction_bias", 1, "bias"),
        ("bn_init/bias", 1, "norm"),
        ("norm_proj/bias", 1, "norm"),
        ("norm_proj/kernel", 2, "weight"),
        ("norm_proj/weight", 2, "weight"),
        ("projection_norm/weight", 2, "norm"),
        ("block/layernorm_before/weight", 2, "norm"),
        ("normalization/bias", 2, "norm"),
        ("ln_pre/weight", 2, "norm"),
        ("norm_mlp/w", 2, "norm"),
        ("layernorm_embedding/weight", 2, "norm"),
        ("pre_layrnorm/weight", 2, "norm"),
        ("mtp/enorm/weight", 2, "norm"),
        ("before_rms/weight", 1, "norm"),
        ("layer_norms/0/weight", 2, "norm"),
        ("lnF/w", 1, "norm"),
        ("adaLN_modulation/1/weight", 2, "weight"),
        ("norm1/linear/weight", 2, "weight"),
        ("unnorm/weight", 2, "weight"),
        ("weight_normal/weight", 2, "weight"),
        ("experts/gate_up_proj_bias", 2, "bias"),
        ("attention/r_w_bias", 2, "bias"),
        ("attention/in_proj_bias", 1, "bias"),
        ("lstm/bias_ih_l0_reverse", 2, "bias"),
        ("attention/pos_bias_u", 2, "bias"),
        ("bias_projection/weight", 2, "weight"),
        ("relative_position_bias_table", 2, "embedding"),
        ("relative_attention_bias/embedding", 2, "embedding"),
        ("mlp/up/weight/0", 2, "weight"),
        ("mlp/up/bias/0", 2, "bias"),
        ("ln_1/weight/0", 2, "norm"),
        ("layers/3/g", 2, "weight"),
        ("0", 2, "weight"),
        ("layers/0", 1, "vector"),
        ("net/~/block_0/~/shortcut_batchnorm/offset", 1, "norm"),
        ("net/~/linear_1/w", 2, "weight"),
        ("multi_head_attention/query/b", 1, "bias"),
        ("relative_attention_bias", 2, "embedding"),
        ("q_einsum/lora/b", 3, "weight"),
        ("lora/shift/b", 1, "bias"),
        ("stem/gain", 1, "vector"),
        ("encoder.layer.0.LayerNorm.weight", 2, "norm"),
        ("encoder.layer.0.output.dense.weight", 2, "weight"),
    ],
)
def test_role_of_a_name(name, ndim, role):
    assert masks.leaf_role(name, np.zeros((2,) * ndim)) == role


PARAMS = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, {"dense": {"kernel": True, "bias": True}}),
        (True, {"dense": {"kernel": True, "bias": True}}),
        (False, {"dense": {"kernel": False, "bias": False}}),
        ({"dense": {"kernel": False, "bias": True}}, {"dense": {"kernel": False, "bias": True}}),
        (masks.weights_only, {"dense": {"kernel": True, "bias": False}}),
    ],
)
def test_resolve_mask(mask, expected):
    assert masks.resolve_mask(mask, PARAMS, "mask") == expected


def per_variable(params):
    return jax.tree.map(lambda v: v.ndim > 1, params, is_leaf=lambda v: isinstance(v, nnx.Variable))


NNX = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param)
BOXED = {"dense": {"kernel": nn.Partitioned(jnp.ones((2, 3)), ("in", None)), "bias": jnp.ones(3)}}
TAKEN_OUT = {"dense": {"kernel": jnp.ones((2, 3)), "bias": None}, "head": optax.MaskedNode()}
KERNEL = {"dense": {"kernel": True, "bias": False}}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Net:
    """Callable parameters, as in Equinox, and a field that is not an array."""

    kernel: Any
    bias: Any
    activation: Any = dataclasses.field(default=nn.relu, metadata={"static": True})

    def __call__(self, x):
        raise AssertionError("parameters are not a function of themselves")


@pytest.mark.parametrize(
    ("mask", "params", "expected"),
    [
        (per_variable(NNX), NNX, [False, True]),
        (
            lambda params: nnx.map_state(lambda path, v: path[-1] == "kernel", params),
            NNX,
            [False, True],
        ),
        ({"kernel": True, "bias": False}, NNX, [False, True]),
        (Net(True, False), Net(jnp.ones((2, 3)), jnp.ones(3)), [True, False]),
        (Net(True, False, nn.gelu), Net(jnp.ones((2, 3)), jnp.ones(3)), [True, False]),
        (lambda params: Net(True, False), Net(jnp.ones((2, 3)), jnp.ones(3)), [True, False]),
        (jax.tree_util.Partial(lambda value, params: {"dense": value}, True), PARAMS, [True, True]),
        ({"dense": True}, PARAMS, [True, True]),
        (
            {"stem": False, "dense": [True, False]},
            {"stem": PARAMS, "dense": (1.0, 2.0)},
            [True, False, False, False],
        ),
        (KERNEL, flax.core.freeze(PARAMS), [False, True]),
        (flax.core.freeze(KERNEL), PARAMS, [False, True]),
        (KERNEL, BOXED, [False, True]),
        (jax.tree.map(lambda leaf: leaf.ndim > 1, BOXED), PARAMS, [False, True]),
        ({"dense": {"kernel": True, "bias": False}, "head": {"kernel": True}}, TAKEN_OUT, [True]),
        ({"dense": {"kernel": True}}, TAKEN_OUT, [True]),
    ],
)
def test_a_mask_gives_a_value_per_leaf_or_per_subtree_at_the_same_names(mask, params, expected):
    selected = masks.resolve_mask(mask, params, "mask")
    assert jax.tree.structure(selected) == jax.tree.structure(params)
    assert jax.tree.leaves(selected) == expected
    if not tree.is_function(mask):
        as_stacks = stacks.resolve_stacked(
            jax.tree.map(int, mask), jax.tree.map(lambda _: jnp.ones((2, 3)), params)
        )
        assert jax.tree.leaves(as_stacks) == expected


@pytest.mark.parametrize("labels", [Net("a", "b"), lambda params: Net("a", "b"), [Net("a", "b")]])
def test_labels_are_a_tree_like_a_mask(labels):
    params = Net(jnp.ones((2, 3)), jnp.ones(3))
    params = [params] if isinstance(labels, list) else params
    assert jax.tree.leaves(resolve_labels(labels, params)) == ["a", "b"]
    assert jax.tree.leaves(resolve_labels(["a"], [params])) == ["a", "a"]


def test_resolve_mask_leaves_out_what_optax_masked_took():
    params = {"dense": {"kernel": jnp.ones((2, 3)), "bias": optax.MaskedNode()}}
    for mask in (None, True, masks.weights_only):
        assert masks.resolve_mask(mask, params, "mask") == {
            "dense": {"kernel": True, "bias": optax.MaskedNode()}
        }


def test_resolve_mask_of_an_empty_tree():
    assert masks.resolve_mask(masks.weights_only, {}, "mask") == {}


@pytest.mark.parametrize(
    ("mask", "field", "code", "fact"),
    [
        ({"dense": {"kernel": False, "bias": False}}, "my_mask", "value", "2"),
        (lambda params: jax.tree.map(lambda _: False, params), "my_mask", "value", "2"),
        ({"dense": {"kernel": True}}, "my_mask", "type", " at dense/bias;"),
        ({"dense": {"kernel": True, "bias": 1}}, "my_mask/dense/bias", "type", ""),
        ([True, True], "my_mask", "type", " at 0, 1, dense/bias, dense/kernel;"),
        (nnx.PathContains("kernel"), "my_mask", "type", "a function"),
        (PARAMS, "my_mask/dense/bias", "type", ""),
        ({"dense": True, "head": True}, "my_mask", "type", " at head;"),
        (
            {"dense": {"kernel": {"a": True}, "bias": True}},
            "my_mask",
            "type",
            " at dense/kernel, dense/kernel/a;",
        ),
        ({"dense": {"kernel": None, "bias": True}}, "my_mask", "type", " at dense/kernel;"),
    ],
)
def test_resolve_mask_refuses(mask, field, code, fact):
    with refused(field, code=code) as caught:
        masks.resolve_mask(mask, PARAMS, "my_mask")
    assert fact in caught.value.reason


STACKED = {
    "layers": {"kernel": np.zeros((3, 2, 4)), "bias": np.zeros((3, 4)), "gain": np.zeros((3, 4))},
    "head": {"kernel": np.zeros((4, 2))},
}


def test_masks_see_one_layer_of_a_stack():
    seen = {}

    def look(params):
        seen.update(jax.tree.map(lambda leaf: leaf.shape, params))
        return jax.tree.map(lambda leaf: leaf.ndim == 2, params)

    layers = {"layers": {"kernel": 1, "bias": 1, "gain": 1}, "head": {"kernel": 0}}
    chosen = masks.resolve_mask(look, STACKED, "mask", jax.tree.map(stacks.LayerAxes, layers))
    assert seen == {
        "layers": {"kernel": (2, 4), "bias": (4,), "gain": (4,)},
        "head": {"kernel": (4, 2)},
    }
    assert chosen == {
        "layers": {"kernel": True, "bias": False, "gain": False},
        "head": {"kernel": True},
    }
    assert masks.resolve_mask(masks.weights_only, STACKED, "mask")["layers"]["gain"], (
        "without the stack it is a matrix"
    )
    assert not masks.resolve_mask(
        masks.weights_only, STACKED, "mask", jax.tree.map(stacks.LayerAxes, layers)
    )["layers"]["gain"]


NET = {
    "stem": {"kernel": np.zeros((2, 2)), "bias": np.zeros(2)},
    "ln": {"scale": np.zeros(2), "bias": np.zeros(2)},
    "slope": np.zeros(2),
}


def chosen_by(mask):
    return {
        name
        for name, chosen in zip(tree.leaf_names(NET), jax.tree.leaves(mask(NET)), strict=True)
        if chosen
    }


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (lbopt.select_roles("weight"), {"stem/kernel"}),
        (lbopt.select_roles("weight", "vector"), {"stem/kernel", "slope"}),
        (lbopt.exclude_roles("norm", "bias"), {"stem/kernel", "slope"}),
        (lbopt.exclude_roles("norm"), {"stem/kernel", "stem/bias", "slope"}),
        (lbopt.select_paths(r"^stem/"), {"stem/kernel", "stem/bias"}),
        (lbopt.select_paths(r"kernel$", r"^slope$"), {"stem/kernel", "slope"}),
        (lbopt.exclude_paths(r"bias", r"scale"), {"stem/kernel", "slope"}),
    ],
    ids=lambda value: repr(sorted(value)) if isinstance(value, set) else repr(value),
)
def test_masks_by_role_and_by_path(mask, expected):
    assert chosen_by(mask) == expected


def is_vector(params):
    """Select by a plain function, as users' masks do: one value for all of `stem`."""
    return {"stem": False, "ln": jax.tree.map(lambda _: False, params["ln"]), "slope": True}


STEM = lbopt.select_paths("^stem/")
WEIGHTS = lbopt.weights_only
COMBINED = [
    (WEIGHTS & STEM, "weights_only & select_paths('^stem/')", {"stem/kernel"}),
    (
        WEIGHTS | lbopt.select_paths("slope"),
        "weights_only | select_paths('slope')",
        {"stem/kernel", "slope"},
    ),
    (
        ~WEIGHTS,
        "select_roles('bias', 'norm', 'vector')",
        {"stem/bias", "ln/scale", "ln/bias", "slope"},
    ),
    (
        ~STEM & ~WEIGHTS,
        "exclude_paths('^stem/') & select_roles('bias', 'norm', 'vector')",
        {"ln/scale", "ln/bias", "slope"},
    ),
    (
        ~(STEM | WEIGHTS),
        "exclude_paths('^stem/') & select_roles('bias', 'norm', 'vector')",
        {"ln/scale", "ln/bias", "slope"},
    ),
    (
        (WEIGHTS | is_vector) & ~STEM,
        "(weights_only | is_vector) & exclude_paths('^stem/')",
        {"slope"},
    ),
    (is_vector | WEIGHTS, "is_vector | weights_only", {"stem/kernel", "slope"}),
    (
        ~(WEIGHTS | is_vector),
        "select_roles('bias', 'norm', 'vector') & ~is_vector",
        {"stem/bias", "ln/scale", "ln/bias"},
    ),
    (
        lbopt.all_leaves & ~STEM,
        "all_leaves & exclude_paths('^stem/')",
        {"ln/scale", "ln/bias", "slope"},
    ),
]


@pytest.mark.parametrize(
    ("mask", "shown", "expected"), COMBINED, ids=[shown for _, shown, _ in COMBINED]
)
def test_masks_combine(mask, shown, expected):
    assert chosen_by(mask) == expected
    assert chosen_by(~mask) == set(tree.leaf_names(NET)) - expected
    assert repr(mask) == shown
    assert ~~mask == mask
    assert isinstance(mask, (masks.CombinedMask, masks.RoleMask))
    assert hash(~~mask) == hash(mask)
    decayed = optax.add_decayed_weights(0.5, mask)  # Optax accepts the mask unchanged
    updates, _ = decayed.update(NET, decayed.init(NET), jax.tree.map(np.ones_like, NET))
    assert {name for name, leaf in tree.by_name(updates).items() if np.all(leaf == 0.5)} == expected


def test_what_is_no_mask_does_not_combine():
    for other in (None, True, {"stem": True}):
        with pytest.raises(TypeError):
            WEIGHTS & other
    with refused("mask/ln/bias", 1, "type"):
        (WEIGHTS & (lambda params: jax.tree.map(jnp.ndim, params)))(NET)
    with refused("mask", ~lbopt.select_paths("renamed"), "value"):
        (WEIGHTS & ~lbopt.select_paths("renamed"))(NET)


@pytest.mark.parametrize("argument", ["weight_decay_mask", "trust_ratio_mask"])
def test_excluding_alone_does_not_lose_the_default_without_a_word(argument):
    def resolved(mask):
        return tree.by_name(masks.resolve_mask(mask, NET, argument))

    for alone in (~STEM, ~STEM & lbopt.exclude_paths("slope"), is_vector | ~STEM):
        with pytest.warns(UserWarning, match=f"{argument} = .* weights_only & "):
            assert resolved(alone)["ln/bias"]
    for said in (lbopt.all_leaves & ~STEM, lbopt.exclude_roles("weight"), STEM | WEIGHTS):
        resolved(said)
    resolved(lbopt.exclude_paths("bias", "scale", "slope"))  # as the default does
    assert resolved(masks.without("slope"))["stem/kernel"]
    assert masks.resolve_mask(~STEM, NET, "sharded_mask")["ln"]["bias"]


def test_a_config_lists_what_is_left_out_of_a_default():
    assert chosen_by(masks.without("^ln/", default=lbopt.exclude_roles("vector"))) == {
        "stem/kernel",
        "stem/bias",
    }
    assert chosen_by(masks.without("^ln/", default=None)) == {"stem/kernel", "stem/bias", "slope"}
    assert masks.without(default=None) is None
    assert masks.without("^ln/", default=False) is False
    assert masks.without() is WEIGHTS
    with refused("default", {"stem": True}, "type"):
        masks.without("^ln/", default={"stem": True})


def test_kinds_of_masks_are_public():
    assert isinstance(STEM, masks.PathMask)
    assert isinstance((WEIGHTS & is_vector).masks[1], masks.FunctionMask)


def test_excluding_is_selecting_the_others():
    assert (
        lbopt.exclude_roles("norm", "bias", "vector")
        == lbopt.weights_only
        == lbopt.select_roles("weight")
    )
    assert repr(lbopt.exclude_roles("vector", "bias", "norm")) == "weights_only"


@pytest.mark.parametrize(
    ("mask", "field", "code", "fact"),
    [
        (
            lambda: lbopt.select_paths(r"kernel", r"attention")(NET),
            "mask",
            "value",
            "'attention'",
        ),
        (
            lambda: lbopt.exclude_paths(r"BatchNorm")(NET),
            "mask",
            "value",
            "'BatchNorm'",
        ),
        (lambda: lbopt.select_paths(r".")(NET), "mask", "value", "= select_paths('.'): "),
        (lambda: lbopt.exclude_paths(r".")(NET), "mask", "value", "= exclude_paths('.'): "),
        (lambda: lbopt.select_paths(), "patterns", "missing", ""),
        (lambda: lbopt.select_paths("("), "pattern", "value", ""),
        (lambda: lbopt.select_paths(b"kernel"), "pattern", "value", ""),
        (lambda: lbopt.select_roles("weights"), "roles", "choice", "vector, weight"),
        (lambda: lbopt.exclude_roles("bias", "norm", "vector", "weight"), "roles", "choice", ""),
        (
            lambda: masks.resolve_mask("kernel", NET, "my_mask"),
            "my_mask",
            "type",
            "lbopt.select_paths('kernel')",
        ),
    ],
)
def test_masks_refuse(mask, field, code, fact):
    with refused(field, code=code) as caught:
        mask()
    assert fact in str(caught.value)


def role_names(names):
    """Return roles of the leaves of a tree made of {"a/b/c": shape}."""
    params = {}
    for name, shape in names.items():
        *parents, last = name.split("/")
        inside = params
        for parent in parents:
            inside = inside.setdefault(parent, {})
        inside[last] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return dict(
        zip(tree.leaf_names(params), jax.tree.leaves(masks.tree_roles(params)), strict=True)
    )


# Families whose PyTorch names differ most: norms before and after layers, in lists, and named by
# position; biases of experts and of relative attention.
FAMILIES = [
    "bart",
    "bert",
    "blip_2_qformer",
    "bloom",
    "clip",
    "convnextv2",
    "cvt",
    "deberta-v2",
    "encodec",
    "flaubert",
    "gpt2",
    "gpt_oss",
    "groupvit",
    "levit",
    "mamba",
    "mobilenet_v2",
    "qwen2",
    "resnet",
    "rwkv",
    "siglip",
    "swin",
    "t5",
    "vit",
    "wav2vec2",
    "whisper",
    "xlnet",
]


def of_pytorch(module, name):
    """Return a parameter's role from its module's type, or None if the type does not tell."""
    torch = pytest.importorskip("torch")
    norms = (torch.nn.GroupNorm, torch.nn.modules.batchnorm._NormBase)
    if isinstance(module, norms) or type(module).__name__.endswith(("Norm", "GRN")):
        return "norm"
    if "bias" in name and not name.endswith("table"):
        return "bias"
    if isinstance(module, torch.nn.Embedding):
        return "embedding"
    layers = (torch.nn.Linear, torch.nn.modules.conv._ConvNd, torch.nn.RNNBase)
    return "weight" if isinstance(module, layers) else None


@pytest.mark.parametrize("family", FAMILIES)
def test_roles_of_hugging_faces_pytorch_names(family):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family)

    for depth in (
        "num_hidden_layers",
        "n_layer",
        "num_layers",
        "encoder_layers",
        "decoder_layers",
        "n_layers",
    ):
        if isinstance(getattr(config, depth, None), int):
            setattr(config, depth, 1)

    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)

    expected = {}
    shapes = {}
    for path, module in model.named_modules():
        for name, leaf in module.named_parameters(recurse=False):
            full = f"{path}.{name}".lstrip(".").replace(".", "/")
            shapes[full] = tuple(leaf.shape)
            expected[full] = of_pytorch(module, name)

    assert not wrong_roles(shapes, expected)
    # Arrays of three dimensions are no tables by their names.
    stacks_of_two = {name: (2, *shape) for name, shape in shapes.items()}
    weights = {name: "weight" if role == "embedding" else role for name, role in expected.items()}
    assert not wrong_roles(stacks_of_two, weights)


def wrong_roles(shapes, expected):
    roles = role_names(shapes)
    return {name: roles[name] for name, role in expected.items() if role not in (None, roles[name])}


def test_a_gain_and_a_shift_of_one_shape_are_a_norm_whatever_their_module_is_called():
    shapes = {
        "0/weight": (3, 3),
        "0/bias": (3,),
        "1/weight": (3,),
        "1/bias": (3,),
        "2/scale": (2, 3),
        "2/offset": (2, 3),
        "norm/weight": (4, 3),
        "norm/bias": (4,),
        "kernel": (2, 2),
        "bias": (2,),
        "scale": (2,),
    }

    expected = [
        "weight",
        "bias",
        "norm",
        "norm",
        "norm",
        "norm",
        "weight",
        "bias",
        "weight",
        "bias",
        "norm",
    ]

    assert role_names(shapes) == dict(zip(shapes, expected, strict=True))


def test_neighbours_tell_shifts_from_second_factors():
    shapes = {
        "mlp/w1": (3, 4),
        "mlp/b1": (2, 4),
        "attention/W_Q": (2, 3, 3),
        "attention/b_Q": (2, 3),
        "adapter/a": (3, 2),
        "adapter/b": (2, 3),
        "state_space/B_re": (2, 3),
        "conv/weight": (4, 3, 3, 3),
        "conv/gain": (4, 1, 1, 1),
    }
    expected = ["weight", "bias", "weight", "bias", "weight", "weight", "weight", "weight", "norm"]
    assert role_names(shapes) == dict(zip(shapes, expected, strict=True))


def test_flat_dictionaries_have_the_roles_of_nested_ones():
    nested = {
        "blocks": {
            "0": {"weight": np.zeros((2, 3)), "bias": np.zeros((2, 3))},
            "1": {"weight": np.zeros((3, 3))},
        }
    }
    expected = ["norm", "norm", "weight"]
    for flat in (
        nested,
        *(flax.traverse_util.flatten_dict(nested, sep=separator) for separator in ("/", ".", None)),
    ):
        assert jax.tree.leaves(masks.tree_roles(flat)) == expected
    assert tree.leaf_names(flat) == ["blocks/0/bias", "blocks/0/weight", "blocks/1/weight"]


def module(name, *fields):
    """Return a class of Equinox-like modules: a pytree whose leaves are attributes."""
    made = dataclasses.make_dataclass(name, fields)
    return jax.tree_util.register_dataclass(made, list(fields), [])


def test_roles_of_module_objects_come_from_their_classes():
    layer_norm = module("LayerNorm", "weight")
    linear = module("Linear", "weight", "bias")
    weight_norm = module("WeightNorm", "layer", "g")
    net = module("Net", "layers", "norm", "gain")
    box = module("Box", "value")

    matrix = np.zeros((2, 3))
    vector = np.zeros(3)
    params = net(
        [
            layer_norm(matrix),
            linear(matrix, vector),
            weight_norm(linear(matrix, vector), np.zeros((2, 1))),
        ],
        linear(matrix, None),
        layer_norm(box(matrix)),
    )

    assert dict(
        zip(tree.leaf_names(params), jax.tree.leaves(masks.tree_roles(params)), strict=True)
    ) == {
        "layers/0/weight": "norm",
        "layers/1/weight": "weight",
        "layers/1/bias": "bias",
        "layers/2/layer/weight": "weight",
        "layers/2/layer/bias": "bias",
        "layers/2/g": "norm",
        "norm/weight": "weight",
        "gain/weight": "norm",
    }
    assert masks.weights_only(params).gain.weight.value is False


def test_roles_of_nnx_modules_and_of_their_state():
    rngs = nnx.Rngs(0)
    net = nnx.List(
        [nnx.Linear(2, 3, rngs=rngs), nnx.LayerNorm(3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)]
    )
    expected = {
        "0/bias": "bias",
        "0/kernel": "weight",
        "1/bias": "norm",
        "1/scale": "norm",
        "2/bias": "norm",
    }
    for params in (nnx.state(net, nnx.Param), nnx.split(net, nnx.Param, ...)[1].to_pure_dict()):
        roles = dict(
            zip(tree.leaf_names(params), jax.tree.leaves(masks.tree_roles(params)), strict=True)
        )
        assert roles == {**expected, "2/scale": "norm"}


def test_roles_of_equinox_itself():
    eqx = pytest.importorskip("equinox")
    key = jax.random.key(0)
    layers = [
        eqx.nn.LayerNorm((2, 3)),
        eqx.nn.WeightNorm(eqx.nn.Linear(2, 3, key=key)),
        eqx.nn.RMSNorm((2, 3)),
        eqx.nn.GRUCell(2, 3, key=key),
    ]
    params = eqx.filter(eqx.nn.Sequential(layers), eqx.is_inexact_array)
    assert roles(params) == {"norm": 5, "weight": 3, "bias": 3}
    assert sum(jax.tree.leaves(masks.weights_only(params))) == 3


@pytest.mark.parametrize("argument", ["trust_ratio_mask", "weight_decay_mask"])
def test_a_bare_array_has_no_name_for_a_mask(argument):
    array = jnp.ones((2, 3))
    others = {"trust_ratio_mask": None, "weight_decay_mask": None} | {argument: lbopt.weights_only}
    with refused(argument, lbopt.weights_only, "type"):
        lbopt.lamb(0.1, weight_decay=0.1, **others).init(array)
    tx = lbopt.lamb(0.1, weight_decay=0.1, trust_ratio_mask=None, weight_decay_mask=None)
    assert tx.update(array, tx.init(array), array)[0].shape == (2, 3)
