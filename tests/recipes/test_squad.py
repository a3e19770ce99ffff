"""The shipped recipe on questions about Python's help topics, from a pre-trained BERT-tiny."""

import dataclasses
import functools
import json
import pathlib
import re
import shutil

import numpy as np
import pytest
import tensorflow_datasets as tfds
from refusal import names_in, numbers_in, refused, run_refused, troubled
from shared import shared_folder
from tfds_sets import write

from lbopt import errors, evaluation
from lbopt.cli import main
from lbopt.cli._train import with_vocabulary
from lbopt.config import DataConfig, ModelConfig, TrainConfig
from lbopt.data import TfdsFolder
from lbopt.data.from_config import _text, known_source
from lbopt.data.squad import _examples
from lbopt.data.text import TextNormalization
from lbopt.data.text._pieces import SPECIAL_TOKENS
from lbopt.data.text._vocabulary import UNCASED, save_vocabulary
from lbopt.recipes import make_problem
from lbopt.recipes._initial import opened_folder

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
NUM_QUESTIONS = 12
BERT = ("--config.model.max_length=192", "--config.parallel.num_devices=1")


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    """Return a function (name, command) -> a folder, made by a command of lbopt for all tests."""

    def make(name, *command):
        with shared_folder(tmp_path_factory, "squad") as folder:
            done = folder / f"{name}.done"
            if not done.exists():
                assert main([part.format(folder=folder / name) for part in command]) == 0
                done.touch()
            return folder / name

    return make


@pytest.fixture(scope="module")
def data_dir(made_once):
    return made_once("data", "prepare", "pydoc_squad", "--data_dir={folder}")


@pytest.fixture(scope="module")
def pretrained(made_once):
    """Return the workdir of a BERT-tiny after two steps on masked tokens."""
    config = f"--config={CONFIGS / 'pydoc_bert.py'}:smoke"
    flags = ["--config.global_batch_size=16", "--config.num_steps=2"]
    flags += ["--config.schedule.warmup_steps=1.0"]
    return made_once("pretrained", "train", config, *BERT, *flags, "--workdir={folder}")


@pytest.fixture(scope="module")
def flags(data_dir, pretrained):
    """Return the flags of a run that sees 12 questions and is asked the same ones."""
    return [
        f"--config={CONFIGS / 'squad.py'}:smoke",
        f"--config.data.data_dir={data_dir}",
        f"--config.data.train_split=train[:{NUM_QUESTIONS}]",
        f"--config.data.validation_split=train[:{NUM_QUESTIONS}]",
        "--config.data.test_split=validation[:10]",
        f"--config.init_from={pretrained}",
        *BERT,
        "--config.optimizer.name=adamw",
        "--config.optimizer.clip_stage=accumulated",
        "--config.schedule.base_learning_rate=2e-3",
        "--config.global_batch_size=12",
        "--config.data.sequence_length=192",
        "--config.data.doc_stride=96",
        "--config.model.dropout_rate=0.0",
        "--config.model.attention_dropout_rate=0.0",
        *lasting(4),
    ]


def lasting(num_steps):
    """Return flags for the length of a run."""
    return [
        f"--config.num_steps={num_steps}",
        f"--config.schedule.warmup_steps={num_steps / 4}",
        f"--config.log_every_steps={num_steps // 2}",
        f"--config.eval_every_steps={num_steps // 2}",
        f"--config.checkpoint.every_steps={num_steps // 2}",
    ]


@pytest.fixture(scope="module")
def trained(flags, made_once):
    """Return the workdir of a run that is too short to learn anything."""
    return made_once("trained", "train", *flags, "--workdir={folder}")


