"""Numbers of a narrow network for a wide one: the published table, Adam's eps, and the decay."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusal import refused

import lbopt
from lbopt.models import make_bert

WIDTHS = (128, 512)
M = WIDTHS[1] / WIDTHS[0]
D = 3.0
# Complete(d)P (arXiv:2512.22382v1), Table 1, with alpha = 1: learning rate, eps, weight decay.
PUBLISHED = {
    "embedding": (1, 1 / M, 1),
    "hidden weights": (1 / M, 1 / (M * D), M),
    "hidden biases and norms": (1, 1 / (M * D), 1),
    "unembedding norm": (1, 1, 1),
    "unembedding weights": (1 / M, 1, M),
}
LEAVES = {
    "word_embedding/embedding": "embedding",
    "position_embedding/embedding": "embedding",
    "layer1/query/weight": "hidden weights",
    "layer1/attention_output/kernel": "hidden weights",
    "layer0/inner/kernel": "hidden weights",
    "layer0/output/kernel": "hidden weights",
    "layer0/inner/bias": "hidden biases and norms",
    "layer0/query/bias": "hidden biases and norms",
    "layer1/output_norm/scale": "hidden biases and norms",
    "embedding_norm/bias": "hidden biases and norms",
    "prediction_norm/scale": "unembedding norm",
    "prediction_bias": "unembedding norm",
    "next_sentence/kernel": "unembedding weights",
}
KINDS = {"prediction_norm": "fixed"}


def bert(width, scan=False, num_layers=2):
    heads = width // 64
    options = {"num_layers": num_layers, "width": width, "num_heads": heads, "vocab_size": 50}
    model = make_bert("tiny", **options, max_length=16, scan=scan)
    inputs = {"input_ids": jnp.zeros((1, 8), int)}
    return jax.eval_shape(lambda: model.init(jax.random.key(0), inputs, train=False))["params"]


@pytest.mark.parametrize("leaf", LEAVES)
def test_multipliers_are_the_published_ones(leaf):
    table = lbopt.transfer_table(bert(WIDTHS[1]), bert(WIDTHS[0]), depth=D, kinds=KINDS)
    found = table[leaf]
    assert (found.learning_rate, found.eps, found.weight_decay) == pytest.approx(
        PUBLISHED[LEAVES[leaf]]
    )


def test_stacks_and_further_layers_are_those_of_the_base_network():
    alone = lbopt.transfer_table(bert(WIDTHS[1]), bert(WIDTHS[0]))
    deeper = lbopt.transfer_table(bert(WIDTHS[1], num_layers=4), bert(WIDTHS[0]))
    stacked = lbopt.transfer_table(
        bert(WIDTHS[1], True, 4), bert(WIDTHS[0], True), stacked=lbopt.stacked_paths("^layers/")
    )
    assert alone["layer1/output/kernel"] == deeper["layer3/output/kernel"]
    assert alone["layer1/output/kernel"] == stacked["layers/output/kernel"]
    assert len({*alone.values()}) == len({*stacked.values()}) == len({*deeper.values()})


@pytest.mark.parametrize("layers", [3, 6], ids=["as many layers", "more layers"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_axes_that_count_layers_are_not_counted_wherever_they_are(axis, layers):
    """MaxText's stacks have their layers along axis 1."""

    def network(width, layers):
        shapes = {"kernel": (width, 2 * width), "first": (8, width), "gain": (width,)}
        shapes["weight"] = (2 * width, width)

        def stacked(shape):
            place = axis % (len(shape) + 1)
            return np.zeros((*shape[:place], layers, *shape[place:]))

        return {"layers": {name: {name: stacked(shape)} for name, shape in shapes.items()}}

    table = lbopt.transfer_table(
        network(64, layers),
        network(16, 3),
        stacked=lbopt.stacked_paths("^layers/", axis=axis),
        kinds={"first": "input"},
    )
    found = {name.rpartition("/")[2]: (each.kind, each.width) for name, each in table.items()}
    hidden = ("hidden", 4)
    assert found == {
        "kernel": hidden,
        "weight": hidden,
        "first": ("input", 4),
        "gain": ("vector", 4),
    }


def test_axes_tell_inputs_from_outputs_in_the_conventions_of_libraries():
    def torch_like(width):
        shapes = {"fc": (width, 8), "deep": (2 * width, width), "out": (3, width)}
        return {name: {"weight": np.zeros(shape)} for name, shape in shapes.items()}

    table = lbopt.transfer_table(torch_like(64), torch_like(16))
    assert [found.kind for found in table.values()] == ["hidden", "input", "output"]


