"""`lbopt plan`: what a recipe or a study costs on a TPU pod."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from lbopt import errors, paths
from lbopt._shown import show
from lbopt.cli import _flags, _plan_study
from lbopt.config import SweepConfig, TrainConfig
from lbopt.errors import EnvironmentProblem, UserError
from lbopt.plan import (
    Plan,
    Topology,
    breakdown_lines,
    comparison_lines,
    make_plan,
    open_topology,
    plan_document,
    plan_lines,
    prepare_environment,
    suggest_changes,
    suggest_evaluation,
    suggestion_lines,
)
from lbopt.train import say

FLAGS = {
    "config": "FILE[:ROW] of the recipe; --config.field=VALUE changes it",
    "topology": "chips of the pod: v3:16x32, v5p:4x4x8, ... (default: the pod of the publication)",
    "output": "JSON file for the plan; may be gs://BUCKET/FILE",
    "compare": "other topologies, changes of the config, or both, side by side: "
    "'v3:32x32, model.remat=layer, v5e:16x16 parallel.shard_update=False'",
    "breakdown": "true: name the ten costliest operations",
    "evaluation": "false: leave the evaluation out",
}


SAFE_DEVICES = 2048
"""Most devices for which the compiler has not been seen to crash."""
_CHILD = "LBOPT_PLAN_CHILD"


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a comparison: a config on a pod."""

    label: str
    topology: Topology
    config: TrainConfig


def run(argv: Sequence[str]) -> None:
    """Compile a recipe's steps for a pod and print what they cost, without running them.

    Args:
      argv: Arguments after the command, see `FLAGS`.

    Raises:
      UserError: If a flag or a field of the config is wrong.
      EnvironmentProblem: If there is no TPU compiler, if it crashes, or if the plan cannot be
        written.
    """
    argv = [  # a bare --breakdown means true
        f"{argument}=true" if argument in ("--breakdown", "-breakdown") else argument
        for argument in argv
    ]
    given, overrides = _flags.parse("plan", argv, FLAGS, required=("config",))
    flag = given["config"]
    options = {
        name: _boolean(name, given.get(name, default))
        for name, default in (("breakdown", "false"), ("evaluation", "true"))
    }
    output = paths.writable(given["output"], "--output") if "output" in given else None
    config = _flags.load_config(flag, overrides, (TrainConfig, SweepConfig))
    config.validate()
    name = given.get("topology") or config.about.topology
    if not name:
        fix = f"missing, and {flag} names no pod; give --topology=v3:16x32 for instance"
        raise UserError("--topology", reason=fix, code="missing")

    prepare_environment()
    if isinstance(config, SweepConfig):
        _plan_all_cells(argv, config, given, name, options["evaluation"], output)
        return

    columns = [Column(name, _open_topology(name), config)]
    if "compare" in given:
        columns += _columns(flag, overrides, given["compare"], name)
    if _may_crash(*(column.topology for column in columns)):
        _run_in_child(argv)
        return

    plan = make_plan(config, flag, columns[0].topology, options["evaluation"], say)
    show(*plan_lines(plan))
    if options["breakdown"]:
        show(*breakdown_lines(plan))
    _advise(plan)
    labels = [column.label for column in columns]
    others = [
        make_plan(other.config, flag, other.topology, options["evaluation"], say)
        for other in columns[1:]
    ]
    if others:
        show("", *comparison_lines([plan, *others], labels))
    if output is not None:
        written = plan_document(plan)
        if others:
            written["compared"] = dict(zip(labels[1:], map(plan_document, others), strict=True))
        _write(output, written)


def _open_topology(name: str, flag: str = "--topology") -> Topology:
    with errors.under("", topology=flag):
        return open_topology(name)


