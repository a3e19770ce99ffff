"""`lbopt suggest`: learning rate, warmup and batch sizes to begin with, measured in minutes."""

from __future__ import annotations

import dataclasses
import html
import math
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from lbopt._shown import show
from lbopt.cli import _flags
from lbopt.config import (
    Arm,
    MeasureConfig,
    ScheduleConfig,
    SearchConfig,
    SweepConfig,
    TrainConfig,
    naming,
)
from lbopt.data import train_iterator
from lbopt.errors import UserError, require
from lbopt.metrics import means
from lbopt.parallel import put_batch
from lbopt.recipes import build_run
from lbopt.schedules import ScaledBatch, scale_batch
from lbopt.sweep import (
    FinishedTrial,
    finished_trial,
    make_cells,
    make_problems,
    noise_scales,
    run_sweep,
)
from lbopt.train import Run, say

FLAGS = {
    "config": "FILE[:ROW] of a run, then --config.field=VALUE to override",
    "batch": "batch size to suggest numbers for (default: config.global_batch_size)",
    "steps": "steps of each trial (default: 150); more steps, better numbers",
}
STEPS = 150
FEWEST_STEPS = 30
_LOWEST = 1e-6
_HIGHEST = 10.0
_FACTORS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Learning rates that are tried, as multiples of that of the smallest loss in the range test."""
_WARMUPS = (0.0, 0.1, 0.3)
"""Warmups that are tried, as fractions of a trial."""
_ALIKE = 0.01
"""Relative difference of two losses that are taken for equal."""
_BEYOND = 3.0
"""The largest batch that should still help, as a multiple of the noise scale."""
_SMOOTHING = 15.0
"""Steps of the range test divided by those over which its losses are averaged."""
_PARTS = 8
_PART_SIZE = 32

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Advice:
    """Numbers to begin with, and the measurements behind them. `print` shows both.

    Attributes:
      base_batch_size: Batch size at which everything was measured.
      base_learning_rate: Peak learning rate there.
      base_warmup_epochs: Length of the warmup there, in epochs.
      noise_scale: Gradient noise scale in examples; None if the gradient was lost in the noise.
      largest_batch_size: The largest batch that should still help by the noise scale; None with
        `noise_scale`.
      asked: Learning rate, warmup and steps at the batch size that was asked for, by square-root
        scaling and LEGW (linear-epoch gradual warmup).
      range_test: (learning rate, smoothed loss) of the range test.
      trials: (learning rate, warmup steps, validation loss) of each trial; None where it diverged.
      steps: Steps of each trial.

    >>> import lbopt
    >>> advice = lbopt.suggest(lbopt.Problem("digits", "cnn"), steps=30)  # doctest: +SKIP
    >>> advice.flags[0]  # doctest: +SKIP
    '--config.global_batch_size=1024'
    """

    base_batch_size: int
    base_learning_rate: float
    base_warmup_epochs: float
    noise_scale: float | None
    largest_batch_size: int | None
    asked: ScaledBatch
    range_test: tuple[tuple[float, float], ...]
    trials: tuple[tuple[float, float, float | None], ...]
    steps: int

    @property
    def flags(self) -> tuple[str, ...]:
        """The numbers as flags of `lbopt train`."""
        return (
            f"--config.global_batch_size={self.asked.global_batch_size}",
            f"--config.schedule.base_batch_size={self.base_batch_size}",
            f"--config.schedule.base_learning_rate={self.base_learning_rate:.3g}",
            f"--config.schedule.base_warmup_epochs={self.base_warmup_epochs:.4g}",
            "--config.schedule.scaling_rule=sqrt",
            "--config.schedule.warmup_rule=legw",
        )

    def __str__(self) -> str:
        size = self.base_batch_size
        trials = [
            f"  {rate:<13.4g}   {warmup:<12.4g}   {_loss_text(loss)}"
            for rate, warmup, loss in self.trials
        ]

        lines = [
            f"learning rate     {self.base_learning_rate:.3g} at batch {size}",
            f"warmup            {self.base_warmup_epochs:.4g} epochs at batch {size}",
            *self._noise_lines(),
            f"at batch {self.asked.global_batch_size:<9}learning rate "
            f"{self.asked.learning_rate:.3g}, warmup {self.asked.warmup_steps} steps "
            f"({self.asked.warmup_epochs:.4g} epochs) of {self.asked.total_steps}",
            "",
            " ".join(self.flags),
            "",
            f"measured at batch {size}, in trials of {self.steps} steps at a constant rate:",
            "  learning rate   warmup steps   validation loss",
            *trials,
            f"range test: the loss is smallest at {self._lowest():.3g}",
            "Advice, not a result: those of a whole run may differ, and lbopt sweep finds them.",
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def _noise_lines(self) -> list[str]:
        if self.noise_scale is None:
            return ["noise scale       not measured: the gradient is lost in its noise"]
        return [
            f"noise scale       {self.noise_scale:.4g} examples after {self.steps} steps; it grows "
            "as the loss falls",
            f"batch to try      {self.largest_batch_size}: it should still help; twice that saves "
            "less than a fifth of the steps",
        ]

    def _lowest(self) -> float:
        return min(self.range_test, key=lambda point: point[1])[0]


def _loss_text(loss: float | None) -> str:
    return "diverged" if loss is None else f"{loss:.5g}"


def run(argv: Sequence[str]) -> None:
    """Measure and print a learning rate, a warmup and batch sizes to begin with.

    Args:
      argv: Arguments after the command, see `FLAGS`.

    Raises:
      UserError: If a flag or a field of the config is wrong.
      EnvironmentProblem: If data or devices are at fault.
    """
    given, overrides = _flags.parse("suggest", argv, FLAGS, required=("config",))
    config = _flags.load_config(given["config"], overrides, TrainConfig)
    size = _flags.whole("batch", given.get("batch", str(config.global_batch_size)))
    steps = _flags.whole("steps", given.get("steps", str(STEPS)))
    show(*str(suggest_for(config, size, steps)).split("\n"))


def suggest_for(
    config: TrainConfig, global_batch_size: int, steps: int = STEPS, say: Say = say
) -> Advice:
    """Measure a learning rate, a warmup and the noise scale, and scale them to a batch size.

    A range test raises the learning rate from 1e-6 to 10 over one run, and finds where the loss is
    smallest. Trials below that rate, each with three warmups, then tell which is best after `steps`
    steps. Of warmups that do alike, the shortest is taken. The gradient noise scale at the end of
    the best trial tells how far the batch size may go: with B examples, (1 + noise / B) times the
    fewest steps are needed.

    Args:
      config: The run. Its `schedule.base_batch_size` is the batch size of all trials.
      global_batch_size: Batch size for which the rules are worked out.
      steps: Steps of the range test, and of each trial.
      say: Function that gets a line before each measurement.

    Raises:
      UserError: Naming the field, if the config is wrong, if no rate lowers the loss, or if all
        trials diverge.

    References:
      Smith, Cyclical Learning Rates, arXiv 1506.01186v6, section 3.3 (range test).
      McCandlish et al., arXiv 1812.06162v1, equation 2.11 (steps at a noise scale).
    """
    config.validate()
    fix = f"too few to tell; give at least {FEWEST_STEPS}"
    require(steps >= FEWEST_STEPS, "steps", steps, fix)
    curve, run = _range_test(config, steps, say)
    rate = min(curve, key=lambda point: point[1])[0]
    fix = "the loss does not fall at any learning rate; check data, model and loss"
    falls = rate > curve[0][0] and min(loss for _, loss in curve) < curve[0][1]
    require(falls, "schedule.base_learning_rate", rate, fix)

    examples = len(run.splits.train)
    say(f"{len(_FACTORS) * len(_WARMUPS)} trials of {steps} steps around {rate / 8:.3g}")
    trials = _trials(config, rate, steps, examples)
    best = _best(trials)
    noise = _noise_of(trials)
    base = config.schedule.base_batch_size
    epochs = best.warmup_steps * base / examples
    asked = scale_batch(
        global_batch_size, best.learning_rate, base, epochs, examples, config.num_epochs
    )
    return Advice(
        base,
        best.learning_rate,
        epochs,
        noise,
        None if noise is None else _largest_batch(noise, base, examples),
        asked,
        tuple(curve),
        tuple(
            (one.learning_rate, one.warmup_steps, None if one.diverged else one.validation_loss)
            for one in trials
            if not one.is_final
        ),
        steps,
    )


def _at_base(config: TrainConfig, steps: int, schedule: Any) -> TrainConfig:
    """Return the config of a short run at the base batch size."""
    found = dataclasses.replace(
        config,
        global_batch_size=config.schedule.base_batch_size,
        num_steps=steps,
        phase2=None,
        batch_schedule=None,
        eval_every_steps=steps,
        eval_every_epochs=None,
        target_metric="",
        target_value=0.0,
        stop_at_target=False,
        mllog=False,
    )
    found.schedule = schedule
    return found


def _range_test(config: TrainConfig, steps: int, say: Say) -> tuple[list[tuple[float, float]], Run]:
    """Return learning rates and smoothed losses, up to where the loss explodes; and the run."""
    growth = math.log(_HIGHEST / _LOWEST) / (steps - 1)

    def rate_at(step: jax.Array) -> jax.Array:
        return _LOWEST * jax.numpy.exp(growth * step)

    run = build_run(_at_base(config, steps, rate_at))
    say(f"range test: {steps} steps from a learning rate of {_LOWEST:g} to {_HIGHEST:g}")
    state = run.init()
    losses: list[float] = []
    curve: list[tuple[float, float]] = []
    with naming("config", TrainConfig):
        for step, batch in enumerate(train_iterator(run.batches, 0)):
            state, found = run.train_step(state, put_batch(run.mesh, batch))
            losses.append(float(means([jax.device_get(found)])["loss"]))
            smoothed = _smoothed(losses, decay=1 - _SMOOTHING / steps)
            if not math.isfinite(smoothed) or smoothed > 4 * max(curve[:1] or [(0, smoothed)])[1]:
                break
            curve.append((_LOWEST * math.exp(growth * step), smoothed))
    fix = "the loss is not finite at the first step; check data, model and loss"
    require(curve, "model", config.model.name, fix)
    return curve, run


def _smoothed(losses: Sequence[float], decay: float) -> float:
    """Return the exponential mean of the losses at the last of them."""
    weights = decay ** np.arange(len(losses))[::-1]
    return float(np.sum(weights * losses) / np.sum(weights))


def _trials(config: TrainConfig, rate: float, steps: int, examples: int) -> list[FinishedTrial]:
    """Run the trials around a learning rate, and the best of them once more with probes."""
    unit = _WARMUPS[1]
    schedule = ScheduleConfig(
        rate,
        base_batch_size=config.schedule.base_batch_size,
        scaling_rule="none",
        warmup_steps=unit * steps,
        decay="constant",
    )

    part = max(1, min(_PART_SIZE, examples // _PARTS))
    study = SweepConfig(
        name="suggest",
        train=_at_base(config, steps, ScheduleConfig()),
        arms=(Arm("suggest", config.optimizer, schedule),),
        global_batch_sizes=(config.schedule.base_batch_size,),
        search=SearchConfig(
            learning_rate_factors=_FACTORS,
            warmup_factors=tuple(one / unit for one in _WARMUPS),
            widen_candidates=0,
        ),
        final_seeds=(1,),
        measure=MeasureConfig(
            distance=False, num_probes=4, probe_parts=_PARTS, probe_part_size=part
        ),
    )
    study.validate()
    with tempfile.TemporaryDirectory(prefix="lbopt-suggest-") as folder:
        cells = make_cells(study, make_problems(study))
        records = run_sweep(study, cells, pathlib.Path(folder))
    found = [finished_trial(record) for record in records]
    return sorted(found, key=lambda one: (one.learning_rate, one.warmup_steps))


def _best(trials: Sequence[FinishedTrial]) -> FinishedTrial:
    """Return the best trial; of those that do alike, the one with the shortest warmup."""
    finished = [
        one
        for one in trials
        if not one.is_final and not one.diverged and one.validation_loss is not None
    ]
    if not finished:
        fix = "every trial diverged; check data, model and loss"
        raise UserError("schedule.base_learning_rate", reason=fix)
    lowest = min(one.validation_loss or 0.0 for one in finished)
    alike = [
        one for one in finished if (one.validation_loss or 0.0) <= lowest + _ALIKE * abs(lowest)
    ]
    return min(alike, key=lambda one: (one.warmup_steps, one.validation_loss))


def _noise_of(trials: Sequence[FinishedTrial]) -> float | None:
    """Return the noise scale at the end of the final trial; None if it is not measurable."""
    probes = [one.probes for one in trials if one.is_final and one.probes is not None]
    scales = [scale for _, scale in noise_scales(probes)]
    return scales[-1] if scales and math.isfinite(scales[-1]) else None


def _largest_batch(noise: float, base: int, examples: int) -> int:
    """Return the largest doubling of the base batch that should still help.

    With a noise scale of n, the steps shrink from batch B to 2 B by (1 + n / 2 B) / (1 + n / B),
    which is 4/5 at 2 B = 3 n.
    """
    doublings = max(0, math.floor(math.log2(max(_BEYOND * noise / base, 1.0))))
    return min(base * 2**doublings, examples)
