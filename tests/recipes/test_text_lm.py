"""A prepared corpus for a language model: every byte of a split counts once, on any devices."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from refusal import refused, run_refused, troubled

from lbopt.cli import main
from lbopt.config import DataConfig, ModelConfig, TrainConfig
from lbopt.data.baselines import fit_trigram, stored_trigram
from lbopt.data.from_config import has_known_length, known_source, load_source
from lbopt.data.text import load_pydoc_topics, open_store, split_pydoc_topics
from lbopt.evaluation import means_of
from lbopt.models import from_linen, make_lstm_language_model
from lbopt.parallel import make_mesh
from lbopt.recipes import _initial, _language_model
from lbopt.train import lower_is_better

LENGTH = 13
VOCABULARY = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder of data sets with the store `mine`, and the texts that it was made from."""
    root = tmp_path_factory.mktemp("data")
    books = root / "books"
    books.mkdir()
    topics = sorted(split_pydoc_topics()[0], key=len, reverse=True)
    for number, topic in enumerate(topics[40:64]):
        text = "\n".join(sentence for sentence in topic if sentence.strip())
        (books / f"{number:02}.txt").write_text(f"café {number}\n{text}\n")
    flags = [f"--folder={books}", "--for=text_lm", f"--vocab_size={VOCABULARY}"]
    assert main(["prepare", "text", "--name=mine", *flags, f"--data_dir={root}"]) == 0
    return root


def data_of(folder, **fields):
    fields = {"sequence_length": LENGTH, "vocab_size": VOCABULARY, **fields}
    return DataConfig("text_lm", builder="mine", data_dir=str(folder), **fields)


@pytest.fixture(scope="module")
def source(folder):
    return load_source(data_of(folder))


@pytest.fixture(scope="module")
def network():
    return from_linen(make_lstm_language_model("small", vocab_size=VOCABULARY, hidden=8))


@pytest.fixture(scope="module")
def params(network):
    params, _ = network.init(jax.random.key(1), {"tokens": jnp.zeros((1, LENGTH), jnp.int32)})
    return jax.tree.map(lambda x: 3 * x, params)  # tokens of unequal odds


@pytest.fixture(scope="module")
def by_numpy(folder, network, params):
    """Return the losses of all tokens of a split in nats, and its text, read from its files."""
    store = folder / "lbopt_text" / "mine"
    about = json.loads((store / "store.json").read_text())
    tokens = np.fromfile(store / "tokens.bin", about["token_dtype"]).astype(np.int32)
    places = np.fromfile(store / "documents.bin", "<i8")
    tokenizer = tokenizers.Tokenizer.from_file(str(store / "tokenizer.json"))
    begin = about["splits"]["train"]
    end = begin + about["splits"]["validation"]

    part = tokens[places[begin] - 1 : places[end]]
    losses = []
    for start in range(0, len(part) - 1, LENGTH):
        window = part[start : start + LENGTH + 1]
        padded = np.pad(window[:-1], (0, LENGTH + 1 - len(window)))
        logits, _ = network.apply(params, {}, {"tokens": padded[None]}, train=False)
        logits = np.asarray(logits["logits"][0], np.float64)[: len(window) - 1]
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        losses += (-log_p[np.arange(len(window) - 1), window[1:]]).tolist()
    return np.asarray(losses), tokenizer.decode(part.tolist())


@pytest.mark.parametrize(("devices", "size"), [(1, 7), (4, 12), (4, 10**6)])
def test_perplexity_by_token_and_by_byte(source, network, params, by_numpy, devices, size):
    task = _language_model.make(network, source, None)

    class State:
        model_state = {}

    State.params = params
    evaluate = means_of(task.metric_fn)(make_mesh(devices), "jit")
    found = evaluate(State, source.splits.validation, size)
    losses, text = by_numpy
    num_bytes = len(text.encode())
    assert num_bytes > len(text)  # one character has two bytes
    assert len(losses) % LENGTH  # the last window is partial
    assert found["loss"] == pytest.approx(losses.mean(), rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(losses.mean()), rel=1e-6)
    bits = losses.sum() / math.log(2) / num_bytes
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    assert found["perplexity_per_byte"] == pytest.approx(2**bits, rel=1e-6)


def test_streams_count_the_same_bytes(folder, network, params, by_numpy):
    source = load_source(data_of(folder, carry_state=True), 2)
    task = _language_model.make(network, source, None)

    class State:
        pass

    State.params = params
    found = task.evaluator(make_mesh(1), "jit")(State, source.splits.validation, 1)
    losses, text = by_numpy
    total = found["loss"] * len(losses)
    bits = total / math.log(2) / len(text.encode())
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-6)


def test_the_text_of_a_split_is_that_of_its_documents(folder, source, by_numpy):
    books = {path.read_text() for path in (folder / "books").iterdir()}
    _, text = by_numpy
    assert text in {one + other for one in books for other in books} | books
    tokens = source.splits.validation.take(np.arange(1))
    assert tokens["tokens"][0, 0] == source.vocabulary.pieces.index("<|endoftext|>")
    counted = source.splits.validation.take(np.arange(len(source.splits.validation)))["token_mask"]
    assert counted.sum() == len(by_numpy[0])
    with pytest.raises(KeyError):  # training windows are full
        source.splits.train.take(np.arange(1))["token_mask"]


