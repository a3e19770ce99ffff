"""`lbopt train`."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

from lbopt.cli import arguments
from lbopt.config import TrainConfig, checks
from lbopt.recipes import build
from lbopt.train import loop, workdir as workdirs
from lbopt.train.writers import read_lines

FLAGS = {
    "config": "FILE[:ROW], then --config.field.sub=VALUE to override",
    "workdir": "folder for config.json, metrics, checkpoints; the same one resumes",
}
NOT_COMPARED = ("parallel", "about")
"""Parts of a config that may change when a run is resumed."""


def run(argv: Sequence[str]) -> None:
    """Train to the end, or from where the workdir stands."""
    given, overrides = arguments.parse("train", argv, FLAGS, required=("config", "workdir"))
    config = arguments.load_config(given["config"], overrides, TrainConfig)
    plan = build.build(config)
    plan.lower()
    workdir = open_for(config, given["workdir"], arguments.command_line("train", argv))
    with workdirs.locked(workdir):
        loop.train(plan, workdir)
    last = read_lines(workdir / "metrics.jsonl")[-1]
    print(json.dumps({name: value for name, value in last.items() if "trust_ratio" not in name}))
    print(f"{workdir / 'metrics.jsonl'}")


def open_for(config: TrainConfig, path: str, command: str) -> pathlib.Path:
    """Open the workdir of a training config, or refuse it."""
    ours = checks.to_json(config)
    saved = workdirs.read_config(path, "train")
    differences = compared(ours, saved["config"]) if saved else None
    return workdirs.open_workdir(path, "train", ours, differences, command)


def compared(ours: dict, theirs: dict) -> list[str]:
    """List where two configs describe different runs."""

    def core(config: dict) -> dict:
        return {name: value for name, value in config.items() if name not in NOT_COMPARED}

    return checks.differences(core(ours), core(theirs))
