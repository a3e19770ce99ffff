"""The table of roles for the frameworks: a CNN, a transformer block, an RMSNorm model, LoRA."""

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax_internals import tree_util
from refusal import refused

import lbopt
from lbopt import masks, tree

# ---- One model per framework, as shapes


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, image, token):
        x = nn.Conv(4, (3, 3), name="stem")(image)
        x = nn.BatchNorm(use_running_average=True, name="bn")(x)
        nn.Dense(3, name="classifier")(x.mean((1, 2)))

        y = nn.Embed(7, 4, name="tokens")(token)
        y += self.param("pos_embed", nn.initializers.zeros, (1, 2, 4))
        y += nn.MultiHeadDotProductAttention(2, name="attention")(nn.LayerNorm(name="ln_1")(y))
        y = nn.Dense(4, name="norm_out")(y)
        y = nn.RMSNorm(name="rms")(y)
        a = self.param("lora_a", nn.initializers.zeros, (4, 2))
        return y @ a @ self.param("lora_b", nn.initializers.zeros, (2, 4))


def linen():
    inputs = (jnp.zeros((1, 8, 8, 3)), jnp.zeros((1, 2), int))
    return jax.eval_shape(lambda: LinenNet().init(jax.random.key(0), *inputs))["params"]


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.bn = nnx.BatchNorm(4, rngs=rngs)
        self.tokens = nnx.Embed(7, 4, rngs=rngs)
        attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.layers = nnx.List([nnx.LayerNorm(4, rngs=rngs), attention])
        self.rms = nnx.RMSNorm(4, rngs=rngs)
        self.norm_out = nnx.LoRALinear(4, 3, lora_rank=2, rngs=rngs)


def nnx_params(module):
    return nnx.to_pure_dict(nnx.split(module, nnx.Param, ...)[1])


def of_nnx():
    return nnx_params(nnx.eval_shape(lambda: NnxNet(nnx.Rngs(0))))


def haiku():
    hk = pytest.importorskip("haiku")

    def net(image, token):
        with_both = {"create_scale": True, "create_offset": True}
        x = hk.BatchNorm(**with_both, decay_rate=0.9)(hk.Conv2D(4, 3)(image), True)
        hk.Linear(3)(x.mean((1, 2)))
        y = hk.Embed(7, 4)(token)
        y += hk.MultiHeadAttention(2, 2, w_init=hk.initializers.Constant(0))(y, y, y)
        y = hk.LayerNorm(-1, create_scale=False, create_offset=True)(y)
        y = hk.Linear(4, name="norm_out", with_bias=False)(y)
        return hk.RMSNorm(-1)(y)

    inputs = (jnp.zeros((1, 8, 8, 3)), jnp.zeros((1, 2), int))
    model = hk.transform_with_state(net)
    return jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs)[0])


@functools.cache
def equinox_net():
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        stem: eqx.nn.Conv2d
        bn: eqx.nn.BatchNorm
        tokens: eqx.nn.Embedding
        layers: list
        rms: eqx.nn.RMSNorm
        lora_a: jax.Array
        lora_b: jax.Array

        def __init__(self, key):
            self.stem = eqx.nn.Conv2d(3, 4, 3, key=key)
            self.bn = eqx.nn.BatchNorm(4, "batch", mode="ema")
            self.tokens = eqx.nn.Embedding(7, 4, key=key)
            attention = eqx.nn.MultiheadAttention(2, 4, use_output_bias=True, key=key)
            self.layers = [eqx.nn.LayerNorm((2, 4)), attention, jax.nn.relu]
            self.rms = eqx.nn.RMSNorm(4)
            self.lora_a = jnp.zeros((4, 2))
            self.lora_b = jnp.zeros((2, 4))

    net, _ = eqx.filter_eval_shape(lambda: eqx.nn.make_with_state(Net)(jax.random.key(0)))
    return eqx.filter(net, lambda leaf: hasattr(leaf, "dtype"))


