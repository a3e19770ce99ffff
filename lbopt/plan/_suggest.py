"""Changes with which a recipe that does not fit would fit; each is verified by compiling it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from lbopt.config import TRANSFORMERS, TrainConfig
from lbopt.data.from_config import known_source
from lbopt.errors import UserError
from lbopt.models import REMATS
from lbopt.plan._step_cost import Say, StepCost, cost_of, silent
from lbopt.plan._topology import Topology
from lbopt.recipes import build_run
from lbopt.train import Run

MOST_MICROSTEPS = 8
"""Most microsteps to try, as a multiple of the config's number."""


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """A change with which a step fits.

    Attributes:
      name: Name of the change.
      flags: Flags to add to the command line.
      step: The cost of the changed step.
    """

    name: str
    flags: tuple[str, ...]
    step: StepCost


def suggest_changes(
    config: TrainConfig, topology: Topology, phase: int, say: Say = silent
) -> list[Suggestion]:
    """Return the changes with which the training step of a phase fits.

    For each kind of change the mildest one that fits is returned. The kinds are rematerialisation
    (bert), gradient accumulation over 2, 4 and 8 times as many microsteps, and a sharded update. If
    no kind is enough, the strongest changes of all kinds are tried together.

    Args:
      config: The config of the run.
      topology: The pod.
      phase: Index of the phase.
      say: Function that gets a line before each compilation.
    """

    def first(changes: list[Change]) -> Suggestion | None:
        return _first_that_fits(config, topology, phase, changes, say)

    found = [one for kind in _kinds(config, topology, phase) if (one := first(kind))]
    if found:
        return found

    # The last change of each kind is the strongest.
    together: dict[str, object] = {}
    names = []
    for kind in _kinds(config, topology, phase):
        name, changes = kind[-1]
        together |= changes
        names.append(name)
    combined = first([(" + ".join(names), together)]) if together else None
    return [combined] if combined else []


def suggest_evaluation(
    config: TrainConfig, topology: Topology, phase: int, say: Say = silent
) -> Suggestion | None:
    """Return the largest evaluation batch that fits; None if none does.

    A half, a quarter and an eighth of the config's batch size are tried.

    Args:
      config: The config of the run.
      topology: The pod.
      phase: Index of the phase, 0 or 1.
      say: Function that gets a line before each compilation.
    """
    second = phase and config.phase2 is not None
    field = "phase2.eval_global_batch_size" if second else "eval_global_batch_size"
    size = config.phases()[1 if second else 0].eval_global_batch_size
    devices = config.parallel.num_devices or len(topology.devices)
    for divisor in (2, 4, MOST_MICROSTEPS):
        smaller = size // divisor
        if smaller < devices:  # each device takes part in every batch
            break
        say(f"trying evaluation in batches of {smaller} ...")
        changed = with_fields(config, {field: smaller})
        run = build_run(changed, topology.devices, known_source).phases()[phase]
        step = cost_of(run.lower_evaluation, topology, list(run.mesh.devices.flat))
        if step.fits:
            name = f"evaluation in batches of {smaller}"
            return Suggestion(name, (f"--config.{field}={smaller}",), step)
    return None


Change = tuple[str, dict[str, object]]
"""The name of a change, and the new values of config fields by their paths."""


def _kinds(config: TrainConfig, topology: Topology, phase: int) -> Iterator[list[Change]]:
    """Yield the changes of each kind that apply to a phase, the mildest first."""
    second = phase and config.phase2 is not None
    here = config.phases()[1 if second else 0]
    if here.model.name in TRANSFORMERS:
        field = "phase2.remat" if second else "model.remat"
        stronger = REMATS[REMATS.index(here.model.remat) + 1 :]
        if stronger:
            yield [(f"rematerialisation of {remat}", {field: remat}) for remat in stronger]

    field = "phase2.num_microsteps" if second else "parallel.num_microsteps"
    devices = here.parallel.num_devices or len(topology.devices)
    accumulations: list[Change] = [
        (f"accumulation x{times}", {field: here.parallel.num_microsteps * times})
        for times in (2, 4, MOST_MICROSTEPS)
        if here.global_batch_size % (devices * here.parallel.num_microsteps * times) == 0
    ]
    if accumulations and not here.data.carry_state:
        yield accumulations

    if not here.parallel.shard_update:
        yield [("sharded update", {"parallel.shard_update": True})]


def _first_that_fits(
    config: TrainConfig, topology: Topology, phase: int, changes: list[Change], say: Say
) -> Suggestion | None:
    for name, fields in changes:
        say(f"trying {name} ...")
        changed = with_fields(config, fields)
        try:
            step = _cost(build_run(changed, topology.devices, known_source), topology, phase)
        except UserError:  # another field forbids it: groups of batch norm, for instance
            continue
        if step.fits:
            flags = tuple(f"--config.{field}={value}" for field, value in fields.items())
            return Suggestion(name, flags, step)
    return None


def _cost(run: Run, topology: Topology, phase: int) -> StepCost:
    here = run.phases()[phase]
    return cost_of(here.lower, topology, list(here.mesh.devices.flat))


def with_fields(config: TrainConfig, fields: Mapping[str, object]) -> TrainConfig:
    """Return a copy of a config with new values at some paths, "model.remat" for instance."""
    for path, value in fields.items():
        config = _with_field(config, path.split("."), value)
    return config


def _with_field(node, path: list[str], value):
    first, *rest = path
    inner = _with_field(getattr(node, first), rest, value) if rest else value
    return dataclasses.replace(node, **{first: inner})
