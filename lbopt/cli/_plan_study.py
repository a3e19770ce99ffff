"""`lbopt plan` of a study: the cost on a pod of every cell, and of the whole study."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lbopt.config import SweepConfig
from lbopt.errors import UserError
from lbopt.plan import Plan, Topology, make_plan, plan_document
from lbopt.sweep.search import SearchCost, search_cost

Say = Callable[[str], None]
_HEADER = (
    "arm",
    "batch",
    "microsteps",
    "steps",
    "GiB a device",
    "ms a step",
    "of peak",
    "hours a run",
    "runs",
    "hours",
)


class CellPlan(NamedTuple):
    """One cell on the pod.

    Attributes:
      arm: Name of the arm.
      global_batch_size: Examples per step.
      num_microsteps: Microsteps that a step accumulates.
      plan: Plan of a full-length run.
      search: Number of trials of the search, and their length.
      num_final: Number of full-length runs that are tested after the search.
    """

    arm: str
    global_batch_size: int
    num_microsteps: int
    plan: Plan
    search: SearchCost
    num_final: int

    @property
    def full_runs(self) -> float:
        """Number of full-length runs; a shorter run counts by the fraction of its steps."""
        return self.search.full_runs + self.num_final

    @property
    def seconds(self) -> float | None:
        """Seconds of all runs of the cell, one after another; None if they do not fit.

        Runs beyond the edges of the search are not counted.
        """
        return self.full_runs * self.plan.seconds if self.plan.fits else None

    @property
    def most_seconds(self) -> float | None:
        """Seconds with all runs that the search may do beyond its edges; None as above."""
        most = self.full_runs + self.search.extra
        return most * self.plan.seconds if self.plan.fits else None


def plan_study(
    config: SweepConfig, flag: str, topology: Topology, with_evaluation: bool, say: Say
) -> list[CellPlan]:
    """Compile the step of every cell for a pod, without running it.

    Args:
      config: A validated study.
      flag: FILE[:ROW] of the study, for the plans.
      topology: The pod.
      with_evaluation: True to compile the evaluation too.
      say: Function that prints a line; it is called before each compilation.

    Returns:
      The cells of the first arm, ascending in batch size, then those of the next arm. A cell that
      needs more memory than a device has is among them: its plan says that it does not fit.

    Raises:
      UserError: Naming `config.trial_devices` if each trial of the study runs on one device, or
        the field of a trial's config that does not suit the pod (for instance a batch size that
        its devices do not divide).
      EnvironmentProblem: If a search needs a package that is not installed.
    """
    if config.trial_devices != "all":
        fix = "each trial runs on one device, so a pod has nothing to plan; use 'all'"
        raise UserError("config.trial_devices", config.trial_devices, fix, code="conflict")

    cells = []
    for index, arm in enumerate(config.arms):
        for size in config.global_batch_sizes:
            devices = config.train.parallel.num_devices or len(topology.devices)
            train = config.cell_train(index, size, devices)

            # As a default `where` is bound now, not when a later cell has changed `arm` and `size`.
            def tell(line: str, where: str = f"{arm.name}, batch {size}") -> None:
                say(f"{where}: {line}")

            cell = CellPlan(
                arm=arm.name,
                global_batch_size=size,
                num_microsteps=train.parallel.num_microsteps,
                plan=make_plan(train, flag, topology, with_evaluation, tell),
                search=search_cost(config.arm_search(index)),
                num_final=len(config.final_seeds),
            )
            cells.append(cell)
    return cells


def lines(cells: list[CellPlan]) -> list[str]:
    """Return the plan as a table, followed by the cost of the whole study.

    Args:
      cells: Cells from `plan_study`.

    Returns:
      Lines of text: memory in GiB per device, time in ms per step and in hours, utilization in
      percent of the peak.
    """
    table = [_HEADER, *map(_table_line, cells)]
    widths = [max(len(line[column]) for line in table) for column in range(len(_HEADER))]
    aligned = ["  ".join(_aligned(line, widths)) for line in table]

    seconds = [cell.seconds for cell in cells if cell.seconds is not None]
    runs = sum(cell.search.trials + cell.num_final for cell in cells)
    total = f"{runs} runs; one after another they take {sum(seconds) / 3600:.1f} h by these steps"
    if extra := sum(cell.search.extra for cell in cells):
        more = sum(cell.most_seconds or 0.0 for cell in cells)
        total += (
            f"; beyond the edges of the searches up to {extra} more, {more / 3600:.1f} h in all"
        )
    if len(seconds) < len(cells):
        total += f"; {len(cells) - len(seconds)} cells do not fit and are not counted"
    return [*aligned, "", total]


def _aligned(line: tuple[str, ...], widths: list[int]) -> list[str]:
    numbers = zip(line[1:], widths[1:], strict=True)
    return [line[0].ljust(widths[0]), *(number.rjust(width) for number, width in numbers)]


def _table_line(cell: CellPlan) -> tuple[str, ...]:
    plan = cell.plan
    (phase,) = plan.phases
    memory = f"{max(step.hbm_bytes for step in plan.compiled) / 2**30:.1f}"
    start = (
        cell.arm,
        str(cell.global_batch_size),
        str(cell.num_microsteps),
        f"{plan.num_steps:,}",
        memory,
    )

    if not plan.fits or cell.seconds is None:
        return *start, "does not fit", "-", "-", f"{cell.full_runs:.3g}", "-"

    return (
        *start,
        f"{1000 * phase.step.step_seconds:.1f}",
        f"{100 * plan.utilization:.1f} %",
        f"{plan.seconds / 3600:.2f}",
        f"{cell.full_runs:.3g}",
        f"{cell.seconds / 3600:.1f}",
    )


def to_json(cells: list[CellPlan], name: str) -> dict[str, Any]:
    """Return the plan of a study as plain data.

    Args:
      cells: Cells from `plan_study`, one or more.
      name: Name of the study.

    Returns:
      `{"study", "topology", "fits", "projected_seconds", "cells": [{"arm", "global_batch_size",
      "num_microsteps", "search_trials", "search_full_runs", "search_trials_beyond_edges",
      "final_runs", "projected_seconds", "most_projected_seconds", "run"}]}`. "fits" is true if all
      cells fit; "run" is the plan of one full-length run. The seconds of a cell that does not fit
      are null. The study's seconds are those of the other cells, all runs one after another;
      "most" are those with all runs beyond the edges of the searches.
    """
    seconds = [cell.seconds for cell in cells]

    return {
        "study": name,
        "topology": cells[0].plan.topology.name,
        "fits": None not in seconds,
        "projected_seconds": sum(one for one in seconds if one is not None),
        "cells": [
            {
                "arm": cell.arm,
                "global_batch_size": cell.global_batch_size,
                "num_microsteps": cell.num_microsteps,
                "search_trials": cell.search.trials,
                "search_full_runs": cell.search.full_runs,
                "search_trials_beyond_edges": cell.search.extra,
                "final_runs": cell.num_final,
                "projected_seconds": cell.seconds,
                "most_projected_seconds": cell.most_seconds,
                "run": plan_document(cell.plan),
            }
            for cell in cells
        ],
    }
