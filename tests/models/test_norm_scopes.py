"""Valid scope strings, and the groups that are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import names_in, numbers_in, refused

import lbopt
from lbopt import replicas
from lbopt.models import StatsScope


def apply(scope, count, axis_name, x):
    module = lbopt.BatchNorm(scope)
    variables = {
        "params": {"scale": jnp.ones(2), "bias": jnp.zeros(2)},
        "batch_stats": {"mean": jnp.zeros(2), "var": jnp.ones(2)},
    }
    with replicas.tracing_for(count, axis_name):
        return module.apply(variables, x, use_running_average=False, mutable=["batch_stats"])


UNKNOWN = [
    "",
    "Global",
    "replica:2",
    "replicas",
    "replicas:",
    "replicas:0",
    "examples:-1",
    "examples:2.5",
    "examples:02",
    "local:2",
]
KNOWN = {
    "global": StatsScope("global", 0),
    "local": StatsScope("local", 0),
    "replicas:2": StatsScope("replicas", 2),
    "examples:16": StatsScope("examples", 16),
}
UNEVEN = {
    "replicas:3": [3, 4],
    "replicas:8": [8, 4],
    "examples:3": [3, 16],
    "examples:32": [32, 16],
}


@pytest.mark.parametrize("text", UNKNOWN)
def test_unknown_text_is_refused(text):
    with refused("stats_scope", text, "value") as caught:
        StatsScope.parse(text)
    assert {"global", "local", "replicas", "examples"} <= names_in(caught)
    with refused("stats_scope", text, "value"):
        apply(text, 1, None, np.ones((4, 2), np.float32))


@pytest.mark.parametrize("momentum", [7.0, 1.0, -0.1])
def test_a_momentum_that_follows_no_batch_is_refused(momentum):
    with refused("momentum", momentum, "value"):
        lbopt.BatchNorm(momentum=momentum).init(jax.random.key(0), np.ones((4, 2)), True)


def test_known_text():
    assert {text: StatsScope.parse(text) for text in KNOWN} == KNOWN


@pytest.mark.parametrize(("scope", "told"), UNEVEN.items())
def test_groups_that_do_not_divide_are_refused(scope, told):
    with refused("stats_scope", scope, "mismatch") as caught:
        apply(scope, 4, None, np.ones((16, 2), np.float32))
    assert numbers_in(caught) == told
    part = lambda x: apply(scope, 4, "data", x)  # noqa: E731
    with refused("stats_scope", scope, "mismatch") as caught:
        jax.pmap(part, "data").lower(np.ones((4, 4, 2), np.float32))
    assert numbers_in(caught) == told


@pytest.mark.parametrize(("scope", "groups"), [("examples:4", 6), ("examples:8", 3)])
def test_groups_across_the_edge_of_a_replica_are_refused_under_pmap(scope, groups):
    part = lambda x: apply(scope, 4, "data", x)  # noqa: E731
    with refused("stats_scope", scope, "mismatch") as caught:
        jax.pmap(part, "data").lower(np.ones((4, 6, 2), np.float32))
    assert numbers_in(caught)[:2] == [groups, 4]


def test_local_groups_must_divide_the_batch():
    with refused("stats_scope", "local", "mismatch") as caught:
        apply("local", 4, None, np.ones((6, 2), np.float32))
    assert numbers_in(caught)[:2] == [4, 6]


def test_replicas_are_known_inside_only():
    assert replicas.current() is None
    with replicas.tracing_for(4, "data"):
        assert replicas.current() == replicas.Replicas(4, "data")
        with replicas.tracing_for(2):
            assert replicas.current() == replicas.Replicas(2, None)
        assert replicas.current().count == 4
    assert replicas.current() is None
    with pytest.raises(RuntimeError), replicas.tracing_for(4):
        raise RuntimeError
    assert replicas.current() is None


@pytest.mark.parametrize("scope", ["local", "replicas:1"])
def test_a_scope_that_counts_replicas_must_be_told_how_many(scope):
    module = lbopt.BatchNorm(scope)
    x = np.ones((4, 2), np.float32)
    variables = module.init(jax.random.key(0), x, use_running_average=False)
    with refused("stats_scope", scope, "missing"):
        module.apply(variables, x, use_running_average=False, mutable=["batch_stats"])


def test_a_jitted_part_of_a_model_is_traced_anew_for_other_replicas():
    module = lbopt.BatchNorm("local")
    x = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
    variables = module.init(jax.random.key(0), x, use_running_average=False)
    part = jax.jit(
        lambda x: module.apply(variables, x, use_running_average=False, mutable=["batch_stats"])[0]
    )
    for count in (1, 4, 2):
        with replicas.tracing_for(count):
            groups = x.reshape(count, 8 // count, 2)
            expected = (groups - groups.mean(1, keepdims=True)) / np.sqrt(
                groups.var(1, keepdims=True) + 1e-5
            )
            np.testing.assert_allclose(part(x), expected.reshape(8, 2), atol=1e-5)


def test_initialisation_checks_no_groups():
    """Initialisation uses few examples, which groups need not divide; statistics are 0 and 1."""
    variables = lbopt.BatchNorm("examples:64").init(
        jax.random.key(0), np.full((2, 3), 7.0, np.float32), use_running_average=False
    )
    np.testing.assert_array_equal(variables["batch_stats"]["mean"], np.zeros(3))
    np.testing.assert_array_equal(variables["batch_stats"]["var"], np.ones(3))