def _plan_all_cells(
    argv: Sequence[str],
    config: SweepConfig,
    given: dict[str, str],
    name: str,
    with_evaluation: bool,
    output: paths.GivenPath | None,
) -> None:
    """Compile the step of every cell of a study."""
    for flag in ("compare", "breakdown"):
        if flag in given:
            fix = "does not apply to a study; plan a recipe, or leave it out"
            raise UserError(f"--{flag}", given[flag], fix, code="unused")
    topology = _open_topology(name)
    if _may_crash(topology):
        _run_in_child(argv)
        return
    cells = _plan_study.plan_study(config, given["config"], topology, with_evaluation, say)
    show(*_plan_study.lines(cells))
    if output is not None:
        _write(output, _plan_study.to_json(cells, config.name))


def _write(output: paths.GivenPath, written: dict[str, Any]) -> None:
    paths.write_text(output, json.dumps(written, indent=1) + "\n", "--output")
    show("", f"written to {output}")


def _may_crash(*topologies: Topology) -> bool:
    """Return whether the compiler may crash on a topology, and this is not the child yet."""
    largest = max(len(topology.devices) for topology in topologies)
    return largest > SAFE_DEVICES and _CHILD not in os.environ


def _run_in_child(argv: Sequence[str]) -> None:
    """Run the command in another process, so that a crash of the compiler ends in one line."""
    done = subprocess.run(
        [sys.executable, "-m", "lbopt", "plan", *argv], env={**os.environ, _CHILD: "1"}, check=False
    )
    if done.returncode == -signal.SIGKILL:
        fix = "the planning process was killed, most likely for lack of memory; give it more"
        raise EnvironmentProblem("memory", reason=fix, code="resource")
    if done.returncode < 0:
        fix = (
            f"the TPU compiler crashed (signal {-done.returncode}); it is made for up to "
            f"{SAFE_DEVICES} devices: give a smaller one, or change config.parallel"
        )
        raise EnvironmentProblem("--topology", reason=fix, code="installation")
    if done.returncode:
        raise SystemExit(done.returncode)


def _advise(plan: Plan) -> None:
    """Print which changes make the phases fit that need too much memory."""
    for number, phase in enumerate(plan.phases):
        if phase.evaluation is not None and not phase.evaluation.step.fits:
            smaller = suggest_evaluation(plan.config, plan.topology, number, say)
            show("", "try" if smaller else "no smaller evaluation batch fits either")
            show(*suggestion_lines([smaller] if smaller else [], plan.hbm_limit_bytes))
        if phase.step.fits:
            continue
        found = suggest_changes(plan.config, plan.topology, number, say)
        if found:
            show("", "try one of")
            show(*suggestion_lines(found, plan.hbm_limit_bytes))
        else:
            nothing = "no rematerialisation, accumulation or sharded update makes it fit"
            show("", f"{nothing}: use a larger pod or a smaller batch")


def _columns(flag: str, overrides: Sequence[str], text: str, name: str) -> list[Column]:
    """Return the columns of `--compare`, for instance "v3:32x32, model.remat=layer".

    Args:
      flag: FILE[:ROW] of the recipe.
      overrides: `--config.field=VALUE` arguments, for every column.
      text: Columns separated by commas; each word is a topology or FIELD=VALUE.
      name: Topology of a column that names none.
    """
    found = []
    for column in re.split(r",(?![^(]*\))", text):  # a comma within a tuple separates nothing
        words = column.split()
        topologies = [word for word in words if "=" not in word]
        if not words or len(topologies) > 1:
            fix = f"cannot read {column.strip()!r}; give a topology, FIELD=VALUE ..., or both"
            raise UserError("--compare", text, fix)

        changes = [f"--config.{word}" for word in words if "=" in word]
        config = _flags.load_config(flag, [*overrides, *changes], TrainConfig)
        config.validate()
        if topologies:
            topology = _open_topology(topologies[0], "--compare")
        else:
            topology = _open_topology(name)
        found.append(Column(" ".join(words), topology, config))
    return found


def _boolean(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise UserError(f"--{name}", value, "give true or false")
    return value.lower() == "true"
