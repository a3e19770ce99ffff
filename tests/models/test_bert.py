"""BERT is one function, scanned or not and under every rematerialisation; it ignores padding.

Unscanned variants are differentiated without jit, so that they share their compiled operations.
"""

import contextlib
import functools
import io
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiling import UNOPTIMIZED
from jax.ad_checkpoint import print_saved_residuals
from refusal import refused

import lbopt
from lbopt.models import _bert, _layers

BATCH = 3
LENGTH = 7
HEADS = 2
WIDTH = 16
INNER = 20
LAYERS = 2
SIZE = {
    "vocab_size": 50,
    "num_layers": LAYERS,
    "width": WIDTH,
    "num_heads": HEADS,
    "inner_width": INNER,
    "max_length": 8,
}
DROPS = {"dropout_rate": 0.3, "attention_dropout_rate": 0.2}
NO_DROPS = {"dropout_rate": 0.0, "attention_dropout_rate": 0.0}
POLICIES = ("attention", "dots", "inner", "layer")
# Shapes of arrays that a layer could keep for its backward pass.
SQUARE = (BATCH, HEADS, LENGTH, LENGTH)
HIDDEN = (BATCH, LENGTH, WIDTH)
WIDE = (BATCH, LENGTH, INNER)


def network(**options):
    return _bert.Bert(**{**SIZE, **options})


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    lengths = np.array([7, 4, 6])
    return {
        "input_ids": rng.integers(0, 50, (BATCH, LENGTH)),
        "token_type_ids": rng.integers(0, 2, (BATCH, LENGTH)),
        "attention_mask": (np.arange(LENGTH) < lengths[:, None]).astype(np.int32),
        "masked_positions": np.array([[0, 2], [3, 1], [5, 5]]),
    }


def random_params(module, inputs, seed=1):
    """Return parameters without zeros or ones, so that every one of them matters."""
    shapes = jax.eval_shape(lambda key: module.init(key, inputs, False), jax.random.key(0))[
        "params"
    ]
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.float32(rng.normal(0, 0.3, leaf.shape)), shapes)


@pytest.fixture(scope="module")
def params(inputs):
    return random_params(network(), inputs)


def apply(module, params, inputs, train=True):
    return module.apply(
        {"params": params}, inputs, train, rngs={"example": jax.random.key(3)} if train else None
    )


def mean_sine(outputs):
    return sum(jnp.mean(jnp.sin(logits)) for logits in jax.tree.leaves(outputs))


def loss(params, module, inputs):
    return mean_sine(apply(module, params, inputs))


def assert_close(ours, theirs, tolerance):
    """Compare leaf by leaf, relative to the leaf's largest entry.

    Leaves that should be zero are compared to 1e-7 of the largest entry of all leaves.
    """
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    floor = 1e-7 * max(np.abs(leaf).max() for leaf in jax.tree.leaves(theirs))
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True
    ):
        limit = max(tolerance * np.abs(other).max(), floor)
        np.testing.assert_allclose(
            one, other, rtol=0, atol=limit, err_msg=jax.tree_util.keystr(path)
        )


@pytest.fixture(scope="module")
def gradients(params, inputs):
    """Return the gradients without rematerialisation, with and without dropout."""
    return {
        bool(options["dropout_rate"]): jax.grad(loss)(params, network(**options), inputs)
        for options in (DROPS, NO_DROPS)
    }


def test_dropout_matters(gradients):
    """The comparisons below would prove nothing if dropout had no effect."""
    gaps = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), gradients[True], gradients[False])
    # A key's bias shifts all scores of a query equally, so softmax ignores it.
    matters = [
        gap
        for path, gap in jax.tree_util.tree_leaves_with_path(gaps)
        if path[-2:] != ("key", "bias")
    ]
    assert np.mean([gap > 1e-4 for gap in matters]) > 0.9


@pytest.mark.everyday("dots-True", "inner-False", "layer-True")
@pytest.mark.parametrize("dropped", [True, False])
@pytest.mark.parametrize("remat", POLICIES)
def test_rematerialisation_changes_no_gradient(remat, dropped, params, inputs, gradients):
    """With dropout this also shows that the recomputation repeats the forward pass's draws."""
    module = network(remat=remat, **(DROPS if dropped else NO_DROPS))
    assert_close(jax.grad(loss)(params, module, inputs), gradients[dropped], 1e-6)


@pytest.mark.parametrize("how_many", [0, 1, LAYERS])
def test_rematerialisation_of_some_layers_changes_no_gradient(how_many, params, inputs, gradients):
    module = network(remat="layer", remat_layers=how_many, **DROPS)
    assert_close(jax.grad(loss)(params, module, inputs), gradients[True], 1e-6)


