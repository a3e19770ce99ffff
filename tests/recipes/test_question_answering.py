"""The loss against NumPy, the best span against all spans, and answers under any batching."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusal import refused

import lbopt
from lbopt import metrics
from lbopt.config import LossConfig
from lbopt.data import Splits
from lbopt.data.from_config import Source
from lbopt.data.squad import EvaluationWindows, Question
from lbopt.data.text import WordPiece
from lbopt.data.text._pieces import SPECIAL_TOKENS
from lbopt.evaluation import evaluate_answers, predict_fn
from lbopt.evaluation._answers import best_span
from lbopt.models import Bert, Model, from_linen
from lbopt.recipes import _question_answering

BATCH = 6
LENGTH = 9
KEYS: list = []


def recall(params, model_state, inputs, train, rng=None):
    """A model whose parameters are its outputs, indexed by the examples' first token."""
    KEYS.append((rng, sorted(inputs)))
    return {name: value[inputs["input_ids"][:, 0]] for name, value in params.items()}, model_state


@pytest.fixture
def params():
    random = np.random.default_rng(1)
    names = ("start_logits", "end_logits")
    return {name: random.normal(size=(BATCH, LENGTH)).astype(np.float32) for name in names}


@pytest.fixture
def batch(params):
    """Return a batch; half of its labels are at the largest logits."""
    random = np.random.default_rng(0)
    found = {
        f"{name}_position": random.integers(0, LENGTH, BATCH).astype(np.int32)
        for name in ("start", "end")
    }
    found["start_position"][:4] = params["start_logits"][:4].argmax(-1)
    found["end_position"][2:] = params["end_logits"][2:].argmax(-1)
    ids = np.tile(np.arange(BATCH)[:, None], (1, LENGTH))
    return {"input_ids": ids, "token_type_ids": ids * 0, "attention_mask": ids * 0 + 1, **found}


@pytest.fixture
def task():
    return _question_answering.make(
        Model(None, recall), Source(Splits(None, None, None), 0), LossConfig()
    )


def expected(params, batch, rows):
    """Return loss and accuracy of some examples by their definitions."""
    each = np.zeros(len(rows))
    right = np.ones(len(rows), bool)
    for name in ("start", "end"):
        logits = params[f"{name}_logits"][rows].astype(np.float64)
        place = batch[f"{name}_position"][rows]
        p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        each -= np.log(p[np.arange(len(rows)), place]) / 2
        right &= logits.argmax(-1) == place
    return {"loss": each.mean(), "accuracy": right.mean()}


def test_loss_and_metrics_by_their_definition(task, params, batch):
    key = jax.random.key(7)
    loss, (state, found) = task.loss_fn(params, {"a": 1}, batch, key)
    wanted = expected(params, batch, np.arange(BATCH))
    assert float(loss) == pytest.approx(wanted["loss"], rel=1e-6)
    assert 0 < wanted["accuracy"] < 1
    assert metrics.means([jax.device_get(found)]) == pytest.approx(wanted, rel=1e-6)
    assert state == {"a": 1}
    assert KEYS[-1] == (key, ["attention_mask", "input_ids", "token_type_ids"])


def test_padding_counts_nowhere(task, params, batch):
    rows = np.asarray([0, 1, 3, 4])
    params["start_logits"][2] = np.nan
    padded = {**batch, "mask": np.isin(np.arange(BATCH), rows)}
    found = metrics.means([jax.device_get(task.metric_fn(params, {}, padded))])
    assert found == pytest.approx(expected(params, batch, rows), rel=1e-6)


def test_parts_of_the_batch_average_to_the_whole(task, params, batch):
    def loss(part):
        return float(task.loss_fn(params, {}, part, jax.random.key(0))[0])

    halves = [loss({name: array[first::2] for name, array in batch.items()}) for first in range(2)]
    assert loss(batch) == pytest.approx(np.mean(halves), rel=1e-6)


def all_spans(start_logits, end_logits, may_start, may_end, longest):
    """Try every span of one window in order; the first of equal sums wins."""
    best = (np.float32(-np.inf), 0, 0)
    for i in np.flatnonzero(may_start):
        for j in np.flatnonzero(may_end):
            total = start_logits[i] + end_logits[j]
            if i <= j < i + longest and total > best[0]:
                best = (total, i, j)
    return best


