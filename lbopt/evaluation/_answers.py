"""The evaluation of a network that answers questions (SQuAD)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from lbopt import types
from lbopt.data import eval_batches
from lbopt.data.squad import EvaluationWindows, check_answer_length
from lbopt.evaluation._squad_metrics import choose_answers, score_answers
from lbopt.job import beating
from lbopt.models import Model
from lbopt.parallel import TrainState, local_parts, put_batch

MAX_ANSWER_LENGTH = 30
"""Longest answer in tokens: `max_answer_length` of
google-research/bert@eedf5716ce1268e56f0a50264a88cafad334ac61:run_squad.py."""

_INPUTS = ("input_ids", "token_type_ids", "attention_mask")
Predict = Callable[[types.Params, types.ModelState, types.Batch], dict[str, jax.Array]]


class PredictStep(Protocol):
    """A compiled `Predict`, from `lbopt.make_eval_step` with backend "jit"."""

    mesh: Mesh

    def __call__(self, *arguments: Any) -> Any:
        """Return the predictions for the arguments (params, model_state, global batch)."""


def predict_fn(network: Model, max_answer_length: int = MAX_ANSWER_LENGTH) -> Predict:
    """Build a function of (params, model_state, batch) that predicts the best span of each window.

    Args:
      network: A model with outputs `start_logits` and `end_logits`, [batch, length].
      max_answer_length: Longest answer in tokens, at least 1.

    Returns:
      A function of parameters, model state and a batch of `EvaluationWindows`, whose result has
      `score` [batch] fp32, and `start` and `end` [batch] int32; see `best_span`.
    """

    def predict(
        params: types.Params, model_state: types.ModelState, batch: types.Batch
    ) -> dict[str, jax.Array]:
        outputs, _ = network.apply(params, model_state, question_inputs(batch), train=False)
        score, start, end = best_span(
            outputs["start_logits"],
            outputs["end_logits"],
            batch["may_start"],
            batch["may_end"],
            max_answer_length,
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
    """Return the greatest start_logits[i] + end_logits[j] over i <= j < i + max_answer_length.

    The search is exact; google-research/bert@eedf5716ce1268e56f0a50264a88cafad334ac61:run_squad.py
    considers only the twenty greatest logits of each kind. Of equal sums the first i wins, and then
    the first j. A sum that is not a number never wins. An example takes O(length) memory and
    O(length x max_answer_length) time.

    Args:
      start_logits: Logits of the first token of an answer, [batch, length].
      end_logits: Logits of the last token of an answer, [batch, length].
      may_start: Whether an answer may start at a token, [batch, length] bool or int.
      may_end: Whether an answer may end at a token, [batch, length] bool or int.
      max_answer_length: Longest answer in tokens, at least 1.

    Returns:
      The greatest sum [batch] fp32, its i [batch] int32 and its j [batch] int32; -inf, 0 and 0
      where no answer is allowed.

    Raises:
      UserError: If `max_answer_length` is less than 1.
    """
    check_answer_length(max_answer_length)
    length = start_logits.shape[-1]
    starts = start_logits.astype(jnp.float32)
    may_start = may_start.astype(bool)

    # The padding lets every shifted slice have the full length.
    padding = ((0, 0), (0, max_answer_length - 1))
    padded_ends = jnp.pad(end_logits.astype(jnp.float32), padding)
    padded_may_end = jnp.pad(may_end.astype(bool), padding)

    def widen(extra, best):
        """Compare the best spans with those of `extra` tokens after the first."""
        scores, extras = best
        ends, allowed = (
            jax.lax.dynamic_slice_in_dim(x, extra, length, -1)
            for x in (padded_ends, padded_may_end)
        )
        sums = jnp.where(may_start & allowed, starts + ends, -jnp.inf)
        better = sums > scores
        return jnp.where(better, sums, scores), jnp.where(better, extra, extras)

    nothing = (jnp.full_like(starts, -jnp.inf), jnp.zeros(starts.shape, jnp.int32))
    scores, extras = jax.lax.fori_loop(0, max_answer_length, widen, nothing)
    start = jnp.argmax(scores, -1).astype(jnp.int32)
    score, extra = (jnp.take_along_axis(x, start[:, None], -1)[:, 0] for x in (scores, extras))
    return score, start, start + extra


def evaluate_answers(
    predict_step: PredictStep, state: TrainState, dataset: EvaluationWindows, global_batch_size: int
) -> dict[str, float]:
    """Return `exact_match` and `f1` in percent over all questions of a data set.

    Args:
      predict_step: A function of `predict_fn`, compiled for a mesh. Every process gets its results
        for the whole global batch.
      state: The parameters and model state to evaluate.
      dataset: The windows of all questions; their number may be any.
      global_batch_size: Number of windows in a step, rounded up to a multiple of the devices.
    """
    mesh = predict_step.mesh
    batches = eval_batches(dataset, global_batch_size, mesh.size, local_parts(mesh))
    results = [
        jax.device_get(predict_step(state.params, state.model_state, put_batch(mesh, batch)))
        for batch in beating(batches)
    ]
    scores, starts, ends = (  # without the padding, which is at the end
        np.concatenate([result[name] for result in results])[: len(dataset)]
        for name in ("score", "start", "end")
    )
    return score_answers(choose_answers(dataset, scores, starts, ends), dataset.questions)


def question_inputs(batch: types.Batch) -> dict[str, Any]:
    """Return the inputs of a network for questions from a batch."""
    return {name: batch[name] for name in _INPUTS}
