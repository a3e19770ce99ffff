"""`lbopt check`: whether a recipe or a study can run here, before anything is trained."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from lbopt._shown import one_line, show
from lbopt.cli import _flags
from lbopt.cli._other_study import other_study
from lbopt.cli._sweep import can_decide
from lbopt.config import (
    NOISE_SCALE,
    SweepConfig,
    TrainConfig,
    at_batch_size,
    doubled_sizes,
    naming,
    naming_growth,
    naming_phase2,
    step_options,
)
from lbopt.errors import EXIT_USER, EnvironmentProblem, UserError, require, under
from lbopt.parallel import available_devices, devices_per_worker
from lbopt.plan import parse_topology
from lbopt.recipes import (
    LoadedProblem,
    batch_phases_of,
    build_mesh,
    build_run,
    check_batch_fits,
    check_growth,
    make_problem,
)
from lbopt.report import new_figure
from lbopt.report.study import Study
from lbopt.sweep import make_cells, make_problems
from lbopt.sweep.search import search_cost
from lbopt.workdir import check_trackers

FLAGS = {
    "config": "FILE[:ROW] of the recipe or study; --config.field=VALUE changes it",
    "topology": "chips of the TPU pod that will run it: v4:2x2x4, ... (default: the pod of the "
    "publication, for the memory alone)",
    "devices": "number of devices of the job, if it is no TPU pod (default: those here)",
    "workers": "number of processes of the job (default 1)",
    "pilot": "workdir of an earlier study, from whose seeds is told what this study can decide",
    "memory": "false: do not compile the steps for the pod to see whether they fit",
}
_MOST_READ = 512
"""Examples of a batch that are read; they show what is wrong with the data as well as all do."""
_MOST_DEVICES = 10**6
_BY_NOISE = "; the noise scale says when"
_GIB = 2**30

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class _Device:
    """Stands for a device of a job that is not here.

    Attributes:
      process_index: Index of its process.
    """

    process_index: int


@dataclasses.dataclass(frozen=True)
class _Core(_Device):
    """Stands for a device of a TPU pod.

    Attributes:
      coords: Place of its chip in the torus.
      core_on_chip: Index among the devices of its chip.
    """

    coords: tuple[int, int, int]
    core_on_chip: int


class _Report:
    """Prints a line for each check, and keeps the exit codes of those that failed."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    def add(self, name: str, check: Callable[[], tuple[str, T]]) -> T | None:
        """Run a check that returns its line and a result; None if it fails."""
        try:
            line, result = check()
        except (UserError, EnvironmentProblem) as error:
            self.codes.append(error.exit_code)
            # The model's check builds the schedule too, but no model mends it.
            if name == "model" and re.search(r"\bschedule\b", error.field or ""):
                name = "schedule"
            show(f"WRONG {name:<10}{one_line(str(error))}")
            return None
        show(f"ok    {name:<10}{line}")
        return result

    def skip(self, name: str, why: str) -> None:
        """Say why a check was left out."""
        show(f"--    {name:<10}not checked: {why}")