def draw_windows(kind, count, length):
    """Return (start_logits, end_logits, may_start, may_end); small integers make many ties."""
    random = np.random.default_rng(length)
    logits = random.normal(0, 3, (2, count, length)).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits / 3)
    may_end = random.random((count, length)) < random.random((count, 1))
    may_start = random.random((count, length)) < random.random((count, 1))
    may_start[:3] = False
    return (*logits, may_start.astype(np.int32), may_end.astype(np.int32))


@pytest.mark.parametrize("longest", [1, 2, 5, 30])
@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_the_best_span_of_all(kind, longest):
    """Answers may be longer than the window; the sums must be equal bit for bit."""
    for length in (1, 13, 40):
        windows = draw_windows(kind, 60, length)
        score, start, end = jax.jit(best_span, static_argnums=4)(*windows, longest)
        assert (score.dtype, start.dtype, end.dtype) == (jnp.float32, jnp.int32, jnp.int32)
        wanted = [all_spans(*window, longest) for window in zip(*windows, strict=True)]
        for ours, theirs in zip((score, start, end), zip(*wanted, strict=True), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert np.isneginf(score[:3]).all()
        assert np.isfinite(score).any()


def test_only_the_start_needs_most_context():
    """The best pair ends at a token that cannot start; a better one exceeds the longest answer."""
    start = np.zeros((1, 8), np.float32)
    end = np.arange(8, dtype=np.float32)[None]
    may_start = np.asarray([[0, 1, 1, 0, 0, 0, 0, 0]])
    may_end = np.asarray([[0, 1, 1, 1, 1, 1, 1, 0]])
    found = [float(one[0]) for one in best_span(start, end, may_start, may_end, 3)]
    assert found == [4.0, 2.0, 4.0]


def test_spans_that_are_not_allowed_are_no_answer():
    logits = np.full((2, 4), 9, np.float32)
    none = np.zeros((2, 4), np.int32)
    score, start, end = best_span(logits, logits, none, none + 1, 30)
    assert np.isneginf(score).all()
    assert not start.any()
    assert not end.any()
    broken = np.full((2, 4), np.nan, np.float32)
    assert np.isneginf(best_span(broken, logits, none + 1, none + 1, 30)[0]).all()
    with refused("max_answer_length", 0, "value"):
        best_span(logits, logits, none, none, 0)


def test_sums_are_in_fp32():
    """bf16 cannot represent 257."""
    logits = jnp.full((1, 2), 128.5, jnp.float32)
    allowed = np.ones((1, 2), bool)
    score, _, _ = best_span(
        logits.at[0, 1].set(-1), jnp.full((1, 2), 128, jnp.bfloat16), allowed, allowed, 30
    )
    assert float(score[0]) == 256.5
    assert score.dtype == jnp.float32


def test_the_working_memory_is_a_few_arrays():
    """A table of all spans of a window would take thirty such arrays."""
    shapes = [
        jax.ShapeDtypeStruct((16, 384), dtype) for dtype in ("float32", "float32", "int32", "int32")
    ]
    compiled = jax.jit(best_span, static_argnums=4).lower(*shapes, 30).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 10 * 16 * 384 * 4


NAMES = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


@pytest.fixture(scope="module")
def dataset():
    """Return 23 questions with contexts of one to ten words, in windows of at most five."""
    random = np.random.default_rng(3)
    pieces = WordPiece([*SPECIAL_TOKENS, *NAMES, "q"])
    questions = []
    for number in range(23):
        words = random.permutation(NAMES)[: random.integers(1, 11)].tolist()
        answer = words[random.integers(len(words))]
        context = "  ".join(words).title()
        questions.append(
            Question(str(number), "q", context, (answer,), (context.lower().index(answer),))
        )
    return EvaluationWindows(questions, pieces, sequence_length=9, doc_stride=2)


class Gold:
    """A step that knows the answers, and records the sizes of its batches."""

    def __init__(self, devices):
        self.mesh = lbopt.make_mesh(devices)
        self.sizes = []

    def __call__(self, params, model_state, batch):
        batch = jax.device_get(batch)
        self.sizes.append(len(batch["mask"]))
        start = batch["start_position"]
        end = batch["end_position"]
        own = np.take_along_axis(batch["may_start"], start[:, None], 1)[:, 0] > 0
        score = np.where(own & batch["mask"], np.float32(0), -np.inf)
        return {"score": np.where(batch["mask"], score, 99), "start": start, "end": end}


STATE = lbopt.TrainState.create({}, {}, optax.sgd(0.1))


@pytest.mark.parametrize(("devices", "size"), [(1, 1), (1, 7), (4, 7), (4, 1000)])
def test_answers_that_are_all_right(dataset, devices, size):
    """Padding scores best but is no answer; gold answers are lower-case, the context is not."""
    questions = [
        one._replace(answers=(one.context[s : s + len(one.answers[0])],))
        for one in dataset.questions
        for s in one.answer_starts
    ]
    gold = EvaluationWindows(
        questions, WordPiece([*SPECIAL_TOKENS, *NAMES, "q"]), sequence_length=9, doc_stride=2
    )
    step = Gold(devices)
    assert evaluate_answers(step, STATE, gold, size) == {"exact_match": 100.0, "f1": 100.0}
    assert len(set(step.sizes)) == 1
    assert step.sizes[0] % devices == 0
    assert sum(step.sizes) >= len(gold)


def test_answers_of_bert_do_not_depend_on_the_batch(dataset):
    """Answers do not depend on devices either, and equal NumPy's best spans of the same logits."""
    options = {"max_length": 9, "num_layers": 1, "width": 8, "num_heads": 2, "dropout_rate": 0.0}
    network = from_linen(
        Bert(vocab_size=16, head="question_answering", attention_dropout_rate=0.0, **options)
    )

    task = _question_answering.make(network, Source(Splits(None, None, None), 16), LossConfig())
    everything = dataset.take(np.arange(len(dataset)))
    params, model_state = jax.jit(network.init)(jax.random.key(0), task.inputs(everything))
    params = jax.tree.map(
        lambda x: x + 0.5 * jax.random.normal(jax.random.key(x.size), x.shape), params
    )
    state = lbopt.TrainState.create(params, model_state, optax.sgd(0.1))

    found = [
        evaluate_answers(
            lbopt.make_eval_step(predict_fn(network, 3), lbopt.make_mesh(devices)),
            state,
            dataset,
            size,
        )
        for devices, size in ((1, 1000), (4, 7))
    ]

    apply = jax.jit(network.apply, static_argnames="train")
    outputs = jax.device_get(apply(params, model_state, task.inputs(everything), train=False)[0])
    wanted = by_all_spans(dataset, everything, outputs)
    assert found == [wanted] * 2
    assert 0 < found[0]["exact_match"] < 100


def by_all_spans(dataset, everything, outputs):
    """Answers are words of the context here, so both metrics need no normalisation."""
    names = ("start_logits", "end_logits")
    rows = zip(
        *(outputs[name] for name in names),
        everything["may_start"],
        everything["may_end"],
        strict=True,
    )

    spans = [all_spans(*row, 3) for row in rows]
    same = 0
    overlap = 0.0

    for number, question in enumerate(dataset.questions):
        windows = np.flatnonzero(dataset.question_of == number)
        best = max(windows, key=lambda window: spans[window][0])
        ids = everything["input_ids"][best][spans[best][1] : spans[best][2] + 1]
        words = [NAMES[piece - len(SPECIAL_TOKENS)] for piece in ids]
        same += words == list(question.answers)
        overlap += 2 / (1 + len(words)) * (question.answers[0] in words)

    count = len(dataset.questions)
    return {
        "exact_match": pytest.approx(100 * same / count),
        "f1": pytest.approx(100 * overlap / count),
    }


def test_a_step_of_training_lowers_the_loss(dataset):
    """BERT learns the answers of a few windows."""
    options = {"max_length": 9, "num_layers": 1, "width": 16, "num_heads": 2, "dropout_rate": 0.0}
    network = from_linen(
        Bert(vocab_size=16, head="question_answering", attention_dropout_rate=0.0, **options)
    )
    task = _question_answering.make(network, Source(Splits(None, None, None), 16), LossConfig())
    batch = dataset.take(np.arange(16))
    params, model_state = jax.jit(network.init)(jax.random.key(0), task.inputs(batch))
    tx = optax.adam(0.01)
    step = lbopt.make_train_step(task.loss_fn, tx, lbopt.make_mesh(1))
    state = lbopt.TrainState.create(params, model_state, tx)
    losses = []
    for _ in range(60):
        state, found = step(state, batch)
        losses.append(metrics.means([jax.device_get(found)])["loss"])
    assert losses[-1] < 0.2 * losses[0]
