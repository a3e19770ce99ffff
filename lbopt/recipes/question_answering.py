"""Questions whose answer is a stretch of the text that is given with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from lbopt import losses, metrics, types
from lbopt.config.loss import LossConfig
from lbopt.data.batches import eval_batches
from lbopt.data.squad import answers
from lbopt.data.squad.features import EvaluationWindows
from lbopt.job import pulse
from lbopt.models import seam
from lbopt.parallel import step as steps
from lbopt.parallel.mesh import local_parts, put_batch
from lbopt.parallel.state import TrainState
from lbopt.recipes.sources import Source
from lbopt.recipes.task import Evaluation, Task, batch_arguments

MAX_ANSWER_LENGTH = 30
"""In tokens: max_answer_length of google-research/bert, run_squad.py."""

_INPUTS = ("input_ids", "token_type_ids", "attention_mask")
Predict = Callable[[types.Params, types.ModelState, types.Batch], dict[str, jax.Array]]


class PredictStep(Protocol):
    """A compiled `Predict`, as `lbopt.make_eval_step` makes it of one (backend "jit")."""

    mesh: Mesh

    def __call__(self, *arguments: Any) -> Any:
        """Run on (params, model_state, global batch)."""


def make(network: seam.Model, source: Source, loss: LossConfig) -> Task:
    """Build the loss of a batch as `lbopt.data.squad.features` makes it.

        loss of an example = (nll of the answer's first token + nll of its last token) / 2

    both over all places of the sequence, padding too, as in google-research/bert (run_squad.py); the loss of a batch is the
    mean over its examples, which are windows and not questions. The metrics are `loss` and `accuracy` (both places right).

    Args:
      network: with `start_logits` and `end_logits` [batch, length].
      source: the data, for the longest answer.
      loss: not needed.
    """
    del loss

    def score(
        outputs: Mapping[str, jax.Array], batch: types.Batch
    ) -> tuple[jax.Array, types.Metrics]:
        """Return the loss of each example [batch], and all metrics."""
        pairs = [
            (outputs[f"{name}_logits"], batch[f"{name}_position"]) for name in ("start", "end")
        ]
        first, last = (losses.softmax_cross_entropy(logits, label) for logits, label in pairs)
        right_first, right_last = (jnp.argmax(logits, -1) == label for logits, label in pairs)
        each, present = (first + last) / 2, batch.get("mask")
        found = {
            "loss": metrics.summed(each, present),
            "accuracy": metrics.summed(right_first & right_last, present),
        }
        return each, found

    def loss_fn(params, model_state, batch, rng):
        outputs, new_model_state = network.apply(
            params, model_state, _inputs(batch), train=True, rng=rng
        )
        each, found = score(outputs, batch)
        return jnp.mean(each), (new_model_state, found)

    def metric_fn(params, model_state, batch):
        outputs, _ = network.apply(params, model_state, _inputs(batch), train=False)
        return score(outputs, batch)[1]

    def evaluator(mesh: Mesh, backend: str) -> Evaluation:
        del backend  # pmap would add positions up
        step = steps.make_eval_step(predict_fn(network, source.max_answer_length), mesh)  # type: ignore[arg-type]
        return Evaluation(step, evaluate_answers, batch_arguments)

    return Task(_inputs, loss_fn, metric_fn, evaluator, ("exact_match", "f1"))


def predict_fn(network: seam.Model, max_answer_length: int = MAX_ANSWER_LENGTH) -> Predict:
    """Build (params, model_state, batch) -> the best stretch of each window; see `best_span` for what that is.

    Args:
      network: see `make`.
      max_answer_length: tokens of an answer.

    Returns:
      A function of a batch of `EvaluationWindows` whose result has `score` [batch] fp32 and `start` and `end` [batch] int32.
    """

    def predict(
        params: types.Params, model_state: types.ModelState, batch: types.Batch
    ) -> dict[str, jax.Array]:
        outputs, _ = network.apply(params, model_state, _inputs(batch), train=False)
        logits = outputs["start_logits"], outputs["end_logits"]
        score, start, end = best_span(
            *logits, batch["may_start"], batch["may_end"], max_answer_length
        )
        return {"score": score, "start": start, "end": end}

    return predict


def best_span(
    start_logits: jax.Array,
    end_logits: jax.Array,
    may_start: jax.Array,
    may_end: jax.Array,
    max_answer_length: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the greatest start_logits[i] + end_logits[j] over i <= j < i + max_answer_length, and its i and j.

    Exact: google-research/bert (run_squad.py) only looks at the twenty greatest logits of either kind. Of equal sums the
    first i wins, and then the first j. Sums that are not numbers never win. Takes O(length) memory and
    O(length x max_answer_length) time an example.

    Args:
      start_logits: [batch, length].
      end_logits: [batch, length].
      may_start: [batch, length] bool or int, where i may be.
      may_end: [batch, length] bool or int, where j may be.
      max_answer_length: >= 1.

    Returns:
      score [batch] fp32, start [batch] int32, end [batch] int32; -inf, 0, 0 where nothing is allowed.
    """
    if max_answer_length < 1:
        raise ValueError(f"max_answer_length = {max_answer_length}: give a number >= 1")
    length = start_logits.shape[-1]
    first, may_start = start_logits.astype(jnp.float32), may_start.astype(bool)
    behind = ((0, 0), (0, max_answer_length - 1))
    last, may_end = (
        jnp.pad(end_logits.astype(jnp.float32), behind),
        jnp.pad(may_end.astype(bool), behind),
    )

    def widen(extra, best):
        scores, extras = best
        ends, allowed = (
            jax.lax.dynamic_slice_in_dim(x, extra, length, -1) for x in (last, may_end)
        )
        sums = jnp.where(may_start & allowed, first + ends, -jnp.inf)
        better = sums > scores
        return jnp.where(better, sums, scores), jnp.where(better, extra, extras)

    nothing = jnp.full_like(first, -jnp.inf), jnp.zeros(first.shape, jnp.int32)
    scores, extras = jax.lax.fori_loop(0, max_answer_length, widen, nothing)
    start = jnp.argmax(scores, -1).astype(jnp.int32)
    score, extra = (jnp.take_along_axis(x, start[:, None], -1)[:, 0] for x in (scores, extras))
    return score, start, start + extra


def evaluate_answers(
    predict_step: PredictStep, state: TrainState, dataset: EvaluationWindows, global_batch_size: int
) -> dict[str, float]:
    """Return `exact_match` and `f1` in percent over all questions of a data set.

    Args:
      predict_step: what `predict_fn` returns, compiled for a mesh; its results are of the global batch, in every process.
      state: parameters and model state to evaluate.
      dataset: of any size.
      global_batch_size: windows at a time, of any size; rounded up to a multiple of the devices.
    """
    mesh = predict_step.mesh
    batches = eval_batches(dataset, global_batch_size, mesh.size, local_parts(mesh))
    parts = [
        jax.device_get(predict_step(state.params, state.model_state, put_batch(mesh, batch)))
        for batch in pulse.beating(batches)
    ]
    scores, starts, ends = (  # padding is at the end
        np.concatenate([part[name] for part in parts])[: len(dataset)]
        for name in ("score", "start", "end")
    )
    return answers.score(answers.choose(dataset, scores, starts, ends), dataset.questions)


def _inputs(batch: types.Batch) -> Any:
    return {name: batch[name] for name in _INPUTS}
