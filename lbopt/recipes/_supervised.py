"""Tasks of your own data: losses and metrics of several labels, of numbers, and of your own."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lbopt import _user_code, metrics, types
from lbopt.config import LossConfig
from lbopt.data.from_config import Source
from lbopt.errors import UserError, require
from lbopt.models import Model
from lbopt.recipes._task import Task, scored_task


def inputs_of(source: Source, batch: types.Batch) -> Any:
    """Return the model's input: the only feature of a batch, or a dict of several by name."""
    found = {name: batch[name] for name in source.features}
    return next(iter(found.values())) if len(found) == 1 else found


def make_multi_label(network: Model, source: Source, loss: LossConfig) -> Task:
    """Build the binary cross entropy of [batch, labels], the mean over labels.

    The metrics are `loss`, `accuracy` (share of right labels) and `exact_match` (all labels right).
    """
    del loss

    def score(outputs: jax.Array, batch: types.Batch) -> tuple[jax.Array, types.Metrics]:
        logits = outputs.astype(jnp.float32)
        labels = batch[source.target]
        right = (logits > 0) == (labels > 0)
        each = jnp.mean(optax.losses.sigmoid_binary_cross_entropy(logits, labels), -1)
        mask = batch.get("mask")
        return each, {
            "loss": metrics.summed(each, mask),
            "accuracy": metrics.summed(jnp.mean(right, -1), mask),
            "exact_match": metrics.summed(jnp.all(right, -1), mask),
        }

    inputs = functools.partial(inputs_of, source)
    return scored_task(network, inputs, score, "accuracy", math.log(2))


def make_regression(network: Model, source: Source, loss: LossConfig) -> Task:
    """Build the mean squared error of [batch] or [batch, numbers], the mean over numbers.

    The metrics are `loss`, `mean_absolute_error` and `r2`: 1 minus the loss over the variance of
    the training targets.
    """
    del loss

    def score(outputs: jax.Array, batch: types.Batch) -> tuple[jax.Array, types.Metrics]:
        wanted = batch[source.target].astype(jnp.float32)
        errors = (outputs.astype(jnp.float32).reshape(wanted.shape) - wanted).reshape(
            len(wanted), -1
        )
        each = jnp.mean(jnp.square(errors), -1)
        mask = batch.get("mask")
        return each, {
            "loss": metrics.summed(each, mask),
            "mean_absolute_error": metrics.summed(jnp.mean(jnp.abs(errors), -1), mask),
            "r2": metrics.summed(1 - each / source.target_variance, mask),
        }

    inputs = functools.partial(inputs_of, source)
    return scored_task(network, inputs, score, "r2", source.target_variance)


def with_own_loss(
    task: Task,
    network: Model,
    loss: LossConfig,
    source: Source | None = None,
    outputs: Any = None,
) -> Task:
    """Return a task with the user's loss, and its metrics beside those of the task.

    The function is called as `loss(outputs, batch)`, with the model's outputs and the arrays of a
    batch by name. It returns the loss of each example [batch], or (sum over the batch, weight); and
    perhaps, as a second result, a dict of metrics in these forms by name. Evaluation calls it with
    one example at a time, so that every example counts exactly once.

    Args:
      task: The task, whose metrics of evaluation stay if the outputs fit them.
      network: The model.
      loss: Config of the loss, with a place.
      source: The data; None for those of lbopt, which fit.
      outputs: Shapes of the model's outputs for one example.
    """
    fix = "these data have an evaluation or a state of their own; leave it ''"
    plain = task.evaluator is None and task.first_state is None
    require(plain, "loss.name", loss.name, fix, code="conflict")

    keeps = source is None or _misfit(source, outputs) is None
    function = functools.partial(_user_code.load(loss.name, "loss.name"), **loss.options)

    def called(outputs: Any, batch: types.Batch) -> tuple[Any, types.Metrics]:
        with _user_code.naming_errors("loss.name", loss.name):
            result = function(outputs, {name: x for name, x in batch.items() if name != "mask"})
        return _pairs(result, loss.name)

    def loss_fn(params, model_state, batch, rng):
        outputs, new_model_state = network.apply(
            params, model_state, task.inputs(batch), train=True, rng=rng
        )
        pair, found = called(outputs, batch)
        return pair, (new_model_state, {"loss": pair, **found})

    def of_example(outputs: Any, example: types.Batch) -> types.Metrics:
        alone = jax.tree.map(lambda x: x[None], (outputs, example))
        pair, found = called(*alone)
        return {"loss": pair, **found}

    def metric_fn(params, model_state, batch):
        outputs, _ = network.apply(params, model_state, task.inputs(batch), train=False)
        each = jax.vmap(of_example)(outputs, dict(batch))
        mask = batch["mask"]
        kept = task.metric_fn(params, model_state, batch) if keeps else {}
        return kept | {
            name: (jnp.sum(jnp.where(mask, total, 0)), jnp.sum(jnp.where(mask, weight, 0)))
            for name, (total, weight) in each.items()
        }

    # Nothing is known of the user's loss: neither its scale nor that of equal odds.
    main_metric = task.main_metric if keeps else "loss"
    return Task(task.inputs, loss_fn, metric_fn, main_metric=main_metric)


def _pairs(result: Any, place: str) -> tuple[types.Loss, types.Metrics]:
    """Return the (sum, weight) of a loss, and those of its metrics."""
    found: Mapping[str, Any] = {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        result, found = result
    return _pair(result, "the loss", place), {
        name: _pair(value, f"metric {name!r}", place) for name, value in found.items()
    }


def _pair(value: Any, what: str, place: str) -> tuple[jax.Array, jax.Array]:
    fix = f"{what} is no array of the examples and no (sum, weight); return one of the two"
    if isinstance(value, tuple):
        fits = len(value) == 2 and all(jnp.ndim(number) == 0 for number in value)
        require(fits, "loss.name", place, fix, code="type")
        total, weight = (jnp.asarray(number, jnp.float32) for number in value)
        return total, weight
    if not hasattr(value, "shape") or jnp.ndim(value) != 1:
        raise UserError("loss.name", place, fix, code="type")
    each = jnp.asarray(value, jnp.float32)
    return jnp.sum(each), jnp.float32(len(each))


def check_outputs(source: Source, outputs: Any, model: str) -> None:
    """Raise `UserError` if a model's outputs do not fit the loss of the task.

    Args:
      source: The data.
      outputs: Shapes of the outputs for one example.
      model: Name of the model, for the message.
    """
    misfit = _misfit(source, outputs)
    if misfit is not None:
        fix = f"{misfit}; correct it, or give {{loss}}"
        also = {"loss": "loss.name"}
        raise UserError("model.name", model, fix, code="mismatch", also=also)


def _misfit(source: Source, outputs: Any) -> str | None:
    """Return why a model's outputs do not fit the loss of the task; None if they do."""
    shape = getattr(outputs, "shape", None)
    needed = {
        "classification": ((1, source.outputs), f"the {source.outputs} classes"),
        "multi_label": ((1, source.outputs), f"the {source.outputs} labels"),
        "regression": ((1, source.outputs), f"the {source.outputs} numbers"),
    }
    if source.task not in needed:
        return None
    wanted, what = needed[source.task]
    if shape == wanted or (source.task == "regression" and wanted == (1, 1) and shape == (1,)):
        return None
    found = f"a {type(outputs).__name__}" if shape is None else str(list(shape))
    return f"it gives {found} for one example, and {what} need {list(wanted)}"
