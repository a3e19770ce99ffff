"""DiLoCo: an inner optimizer on every worker alone, and an outer one on what all share."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lbopt import _scalars, tree, types
from lbopt.aggregators import rebuilt_state
from lbopt.errors import UserError, require
from lbopt.parallel import _leaves
from lbopt.parallel._state import TrainState
from lbopt.transforms import (
    EmaState,
    MuownState,
    OuterState,
    SphereState,
    find_states,
    is_placeholder,
    require_transformation,
)

_FROM_THE_START = "use an optimizer that moves from where the parameters are"
_COPIES: dict[Any, str] = {
    EmaState: "leave lbopt.track_ema out",
    MuownState: "use lbopt.muon or lbopt.normuon",
    OuterState: "use its inner optimizer, lbopt.muon in place of lbopt.muloco for instance",
    SphereState: "leave lbopt.hyperball out, with lbopt.muon in place of lbopt.muonh for instance",
    optax.contrib.COCOBState: _FROM_THE_START,
    optax.contrib.MadgradState: _FROM_THE_START,
    optax.contrib.MechanicState: "use the optimizer that it is around",
    optax.contrib.SAMState: "use the optimizer that it is around",
    optax.contrib.ScheduleFreeState: "use the optimizer that it is around",
}
"""States that keep parameters, or their norms, beside the parameters -> what to do."""
LEFT_OUT_WORKERS = "exchange/left_out_workers"
EMPTY_EXCHANGES = "exchange/without_workers"
"""Metrics: `num_left_out` and `num_empty` of `LocalState`."""


class LocalState(NamedTuple):
    """What the workers of `diloco` keep; it is the `aggregator_state` of a training state.

    Attributes:
      params: Parameters of each worker, [workers, ...].
      model_state: Model state of each worker, [workers, ...].
      opt_state: State of each worker's inner optimizer, [workers, ...].
      present: bool [workers]; the next exchange leaves out the workers with False.
      num_left_out: int32 scalar, number of workers left out, summed over all exchanges so far.
      num_empty: int32 scalar, number of exchanges so far without any sound worker.
      exchange: The aggregator's state of each fragment.

    >>> import jax.numpy as jnp, lbopt, optax
    >>> def loss_fn(params, model_state, batch, rng):
    ...     return (batch["x"] @ params["w"]).mean(), (model_state, {})
    >>> tx = diloco(optax.adam(0.1), every=4)
    >>> step = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(1))
    >>> state = step.place(lbopt.TrainState.create({"w": jnp.zeros(2)}, {}, tx))
    >>> state.aggregator_state.params["w"].shape  # one worker
    (1, 2)
    """

    params: types.Params
    model_state: types.ModelState
    opt_state: Any
    present: jax.Array
    num_left_out: jax.Array
    num_empty: jax.Array
    exchange: tuple[Any, ...]


class Diloco(optax.GradientTransformationExtraArgs):
    """The result of `diloco`. As a transformation, its state is that of the outer optimizer.

    Attributes:
      inner: The optimizer of each worker.
      outer: The optimizer of the shared parameters.
      every: Number of inner steps in a round.
      num_fragments: Number of fragments of the parameters.
      last_step: The step after which everything is exchanged; None for none.
    """

    inner: optax.GradientTransformation
    outer: optax.GradientTransformationExtraArgs
    every: int
    num_fragments: int
    last_step: int | None

    def offsets(self) -> list[int]:
        """Return, for each fragment, the remainder by `every` of the steps that exchange it."""
        return [
            self.every * (fragment + 1) // self.num_fragments % self.every
            for fragment in range(self.num_fragments)
        ]

    def take(self, whole: types.PyTree, fragment: int) -> types.PyTree:
        """Return a tree like the parameters with None in place of other fragments' leaves."""
        return take_fragment(whole, fragment, self.num_fragments)

    def put(self, whole: types.PyTree, fragment: int, part: types.PyTree) -> types.PyTree:
        """Return a tree like the parameters with new leaves of one fragment."""
        leaves = jax.tree.leaves(whole)
        owners = _owners(leaves, self.num_fragments)
        new = iter(jax.tree.leaves(part))
        kept = [
            next(new) if owner == fragment else x for x, owner in zip(leaves, owners, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(whole), kept)


def take_fragment(whole: types.PyTree, fragment: int, num_fragments: int) -> types.PyTree:
    """Return a tree like the parameters with None in place of other fragments' leaves.

    Trees whose leaves have a leading axis of workers are divided in the same way.
    """
    leaves = jax.tree.leaves(whole)
    owners = _owners(leaves, num_fragments)
    kept = [x if owner == fragment else None for x, owner in zip(leaves, owners, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(whole), kept)


def _owners(leaves: list[Any], num_fragments: int) -> list[int]:
    """Deal leaves to the fragments, the largest first, each to the smallest fragment so far."""
    fix = f"the parameters are {len(leaves)} arrays; give at most that many"
    require(num_fragments <= len(leaves), "num_fragments", num_fragments, fix)
    sizes = [math.prod(jnp.shape(x)) for x in leaves]
    filled = [0] * num_fragments
    owners = [0] * len(leaves)
    for place in sorted(range(len(leaves)), key=lambda place: (-sizes[place], place)):
        smallest = filled.index(min(filled))
        owners[place] = smallest
        filled[smallest] += max(1, sizes[place])
    return owners


def diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation | None = None,
    every: int = 32,
    *,
    num_fragments: int = 1,
    last_step: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Let each worker take steps of its own, and exchange the difference now and then (DiLoCo).

    For `lbopt.make_train_step`. A worker is what the step's aggregator calls a replica: by default
    a slice of a pod, or a device if there are no slices; `lbopt.Aggregate` chooses otherwise. With
    theta the shared parameters (`state.params`), worker i starts at theta_i = theta, takes `every`
    steps of `inner` on its own part of the batches, and then

        d = mean_i (theta - theta_i) ;   theta <- outer step along d ;   theta_i <- theta

    where the mean is the step's aggregator (`reduction`): the plain mean, `lbopt.ef`,
    `lbopt.econtrol`, `lbopt.powersgd`, `lbopt.aps` and so on. Between two exchanges nothing crosses
    the workers but the sums of the metrics. Evaluate and save `state.params`.

    A worker is left out of the mean if its parameters are not finite, or a number of its model
    state that is finite in the shared one, or if `leave_out` names it. It continues from the new
    theta, with the mean of the other workers' model state, and with the optimizer's state of the
    first of them: a mean of 8-bit codes, or of rotations, would be no state. Counts and keys of the
    model state are that worker's too. If no worker is left, theta stays, and numbers that are not
    finite start again; `LocalState` counts both.

    What a step does with "the batch" is done by each worker with its own part: batch norm over the
    global batch, random keys (whatever `key_per_replica` says), and `lbopt.track_noise_scale`,
    whose `global_batch_size` is then the worker's. An aggregator's steps are exchanges.

    Args:
      inner: The optimizer of each worker. Its state stays with the worker.
      outer: The optimizer of the shared parameters, which gets d as the gradient; None for SGD with
        learning rate 0.7 and Nesterov momentum 0.9. It sees one fragment at a time.
      every: Number of inner steps H between two exchanges. With 1 and without `outer`, the result
        is `inner` itself, so that the step is the ordinary one.
      num_fragments: Number of fragments of the parameters, of nearly equal size, that are exchanged
        at different steps (streaming): at most `every`. Each is exchanged once in `every` steps.
      last_step: The number of steps of the run: everything is exchanged after it. Without it, the
        steps after the last exchange do not reach `state.params`.

    Returns:
      A transformation for `lbopt.make_train_step` and `lbopt.TrainState.create`; place the state
      with `step.place`. Its own state is that of `outer`, a tuple of one for each fragment. The
      workers' states are in `state.aggregator_state`, a `LocalState`.

    Raises:
      UserError: For an argument that is out of range. `init` raises it for an inner optimizer that
        keeps a copy of the parameters, their average or their norms, which an exchange would not
        reach (`lbopt.muloco`, `lbopt.muown`, `lbopt.hyperball`, `lbopt.track_ema`, schedule-free).
        The step raises it for an option that does not go with local steps. `update` raises it,
        since only a step has workers; for one worker in your own loop see `lbopt.nesterov_outer`.

    >>> import jax.numpy as jnp, lbopt, optax
    >>> def loss_fn(params, model_state, batch, rng):
    ...     return ((params["w"] - batch["x"]) ** 2).mean(), (model_state, {})
    >>> tx = diloco(optax.sgd(0.25), optax.sgd(1.0), every=2)
    >>> workers = lbopt.Aggregate(lbopt.aggregators.plain_mean(), replicas_per_device=2)
    >>> step = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(1), reduction=workers)
    >>> state = step.place(lbopt.TrainState.create({"w": jnp.zeros(())}, {}, tx))
    >>> batch = {"x": jnp.array([0.0, 4.0])}  # the first worker is drawn to 0, the second to 4
    >>> for _ in range(2):
    ...     state, metrics = step(state, batch)
    ...     print(state.params["w"])
    0.0
    1.5

    References:
      Douillard et al., DiLoCo, arXiv:2311.08105v3, Algorithm 1 (outer Nesterov, 0.7 and 0.9).
      Douillard et al., Streaming DiLoCo, arXiv:2501.18512v1: fragments at different steps; the
      exchange here is not overlapped with inner steps.
    """
    require_transformation("inner", inner)
    every = _scalars.whole("every", every)
    num_fragments = _scalars.whole("num_fragments", num_fragments)
    if last_step is not None:
        last_step = _scalars.whole("last_step", last_step)
    fix = f"each has a step of its own in a round of {every} steps; give at most {every}"
    require(num_fragments <= every, "num_fragments", num_fragments, fix)
    if every == 1 and outer is None:
        return optax.with_extra_args_support(inner)

    chosen = optax.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
    require_transformation("outer", chosen)

    def init(params: types.Params) -> Any:
        if not is_placeholder(params):
            _refuse_copies(jax.eval_shape(inner.init, params))
        if num_fragments == 1:
            return (chosen.init(params),)
        return tuple(chosen.init(made.take(params, part)) for part in range(num_fragments))

    def update(*arguments: Any, **extra_args: Any) -> Any:
        del arguments, extra_args
        fix = "only a step of lbopt.make_train_step has workers; use lbopt.nesterov_outer for one"
        raise UserError("tx", made, fix, code="conflict")

    made = Diloco(init, update)
    made.inner = inner
    made.outer = optax.with_extra_args_support(chosen)
    made.every = every
    made.num_fragments = num_fragments
    made.last_step = last_step
    return made


def leave_out(state: TrainState, worker: int) -> TrainState:
    """Leave a worker of `diloco` out of the next exchange; it goes on with the others after it.

    Args:
      state: A state that `step.place` or the step returned.
      worker: Number of the worker, counted from 0.

    Returns:
      The state with that worker not `present`. The arrays of the given state stay valid.

    Raises:
      UserError: If the state has no workers, or no worker of this number.

    >>> import jax.numpy as jnp, lbopt, optax
    >>> def loss_fn(params, model_state, batch, rng):
    ...     return (batch["x"] @ params["w"]).mean(), (model_state, {})
    >>> tx = diloco(optax.adam(0.1), every=4)
    >>> step = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(1))
    >>> state = step.place(lbopt.TrainState.create({"w": jnp.zeros(2)}, {}, tx))
    >>> print(leave_out(state, 0).aggregator_state.present)
    [False]
    """
    workers = _workers_of(state)
    number = _scalars.whole("worker", worker, low=0)
    count = len(workers.present)
    require(number < count, "worker", worker, f"there are {count}; give 0 to {count - 1}")
    present = jnp.ones(count, bool).at[number].set(False) & workers.present
    if isinstance(workers.present, jax.Array):
        present = jax.device_put(present, workers.present.sharding)
    return state.replace(aggregator_state=workers._replace(present=present))


def rebuilt_workers(state: TrainState, num_workers: int) -> TrainState:
    """Return a state for another number of workers of `diloco`, which are all alike.

    Their parameters and model state are the mean of the sound workers before, and their optimizer's
    state is that of the first sound one. If no worker is sound (see `diloco`), parameters and model
    state are the shared ones. `lbopt.aggregators.rebuilt_state` rebuilds each aggregator's memory.

    Args:
      state: A state that `step.place` or the step returned, with any number of workers.
      num_workers: The new number of workers.

    Returns:
      The state for a step with that many workers, which lays it out over its devices.

    Raises:
      UserError: If the state has no workers, or the number is below 1.

    >>> import jax.numpy as jnp, lbopt, optax
    >>> def loss_fn(params, model_state, batch, rng):
    ...     return (batch["x"] @ params["w"]).mean(), (model_state, {})
    >>> tx = diloco(optax.adam(0.1), every=4)
    >>> step = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(1))
    >>> state = step.place(lbopt.TrainState.create({"w": jnp.zeros(2)}, {}, tx))
    >>> rebuilt_workers(state, 3).aggregator_state.params["w"].shape
    (3, 2)
    """
    workers = _workers_of(state)
    num_workers = _scalars.whole("num_workers", num_workers)
    sound = workers.present & sound_rows(workers, state.model_state)
    count = jnp.maximum(sound.sum(), 1)
    first = jnp.arange(len(sound)) == jnp.argmax(sound)

    def row(x: jax.Array) -> jax.Array:
        return _leaves.chosen_row(x, first, lambda rows: rows.sum(0))

    def spread(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (num_workers, *x.shape))

    def mean(x: jax.Array, shared: Any) -> jax.Array:
        if not _leaves.has_mean(x):
            return spread(row(x))
        wide = x.astype(tree.wide_dtype(x.dtype))
        average = _leaves.where_rows(sound, wide, jnp.zeros_like(wide)).sum(0) / count
        return spread(jnp.where(sound.any(), average.astype(x.dtype), shared))

    def copied(x: jax.Array) -> jax.Array:
        found = row(x)
        if _leaves.has_mean(x):  # without a sound worker, what is not finite starts again
            found = jnp.where(sound.any() | jnp.isfinite(found), found, jnp.zeros_like(found))
        return spread(found)

    rebuilt = workers._replace(
        params=jax.tree.map(mean, workers.params, state.params),
        model_state=jax.tree.map(mean, workers.model_state, state.model_state),
        opt_state=jax.tree.map(copied, workers.opt_state),
        present=jnp.ones(num_workers, bool),
        exchange=tuple(rebuilt_state(memory, num_workers) for memory in workers.exchange),
    )
    return state.replace(aggregator_state=rebuilt)


def sound_rows(workers: LocalState, shared: types.ModelState) -> jax.Array:
    """Return, bool [r], which workers have finite parameters and a sound model state.

    A number of the model state that is not finite in the shared one, a bound that starts at
    infinity for instance, may be so in a worker.

    Args:
      workers: Rows of workers.
      shared: The shared model state.
    """
    fine = [jnp.isfinite(x) for x in jax.tree.leaves(workers.params) if _leaves.has_mean(x)]
    for x, last in zip(jax.tree.leaves(workers.model_state), jax.tree.leaves(shared), strict=True):
        if _leaves.has_mean(x):
            fine.append(jnp.isfinite(x) | ~jnp.isfinite(last))
    each = [x.reshape(len(x), -1).all(1) for x in fine]
    return functools.reduce(jnp.logical_and, each)


def _refuse_copies(inner_state: Any) -> None:
    """Raise `UserError` for an inner optimizer's state that no exchange between workers reaches."""
    for state in find_states(inner_state, tuple(_COPIES)):
        kind = type(state)
        fix = "it keeps a copy of the parameters, or of their norms, which an exchange between "
        fix += f"workers does not reach; {_COPIES[kind]}"
        raise UserError("inner", kind.__name__, fix, code="conflict")


