"""Prepared text in the shipped recipes: a corpus for BERT in two phases, PTB for the LSTM."""

import json
import pathlib

import numpy as np
import pytest
from refusal import refused, run_refused

from lbopt.cli import main
from lbopt.config import DataConfig, ModelConfig, TrainConfig
from lbopt.data.from_config import load_source
from lbopt.data.text import StoreWriter, TextNormalization, Vocabulary, split_pydoc_topics
from lbopt.data.text._pieces import SPECIAL_TOKENS
from lbopt.data.text._wordpiece import Document
from lbopt.errors import NO_VALUE, EnvironmentProblem

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
BERT = (
    "--config.model.size=tiny",
    "--config.model.max_length=64",
    "--config.model.dtype=float32",
    "--config.data.builder=topics",
    "--config.data.sequence_length=32",
    "--config.data.max_predictions=5",
    "--config.data.vocab_size=512",
    "--config.global_batch_size=8",
    "--config.num_steps=2",
    "--config.schedule.warmup_steps=1.0",
    "--config.phase2.sequence_length=64",
    "--config.phase2.max_predictions=9",
    "--config.phase2.global_batch_size=4",
    "--config.phase2.num_steps=2",
    "--config.phase2.schedule.warmup_steps=1.0",
    "--config.phase2.eval_global_batch_size=64",
    "--config.eval_global_batch_size=64",
    "--config.log_every_steps=1",
    "--config.parallel.num_devices=1",
)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """Return a folder with a prepared corpus of 24 plain-text files and a small Penn Treebank."""
    folder = tmp_path_factory.mktemp("data")
    books = tmp_path_factory.mktemp("books")

    topics = sorted(split_pydoc_topics()[0], key=len, reverse=True)
    for number, topic in enumerate(topics[:24]):
        (books / f"{number:02d}.txt").write_text("\n\n".join(topic))

    command = [
        "prepare",
        "text",
        "--name=topics",
        f"--folder={books}",
        "--vocab_size=512",
        f"--data_dir={folder}",
    ]
    assert main(command) == 0

    (folder / "ptb").mkdir()
    for part, topic in zip(("train", "valid", "test"), topics, strict=False):
        words = [" ".join(sentence.split()[:40]).replace("<unk>", "unk") for sentence in topic[:60]]
        (folder / "ptb" / f"ptb.{part}.txt").write_text(
            "".join(f" {line} <unk> \n" for line in words)
        )

    return folder


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_bert_trains_on_a_prepared_corpus_in_two_phases(data_dir, tmp_path):
    flags = [
        f"--config={CONFIGS / 'bert_large_lamb.py'}:mixed",
        *BERT,
        f"--config.data.data_dir={data_dir}",
    ]
    assert main(["train", *flags, f"--workdir={tmp_path / 'run'}"]) == 0
    found = lines(tmp_path / "run")
    assert [line["examples_seen"] for line in found] == [8, 16, 20, 24]
    assert all(0 < line["train/masked_lm_loss"] < 10 for line in found)
    vocabulary = (data_dir / "lbopt_text" / "topics" / "vocab.txt").read_text()
    assert (tmp_path / "run" / "vocab.txt").read_text() == vocabulary


def test_a_run_knows_how_the_text_of_its_corpus_was_changed(tmp_path):
    pieces = (*SPECIAL_TOKENS, *"abcdefgh")
    settings = TextNormalization(do_lower_case=False)
    with StoreWriter(tmp_path / "lbopt_text" / "mine", pieces, "a test", settings) as writer:
        for _ in range(12):
            writer.append(Document(np.arange(5, 13, dtype=np.int32), np.asarray([0, 4])))
    data = DataConfig(
        "text_mlm", "mine", str(tmp_path), sequence_length=16, max_predictions=2, vocab_size=13
    )
    assert load_source(data).vocabulary == Vocabulary(pieces, settings)
    data.lowercase = True
    with refused("config.data.lowercase", True, "unused"):
        TrainConfig(data=data, model=ModelConfig("bert", size="tiny")).validate()


def words_of(data_dir):
    return {*(data_dir / "ptb" / "ptb.train.txt").read_text().split(), "<eos>"}


@pytest.mark.slow
def test_an_lstm_reads_penn_treebank_through(data_dir, tmp_path):
    flags = [
        f"--config={CONFIGS / 'lstm_legw.py'}:ptb-small-20",
        f"--config.data.data_dir={data_dir}",
        f"--config.data.vocab_size={len(words_of(data_dir))}",
        "--config.data.sequence_length=5",
        "--config.global_batch_size=8",
        "--config.num_steps=30",
        "--config.schedule.warmup_steps=2.0",
        "--config.schedule.base_learning_rate=2.0",
        "--config.model.width_coefficient=0.1",
        "--config.eval_every_epochs=0.5",
        "--config.checkpoint.every_steps=30",
        "--config.parallel.num_devices=1",
    ]

    assert main(["train", *flags, f"--workdir={tmp_path / 'run'}"]) == 0
    scores = [
        line["eval/perplexity"] for line in lines(tmp_path / "run") if "eval/perplexity" in line
    ]
    assert scores[-1] < len(words_of(data_dir))

    assert main(["report", f"--workdir={tmp_path / 'run'}"]) == 0
    assert (tmp_path / "run" / "perplexity.png").exists()


# A change, the refused field with its value and code, and what else the message must name.
BAD = {
    "a vocabulary of another size": (
        "bert_large_lamb",
        ["data.vocab_size=600"],
        ("config.data.vocab_size", 600, "mismatch"),
    ),
    "no such corpus": (
        "bert_large_lamb",
        ["data.builder=books"],
        ("config.data.builder", "books", "missing", EnvironmentProblem),
        "lbopt prepare text --name=books",
    ),
    "two tokens of room": (
        "bert_large_lamb",
        ["data.sequence_length=4", "data.max_predictions=2"],
        ("config.data.sequence_length", 4, "value"),
    ),
    "longer than the positions": (
        "bert_large_lamb",
        ["phase2.sequence_length=128"],
        ("config.phase2.sequence_length", 128, "mismatch"),
    ),
    "another number of words": (
        "lstm_legw",
        ["data.vocab_size=10000"],
        ("config.data.vocab_size", 10000, "mismatch"),
    ),
    "more streams than text": (
        "lstm_legw",
        ["global_batch_size=5000"],
        ("config.global_batch_size", 5000, "mismatch"),
    ),
    "no files": (
        "lstm_legw",
        ["data.data_dir=/nowhere"],
        ("ptb", NO_VALUE, "missing", EnvironmentProblem),
        "lbopt prepare ptb",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_one_line(name, data_dir, tmp_path, capsys):
    file, overrides, fault, *named = BAD[name]
    row, flags = (
        (":mixed", BERT)
        if file == "bert_large_lamb"
        else (":ptb-small-20", [f"--config.data.vocab_size={len(words_of(data_dir))}"])
    )
    flags = [f"--config={CONFIGS / file}.py{row}", f"--config.data.data_dir={data_dir}", *flags]
    flags += [f"--config.{override}" for override in overrides]
    with refused(*fault) as caught:
        run_refused(capsys, "train", *flags, f"--workdir={tmp_path / 'run'}")
    for part in named:
        assert part in str(caught.value)
