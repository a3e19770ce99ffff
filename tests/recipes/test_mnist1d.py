"""The networks of `configs/mnist1d.py` against those of PyTorch, with the same parameters."""

import functools
import pathlib

import jax
import numpy as np
import pytest

from lbopt import _user_code
from lbopt.cli import call_get_config
from lbopt.models import make_model

torch = pytest.importorskip("torch")
nn = torch.nn
FILE = pathlib.Path(__file__).parents[2] / "configs" / "mnist1d.py"
LENGTH = 40
PUBLISHED = {"logistic": 410, "mlp": 15210, "gru": 5134, "cnn": 5210}
"""Numbers of parameters: greydanus/mnist1d@d53784556b473b75cbf5d5729ad9a313b29cea68:
notebooks/mnist1d-classification.ipynb."""
FEWER = {"gru": 2 * 12}
"""Biases of PyTorch's GRU that Flax's has not."""


def at(params, path):
    return np.asarray(functools.reduce(lambda node, name: node[name], path.split("/"), params))


def set_to(parameter, value):
    with torch.no_grad():
        parameter.copy_(torch.tensor(np.array(value, np.float64)))


def set_dense(layer, params, path, channels=None):
    """`channels` is their number where the input is [channels, length], and not the reverse."""
    kernel = at(params, f"{path}/kernel")
    if channels:
        kernel = kernel.reshape(-1, channels, kernel.shape[-1]).swapaxes(0, 1)
        kernel = kernel.reshape(-1, kernel.shape[-1])
    set_to(layer.weight, kernel.T)
    set_to(layer.bias, at(params, f"{path}/bias"))


def logistic(params):
    layer = nn.Linear(LENGTH, 10)
    set_dense(layer, params, "Dense_0")
    return layer, layer


def mlp(params):
    layers = nn.ModuleList([nn.Linear(LENGTH, 100), nn.Linear(100, 100), nn.Linear(100, 10)])
    for number, layer in enumerate(layers):
        set_dense(layer, params, f"Dense_{number}")

    def run(x):
        hidden = torch.relu(layers[0](x))
        return layers[2](hidden + torch.relu(layers[1](hidden)))

    return layers, run


def gru(params):
    """At the gates r and z, PyTorch's second bias is 0: Flax's GRU has one."""
    layer = nn.GRU(1, 6, batch_first=True, bidirectional=True)
    head = nn.Linear(12 * LENGTH, 10)
    set_dense(head, params, "Dense_0")
    for number, ending in enumerate(("", "_reverse")):
        cell = f"GRUCell_{number}"
        for theirs, gates in (("ih", ("ir", "iz", "in")), ("hh", ("hr", "hz", "hn"))):
            kernels = [at(params, f"{cell}/{gate}/kernel").T for gate in gates]
            set_to(getattr(layer, f"weight_{theirs}_l0{ending}"), np.concatenate(kernels))
        inputs = [at(params, f"{cell}/{gate}/bias") for gate in ("ir", "iz", "in")]
        set_to(getattr(layer, f"bias_ih_l0{ending}"), np.concatenate(inputs))
        states = [np.zeros(12), at(params, f"{cell}/hn/bias")]
        set_to(getattr(layer, f"bias_hh_l0{ending}"), np.concatenate(states))
    return nn.ModuleList([layer, head]), lambda x: head(layer(x[..., None])[0].flatten(1))


def cnn(params):
    convolutions = [
        nn.Conv1d(inputs, 25, size, stride=2, padding=1)
        for inputs, size in ((1, 5), (25, 3), (25, 3))
    ]
    for number, layer in enumerate(convolutions):
        set_to(layer.weight, at(params, f"Conv_{number}/kernel").transpose(2, 1, 0))
        set_to(layer.bias, at(params, f"Conv_{number}/bias"))
    head = nn.Linear(125, 10)
    set_dense(head, params, "Dense_0", channels=25)

    def run(x):
        x = x[:, None]
        for layer in convolutions:
            x = torch.relu(layer(x))
        return head(x.flatten(1))

    return nn.ModuleList([*convolutions, head]), run


def made(row):
    config = call_get_config(f"{FILE}:{row}")
    return make_model(_user_code.load(config.model.name, "name"), outputs=10)


@pytest.mark.parametrize("theirs", [logistic, mlp, gru, cnn], ids=lambda theirs: theirs.__name__)
def test_a_network_is_that_of_pytorch(theirs):
    model = made(theirs.__name__)
    signals = np.random.default_rng(0).standard_normal((8, LENGTH)).astype(np.float32)
    params, _ = jax.jit(model.init)(jax.random.key(0), signals)
    ours, _ = jax.jit(model.apply, static_argnums=3)(params, {}, signals, False)

    modules, run = theirs(params)
    modules.double()
    with torch.no_grad():
        wanted = run(torch.tensor(signals).double())
    np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("row", PUBLISHED)
def test_parameter_counts(row):
    zeros = np.zeros((1, LENGTH), np.float32)
    params, state = jax.eval_shape(made(row).init, jax.random.key(0), zeros)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert (count + FEWER.get(row, 0), state) == (PUBLISHED[row], {})


def test_networks_start_like_those_of_pytorch():
    """Kernel and bias of a layer have one distribution, which is uniform."""
    for row, layers in {"mlp": {"Dense_0": 40, "Dense_1": 100}, "cnn": {"Conv_1": 75}}.items():
        params, _ = made(row).init(jax.random.key(1), np.zeros((1, LENGTH), np.float32))
        for name, inputs in layers.items():
            for leaf, least in (("kernel", 0.97), ("bias", 0.7)):
                values = np.asarray(params[name][leaf]) * inputs**0.5
                assert least < np.abs(values).max() <= 1
                assert values.std() == pytest.approx(3**-0.5, rel=0.1 if leaf == "kernel" else 0.3)
