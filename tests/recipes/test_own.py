"""A model, a loss, data and an optimizer of the user's own, and all of Optax's optimizers."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusal import refused
from safetensors.numpy import load_file

import lbopt
from lbopt import _user_code, metrics, stacked_paths, tree
from lbopt.cli import load_config, main
from lbopt.config import (
    ArraysConfig,
    DataConfig,
    DilocoConfig,
    LossConfig,
    ModelConfig,
    OptaxConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    _foreign,
    check_fits,
    config_from_json,
    config_to_json,
    make_optimizer,
)
from lbopt.recipes import make_problem
from lbopt.recipes._build import build_run

CODE = """
import flax.linen as nn
import jax.numpy as jnp
import lbopt
import numpy as np
import optax
from flax import nnx
from lbopt.data import Splits
from lbopt.models import Model


class Linen(nn.Module):
    outputs: int
    width: int = 8

    @nn.compact
    def __call__(self, x, deterministic):
        x = nn.relu(nn.Dense(self.width)(x))
        x = nn.BatchNorm(use_running_average=deterministic)(x)
        return nn.Dense(self.outputs)(nn.Dropout(0.5)(x, deterministic))


class Nnx(nnx.Module):
    def __init__(self, outputs, rngs):
        self.inner = nnx.Linear(3, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(8, outputs, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(nnx.relu(self.inner(x))))


class ByName(nn.Module):
    outputs: int

    @nn.compact
    def __call__(self, left, right):
        return nn.Dense(self.outputs)(jnp.concatenate([left, right], -1))


def plain(outputs):
    def init(key, inputs):
        return {"w": jnp.full((inputs.shape[-1], outputs), 0.1)}, {}

    def apply(params, model_state, inputs, train, rng=None):
        return inputs @ params["w"], model_state

    return Model(init, apply)


def wide(outputs):
    return Linen(outputs + 1)


def broken(outputs):
    return 1 / 0


def number():
    return 3


def packaged(outputs, rngs):
    return nnx.Linear(outputs, 1, rngs=rngs)


def load(columns=3):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, columns)).astype(np.float32)
    split = {"x": x, "y": (x[:, 0] > 0).astype(np.int32)}
    return Splits(split, split, split)


def two():
    x = np.ones((40, 2), np.float32)
    split = {"left": x, "right": x, "y": np.arange(40) % 2}
    return Splits(split, split, split)


def hinge(outputs, batch, margin=1.0):
    right = jnp.take_along_axis(outputs, batch["y"][:, None], 1)[:, 0]
    own = jnp.arange(outputs.shape[-1]) == batch["y"][:, None]
    wrong = jnp.max(jnp.where(own, -9e9, outputs), 1)
    each = jnp.maximum(0, margin + wrong - right)
    return (jnp.sum(each), float(len(each))), {"gap": right - wrong}


def text(outputs, batch):
    return "loss"


def adamw(learning_rate, weight_decay, mask, b1=0.9):
    return optax.adamw(learning_rate, b1, weight_decay=weight_decay, mask=mask)


def averaged(learning_rate):
    return optax.chain(optax.sgd(learning_rate), lbopt.track_ema(0.9))


def nothing(learning_rate):
    return None