@functools.cache
def haliax_net():
    # Haliax 1.3 imports a name that newer versions of JAX lack, for an annotation.
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(tree_util, "BuiltInKeyEntry", object, raising=False)
        hax = pytest.importorskip("haliax")
    eqx = pytest.importorskip("equinox")
    axes = {"D": 4, "F": 5, "V": 7, "L": 3}
    dim, inner, vocabulary, depth = (hax.Axis(name, size) for name, size in axes.items())

    class Block(eqx.Module):
        ln_1: hax.nn.LayerNorm
        up: hax.nn.Linear

        @staticmethod
        def init(key):
            return Block(hax.nn.LayerNorm.init(dim), hax.nn.Linear.init(dim, inner, key=key))

    class LlamaRmsNorm(eqx.Module):
        weight: hax.NamedArray

    class Net(eqx.Module):
        token_embeddings: hax.nn.Embedding
        transformer: hax.nn.Stacked
        last: LlamaRmsNorm

    def make():
        key = jax.random.key(0)
        return Net(
            hax.nn.Embedding.init(vocabulary, dim, key=key),
            hax.nn.Stacked.init(depth, Block)(jax.random.split(key, 3)),
            LlamaRmsNorm(hax.ones(dim)),
        )

    return eqx.filter_eval_shape(make)


@functools.cache
def pytorch():
    """Return the arrays of a state dict in PyTorch's names, buffers of batch norm among them."""
    torch = pytest.importorskip("torch")
    linear = torch.nn.Linear

    with torch.device("meta"):
        parts = {
            "conv1": torch.nn.Conv2d(3, 4, 3, bias=False),
            "bn1": torch.nn.BatchNorm2d(4),
            "fc": linear(4, 3),
            "downsample": torch.nn.Sequential(linear(4, 4), torch.nn.LayerNorm(4)),
            "embed_tokens": torch.nn.Embedding(7, 4),
            "h": torch.nn.ModuleList([torch.nn.TransformerEncoderLayer(4, 2, 8)]),
            "layers": torch.nn.ModuleList([torch.nn.RMSNorm(4)]),
            "prelu": torch.nn.PReLU(4),
            "q_proj": torch.nn.ModuleDict({"lora_A": linear(4, 2, False)}),
            "embed_out": linear(4, 7, False),
        }
        model = torch.nn.ModuleDict(parts)
    arrays = {name: tuple(array.shape) for name, array in model.state_dict().items()}
    return {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in arrays.items()}


ATTENTION = ("query", "key", "value", "out")


def each(prefix, names, last, role):
    return {f"{prefix}/{name}/{last}": role for name in names}


LAYER = {"kernel": "weight", "bias": "bias"}
NORM = {"scale": "norm", "bias": "norm"}


def under(prefix, roles):
    return {f"{prefix}/{name}": role for name, role in roles.items()}


