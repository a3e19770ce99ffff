"""The compiled programs of trials: their first states, and many steps at a time."""

from __future__ import annotations

import bisect
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
from lbopt.recipes import LoadedProblem, with_averaged_params
from lbopt.schedules import BatchPhase
from lbopt.sweep._trials import Cell, GrowthPhase
from lbopt.sweep.lanes import _trial_arguments
from lbopt.sweep.lanes._feed import Feed
from lbopt.sweep.lanes._trial_arguments import Arguments
from lbopt.transforms import has_evaluated_params, optimizer_metrics, reweigh_moments

TRIALS_AXIS = "trials"
"""The mesh axis over which a batch of trials is spread."""
_EXAMPLES_A_DEVICE = 2**13
"""Most examples on a device in a step of a batched program.

By the TPU compiler's cycles, 16 CNN trials at batch 512 take a v5e chip no longer per trial than
fewer; at batch 1,024 they spill, and each takes 2.8 times as long as one of 8.
"""


class Lanes(NamedTuple):
    """Running trials, one in each lane; every leaf has a leading lane axis.

    Attributes:
      state: Training states.
      start: Parameters before the first update; () if distances are not measured.
    """

    state: TrainState
    start: Any


class StepScalars(NamedTuple):
    """Scalars of the steps of `Program.advance`, fp32 [lanes, most steps of a call].

    Steps after the requested ones are meaningless.

    Attributes:
      losses: Mean training loss of every step, before its update.
      distances: ||w_t - w_0|| after the step; 0 if not measured.
    """

    losses: Any
    distances: Any


