"""`lbopt critical`: the critical batch of a run, measured by branches at larger batches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lbopt import errors
from lbopt._shown import show
from lbopt.cli import _flags, _own_files
from lbopt.cli._train import saved_config, with_vocabulary
from lbopt.config import (
    NOISE_SCALE,
    TEXT,
    SweepConfig,
    TrainConfig,
    completed_json,
    config_to_json,
    data_and_model,
    json_differences,
)
from lbopt.data import train_iterator
from lbopt.errors import UserError, require
from lbopt.metrics import means
from lbopt.parallel import TrainState, put_batch
from lbopt.recipes import build_branch, build_run, scale_recipe
from lbopt.report import logged_scales
from lbopt.train import Checkpoints, Run, restore_chosen, say
from lbopt.workdir import (
    CRITICAL_FILE,
    absolute_workdir,
    finite_or_none,
    local_workdir,
    read_config,
    read_json_lines,
    write_text,
)

FLAGS = {
    "workdir": "a folder of lbopt train, with the checkpoint to branch from",
    "checkpoint": "latest, best, or a step (default: the newest from which the branches end within "
    "the run)",
    "factors": "multiples of the run's batch that are tried (default 1,2,4,8,16)",
    "examples": "examples of each branch, rounded up to a multiple of 4 steps of every batch "
    "(default: 32 steps of the largest)",
    "tokens": "tokens of each branch instead, for data of text",
    "rule": "scaling rule of the branches (default: that of the run); not for a batch that grows",
    "study": "a folder of lbopt sweep with an arm of the run's data and model, whose report then "
    "shows the branches too",
    "tolerance": "loss by which a branch may be above that of the run's own batch (default 0.01)",
}
_FACTORS = "1,2,4,8,16"
_STEPS = 32
_QUARTERS = 4
"""Equal parts of a branch, in whole steps; its training loss is averaged over the last."""


@dataclasses.dataclass(frozen=True)
class Branch:
    """A branch of a run.

    Attributes:
      global_batch_size: Examples per step.
      steps: Number of steps.
      train_loss: Mean training loss over the last quarter of the examples, the same for all.
      validation_loss: Loss on the validation split at the end; None if the evaluation has none, as
        that of answers to questions.
    """

    global_batch_size: int
    steps: int
    train_loss: float
    validation_loss: float | None


@dataclasses.dataclass(frozen=True)
class CriticalMeasurement:
    """The critical batch at a step of a run.

    Attributes:
      step: Step of the checkpoint.
      examples_seen: Examples up to there.
      examples: Examples of each branch.
      rule: Scaling rule of the branches.
      tolerance: Loss by which a branch may be above the first one.
      branches: The branches, ascending in batch size.
      critical_batch_size: The largest batch that lost no more than the tolerance, with all smaller
        ones.
      is_beyond: Whether that is the largest batch that was tried, so the critical one is larger.
    """

    step: int
    examples_seen: int
    examples: int
    rule: str
    tolerance: float
    branches: tuple[Branch, ...]
    critical_batch_size: int
    is_beyond: bool

    def line(self) -> dict[str, Any]:
        """Return the measurement as JSON data; null is a loss that is not finite."""
        branches = [
            {
                name: None if value is None else finite_or_none(value)
                for name, value in dataclasses.asdict(one).items()
            }
            for one in self.branches
        ]
        return {**dataclasses.asdict(self), "branches": branches}

    def lines(self) -> list[str]:
        """Return the measurement as text."""
        first = self.branches[0].train_loss
        table = [("batch", "steps", "train loss", "above", "validation loss")]
        table += [
            (
                f"{one.global_batch_size}",
                f"{one.steps}",
                f"{one.train_loss:.4f}",
                f"{one.train_loss - first:+.4f}",
                "-" if one.validation_loss is None else f"{one.validation_loss:.4f}",
            )
            for one in self.branches
        ]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]

        told = f"critical batch: {self.critical_batch_size}"
        if self.is_beyond:
            told = (
                f"critical batch: at least {self.critical_batch_size}, the largest that was tried"
            )
        return [
            f"step {self.step}, {self.examples_seen} examples seen; branches of {self.examples} "
            f"examples by the rule {self.rule}",
            *("  ".join(map(str.rjust, line, widths)) for line in table),
            f"{told} (training loss at most {self.tolerance:g} above that of batch "
            f"{self.branches[0].global_batch_size})",
        ]


def critical_size(branches: Sequence[Branch], tolerance: float) -> tuple[int, bool]:
    """Return the largest batch whose loss, and that of all smaller ones, is within a tolerance.

    Args:
      branches: Branches, ascending in batch size.
      tolerance: Loss by which a branch may be above the first one.

    Returns:
      The batch size, and whether it is the largest of the branches.

    References:
      Merrill et al., Critical Batch Size Revisited, arXiv 2505.23971.
    """
    found = branches[0].global_batch_size
    for branch in branches[1:]:
        if not branch.train_loss <= branches[0].train_loss + tolerance:
            return found, False
        found = branch.global_batch_size
    return found, True


def run(argv: Sequence[str]) -> None:
    """Branch a run at larger batches, print their losses, and add a line to the workdir.

    Args:
      argv: Arguments after the command, see `FLAGS`.

    Raises:
      UserError: If a flag is wrong, or a branch does not fit the run.
      EnvironmentProblem: If the workdir cannot be read or written.
    """
    given, overrides = _flags.parse("critical", argv, FLAGS, required=("workdir",))
    require(not overrides, "argument", overrides, "leave it out", code="choice")
    factors = _factors(given.get("factors", _FACTORS))
    tolerance = _flags.number("tolerance", given.get("tolerance", "0.01"))
    require(tolerance >= 0, "--tolerance", tolerance, "give a number >= 0")
    length = {
        f"num_{name}": _flags.whole(name, given[name])
        for name in ("examples", "tokens")
        if name in given
    }
    fix = "--examples says it already; give one of the two"
    both = {"examples", "tokens"} <= {*given}
    require(not both, "--tokens", given.get("tokens"), fix, code="conflict")

    with local_workdir(given["workdir"]) as folder:
        workdir = absolute_workdir(folder)
        saved = read_config(folder, "train")
        config = saved_config(saved, given["workdir"])
        assert saved is not None
        config = _own_files.found_from(config, saved)
        config = with_vocabulary(config, folder)
        _check_kind(config, given)
        arms = _arms_like(given["study"], config) if "study" in given else []

        if "rule" in given:
            size = config.global_batch_size
            with errors.under("", rule="--rule"):
                config = scale_recipe(config, global_batch_size=size, rule=given["rule"]).recipe
        which = given.get("checkpoint")
        found = measure(config, workdir, which, factors, tolerance, **length)
        line = found.line()
        _add(workdir, line)
        logged = logged_scales(line, read_json_lines(workdir / "metrics.jsonl"))
    if "study" in given:
        folder_name = given["workdir"].rstrip("/").rpartition("/")[2]
        name = folder_name if config.name == TrainConfig().name else config.name
        with _study(given["study"]) as folder:
            _add(absolute_workdir(folder), {"run": name, "arms": arms, **line, **logged})
    show(*found.lines())


def _check_kind(config: TrainConfig, given: Mapping[str, str]) -> None:
    """Raise `UserError` for a run that cannot be branched, or a flag that is not for its kind."""
    growing = config.batch_schedule
    fix = "its batch was decided as it went; take a run of another kind"
    fits = growing is None or growing.kind != NOISE_SCALE
    require(fits, "--workdir", given["workdir"], fix, code="conflict")
    fix = "its slices take local steps, which a branch does not; take a run of another kind"
    every = config.diloco.every
    require(every == 1, "--workdir", given["workdir"], fix, code="conflict")
    fix = "its text goes on from step to step (data.carry_state), and another batch reads other "
    fix += "text; take a run of another kind"
    require(not config.data.carry_state, "--workdir", given["workdir"], fix, code="conflict")

    if "rule" in given:
        fix = "the run's batch grew by its own rule; leave --rule out"
        require(growing is None, "--rule", given["rule"], fix, code="conflict")
    if "tokens" in given:
        fix = f"the run's data, {config.data.name!r}, have none; give --examples"
        has_tokens = config.data.name in TEXT
        require(has_tokens, "--tokens", given["tokens"], fix, code="conflict")


@contextlib.contextmanager
def _study(study: str, write: bool = True) -> Iterator[str]:
    """Give the local folder of a study; errors about it name the flag."""
    flag = {"workdir": "--study", "--workdir": "--study"}
    with errors.under("", **flag), local_workdir(study, write=write, hold=write) as folder:
        yield folder


def _arms_like(study: str, config: TrainConfig) -> list[str]:
    """Return the arms of a study that have the data, the model and the optimizer of a run.

    Raises:
      UserError: If no study is there, or none of its arms has the data and the model.
    """
    with _study(study, write=False) as folder:
        fix = "no study is there; give a folder of lbopt sweep"
        saved = read_config(folder)
        fits = saved is not None and saved["kind"] == "sweep"
        require(fits, "--study", study, fix, code="missing")
        assert saved is not None

    theirs = completed_json(SweepConfig, saved["config"])
    ours = data_and_model(config_to_json(config))
    differences = []
    for arm in theirs["arms"]:
        own = {name: arm[name] for name in ("data", "model") if arm[name] is not None}
        differences.append(json_differences(ours, data_and_model({**theirs["train"], **own})))
    nearest = min(differences, key=len, default=["it has no arms"])
    fix = (
        f"no arm of it has the run's data and model ({'; '.join(nearest[:3])}); give another study"
    )
    require(not nearest, "--study", study, fix, code="mismatch")

    return [
        arm["name"]
        for arm, different in zip(theirs["arms"], differences, strict=True)
        if not different and arm["optimizer"]["name"] == config.optimizer.name
    ]


def _add(workdir: pathlib.Path, line: Mapping[str, Any]) -> None:
    """Add a line to the measurements in a workdir."""
    file = workdir / CRITICAL_FILE
    before = [dict(one) for one in read_json_lines(file, lambda line: None)]
    lines = [json.dumps(one, allow_nan=False) + "\n" for one in [*before, line]]
    write_text(file, "".join(lines))


def measure(
    config: TrainConfig,
    workdir: pathlib.Path,
    which: str | None,
    factors: Sequence[int],
    tolerance: float,
    num_examples: int | None = None,
    num_tokens: int | None = None,
) -> CriticalMeasurement:
    """Branch a run at each multiple of its batch, from one checkpoint and over the same examples.

    Args:
      config: Config of the run.
      workdir: Its workdir.
      which: The checkpoint: "latest", "best" or a step; None for the newest from which the branches
        end within the run.
      factors: Multiples of the run's batch, ascending, the first of them 1.
      tolerance: Loss by which a branch may be above the first one.
      num_examples: Examples of each branch, rounded up to a multiple of 4 steps of every batch;
        None for 32 steps of the largest.
      num_tokens: Tokens of each branch, instead of `num_examples`.

    Raises:
      UserError: If a branch does not fit the run, or diverges at the run's own batch.
    """
    training = build_run(config)

    length = functools.partial(_length, config, training, factors, num_examples, num_tokens)
    state = _restored(training, workdir, which, length)
    step = int(state.step)
    phase = training.phase_at(step)
    sizes = [factor * phase.global_batch_size for factor in factors]
    examples = length(step)

    # All are built first: a batch that does not fit must not show after hours of the others.
    runs = [build_branch(config, training, step, size, examples) for size in sizes]
    branches = []
    for branch in runs:
        say(f"branch of batch {branch.global_batch_size}: {branch.num_steps} steps")
        branches.append(_run_branch(branch, jax.tree.map(jnp.copy, state)))
    fix = "the branch at the run's own batch diverged; take an earlier checkpoint"
    require(math.isfinite(branches[0].train_loss), "--checkpoint", which or step, fix)
    critical, is_beyond = critical_size(branches, tolerance)
    return CriticalMeasurement(
        step=step,
        examples_seen=phase.examples_seen(step),
        examples=examples,
        rule=config.schedule.scaling_rule,
        tolerance=tolerance,
        branches=tuple(branches),
        critical_batch_size=critical,
        is_beyond=is_beyond,
    )


def _length(
    config: TrainConfig,
    training: Run,
    factors: Sequence[int],
    num_examples: int | None,
    num_tokens: int | None,
    step: int,
) -> int:
    """Return the length in examples of branches that begin at a step; see `measure`.

    Raises:
      UserError: If batches of these factors end together at multiples too far apart.
    """
    phase = training.phase_at(step)
    size = phase.global_batch_size
    if num_tokens is not None:
        place = training.phases().index(phase) if config.phase2 is not None else 0
        num_examples = math.ceil(num_tokens / config.phases()[place].data.sequence_length)

    # A quarter of whole steps has the same examples in every branch.
    together = _QUARTERS * size * math.lcm(*factors)
    least = _QUARTERS * size * factors[-1]
    wanted = max(num_examples or _STEPS * size * factors[-1], least)
    found = -(-wanted // together) * together
    fix = (
        f"quarters of whole steps at every batch make each branch {found} examples long, not "
        f"{wanted}; give powers of two, {_FACTORS} for instance"
    )
    require(found <= 2 * wanted, "--factors", ",".join(map(str, factors)), fix, code="mismatch")
    return found


def _restored(
    training: Run, workdir: pathlib.Path, which: str | None, length: Callable[[int], int]
) -> TrainState:
    """Return the state from which the branches begin.

    Args:
      training: The run.
      workdir: Its workdir.
      which: The checkpoint, as in `measure`.
      length: Function of the step that returns the length in examples of branches from there.

    Raises:
      UserError: If the run ends before the branches would.
    """

    def fits(step: int) -> bool:
        return length(step) <= training.examples_left(step)

    def shapes(step: int) -> TrainState:
        return training.phase_at(step).shapes()

    with Checkpoints(
        workdir, training.keep_checkpoints, training.best_metric, read_only=True, trains=True
    ) as checkpoints:
        if which is not None:
            state = restore_chosen(checkpoints, which, shapes, say)
            step = int(state.step)
            fix = (
                f"branches take {length(step)} examples, and {training.examples_left(step)} are "
                f"left from step {step}; leave --checkpoint out, or give an earlier one"
            )
            require(fits(step), "--checkpoint", which, fix, code="mismatch")
            return state

        newest = checkpoints.restore_newest(shapes, say, fits)
        if newest is None:
            raise _none_fits(training, checkpoints.steps(), length)
        step = int(newest.step)
        say(f"branching from step {step}, the newest checkpoint with {length(step)} examples left")
        return newest


def _none_fits(training: Run, steps: Sequence[int], length: Callable[[int], int]) -> UserError:
    """Return the error of a run none of whose checkpoints has enough examples left."""
    step = max(steps, key=training.examples_left)
    fix = (
        f"no checkpoint that was kept has as many examples left, step {step} has "
        f"{training.examples_left(step)}; give fewer --examples or smaller --factors, or train "
        "with a larger config.checkpoint.keep"
    )
    return UserError("--examples", length(step), fix, code="mismatch")


def _run_branch(branch: Run, state: TrainState) -> Branch:
    """Train a branch from a state, whose arrays it takes."""
    state = branch.enter(state)
    steps = []
    for batch in train_iterator(branch.batches):
        state, metrics = branch.train_step(state, put_batch(branch.mesh, batch))
        # Queued collectives of many steps deadlock on a few CPU cores.
        steps.append(jax.device_get(metrics))

    quarter = steps[-(len(steps) // _QUARTERS) :]
    return Branch(
        global_batch_size=branch.global_batch_size,
        steps=len(steps),
        train_loss=means(quarter)["loss"],
        validation_loss=branch.evaluate(state).get("loss"),
    )


def _factors(text: str) -> list[int]:
    """Return the multiples of the batch, with 1 among them."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < len(part) < 6 and int(part) for part in parts):
        raise UserError("--factors", text, "give whole numbers >= 1, 1,2,4,8 for instance")
    return sorted({1, *map(int, parts)})