EXPECTED = {
    "linen": {
        **under("stem", LAYER),
        **under("bn", NORM),
        **under("classifier", LAYER),
        "tokens/embedding": "embedding",
        "pos_embed": "embedding",
        **under("ln_1", NORM),
        **each("attention", ATTENTION, "kernel", "weight"),
        **each("attention", ATTENTION, "bias", "bias"),
        **under("norm_out", LAYER),
        "rms/scale": "norm",
        "lora_a": "weight",
        "lora_b": "weight",
    },
    "nnx": {
        **under("stem", LAYER),
        **under("bn", NORM),
        "tokens/embedding": "embedding",
        **under("layers/0", NORM),
        **each("layers/1", ATTENTION, "kernel", "weight"),
        **each("layers/1", ATTENTION, "bias", "bias"),
        "rms/scale": "norm",
        **under("norm_out", LAYER),
        "norm_out/lora/lora_a": "weight",
        "norm_out/lora/lora_b": "weight",
    },
    "haiku": {
        "conv2_d/w": "weight",
        "conv2_d/b": "bias",
        "batch_norm/scale": "norm",
        "batch_norm/offset": "norm",
        "linear/w": "weight",
        "linear/b": "bias",
        "embed/embeddings": "embedding",
        **each("multi_head_attention", (*ATTENTION[:3], "linear"), "w", "weight"),
        **each("multi_head_attention", (*ATTENTION[:3], "linear"), "b", "bias"),
        "layer_norm/offset": "norm",
        "norm_out/w": "weight",
        "rms_norm/scale": "norm",
    },
    "equinox": {
        "stem/weight": "weight",
        "stem/bias": "bias",
        "bn/weight": "norm",
        "bn/bias": "norm",
        "tokens/weight": "embedding",
        "layers/0/weight": "norm",
        "layers/0/bias": "norm",
        **each(
            "layers/1", [f"{name}_proj" for name in (*ATTENTION[:3], "output")], "weight", "weight"
        ),
        "layers/1/output_proj/bias": "bias",
        "rms/weight": "norm",
        "rms/bias": "norm",
        "lora_a": "weight",
        "lora_b": "weight",
    },
    "haliax": {
        "token_embeddings/weight/0": "embedding",
        "transformer/stacked/ln_1/weight/0": "norm",
        "transformer/stacked/ln_1/bias/0": "norm",
        "transformer/stacked/up/weight/0": "weight",
        "transformer/stacked/up/bias/0": "bias",
        "last/weight/0": "norm",
    },
    "pytorch": {
        "conv1.weight": "weight",
        **{
            f"bn1.{name}": "norm"
            for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        },
        "fc.weight": "weight",
        "fc.bias": "bias",
        "downsample.0.weight": "weight",
        "downsample.0.bias": "bias",
        "downsample.1.weight": "norm",
        "downsample.1.bias": "norm",
        "embed_tokens.weight": "embedding",
        "h.0.self_attn.in_proj_weight": "weight",
        "h.0.self_attn.in_proj_bias": "bias",
        **{
            f"h.0.{name}.{last}": role
            for name in ("self_attn.out_proj", "linear1", "linear2")
            for last, role in (("weight", "weight"), ("bias", "bias"))
        },
        **{f"h.0.norm{number}.{last}": "norm" for number in (1, 2) for last in ("weight", "bias")},
        "layers.0.weight": "norm",
        "prelu.weight": "vector",
        "q_proj.lora_A.weight": "weight",
        "embed_out.weight": "weight",
    },
}
MODELS = {
    "linen": linen,
    "nnx": of_nnx,
    "haiku": haiku,
    "equinox": equinox_net,
    "haliax": haliax_net,
    "pytorch": pytorch,
}


@pytest.mark.parametrize("framework", EXPECTED)
def test_the_table_of_roles(framework):
    params = MODELS[framework]()
    expected = EXPECTED[framework]
    assert tree.by_name(masks.tree_roles(params)) == expected

    decayed = masks.resolve_mask(lbopt.weights_only, params, "weight_decay_mask")
    tables_too = {name for name, role in expected.items() if role in ("weight", "embedding")}
    assert {name for name, chosen in tree.by_name(decayed).items() if chosen} == tables_too
    without = masks.resolve_mask(
        lbopt.weights_only & lbopt.exclude_roles("embedding"), params, "weight_decay_mask"
    )
    weights = {name for name, role in expected.items() if role == "weight"}
    assert {name for name, chosen in tree.by_name(without).items() if chosen} == weights


@pytest.mark.parametrize("framework", ["equinox", "haliax"])
def test_names_alone_tell_roles_too(framework):
    """The same paths in dicts, where types are lost; the norm over two axes has a shift beside."""
    params = MODELS[framework]()
    flat = tree.by_name(params)
    one = {name: leaf for name, leaf in flat.items() if "stacked" not in name}
    found = tree.by_name(masks.tree_roles(one))
    expected = {name: EXPECTED[framework][name] for name in one}
    # An attribute called `tokens` says nothing.
    if framework == "equinox":
        expected["tokens/weight"] = "weight"
    assert found == expected


def shapes(sizes):
    return {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in sizes.items()}


PITFALLS = {
    "net/~/norm_out/w": ((3, 4), "weight", "by name"),
    "AdaLayerNorm_0/weight": ((3, 4), "weight", "by name"),
    "norm1/proj": ((3, 4), "weight", "by name"),
    "mixer/kernel": ((3, 3), "weight", "by name"),
    "mixer/bias": ((3, 3), "bias", "by name"),
    "fc1/weight": ((3, 3), "weight", "by name"),
    "fc1/bias": ((3, 3), "bias", "by name"),
    "layer_norm/offset": ((3,), "norm", "by name"),
    "1/running_mean": ((3,), "norm", "by name"),
    "layers/2/weight": ((3,), "norm", "by shape"),
    "head/embedding": ((7, 3), "embedding", "by name"),
    "embedding/kernel": ((7, 3), "weight", "by name"),
    "embeddings/w": ((7, 3), "weight", "by name"),
    "embed_out/weight": ((7, 3), "weight", "by name"),
    "unembed/weight": ((7, 3), "weight", "by name"),
    "patch_embedding/weight": ((7, 3), "weight", "by name"),
    "embeddings_project/weight": ((7, 3), "weight", "by name"),
    "wte/weight": ((7, 3), "embedding", "by name"),
    "cls/weight": ((3, 4), "weight", "by name"),
    "state_space/A": ((3, 4), "weight", "by shape"),
    "embed_scale": ((), "vector", "by shape"),
}


