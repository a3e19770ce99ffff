"""The step of `diloco` on the devices: the workers' own steps, and the exchange between them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lbopt import errors, replicas, tree, types
from lbopt.aggregators import Group, WireBytes, cast_like, plain_mean, remembered_state, widened
from lbopt.errors import UserError
from lbopt.parallel import _leaves
from lbopt.parallel._aggregation import (
    REPLICA_AXIS,
    WITHIN_AXIS,
    Aggregation,
    check_same_shapes,
    devices_summed_first,
)
from lbopt.parallel._diloco import Diloco, LocalState, sound_rows
from lbopt.parallel._mesh import check_mesh, num_slices
from lbopt.parallel._options import StepOptions
from lbopt.parallel._reduction import Aggregate, Reduced, Strategy, mean
from lbopt.parallel._state import TrainState
from lbopt.parallel._step import StepFn, make_gradients, make_step_fn

# Scopes (`jax.named_scope`) of the conditionals of a step, which tell a plan how often they happen.
EXCHANGE = "exchange"
LEFT_OUT = "left_out"


class LocalSteps:
    """The workers of `diloco` on the devices of a step; it stands where an `Aggregation` does.

    Args:
      tx: The optimizers and the length of a round.
      mesh: A one-axis mesh.
      options: Options of the step.

    Attributes:
      num_replicas: Number of workers.

    Raises:
      UserError: For an option, or a mesh, that does not go with local steps.
    """

    def __init__(self, tx: Diloco, mesh: Mesh, options: StepOptions):
        _check_options(options)
        check_mesh(mesh, mapped=True)
        found = _between_workers(mesh, options)
        self.tx = tx
        self.replicas_per_device = found.replicas_per_device
        self._aggregation = Aggregation(
            found.aggregator, mesh, self.replicas_per_device, found.over
        )
        self.num_replicas = self._aggregation.num_replicas
        self.within = self._aggregation.within
        assert self._aggregation.mesh is not None
        self.mesh = self._aggregation.mesh
        options.check_parts(self.within)

    def first_state(self, state: TrainState) -> LocalState:
        """Return the workers at the state's parameters; a pure function.

        Raises:
          UserError: If the aggregator or the fragments do not fit the parameters.
        """
        rows = functools.partial(_as_rows, self.num_replicas)
        return LocalState(
            jax.tree.map(rows, state.params),
            jax.tree.map(rows, state.model_state),
            jax.tree.map(rows, self.tx.inner.init(state.params)),
            jnp.ones(self.num_replicas, bool),
            jnp.zeros((), jnp.int32),
            jnp.zeros((), jnp.int32),
            tuple(self._aggregation.init(part) for part in self._parts(state.params)),
        )

    def check(self, state: TrainState) -> None:
        """Raise `UserError` unless the state fits these workers."""
        aggregator = self._aggregation.aggregator
        with errors.about("aggregator", aggregator, code="conflict"):
            aggregator.check_chain(state.opt_state, state.params)
        wanted = jax.eval_shape(self.first_state, state)
        fix = "the training state has no workers; use state = step.place(state)"
        own = state.aggregator_state
        rebuild = "lbopt.parallel.rebuilt_workers"
        check_same_shapes("diloco", self.num_replicas, wanted, own, fix, rebuild)

    def warn(self, params: types.Params) -> None:
        """Warn if an exchange sends more than a plain mean would send."""
        for part in self._parts(params):
            self._aggregation.warn(part)

    def wire_bytes(self, params: types.Params) -> WireBytes:
        """Return the bytes that a device sends in a step on average, and a plain step's.

        Those of the metrics, and of the model's state, are not counted.
        """
        each = [self._aggregation.wire_bytes(part) for part in self._parts(params)]
        return WireBytes(
            sum(found.sent for found in each) / self.tx.every, sum(found.ring for found in each)
        )

    def sharding(self, state: LocalState) -> LocalState:
        """Return the sharding of each array of the workers' state, or of its shapes."""
        by_worker = NamedSharding(self.mesh, PartitionSpec(REPLICA_AXIS))
        whole = NamedSharding(self.mesh, PartitionSpec())
        exchange = tuple(map(self._aggregation.sharding, state.exchange))
        return jax.tree.map(lambda _: by_worker, state)._replace(
            present=whole, num_left_out=whole, num_empty=whole, exchange=exchange
        )

    def make_step_fn(self, loss_fn: types.LossFn, options: StepOptions) -> StepFn:
        """Build the step (state, global batch) -> (state, metrics), mapped over the devices."""
        strategy = Strategy(
            lambda grads: mean(WITHIN_AXIS, None, grads), lambda grads, _: Reduced(grads)
        )
        gradients = make_gradients(loss_fn, options, strategy, WITHIN_AXIS)
        own_step = make_step_fn(gradients, strategy, options.clip, self.tx.inner)

        def on_device(state: TrainState, batch: types.Batch) -> tuple[TrainState, types.Metrics]:
            axis_name = WITHIN_AXIS if self.within > 1 else None
            with replicas.tracing_for(self.within, axis_name):
                state, metrics = self._steps_of_workers(own_step, state, batch)
            return self._exchanged_if_due(state), metrics

        whole = PartitionSpec()
        workers = PartitionSpec(REPLICA_AXIS)
        exchange = (self._aggregation.specs(),) * self.tx.num_fragments
        local = LocalState(workers, workers, workers, whole, whole, whole, exchange)  # type: ignore
        specs = TrainState(whole, whole, whole, whole, whole, local)
        return jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(specs, PartitionSpec((REPLICA_AXIS, WITHIN_AXIS))),
            out_specs=(specs, whole),
            check_vma=False,
        )

    def _steps_of_workers(
        self, own_step: StepFn, state: TrainState, batch: types.Batch
    ) -> tuple[TrainState, types.Metrics]:
        """Take one step of every worker of this device; metrics are summed over all workers."""
        workers: LocalState = state.aggregator_state
        numbers = self._group().numbers()
        count = len(numbers)
        shape = lambda x: (count, x.shape[0] // count, *x.shape[1:])  # noqa: E731
        batches = jax.tree.map(lambda x: x.reshape(shape(x)), batch)

        def one(given: Any) -> Any:
            params, model_state, opt_state, number, examples = given
            key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), number)
            own = TrainState(state.step, params, model_state, opt_state, jax.random.key_data(key))
            new, metrics = own_step(own, examples)
            return (new.params, new.model_state, new.opt_state), metrics

        given = (workers.params, workers.model_state, workers.opt_state, numbers, batches)
        if count == 1:
            found = jax.tree.map(lambda x: x[None], one(jax.tree.map(lambda x: x[0], given)))
        else:
            found = jax.lax.map(one, given)
        (params, model_state, opt_state), metrics = found
        with jax.named_scope(replicas.METRICS):
            metrics = self._group().sum(metrics)
        moved = workers._replace(params=params, model_state=model_state, opt_state=opt_state)
        return state.replace(step=state.step + 1, aggregator_state=moved), metrics

    def _exchanged_if_due(self, state: TrainState) -> TrainState:
        """Exchange the fragments whose round ends with the step that the state counts."""
        tx = self.tx
        every_one = range(tx.num_fragments)
        branches = [lambda state: state]
        branches += [functools.partial(self._exchange, fragments=(part,)) for part in every_one]
        due = [state.step % tx.every == offset for offset in tx.offsets()]
        index = sum((part + 1) * is_due for part, is_due in enumerate(due))
        if tx.last_step is not None:
            # Everything at once is the last branch, which a single fragment has already.
            if tx.num_fragments > 1:
                branches.append(functools.partial(self._exchange, fragments=every_one))
            index = jnp.where(state.step == tx.last_step, len(branches) - 1, index)
        with jax.named_scope(EXCHANGE):
            return jax.lax.switch(index, branches, state)

    def _exchange(self, state: TrainState, fragments: Sequence[int]) -> TrainState:
        """End a round of fragments: one outer step from the workers' mean difference."""
        workers: LocalState = state.aggregator_state
        group = self._group()
        sound = workers.present[group.numbers()] & sound_rows(workers, state.model_state)
        num_sound = group.sum(sound.astype(jnp.int32))
        whole = num_sound == self.num_replicas

        for fragment in fragments:
            state = self._outer_step(state, fragment, sound, num_sound)

        # A worker that was left out continues from the shared parameters.
        def mended(given: Any) -> Any:
            params, model_state, opt_state = given
            params = jax.tree.map(
                lambda rows, x: _leaves.where_rows(sound, rows, x[None]), params, state.params
            )
            # Without any sound worker there is no mean: what is not finite starts again.
            blank = jax.tree.map(jnp.zeros_like, self.tx.inner.init(state.params))
            return (
                params,
                self._mended(model_state, sound, num_sound, state.model_state),
                self._mended(opt_state, sound, num_sound, blank, averaged=False),
            )

        workers = state.aggregator_state
        mine = (workers.params, workers.model_state, workers.opt_state)
        with jax.named_scope(LEFT_OUT):
            mine = jax.lax.cond(whole, lambda given: given, mended, mine)
        params, model_state, opt_state = mine

        shared = state.model_state
        if self.tx.num_fragments - 1 in fragments:
            with jax.named_scope(replicas.STATE):
                rows = jax.tree.map(_leaves.mean_of_rows, model_state)
                shared = _leaves.over_replicas(REPLICA_AXIS, rows)
                shared = jax.tree.map(
                    functools.partial(jnp.where, num_sound > 0), shared, state.model_state
                )
                model_state = jax.tree.map(
                    lambda rows, x: (
                        jnp.broadcast_to(x, rows.shape) if _leaves.has_mean(x) else rows
                    ),
                    model_state,
                    shared,
                )
        new = workers._replace(
            params=params,
            model_state=model_state,
            opt_state=opt_state,
            present=jnp.ones_like(workers.present),
            num_left_out=workers.num_left_out + self.num_replicas - num_sound,
            num_empty=workers.num_empty + (num_sound == 0),
        )
        return state.replace(model_state=shared, aggregator_state=new)

    def _outer_step(
        self, state: TrainState, fragment: int, sound: jax.Array, num_sound: jax.Array
    ) -> TrainState:
        """Move a fragment of the shared parameters, and let all workers start from it."""
        tx = self.tx
        workers: LocalState = state.aggregator_state
        anchor = tx.take(state.params, fragment)
        rows = tx.take(workers.params, fragment)
        with jax.named_scope(replicas.GRADIENTS):
            ways = jax.tree.map(lambda x, row: x[None] - row, widened(anchor), widened(rows))

            # A worker that is left out stands for the mean of the others, so that it changes
            # neither the mean nor what an aggregator remembers of it.
            def filled(ways: types.PyTree) -> types.PyTree:
                still = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), ways)
                return self._mended(ways, sound, num_sound, still)

            whole = num_sound == self.num_replicas
            with jax.named_scope(LEFT_OUT):
                ways = jax.lax.cond(whole, lambda ways: ways, filled, ways)
            before = workers.exchange[fragment]
            found = self._aggregation.on_device(ways, before, alike=True)

        with jax.named_scope(replicas.UPDATE):
            outer_before = state.opt_state[fragment]
            mean_way = cast_like(found.updates, anchor)
            updates, outer = tx.outer.update(mean_way, outer_before, anchor, **found.aux)
            moved = optax.apply_updates(anchor, updates)
            memory = remembered_state(found.state, before, outer, outer_before)
            moved, outer, memory = jax.tree.map(
                functools.partial(jnp.where, num_sound > 0),
                (moved, outer, memory),
                (anchor, outer_before, before),
            )

        new_rows = jax.tree.map(lambda x, row: _as_rows(len(row), x), moved, rows)
        exchange = list(workers.exchange)
        exchange[fragment] = memory
        outer_states = list(state.opt_state)
        outer_states[fragment] = outer
        return state.replace(
            params=tx.put(state.params, fragment, moved),
            opt_state=tuple(outer_states),
            aggregator_state=workers._replace(
                params=tx.put(workers.params, fragment, new_rows), exchange=tuple(exchange)
            ),
        )

    def _mended(
        self,
        rows: types.PyTree,
        sound: jax.Array,
        num_sound: jax.Array,
        fallback: types.PyTree,
        averaged: bool = True,
    ) -> types.PyTree:
        """Return rows [r, ...] with the mean of all sound ones in place of the others.

        Args:
          rows: The rows of this device's workers.
          sound: bool [r], whether a worker is sound.
          num_sound: Number of sound workers. If it is 0, finite numbers stay, and so do leaves
            without a mean.
          fallback: A tree without the leading axis, for numbers that are not finite then.
          averaged: False for the row of the first sound worker instead of the mean. Leaves without
            a mean have that row in any case.
        """
        group = self._group()
        count = jnp.maximum(num_sound, 1)
        from_the_end = self.num_replicas - group.numbers()
        first = from_the_end == group.max(jnp.where(sound, from_the_end, 0))

        def one(x: jax.Array, last: jax.Array) -> jax.Array:
            summable = _leaves.has_mean(x)
            if averaged and summable:
                wide = x.astype(tree.wide_dtype(x.dtype))
                total = group.sum(_leaves.where_rows(sound, wide, jnp.zeros_like(wide)))
                found = (total / count).astype(x.dtype)
            else:
                found = _leaves.chosen_row(x, first, group.sum)

            mended = _leaves.where_rows(sound, x, found[None])
            alone = jnp.where(jnp.isfinite(x), x, last[None].astype(x.dtype)) if summable else x
            return jnp.where(num_sound > 0, mended, alone)

        return jax.tree.map(one, rows, fallback)

    def _parts(self, params: types.Params) -> list[types.Params]:
        return [self.tx.take(params, fragment) for fragment in range(self.tx.num_fragments)]

    def _group(self) -> Group:
        return Group(self.num_replicas, REPLICA_AXIS)