def scanned(params, inputs, **options):
    """Return the scanned network's outputs, and its gradients in the unscanned layout."""
    module = network(scan=True, **options)

    @functools.partial(jax.jit, compiler_options=UNOPTIMIZED)
    @functools.partial(jax.grad, has_aux=True)
    def both(stacked):
        outputs = apply(module, stacked, inputs)
        return mean_sine(outputs), outputs

    grads, outputs = both(_bert.stack_layers(params))
    return outputs, _bert.unstack_layers(grads)


def test_scanned_is_unscanned(params, inputs, gradients):
    outputs, grads = scanned(params, inputs, **NO_DROPS)
    assert_close(outputs, apply(network(**NO_DROPS), params, inputs), 2e-6)
    assert_close(grads, gradients[False], 2e-6)


@pytest.fixture(scope="module")
def dropped_scan(params, inputs):
    return scanned(params, inputs, **DROPS)


@pytest.mark.everyday("layer")
@pytest.mark.parametrize("remat", ["dots", "attention", "inner", "layer"])
def test_rematerialisation_of_a_scan_changes_no_gradient(remat, params, inputs, dropped_scan):
    assert_close(scanned(params, inputs, remat=remat, **DROPS)[1], dropped_scan[1], 1e-6)


def test_layers_of_a_scan_draw_differently(params, inputs, monkeypatch):
    met = []

    class Recorded(_bert.Dropout):
        """Dropout that records, layer by layer, which values it keeps."""

        def keep(self, num_examples, shape, train):
            kept, share = super().keep(num_examples, shape, train)
            if not isinstance(kept, jax.core.Tracer):  # Flax traces the scan once before it runs
                met.append(np.asarray(kept))
            return kept, share

    monkeypatch.setattr(_bert, "Dropout", Recorded)
    module = network(scan=True, dropout_rate=0.5, attention_dropout_rate=0.5)
    with jax.disable_jit():
        apply(module, _bert.stack_layers(params), inputs)
    assert [mask.shape for mask in met] == [HIDDEN, *(SQUARE, HIDDEN, HIDDEN) * LAYERS]
    hidden = np.stack([mask.ravel() for mask in met if mask.shape == HIDDEN])
    agreement = (hidden[:, None] == hidden[None]).mean(-1)
    np.fill_diagonal(agreement, 0.5)
    assert 0.3 < agreement.min() < agreement.max() < 0.7
    assert 0.3 < np.mean(met[1] == met[4]) < 0.7


def test_stacking_is_undone_by_unstacking(params, inputs):
    stacked = _bert.stack_layers(params)
    expected = jax.eval_shape(
        lambda key: network(scan=True).init(key, inputs, False), jax.random.key(0)
    )["params"]
    assert jax.tree.map(jnp.shape, stacked) == jax.tree.map(jnp.shape, expected)
    for again in (
        _bert.unstack_layers(stacked),
        _bert.unstack_layers(_bert.stack_layers(_bert.unstack_layers(stacked))),
    ):
        jax.tree.map(np.testing.assert_array_equal, again, params)
    for number in range(LAYERS):
        kernel = stacked["layers"]["inner"]["kernel"][number]
        np.testing.assert_array_equal(kernel, params[f"layer{number}"]["inner"]["kernel"])


def test_more_than_nine_layers_stack_in_the_order_of_their_numbers():
    each = {
        f"layer{number}": {"bias": jnp.full(2, float(number))}
        for number in sorted(range(12), key=str)
    }
    stacked = _bert.stack_layers({**each, "pooler": {"bias": jnp.zeros(2)}})
    np.testing.assert_array_equal(stacked["layers"]["bias"][:, 0], np.arange(12.0))
    assert set(stacked) == {"layers", "pooler"}


@pytest.mark.slow
def test_lamb_gives_each_scanned_layer_its_own_ratio(params, inputs):
    """Three updates of the scanned network equal the unscanned network's, leaf by leaf."""
    scaled = {
        **params,
        "layer1": jax.tree.map(lambda leaf: 5 * leaf, params["layer1"]),
    }  # ratios of different sizes

    def three_updates(current, scan, stacked):
        tx = lbopt.lamb(0.02, weight_decay=0.01, stacked=stacked)
        module = network(scan=scan, **NO_DROPS)

        @functools.partial(jax.jit, compiler_options=UNOPTIMIZED)
        def update(current, state):
            updates, state = tx.update(jax.grad(loss)(current, module, inputs), state, current)
            return optax.apply_updates(current, updates), state

        state = jax.jit(tx.init)(current)
        for _ in range(3):
            current, state = update(current, state)
        return current, lbopt.optimizer_metrics(state)

    each, their_ratios = three_updates(scaled, False, None)
    stack, our_ratios = three_updates(
        _bert.stack_layers(scaled), True, lbopt.stacked_paths("^layers/")
    )
    moved = jax.tree.map(np.subtract, *jax.device_get((each, scaled)))
    ours = jax.tree.map(np.subtract, *jax.device_get((_bert.unstack_layers(stack), scaled)))
    for network_moved in (moved, ours):
        for number in range(
            LAYERS
        ):  # softmax ignores it; LAMB magnifies its gradient, which is rounding
            del network_moved[f"layer{number}"]["key"]["bias"]
    assert_close(ours, moved, 1e-4)
    for kind in ("inner/kernel", "query/weight", "output/kernel"):
        ratios = [their_ratios[f"trust_ratio/layer{number}/{kind}"] for number in range(LAYERS)]
        assert ratios[1] > 2 * ratios[0], "one ratio for the stack would be seen"
        scanned = [our_ratios[f"trust_ratio/layers/{kind}[{number}]"] for number in range(LAYERS)]
        np.testing.assert_allclose(scanned, ratios, rtol=1e-5)