def test_all_inputs_of_a_kernel_count_and_those_of_queries_are_one():
    """Flax's attention: [in, heads, dim] for a query, [heads, dim, out] for the output."""

    def attention(heads, dim, classes):
        width = heads * dim
        shapes = {"query": (width, heads, dim), "out": (heads, dim, width)}
        shapes["logits"] = (heads, dim, classes)
        return {name: {"kernel": np.zeros(shape)} for name, shape in shapes.items()}

    table = lbopt.transfer_table(attention(4, 64, 10), attention(2, 32, 10))
    found = {name: (each.kind, each.width) for name, each in table.items()}
    assert found == {
        "query/kernel": ("hidden", 4),
        "out/kernel": ("hidden", 4),
        "logits/kernel": ("output", 4),
    }


# name -> narrow and wide shape, and the kind and width that are right for it.
KERNELS_UNDER_OTHER_NAMES = {
    "q_proj": ((8, 1, 8), (32, 4, 8), "hidden", 4),
    "heads and their width": ((16, 2, 8), (64, 4, 16), "hidden", 4),
    "fewer heads of keys": ((16, 1, 8), (64, 2, 8), "hidden", 4),
    "from fixed inputs": ((24, 2, 8), (24, 8, 8), "input", 4),
    "to fixed outputs": ((2, 8, 3), (4, 16, 3), "output", 4),
}


@pytest.mark.parametrize("case", KERNELS_UNDER_OTHER_NAMES)
def test_which_axes_are_outputs_is_asked_where_a_name_does_not_tell(case):
    narrow, wide, kind, width = KERNELS_UNDER_OTHER_NAMES[case]
    shapes = [{"projection": {"kernel": np.zeros(shape)}} for shape in (wide, narrow)]
    growth = [new / old for new, old in zip(wide, narrow, strict=True)]
    with refused("params/projection/kernel", growth, "missing"):
        lbopt.transfer_table(*shapes)
    found = lbopt.transfer_table(*shapes, kinds={"kernel": kind})["projection/kernel"]
    assert (found.kind, found.width) == (kind, width)


def test_axes_that_can_be_told_are_not_asked_for():
    def network(m):
        shapes = {"out": (m, 8 * m, 8 * m * m), "conv_out": (3, 8 * m, 4)}
        shapes |= {"conv": (3, 3, 8 * m, 8 * m), "last_of_image": (3, 3, 8 * m, 4)}
        return {name: {"kernel": np.zeros(shape)} for name, shape in shapes.items()}

    table = lbopt.transfer_table(network(2), network(1))
    assert {name.split("/")[0]: (each.kind, each.width) for name, each in table.items()} == {
        "out": ("hidden", 4),
        "conv_out": ("output", 2),
        "conv": ("hidden", 2),
        "last_of_image": ("output", 2),
    }


def tree(width, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"first": (8, width), "second": (width, width), "head": (width, 3)}
    return {
        name: {"kernel": jnp.asarray(rng.normal(size=shape), jnp.float32)}
        for name, shape in shapes.items()
    }


def test_steps_are_adamw_with_numbers_for_each_leaf():
    """Optax's AdamW, one for each leaf, with learning rate, eps and decay from the table."""
    numbers = {"learning_rate": 0.01, "eps": 1e-2, "weight_decay": 0.1}
    table = lbopt.transfer_table(tree(64), tree(16))
    separate = optax.partition(
        {
            name: optax.adamw(
                numbers["learning_rate"] * found.learning_rate,
                eps=numbers["eps"] * found.eps,
                weight_decay=numbers["weight_decay"] * found.weight_decay,
            )
            for name, found in table.items()
        },
        {name: {"kernel": f"{name}/kernel"} for name in tree(64)},
    )
    ours = optax.chain(
        lbopt.scale_by_transfer(tree(16), optax.scale_by_adam(eps=numbers["eps"])),
        optax.add_decayed_weights(numbers["weight_decay"]),
        optax.scale(-numbers["learning_rate"]),
    )

    ends = []
    for tx in (separate, ours):
        params = tree(64)
        state = tx.init(params)
        for seed in range(1, 4):
            grads = jax.tree.map(lambda g: g * 1e-2, tree(64, seed))
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        ends.append(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-9), *ends)


def stacked_network(width, layers):
    """A network whose leaf `embedder/weight` is told from a table by the bias beside it."""
    shapes = {"layers": {"kernel": (layers, width, width), "bias": (layers, width)}}
    shapes |= {"embedder": {"weight": (width, 2 * width), "bias": (width,)}}
    shapes |= {"last_norm": {"scale": (width,)}, "head": {"kernel": (width, 3)}}
    return jax.tree.map(jnp.ones, shapes, is_leaf=lambda node: isinstance(node, tuple))