def test_the_head_of_spans_takes_numbers_of_a_narrower_network_too():
    model = ModelConfig("bert", size="tiny", base_size="tiny", width_coefficient=2.0)
    data = DataConfig("squad", builder="squad", test_split="validation")
    problem = make_problem(data, model, load=known_source)
    told = problem.transfer.lines(problem.params)
    (output,) = (line for line in told if line.startswith("output, 2 x as wide"))
    assert output.endswith(": span/kernel")


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_it_answers_what_it_has_learnt(flags, tmp_path):
    assert main(["train", *flags, *lasting(40), f"--workdir={tmp_path / 'run'}"]) == 0
    scores = [line for line in lines(tmp_path / "run") if "eval/f1" in line]
    assert scores[-1]["eval/f1"] > 90
    assert scores[-1]["eval/exact_match"] > 85
    assert scores[-1]["eval/f1"] >= scores[-1]["eval/exact_match"]


def test_a_checkpoint_is_evaluated_to_the_same_scores(trained, flags, capsys):
    capsys.readouterr()
    assert main(["evaluate", *flags, f"--workdir={trained}"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["validation/f1"] == lines(trained)[-1]["eval/f1"]
    assert 0 <= scores["test/exact_match"] <= scores["test/f1"] <= 100


def test_the_vocabulary_is_that_of_what_it_started_from(trained, pretrained, tmp_path):
    output = tmp_path / "exported"
    assert (
        main(["export", f"--workdir={trained}", "--format=huggingface", f"--output={output}"]) == 0
    )
    for name in ("vocab.txt", "tokenizer_config.json"):
        assert (
            (output / name).read_text()
            == (trained / name).read_text()
            == (pretrained / name).read_text()
        )
    assert "BertForQuestionAnswering" in (output / "config.json").read_text()


def test_answers_are_cut_out_of_the_text_as_it_is_written(data_dir):
    """Predicting every window's labelled span gives the gold answers, letter for letter."""
    data = DataConfig(
        "squad",
        "pydoc_squad",
        str(data_dir),
        test_split="validation",
        sequence_length=64,
        doc_stride=16,
        max_query_length=16,
    )

    splits, _ = _text.load_questions(data)
    windows = splits.validation
    batch = splits.validation.take(np.arange(len(splits.validation)))
    scores = np.where(batch["start_position"] > 0, 1.0, -np.inf)
    chosen = evaluation.choose_answers(
        windows, scores, batch["start_position"], batch["end_position"]
    )

    found = [
        evaluation.exact_match(chosen[question.id], question.answers[0])
        for question in windows.questions
    ]
    assert np.mean(found) > 0.95  # no window may hold an answer longer than the stride


# A change, the refused field with its value and code, and what else the message must name.
BAD = {
    "another vocabulary size": (
        ["--config.data.vocab_size=512", "--config.data.vocab_file={vocab}"],
        ("config.data.vocab_size", 512, "mismatch"),
    ),
    "no vocabulary": (
        ["--config.data.builder=other", "--config.init_from=None"],
        ("config.data.vocab_file", None, "missing"),
    ),
    "no such start": (
        ["--config.data.builder=other", "--config.init_from=/nowhere"],
        ("config.init_from", "/nowhere", "missing"),
    ),
    "another activation": (
        ["--config.model.activation=gelu_tanh"],
        ("config.model.activation", "gelu_tanh", "mismatch"),
    ),
    "a case that a learned vocabulary has not": (
        ["--config.data.lowercase=false"],
        ("config.data.lowercase", False, "unused"),
    ),
    "no such vocabulary": (
        ["--config.data.vocab_file=/nowhere/vocab.txt"],
        ("config.data.vocab_file", "/nowhere/vocab.txt", "missing"),
    ),
    "a window without room": (
        ["--config.data.sequence_length=4"],
        ("config.data.sequence_length", 4, "value"),
    ),
    "more tokens than positions": (
        ["--config.data.sequence_length=256"],
        ("config.data.sequence_length", 256, "mismatch"),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_one_line(name, flags, pretrained, tmp_path, capsys):
    overrides, fault, *named = BAD[name]
    overrides = [override.format(vocab=pretrained / "vocab.txt") for override in overrides]
    with refused(*fault) as caught:
        run_refused(capsys, "train", *flags, *overrides, f"--workdir={tmp_path / 'run'}")
    for part in named:
        assert part in str(caught.value)


@pytest.fixture
def cased(tmp_path, data_dir):
    """Return data with a cased vocabulary, and the file."""
    file = tmp_path / "bert" / "vocab.txt"
    file.parent.mkdir()
    save_vocabulary([*SPECIAL_TOKENS, "The", "the", "What", "what", "is", "?"], file)
    sizes = {"sequence_length": 64, "doc_stride": 16, "max_query_length": 16, "vocab_size": 11}
    return DataConfig(
        "squad",
        "pydoc_squad",
        str(data_dir),
        test_split="validation",
        vocab_file=str(file),
        **sizes,
    ), file


def questions_of(data, learned=None):
    """Return the first question in tokens of its vocabulary, and the vocabulary."""
    splits, pieces = _text.load_questions(
        data, learned and functools.partial(opened_folder, learned)
    )
    tokens = splits.train.take(np.arange(1))["input_ids"][0]
    return pieces.decode(tokens).partition("[SEP]")[0], pieces.vocabulary


def test_questions_keep_their_case_where_it_is_said(cased, tmp_path):
    data, file = cased
    in_study = errors.under("config.train.data")
    with refused("config.train.data.lowercase", None, "missing") as caught, in_study:
        _text.load_questions(data)
    assert numbers_in(caught)[:2] == [2, 11]
    assert {"The", "What"} <= names_in(caught)
    assert "config.train.data.lowercase=false" in str(caught.value)

    question, vocabulary = questions_of(dataclasses.replace(data, lowercase=False))
    assert question.startswith("[CLS] What is")
    assert vocabulary.normalization == TextNormalization(do_lower_case=False)
    (file.parent / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert questions_of(data) == (question, vocabulary)

    theirs = pytest.importorskip("transformers").BertTokenizerFast(str(file), do_lower_case=False)
    theirs.save_pretrained(tmp_path / "saved")  # a tokenizer.json, and no vocab.txt
    there = dataclasses.replace(data, vocab_file=None, builder="pydoc_squad:1.0.0")
    assert questions_of(there, str(tmp_path / "saved")) == (question, vocabulary)

    data.lowercase = True
    warned = r"^config\.data\.lowercase = true|\(The, What\)"
    with pytest.warns(UserWarning, match=warned), errors.under("config.data"):
        assert questions_of(data)[0].startswith("[CLS] what is")


def test_a_run_names_the_field_that_keeps_case(cased, flags, tmp_path, capsys):
    _, file = cased
    vocabulary = (f"--config.data.vocab_file={file}", "--config.data.vocab_size=11")
    with refused("config.data.lowercase", None, "missing") as caught:
        run_refused(capsys, "train", *flags, *vocabulary, f"--workdir={tmp_path / 'run'}")
    assert str(file) in str(caught.value)
    assert "config.data.lowercase=false" in str(caught.value)


def test_a_run_of_before_goes_on_with_its_vocabulary_and_lowercases(cased, tmp_path):
    """An older run has no tokenizer_config.json, and its original vocabulary file may be gone."""
    data, file = cased
    (tmp_path / "config.json").write_text('{"versions": {}}')
    config = TrainConfig(data=data)
    assert with_vocabulary(config, str(tmp_path)) is config
    (tmp_path / "vocab.txt").write_bytes(file.read_bytes())
    file.unlink()
    kept = with_vocabulary(config, str(tmp_path)).data
    with pytest.warns(UserWarning, match=r"\(The, What\)"):
        question, vocabulary = questions_of(kept)
    assert question.startswith("[CLS] what is")
    assert vocabulary.normalization == UNCASED


def test_records_without_answers_are_refused(flags, tmp_path, capsys, data_dir):
    folder = shutil.copytree(data_dir, tmp_path / "data")
    features = {
        "id": tfds.features.Text(),
        "context": tfds.features.Text(),
        "question": tfds.features.Text(),
    }
    record = {"id": "1", "context": "a b", "question": "c"}

    write(
        folder,
        "pydoc_squad",
        {"train": [record], "validation": [record]},
        features,
        version="2.0.0",
    )
    overrides = [f"--config.data.data_dir={folder}", "--config.data.train_split=train"]

    assert main(["train", *flags, *overrides, f"--workdir={tmp_path / 'run'}"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("lbopt train: config.data.builder = 'pydoc_squad': ")
    assert err.count("\n") == 1
    assert {"context", "id", "question", "answers"} <= set(re.findall(r"\w+", err))


def test_the_questions_have_the_schema_of_squad(data_dir):
    folder = TfdsFolder("pydoc_squad", str(data_dir))
    records = folder.open("train", "config.data.train_split")
    found = _examples.questions_from_records(records[index] for index in range(len(records)))
    assert all(question.span() is not None for question in found)


def test_a_run_is_evaluated_where_its_start_is_gone(trained, flags, pretrained, tmp_path, capsys):
    """The run's vocabulary is in its workdir."""
    gone = str(tmp_path / "gone")
    run = shutil.copytree(trained, tmp_path / "run")
    began_with = (run / "config.json").read_text()
    (run / "config.json").write_text(began_with.replace(str(pretrained), gone))
    flags = [flag.replace(str(pretrained), gone) for flag in flags]
    capsys.readouterr()
    assert main(["evaluate", *flags, f"--workdir={run}"]) == 0
    assert json.loads(capsys.readouterr().out)["validation/f1"] == lines(run)[-1]["eval/f1"]
    assert main(["train", *flags, f"--workdir={run}"]) == 0
    assert "nothing to do" in capsys.readouterr().err


def test_a_question_without_an_answer_is_counted_by_its_number(data_dir, tmp_path):
    text_of = tfds.features.Text()
    number = tfds.features.Scalar(np.int32)
    answers_of = tfds.features.Sequence({"text": text_of, "answer_start": number})
    features = {"id": text_of, "context": text_of, "question": text_of, "answers": answers_of}
    good = {"context": "a b", "question": "c", "answers": {"text": ["a"], "answer_start": [0]}}
    records = [{**good, "id": str(index)} for index in range(6)]
    records[4]["answers"] = {"text": [], "answer_start": []}

    write(tmp_path, "pydoc_squad", {"train": records, "validation": records[:3]}, features)
    sizes = {"sequence_length": 64, "doc_stride": 16, "max_query_length": 16}
    data = DataConfig(
        "squad",
        "pydoc_squad",
        str(tmp_path),
        test_split="validation",
        **sizes,
        max_damaged_records=1,
    )

    splits, _ = _text.load_questions(data)
    assert (len(splits.train.questions), len(splits.train.damaged)) == (5, 1)

    data.max_damaged_records = 0
    with troubled("max_damaged_records", 0, "damaged") as caught:
        _text.load_questions(data)
    assert {"4", "pydoc_squad", "train", "record.answers"} <= names_in(caught)


def test_an_unreadable_question_is_counted(data_dir, tmp_path):
    folder = shutil.copytree(data_dir, tmp_path / "data")
    (file,) = folder.glob("pydoc_squad/1.0.0/*train*")
    whole = bytearray(file.read_bytes())
    middle = len(whole) // 2
    whole[middle : middle + 40] = bytes(byte ^ 255 for byte in whole[middle : middle + 40])
    file.write_bytes(bytes(whole))

    data = DataConfig(
        "squad",
        "pydoc_squad",
        str(folder),
        test_split="validation",
        sequence_length=64,
        max_damaged_records=400,
    )

    splits, _ = _text.load_questions(data)
    assert 0 < len(splits.train.damaged) < 400
    assert len(splits.train.questions) + len(splits.train.damaged) == 400
    assert len(splits.validation.damaged) == 0

    data.max_damaged_records = 0
    with troubled("max_damaged_records", 0, "damaged"):
        _text.load_questions(data)