"""


@pytest.fixture
def code(tmp_path, monkeypatch):
    (tmp_path / "code_of_user.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "code_of_user.py"


def of_user(name):
    return f"code_of_user.py:{name}"


def config_of(**changes):
    return (
        TrainConfig(
            data=of_user("load"),
            model=of_user("Linen"),
            optimizer=OptimizerConfig("lamb", weight_decay=0.01),
            schedule=ScheduleConfig(0.05),
            num_steps=30,
            global_batch_size=20,
            eval_global_batch_size=16,
        )
        if not changes
        else dataclasses.replace(config_of(), **changes)
    )


def trained(config):
    run = build_run(config, jax.devices()[:1])
    state = run.init()
    losses = []
    for step in range(run.num_steps):
        state, sums = jax.block_until_ready(run.train_step(state, run.batches[step]))
        losses.append(metrics.means([sums])["loss"])
    return losses, run.evaluate(state)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": of_user("Nnx")},
        {"model": of_user("plain")},
        {"model": ModelConfig(of_user("Linen"), dtype="bfloat16", remat="all")},
        {"optimizer": OptimizerConfig(of_user("adamw"), options={"b1": 0.8}, weight_decay=0.1)},
        {"optimizer": OptaxConfig("contrib.muon", {"ns_steps": 3}, ema_decay=0.5, skip_limit=2)},
        {"optimizer": OptaxConfig("contrib.schedule_free_adamw")},
        {"loss": LossConfig(name=of_user("hinge"), options={"margin": 0.5}, l2=1e-3)},
        {"data": DataConfig(of_user("two")), "model": of_user("ByName")},
    ],
    ids=["linen", "nnx", "plain", "bf16", "optimizer", "muon", "schedule-free", "loss", "two"],
)
def test_the_users_own_parts_train(changes, code):
    config = config_of(**changes)
    config.validate()
    assert config_from_json(TrainConfig, config_to_json(config)) == config
    losses, scores = trained(config)
    assert "accuracy" in scores
    if "two" not in str(changes):
        assert np.mean(losses[-5:]) < 0.95 * np.mean(losses[:5])
        assert scores["accuracy"] > 0.75


@pytest.mark.parametrize(
    ("optimizer", "by_its_name"),
    [
        (OptimizerConfig("muloco"), True),
        (OptimizerConfig("muown"), True),
        (OptimizerConfig("muonh"), True),
        (OptaxConfig("contrib.schedule_free_adamw"), False),
        (OptimizerConfig(of_user("averaged")), False),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_local_steps_refuse_optimizers_that_keep_a_copy_of_the_parameters(
    optimizer, by_its_name, code
):
    config = config_of(optimizer=optimizer, diloco=DilocoConfig(every=2))
    with refused("config.optimizer.name", optimizer.name, "conflict"):
        if not by_its_name:
            config.validate()
            build_run(config, jax.devices()[:1])
        config.validate()


def test_an_own_loss_counts_every_example_once_at_any_batch_size(code):
    config = config_of(loss=LossConfig(name=of_user("hinge")))
    scores = []
    for size in (40, 16, 7):
        config.eval_global_batch_size = size
        run = build_run(config, jax.devices()[:1])
        scores.append(run.evaluate(run.init()))
    assert scores[0].keys() == {"loss", "accuracy", "gap"}
    for other in scores[1:]:
        assert other == pytest.approx(scores[0], rel=1e-5)


PARAMS = {"a": {"kernel": jnp.linspace(-1, 1, 12).reshape(3, 4), "bias": jnp.ones(4)}}
REFUSED_BY_NAME = ("optax.lbfgs", "optax.contrib.sophia")
REFUSED = (
    *REFUSED_BY_NAME,
    "optax.contrib.dpsgd",
    "optax.contrib.mechanize",
    "optax.contrib.schedule_free",
)
RANDOM = ("optax.noisy_sgd",)
UNSCHEDULED = (
    "optax.contrib.schedule_free_adamw",
    "optax.contrib.schedule_free_sgd",
    "optax.optimistic_adam",
    "optax.optimistic_gradient_descent",
    "optax.polyak_sgd",
    "optax.rprop",
    "optax.sm3",
)
"""Optimizers that take no schedule, or read it one step later than all others."""


@pytest.mark.parametrize("name", _foreign.LIBRARY)
def test_a_name_of_ours_is_its_function_with_the_masks_of_its_variant(name):
    decay = {"weight_decay": 0.1} if _foreign.may_take(name, "weight_decay") else {}
    config = OptimizerConfig(name, **decay)
    shapes = {"a": {"kernel": (4, 3), "bias": (3,)}, "b": {"kernel": (3, 5)}}
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )
    ends = []
    for tx in (make_optimizer(config, 0.1), getattr(lbopt, name)(0.1, **decay)):
        state = tx.init(params)
        new = params
        for _ in range(2):
            updates, state = jax.jit(tx.update)(params, state, new)
            new = optax.apply_updates(new, updates)
        ends.append(new)
    for one, other in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:Specifying a key will be required")
@pytest.mark.parametrize("name", _foreign.names_of_optax())
def test_every_optimizer_of_optax_updates_as_optax_does_or_is_refused(name):
    """The learning rate and the weight decay are traced, as in a study's program."""
    if name in REFUSED:
        with refused("optimizer.name" if name in REFUSED_BY_NAME else "optimizer.options"):
            check(name)
        return
    check(name)
    decays = _foreign.may_take(name, "weight_decay")
    config = OptimizerConfig(name, weight_decay=0.1 if decays else 0.0)

    def two_updates(rate, decay):
        schedule = rate if name in UNSCHEDULED else lambda count: rate * (1 + count)
        return updates_of(make_optimizer(config, schedule, decay if decays else None))

    ours = jax.jit(two_updates)(0.01, 0.1)
    if name in RANDOM:
        return
    factory = _foreign.named(name)
    # Muon's Adam takes the bias alone here, which is not decayed.
    options = {"weight_decay": 0.1} if decays else {}
    mask = {"a": {"kernel": True, "bias": False}}
    options |= dict.fromkeys(("mask", "weight_decay_mask"), mask)
    taken = {key: value for key, value in options.items() if _foreign.may_take(name, key)}
    schedule = 0.01 if name in UNSCHEDULED else lambda count: 0.01 * (1 + count)
    rate = "learning_rate" if _foreign.may_take(name, "learning_rate") else "max_learning_rate"
    tx = factory(**{rate: schedule}, **taken)
    theirs = jax.jit(lambda: updates_of(tx))()
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("config", "tx"),
    [
        (
            OptaxConfig("contrib.schedule_free", {"base_optimizer": "optax.sgd", "b1": 0.8}),
            optax.contrib.schedule_free(optax.sgd(0.01), 0.01, b1=0.8),
        ),
        (
            OptaxConfig("contrib.mechanize", {"base_optimizer": {"name": "optax.adam", "b1": 0.8}}),
            optax.contrib.mechanize(optax.adam(0.01, b1=0.8)),
        ),
    ],
)
def test_an_option_may_name_an_optimizer(config, tx):
    for one, other in zip(
        jax.tree.leaves(updates_of(make_optimizer(config, 0.01))),
        jax.tree.leaves(updates_of(tx)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (OptimizerConfig("optax.contrib.sam"), "name"),
        (OptaxConfig("contrib.mechanize", {"base_optimizer": "optax.x"}), "options"),
        (OptimizerConfig("optax.adamx"), "name"),
        (OptaxConfig("adam", {"b1": "q"}), "options"),
    ],
)
def test_what_optax_cannot_make_is_refused(config, field):
    with refused(f"optimizer.{field}"):
        check_fits(config, PARAMS)