def run(argv: Sequence[str]) -> None:
    """Check what a run needs, print a line for each part, and train nothing.

    Args:
      argv: Arguments after the command, see `FLAGS`.

    Raises:
      UserError: If a flag is wrong, or a check failed by what the user can mend: config, packages,
        batch, memory.
      EnvironmentProblem: If a check failed by the machine: data that cannot be read, devices.
    """
    given, overrides = _flags.parse("check", argv, FLAGS, required=("config",))
    workers = _flags.whole("workers", given.get("workers", "1"))
    if "devices" in given:
        _flags.whole("devices", given["devices"], most=_MOST_DEVICES)
    asks_memory = given.get("memory", "true").lower()
    if asks_memory not in ("true", "false"):
        raise UserError("--memory", given["memory"], "give true or false")
    if "topology" in given and "devices" in given:
        fix = "--topology says it already; give one of the two"
        raise UserError("--devices", given["devices"], fix, code="conflict")
    if "topology" in given:
        with under("", topology="--topology"):
            parse_topology(given["topology"])

    pilot = other_study("pilot", given["pilot"]) if "pilot" in given else None
    report = _Report()
    loaded = _flags.load_config(given["config"], overrides, (TrainConfig, SweepConfig))
    if "pilot" in given and isinstance(loaded, TrainConfig):
        fix = "a recipe has one run and compares nothing; leave it out"
        raise UserError("--pilot", given["pilot"], fix, code="conflict")
    config = report.add("config", functools.partial(_valid, loaded))
    if config is not None:
        report.add("packages", functools.partial(_packages, config))
        problems = report.add("data", functools.partial(_data, config, workers))
        if problems is not None:
            report.add("model", functools.partial(_model, config, problems))
        if isinstance(config, SweepConfig):
            report.add("trials", functools.partial(_trials, config))
            if problems is not None:
                report.add("power", functools.partial(_power, config, problems, pilot))
        report.add("batch", functools.partial(_batch, config, problems, given, workers))
        if report.codes and asks_memory == "true":
            report.skip("memory", "mend the lines above first")
        elif asks_memory == "true":
            _check_memory(report, config, given, overrides)

    if report.codes:
        kind = UserError if EXIT_USER in report.codes else EnvironmentProblem
        fix = f"{len(report.codes)} failed; follow the lines marked WRONG above"
        raise kind("checks", reason=fix)


def _valid(config: TrainConfig | SweepConfig) -> tuple[str, TrainConfig | SweepConfig]:
    config.validate()
    if isinstance(config, TrainConfig):
        return f"{config.name}: a recipe", config
    cells = f"{len(config.arms)} arms x {len(config.global_batch_sizes)} batch sizes"
    return f"{config.name}: a study of {cells}", config


def _packages(config: TrainConfig | SweepConfig) -> tuple[str, None]:
    """Import packages that only a part of the run needs; those for the data are imported there."""
    if isinstance(config, TrainConfig):
        with naming("config", TrainConfig):
            check_trackers(config.trackers)
        what = "those of the trackers are installed" if config.trackers else "no others needed"
        return what, None
    new_figure()
    for index in range(len(config.arms)):
        search_cost(config.arm_search(index))
    return "those of the search and the report are installed", None


