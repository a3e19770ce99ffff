"""BatchNorm over every scope equals NumPy over the same groups, under jit and under pmap."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lbopt
from lbopt import losses, metrics
from lbopt.models import from_linen

DEVICES = 4
BATCH = 16
MOMENTUM = 0.75
# Scope -> number of contiguous groups in a global batch of 16. Each of the 4 replicas has 4
# examples.
GROUPS = {
    "global": 1,
    "local": 4,
    "replicas:1": 4,
    "replicas:2": 2,
    "replicas:4": 1,
    "examples:2": 8,
    "examples:4": 4,
    "examples:8": 2,
    "examples:16": 1,
}


@pytest.fixture(scope="module")
def arrays():
    """Return inputs whose examples differ in mean and spread, so that groups matter."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH, 3, 2)) * rng.uniform(
        0.5, 2, (BATCH, 1, 1)
    ) + rng.standard_normal((BATCH, 1, 2))
    scale = rng.uniform(0.5, 2, 2)
    bias = rng.standard_normal(2)
    weights = rng.standard_normal(x.shape)
    return [array.astype(np.float32) for array in (x, scale, bias, weights)]


def moved(start, batch):
    return MOMENTUM * start + (1 - MOMENTUM) * batch


@pytest.fixture(scope="module", params=["jit", "pmap"])
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def results(backend, arrays, normalized):
    """Return a function of the backend: scope -> results on four devices, from one program."""
    return normalized(backend, DEVICES, list(GROUPS), arrays)[0]


def assert_is(result, expected):
    """Compare all results of one scope with the reference."""
    for name in ("y", "dx", "dscale", "dbias"):
        np.testing.assert_allclose(result[name], expected[name], rtol=2e-5, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(result["mean"], moved(5.0, expected["mean"]), rtol=2e-6)
    np.testing.assert_allclose(result["var"], moved(3.0, expected["var"]), rtol=2e-6)


@pytest.mark.parametrize("scope", GROUPS)
def test_outputs_gradients_and_running_statistics(scope, results, arrays, reference):
    assert_is(results[scope], reference(*arrays, GROUPS[scope]))


def test_other_groups_give_other_numbers(arrays, reference):
    """Scopes differ by far more than the tolerance of the comparison above."""
    results = [reference(*arrays, num_groups) for num_groups in sorted(set(GROUPS.values()))]
    for i, one in enumerate(results):
        for other in results[:i]:
            assert all(
                np.abs(one[name] - other[name]).max() > 1e-2
                for name in ("y", "dx", "dscale", "dbias", "var")
            )


def test_bf16_inputs_have_fp32_statistics(backend, arrays, reference, normalized):
    x, scale, bias, weights = arrays
    # In bf16, E[x^2] - E[x]^2 would be off by more than the variance.
    narrow = (x + 20).astype(jnp.bfloat16)

    found, _ = normalized(backend, DEVICES, list(GROUPS), (narrow, scale, bias, weights))
    for scope, result in found.items():
        expected = reference(narrow.astype(np.float64), scale, bias, weights, GROUPS[scope])
        assert result["y"].dtype == result["dx"].dtype == jnp.bfloat16
        assert {result[name].dtype for name in ("dscale", "dbias", "mean", "var")} == {
            np.dtype(np.float32)
        }

        np.testing.assert_allclose(result["mean"], moved(5.0, expected["mean"]), rtol=2e-6)
        np.testing.assert_allclose(result["var"], moved(3.0, expected["var"]), rtol=1e-4)
        np.testing.assert_allclose(
            np.asarray(result["y"], np.float64), expected["y"], rtol=2**-8, atol=2e-3
        )
        np.testing.assert_allclose(
            np.asarray(result["dx"], np.float64), expected["dx"], rtol=2**-7, atol=4e-3
        )

        for name in ("dscale", "dbias"):
            np.testing.assert_allclose(
                result[name], expected[name], rtol=2e-2, atol=2e-2, err_msg=f"{scope} {name}"
            )


def test_global_scope_equals_flax(arrays):
    x, scale, bias, weights = arrays
    ours = lbopt.BatchNorm(momentum=MOMENTUM)
    theirs = nn.BatchNorm(momentum=MOMENTUM, epsilon=1e-5)
    variables = {
        "params": {"scale": scale, "bias": bias},
        "batch_stats": {"mean": jnp.zeros(2), "var": jnp.ones(2)},
    }
    initial = [
        module.init(jax.random.key(0), x, use_running_average=False) for module in (ours, theirs)
    ]
    jax.tree.map(np.testing.assert_array_equal, *initial)

    def loss(params, x, module):
        y, updated = module.apply(
            variables | {"params": params}, x, use_running_average=False, mutable=["batch_stats"]
        )
        return jnp.sum(weights * jnp.tanh(y)), (y, updated)

    results = [
        jax.grad(loss, argnums=(0, 1), has_aux=True)(variables["params"], x, module)
        for module in (ours, theirs)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), *results)
    inferred = [module.apply(variables, x, use_running_average=True) for module in (ours, theirs)]
    np.testing.assert_allclose(*inferred, rtol=1e-6, atol=1e-6)


