"""`lbopt plan`."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from lbopt import errors, paths
from lbopt._shown import show
from lbopt.cli import _arguments, _plan_study
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
    "topology": "of the pod: v3:16x32, v5p:4x4x8, ... in chips; none for the one the recipe was published on",
    "output": "where the plan goes as JSON",
    "compare": "other topologies, or changes of the config, or both, side by side: 'v3:32x32, model.remat=layer, v5e:16x16 parallel.shard_update=False'",
    "breakdown": "true: name the ten costliest operations",
    "evaluation": "false: leave the evaluation out",
}


SURE = 2048
"""Devices for which the compiler has not been seen to crash."""
_CHILD = "LBOPT_PLAN_CHILD"


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a comparison."""

    label: str
    topology: Topology
    config: TrainConfig


def run(argv: Sequence[str]) -> None:
    """Compile a recipe's steps for a pod and print what they cost; nothing is run."""
    argv = [
        f"{argument}=true" if argument in ("--breakdown", "-breakdown") else argument
        for argument in argv
    ]
    given, overrides = _arguments.parse("plan", argv, FLAGS, required=("config",))
    flag = given["config"]
    options = {
        name: _boolean(name, given.get(name, default))
        for name, default in (("breakdown", "false"), ("evaluation", "true"))
    }
    output = paths.writable(given["output"], "--output") if "output" in given else None
    config = _arguments.load_config(flag, overrides, (TrainConfig, SweepConfig))
    config.validate()
    name = given.get("topology") or config.about.topology
    if not name:
        raise UserError(
            f"--topology is missing, and {flag} names none of its own: give --topology=v3:16x32 for instance"
        )
    prepare_environment()
    if isinstance(config, SweepConfig):
        _plan_all_cells(argv, config, given, name, options["evaluation"], output)
        return
    columns = [Column(name, _open_topology(name), config)]
    if "compare" in given:
        columns += _columns(flag, overrides, given["compare"], name)
    if max(len(column.topology.devices) for column in columns) > SURE and _CHILD not in os.environ:
        _in_a_child(argv)
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
    output: pathlib.Path | None,
) -> None:
    """Compile the step of every cell of a study."""
    for flag in ("compare", "breakdown"):
        if flag in given:
            raise UserError(
                f"--{flag} = {given[flag]!r}: not for a study; plan a recipe, or leave it out"
            )
    topology = _open_topology(name)
    if len(topology.devices) > SURE and _CHILD not in os.environ:
        _in_a_child(argv)
        return
    cells = _plan_study.plan_study(config, given["config"], topology, with_evaluation, say)
    show(*_plan_study.lines(cells))
    if output is not None:
        _write(output, _plan_study.to_json(cells, config.name))


def _write(output: pathlib.Path, written: dict[str, Any]) -> None:
    try:
        output.write_text(json.dumps(written, indent=1) + "\n")
    except OSError as error:
        raise EnvironmentProblem(
            f"--output = {output}: it could not be written ({error.strerror})"
        ) from error
    show("", f"written to {output}")


def _in_a_child(argv: Sequence[str]) -> None:
    """Run the command in another process, which the compiler may take down with it."""
    done = subprocess.run(
        [sys.executable, "-m", "lbopt", "plan", *argv], env={**os.environ, _CHILD: "1"}, check=False
    )
    if done.returncode == -signal.SIGKILL:
        raise EnvironmentProblem(
            "the process that plans was killed, most likely for want of memory: give it more"
        )
    if done.returncode < 0:
        raise EnvironmentProblem(
            f"the TPU compiler itself crashed (signal {-done.returncode}): it is made for up to {SURE} devices; give a smaller "
            "--topology, or another setting of config.parallel"
        )
    if done.returncode:
        raise SystemExit(done.returncode)


def _advise(plan: Plan) -> None:
    """Print what would make a plan fit that does not."""
    for number, phase in enumerate(plan.phases):
        if phase.evaluation is not None and not phase.evaluation.step.fits:
            smaller = suggest_evaluation(plan.config, plan.topology, number, say)
            show("", "try" if smaller else "no smaller batch of evaluation fits either")
            show(*suggestion_lines([smaller] if smaller else [], plan.hbm_limit_bytes))
        if phase.step.fits:
            continue
        found = suggest_changes(plan.config, plan.topology, number, say)
        if found:
            show("", "try one of")
            show(*suggestion_lines(found, plan.hbm_limit_bytes))
        else:
            show(
                "",
                "no rematerialisation, accumulation or sharded update makes it fit: use a larger pod or a smaller batch",
            )


def _columns(flag: str, overrides: Sequence[str], text: str, name: str) -> list[Column]:
    """Read "v3:32x32, model.remat=layer": columns with commas between; a word is a topology or FIELD=VALUE."""
    found = []
    for column in re.split(r",(?![^(]*\))", text):  # not within a tuple
        words = column.split()
        places = [word for word in words if "=" not in word]
        if not words or len(places) > 1:
            raise UserError(
                f"--compare = {text!r}: {column.strip()!r} is no column; give a topology, FIELD=VALUE ..., or both"
            )
        changes = [f"--config.{word}" for word in words if "=" in word]
        config = _arguments.load_config(flag, [*overrides, *changes], TrainConfig)
        config.validate()
        place = _open_topology(places[0], "--compare") if places else _open_topology(name)
        found.append(Column(" ".join(words), place, config))
    return found


def _boolean(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise UserError(f"--{name} = {value!r}: give true or false")
    return value.lower() == "true"
