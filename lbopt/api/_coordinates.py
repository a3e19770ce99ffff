"""`coordinate_check`: the sizes of activations over the width of a network."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from lbopt import types
from lbopt.api._problem import Problem, in_python, train_config
from lbopt.config import make_optimizer, step_options
from lbopt.data.from_config import load_source
from lbopt.errors import require
from lbopt.parallel import GradientClip, TrainState, make_mesh, make_train_step
from lbopt.recipes import check_size, make_problem
from lbopt.report import new_panels, tidy


@dataclasses.dataclass(frozen=True)
class CoordinateCheck:
    """Sizes of activations of the same network at several widths; a notebook shows its figure.

    Where numbers transfer over the width (muP), every line of `figure` is flat after every step, or
    falls towards 0 before the first one.

    Attributes:
      widths: Widths, rising.
      sizes: Name of an activation -> mean of its absolute values [widths, steps + 1]; the first
        column is before the first step.

    >>> import numpy as np
    >>> check = CoordinateCheck((64, 128), {"logits": np.array([[1.0, 1.0], [1.0, 2.0]])})
    >>> [round(slope, 6) + 0.0 for slope in check.slopes()["logits"]]
    [0.0, 1.0]
    """

    widths: tuple[float, ...]
    sizes: Mapping[str, np.ndarray]

    def slopes(self) -> dict[str, list[float]]:
        """Return the exponents p of size ~ width^p, for each activation before and after each step.

        They are fitted by least squares on logarithms.
        """
        log_widths = np.log(np.asarray(self.widths, float))

        def fitted(sizes: np.ndarray) -> list[float]:
            logs = np.log(np.maximum(sizes, np.finfo(np.float32).tiny))
            return [float(np.polyfit(log_widths, column, 1)[0]) for column in logs.T]

        return {name: fitted(np.asarray(sizes, float)) for name, sizes in self.sizes.items()}

    def figure(self, names: Sequence[str] | None = None) -> Any:
        """Draw the sizes over the width, one panel for each step; a matplotlib figure.

        Args:
          names: The activations to draw; None for all.
        """
        shown = {name: self.sizes[name] for name in names or self.sizes}
        steps = next(iter(shown.values())).shape[1]
        figure, (panels,) = new_panels(1, steps, 2.2 * steps + 1.8, 2.8, sharey=True)
        for step, panel in enumerate(panels):
            tidy(panel)
            for name, sizes in shown.items():
                panel.plot(self.widths, sizes[:, step], marker=".", label=name)
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_title(f"step {step}")

        panels[0].set_ylabel("mean absolute value")
        figure.supxlabel("width")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", fontsize="small")
        return figure

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.figure().savefig(picture)
        return picture.getvalue()


def coordinate_check(
    problems: Mapping[float, Problem],
    optimizer: Any = "adamw",
    learning_rate: float = 0.001,
    *,
    global_batch_size: int = 64,
    num_steps: int = 3,
    seed: int = 0,
) -> CoordinateCheck:
    """Train a network at several widths for a few steps, and measure its activations.

    All widths see the same batch in every step, at a constant learning rate.

    Args:
      problems: Width -> the problem with a network of lbopt of this width. For a model of your own,
        fill a `CoordinateCheck` yourself.
      optimizer: Name or `OptimizerConfig`, as in `run_training`.
      learning_rate: The learning rate; that of the base network where numbers are transferred.
      global_batch_size: Number of examples.
      num_steps: Number of steps.
      seed: Seed of the initial values and of what the loss draws.

    Raises:
      UserError: For fewer than two widths, or a network whose activations cannot be read.

    >>> import lbopt
    >>> from lbopt.config import ModelConfig
    >>> check = coordinate_check(  # doctest: +SKIP
    ...     {
    ...         width: lbopt.Problem("digits", ModelConfig("mlp", (width,), base_widths=(64,)))
    ...         for width in (64, 256, 1024)
    ...     }
    ... )
    >>> sorted(check.slopes())  # doctest: +SKIP
    ['Dense_0', 'head', 'output']

    References:
      Yang et al., Tensor Programs V, arXiv:2203.03466, appendix D.1.
    """
    require(len(problems) >= 2, "problems", len(problems), "give at least two widths")
    found = {}
    for width in sorted(problems):
        with in_python():
            config = train_config(
                problems[width],
                optimizer,
                learning_rate,
                global_batch_size=global_batch_size,
                num_steps=num_steps,
            )
            config.validate()
        fix = "no noise is measured here; leave it False"
        measures = config.optimizer.track_noise_scale
        require(not measures, "optimizer.track_noise_scale", True, fix, code="conflict")
        problem = make_problem(config.data, config.model, config.loss, 1, None, load_source)
        fix = "its activations cannot be read; give one of lbopt's own"
        readable = problem.activations is not None
        require(readable, f"problems[{width}]", problems[width], fix, code="type")
        check_size(problem, global_batch_size)
        tx = make_optimizer(
            config.optimizer,
            learning_rate,
            None,
            global_batch_size,
            problem.stacked,
            None,
            problem.known_roles,
            problem.transfer,
        )
        clip = step_options(config, problem.stacked).clip
        found[width] = _sizes(problem, tx, clip, global_batch_size, num_steps, seed)

    names = next(iter(found.values()))[0]
    sizes = {
        name: np.array([[step[name] for step in of_width] for of_width in found.values()])
        for name in names
    }
    return CoordinateCheck(tuple(found), sizes)


def _sizes(
    problem: Any,
    tx: optax.GradientTransformation,
    clip: GradientClip | None,
    global_batch_size: int,
    num_steps: int,
    seed: int,
) -> list[dict[str, float]]:
    """Return the sizes of all activations before the first step and after each."""
    step = make_train_step(problem.loss_fn, tx, make_mesh(1), clip=clip, donate=False)
    params, model_state = problem.init(jax.random.key(seed))
    state = TrainState.create(params, model_state, tx, seed)
    batch = problem.splits.train.take(np.arange(global_batch_size))

    @jax.jit
    def measured(params: types.Params, model_state: types.ModelState) -> dict[str, jax.Array]:
        kept = problem.activations(params, model_state, batch)
        return {name: abs(x.astype(np.float32)).mean() for name, x in kept.items()}

    def sizes_of(state: TrainState) -> dict[str, float]:
        found = measured(state.params, state.model_state)
        return {name: float(size) for name, size in found.items()}

    sizes = [sizes_of(state)]
    for _ in range(num_steps):
        state, _ = step(state, batch)
        sizes.append(sizes_of(state))
    return sizes