def test_the_trigram_model_counts_bytes_too(folder):
    store = open_store(folder / "lbopt_text" / "mine")
    validation, test = stored_trigram(store)
    train, *held_out = store.split_texts()
    model = fit_trigram(train, held_out[0], VOCABULARY)
    tokenizer = tokenizers.Tokenizer.from_str(store.tokenizer_json)
    for found, text in zip((validation, test), held_out, strict=True):
        num_bytes = len(tokenizer.decode(text[2:].tolist()).encode())
        bits = math.log2(found.perplexity) * (len(text) - 2) / num_bytes
        assert found.bits_per_byte == pytest.approx(bits)
        assert found.perplexity == pytest.approx(math.exp(model.losses(text).mean()))


def test_lower_is_better():
    assert lower_is_better("eval/bits_per_byte")
    assert lower_is_better("eval/perplexity_per_byte")


@pytest.mark.slow
def test_training_keeps_the_tokenizer_and_another_vocabulary_is_refused(folder, tmp_path, capsys):
    config = tmp_path / "lm.py"
    config.write_text(
        "from lbopt.config import *\n"
        "def get_config(arg=''):\n"
        f"    data = DataConfig('text_lm', 'mine', {str(folder)!r}, sequence_length={LENGTH},\n"
        f"                      vocab_size={VOCABULARY})\n"
        "    model = ModelConfig('lstm_lm', size='small', width_coefficient=0.04)\n"
        "    return TrainConfig(data=data, model=model, global_batch_size=8, num_steps=6,\n"
        "                       eval_global_batch_size=64)\n"
    )
    run = tmp_path / "run"
    assert main(["train", f"--config={config}", f"--workdir={run}"]) == 0
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 < line["eval/bits_per_byte"] < 16
    assert line["eval/perplexity_per_byte"] == pytest.approx(2 ** line["eval/bits_per_byte"])
    kept = (folder / "lbopt_text" / "mine" / "tokenizer.json").read_bytes()
    assert (run / "tokenizer.json").read_bytes() == kept

    books = f"--folder={folder / 'books'}"
    flags = [books, "--for=text_lm", "--vocab_size=299", f"--data_dir={folder}"]
    assert main(["prepare", "text", "--name=other", *flags]) == 0
    changed = ["--config.data.builder=other", "--config.data.vocab_size=299"]
    command = ["train", f"--config={config}", f"--config.init_from={run}", *changed]
    with refused("config.init_from", str(run), "mismatch"):
        run_refused(capsys, *command, f"--workdir={tmp_path / 'again'}", lines=None)


@pytest.mark.parametrize("learned_bytes", [False, True])
def test_bytes_do_not_start_from_pieces_of_words_nor_these_from_bytes(
    source, tmp_path, learned_bytes
):
    both = [source.vocabulary, load_pydoc_topics(VOCABULARY).pieces.vocabulary]
    learned, wanted = both if learned_bytes else both[::-1]
    assert len(learned.pieces) == len(wanted.pieces)  # the shapes agree
    for name, text in learned.files().items():
        (tmp_path / name).write_text(text, "utf-8")
    with refused("init_from", str(tmp_path), "mismatch") as caught:
        _initial.check_text(str(tmp_path), wanted)
    assert ("are bytes" in caught.value.reason) == learned_bytes
    _initial.check_text(str(tmp_path), learned)


def test_a_store_of_the_other_kind_is_refused(folder):
    with refused("data.builder", "mine", "mismatch"):
        fields = {"sequence_length": 16, "max_predictions": 2, "vocab_size": VOCABULARY}
        load_source(DataConfig("text_mlm", "mine", str(folder), **fields))
    with refused("data.vocab_size", 301, "mismatch"):
        load_source(data_of(folder, vocab_size=301))
    with refused("config.data.max_predictions", 3, "unused"):
        data = data_of(folder, max_predictions=3)
        TrainConfig(data=data, model=ModelConfig("lstm_lm", size="small")).validate()


@pytest.mark.parametrize("carry_state", [False, True])
def test_a_plan_needs_no_corpus(folder, source, carry_state, tmp_path):
    here = data_of(folder, carry_state=carry_state)
    away = data_of(tmp_path, carry_state=carry_state)
    assert (has_known_length(here), has_known_length(away)) == (True, False)
    with troubled("data.builder", "mine", "missing") as caught:
        load_source(away)
    assert "--folder=DIR --for=text_lm" in caught.value.reason
    # A shuffled order would take gigabytes.
    assert known_source(away, 2).splits.train.reading.in_order
    for ours, theirs in zip(
        known_source(here, 2).splits, known_source(away, 2).splits, strict=True
    ):
        one = ours.take(np.arange(1))
        other = theirs.take(np.arange(1))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), one) == jax.tree.map(
            lambda x: (x.shape, x.dtype), other
        )
