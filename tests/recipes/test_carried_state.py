"""A language model that reads a text from beginning to end and carries its state."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused

from lbopt.config import CheckpointConfig, DataConfig, ModelConfig, TrainConfig
from lbopt.data.from_config import Source, load_source
from lbopt.data.text import EvalTextStreams
from lbopt.models import from_linen, make_lstm_language_model
from lbopt.parallel import make_mesh
from lbopt.recipes import _build, _language_model

STREAMS = 8
LENGTH = 16


def config_of(**changes):
    config = TrainConfig(
        global_batch_size=STREAMS,
        num_steps=6,
        data=DataConfig("pydoc_lm", sequence_length=LENGTH, vocab_size=256, carry_state=True),
        model=ModelConfig("lstm_lm", size="small", width_coefficient=0.08),
        eval_global_batch_size=64,
        checkpoint=CheckpointConfig(best_metric="eval/loss"),
    )
    config.schedule.warmup_steps = 0
    config.schedule.base_learning_rate = 0.0
    config.optimizer.name = "momentum"
    for name, value in changes.items():
        setattr(config, name, value)
    return config


@pytest.fixture(scope="module")
def source():
    return load_source(config_of().data, STREAMS)


@pytest.fixture(scope="module")
def run():
    return _build.build_run(config_of())


def network_of(source):
    return make_lstm_language_model("small", vocab_size=source.outputs, hidden=16)


def nll(source, params, tokens, carry=None):
    """Return the loss of each token after the first, from one pass in fp32 on one device."""
    inputs = {"tokens": tokens[None, :-1]} | ({"carry": carry} if carry else {})
    logits = network_of(source).apply({"params": params}, inputs, train=False)["logits"][0]
    logits = np.asarray(logits, np.float64)
    log_p = logits - logits.max(-1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
    return -log_p[np.arange(len(tokens) - 1), tokens[1:]]


def test_a_step_goes_on_where_the_one_before_ended(run, source):
    """At learning rate 0, the losses of successive steps are those of one pass over the text."""
    state = run.init()
    # With the initial parameters the state carries little information.
    state = state.replace(params=jax.tree.map(lambda x: 8 * x, state.params))

    params = jax.device_get(state.params)
    batches = [run.batches[step] for step in range(3)]

    found = []
    for batch in batches:
        state, metrics = run.train_step(state, batch)
        total, count = jax.device_get(jax.block_until_ready(metrics))["loss"]
        found.append(total / count)

    wanted = np.zeros((STREAMS, 3 * LENGTH))
    for stream in range(STREAMS):
        tokens = np.concatenate(
            [batch["tokens"][stream] for batch in batches]
            + [batches[-1]["next_tokens"][stream, -1:]]
        )
        wanted[stream] = nll(source, params, tokens)
    wanted = wanted.reshape(STREAMS, 3, LENGTH).mean((0, 2))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)

    alone = np.mean(
        [
            nll(source, params, np.append(row, last))
            for row, last in zip(
                batches[1]["tokens"], batches[1]["next_tokens"][:, -1], strict=True
            )
        ]
    )
    assert abs(alone - wanted[1]) > 1e-4 * wanted[1]  # a separate window has another loss


def test_the_state_is_zero_where_a_pass_begins(run, source):
    steps = source.splits.train.num_steps
    batches = _build.TrainBatches(source.splits.train, 0, STREAMS, steps + 2)
    first = batches[0]
    again = batches[steps]
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
    assert first["is_first"].all()
    assert not batches[1]["is_first"].any()
    losses = []
    for extra in (0, 1):
        state = run.init()
        shifted = jax.tree.map(lambda x, extra=extra: x + extra, state.model_state)
        state = state.replace(model_state=shifted)
        _, metrics = jax.block_until_ready(run.train_step(state, first))
        losses.append(float(metrics["loss"][0]))
    assert losses[0] == losses[1]


def test_one_stream_scores_every_token_as_the_text_read_in_one_piece(source):
    tokens = np.asarray(source.splits.train.take(np.arange(40))["tokens"]).reshape(-1)[:517]
    network = from_linen(network_of(source))
    params, _ = network.init(jax.random.key(1), {"tokens": jnp.zeros((1, 4), jnp.int32)})
    task = _language_model.make(network, Source(source.splits, source.outputs, num_streams=1), None)
    evaluate = task.evaluator(make_mesh(1), "jit")

    class State:
        pass

    State.params = params
    found = evaluate(State, EvalTextStreams(tokens, LENGTH), 1)
    wanted = nll(source, params, tokens).mean()
    assert found["loss"] == pytest.approx(wanted, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(wanted), rel=1e-6)
    streams = EvalTextStreams(tokens, LENGTH)
    counted = sum(batch["token_mask"].sum() for batch in streams.batches(4))
    assert counted == 516


def test_streams_of_evaluation_cover_the_text_once():
    text = np.arange(100, dtype=np.int32)
    for streams in (1, 3, 4, 13, 40):
        seen = []
        rows = list(EvalTextStreams(text, 7).batches(streams))
        for batch in rows:
            assert batch["tokens"].shape == (streams, 7)
            assert np.all((batch["next_tokens"] == batch["tokens"] + 1)[batch["token_mask"]])
            seen += batch["tokens"][batch["token_mask"]].tolist()
        assert sorted(seen) == list(range(99))
        for before, after in itertools.pairwise(rows):
            full = before["token_mask"].all(1) & after["token_mask"].any(1)
            assert np.all(after["tokens"][full, 0] == before["tokens"][full, -1] + 1)


BAD = {
    "pmap": ({"parallel.backend": "pmap"}, "config.parallel.backend"),
    "microsteps": ({"parallel.num_microsteps": 2}, "config.parallel.num_microsteps"),
    "clip by replica": ({"optimizer.clip_stage": "replica"}, "config.optimizer.clip_stage"),
}


@pytest.mark.parametrize("name", BAD)
def test_only_a_whole_batch_has_the_state(name):
    changes, field = BAD[name]
    config = config_of()
    for path, value in changes.items():
        group, _, leaf = path.partition(".")
        setattr(getattr(config, group), leaf, value)
    with refused(field, code="conflict"):
        config.validate()
