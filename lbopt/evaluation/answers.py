"""Exact match and F1 of the answers that a network gives to questions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from lbopt import types
from lbopt.data.batches import eval_batches
from lbopt.data.squad import answers
from lbopt.data.squad.features import EvaluationWindows
from lbopt.job import pulse
from lbopt.models import seam
from lbopt.parallel.mesh import local_parts, put_batch
from lbopt.parallel.state import TrainState

MAX_ANSWER_LENGTH = 30
"""In tokens: max_answer_length of google-research/bert, run_squad.py."""

_INPUTS = ("input_ids", "token_type_ids", "attention_mask")
Predict = Callable[[types.Params, types.ModelState, types.Batch], dict[str, jax.Array]]


class PredictStep(Protocol):
    """A compiled `Predict`, as `lbopt.make_eval_step` makes it of one (backend "jit")."""

    mesh: Mesh

    def __call__(self, *arguments: Any) -> Any:
        """Run on (params, model_state, global batch)."""


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
        outputs, _ = network.apply(params, model_state, question_inputs(batch), train=False)
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


def question_inputs(batch: types.Batch) -> dict[str, Any]:
    """Return what a network for questions reads of a batch."""
    return {name: batch[name] for name in _INPUTS}