def _workers_of(state: TrainState) -> LocalState:
    workers = state.aggregator_state
    fix = "it has no workers of lbopt.diloco; give a state from step.place"
    require(isinstance(workers, LocalState), "state", type(workers).__name__, fix, code="type")
    return workers


def first_worker(state: TrainState) -> Any:
    """Return the optimizer's state: with `diloco`, that of the first worker of this process.

    Args:
      state: A state of any step.

    >>> import jax.numpy as jnp, lbopt
    >>> state = lbopt.TrainState.create({"w": jnp.zeros((2, 2))}, {}, lbopt.lars(0.1))
    >>> first_worker(state) is state.opt_state  # no local steps
    True
    """
    workers = state.aggregator_state
    if not isinstance(workers, LocalState):
        return state.opt_state

    def first(x: Any) -> Any:
        here = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
        return (x.addressable_data(0) if here else x)[0]

    return jax.tree.map(first, workers.opt_state)


def exchange_metrics(state: TrainState) -> dict[str, jax.Array]:
    """Return what the exchanges of `diloco` have counted so far; {} without local steps.

    Args:
      state: A state of any step.
    """
    workers = state.aggregator_state
    if not isinstance(workers, LocalState):
        return {}
    return {LEFT_OUT_WORKERS: workers.num_left_out, EMPTY_EXCHANGES: workers.num_empty}
