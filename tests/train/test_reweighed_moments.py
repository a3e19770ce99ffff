"""Moments of every optimizer where the scaling rule changes their decays between two batches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import own_optimizers
import pytest
from refusal import names_in, refused

from lbopt.config import (
    BatchScheduleConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PhaseConfig,
    ScheduleConfig,
    TrainConfig,
    _foreign,
    check_moments,
    make_optimizer,
    moment_decays,
    optimizer_settings,
    scale_optimizer,
)
from lbopt.config._optimizer import OPTIMIZERS
from lbopt.recipes import build_run
from lbopt.schedules import NUMBERS, RULES
from lbopt.transforms import reweigh_moments

SIZES = (16, 128)
"""The batch before and after the change."""
BEFORE = 8
"""Steps before the change: few, so that moments are far from their full weight."""
AFTER = 5
RATE = 1e-4
B2 = {"b2": 0.99}
ROOTS = {**B2, "eps": 0.01, "every_steps": 4}
"""Shampoo, whose roots are new before and after the change. `eps` covers roundoff in them."""


def of(name, rule="token_half_life", **options):
    fields = {field.name for field in dataclasses.fields(OptimizerConfig)}
    own = {key: value for key, value in options.items() if key in fields}
    if _foreign.is_foreign(name):
        own = {"state_format": own.get("state_format")}
    rest = {key: value for key, value in options.items() if key not in own}
    return OptimizerConfig(name, **own, options=rest), rule


CASES = {
    "adam": of("adam", **B2),
    "adamw": of("adamw", **B2),
    "adamw-sde": of("adamw", "sde", **B2),
    "adamw-8bit": of("adamw", state_format="8bit_dynamic", **B2),
    "adamw-bf16": of("adamw", state_format="bf16_stochastic", **B2),
    "lamb": of("lamb", **B2),
    "lamb-sde": of("lamb", "sde", **B2),
    "lamb-no-debias": of("lamb", variant="nus", weight_decay=0.01, **B2),
    "lans": of("lans", **B2),
    "lans-sde": of("lans", "sde", **B2),
    "rmsprop": of("rmsprop", rmsprop_decay=0.99),
    "adamh": of("adamh", **B2),
    "adamh-8bit": of("adamh", state_format="8bit_dynamic", **B2),
    "dion": of("dion", rest_b2=0.99),
    "kron": of("kron", rest_b2=0.99),
    "muon": of("muon", rest_b2=0.99),
    "muon-optax": of("muon", variant="optax", rest_b2=0.99),
    "muonh": of("muonh", rest_b2=0.99),
    "muown": of("muown", rest_b2=0.98, **B2),
    "normuon": of("normuon", rest_b2=0.99),
    "shampoo": of("shampoo", **ROOTS, graft_b2=0.98, rest_b2=0.97),
    "shampoo-rmsprop": of("shampoo", **ROOTS, graft_b2=0.98, graft="rmsprop"),
    "shampoo-no-graft": of("shampoo", **ROOTS, graft=None),
    "shampoo-no-debias": of("shampoo", **ROOTS, graft=None, debias=False),
    "soap": of("soap", eps=0.01, rest_b2=0.98, **B2),
    "soap-8bit": of("soap", eps=0.01, state_format="8bit_dynamic", **B2),
    "soap-no-debias": of("soap", eps=0.01, variant="kl", **B2),
    "soaph": of("soaph", eps=0.01, variant="paper", **B2),
    "soaph-no-debias": of("soaph", eps=0.01, **B2),
    "optax.adabelief": of("optax.adabelief", **B2),
    "optax.adam": of("optax.adam", **B2),
    "optax.adam-nesterov-sde": of("optax.adam", "sde", nesterov=True, **B2),
    "optax.adamax": of("optax.adamax", **B2),
    "optax.adamaxw": of("optax.adamaxw", **B2),
    "optax.adamw": of("optax.adamw", **B2),
    "optax.adan": of("optax.adan", b3=0.99),
    "optax.amsgrad": of("optax.amsgrad", **B2),
    "optax.amsgrad-no-debias": of("optax.amsgrad", bias_correction_nu=False, **B2),
    "optax.lamb": of("optax.lamb", "sde", **B2),
    "optax.novograd": of("optax.novograd", **B2),
    "optax.optimistic_adam": of("optax.optimistic_adam", **B2),
    "optax.optimistic_adam_v2": of("optax.optimistic_adam_v2", **B2),
    "optax.radam": of("optax.radam", **B2),
    "optax.rmsprop": of("optax.rmsprop", decay=0.99),
    "optax.rmsprop-debias": of("optax.rmsprop", decay=0.99, bias_correction=True),
    "optax.rmsprop-centered": of(
        "optax.rmsprop", decay=0.99, bias_correction=True, centered=True, eps=0.01
    ),
    "optax.yogi": of("optax.yogi", **B2),
    "optax.contrib.acprop": of("optax.contrib.acprop", **B2),
    "optax.contrib.ademamix": of("optax.contrib.ademamix", **B2),
    "optax.contrib.adopt": of("optax.contrib.adopt", **B2),
    "optax.contrib.momo_adam": of("optax.contrib.momo_adam", **B2),
    "optax.contrib.muon": of("optax.contrib.muon", adam_b2=0.99),
    "optax.contrib.schedule_free_adamw": of("optax.contrib.schedule_free_adamw", **B2),
    "optax.contrib.simplified_ademamix": of("optax.contrib.simplified_ademamix", **B2),
}
NOT_BUILT = ("optax.contrib.sophia",)
"""Optimizers that no run can have: this one needs the loss as a function."""


def scaled(optimizer, rule):
    schedule = ScheduleConfig(RATE, base_batch_size=16, scaling_rule=rule)
    return [scale_optimizer(optimizer, schedule, size) for size in SIZES]


def drawn(optimizer):
    """Return parameters, and gradients like them that stay the same in every step."""
    n = 8 if optimizer.state_format is None else 64  # smaller arrays are not compressed
    shapes = {"dense": {"kernel": (n, n), "bias": (n,)}}
    keys = iter(jax.random.split(jax.random.key(0), 4))
    draws = [
        jax.tree.map(
            lambda shape: jax.random.normal(next(keys), shape),
            shapes,
            is_leaf=lambda node: isinstance(node, tuple),
        )
        for _ in range(2)
    ]
    return draws[0], draws[1]


def stepper(optimizer, grads):
    tx = make_optimizer(optimizer, RATE)
    return tx, stepped(tx, grads)


def stepped(tx, grads):
    """Return a step of an optimizer: (state, parameters) -> updates, state, parameters."""
    update = optax.with_extra_args_support(tx).update

    @jax.jit
    def step(state, params):
        updates, state = update(grads, state, params, value=jnp.float32(1e4))
        return updates, state, optax.apply_updates(params, updates)

    return step


def taken(step, num_steps, state, params):
    """Return the updates of some steps, and the state and the parameters after them."""
    found = []
    for _ in range(num_steps):
        updates, state, params = step(state, params)
        found.append(jax.device_get(updates))
    return found, state, params


@pytest.mark.everyday("adamw", "adamw-8bit", "muown", "shampoo-no-graft", "soap", "optax.adamax")
@pytest.mark.parametrize("case", CASES)
def test_no_step_jumps_where_the_decays_of_moments_change(case):
    """Under a constant gradient, steps after the change lie between those without a change.

    One run has had the numbers before the change from the start on, the other those after it.
    """
    optimizer, rule = CASES[case]
    old, new = scaled(optimizer, rule)
    assert optimizer_settings(old) != optimizer_settings(new)
    params, grads = drawn(optimizer)
    tx, step_before = stepper(old, grads)
    later, step_after = stepper(new, grads)
    of_old, *_ = taken(step_before, BEFORE + AFTER, tx.init(params), params)
    of_new, *_ = taken(step_after, BEFORE + AFTER, later.init(params), params)

    decays = moment_decays(old, new)
    check_moments(new, decays or {}, params)
    _, state, moved = taken(step_before, BEFORE, tx.init(params), params)
    state = jax.jit(lambda state: reweigh_moments(state, decays))(state)
    found, *_ = taken(step_after, AFTER, state, moved)

    for three in zip(of_old[BEFORE:], of_new[BEFORE:], found, strict=True):
        for first, second, here in zip(*map(jax.tree.leaves, three), strict=True):
            size = max(map(rms, (first, second)))
            outside = here - np.clip(here, np.minimum(first, second), np.maximum(first, second))
            assert rms(outside) < 0.02 * size


def rms(x):
    return float(np.sqrt(np.mean(np.square(x))))


def test_every_optimizer_whose_decays_a_rule_changes_has_a_case():
    names = {*OPTIMIZERS, *_foreign.LIBRARY, *_foreign.names_of_optax()} - {*NOT_BUILT}
    decayed = {
        name
        for name in names
        if {"b2"} & {setting.number for setting in optimizer_settings(OptimizerConfig(name))}
    }
    assert decayed == {optimizer.name for optimizer, _ in CASES.values()}
    # b1 is changed by rules for some optimizers alone, and other momenta by none.
    of_b1 = set()
    for rule in RULES.values():
        moved = {change.number for change in rule.changes if change.batch or change.duration}
        assert moved <= {*NUMBERS} - {"momentum"}
        of_b1 |= {*rule.optimizers} if "b1" in moved else set()
    assert of_b1 == {
        *("adam", "adamw", "rmsprop", "lamb", "lans"),
        *("optax.adam", "optax.adamw", "optax.rmsprop", "optax.lamb"),
    }


RULE = "sqrt+token_half_life"


def growing(optimizer, rule=RULE):
    """Return the config of a run whose batch grows."""
    changes = ((16.0 * BEFORE, SIZES[1]),)
    return TrainConfig(
        data="digits",
        model=ModelConfig("mlp", widths=(8,)),
        optimizer=optimizer,
        schedule=ScheduleConfig(
            RATE,
            base_batch_size=16,
            scaling_rule=rule,
            warmup_rule="epochs",
            base_warmup_epochs=0.0,
            decay="constant",
        ),
        global_batch_size=16,
        num_steps=BEFORE + 8 * AFTER,
        batch_schedule=BatchScheduleConfig("steps", unit="examples", changes=changes),
        parallel=ParallelConfig(num_devices=1),
    )


def in_two_phases(optimizer, rule=RULE, optimizer_state="keep"):
    """Return the config of a run whose second phase has the larger batch."""
    whole = growing(optimizer, rule)
    second = PhaseConfig(AFTER, SIZES[1], schedule=whole.schedule, optimizer_state=optimizer_state)
    return dataclasses.replace(whole, batch_schedule=None, num_steps=BEFORE, phase2=second)


def corrected(opt_state, field, decay):
    """Return a moment of a state, divided by its weight."""
    count = optax.tree.get(opt_state, "count")
    moment = jax.tree.leaves(optax.tree.get(opt_state, field))[0]
    return np.asarray(moment) / (1 - decay ** int(count))


@pytest.mark.parametrize("make", [growing, in_two_phases])
@pytest.mark.parametrize("name", ["adamw", "optax.amsgrad"])
def test_a_run_suits_the_moments_to_the_batch_of_its_next_phase(make, name):
    optimizer, _ = of(name, **B2)
    first, second = build_run(make(optimizer)).phases()
    state = first.init()
    grads = jax.tree.map(lambda p: jnp.full_like(p, 0.5), state.params)
    for _ in range(BEFORE):
        _, opt_state = first.tx.update(grads, state.opt_state, state.params)
        state = state.replace(opt_state=opt_state)
    before = corrected(opt_state, "nu", 0.99)

    entered = second.enter(state).opt_state
    np.testing.assert_allclose(corrected(entered, "nu", 0.99**8), before, rtol=1e-5)
    np.testing.assert_allclose(before, 0.25, rtol=1e-5)


def test_a_second_phase_with_a_fresh_state_suits_nothing():
    optimizer, _ = of("adamw", **B2)
    first, second = build_run(in_two_phases(optimizer, optimizer_state="reset")).phases()
    assert second.reweighing is None
    state = second.enter(first.init())
    assert float(optax.tree.norm(optax.tree.get(state.opt_state, "nu"))) == 0


def test_moments_of_muown_keep_their_count_where_the_schedule_starts_again():
    optimizer, _ = CASES["muown"]
    first, second = build_run(in_two_phases(optimizer, "none")).phases()
    state = first.init()
    grads = jax.tree.map(lambda p: jnp.full_like(p, 0.5), state.params)
    _, opt_state, params = taken(stepped(first.tx, grads), BEFORE, state.opt_state, state.params)
    before = optax.tree.get(opt_state, "magnitude")
    state = second.enter(state.replace(opt_state=opt_state, params=params))
    _, opt_state, _ = taken(stepped(second.tx, grads), 1, state.opt_state, params)
    after = optax.tree.get(opt_state, "magnitude")
    # As the gradient stays, Adam moves a magnitude by the learning rate.
    for name, magnitude in before.items():
        np.testing.assert_allclose(np.abs(after[name] - magnitude), RATE, rtol=0.1)


def test_the_trials_of_a_batch_suit_their_moments_alike():
    optimizer, rule = CASES["soap-8bit"]
    old, new = scaled(optimizer, rule)
    params, grads = drawn(optimizer)
    tx, step = stepper(old, grads)
    _, first, _ = taken(step, 3, tx.init(params), params)
    _, second, _ = taken(step, 6, tx.init(params), params)
    decays = moment_decays(old, new)
    trials = jax.tree.map(lambda *leaves: jnp.stack(leaves), first, second)
    together = reweigh_moments(trials, decays)
    for place, alone in enumerate((first, second)):
        jax.tree.map(
            lambda all_, one, place=place: np.testing.assert_allclose(all_[place], one, rtol=1e-6),
            together,
            reweigh_moments(alone, decays),
        )


def test_lars_has_no_moments_to_suit():
    optimizer = OptimizerConfig("lars")
    phases = build_run(growing(optimizer, "sqrt")).phases()
    assert [phase.reweighing for phase in phases] == [None, None]


@pytest.mark.parametrize("make", [growing, in_two_phases])
def test_unknown_moments_of_the_users_code_are_refused_where_their_decay_changes(make):
    name = f"{own_optimizers.PLACE}:own"
    at = "config.optimizer.name"
    with refused(at, name, "conflict") as caught:
        build_run(make(OptimizerConfig(name, options={"b2": 0.99})))
    assert {"OwnState", "b2"} <= names_in(caught)
    build_run(make(OptimizerConfig(name, options={"b2": 0.99}), "sqrt"))


def test_moments_of_adam_in_the_users_code_are_suited():
    optimizer = OptimizerConfig(f"{own_optimizers.PLACE}:adam", options={"b2": 0.99})
    _, second = build_run(growing(optimizer)).phases()
    assert second.reweighing.decays == {"b2": (0.99, pytest.approx(0.99**8))}