def residuals(module, params, inputs):
    """Return (shape, bytes) of the residuals of one gradient, without parameters and inputs."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        print_saved_residuals(lambda params: loss(params, module, inputs), params)
    found = []
    for line in printed.getvalue().splitlines():
        if "from the argument" in line or "from a constant" in line or line.startswith("key<"):
            continue
        dtype, sides = re.match(r"(\w+)\[([\d,]*)\]", line).groups()
        shape = tuple(int(side) for side in sides.split(",") if side)
        bits = 8 if dtype == "bool" else int(re.search(r"\d+$", dtype)[0])
        found.append((shape, math.prod(shape) * bits // 8))
    return found


@pytest.fixture(scope="module")
def kept(params, inputs):
    """Return residuals per policy, without the heads': count by shape, and total bytes."""
    found = {}
    for remat in _layers.REMATS:
        all_of_them = residuals(network(remat=remat, **DROPS), params, inputs)
        shapes = [shape for shape, _ in all_of_them]
        found[remat] = (
            {shape: shapes.count(shape) for shape in set(shapes)},
            sum(size for _, size in all_of_them),
        )
    return found


def squares(counts):
    """Count arrays of [batch, heads, length, length] in any layout, including random draws."""
    return sum(
        number
        for shape, number in counts.items()
        if math.prod(shape) >= math.prod(SQUARE)
        and LENGTH in shape[2:]
        and shape.count(LENGTH) == 2
    )


def test_what_each_policy_keeps(kept):
    assert squares(kept["none"][0]) > LAYERS
    assert squares(kept["dots"][0]) == LAYERS, "the scores and nothing else"
    for remat in ("attention", "inner", "layer"):
        assert squares(kept[remat][0]) == 0, remat
    assert kept["attention"][0][WIDE] == kept["dots"][0][WIDE] == LAYERS
    for remat in ("inner", "layer"):
        assert WIDE not in kept[remat][0]
    sizes = [kept[remat][1] for remat in ("none", "dots", "attention", "inner", "layer")]
    assert sizes == sorted(set(sizes), reverse=True), sizes


def test_a_rematerialised_layer_keeps_its_input_only(kept, params, inputs):
    """Each further layer costs one further array [batch, length, width]."""
    fewer = {name: value for name, value in params.items() if name != f"layer{LAYERS - 1}"}
    less = residuals(network(remat="layer", num_layers=LAYERS - 1, **DROPS), fewer, inputs)
    assert kept["layer"][1] - sum(size for _, size in less) == 4 * math.prod(HIDDEN)


def test_only_so_many_layers_are_rematerialised(kept, params, inputs):
    per_layer = squares(kept["none"][0]) // LAYERS
    for how_many in (0, 1, LAYERS):
        module = network(remat="layer", remat_layers=how_many, **DROPS)
        shapes = [shape for shape, _ in residuals(module, params, inputs)]
        counts = {shape: shapes.count(shape) for shape in shapes}
        assert squares(counts) == (LAYERS - how_many) * per_layer


@pytest.mark.parametrize("head", _bert.HEADS)
def test_padding_is_not_seen(head, params, inputs):
    """Changing tokens behind the mask changes no logit before it; without the mask it does."""
    module = network(head=head, **NO_DROPS)
    params = params if head == "pretraining" else random_params(module, inputs)
    mask = inputs["attention_mask"].astype(bool)

    arrays = {name: array for name, array in inputs.items() if name != "masked_positions"}
    other = {
        **arrays,
        "input_ids": np.where(mask, inputs["input_ids"], 49 - inputs["input_ids"]),
        "token_type_ids": np.where(mask, inputs["token_type_ids"], 1 - inputs["token_type_ids"]),
    }

    outputs = jax.jit(
        lambda arrays: module.apply({"params": params}, arrays, False), compiler_options=UNOPTIMIZED
    )
    one, two = jax.device_get((outputs(arrays), outputs(other)))
    everything = np.ones_like(inputs["attention_mask"])
    unmasked = jax.device_get(
        [outputs({**some, "attention_mask": everything}) for some in (arrays, other)]
    )

    for name, logits in one.items():
        seen = mask if logits.shape[:2] == mask.shape else np.full(BATCH, True)
        np.testing.assert_array_equal(logits[seen], two[name][seen])
        assert np.abs(unmasked[0][name] - unmasked[1][name])[seen].max() > 1e-4

    assert {name: logits.shape for name, logits in one.items()} == (
        {"prediction_logits": (BATCH, LENGTH, 50), "next_sentence_logits": (BATCH, 2)}
        if head == "pretraining"
        else {"start_logits": (BATCH, LENGTH), "end_logits": (BATCH, LENGTH)}
    )


