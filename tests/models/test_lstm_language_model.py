"""The LSTM language model against PyTorch's LSTM, its carry, its dropout and its initialisation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lbopt.models import _lstm, from_linen

BATCH = 3
LENGTH = 6
VOCAB = 11
HIDDEN = 5
LAYERS = 2
TINY = _lstm.LSTMLanguageModel(vocab_size=VOCAB, hidden=HIDDEN, num_layers=LAYERS)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, VOCAB, (BATCH, LENGTH))


@pytest.fixture(scope="module")
def params(tokens):
    """Return parameters whose biases are all different."""
    shapes, _ = jax.eval_shape(from_linen(TINY).init, jax.random.key(0), {"tokens": tokens})
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: np.float32(rng.normal(0, 0.5, leaf.shape)), shapes)


def outputs(params, inputs, module=TINY, train=False, key=0):
    rng = jax.random.key(key)
    found, _ = jax.jit(
        lambda params, inputs: from_linen(module).apply(params, {}, inputs, train, rng)
    )(params, inputs)
    return jax.device_get(found)


def test_logits_and_state_are_pytorchs(params, tokens):
    """Gates in the order i, f, g, o, from a given state; one of PyTorch's two biases is zero."""
    torch = pytest.importorskip("torch")
    theirs = torch.nn.LSTM(HIDDEN, HIDDEN, num_layers=LAYERS, batch_first=True)

    weights = {}
    for number in range(LAYERS):
        layer = params[f"layer{number}"]
        weights |= {
            f"weight_ih_l{number}": torch.tensor(layer["kernel"].T),
            f"weight_hh_l{number}": torch.tensor(layer["recurrent_kernel"].T),
            f"bias_ih_l{number}": torch.tensor(layer["bias"]),
            f"bias_hh_l{number}": torch.zeros(4 * HIDDEN),
        }
    theirs.load_state_dict(weights)

    rng = np.random.default_rng(2)
    cell, hidden = (np.float32(rng.normal(size=(LAYERS, BATCH, HIDDEN))) for _ in range(2))
    with torch.no_grad():
        embedded = torch.tensor(params["embedding"]["embedding"][tokens])
        states, (their_hidden, their_cell) = theirs(
            embedded, (torch.tensor(hidden), torch.tensor(cell))
        )

    logits = states.numpy() @ params["head"]["kernel"] + params["head"]["bias"]
    found = outputs(params, {"tokens": tokens, "carry": tuple(zip(cell, hidden, strict=True))})
    np.testing.assert_allclose(found["logits"], logits, rtol=1e-5, atol=1e-5)
    for number, (our_cell, our_hidden) in enumerate(found["carry"]):
        np.testing.assert_allclose(our_cell, their_cell[number].numpy(), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(our_hidden, their_hidden[number].numpy(), rtol=1e-5, atol=1e-5)


def test_two_windows_with_the_carry_are_one(params, tokens):
    whole = outputs(params, {"tokens": tokens})
    first = outputs(params, {"tokens": tokens[:, :2]})
    second = outputs(params, {"tokens": tokens[:, 2:], "carry": first["carry"]})
    joined = np.concatenate([first["logits"], second["logits"]], 1)
    np.testing.assert_allclose(joined, whole["logits"], rtol=1e-5, atol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        second["carry"],
        whole["carry"],
    )
    without = outputs(params, {"tokens": tokens[:, 2:]})
    assert np.abs(without["logits"] - second["logits"]).max() > 1e-2
    zeros = jax.tree.map(np.zeros_like, first["carry"])
    np.testing.assert_array_equal(
        outputs(params, {"tokens": tokens[:, 2:], "carry": zeros})["logits"], without["logits"]
    )


def test_no_token_sees_its_successors(params, tokens):
    other = tokens.copy()
    other[:, 3:] = (other[:, 3:] + 1) % VOCAB
    one, two = (outputs(params, {"tokens": some})["logits"] for some in (tokens, other))
    np.testing.assert_array_equal(one[:, :3], two[:, :3])
    assert np.all(np.abs(one[:, 3:] - two[:, 3:]).max((0, 2)) > 1e-3)


def layered(params, tokens, masks):
    """Run the equations in float64, with given factors on layer inputs and the last output."""
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    p = jax.tree.map(np.float64, params)
    x = p["embedding"]["embedding"][tokens] * masks[0]
    for number in range(LAYERS):
        layer = p[f"layer{number}"]
        cell = 0.0
        hidden = np.zeros((BATCH, HIDDEN))
        states = []
        for now in np.moveaxis(x, 1, 0):
            i, f, g, o = np.split(
                now @ layer["kernel"] + hidden @ layer["recurrent_kernel"] + layer["bias"], 4, -1
            )
            cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
            hidden = sigmoid(o) * np.tanh(cell)
            states.append(hidden)
        x = np.stack(states, 1) * masks[number + 1]
    return x @ p["head"]["kernel"] + p["head"]["bias"]


def test_dropout_is_between_layers_only(params, tokens, monkeypatch):
    """Dropout applies to each layer's input and the last output, never to state or carry."""
    met = []

    class Recorded(_lstm.Dropout):
        def __call__(self, x, train):
            y = super().__call__(x, train)
            met.append((x, y))
            return y

    monkeypatch.setattr(_lstm, "Dropout", Recorded)
    module = TINY.clone(dropout_rate=0.5)

    def run(params):
        met.clear()
        found = module.apply(
            {"params": params}, {"tokens": tokens}, True, rngs={"example": jax.random.key(3)}
        )
        return found, list(met)

    found, pairs = jax.device_get(jax.jit(run)(params))
    masks = [np.where(x == 0, 0, y / np.where(x == 0, 1, x)) for x, y in pairs]
    assert len(masks) == LAYERS + 1
    for mask in masks:
        assert mask.shape == (BATCH, LENGTH, HIDDEN)
        np.testing.assert_allclose(mask[mask != 0], 2, rtol=1e-6)
        assert 0.25 < np.mean(mask == 0) < 0.75
    np.testing.assert_allclose(
        found["logits"], layered(params, tokens, masks), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_array_equal(found["carry"][1][1], pairs[2][0][:, -1])
    ones = [np.ones_like(mask) for mask in masks]
    np.testing.assert_allclose(
        outputs(params, {"tokens": tokens}, module)["logits"],
        layered(params, tokens, ones),
        rtol=1e-5,
        atol=1e-5,
    )


def test_bf16_keeps_carry_and_logits_in_fp32(params, tokens):
    ours, theirs = (
        outputs(params, {"tokens": tokens}, module)
        for module in (TINY.clone(dtype=jnp.bfloat16), TINY)
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(ours)} == {np.dtype(np.float32)}
    gap = np.abs(ours["logits"] - theirs["logits"]).max() / np.abs(theirs["logits"]).max()
    assert 1e-5 < gap < 0.03
    classified = jax.jit(
        _lstm.LSTMClassifier(hidden=8, dtype=jnp.bfloat16).init_with_output, static_argnums=2
    )(jax.random.key(0), np.ones((2, 3, 4), np.float32), False)[0]
    for logits in (ours["logits"], np.asarray(classified)):
        assert not np.array_equal(logits, logits.astype(jnp.bfloat16)), "rounded to bf16 on the way"


@pytest.mark.parametrize(("size", "scale"), [("small", 0.1), ("medium", 0.05), ("large", 0.04)])
def test_initialisation(size, scale):
    """Weights are uniform in the published range; all LSTM biases, forget gate too, are zero."""
    module = _lstm.make_lstm_language_model(size, hidden=30, vocab_size=150)
    assert module.init_scale == scale
    drawn, _ = jax.jit(from_linen(module).init)(
        jax.random.key(0), {"tokens": np.zeros((1, 2), np.int32)}
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(drawn):
        leaf = np.asarray(leaf)
        if path[0].key.startswith("layer") and path[-1].key == "bias":
            assert not leaf.any(), path
            continue
        assert np.abs(leaf).max() <= scale, path
        assert np.abs(leaf).max() > 0.9 * scale, path
        if leaf.size > 3000:
            assert abs(leaf.std() * np.sqrt(3) / scale - 1) < 0.03, path