def check(name):
    check_fits(OptimizerConfig(name), PARAMS)


def updates_of(tx):
    tx = optax.with_extra_args_support(tx)
    state = tx.init(PARAMS)
    params = PARAMS
    for number in range(2):
        grads = jax.tree.map(lambda x, n=number: jnp.cos(3 * x + n), PARAMS)
        updates, state = tx.update(grads, state, params, value=jnp.float32(0.7))
        params = optax.apply_updates(params, updates)
    return params


ROLES = {
    "embed": {"embedding": jnp.ones((7, 3))},
    "conv": {"kernel": jnp.ones((2, 2, 3, 4)), "bias": jnp.ones(4)},
    "layers": {"kernel": jnp.ones((2, 3, 3)), "gain": jnp.ones((2, 3))},
    "norm": {"scale": jnp.ones(3)},
}


@pytest.mark.parametrize("name", ["optax.contrib.muon", "optax.adamw", "adamw"])
@pytest.mark.parametrize("exclude", [(), ("embed",)])
def test_optimizers_of_optax_decay_by_role_one_layer_of_a_stack(name, exclude):
    config = OptimizerConfig(name, weight_decay=0.5, weight_decay_exclude=exclude)
    tx = make_optimizer(config, 0.1, stacked=stacked_paths("^layers/"))
    zeros = jax.tree.map(jnp.zeros_like, ROLES)
    updates = jax.jit(lambda: tx.update(zeros, tx.init(ROLES), ROLES)[0])()
    decayed = {name: bool(leaf.any()) for name, leaf in tree.by_name(updates).items()}
    assert decayed == {
        "embed/embedding": not exclude,
        "conv/kernel": True,
        "conv/bias": False,
        "layers/kernel": True,
        "layers/gain": False,
        "norm/scale": False,
    }