def test_masked_positions_choose_among_all_logits(params, inputs):
    module = network()
    some = apply(module, params, inputs, train=False)["prediction_logits"]
    everywhere = {name: array for name, array in inputs.items() if name != "masked_positions"}
    every = apply(module, params, everywhere, train=False)["prediction_logits"]
    assert some.shape == (BATCH, 2, 50)
    for example, positions in enumerate(inputs["masked_positions"]):
        np.testing.assert_allclose(some[example], every[example, positions], rtol=1e-5, atol=1e-5)


def test_bf16_keeps_parameters_and_logits_in_fp32(params, inputs):
    narrow = network(dtype=jnp.bfloat16, **NO_DROPS)
    shapes = jax.eval_shape(lambda key: narrow.init(key, inputs, False), jax.random.key(0))[
        "params"
    ]
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype(jnp.float32)}
    small = jax.tree.map(lambda leaf: 0.3 * leaf, params)  # logits of order one

    def outputs(module):
        return jax.jit(lambda params: module.apply({"params": params}, inputs, False))(small)

    ours = outputs(narrow)
    theirs = outputs(network(**NO_DROPS))
    for name, logits in ours.items():
        assert logits.dtype == jnp.float32
        gap = np.abs(logits - theirs[name]).max() / np.abs(theirs[name]).max()
        assert 1e-5 < gap < 0.03, gap


@pytest.mark.parametrize(
    ("options", "length", "field", "value", "code", "fact"),
    [
        ({}, 9, "sequence_length", 9, "mismatch", "8"),
        ({"num_heads": 3}, 7, "num_heads", 3, "value", "16"),
        ({"head": "span"}, 7, "head", "span", "choice", "pretraining, question_answering"),
        ({"max_length": 0}, 7, "max_length", 0, "value", ">= 1"),
        ({"remat_layers": -1}, 7, "remat_layers", -1, "value", ">= 0"),
        ({"remat": "layers"}, 7, "remat", "layers", "choice", "'layer'?"),
        ({"activation": "gelu_new"}, 7, "activation", "gelu_new", "choice", "gelu_tanh, relu"),
        (
            {"scan": True, "remat": "layer", "remat_layers": 1},
            7,
            "remat_layers",
            1,
            "conflict",
            "{scan}=False",
        ),
    ],
)
def test_what_cannot_be_is_refused(options, length, field, value, code, fact):
    arrays = {"input_ids": jax.ShapeDtypeStruct((1, length), jnp.int32)}
    with refused(field, value, code) as caught:
        jax.eval_shape(
            lambda key, x: network(**options).init(key, x, False), jax.random.key(0), arrays
        )
    assert fact in caught.value.reason


def test_unknown_size_is_refused():
    with refused("size", "huge", "choice") as caught:
        _bert.make_bert("huge")
    assert "base, large, tiny" in caught.value.reason


def test_initialisation():
    """Kernels and embeddings: normal(0, 0.02) cut at two deviations; biases zero; scales one."""
    module = network(num_layers=1, width=80, inner_width=200, vocab_size=200)
    arrays = {"input_ids": np.zeros((1, 4), np.int32)}
    init = jax.jit(lambda key: module.init(key, arrays, False), compiler_options=UNOPTIMIZED)
    drawn = init(jax.random.key(0))["params"]
    for path, leaf in jax.tree_util.tree_leaves_with_path(drawn):
        kind = path[-1].key
        if kind in ("bias", "prediction_bias"):
            assert not np.any(leaf), path
        elif kind == "scale":
            assert np.all(leaf == 1), path
        else:
            assert kind in ("kernel", "weight", "embedding")
            assert np.abs(leaf).max() <= 0.04, path
            if leaf.size > 10000:
                assert np.abs(leaf).max() > 0.0399, path
                assert abs(np.std(leaf) / (0.02 * 0.8796) - 1) < 0.03, (
                    path
                )  # a normal distribution truncated at two has deviation 0.8796
                assert abs(np.mean(leaf)) < 0.03 * 0.02, path
