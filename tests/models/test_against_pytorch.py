"""ResNet, EfficientNet and BERT against their equations in PyTorch, forward and backward.

PyTorch computes in float64. In training: batch statistics (global and grouped), the gradient of
every parameter, and the running statistics.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import QUICKLY

from lbopt import replicas
from lbopt.models import EfficientNet, ResNet, Stage, _bert, from_linen

torch = pytest.importorskip("torch")
F = torch.nn.functional


def shaken(tree, seed=0):
    """Move every leaf away from zero and one; scales and variances stay positive."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: leaf + rng.uniform(0.05, 0.3, leaf.shape).astype(np.float32),
        jax.device_get(tree),
    )


class Theirs:
    """Parameters as tensors with gradients, and the layers that both image networks share."""

    def __init__(self, params, state, num_groups, momentum, epsilon):
        def wide(leaf):
            return torch.tensor(np.asarray(leaf, np.float64), requires_grad=True)

        self.params = jax.tree.map(wide, params)
        self.state = jax.tree.map(lambda leaf: np.array(leaf, np.float64), state)
        self.num_groups = num_groups
        self.momentum = momentum
        self.epsilon = epsilon

    def at(self, path):
        return functools.reduce(lambda node, name: node[name], path.split("/"), self.params)

    def conv(self, path, x, stride=1, same=False, groups=1):
        """Convolve [batch, channels, height, width], padded symmetrically or as "SAME"."""
        kernel = self.at(path)["kernel"].permute(3, 2, 0, 1)
        size = kernel.shape[-1]
        if not same:
            return F.conv2d(x, kernel, stride=stride, padding=size // 2)
        short = [max((-(-side // stride) - 1) * stride + size - side, 0) for side in x.shape[:1:-1]]
        padding = [part for total in short for part in (total // 2, total - total // 2)]
        return F.conv2d(F.pad(x, padding), kernel, stride=stride, groups=groups)

    def norm(self, path, x):
        """Normalize each contiguous group; move running statistics by the mean over groups."""
        parts = []
        means = 0
        variances = 0
        for part in x.chunk(self.num_groups):
            mean = part.mean((0, 2, 3), keepdim=True)
            var = part.var((0, 2, 3), unbiased=False, keepdim=True)
            parts.append((part - mean) / torch.sqrt(var + self.epsilon))
            means = means + mean.detach().numpy().ravel() / self.num_groups
            variances = variances + var.detach().numpy().ravel() / self.num_groups
        running = functools.reduce(lambda node, name: node[name], path.split("/"), self.state)
        for name, value in (("mean", means), ("var", variances)):
            running[name] = self.momentum * running[name] + (1 - self.momentum) * value
        learned = self.at(path)
        return torch.cat(parts) * learned["scale"].view(-1, 1, 1) + learned["bias"].view(-1, 1, 1)

    def dense(self, path, x):
        return x @ self.at(path)["kernel"] + self.at(path)["bias"]


def their_resnet(module, theirs, x):
    small = module.stem == "conv3"
    x = torch.relu(theirs.norm("stem/norm", theirs.conv("stem/conv", x, 1 if small else 2)))
    x = x if small else F.max_pool2d(x, 3, 2, 1)
    for stage, depth in enumerate(module.depths):
        for number in range(depth):
            block = functools.partial("stage{}_block{}/{}".format, stage, number)
            stride = 2 if stage and not number else 1
            strides = (1, stride, 1) if module.bottleneck else (stride, 1)
            y = x
            for i, each in enumerate(strides, start=1):
                y = theirs.norm(block(f"norm{i}"), theirs.conv(block(f"conv{i}"), y, each))
                y = torch.relu(y) if i < len(strides) else y
            if x.shape != y.shape:
                x = theirs.norm(
                    block("shortcut_norm"), theirs.conv(block("shortcut_conv"), x, stride)
                )
            x = torch.relu(x + y)
    return theirs.dense("head", x.mean((2, 3)))


def their_efficientnet(module, theirs, x):
    x = F.silu(theirs.norm("stem_norm", theirs.conv("stem_conv", x, 2, same=True)))

    number = 0
    for stage in module.stages:
        for repeat in range(stage.depth):
            block = functools.partial("block{}/{}".format, number)
            stride = 1 if repeat else stage.stride

            y = x
            if stage.expansion != 1:
                y = F.silu(theirs.norm(block("expand_norm"), theirs.conv(block("expand_conv"), y)))
            y = theirs.conv(block("depthwise_conv"), y, stride, same=True, groups=y.shape[1])
            y = F.silu(theirs.norm(block("depthwise_norm"), y))

            gate = F.silu(theirs.dense(block("squeeze_excite/reduce"), y.mean((2, 3))))
            y = (
                y
                * torch.sigmoid(theirs.dense(block("squeeze_excite/expand"), gate))[..., None, None]
            )

            y = theirs.norm(block("project_norm"), theirs.conv(block("project_conv"), y))
            x = x + y if repeat else y
            number += 1

    x = F.silu(theirs.norm("head_norm", theirs.conv("head_conv", x)))
    return theirs.dense("head", x.mean((2, 3)))


SMALL = {"stem_width": 8, "num_classes": 5}
BASIC = ResNet(depths=(2, 1), widths=(8, 16), bottleneck=False, **SMALL)
BOTTLENECK = ResNet(depths=(2, 1), widths=(16, 32), **SMALL)
EFFICIENT = EfficientNet(
    stages=(
        Stage(3, 1, 1, 8, 1),
        Stage(5, 2, 4, 16, 2),
        Stage(3, 2, 2, 8, 1),
    ),
    head_width=16,
    dropout_rate=0.0,
    stochastic_depth_rate=0.0,
    **SMALL,
)
CASES = {
    "basic": (BASIC, (16, 16), 1),
    "basic folded": (
        BASIC.clone(stem="space_to_depth", batch_norm_scope="examples:4"),
        (16, 24),
        2,
    ),
    "bottleneck": (BOTTLENECK, (17, 16), 1),
    "bottleneck small grouped": (
        BOTTLENECK.clone(stem="conv3", batch_norm_scope="replicas:2"),
        (8, 7),
        2,
    ),
    "efficientnet": (EFFICIENT, (20, 18), 1),
    "efficientnet grouped": (EFFICIENT.clone(batch_norm_scope="local"), (17, 15), 4),
}


def assert_close(ours, theirs, tolerance):
    """Compare leaf by leaf, relative to the maximum of the leaf's layer.

    A bias before a convolution and batch norm has no gradient, and a scale at the same place has
    one. Both are sums of the same terms, so they are rounded alike.
    """

    def layer_of(path):
        return path[:-1] or path

    layers = collections.defaultdict(float)
    for path, leaf in jax.tree_util.tree_leaves_with_path(theirs):
        layers[layer_of(path)] = max(layers[layer_of(path)], np.abs(leaf).max())
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True
    ):
        limit = tolerance * layers[layer_of(path)]
        np.testing.assert_allclose(
            one, other, rtol=0, atol=limit, err_msg=jax.tree_util.keystr(path)
        )


@pytest.mark.everyday("basic folded", "bottleneck small grouped", "efficientnet")
@pytest.mark.parametrize("case", CASES)
def test_image_networks_in_training(case):
    module, sides, num_groups = CASES[case]
    x = np.float32(np.random.default_rng(5).normal(size=(8, *sides, 3)))
    weights = np.float32(np.random.default_rng(6).normal(size=(8, 5)))
    shapes = jax.eval_shape(from_linen(module).init, jax.random.key(0), x)
    rng = np.random.default_rng(7)
    params = jax.tree.map(lambda leaf: np.float32(0.3 * rng.normal(size=leaf.shape)), shapes[0])
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if path[-1].key == "scale":
            leaf += 1
    state = shaken(jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes[1]))

    def loss(params, x):
        with replicas.tracing_for(4):
            logits, new_state = from_linen(module).apply(params, state, x, True)
        return jnp.sum(weights * jnp.sin(logits)), (logits, new_state)

    run = jax.jit(jax.grad(loss, (0, 1), has_aux=True), compiler_options=QUICKLY)
    (grads, of_images), (logits, new_state) = jax.device_get(run(params, x))

    momentum = module.batch_norm_momentum
    epsilon = module.batch_norm_epsilon
    theirs = Theirs(params, state["batch_stats"], num_groups, momentum, epsilon)
    images = torch.tensor(np.float64(x.transpose(0, 3, 1, 2)), requires_grad=True)
    network = their_resnet if isinstance(module, ResNet) else their_efficientnet
    their_logits = network(module, theirs, images)
    (torch.tensor(np.float64(weights)) * their_logits.sin()).sum().backward()
    np.testing.assert_allclose(
        logits, their_logits.detach(), rtol=0, atol=2e-5 * np.abs(logits).max()
    )
    assert_close(new_state["batch_stats"], theirs.state, 2e-5)
    assert_close(grads, jax.tree.map(lambda leaf: leaf.grad.numpy(), theirs.params), 2e-5)
    assert_close(of_images, images.grad.numpy().transpose(0, 2, 3, 1), 2e-5)


def their_bert(module, p, inputs):
    """Post-norm layers over the sum of three embeddings.

    Devlin et al., arXiv 1810.04805v2; Vaswani et al., arXiv 1706.03762v7.
    """

    def dense(at, x):
        return x @ at["kernel"] + at["bias"]

    def norm(at, x):
        return F.layer_norm(x, x.shape[-1:], at["scale"], at["bias"], module.epsilon)

    ids, segments, mask = (
        torch.tensor(inputs[name]) for name in ("input_ids", "token_type_ids", "attention_mask")
    )
    batch, length = ids.shape
    words = p["word_embedding"]["embedding"]
    x = (
        words[ids]
        + p["position_embedding"]["embedding"][:length]
        + p["segment_embedding"]["embedding"][segments]
    )
    x = norm(p["embedding_norm"], x)
    for number in range(module.num_layers):
        layer = p[f"layer{number}"]
        heads = lambda name, layer=layer, x=x: (  # noqa: E731
            F.linear(x, layer[name]["weight"], layer[name]["bias"])
            .view(batch, length, module.num_heads, -1)
            .transpose(1, 2)
        )
        scores = (
            heads("query")
            @ heads("key").transpose(2, 3)
            / (module.width // module.num_heads) ** 0.5
        )
        weights = scores.masked_fill(mask[:, None, None] == 0, -torch.inf).softmax(-1)
        context = (weights @ heads("value")).transpose(1, 2).reshape(batch, length, -1)
        x = norm(layer["attention_norm"], x + dense(layer["attention_output"], context))
        x = norm(layer["output_norm"], x + dense(layer["output"], F.gelu(dense(layer["inner"], x))))
    if module.head == "question_answering":
        start, end = dense(p["span"], x).unbind(-1)
        return {"start_logits": start, "end_logits": end}
    masked = x[torch.arange(batch)[:, None], torch.tensor(inputs["masked_positions"])]
    masked = norm(p["prediction_norm"], F.gelu(dense(p["prediction_dense"], masked)))
    pooled = torch.tanh(dense(p["pooler"], x[:, 0]))
    return {
        "prediction_logits": masked @ words.T + p["prediction_bias"],
        "next_sentence_logits": dense(p["next_sentence"], pooled),
    }


@pytest.mark.parametrize("head", _bert.HEADS)
def test_bert(head):
    module = _bert.Bert(
        40,
        num_layers=2,
        width=12,
        num_heads=3,
        inner_width=20,
        max_length=7,
        head=head,
        dropout_rate=0,
        attention_dropout_rate=0,
    )
    rng = np.random.default_rng(8)
    inputs = {
        "input_ids": rng.integers(0, 40, (3, 6)),
        "token_type_ids": rng.integers(0, 2, (3, 6)),
        "attention_mask": (np.arange(6) < np.array([[6], [3], [5]])).astype(np.int32),
        "masked_positions": np.array([[0, 5], [2, 1], [3, 3]]),
    }
    shapes = jax.eval_shape(lambda key: module.init(key, inputs, True), jax.random.key(0))["params"]
    params = jax.tree.map(lambda leaf: np.float32(0.5 * rng.normal(size=leaf.shape)), shapes)

    def loss(params):
        outputs = module.apply({"params": params}, inputs, True)
        return sum(jnp.sum(jnp.sin(logits)) for logits in outputs.values()), outputs

    grads, outputs = jax.device_get(
        jax.jit(jax.grad(loss, has_aux=True), compiler_options=QUICKLY)(params)
    )
    tensors = jax.tree.map(lambda leaf: torch.tensor(np.float64(leaf), requires_grad=True), params)
    expected = their_bert(module, tensors, inputs)
    sum(logits.sin().sum() for logits in expected.values()).backward()
    assert set(outputs) == set(expected)
    assert_close(outputs, {name: expected[name].detach().numpy() for name in sorted(outputs)}, 1e-5)

    def zero(leaf):
        return np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy()

    assert_close(grads, jax.tree.map(zero, tensors), 1e-5)