@pytest.mark.parametrize("name", ["optax.contrib.muon", "optax.adamw", "adamw", "lamb", "lars"])
def test_known_roles_reach_the_masks_of_every_optimizer(name):
    known = {"conv/kernel": "norm", "layers": {"gain": "weight"}}
    config = OptimizerConfig(name, weight_decay=0.5)
    tx = make_optimizer(config, 0.1, known_roles=known)
    zeros = jax.tree.map(jnp.zeros_like, ROLES)
    updates = jax.jit(lambda: tx.update(zeros, tx.init(ROLES), ROLES)[0])()
    decayed = {name for name, leaf in tree.by_name(updates).items() if leaf.any()}
    assert decayed == {"embed/embedding", "layers/kernel", "layers/gain"}


EQUINOX = """
import equinox as eqx
import jax

class Net(eqx.Module):
    proj: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, outputs, key):
        self.proj = eqx.nn.LayerNorm((1, 3), use_bias=False)
        self.head = eqx.nn.Linear(3, outputs, key=key)

    def __call__(self, x):
        return self.head(self.proj(x[None])[0])
"""


def test_types_of_an_own_models_layers_tell_what_is_decayed(code):
    """By its name and shape the gain is a matrix of a projection."""
    pytest.importorskip("equinox")
    (code.parent / "equinox_net.py").write_text(EQUINOX)
    config = config_of(model=ModelConfig("equinox_net.py:Net"))
    config.optimizer.weight_decay_exclude = ("bias",)
    run = build_run(config, jax.devices()[:1])
    state = run.init()
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    updates, _ = run.tx.update(zeros, state.opt_state, state.params)
    decayed = {name for name, leaf in tree.by_name(updates).items() if leaf.any()}
    assert decayed == {"head/weight"}


@pytest.mark.parametrize("given", [False, True])
def test_muon_takes_hidden_matrices_unless_told_otherwise(given):
    numbers = {"muon_weight_dimension_numbers": jax.tree.map(lambda _: None, ROLES)}
    options = {"nesterov": False, **(numbers if given else {})}
    config = OptaxConfig("contrib.muon", options)
    tx = make_optimizer(config, 0.1, stacked=stacked_paths("^layers/"))
    updates = jax.jit(lambda: tx.update(ROLES, tx.init(ROLES), ROLES)[0])()
    # Adam's first update is the learning rate for every number.
    by_adam = {name: bool(jnp.allclose(leaf, -0.1)) for name, leaf in tree.by_name(updates).items()}
    matrices = {name for name, is_adam in by_adam.items() if not is_adam}
    assert matrices == (set() if given else {"conv/kernel", "layers/kernel"})