def devices_per_worker(mesh: Mesh, options: StepOptions) -> int:
    """Return the number of devices of each worker of `diloco`.

    Args:
      mesh: A one-axis mesh.
      options: Options of the step.

    Raises:
      UserError: If the reduction does not fit the mesh.
    """
    return devices_summed_first(mesh, _between_workers(mesh, options).over)


def _between_workers(mesh: Mesh, options: StepOptions) -> Aggregate:
    """Return the reduction between workers: the step's, or the mean over slices or devices."""
    if isinstance(options.reduction, Aggregate):
        return options.reduction
    return Aggregate(plain_mean(), over="slices" if num_slices(mesh) > 1 else "replicas")


def _check_options(options: StepOptions) -> None:
    """Raise `UserError` for an option of the step that does not go with local steps."""
    fix = "the workers of lbopt.diloco run under 'jit'; use {backend}='jit'"
    errors.require(not options.pmapped, "backend", options.backend, fix, code="conflict")
    fix = "each worker of lbopt.diloco keeps its own state; leave it False"
    errors.require(not options.shard_update, "shard_update", True, fix, code="conflict")
    found = options.reduction
    fix = "between the workers of lbopt.diloco stands an aggregator; use lbopt.Aggregate, or None"
    good = found is None or isinstance(found, Aggregate)
    errors.require(good, "reduction", found, fix, code="conflict")
    if isinstance(found, Aggregate) and found.aggregator.needs_second_moment:
        fix = f"{found.aggregator.name} compares gradients, and the workers of lbopt.diloco "
        fix += "exchange differences of parameters; use another"
        raise UserError("aggregator", found.aggregator, fix, code="conflict")


def _as_rows(count: int, x: Any) -> jax.Array:
    return jnp.broadcast_to(x, (count, *jnp.shape(x)))
