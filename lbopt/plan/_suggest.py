"""What to change about a recipe that does not fit: each suggestion has been compiled and found to fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from lbopt.config import REMATS, TrainConfig
from lbopt.data.from_config import known_source
from lbopt.errors import UserError
from lbopt.plan._step import Say, StepCost, cost_of, silent
from lbopt.plan._topology import Topology
from lbopt.recipes import build_run
from lbopt.train import Run

MOST_MICROSTEPS = 8
"""As a multiple of the config's: a step in more parts than that is tried no more."""


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """A change with which training fits.

    Attributes:
      name: of the change.
      flags: to add to the command line.
      step: its cost.
    """

    name: str
    flags: tuple[str, ...]
    step: StepCost


def suggest_changes(
    config: TrainConfig, topology: Topology, phase: int, say: Say = silent
) -> list[Suggestion]:
    """Compile changes to the step of a phase that does not fit; return those with which it does.

    Of each kind the mildest: rematerialisation (bert), accumulation over twice, four, eight times as many microsteps, a
    sharded update. If none of them is enough, the strongest of the first two together with the last.

    Args:
      config: of the run.
      topology: the pod.
      phase: 0 or 1.
      say: gets a line before each is compiled.
    """

    def first(changes: list[Change]) -> Suggestion | None:
        return _first_that_fits(config, topology, phase, changes, say)

    found = [one for kind in _kinds(config, topology, phase) if (one := first(kind))]
    if found:
        return found
    together: dict[str, object] = {}
    names = []
    for kind in _kinds(config, topology, phase):
        *_, (name, changes) = kind
        together |= changes
        names.append(name)
    every = first([(" + ".join(names), together)]) if together else None
    return [every] if every else []


def suggest_evaluation(
    config: TrainConfig, topology: Topology, phase: int, say: Say = silent
) -> Suggestion | None:
    """Return the largest batch of evaluation, of a half, a quarter and an eighth of the config's, that fits."""
    field = "phase2.eval_global_batch_size" if phase else "eval_global_batch_size"
    size = config.phases()[phase].eval_global_batch_size
    devices = config.parallel.num_devices or len(topology.devices)
    for smaller in (size // parts for parts in (2, 4, MOST_MICROSTEPS) if size // parts >= devices):
        say(f"trying evaluation in batches of {smaller} ...")
        run = build_run(
            with_fields(config, {field: smaller}), topology.devices, known_source
        ).phases()[phase]
        step = cost_of(run.lower_evaluation, topology, list(run.mesh.devices.flat))
        if step.fits:
            return Suggestion(
                f"evaluation in batches of {smaller}", (f"--config.{field}={smaller}",), step
            )
    return None


Change = tuple[str, dict[str, object]]
"""(name, field of the config -> value)."""


def _kinds(config: TrainConfig, topology: Topology, phase: int) -> Iterator[list[Change]]:
    here = config.phases()[phase]
    prefix = "phase2." if phase else ""
    if here.model.name == "bert":
        field = "phase2.remat" if phase else "model.remat"
        stronger = REMATS[REMATS.index(here.model.remat) + 1 :]
        if stronger:
            yield [(f"rematerialisation of {remat}", {field: remat}) for remat in stronger]
    field = f"{prefix}num_microsteps" if phase else "parallel.num_microsteps"
    devices = here.parallel.num_devices or len(topology.devices)
    parts: list[Change] = [
        (f"accumulation x{times}", {field: here.parallel.num_microsteps * times})
        for times in (2, 4, MOST_MICROSTEPS)
        if here.global_batch_size % (devices * here.parallel.num_microsteps * times) == 0
    ]
    if parts and not here.data.carry_state:
        yield parts
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
            return Suggestion(
                name, tuple(f"--config.{field}={value}" for field, value in fields.items()), step
            )
    return None


def _cost(run: Run, topology: Topology, phase: int) -> StepCost:
    here = run.phases()[phase]
    return cost_of(here.lower, topology, list(here.mesh.devices.flat))


def with_fields(config: TrainConfig, fields: Mapping[str, object]) -> TrainConfig:
    """Return a copy of a config with other values at some paths ("model.remat")."""
    for path, value in fields.items():
        config = _with_field(config, path.split("."), value)
    return config


def _with_field(node, path: list[str], value):
    first, *rest = path
    inner = _with_field(getattr(node, first), rest, value) if rest else value
    return dataclasses.replace(node, **{first: inner})