@pytest.mark.parametrize(
    ("changes", "field", "code_of_error", "words"),
    [
        ({"model": of_user("wide")}, "model.name", "mismatch", "[1, 3]"),
        ({"model": of_user("broken")}, "model.name", "damaged", "line "),
        ({"model": of_user("number")}, "model.name", "type", "int"),
        ({"model": of_user("packaged")}, "model.name", "damaged", "dot_general"),
        ({"loss": LossConfig(name=of_user("number"))}, "loss.name", "damaged", "positional"),
        ({"model": of_user("absent")}, "model.name", "missing", "Linen"),
        ({"model": "not_there:Net"}, "model.name", "missing", "not_there"),
        ({"model": "not_there.py:Net"}, "model.name", "missing", "not_there.py"),
        ({"model": ModelConfig(of_user("Linen"), {"w": 1})}, "model.widths", "type", ""),
        (
            {"model": ModelConfig(of_user("Linen"), options={"widths": 1})},
            "model.options",
            "choice",
            "width",
        ),
        (
            {"model": ModelConfig(of_user("Linen"), stacked=("^layers/",))},
            "model.stacked",
            "value",
            "Dense_0",
        ),
        ({"loss": LossConfig(name=of_user("text"))}, "loss.name", "type", ""),
        ({"data": of_user("number")}, "data.name", "type", "int"),
        ({"data": ArraysConfig("absent.npz")}, "data.path", "missing", ""),
        ({"optimizer": of_user("nothing")}, "optimizer.name", "type", "NoneType"),
        (
            {"optimizer": OptaxConfig("sgd", weight_decay=0.1)},
            "optimizer.weight_decay",
            "unused",
            "",
        ),
        ({"optimizer": OptaxConfig("lion", {"b3": 1})}, "optimizer.options.b3", "choice", "b1"),
        (
            {"optimizer": OptimizerConfig("dion", options={"rank": 99})},
            "optimizer.options.rank",
            "value",
            "smaller side",
        ),
        ({"optimizer": OptaxConfig("contrib.galore")}, "optimizer.name", "conflict", "size zero"),
        ({"optimizer": OptaxConfig("lyon")}, "optimizer.name", "choice", "optax.lion"),
        ({"optimizer": OptimizerConfig("lion")}, "optimizer.name", "choice", "optax.lion"),
        ({"data": DataConfig(name="folder")}, "data.name", "choice", "=folder/"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(changes, field, code_of_error, words, code):
    (code.parent / "folder").mkdir()
    config = config_of(**changes)
    with refused(f"config.{field}", code=code_of_error) as caught:
        build_run(config, jax.devices()[:1])
    assert words in str(caught.value)


def test_one_text_stands_for_a_group_in_a_config_and_on_the_command_line(code, tmp_path):
    config = TrainConfig()
    config.data = "my.npz"
    config.optimizer = "optax.lion"
    assert (config.data.name, config.data.path) == ("arrays", "my.npz")
    assert config.optimizer == OptimizerConfig("optax.lion")

    file = tmp_path / "conf.py"
    file.write_text("from lbopt.config import *\ndef get_config(arg): return TrainConfig()\n")
    flags = ["--config.data=my.npz", "--config.data.target=x", f"--config.model={of_user('Nnx')}"]
    found = load_config(str(file), flags, TrainConfig)
    assert found.data == ArraysConfig("my.npz", target="x")
    assert found.model == ModelConfig(of_user("Nnx"))
    with refused("config.data.name", "/data/my.npz", "choice"):
        TrainConfig(data=DataConfig("/data/my.npz")).validate()


def test_a_network_of_lbopt_takes_own_data(code):
    problem = make_problem(DataConfig(of_user("load")), ModelConfig("mlp"))
    assert problem.outputs == 2
    assert set(problem.metric_names) == {"loss", "accuracy"}


OPTIONS = "--config.model.options"


def test_a_run_of_own_code_is_evaluated_and_exported_from_anywhere(code, tmp_path, capsys):
    (tmp_path / "conf.py").write_text(
        "from lbopt.config import *\n"
        "def get_config(arg):\n"
        "    return TrainConfig(data='code_of_user.py:load', model='code_of_user.py:Linen',\n"
        "                       num_steps=2, global_batch_size=8)\n"
    )
    flags = [f"--config={tmp_path / 'conf.py'}", f"--workdir={tmp_path / 'run'}"]
    given = [*flags, OPTIONS + "={'width': 5}"]
    assert main(["train", *given]) == 0
    os.chdir("/")
    assert main(["evaluate", *given]) == 0
    assert "validation/accuracy" in capsys.readouterr().out

    # As a command of its own would: no config was loaded before.
    _user_code.look_beside([])
    output = tmp_path / "out"
    found = ["--format=safetensors", f"--output={output}"]
    assert main(["export", f"--workdir={tmp_path / 'run'}", *found]) == 0
    saved = load_file(output / "model.safetensors")
    assert saved["params/Dense_0/kernel"].shape == (3, 5)

    with refused(OPTIONS, "[3]", "type"):
        load_config(str(tmp_path / "conf.py"), [f"{OPTIONS}=[3]"], TrainConfig)


def test_a_state_is_carried_by_networks_of_lbopt_alone():
    data = DataConfig("pydoc_lm", carry_state=True, sequence_length=8)
    config = TrainConfig(data=data, model="net.py:Net", num_steps=2)
    with refused("config.model.name", "net.py:Net", "conflict"):
        config.validate()
