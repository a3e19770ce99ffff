"""`lbopt scale`: a recipe for another batch size, and every number that this changes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lbopt import errors
from lbopt._shown import show
from lbopt.cli import _flags
from lbopt.config import (
    TrainConfig,
    completed_json,
    config_to_json,
    data_and_model,
    json_differences,
)
from lbopt.data.from_config import known_source
from lbopt.errors import require
from lbopt.recipes import base_model, make_problem, num_layers, scale_recipe
from lbopt.workdir import absolute_workdir, local_workdir, read_config, read_json_lines

FLAGS = {
    "config": "FILE[:ROW] of the recipe; --config.field=VALUE changes it",
    "batch": "new number of examples per optimizer step",
    "rule": "rule by which the numbers follow the batch: sqrt, linear, legw, sde, ...; several "
    "joined by + (sqrt+token_half_life)",
    "duration": "new length of the run over the old one, in examples (default 1)",
    "noise_scale": "gradient noise scale of the run in examples, to tell whether the rule holds",
    "workdir": "run with this recipe's data and model that measured its noise scale "
    "(optimizer.track_noise_scale); the last one counts",
}


def run(argv: Sequence[str]) -> None:
    """Print what a rule changes in a recipe at another batch size; nothing is compiled.

    Args:
      argv: Arguments after the command, see `FLAGS`.

    Raises:
      UserError: If a flag is wrong, or the rule does not fit the recipe.
      EnvironmentProblem: If the workdir cannot be read.
    """
    given, overrides = _flags.parse("scale", argv, FLAGS, required=("config", "batch", "rule"))
    fix = "--noise_scale says it already; give one of the two"
    both = {"workdir", "noise_scale"} <= {*given}
    require(not both, "--workdir", given.get("workdir"), fix, code="conflict")
    config = _flags.load_config(given["config"], overrides, TrainConfig)
    noise_scale = None
    if "noise_scale" in given:
        noise_scale = _flags.number("noise_scale", given["noise_scale"])
    elif "workdir" in given:
        noise_scale = _measured(given["workdir"], config)

    places = {"global_batch_size": "--batch", "rule": "--rule", "duration": "--duration"}
    with errors.under("", noise_scale="--noise_scale", **places):
        scaled = scale_recipe(
            config,
            global_batch_size=_flags.whole("batch", given["batch"]),
            rule=given["rule"],
            duration=_flags.number("duration", given.get("duration", "1")),
            noise_scale=noise_scale,
        )
    show(*str(scaled).split("\n"), *_width_lines(config))


def _width_lines(config: TrainConfig) -> list[str]:
    """Return what each kind of parameter takes from a narrower network; [] if it takes nothing."""
    if not (config.model.base_size or config.model.base_widths):
        return []
    problem = make_problem(config.data, config.model, config.loss, 1, None, known_source)
    assert problem.transfer is not None
    lines = ["", *(f"width: {line}" for line in problem.transfer.lines(problem.params))]
    base = base_model(config.model)
    if config.model.base_size and base is not None:
        layers = [num_layers(model) for model in (config.model, base)]
        if len({*layers}) > 1:
            depth = problem.transfer.depth
            how = "as they are" if depth == 1 else f"with branches x {1 / depth:.4g}"
            lines.append("depth: {} layers take the numbers of {} {}".format(*layers, how))
    return lines


def _measured(workdir: str, config: TrainConfig) -> float:
    """Return the last noise scale that a run logged, in examples; it may be infinite.

    Args:
      workdir: The run's folder.
      config: The recipe, whose data and model must be those of the run.

    Raises:
      UserError: If there is no such run, or it logged no noise scale above 0.
      EnvironmentProblem: If the workdir cannot be read.
    """
    config.validate()
    with local_workdir(workdir) as folder:
        saved = read_config(folder, "train")
        fix = "no run is there; give the folder of lbopt train"
        require(saved is not None, "--workdir", workdir, fix, code="missing")
        assert saved is not None
        theirs = data_and_model(completed_json(TrainConfig, saved["config"]))
        differences = json_differences(data_and_model(config_to_json(config)), theirs)
        fix = f"its run is not of this recipe ({'; '.join(differences[:3])}); give another folder, "
        fix += "or give --noise_scale"
        require(not differences, "--workdir", workdir, fix, code="mismatch")
        lines = read_json_lines(absolute_workdir(folder) / "metrics.jsonl")

    found = [line["train/noise_scale"] for line in lines if "train/noise_scale" in line]
    fix = "its log has no train/noise_scale; train with optimizer.track_noise_scale, or give "
    fix += "--noise_scale"
    require(len(found) > 0, "--workdir", workdir, fix, code="missing")
    # Null is a noise scale that cannot be told from infinity.
    last = math.inf if found[-1] is None else float(found[-1])
    fix = f"its last train/noise_scale is {last:.4g}, no estimate above 0; give --noise_scale"
    require(last > 0, "--workdir", workdir, fix)
    return last
