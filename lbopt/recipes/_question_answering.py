"""Question answering: loss and metrics of answers that are spans of a given text."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lbopt import losses, metrics, types
from lbopt.config import LossConfig
from lbopt.data.from_config import Source
from lbopt.evaluation import (
    Evaluation,
    batch_arguments,
    evaluate_answers,
    predict_fn,
    question_inputs,
)
from lbopt.models import Model
from lbopt.parallel import make_eval_step
from lbopt.recipes._task import Task, scored_task


def make(network: Model, source: Source, loss: LossConfig) -> Task:
    """Build the loss of a batch as `lbopt.data.squad._features` makes it.

        loss of an example = (nll of the answer's first token + nll of its last token) / 2

    Both are over all positions of the sequence, padding too, as in
    google-research/bert@eedf5716ce1268e56f0a50264a88cafad334ac61:run_squad.py. The loss of a batch
    is the mean over its examples, which are windows and not questions. The metrics are `loss` and
    `accuracy` (both positions right).

    Args:
      network: Network with outputs `start_logits` and `end_logits` [batch, length].
      source: The data, which know the length of the longest answer.
      loss: Ignored.
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
        each = (first + last) / 2
        present = batch.get("mask")
        found = {
            "loss": metrics.summed(each, present),
            "accuracy": metrics.summed(right_first & right_last, present),
        }
        return each, found

    def evaluator(mesh: Mesh, backend: str) -> Evaluation:
        del backend  # pmap would sum the positions over replicas
        predict = predict_fn(network, source.max_answer_length)
        step = make_eval_step(predict, mesh)  # type: ignore[arg-type]
        return Evaluation(step, evaluate_answers, batch_arguments)

    task = scored_task(network, question_inputs, score, "exact_match", None)
    return task._replace(evaluator=evaluator, metric_names=("exact_match", "f1"))