def test_running_statistics_normalize_at_inference(arrays):
    x, scale, bias, _ = arrays
    mean = np.array([0.5, -1.0], np.float32)
    var = np.array([2.0, 0.25], np.float32)
    variables = {
        "params": {"scale": scale, "bias": bias},
        "batch_stats": {"mean": mean, "var": var},
    }
    for scope in ("global", "examples:8"):
        y = lbopt.BatchNorm(scope).apply(variables, x, use_running_average=True)
        np.testing.assert_allclose(
            y, (x - mean) / np.sqrt(var + 1e-5) * scale + bias, rtol=1e-5, atol=1e-6
        )


def test_a_mean_far_larger_than_the_deviation_is_taken_off_first(arrays):
    """In evaluation x - mean is exact; x * factor - mean * factor would lose two digits here."""
    x = 1000 + arrays[0]
    variables = {
        "batch_stats": {"mean": np.full(2, 1000, np.float32), "var": np.full(2, 0.01, np.float32)}
    }
    y = lbopt.BatchNorm(use_scale=False, use_bias=False).apply(
        variables, x, use_running_average=True
    )
    np.testing.assert_allclose(
        y, (x.astype(np.float64) - 1000) / np.sqrt(np.float32(0.01) + 1e-5), rtol=1e-5
    )


def test_without_scale_or_bias_there_are_no_parameters(arrays):
    module = lbopt.BatchNorm(use_scale=False, use_bias=False, dtype=jnp.bfloat16)
    variables = module.init(jax.random.key(0), arrays[0], use_running_average=False)
    assert set(variables) == {"batch_stats"}
    y, _ = module.apply(variables, arrays[0], use_running_average=False, mutable=["batch_stats"])
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float64).mean((0, 1)), 0, atol=1e-2)
    np.testing.assert_allclose(np.asarray(y, np.float64).var((0, 1)), 1, atol=1e-2)


