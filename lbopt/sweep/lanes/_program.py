"""The compiled programs of trials that share a shape: the first state, and many steps at a time."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lbopt import replicas, tree
from lbopt.config import SweepConfig, step_options
from lbopt.parallel import TrainState, on_one_device, split_seed, step_on_one_device
from lbopt.recipes import Problem, with_averaged_params
from lbopt.sweep._trials import Cell
from lbopt.sweep.lanes import _arguments
from lbopt.sweep.lanes._arguments import Arguments
from lbopt.sweep.lanes._feed import Feed
from lbopt.transforms import optimizer_metrics

TRIALS_AXIS = "trials"
"""The mesh axis over which a batch of trials is spread."""
_EXAMPLES_A_DEVICE = 2**13
"""In a step of a batched program. By the TPU compiler's cycles a v5e chip takes 16 CNN trials at batch 512 as fast as fewer, at
1,024 they spill, and each takes 2.8 times as long as with 8 of them."""


class Lanes(NamedTuple):
    """Trials under way, one in each lane; every leaf has a leading lane axis.

    Attributes:
      state: training states.
      start: the parameters before the first update; () if distances are not measured.
    """

    state: TrainState
    start: Any


class History(NamedTuple):
    """What a call of `Program.advance` did, [lanes, steps]; only the steps that were asked for mean anything.

    Attributes:
      losses: mean training loss of every step, before its update.
      distances: ||w_t - w_0|| after it; 0 if not measured.
    """

    losses: Any
    distances: Any


def most_lanes(global_batch_size: int, num_devices: int) -> int:
    """Return how many trials one call of a batched program may take before what its devices hold slows it down.

    Args:
      global_batch_size: of each trial, examples a step.
      num_devices: that share them.

    >>> most_lanes(64, 4), most_lanes(1024, 4), most_lanes(100_000, 4)
    (512, 32, 4)
    """
    return num_devices * max(1, _EXAMPLES_A_DEVICE // global_batch_size)


class Spread:
    """How trials share a program.

    Args:
      config: of the study.
      devices: to choose from, for instance of a slice that is not here; None for this process's own.
      width: trials in a call, at most; None for the config's `trials_per_program`, and never more than that. It is rounded up
        to equally many on every device.

    Attributes:
      width: lanes of a call; a multiple of the number of devices, 1 if not batched.
      devices: that share them.
      batched: under vmap; otherwise there is one lane.
      most_examples: that each lane may see in a step or a call of the evaluation before its devices are likely to be full.
    """

    def __init__(
        self,
        config: SweepConfig,
        devices: Sequence[jax.Device] | None = None,
        width: int | None = None,
    ):
        devices = jax.local_devices() if devices is None else devices
        on_cpu = devices[0].platform == "cpu"
        self.batched = config.trial_batching == "vmap" or (
            config.trial_batching == "auto" and not on_cpu
        )
        self.devices = list(devices) if self.batched else list(devices[:1])
        wanted = (
            min(config.trials_per_program, width or config.trials_per_program)
            if self.batched
            else 1
        )
        self.width = math.ceil(wanted / len(self.devices)) * len(self.devices)
        self.most_examples = max(1, _EXAMPLES_A_DEVICE * len(self.devices) // self.width)

    def put(self, value: Any) -> Any:
        """Return a pytree of arrays on the devices of this spread, all of it on each."""
        if len(self.devices) == 1:
            return jax.device_put(value, self.devices[0])
        return jax.device_put(value, NamedSharding(self._mesh, PartitionSpec()))

    def jit(self, fn: Callable[..., Any], num_shared: int = 0, donate: tuple[int, ...] = ()) -> Any:
        """Compile fn(*shared, *of one trial) for all lanes: all arguments but the shared ones, the first, have a leading lane axis.

        Args:
          fn: of pytrees of arrays, pure.
          num_shared: how many of its first arguments are the same for all trials.
          donate: places of arguments whose memory the result may take: they must not be used again.

        Returns:
          A function with `lower` and `eval_shape`; all it returns has a leading lane axis.
        """
        if not self.batched:
            return CompiledOnce(
                jax.jit(functools.partial(_alone, fn, num_shared), donate_argnums=donate)
            )

        def vmapped(*given: Any) -> Any:
            axes = tuple(None if number < num_shared else 0 for number in range(len(given)))
            return jax.vmap(fn, in_axes=axes)(*given)

        if len(self.devices) == 1:
            return jax.jit(vmapped, donate_argnums=donate)
        return self._sharded(vmapped, num_shared, donate)

    @property
    def _mesh(self) -> Mesh:
        return Mesh(np.array(self.devices), (TRIALS_AXIS,))

    def _sharded(self, fn: Callable[..., Any], num_shared: int, donate: tuple[int, ...]) -> Any:
        """Give each device its lanes; nothing is exchanged."""
        mesh, parts = self._mesh, PartitionSpec(TRIALS_AXIS)

        def specs(given: tuple[Any, ...]) -> tuple[PartitionSpec, ...]:
            return tuple(
                PartitionSpec() if number < num_shared else parts for number in range(len(given))
            )

        def spread(*given: Any) -> Any:
            placed = [
                jax.lax.with_sharding_constraint(one, NamedSharding(mesh, spec))
                for one, spec in zip(given, specs(given), strict=True)
            ]
            mapped = jax.shard_map(
                fn, mesh=mesh, in_specs=specs(given), out_specs=parts, check_vma=False
            )
            return mapped(*placed)

        return jax.jit(spread, donate_argnums=donate)


class CompiledOnce:
    """A jitted function that is compiled once for each shape of its arguments, however many threads call it at a time.

    Args:
      jitted: by `jax.jit`.

    Attributes:
      lower: of the jitted function.
      eval_shape: likewise.
    """

    def __init__(self, jitted: Any):
        self.lower, self.eval_shape = jitted.lower, jitted.eval_shape
        self._lock = threading.Lock()
        self._compiled: dict[Any, Any] = {}

    @property
    def made(self) -> bool:
        """Whether it has been compiled for some shape."""
        return bool(self._compiled)

    def __call__(self, *given: Any) -> Any:
        leaves, structure = jax.tree.flatten(given)
        key = structure, *((leaf.shape, leaf.dtype) for leaf in leaves)
        with self._lock:
            if key not in self._compiled:
                self._compiled[key] = self.lower(*given).compile(_options())
        return self._compiled[key](*given)


def _options() -> dict[str, Any] | None:
    """Return the compiler's: on CPU, LLVM's level 1 takes half the time and what it makes runs as fast, and a cell runs for seconds."""
    if (
        jax.default_backend() != "cpu" or jax.config.values["jax_disable_most_optimizations"]
    ):  # which is level 0
        return None
    return {"xla_backend_optimization_level": 1}


def _alone(fn: Callable[..., Any], num_shared: int, *given: Any) -> Any:
    """Run a function of one trial on a single lane."""
    mine = jax.tree.map(lambda x: x[0], given[num_shared:])
    return jax.tree.map(lambda x: x[None], fn(*given[:num_shared], *mine))


class Beginning:
    """Fresh parameters of a problem, one compiled program for all that learn it.

    Models are initialised one after another, also in a batch. Orthogonal initialisation factorises matrices, and on CPU two
    batched factorisations that run at once wait for each other's threads for ever (jaxlib 0.10.2).

    Args:
      problem: what is learned.
      spread: how many at a time.

    Attributes:
      shapes: () -> (params, model_state) of all lanes, as shapes.
    """

    def __init__(self, problem: Problem, spread: Spread):
        init = jax.custom_batching.sequential_vmap(problem.init) if spread.batched else problem.init
        self._init = spread.jit(lambda seed: init(split_seed(seed)[0]))
        self.shapes = lambda: self._init.eval_shape(np.zeros(spread.width, np.int32))

    def __call__(self, seeds: np.ndarray) -> Any:
        """Return (params, model_state) of each seed [lanes] int32, with a leading lane axis."""
        return self._init(seeds)


class Program:
    """Training of trials that differ in their arguments and seeds only: `lbopt train`'s step in a loop on the device.

    Args:
      cell: one of the cells it serves.
      decays: see `make_tx`.
      config: of the study.
      spread: how trials share it.
      arrays: see `Feed`.

    Attributes:
      spread: how trials share it.
      feed: what its steps see.
      trust_ratios: training states of all lanes -> the trust ratio of each layer at their last updates.
    """

    def __init__(
        self,
        cell: Cell,
        decays: bool,
        config: SweepConfig,
        spread: Spread,
        arrays: Mapping[str, jax.Array] | None = None,
    ):
        self._problem = cell.problem
        self._config = config
        self.spread = spread
        self._tx = _arguments.make_tx(cell, decays)
        self.feed = Feed(cell, spread.width, arrays)
        with config.naming_trials(cell.index):
            options = step_options(cell.train, cell.problem.stacked)
        strategy = on_one_device(options.reduction)
        self._aggregation = strategy.aggregation
        self._step = step_on_one_device(cell.problem.loss_fn, self._tx, options, strategy)
        optimizer = cell.train.optimizer
        self._create = spread.jit(self._created)
        self._merge = jax.jit(_merged, donate_argnums=1)
        averages = optimizer.ema_decay is not None
        self._average = spread.jit(with_averaged_params) if averages else lambda state: state
        self._advance = spread.jit(self._advanced, num_shared=2, donate=(2,))
        self.trust_ratios = spread.jit(trust_ratios)

    @property
    def compiled(self) -> bool:
        """Whether a trial can begin to train at once; always in batches, whose programs have one user at a time."""
        return getattr(self._advance, "made", True)

    def shapes(self) -> tuple[Any, ...]:
        """Return what a call of the steps takes, as shapes: (shared arrays, count), the same for all lanes, and (lanes, batches)."""
        width = self.spread.width
        blank = Arguments(*(np.zeros(width, np.float32) for _ in Arguments._fields))
        fresh = Beginning(self._problem, self.spread).shapes()
        lanes = self._create.eval_shape(blank, np.zeros(width, np.int32), *fresh)
        one = self.feed.take(0, 0, 1)
        fed = jax.tree.map(lambda x: jax.ShapeDtypeStruct((width, *x.shape), x.dtype), one)
        shared = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.feed.shared)
        return shared, jax.ShapeDtypeStruct((), jnp.int32), lanes, fed

    def lower(self, *shapes: Any) -> Any:
        """Lower the steps for `shapes`, which may say where things lie.

        Args:
          shapes: those of the method `shapes`, `jax.ShapeDtypeStruct`s with or without a sharding.

        Returns:
          What `lower` of a jitted function returns; it has `compile`.
        """
        return self._advance.lower(*shapes)

    def create(
        self, arguments: Arguments, seeds: np.ndarray, params: Any, model_state: Any
    ) -> Lanes:
        """Return lanes before their first update; all arguments have a leading lane axis.

        Args:
          arguments: fp32 [lanes] each.
          seeds: [lanes] int32.
          params: from `Beginning`.
          model_state: likewise.
        """
        return self._create(arguments, seeds, params, model_state)

    def merge(self, fresh: Lanes, lanes: Lanes, chosen: np.ndarray) -> Lanes:
        """Return the fresh lanes where `chosen` [lanes] bool is True, the others elsewhere; those must not be used again."""
        return self._merge(fresh, lanes, chosen)

    def advance(self, lanes: Lanes, fed: Any, count: int) -> tuple[Lanes, History]:
        """Take `count` steps in every lane; the lanes passed in must not be used again.

        Without vmap a lane stops after a loss that is not finite.

        Args:
          lanes: trials under way.
          fed: what `Feed.take` returned for each lane, with a leading lane axis.
          count: at most `feed.num_steps`.

        Returns:
          The lanes after these steps, and fp32 [lanes, `feed.num_steps`] of losses and distances, of which the first `count` count.
        """
        return self._advance(self.feed.shared, np.int32(count), lanes, fed)

    def variables(self, lanes: Lanes) -> tuple[Any, Any]:
        """Return (params, model_state) as they are evaluated, averaged if the optimizer has `ema_decay`; a leading lane axis."""
        state = self._average(lanes.state)
        return state.params, state.model_state

    def _created(
        self, arguments: Arguments, seed: jax.Array, params: Any, model_state: Any
    ) -> Lanes:
        state = TrainState.create(params, model_state, self._tx, seed)
        if self._aggregation is not None:
            state = state.replace(aggregator_state=self._aggregation.init(params))
        start = jax.tree.map(jnp.copy, params) if self._config.measure.distance else ()
        return Lanes(_arguments.with_arguments(state, arguments), start)

    def _advanced(
        self, shared: Any, count: jax.Array, lane: Lanes, fed: Any
    ) -> tuple[Lanes, History]:
        blank = jnp.zeros((self.feed.num_steps,), jnp.float32)
        batched = self.spread.batched

        def going(carry: Any) -> jax.Array:
            done, _, history = carry
            # In a batch the condition must be the same for all, or every step would select between old and new states.
            sound = batched or (done == 0) | jnp.isfinite(history.losses[done - 1])
            return (done < count) & sound

        def body(carry: Any) -> Any:
            done, state, history = carry
            state, metrics = self._step(state, self.feed.batch(shared, fed, done))
            total, counted = metrics["loss"]
            losses = history.losses.at[done].set(total / counted)
            return (
                done + 1,
                state,
                History(losses, self._farther(history.distances, done, state, lane.start)),
            )

        with replicas.tracing_for(1):
            carry = jax.lax.while_loop(
                going, body, (jnp.int32(0), lane.state, History(blank, blank))
            )
        _, state, history = carry
        return Lanes(state, lane.start), history

    def _farther(
        self, distances: jax.Array, done: jax.Array, state: TrainState, start: Any
    ) -> jax.Array:
        if not self._config.measure.distance:
            return distances
        moved = jax.tree.map(jnp.subtract, state.params, start)
        return distances.at[done].set(tree.global_norm(moved).astype(jnp.float32))


def trust_ratios(state: TrainState) -> dict[str, Any]:
    """Return the trust ratio of each layer at a training state's last update; nothing, if its optimizer has none.

    Args:
      state: of one trial.

    Returns:
      `trust_ratio/PATH`, of a stack `trust_ratio/PATH[layer]` -> fp32 scalar.
    """
    metrics = optimizer_metrics(state.opt_state)
    return {name: value for name, value in metrics.items() if name.startswith("trust_ratio/")}


def _merged(fresh: Lanes, lanes: Lanes, chosen: jax.Array) -> Lanes:
    def pick(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(chosen.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree.map(pick, fresh, lanes)