NO_BIASES = jax.tree.map(lambda _: True, stacked_network(1, 1)) | {
    "layers": {"kernel": True, "bias": False},
    "embedder": {"weight": True, "bias": False},
}
MASKS = {
    "biases": NO_BIASES,
    "stacks": {"layers": False, "embedder": True, "last_norm": True, "head": True},
    "a leaf with a kind": {"layers": True, "embedder": True, "last_norm": False, "head": True},
    "all": False,
}


@pytest.mark.parametrize("name", MASKS)
def test_what_is_masked_out_changes_nothing_for_the_others(name):
    params = stacked_network(16, layers=4)
    tx = lbopt.scale_by_transfer(
        stacked_network(8, layers=2),
        depth=2.0,
        kinds={"last_norm": "fixed"},
        stacked=lbopt.stacked_paths("^layers/"),
    )
    labels = jax.tree.map(lambda chosen: "train" if chosen else "frozen", MASKS[name])
    partition = optax.partition({"train": tx, "frozen": optax.set_to_zero()}, labels)
    masked = optax.masked(tx, MASKS[name])

    grads = jax.tree.map(lambda x: x * 1e-8, params)
    plain = tx.update(grads, tx.init(params), params)[0]
    for wrapped, others in ((masked, grads), (partition, jax.tree.map(jnp.zeros_like, params))):
        updates = wrapped.update(grads, wrapped.init(params), params)[0]
        expected = jax.tree.map(
            lambda chosen, one, other: one if chosen else other, MASKS[name], plain, others
        )
        jax.tree.map(np.testing.assert_array_equal, updates, expected)


@pytest.mark.parametrize("whole_layer", [False, True])
def test_what_is_masked_out_of_layers_that_the_base_lacks_changes_nothing(whole_layer):
    def network(width, blocks):
        shapes = {"weight": (width, width), "bias": (width,)}
        layer = {name: jnp.ones(shape) for name, shape in shapes.items()}
        return {f"block_{number}": {"embedder": {**layer}} for number in range(blocks)}

    params = network(16, 3)
    base = network(8, 1)
    kinds = {"block_1/embedder/bias": "fixed"}
    plain = lbopt.transfer_table(params, base, kinds=kinds)
    for number in (0, 1, 2):
        params[f"block_{number}"]["embedder"]["bias"] = optax.MaskedNode()
    if whole_layer:
        params["block_1"] = optax.MaskedNode()

    table = lbopt.transfer_table(params, base, kinds=kinds)
    assert [*table] == [
        f"block_{n}/embedder/weight" for n in ((0, 2) if whole_layer else (0, 1, 2))
    ]
    assert table == {name: plain[name] for name in table}
    assert {found.kind for found in table.values()} == {"hidden"}


@pytest.mark.parametrize(("init", "base_variance"), [("constant", "same"), ("fan_in", "1 / in")])
def test_variances_are_those_of_the_table_of_mup(init, base_variance):
    """Table 3 of arXiv:2203.03466: hidden 1 / fan-in, output 1 / fan-in squared, input constant."""
    m = 16

    def drawn(width):
        found = tree(width)
        if base_variance == "same":
            return found
        return jax.tree.map(lambda x: x / x.shape[0] ** 0.5, found)

    scaled = lbopt.transfer_init(drawn(16 * m), drawn(16), init)
    stds = {
        name: float(jnp.std(scaled[name]["kernel"]) / jnp.std(drawn(16)[name]["kernel"]))
        for name in scaled
    }
    assert stds == pytest.approx({"first": 1, "second": m**-0.5, "head": 1 / m}, rel=0.2)


def test_what_cannot_be_compared_is_refused():
    with refused("params/first/kernel", (8, 64), "mismatch"):
        lbopt.transfer_table(tree(64), {"other": np.zeros(3)})
    with refused("params/first/kernel", (8, 64), "mismatch"):
        lbopt.transfer_table(tree(64), {**tree(16), "first": {"kernel": np.zeros(8)}})
    with refused("depth", 2.0, "conflict"):
        lbopt.transfer_table(tree(16), tree(16), depth=2.0)
    with refused("kinds", {"nowhere": "input"}, "mismatch"):
        lbopt.transfer_table(tree(64), tree(16), kinds={"nowhere": "input"})
    with refused("kinds", {"(": "input"}):
        lbopt.transfer_table(tree(64), tree(16), kinds={"(": "input"})
    unknown = {"matrix": np.zeros((4, 8))}
    with refused("params/matrix", [1.0, 2.0], "missing"):
        lbopt.transfer_table(unknown, {"matrix": np.zeros((4, 4))})
    table = lbopt.transfer_table(unknown, {"matrix": np.zeros((4, 4))}, kinds={"matrix": "input"})
    assert table["matrix"].kind == "input"
