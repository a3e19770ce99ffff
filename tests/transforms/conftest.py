"""A small optimization problem with every kind of leaf, and the two ways to compare its outcomes."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

STEPS = 50


def _flatten(tree, prefix=""):
    flat = {}
    for key, value in tree.items():
        flat.update(_flatten(value, f"{prefix}{key}/") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def _make_problem():
    rng = np.random.default_rng(20)
    params = {
        "conv": {"kernel": rng.normal(size=(3, 3, 2, 4))},
        "dense": {"kernel": rng.normal(size=(6, 5)), "bias": rng.normal(size=5)},
        "fresh": {"kernel": np.zeros((4, 3)), "bias": np.zeros(3)},
        "idle": {"kernel": rng.normal(size=(3, 4)), "bias": np.zeros(4)},
        "late": {"kernel": rng.normal(size=(2, 3, 4))},
        "BatchNorm_0": {"scale": rng.uniform(0.5, 1.5, size=4), "bias": rng.normal(size=4)},
        "slope": rng.normal(size=7),
        "temperature": rng.normal(size=()),
    }
    params = jax.tree.map(np.float32, params)
    size = 10.0 ** rng.uniform(-2, 0, size=STEPS)  # the global norm passes 1 upwards and downwards
    grads = jax.tree.map(
        lambda w: np.float32((size * rng.normal(size=(*w.shape, STEPS))).T.reshape(STEPS, *w.shape)), params
    )
    grads["idle"] = jax.tree.map(np.zeros_like, grads["idle"])
    grads["late"]["kernel"][:7] = 0
    t = np.arange(STEPS)
    rates = np.where(t < 10, (t + 1) / 10, ((STEPS - t) / (STEPS - 10)) ** 2)
    return types.SimpleNamespace(params=params, grads=grads, rates=rates)


@pytest.fixture(scope="session")
def problem():
    """fp32 parameters, 50 stacked fp32 gradients, and a learning rate that rises and falls (as float64 factors)."""
    return _make_problem()


@pytest.fixture(scope="session")
def flatten():
    """Return nested dict -> {"a/b": leaf}."""
    return _flatten


@pytest.fixture(scope="session")
def descend(problem):
    """Return a function that runs the problem by `build(schedule, **options)` in a dtype and gives what came of it, in float64.

    `last`: the last parameters; `moved`: the sum of all updates; `path`: the sum of their norms, leaf by leaf.
    """

    done = {}

    def run(build, options, peak, dtype):
        key = (build, tuple(sorted(options.items(), key=lambda item: item[0])), peak, dtype)
        if key not in done:
            done[key] = descend_once(build, options, peak, dtype)
        return done[key]

    def descend_once(build, options, peak, dtype):
        with jax.enable_x64(dtype == np.float64):
            params, grads = jax.tree.map(lambda x: jnp.asarray(x, dtype), (problem.params, problem.grads))
            table = jnp.asarray(peak * problem.rates, dtype)
            tx = build(lambda count: table[count], **options)

            def step(carry, gradient):
                params, state = carry
                updates, state = tx.update(gradient, state, params)
                return (optax.apply_updates(params, updates), state), updates

            (last, _), updates = jax.jit(lambda p, g: jax.lax.scan(step, (p, tx.init(p)), g))(params, grads)
            assert all(leaf.dtype == dtype for leaf in jax.tree.leaves((last, updates)))
            last, updates = (
                _flatten(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)) for tree in (last, updates)
            )
        moved = {name: steps.sum(0) for name, steps in updates.items()}
        path = {name: np.linalg.norm(steps.reshape(STEPS, -1), axis=1).sum() for name, steps in updates.items()}
        return types.SimpleNamespace(last=last, moved=moved, path=path)

    return run


@pytest.fixture(scope="session")
def position_errors():
    """Return ||w - oracle|| / ||oracle|| per leaf, 0 where both are equal."""

    def errors(last, oracle):
        assert last.keys() == oracle.keys()
        return {name: _relative(last[name] - oracle[name], np.linalg.norm(np.ravel(oracle[name]))) for name in oracle}

    return errors


@pytest.fixture(scope="session")
def movement_errors(problem):
    """Return ||sum of updates - the oracle's movement|| / length of the path, per leaf.

    The sum of updates is free of the rounding of parameters at every step, and the path does not shrink where steps
    cancel, so that this sees a relative error of the steps themselves.
    """

    def errors(run, oracle):
        first = _flatten(problem.params)
        return {name: _relative(run.moved[name] - (oracle[name] - first[name]), run.path[name]) for name in oracle}

    return errors


def _relative(difference, scale):
    size = np.linalg.norm(np.ravel(difference))
    return 0.0 if size == 0 else (size / scale if scale > 0 else np.inf)