def test_pitfalls_of_names():
    told = masks.explain_roles(shapes({name: row[0] for name, row in PITFALLS.items()}))
    assert {name: tuple(role) for name, role in told.items()} == {
        name: row[1:] for name, row in PITFALLS.items()
    }


# ---- Types


class OwnNorm(nnx.LayerNorm):
    """A subclass with an array that the base lacks."""

    def __init__(self, width, rngs):
        super().__init__(width, rngs=rngs)
        self.projection = nnx.Param(jnp.zeros((width, width)))
        self.power = nnx.Param(jnp.zeros(width))


class Unknown(nnx.Module):
    def __init__(self, rngs):
        self.weight = nnx.Param(jnp.zeros((2, 3)))
        self.gain = nnx.Param(jnp.zeros(3))
        self.scales = nnx.Dict(one=nnx.Param(jnp.zeros(3)))


class Misnamed(nnx.Module):
    """Modules under each other's names; what names tell of them is wrong."""

    def __init__(self, rngs):
        self.proj = OwnNorm(3, rngs)
        self.norm = nnx.Linear(3, 3, rngs=rngs)
        self.head = nnx.Embed(7, 3, rngs=rngs)
        self.other = Unknown(rngs)


def misnamed_nnx():
    return nnx.eval_shape(lambda: Misnamed(nnx.Rngs(0)))


def test_types_of_an_nnx_module_are_known_roles_of_its_dict():
    module = misnamed_nnx()
    params = nnx_params(module)
    known = masks.module_roles(module)
    assert known == {
        "proj": {**NORM, "power": "norm"},
        "norm": LAYER,
        "head": {"embedding": "embedding"},
    }
    assert masks.tree_roles(params, known) == {
        **known,
        "proj": {**NORM, "power": "norm", "projection": "weight"},
        "other": {"weight": "weight", "gain": "vector", "scales": {"one": "vector"}},
    }
    assert masks.module_roles(Misnamed(nnx.Rngs(0))) == known, "arrays are as good as shapes"


def misnamed_equinox():
    eqx = pytest.importorskip("equinox")

    class AdaLayerNorm(eqx.nn.LayerNorm):
        pass

    class Own(eqx.nn.Linear):
        pass

    class Net(eqx.Module):
        norm: eqx.Module
        proj: eqx.Module
        linear: eqx.Module
        ada: eqx.Module
        slope: jax.Array
        counts: eqx.Module

    def make():
        key = jax.random.key(0)
        linear = Own(3, 3, key=key)
        # A bias of the shape of the weight, as a bias per position has.
        linear = eqx.tree_at(lambda layer: layer.bias, linear, jnp.zeros((3, 3)))
        norm = eqx.nn.LayerNorm((2, 3), use_bias=False)
        table = eqx.nn.Embedding(7, 3, key=key)
        # Integers are no parameters, and have no role.
        counts = eqx.tree_at(lambda one: one.weight, table, jnp.zeros((2, 2), int))
        return Net(linear, norm, table, AdaLayerNorm((2, 3)), jnp.zeros(3), counts)

    return eqx.filter_eval_shape(make)


def is_parameter(leaf):
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


TYPES = {
    "norm/weight": "weight",
    "norm/bias": "bias",
    "proj/weight": "norm",
    "linear/weight": "embedding",
    "ada/weight": "weight",
    "ada/bias": "norm",
}


