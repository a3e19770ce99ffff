"""Operations of networks against the closed forms of their papers."""

import jax
import jax.numpy as jnp
import pytest

from lbopt.cli import call_get_config
from lbopt.plan._count import count
from lbopt.plan._make import count_forward


def bert_operations(length, masked, vocabulary=30522, width=1024, layers=24):
    """A token and layer take 12 width^2 and 2 length width multiply-adds; the heads come on top."""
    encoder = layers * length * (12 * width**2 + 2 * length * width)
    heads = masked * (width**2 + vocabulary * width) + width**2
    return 2 * (encoder + heads)


@pytest.mark.everyday("*resnet50*")
@pytest.mark.parametrize(
    ("flag", "wanted"),
    [
        (
            "configs/resnet50_lars.py:32768",
            2 * 4.089e9,
        ),  # He et al., arXiv 1512.03385v1, v1.5: 4.089 G multiply-adds
        (
            "configs/efficientnet.py:b5-lars-65536",
            2 * 10.27e9,
        ),  # arXiv 1905.11946v5 has 9.9 G, for fewer operations
        ("configs/squad.py:large-lamb", bert_operations(384, 0) - 2 * 1024**2 + 2 * 384 * 1024 * 2),
    ],
)
def test_published_networks(flag, wanted):
    assert count_forward(call_get_config(flag)).flops == pytest.approx(wanted, rel=0.001)


@pytest.mark.slow
def test_bert_large_in_both_phases():
    phases = call_get_config("configs/bert_large_lamb.py:mixed").phases()
    found = [count_forward(phase).flops for phase in phases]
    assert found == pytest.approx([bert_operations(128, 20), bert_operations(512, 80)], rel=1e-6)


def test_a_scanned_network_counts_as_one_that_is_not():
    plain = call_get_config("configs/pydoc_bert.py:smoke")
    looped = call_get_config("configs/pydoc_bert.py:smoke")
    looped.model.scan_layers = True
    ours = count_forward(looped)
    theirs = count_forward(plain)
    assert ours.flops == theirs.flops
    assert sum(layer.weights for layer in ours.layers) == sum(
        layer.weights for layer in theirs.layers
    )


def test_a_recurrent_network_takes_its_weights_again_in_every_turn():
    def looped(kernel, xs):
        return jax.lax.scan(lambda h, x: (jnp.tanh(h @ kernel + x), None), xs[0], xs)[0]

    found = count(looped, (jnp.zeros((64, 64)),), jnp.zeros((5, 8, 64)))
    (layer,) = found.layers
    assert found.flops == 5 * 2 * 8 * 64 * 64
    assert (layer.inputs, layer.weights, layer.outputs) == (5 * 8 * 64, 64 * 64, 5 * 8 * 64)


def test_what_no_weight_takes_part_in_is_no_layer():
    found = count(
        lambda w, x: jnp.einsum("bi,bj->ij", x @ w, x), (jnp.zeros((4, 6)),), jnp.zeros((8, 4))
    )
    assert found.flops == 2 * 8 * 4 * 6 + 2 * 8 * 6 * 4
    assert [layer.weights for layer in found.layers] == [24]