def most_lanes(global_batch_size: int, num_devices: int) -> int:
    """Return the number of lanes above which a batched program slows down.

    Args:
      global_batch_size: Number of examples in a step of each trial.
      num_devices: Number of devices that share the lanes.

    >>> most_lanes(64, 4), most_lanes(1024, 4), most_lanes(100_000, 4)
    (512, 32, 4)
    """
    return num_devices * max(1, _EXAMPLES_A_DEVICE // global_batch_size)


class TrialBatching:
    """The lanes of a program that trials share: their number and their devices.

    Args:
      config: The config of the study.
      devices: Devices to use, for instance of a pod that is not here; None for those of this
        process.
      width: Most trials in a call; None for the config's `trials_per_program`, which is the limit
        in any case. It is rounded up to a multiple of the devices.

    Attributes:
      width: Number of lanes: a multiple of the number of devices, 1 if not batched.
      devices: Devices that share the lanes.
      batched: Whether lanes run under vmap; otherwise there is one.
      most_examples: Most examples of a lane in a step or a call of the evaluation.
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
        most = config.trials_per_program
        wanted = min(most, width or most) if self.batched else 1
        self.width = math.ceil(wanted / len(self.devices)) * len(self.devices)
        self.most_examples = max(1, _EXAMPLES_A_DEVICE * len(self.devices) // self.width)

    def put(self, value: Any) -> Any:
        """Return a pytree of arrays, replicated on these devices."""
        if len(self.devices) == 1:
            return jax.device_put(value, self.devices[0])
        return jax.device_put(value, NamedSharding(self._mesh, PartitionSpec()))

    def jit(self, fn: Callable[..., Any], num_shared: int = 0, donate: tuple[int, ...] = ()) -> Any:
        """Compile a function of one trial for all lanes.

        Args:
          fn: Pure function of pytrees of arrays; the shared arguments come first.
          num_shared: Number of arguments that all trials share.
          donate: Positions of donated arguments, which must not be used again.

        Returns:
          A function with `lower` and `eval_shape`. Its other arguments than the shared ones, and
          its results, have a leading lane axis.
        """
        if not self.batched:
            in_one_lane = functools.partial(_in_one_lane, fn, num_shared)
            return CompiledOnce(jax.jit(in_one_lane, donate_argnums=donate))

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
        """Compile a function of all lanes so that each device runs its own, without exchange."""
        mesh = self._mesh
        split = PartitionSpec(TRIALS_AXIS)

        def specs(given: tuple[Any, ...]) -> tuple[PartitionSpec, ...]:
            return tuple(
                PartitionSpec() if number < num_shared else split for number in range(len(given))
            )

        def spread(*given: Any) -> Any:
            placed = [
                jax.lax.with_sharding_constraint(one, NamedSharding(mesh, spec))
                for one, spec in zip(given, specs(given), strict=True)
            ]
            mapped = jax.shard_map(
                fn, mesh=mesh, in_specs=specs(given), out_specs=split, check_vma=False
            )
            return mapped(*placed)

        return jax.jit(spread, donate_argnums=donate)


class CompiledOnce:
    """A jitted function that is compiled once per shape, even if several threads call it at once.

    Args:
      jitted: A function from `jax.jit`.

    Attributes:
      lower: The method of the jitted function.
      eval_shape: The method of the jitted function.
    """

    def __init__(self, jitted: Any):
        self.lower = jitted.lower
        self.eval_shape = jitted.eval_shape
        self._lock = threading.Lock()
        self._compiled: dict[Any, Any] = {}

    @property
    def made(self) -> bool:
        """Whether the function has been compiled for some shape."""
        return bool(self._compiled)

    def __call__(self, *given: Any) -> Any:
        leaves, structure = jax.tree.flatten(given)
        key = structure, *((leaf.shape, leaf.dtype) for leaf in leaves)
        with self._lock:
            if key not in self._compiled:
                self._compiled[key] = self.lower(*given).compile(_compiler_options())
        return self._compiled[key](*given)


def _compiler_options() -> dict[str, Any] | None:
    """Return LLVM's level 1 on CPU: it compiles in half the time, and programs run as fast.

    None elsewhere, and if JAX disables most optimizations, which means level 0.
    """
    if jax.default_backend() != "cpu" or jax.config.values["jax_disable_most_optimizations"]:
        return None
    return {"xla_backend_optimization_level": 1}


def _in_one_lane(fn: Callable[..., Any], num_shared: int, *given: Any) -> Any:
    """Call a function of one trial with arguments that have a single lane."""
    of_trial = jax.tree.map(lambda x: x[0], given[num_shared:])
    return jax.tree.map(lambda x: x[None], fn(*given[:num_shared], *of_trial))


class Initialiser:
    """The compiled initialisation of a problem's model.

    Models are initialised one after another, also in a batch. Orthogonal initialisation factorises
    matrices, and on CPU two batched factorisations that run at once wait for each other's threads
    for ever (jaxlib 0.10.2).

    Args:
      problem: The problem.
      batching: Lanes of the programs.

    Attributes:
      shapes: Function that returns the shapes of (params, model_state) of all lanes.
    """

    def __init__(self, problem: LoadedProblem, batching: TrialBatching):
        init = (
            jax.custom_batching.sequential_vmap(problem.init) if batching.batched else problem.init
        )
        self._init = batching.jit(lambda seed: init(split_seed(seed)[0]))
        self.shapes = lambda: self._init.eval_shape(np.zeros(batching.width, np.int32))

    def __call__(self, seeds: np.ndarray) -> Any:
        """Return (params, model_state) for seeds, int32 [lanes], with a leading lane axis."""
        return self._init(seeds)


class Program:
    """The step of `lbopt train` in a loop on the device, for trials with other arguments and seeds.

    Args:
      cell: A cell whose trials the program runs; other cells differ in their arguments only.
      decays: Whether there is weight decay, see `make_tx`.
      config: The config of the study.
      batching: Lanes of the program.
      arrays: The training set on the device, see `Feed`.
      phase: The phase of a batch that grows; None for one batch size.

    Attributes:
      batching: Lanes of the program.
      feed: The input of its steps.
      trust_ratios: Function of the training states of all lanes that returns the trust ratio of
        each layer at their last updates.
    """

    def __init__(
        self,
        cell: Cell,
        decays: bool,
        config: SweepConfig,
        batching: TrialBatching,
        arrays: Mapping[str, jax.Array] | None = None,
        phase: GrowthPhase | None = None,
    ):
        self._cell = cell
        self._problem = cell.problem
        self._config = config
        self.batching = batching

        self._tx = _trial_arguments.make_tx(cell, decays, phase)
        steps = BatchPhase(cell.global_batch_size, cell.num_steps, 0, 0)
        self.feed = Feed(cell, steps if phase is None else phase.steps, batching.width, arrays)
        self._moments = None if phase is None else phase.moments
        train = cell.train if phase is None else phase.train
        with config.naming_trials(cell.index):
            options = step_options(train, cell.problem.stacked)
        strategy = on_one_device(options.reduction)
        self._aggregation = strategy.aggregation
        self._step = step_on_one_device(cell.problem.loss_fn, self._tx, options, strategy)
        self._create = batching.jit(self._created)
        self._merge = jax.jit(_merged, donate_argnums=1)
        averages = has_evaluated_params(jax.eval_shape(self._tx.init, cell.problem.params))
        self._average = batching.jit(with_averaged_params) if averages else lambda state: state
        self._advance = batching.jit(self._advanced, num_shared=2, donate=(2,))
        self.trust_ratios = batching.jit(trust_ratios)

    @property
    def compiled(self) -> bool:
        """Whether a trial can start at once; True for batches, whose programs have one user."""
        return getattr(self._advance, "made", True)

    def at(self, step: int) -> Program:
        """Return the program of the next step of a trial; this one.

        Args:
          step: Number of steps that the trial has taken.
        """
        del step
        return self

    def entered(self, lanes: Lanes) -> Lanes:
        """Return the lanes as they enter the phase of this program from the one before."""
        opt_state = reweigh_moments(lanes.state.opt_state, self._moments)
        return lanes._replace(state=lanes.state.replace(opt_state=opt_state))

    def shapes(self) -> tuple[Any, ...]:
        """Return the shapes of the arguments of the steps: shared arrays, count, lanes, input."""
        width = self.batching.width
        blank = Arguments.blank(self._cell, width)
        fresh = Initialiser(self._problem, self.batching).shapes()
        lanes = self._create.eval_shape(blank, np.zeros(width, np.int32), *fresh)
        of_lane = self.feed.take(0, 0, 1)
        fed = jax.tree.map(lambda x: jax.ShapeDtypeStruct((width, *x.shape), x.dtype), of_lane)
        shared = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.feed.shared)
        return shared, jax.ShapeDtypeStruct((), jnp.int32), lanes, fed

    def lower(self, *shapes: Any) -> Any:
        """Lower the steps.

        Args:
          shapes: The result of the method `shapes`, with or without shardings.

        Returns:
          The lowered function, as from `lower` of a jitted one.
        """
        return self._advance.lower(*shapes)

    def create(
        self, arguments: Arguments, seeds: np.ndarray, params: Any, model_state: Any
    ) -> Lanes:
        """Return lanes before their first update.

        Args:
          arguments: Numbers of the trials, fp32 [lanes] each.
          seeds: Seeds of the trials, int32 [lanes].
          params: Parameters, from `Initialiser`.
          model_state: Model state, from `Initialiser`.
        """
        return self._create(arguments, seeds, params, model_state)

    def merge(self, fresh: Lanes, lanes: Lanes, chosen: np.ndarray) -> Lanes:
        """Return fresh lanes where `chosen`, bool [lanes], is True, and `lanes` elsewhere.

        The old `lanes` are donated and must not be used again.
        """
        return self._merge(fresh, lanes, chosen)

    def advance(self, lanes: Lanes, fed: Any, count: int) -> tuple[Lanes, StepScalars]:
        """Take steps in every lane; the old lanes are donated and must not be used again.

        Without vmap a lane stops after a loss that is not finite.

        Args:
          lanes: The running trials.
          fed: The results of `Feed.take` for each lane, stacked on a leading lane axis.
          count: Number of steps, at most `feed.num_steps`.

        Returns:
          The lanes after these steps, and the scalars of the steps.
        """
        return self._advance(self.feed.shared, np.int32(count), lanes, fed)

    def variables(self, lanes: Lanes) -> tuple[Any, Any]:
        """Return the evaluated (params, model_state): averages, if the optimizer keeps them."""
        state = self._average(lanes.state)
        return state.params, state.model_state

    def _created(
        self, arguments: Arguments, seed: jax.Array, params: Any, model_state: Any
    ) -> Lanes:
        state = TrainState.create(params, model_state, self._tx, seed)
        if self._aggregation is not None:
            state = state.replace(aggregator_state=self._aggregation.init(params))
        # A copy, because `advance` takes the state's own arrays.
        start = jax.tree.map(jnp.copy, params) if self._config.measure.distance else ()
        return Lanes(_trial_arguments.with_arguments(state, arguments), start)

    def _advanced(
        self, shared: Any, count: jax.Array, lane: Lanes, fed: Any
    ) -> tuple[Lanes, StepScalars]:
        """Take steps in one lane, in a loop on the device."""
        blank = jnp.zeros((self.feed.num_steps,), jnp.float32)
        batched = self.batching.batched

        def goes_on(carry: Any) -> jax.Array:
            done, _, taken = carry
            # In a batch all lanes must have one condition, or vmap would select between old and
            # new states in every step.
            finite = batched or (done == 0) | jnp.isfinite(taken.losses[done - 1])
            return (done < count) & finite

        def take_step(carry: Any) -> Any:
            done, state, taken = carry
            state, metrics = self._step(state, self.feed.batch(shared, fed, done))
            total, counted = metrics["loss"]
            losses = taken.losses.at[done].set(total / counted)
            distances = self._with_distance(taken.distances, done, state, lane.start)
            return done + 1, state, StepScalars(losses, distances)

        with replicas.tracing_for(1):
            first = (jnp.int32(0), lane.state, StepScalars(blank, blank))
            _, state, taken = jax.lax.while_loop(goes_on, take_step, first)
        return Lanes(state, lane.start), taken

    def _with_distance(
        self, distances: jax.Array, done: jax.Array, state: TrainState, start: Any
    ) -> jax.Array:
        """Return the distances with that of the present step, if they are measured."""
        if not self._config.measure.distance:
            return distances
        moved = jax.tree.map(jnp.subtract, state.params, start)
        return distances.at[done].set(tree.global_norm(moved).astype(jnp.float32))


class GrowingProgram:
    """The programs of a cell whose batch grows, by batch size, for trials that begin together.

    Args:
      programs: The programs, by phase.
      cell: The cell.

    Attributes:
      batching: Lanes of the programs.
      create: The method of the first program.
      merge: The method of the first program.
      variables: The method of the first program.
      trust_ratios: The function of the first program.
    """

    def __init__(self, programs: Sequence[Program], cell: Cell):
        self._programs = tuple(programs)
        self._ends = [each.steps.first_step + each.steps.num_steps for each in cell.growth]
        first = programs[0]
        self.batching = first.batching
        self.create = first.create
        self.merge = first.merge
        self.variables = first.variables
        self.trust_ratios = first.trust_ratios

    @property
    def compiled(self) -> bool:
        """Whether a trial can start at once."""
        return all(program.compiled for program in self._programs)

    def at(self, step: int) -> Program:
        """Return the program of the next step of a trial.

        Args:
          step: Number of steps that the trial has taken.
        """
        return self._programs[bisect.bisect_right(self._ends, step)]


def trust_ratios(state: TrainState) -> dict[str, Any]:
    """Return the trust ratio of each layer at the last update; {} if the optimizer has none.

    Args:
      state: The training state of one trial.

    Returns:
      fp32 scalars as `trust_ratio/PATH`, or `trust_ratio/PATH[layer]` for a stack.
    """
    metrics = optimizer_metrics(state.opt_state)
    return {name: value for name, value in metrics.items() if name.startswith("trust_ratio/")}


def _merged(fresh: Lanes, lanes: Lanes, chosen: jax.Array) -> Lanes:
    """Return fresh lanes where `chosen` is True, others elsewhere."""

    def pick(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(chosen.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree.map(pick, fresh, lanes)
