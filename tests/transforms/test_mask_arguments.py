"""Masks in every accepted form, checked by the leaves that get a ratio and those that decay."""

import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from refusal import names_in, refused

import lbopt
from lbopt.errors import NO_VALUE

PARAMS = {
    "dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)},
    "norm": {"scale": jnp.ones(3)},
}
EVERY = {"dense/kernel", "dense/bias", "norm/scale"}
CHOICE = {"dense": {"kernel": False, "bias": True}, "norm": {"scale": True}}
FORMS = {
    "none": (None, EVERY),
    "true": (True, EVERY),
    "false": (False, set()),
    "tree": (CHOICE, {"dense/bias", "norm/scale"}),
    "numpy_bools": (
        {"dense": {"kernel": np.bool_(False), "bias": np.bool_(True)}, "norm": {"scale": np.True_}},
        {"dense/bias", "norm/scale"},
    ),
    "callable": (lambda params: CHOICE, {"dense/bias", "norm/scale"}),
    "weights_only": (lbopt.weights_only, {"dense/kernel"}),
}


def leaves(tree):
    return {
        f"{module}/{name}": leaf for module, group in tree.items() for name, leaf in group.items()
    }


def zeros():
    return {
        module: {name: jnp.zeros_like(leaf) for name, leaf in group.items()}
        for module, group in PARAMS.items()
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "build",
    [
        lambda mask: lbopt.scale_by_layerwise_trust_ratio(mask),
        lambda mask: lbopt.lamb(0.1, trust_ratio_mask=mask),
    ],
)
def test_trust_ratio_mask(form, build):
    mask, chosen = FORMS[form]
    tx = build(mask)
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    ratios = (
        lbopt.optimizer_metrics(state)
        if not hasattr(state, "trust_ratio")
        else lbopt.optimizer_metrics((state,))
    )
    assert {
        name.removeprefix("trust_ratio/") for name in ratios if name != "learning_rate"
    } == chosen


@pytest.mark.parametrize("form", FORMS)
def test_weight_decay_mask(form):
    mask, chosen = FORMS[form]
    tx = lbopt.scale_by_layerwise_trust_ratio(
        trust_ratio_mask=False, weight_decay=0.5, weight_decay_mask=mask
    )
    updates, _ = tx.update(zeros(), tx.init(PARAMS), PARAMS)
    assert {name for name, leaf in leaves(updates).items() if np.all(leaf == 0.5)} == chosen
    assert {name for name, leaf in leaves(updates).items() if np.all(leaf == 0)} == EVERY - chosen


def test_masks_of_the_aliases_override_the_variant_one_by_one():
    for build in (lbopt.lamb, lbopt.lars):
        for variant, default in (("paper", {"dense/kernel"}), ("optax", EVERY)):
            state = build(0.1, variant=variant).init(PARAMS)
            assert {
                name.removeprefix("trust_ratio/") for name in lbopt.optimizer_metrics(state)
            } - {"learning_rate"} == default
        for mask, chosen in FORMS.values():
            state = build(0.1, variant="paper", trust_ratio_mask=mask).init(PARAMS)
            assert {
                name.removeprefix("trust_ratio/") for name in lbopt.optimizer_metrics(state)
            } - {"learning_rate"} == chosen


def test_frozen_dicts():
    params = flax.core.freeze(PARAMS)
    tx = lbopt.lamb(0.1, weight_decay=0.1)
    updates, state = tx.update(params, tx.init(params), params)
    assert isinstance(updates, flax.core.FrozenDict)
    assert {"trust_ratio/dense/kernel"} == set(lbopt.optimizer_metrics(state)) - {"learning_rate"}


def test_a_callable_mask_sees_only_what_optax_masked_left():
    seen = []

    def mask(params):
        seen.append(params)
        return lbopt.weights_only(params)

    tx = optax.masked(
        lbopt.lamb(0.1, trust_ratio_mask=mask),
        {"dense": {"kernel": True, "bias": True}, "norm": {"scale": False}},
    )
    tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert seen
    assert all(params["norm"]["scale"] == optax.MaskedNode() for params in seen)


def test_a_summary_is_the_same_whatever_was_traced_before(capsys):
    params = {"dense": {"kernel": jnp.ones((3, 4)), "bias": jnp.zeros(4)}}

    def summary(tx):
        lbopt.summarize_masks(params, tx)
        return capsys.readouterr().out

    make = functools.partial(lbopt.lamb, 0.1, weight_decay=0.01)
    expected = summary(make())
    assert "1 decayed (12), 1 adapted (12)" in expected
    for wrap in (
        lambda tx: tx,
        lambda tx: optax.MultiSteps(tx, 2),
        lambda tx: optax.masked(tx, True),
        jitted,
    ):
        for trace in (jax.eval_shape, lambda init, params: jax.jit(init)(params)):
            tx = wrap(make())
            trace(tx.init, params)
            assert [summary(tx), summary(tx)] == [expected, expected]


def test_a_summary_shows_the_roles_that_masks_see_and_all_stacks(capsys):
    stack = {"weight": jnp.ones((2, 3)), "bias": jnp.ones((2, 3))}
    params = {"blocks": [stack, {"weight": jnp.ones((2, 3, 3))}]}
    stacked = lbopt.stacked_paths("^blocks/")
    adam = optax.adamw(0.1)

    for tx in (
        lbopt.lamb(0.1, stacked=stacked, weight_decay_mask=lbopt.exclude_roles("norm")),
        optax.chain(adam, lbopt.monitor_layers(stacked)),
        optax.chain(lbopt.normalize_gradients(stacked=stacked), adam),
    ):
        lbopt.summarize_masks(params, tx)
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert [(line[-6], line[-1]) for line in lines[1:-1]] == [
            ("norm", "2"),
            ("norm", "2"),
            ("weight", "2"),
        ]
    assert lines[-1][-4:] == ["-", "decayed,", "-", "adapted"], (
        "the decay of optax.adamw is not known"
    )

    pairs = optax.LookaheadParams.init_synced(params)
    lbopt.summarize_masks(pairs, optax.lookahead(lbopt.lamb(0.1), 5, 0.5))
    assert "\n6 parameters (60 numbers): - decayed, - adapted\n" in capsys.readouterr().out


def test_a_summary_of_an_optimizer_of_nnx_asks_for_its_transformation():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    optimizer = nnx.Optimizer(model, lbopt.lamb(0.1), wrt=nnx.Param)
    lbopt.summarize_masks(params, optimizer.tx)
    for given, kind in ((optimizer, "Optimizer"), (params, "State")):
        with refused("tx", NO_VALUE, "type") as caught:
            lbopt.summarize_masks(params, given)
        assert kind in caught.value.reason
        assert {"nnx.Optimizer", "tx"} <= names_in(caught)


@pytest.mark.parametrize("argument", ["trust_ratio_mask", "stacked"])
def test_a_mask_that_is_taken_for_a_schedule_is_refused(argument):
    is_mask = argument == "trust_ratio_mask"
    given = (lbopt.select_paths if is_mask else lbopt.stacked_paths)("kernel")
    with refused("mask" if is_mask else "stacked", given, "type"):
        optax.inject_hyperparams(lbopt.lamb)(0.1, **{argument: given}).init(PARAMS)


def jitted(tx):
    """The program is traced once for all callers."""
    return optax.GradientTransformation(jax.jit(tx.init), tx.update)
