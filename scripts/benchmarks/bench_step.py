"""images/s of `lbopt.make_train_step` beside a minimal hand-written loop on the same batches.

Both take the same host batches and block on every step. The peer is the loop that one writes
without lbopt: `jax.jit` over `value_and_grad` of a Flax module with an Optax optimizer, its state
donated. `lbopt.lamb` and `optax.lamb` do the same arithmetic up to masks; momentum is the same
optimizer on both sides.

A problem of the user's own, and an optimizer of Optax by name, are compared with the built-in ones
of the same maths: both sides are lbopt.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax
import own_digits
import pairs

import lbopt
from lbopt.config import DataConfig, ModelConfig, OptimizerConfig, make_optimizer
from lbopt.data import TrainBatches
from lbopt.models import CNN
from lbopt.parallel import batch_sharding, put_replicated, replicated_sharding
from lbopt.recipes import build_state, make_problem

LEARNING_RATE = 0.01
CASES = [
    ("momentum", 64, 1),
    ("momentum", 256, 1),
    ("momentum", 1024, 1),
    ("lamb", 256, 1),
    ("momentum", 256, 4),
]
OWN_CASES = [
    ("cnn", "momentum", "momentum", 256),
    ("cnn", "adamw", "optax.adamw", 256),
    ("mlp", "adamw", "adamw", 256),
    ("mlp", "adamw", "optax.adamw", 1024),
]
"""(network, built-in optimizer, optimizer of the own problem, batch size)."""
AIM = ("ratio", ">=", 0.97)
OWN_AIM = ("ratio", ">=", 0.98)
BUILT_IN = {"cnn": ModelConfig("cnn"), "mlp": ModelConfig("mlp", (128,))}
STEPS_PER_ROUND = {64: 120, 256: 60, 1024: 20}
ROUNDS = 31


def run() -> Iterator[dict]:
    """Yield one row per optimizer, batch size and device count, and those of own problems."""
    for case in CASES:
        yield _case(*case)
    for case in OWN_CASES:
        yield _own_case(*case)


def _case(optimizer: str, batch_size: int, num_devices: int) -> dict:
    mesh = lbopt.make_mesh(num_devices)
    problem = make_problem(DataConfig(), ModelConfig())
    batches = _batches(problem, batch_size)
    ours, peer, ratio = pairs.in_turn(
        _ours(problem, optimizer, mesh, batches), _peer(optimizer, mesh, batches), ROUNDS
    )
    images = batch_size * len(batches)
    name = f"cnn {optimizer} batch {batch_size}, {num_devices} device{'s' * (num_devices > 1)}"
    return pairs.row(
        name, "images/s", images / ours, images / peer, "hand-written jit loop", ratio, AIM
    )


def _own_case(network: str, built_in: str, own: str, batch_size: int) -> dict:
    mesh = lbopt.make_mesh(1)
    theirs = make_problem(DataConfig(), BUILT_IN[network])
    mine = make_problem(own_digits.data(), own_digits.model(network))
    batches = _batches(mine, batch_size)
    ours, peer, ratio = pairs.in_turn(
        _ours(mine, own, mesh, batches),
        _ours(theirs, built_in, mesh, _batches(theirs, batch_size)),
        ROUNDS,
    )
    images = batch_size * len(batches)
    name = f"own data, own {network}, {own} batch {batch_size}"
    return pairs.row(
        name, "images/s", images / ours, images / peer, f"built-in, {built_in}", ratio, OWN_AIM
    )


def _batches(problem, batch_size: int) -> list[dict]:
    source = TrainBatches(problem.splits.train, 0, batch_size, STEPS_PER_ROUND[batch_size])
    return [source[step] for step in range(len(source))]


def _ours(problem, optimizer, mesh, batches):
    config = OptimizerConfig(optimizer, weight_decay=0.01 * optimizer.endswith("adamw"))
    tx = make_optimizer(config, LEARNING_RATE)
    step = lbopt.make_train_step(problem.loss_fn, tx, mesh)
    holder = [put_replicated(mesh, build_state(problem, tx, 0))]

    def walk():
        state = holder[0]
        for batch in batches:
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics)
        holder[0] = state

    return walk


def _peer(optimizer, mesh, batches):
    model = CNN()
    tx = {"momentum": optax.sgd(LEARNING_RATE, 0.9), "lamb": optax.lamb(LEARNING_RATE)}[optimizer]

    def step(params, stats, opt_state, batch):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": stats}
            logits, updated = model.apply(
                variables, batch["image"], train=True, mutable=["batch_stats"]
            )
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
            return loss, (updated["batch_stats"], (logits.argmax(-1) == batch["label"]).mean())

        (loss, (new_stats, accuracy)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), new_stats, opt_state, (loss, accuracy)

    everywhere = replicated_sharding(mesh)
    split = batch_sharding(mesh)
    layouts = (everywhere, everywhere, everywhere)
    compiled = jax.jit(
        step,
        donate_argnums=(0, 1, 2),
        in_shardings=(*layouts, split),
        out_shardings=(*layouts, everywhere),
    )
    variables = model.init(jax.random.key(0), jnp.zeros((1, 8, 8)), train=True)
    start = (variables["params"], variables["batch_stats"], tx.init(variables["params"]))
    holder = [put_replicated(mesh, start)]

    def walk():
        state = holder[0]
        for batch in batches:
            *state, metrics = compiled(*state, batch)
            jax.block_until_ready(metrics)
        holder[0] = tuple(state)

    return walk