def test_types_of_an_equinox_module_are_known_roles_of_its_paths():
    known = masks.module_roles(misnamed_equinox())
    assert known == TYPES
    eqx = pytest.importorskip("equinox")
    module = eqx.filter(misnamed_equinox(), is_parameter)
    assert tree.by_name(masks.tree_roles(module)) == {**TYPES, "slope": "vector"}

    flat = tree.by_name(module)
    nested = masks.with_known_roles(lbopt.weights_only, known)
    chosen = masks.resolve_mask(nested, flat, "mask")
    assert {name for name, hit in chosen.items() if hit} == {
        name for name, role in TYPES.items() if role in ("weight", "embedding")
    }


def test_an_adaptive_norm_in_a_stack_is_judged_by_one_layer():
    module = misnamed_equinox()
    known = masks.module_roles(module, lbopt.stacked_paths("^ada/"))
    assert known["ada/weight"] == "norm"


PARAMS = shapes({"a/weight": (3, 4), "b/weight": (3, 4), "norm/weight": (3, 4), "c/bias": (4,)})


def chosen_by(mask, params=PARAMS):
    return {name for name, hit in tree.by_name(mask(params)).items() if hit}


def test_known_roles_reach_every_mask_by_role_in_a_combination():
    known = {"a": "norm", "norm/weight": "weight"}
    own = masks.with_known_roles
    assert chosen_by(own(lbopt.weights_only, known)) == {"b/weight", "norm/weight"}
    assert chosen_by(own(~lbopt.weights_only, known)) == {"a/weight", "c/bias"}
    assert chosen_by(~own(lbopt.weights_only, known)) == {"a/weight", "c/bias"}
    paths = lbopt.select_paths("weight")
    assert chosen_by(own(lbopt.select_roles("norm") & paths, known)) == {"a/weight"}
    assert own(paths, known) is paths
    assert own(None, known) is None

    one = own(lbopt.weights_only, {"a/weight": "norm"})
    other = own(lbopt.weights_only, {"b/weight": "norm"})
    assert chosen_by(one & other) == set()
    assert chosen_by(one | other) == {"a/weight", "b/weight"}
    assert chosen_by(own(one, {"norm/weight": "weight"})) == {"b/weight", "norm/weight"}
    assert hash(one) != hash(other)
    assert repr(one) == "with_known_roles(weights_only, <1 roles>)"


def test_known_roles_of_leaves_that_were_taken_out_are_no_errors():
    params = {**PARAMS, "a/weight": optax.MaskedNode()}
    mask = masks.with_known_roles(lbopt.weights_only, {"a/weight": "norm", "b": "norm"})
    assert chosen_by(mask, params) == set()
    nested = {"net/~/a": {"w": optax.MaskedNode()}, "b": {"w": PARAMS["b/weight"]}}
    known = {"net/~/a": {"w": "norm"}}
    assert chosen_by(masks.with_known_roles(lbopt.weights_only, known), nested) == {"b/w"}


@pytest.mark.parametrize(
    ("make", "field", "code"),
    [
        (
            lambda: masks.with_known_roles(lbopt.weights_only, {"a/wieght": "norm"})(PARAMS),
            "known_roles/a/wieght",
            "mismatch",
        ),
        (
            lambda: masks.tree_roles(PARAMS, {"a/weight/0": "norm"}),
            "known_roles/a/weight/0",
            "mismatch",
        ),
        (
            lambda: masks.with_known_roles(lbopt.weights_only, {"a/weight": "gain"}),
            "known_roles/a/weight",
            "choice",
        ),
        (
            lambda: masks.with_known_roles(
                masks.with_known_roles(lbopt.weights_only, {"a": "norm"}), {"a": "weight"}
            ),
            "known_roles/a",
            "conflict",
        ),
        (lambda: masks.module_roles({"a": jnp.zeros(3)}), "module", "type"),
    ],
)
def test_what_is_no_known_role_is_refused(make, field, code):
    with refused(field, code=code):
        make()


# ---- The summary