def _data(config: TrainConfig | SweepConfig, workers: int) -> tuple[str, list[LoadedProblem]]:
    """Open the data of every phase or arm, trace the model on them, and read a batch."""
    if isinstance(config, SweepConfig):
        problems = make_problems(config)
        size = max(config.global_batch_sizes)
    else:
        problems = []
        size = config.global_batch_size
        for number, phase in enumerate(config.phases()):
            with _naming_phase(config, number, phase.global_batch_size):
                options = (phase.data, phase.model, phase.loss)
                problems.append(make_problem(*options, phase.global_batch_size, phase.init_from))

    begin = time.monotonic()
    lines = []
    for splits in {id(problem.splits): problem.splits for problem in problems}.values():
        count = min(-(-size // workers), _MOST_READ, len(splits.train))
        with naming("config", TrainConfig):
            splits.train.draw(np.arange(count), np.zeros(count, int), 0)
            splits.validation.take(np.arange(1))
        sizes = "/".join(f"{len(split):,}" for split in splits)
        lines.append(f"{sizes} examples (train/validation/test), {count} read")
    seconds = time.monotonic() - begin
    return f"{'; '.join(lines)} in {seconds:.1f} s", problems


@contextlib.contextmanager
def _naming_phase(config: TrainConfig, number: int, size: int) -> Iterator[None]:
    """Let errors of a phase, counted from 0, of a batch size name the fields of the config."""
    growing = config.batch_schedule
    later = naming_phase2() if growing is None else naming_growth(growing, size)
    with naming("config", TrainConfig), later if number else contextlib.nullcontext():
        yield


def _model(
    config: TrainConfig | SweepConfig, problems: Sequence[LoadedProblem]
) -> tuple[str, None]:
    """Build model, loss, optimizer and schedule; nothing is compiled."""
    if isinstance(config, SweepConfig):
        make_cells(config, problems)
    else:
        build_run(config, available_devices()[:1], trains=False)
    counts = [
        sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(problem.params))
        for problem in problems
    ]
    shown = " and ".join(f"{count:,}" for count in dict.fromkeys(counts))
    return f"{shown} parameters, with their optimizer and schedule", None


def _trials(config: SweepConfig) -> tuple[str, None]:
    """Count the trials of a study."""
    costs = [search_cost(config.arm_search(index)) for index in range(len(config.arms))]
    sizes = len(config.global_batch_sizes)
    least = sizes * sum(cost.trials + len(config.final_seeds) for cost in costs)
    extra = sizes * sum(cost.extra for cost in costs)
    line = f"{least:,}"
    if extra:
        line += f", and up to {extra:,} more where the best lies at an edge of its search"
    return line, None


def _power(
    config: SweepConfig, problems: Sequence[LoadedProblem], pilot: Study | None
) -> tuple[str, None]:
    """Say what a study can decide."""
    return " ".join(can_decide(config, problems, pilot)), None


def _devices(given: Mapping[str, str], workers: int) -> Sequence[Any]:
    """Return the devices of the job; those that are not here are stood for."""
    if "topology" not in given and "devices" not in given:
        return available_devices()
    places: list[tuple[Any, ...]] = [()] * int(given.get("devices", 0))
    if "topology" in given:
        chip, shape = parse_topology(given["topology"])
        x, y, z = (*shape, 1)[:3]
        corners = itertools.product(range(z), range(y), range(x), range(chip.cores_per_chip))
        places = [((column, row, layer), core) for layer, row, column, core in corners]

    each, left = divmod(len(places), workers)
    fix = f"as many processes do not share {len(places)} devices evenly; give a divisor"
    require(not left, "--workers", workers, fix, code="mismatch")
    return [
        _Core(index // each, *place) if place else _Device(index // each)
        for index, place in enumerate(places)
    ]


def _batch(
    config: TrainConfig | SweepConfig,
    problems: Sequence[LoadedProblem] | None,
    given: Mapping[str, str],
    workers: int,
) -> tuple[str, None]:
    """Divide the batches by replicas, microsteps and groups of batch norm.

    The optimizer's state has to fit all sizes of a batch schedule. `problems` is None if their data
    are missing: what does not depend on them is checked.
    """
    if isinstance(config, SweepConfig) and config.trial_devices == "one":
        return "each trial runs on one device", None
    devices = _devices(given, workers)
    if isinstance(config, TrainConfig):
        with naming("config", TrainConfig):
            mesh = build_mesh(config.parallel, devices)
            _check_processes(mesh.devices.flat, workers)
        phases = _phases(config, problems, mesh.size)
        for number, phase in enumerate(phases):
            with _naming_phase(config, number, phase.global_batch_size):
                problem = problems[number if config.phase2 else 0] if problems else None
                check_batch_fits(phase, problem, mesh)
        sizes = [phase.global_batch_size for phase in phases]
        if config.batch_schedule is not None and problems:
            with naming("config", TrainConfig):
                check_growth(config, problems[0], sizes)
    else:
        mesh = build_mesh(config.train.parallel, devices)
        sizes = [*config.global_batch_sizes]
        for index, size in itertools.product(range(len(config.arms)), sizes):
            with config.naming_trials(index):
                train = config.cell_train(index, size, mesh.size)
                check_batch_fits(train, problems[index] if problems else None, mesh)

    note = _note(config, mesh) if isinstance(config, TrainConfig) else ""
    in_phases = isinstance(config, TrainConfig) and len(sizes) > 1 and note != _BY_NOISE
    shown = _listed(sizes, in_phases)
    each = _listed([size // mesh.size for size in sizes], in_phases)
    of = f" of {workers} processes" if workers > 1 else ""
    return f"{shown} examples over {mesh.size:,} devices{of}: {each} a device{note}", None


def _note(config: TrainConfig, mesh: Mesh) -> str:
    """Return what the line of the batch says of a run that changes it, or exchanges less often."""
    if config.batch_schedule is not None and config.batch_schedule.kind == NOISE_SCALE:
        return _BY_NOISE
    every = config.diloco.every
    if every == 1:
        return ""
    with naming("config", TrainConfig):
        workers = mesh.size // devices_per_worker(mesh, step_options(config))
    workers *= config.aggregator.replicas_per_device
    return f"; {workers:,} workers exchange every {every:,} steps"


def _phases(
    config: TrainConfig, problems: Sequence[LoadedProblem] | None, num_devices: int
) -> list[TrainConfig]:
    """Return the config of each phase; without data those of a batch schedule are not known."""
    growing = config.batch_schedule
    if growing is None or not (problems or growing.kind == NOISE_SCALE):
        return config.phases()
    if growing.kind == NOISE_SCALE:
        sizes = doubled_sizes(growing, config.global_batch_size)
    else:
        assert problems is not None
        with naming("config", TrainConfig):
            phases = batch_phases_of(config, problems[0])
        sizes = [phase.global_batch_size for phase in phases]
    with naming("config", TrainConfig):
        return [at_batch_size(config, size, num_devices) for size in sizes]


def _listed(numbers: Iterable[int], phases: bool) -> str:
    """Return numbers as text, each with its phase if they are those of phases."""
    return ", ".join(
        f"{number:,}{f' (phase {phase})' * phases}" for phase, number in enumerate(numbers, 1)
    )


def _check_processes(devices: Iterable[Any], workers: int) -> None:
    """Raise `UserError` if some process of the job would have no device of the mesh."""
    taking_part = len({device.process_index for device in devices})
    fix = f"{taking_part} of {workers} processes would have some; use more, or fewer processes"
    fits = taking_part == workers
    require(fits or workers == 1, "parallel.num_devices", None, fix, code="mismatch")


def _check_memory(
    report: _Report,
    config: TrainConfig | SweepConfig,
    given: Mapping[str, str],
    overrides: Sequence[str],
) -> None:
    """Compile the steps for the pod, if it is known and its compiler is here."""
    published = "" if "devices" in given else config.about.topology
    topology = given.get("topology") or published
    if isinstance(config, SweepConfig) and config.trial_devices == "one":
        report.skip("memory", "each trial runs on one device")
    elif not topology:
        report.skip("memory", "no TPU pod is stated; --topology=v4:2x2x4 names one")
    elif importlib.util.find_spec("libtpu") is None:
        report.skip("memory", "the TPU compiler is not installed; pip install 'lbopt[plan]'")
    else:
        if isinstance(config, SweepConfig):  # the largest batch needs the most
            largest = config.global_batch_sizes[-1]
            overrides = [*overrides, f"--config.global_batch_sizes=({largest},)"]
        report.add("memory", functools.partial(_memory, given["config"], overrides, topology))


def _memory(flag: str, overrides: Sequence[str], topology: str) -> tuple[str, None]:
    """Make the plan in another process: it needs JAX on the CPU, and the compiler may crash."""
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "plan.json"
        flags = [f"--config={flag}", *overrides, f"--topology={topology}", f"--output={output}"]
        command = [sys.executable, "-m", "lbopt", "plan", *flags]
        ended = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
        if ended.returncode:
            line = (ended.stderr.strip().splitlines() or ["no message"])[-1]
            kind = UserError if ended.returncode == EXIT_USER else EnvironmentProblem
            raise kind(line.removeprefix("lbopt plan: "))
        written = json.loads(output.read_text())

    plans = [cell["run"] for cell in written["cells"]] if "cells" in written else [written]
    most = max(plans, key=lambda plan: plan["hbm_bytes_per_device"])
    needed = most["hbm_bytes_per_device"] / _GIB
    limit = most["hbm_limit_bytes"] / _GIB
    shown = f"{needed:.1f} GiB of {limit:.1f} GiB on each device of {topology}"
    if not all(plan["fits"] for plan in plans):
        advice = f"lbopt plan --config={flag} --topology={topology} names changes that fit"
        raise UserError(f"memory: {shown}: it does not fit; {advice}", code="resource")
    return f"{shown}, by the compiler's plan", None
