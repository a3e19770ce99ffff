"""BERT's two tasks: masked tokens, and whether a segment follows another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from lbopt import losses, metrics, types
from lbopt.config import LossConfig
from lbopt.data.from_config import Source
from lbopt.models import Model
from lbopt.recipes._task import Task, of_equal_odds, scored_task


def make(network: Model, source: Source, loss: LossConfig) -> Task:
    """Build the pre-training loss of a batch as `lbopt.data.text.MaskedLMDataset` makes it.

    With P predictions per example, weights w in {0, 1}, and M the mean number of predictions of an
    example in the data,

        loss of an example = sum_p w_p nll_p / M + nll of the next-sentence label

    and the loss of a batch is the mean over its examples.
    google-research/bert@eedf5716ce1268e56f0a50264a88cafad334ac61:run_pretraining.py divides the sum
    over the examples of one core by their number of predictions instead, and averages over cores.
    Both weight every masked token alike, and agree where examples have M predictions. But ratios of
    sums over slices of a batch do not average to the ratio of the whole. With the constant M they
    do, so that the gradient depends on neither devices nor microsteps.

    The metrics are `loss` (the mean over examples of the above), `accuracy` and `masked_lm_loss`
    (exact means over masked tokens), `next_sentence_accuracy` and `next_sentence_loss`. The last
    two are left out for data without `next_sentence_label`.

    Args:
      network: Network with outputs `prediction_logits` and `next_sentence_logits`.
      source: The data, which know M.
      loss: Ignored.
    """
    del loss

    def score(
        outputs: Mapping[str, jax.Array], batch: types.Batch
    ) -> tuple[jax.Array, types.Metrics]:
        """Return the loss of each example [batch], and all metrics."""
        present = batch.get("mask", jnp.ones(batch["input_ids"].shape[0], bool))
        labels = batch["masked_labels"]
        used = batch["masked_weights"] > 0
        # Metrics leave out the examples that pad the last batch of an evaluation.
        counted = used & present[:, None]

        tokens = losses.softmax_cross_entropy(outputs["prediction_logits"], labels)
        hits = jnp.argmax(outputs["prediction_logits"], -1) == labels
        each = jnp.sum(jnp.where(used, tokens, 0), -1) / source.mean_predictions

        found = {
            "accuracy": metrics.summed(hits, counted),
            "masked_lm_loss": metrics.summed(tokens, counted),
        }

        if "next_sentence_label" in batch:
            logits = outputs["next_sentence_logits"]
            label = batch["next_sentence_label"]
            following = losses.softmax_cross_entropy(logits, label)
            each = each + following
            pairs = metrics.classification(logits, label, following, present)
            found |= {f"next_sentence_{name}": pair for name, pair in pairs.items()}

        return each, {"loss": metrics.summed(each, present), **found}

    trivial = of_equal_odds(source.outputs)
    return scored_task(network, _whole_batch, score, "accuracy", trivial)


def _whole_batch(batch: types.Batch) -> Any:
    return batch