def test_a_summary_tells_rules_and_what_looks_wrong(capsys):
    sizes = {
        "norm/weight": (3, 4),
        "layers/weight": (2, 4),
        "layers/ln": (2, 4),
        "cls": (1, 4),
        "mixer": (3, 4),
        "known/weight": (3, 4),
        "fc/kernel": (4, 1),
    }
    stacked = lbopt.stacked_paths("^layers/")
    decay, adapt = (
        masks.with_known_roles(lbopt.weights_only, {"known/weight": role})
        for role in ("norm", "weight")
    )
    tx = lbopt.lamb(
        0.1, weight_decay=0.1, stacked=stacked, weight_decay_mask=decay, trust_ratio_mask=adapt
    )
    lbopt.summarize_masks(shapes(sizes), tx)
    lines = capsys.readouterr().out.splitlines()

    rows = {line.split()[0]: line for line in lines[1 : len(sizes) + 1]}
    rules = {name: row.split("by ")[1].split()[0] for name, row in rows.items()}
    assert rules == {
        "norm/weight": "name",
        "layers/weight": "shape",
        "layers/ln": "shape",
        "cls": "shape",
        "mixer": "shape",
        "known/weight": "type",
        "fc/kernel": "name",
    }

    warned = [line.split(": ")[1:3] for line in lines[len(sizes) + 2 :]]
    assert [name for name, _ in warned] == ["cls", "known/weight", "layers/weight", "norm/weight"]
    assert [text.split(";")[0] for _, text in warned] == [
        "a weight of one dimension",
        "masks know it as norm and as weight",
        "a weight of one dimension, taken for a norm",
        "a norm of two dimensions",
    ]


# ---- Muon


def axes(reduced, output):
    return optax.contrib.MuonDimensionNumbers(reduced, output)


def test_the_axes_of_hidden_matrices():
    sizes = {
        "conv/kernel": (3, 3, 4, 8),
        "attention/query/kernel": (4, 2, 3),
        "attention/out/kernel": (2, 3, 4),
        "linear.weight": (8, 4),
        "conv1.weight": (8, 4, 3, 3),
        "experts/gate_up": (5, 4, 8),
        "layers/kernel": (2, 4, 8),
        "layers/bias": (2, 8),
        "layers/gain": (2, 8),
        "embed/embedding": (9, 4),
        "head/kernel": (4, 9),
        "lm_head.weight": (9, 4),
        "cls_token": (1, 1, 4),
        "norm/scale": (4,),
    }

    found = masks.matrix_dimension_numbers(shapes(sizes), lbopt.stacked_paths("^layers/"))
    assert {name: numbers for name, numbers in found.items() if numbers is not None} == {
        "conv/kernel": axes((0, 1, 2), (3,)),
        "attention/query/kernel": axes((0,), (1, 2)),
        "attention/out/kernel": axes((0, 1), (2,)),
        "linear.weight": axes((1,), (0,)),
        "conv1.weight": axes((1, 2, 3), (0,)),
        "experts/gate_up": axes((1,), (2,)),
        "layers/kernel": axes((1,), (2,)),
    }
    assert found.keys() == sizes.keys()
    with refused("params", code="type"):
        masks.matrix_dimension_numbers({"a": optax.MaskedNode(), "kernel": jnp.zeros((2, 2))})


def test_muon_updates_a_convolution_as_a_matrix_and_each_layer_of_a_stack_alone():
    rng = np.random.default_rng(0)
    params = {
        "conv": {"kernel": rng.normal(size=(2, 2, 3, 4)), "bias": np.ones(4)},
        "layers": {"kernel": rng.normal(size=(2, 3, 4))},
    }
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
    numbers = masks.matrix_dimension_numbers(params, lbopt.stacked_paths("^layers/"))
    tx = optax.contrib.muon(0.1, muon_weight_dimension_numbers=numbers)
    found = jax.jit(lambda: tx.update(params, tx.init(params), params)[0])()

    plain = optax.contrib.muon(0.1)
    kernel = params["conv"]["kernel"].reshape(12, 4)
    alone = {"conv": kernel, **dict(zip("ab", params["layers"]["kernel"], strict=True))}
    expected = jax.jit(lambda: plain.update(alone, plain.init(alone), alone)[0])()
    np.testing.assert_allclose(
        found["conv"]["kernel"].reshape(12, 4), expected["conv"], rtol=1e-4, atol=1e-6
    )
    layers = jnp.stack([expected["a"], expected["b"]])
    np.testing.assert_allclose(found["layers"]["kernel"], layers, rtol=1e-4, atol=1e-6)