def test_the_first_group_may_be_kept(backend, arrays, normalized):
    x = np.asarray(arrays[0], np.float64)
    found, _ = normalized(backend, DEVICES, list(GROUPS), arrays, running_from="first")
    for scope, groups in GROUPS.items():
        first = x[: BATCH // groups]
        np.testing.assert_allclose(
            found[scope]["mean"], moved(5.0, first.mean((0, 1))), rtol=2e-6, err_msg=scope
        )
        np.testing.assert_allclose(
            found[scope]["var"], moved(3.0, first.var((0, 1))), rtol=2e-6, err_msg=scope
        )


def test_unbiased_variance_is_kept_and_not_used(backend, arrays, normalized, reference):
    """n is the group's number of examples times positions, over all its devices."""
    found, _ = normalized(backend, DEVICES, list(GROUPS), arrays, unbiased_running_var=True)
    for scope, groups in GROUPS.items():
        expected = reference(*arrays, groups)
        count = arrays[0].size // arrays[0].shape[-1] // groups
        np.testing.assert_allclose(
            found[scope]["y"], expected["y"], rtol=2e-5, atol=1e-5, err_msg=scope
        )
        unbiased = expected["var"] * count / (count - 1)
        np.testing.assert_allclose(
            found[scope]["var"], moved(3.0, unbiased), rtol=2e-6, err_msg=scope
        )


def test_a_group_of_one_number_has_no_unbiased_variance_and_stays_finite():
    x = np.ones((4, 2), np.float32)
    module = lbopt.BatchNorm("examples:1", unbiased_running_var=True)
    variables = module.init(jax.random.key(0), x, use_running_average=False)
    y, updated = module.apply(variables, x, use_running_average=False, mutable=["batch_stats"])
    np.testing.assert_array_equal(y, np.zeros_like(x))
    np.testing.assert_allclose(updated["batch_stats"]["var"], np.full(2, 0.9))


def test_unbiased_global_batch_norm_is_pytorchs():
    """Two steps and inference as torch.nn.BatchNorm2d: output, gradients, running statistics."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(4)
    scale = rng.uniform(0.5, 2, 3).astype(np.float32)
    bias = rng.standard_normal(3).astype(np.float32)
    theirs = torch.nn.BatchNorm2d(3, momentum=0.1, eps=1e-5)
    theirs.load_state_dict(
        {**theirs.state_dict(), "weight": torch.tensor(scale), "bias": torch.tensor(bias)}
    )
    ours = lbopt.BatchNorm(momentum=0.9, unbiased_running_var=True)
    stats = {"mean": jnp.zeros(3), "var": jnp.ones(3)}

    def loss(params, x, stats):
        variables = {"params": params, "batch_stats": stats}
        y, updated = ours.apply(variables, x, use_running_average=False, mutable=["batch_stats"])
        return jnp.sum(jnp.sin(y)), (y, updated["batch_stats"])

    for step in range(2):
        x = rng.normal(1 + step, 2, (4, 2, 3, 3)).astype(np.float32)
        grads, (y, stats) = jax.grad(loss, argnums=(0, 1), has_aux=True)(
            {"scale": scale, "bias": bias}, x, stats
        )
        given = torch.tensor(x.transpose(0, 3, 1, 2), requires_grad=True)
        theirs.zero_grad()
        their_y = theirs(given)
        their_y.sin().sum().backward()
        there = lambda tensor: tensor.detach().numpy().transpose(0, 2, 3, 1)  # noqa: E731
        np.testing.assert_allclose(y, there(their_y), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(grads[1], there(given.grad), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(grads[0]["scale"], theirs.weight.grad, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(grads[0]["bias"], theirs.bias.grad, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(stats["mean"], theirs.running_mean, rtol=1e-5)
        np.testing.assert_allclose(stats["var"], theirs.running_var, rtol=1e-5)
    variables = {"params": {"scale": scale, "bias": bias}, "batch_stats": stats}
    np.testing.assert_allclose(
        ours.apply(variables, x, use_running_average=True),
        there(theirs.eval()(given)),
        rtol=1e-5,
        atol=1e-5,
    )


def test_averaging_running_statistics_at_the_end_is_averaging_them_at_every_step(arrays):
    """MLPerf averages each group's running statistics at evaluation; the average is linear."""
    module = lbopt.BatchNorm("examples:4", momentum=MOMENTUM, use_scale=False, use_bias=False)
    alone = lbopt.BatchNorm("global", momentum=MOMENTUM, use_scale=False, use_bias=False)
    start = {"batch_stats": {"mean": jnp.zeros(2), "var": jnp.ones(2)}}
    ours = start
    theirs = [start] * 4
    for step in range(3):
        x = (1 + step) * arrays[0] + step
        _, ours = module.apply(ours, x, use_running_average=False, mutable=["batch_stats"])
        for group, part in enumerate(np.split(x, 4)):
            _, theirs[group] = alone.apply(
                theirs[group], part, use_running_average=False, mutable=["batch_stats"]
            )
    averaged = jax.tree.map(lambda *leaves: np.mean(leaves, 0), *theirs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, averaged)
    gap = jax.tree.map(lambda a, b: np.max(np.abs(a - b)), theirs[0], theirs[1])
    assert min(jax.tree.leaves(gap)) > 0.1, "groups differ"


class Normalized(nn.Module):
    """Batch norm without parameters and a linear readout."""

    stats_scope: str

    @nn.compact
    def __call__(self, x, train):
        y = lbopt.BatchNorm(self.stats_scope, momentum=MOMENTUM)(x, use_running_average=not train)
        return nn.Dense(3, kernel_init=nn.initializers.normal(1.0))(jnp.tanh(y.reshape(len(y), -1)))


@pytest.mark.parametrize(
    ("scope", "groups_in_a_part"), [("global", 1), ("replicas:2", 2), ("tiles:2x1@2x2", 2)]
)
def test_microsteps_normalize_each_part_on_its_own(
    backend, scope, groups_in_a_part, arrays, reference
):
    """Microstep m has examples m, m + 2, ... on any device, and groups divide the microstep.

    Statistics are the mean over microsteps.
    """
    model = from_linen(Normalized(scope))
    x = np.concatenate([arrays[0], 2 * arrays[0][::-1] + 1])
    labels = np.arange(32) % 3

    def loss_fn(params, model_state, batch, rng):
        logits, model_state = model.apply(params, model_state, batch["x"], True, rng)
        each = losses.softmax_cross_entropy(logits, batch["y"])
        return jnp.mean(each), (model_state, metrics.classification(logits, batch["y"], each))

    tx = optax.sgd(0.1)
    state = lbopt.TrainState.create(*model.init(jax.random.key(0), x), tx)
    step = lbopt.make_train_step(
        loss_fn, tx, lbopt.make_mesh(DEVICES), backend, num_microsteps=2, donate=False
    )
    after, sums = jax.block_until_ready(step(state, {"x": x, "y": labels}))
    expected = {"mean": 0, "var": 0}
    rows = []
    kernel, bias = (
        np.asarray(state.params["Dense_0"][name], np.float64) for name in ("kernel", "bias")
    )
    total = 0.0
    for part in range(2):
        rows = np.arange(part, 32, 2)
        groups = np.split(np.arange(16), groups_in_a_part)
        if scope.startswith(
            "tiles"
        ):  # columns of the 2 x 2 grid: replicas 0 and 2, replicas 1 and 3, four examples each
            groups = [np.r_[0:4, 8:12], np.r_[4:8, 12:16]]
        found = reference(x[rows], np.ones(2), np.zeros(2), np.zeros((16, *x.shape[1:])), groups)
        for name in expected:
            expected[name] = expected[name] + found[name] / 2
        logits = np.tanh(found["y"].reshape(16, -1)) @ kernel + bias
        total += np.sum(np.log(np.exp(logits).sum(-1)) - logits[np.arange(16), labels[rows]])
    kept = after.model_state["batch_stats"]["BatchNorm_0"]
    np.testing.assert_allclose(kept["mean"], moved(0.0, expected["mean"]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(kept["var"], moved(1.0, expected["var"]), rtol=1e-5)
    np.testing.assert_allclose(sums["loss"][0], total, rtol=1e-5)


def test_use_running_average_is_given_once_to_the_module_or_at_the_call(arrays):
    x = arrays[0]
    module = lbopt.BatchNorm(use_running_average=True)
    variables = lbopt.BatchNorm().init(jax.random.key(0), x, True)
    expected = lbopt.BatchNorm().apply(variables, x, use_running_average=True)
    np.testing.assert_array_equal(module.apply(variables, x), expected)
    for one, options in [(module, {"use_running_average": False}), (lbopt.BatchNorm(), {})]:
        with pytest.raises(ValueError, match='"use_running_average"'):
            one.apply(variables, x, **options)
