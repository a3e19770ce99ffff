"""Language models: loss and metrics of the next token of a text."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from lbopt import losses, metrics, types
from lbopt.config import LossConfig
from lbopt.data.from_config import Source
from lbopt.evaluation import Evaluation, evaluate_streams, stream_arguments
from lbopt.models import Model
from lbopt.parallel import make_eval_step
from lbopt.recipes._task import Score, Task, of_equal_odds, scored_task

CARRY = "carry"
"""Key in the model's state of the `lbopt.models._lstm.Carry` after the text so far."""


def make(network: Model, source: Source, loss: LossConfig) -> Task:
    """Build the cross entropy of a batch with `tokens` and `next_tokens` [batch, length].

    Without `next_tokens` each token is followed by the next one of `tokens`. The model gives
    logits, or a dict with `logits`.

    It is the mean over all tokens. All windows of training are full, so the mean over tokens is the
    mean over examples. The metrics are `loss` (in nats per token), `perplexity` (the exponential of
    the mean loss of all tokens) and `accuracy`. In evaluation only the tokens count where `mask`
    [batch] and `token_mask` [batch, length] are True, if they are given.

    With the bytes of each token, `source.token_bytes`, there are `bits_per_byte`, the sum of all
    losses in bits over the number of bytes of all predicted tokens, and `perplexity_per_byte`, two
    to that power. The loss of an end of a document counts, which has no bytes.

    With a source of streams the state is carried from batch to batch, in training and in
    evaluation, without gradients (truncated back-propagation through time). Otherwise every window
    begins with an empty state.
    """
    del loss
    judged = "perplexity", of_equal_odds(source.outputs)
    score = functools.partial(_score, source.token_bytes)
    if source.num_streams:
        return _carried(network, score, source.num_streams, *judged)

    return scored_task(network, _inputs, score, *judged)


def _inputs(batch: types.Batch) -> Any:
    tokens = batch["tokens"]
    return {"tokens": tokens if "next_tokens" in batch else tokens[:, :-1]}


def _score(
    token_bytes: np.ndarray | None, outputs: Any, batch: types.Batch
) -> tuple[jax.Array, types.Metrics]:
    """Return the loss of each token [batch, length], and all metrics."""
    logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs
    labels = batch["next_tokens"] if "next_tokens" in batch else batch["tokens"][:, 1:]
    each = losses.softmax_cross_entropy(logits, labels)
    counted = batch.get("token_mask")
    if "mask" in batch:
        of_examples = jnp.broadcast_to(batch["mask"][:, None], labels.shape)
        counted = of_examples if counted is None else counted & of_examples
    pairs = metrics.classification(logits, labels, each, counted)
    found = {**pairs, "perplexity": pairs["loss"]}
    if token_bytes is not None:
        total, _ = pairs["loss"]
        num_bytes, _ = metrics.summed(jnp.asarray(token_bytes)[labels], counted)
        found["bits_per_byte"] = (total / math.log(2), num_bytes)
        found["perplexity_per_byte"] = (total, num_bytes)
    return each, found


def _carried(
    network: Model, score: Score, num_streams: int, main_metric: str, trivial_loss: float | None
) -> Task:
    def carried_on(params, model_state, batch, **options):
        """Return logits and new state of a batch that continues the text of the last batch."""
        # A new pass over the text starts from an empty state.
        begins = batch["is_first"][:, None]
        carry = jax.tree.map(lambda x: jnp.where(begins, 0, x), model_state[CARRY])
        outputs, _ = network.apply(params, {}, {**_inputs(batch), CARRY: carry}, **options)
        return outputs["logits"], {CARRY: jax.lax.stop_gradient(outputs[CARRY])}

    def loss_fn(params, model_state, batch, rng):
        logits, new_model_state = carried_on(params, model_state, batch, train=True, rng=rng)
        each, found = score(logits, batch)
        return jnp.mean(each), (new_model_state, found)

    def metric_fn(params, model_state, batch):
        carry = _zeros(network, params, batch["tokens"].shape[0])
        return score(carried_on(params, carry, batch, train=False)[0], batch)[1]

    def scored(params, model_state, batch):
        logits, carried = carried_on(params, model_state, batch, train=False)
        return score(logits, batch)[1], carried

    def evaluator(mesh: Mesh, backend: str) -> Evaluation:
        del backend  # the config allows a carried state under "jit" only
        first_carry = functools.partial(_zeros, network)
        return Evaluation(
            make_eval_step(scored, mesh),
            functools.partial(evaluate_streams, first_carry),
            functools.partial(stream_arguments, first_carry),
        )

    def first_state(params: types.Params) -> types.ModelState:
        return _zeros(network, params, num_streams)

    return Task(
        _inputs,
        loss_fn,
        metric_fn,
        evaluator,
        first_state=first_state,
        main_metric=main_metric,
        trivial_loss=trivial_loss,
    )


def _zeros(network: Model, params: types.Params, num_streams: int) -> dict[str, Any]:
    """Return the state before any text."""
    tokens = {"tokens": jnp.zeros((num_streams, 1), jnp.int32)}
    shapes = jax.eval_shape(
        lambda params: network.apply(params, {}, tokens, train=False)[0][CARRY], params
    )
    return {CARRY: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)}
