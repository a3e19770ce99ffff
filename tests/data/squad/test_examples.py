"""Questions from records and from the official file: fields kept unchanged, and refusals."""

import copy
import json

import numpy as np
import pytest
from refusal import refused, troubled

from lbopt.data.squad import Question
from lbopt.data.squad._examples import questions_from_records, read_json

CONTEXT = "Zoë lived in  Köln, near the river."
RECORD = {
    "id": b"56be",
    "title": b"Zo",
    "context": CONTEXT.encode(),
    "question": "Where did Zoë live?".encode(),
    "answers": {
        "text": np.asarray(["Köln".encode(), b"near the river"], object),
        "answer_start": np.asarray([14, 20], np.int32),
    },
}
EXPECTED = Question("56be", "Where did Zoë live?", CONTEXT, ("Köln", "near the river"), (14, 20))


def official():
    answers = [
        {"text": "Köln", "answer_start": 14},
        {"text": "near the river", "answer_start": 20},
    ]
    first = {"id": "56be", "question": "Where did Zoë live?", "answers": answers}
    second = {"id": "57", "question": "Who?", "answers": [{"text": "Zoë", "answer_start": 0}]}
    other = {"id": "58", "question": "What?", "answers": [{"text": "b", "answer_start": 2}]}
    return {
        "version": "1.1",
        "data": [
            {"title": "Zo", "paragraphs": [{"context": CONTEXT, "qas": [first, second]}]},
            {"title": "B", "paragraphs": [{"context": "a b", "qas": [other]}]},
        ],
    }


def write(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_records_of_bytes_and_of_text():
    as_text = {"id": "56be", "context": CONTEXT, "question": "Where did Zoë live?"}
    answers = {"text": ["Köln", np.str_("near the river")], "answer_start": (14, 20)}
    (one, two) = questions_from_records(iter([RECORD, {**as_text, "answers": answers}]))
    assert one == two == EXPECTED
    assert {type(text) for text in (*one[:3], *one.answers, *two.answers)} == {str}
    assert {type(start) for start in one.answer_starts} == {int}


def test_the_official_file(tmp_path):
    questions = read_json(write(tmp_path / "train.json", official()))
    assert questions[0] == EXPECTED
    assert [(one.id, one.context, one.answers, one.answer_starts) for one in questions[1:]] == [
        ("57", CONTEXT, ("Zoë",), (0,)),
        ("58", "a b", ("b",), (2,)),
    ]
    assert read_json(str(tmp_path / "train.json")) == questions


def test_starts_count_characters():
    """In bytes, Köln would begin at 15."""
    assert EXPECTED.span() == (14, 18)
    assert EXPECTED.context[14:18] == "Köln"


@pytest.mark.parametrize(
    ("text", "start", "span"),
    [
        ("Köln", 14, (14, 18)),
        ("Köln", 13, (13, 18)),  # white space before it
        ("Köln", 15, None),
        ("Köln", 0, None),
        ("köln", 14, None),
        ("in Köln,", 10, (10, 19)),  # two spaces in the context
        ("in   Köln\t", 10, (10, 18)),
        (" in  Köln", 9, (9, 18)),
        ("inKöln", 10, None),
        ("K öln", 14, None),
        ("river. And", 29, None),
        ("river.", 29, (29, 35)),
        (".", 34, (34, 35)),
        ("Köln", 99, None),
        ("river", -6, None),
        ("", 3, None),
        (" ", 12, None),
        ("n.a", 17, None),  # not a pattern
    ],
)
def test_the_place_of_an_answer(text, start, span):
    assert Question("1", "?", CONTEXT, (text,), (start,)).span() == span


def without(name):
    return {key: value for key, value in RECORD.items() if key != name}


def with_answers(answers):
    return {**RECORD, "answers": answers}


@pytest.mark.parametrize(
    ("record", "field", "value", "code"),
    [
        *((without(name), "", sorted(without(name)), "missing") for name in without("title")),
        (with_answers({"text": [b"a"]}), ".answers", ["text"], "missing"),
        (with_answers({"answer_start": [1]}), ".answers", ["answer_start"], "missing"),
        (with_answers([{"text": "a", "answer_start": 0}]), ".answers", "list", "type"),
        (with_answers({"text": [], "answer_start": []}), ".answers", 0, "missing"),
        (
            with_answers({"text": ["a"], "answer_start": [0, 1]}),
            ".answers.answer_start",
            2,
            "mismatch",
        ),
        (with_answers({"text": "a", "answer_start": [0]}), ".answers.text", "str", "type"),
        (
            with_answers({"text": ["a"], "answer_start": [0.5]}),
            ".answers.answer_start[0]",
            0.5,
            "type",
        ),
        (with_answers({"text": [7], "answer_start": [0]}), ".answers.text[0]", 7, "type"),
        ({**RECORD, "context": b"\xff\xfe"}, ".context", b"\xff\xfe", "damaged"),
        ({**RECORD, "question": None}, ".question", None, "type"),
        (["id"], "", "list", "type"),
    ],
)
def test_records_of_another_schema_are_refused(record, field, value, code):
    with refused(f"records[1]{field}", value, code):
        questions_from_records([RECORD, record])


def remove(content, *path):
    for step in path[:-1]:
        content = content[step]
    del content[path[-1]]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (("data",), ""),
        (("data", 1, "paragraphs"), ".data[1]"),
        (("data", 0, "paragraphs", 0, "context"), ".data[0].paragraphs[0]"),
        (
            ("data", 0, "paragraphs", 0, "qas", 1, "question"),
            ".data[0].paragraphs[0].qas[1]",
        ),
        (
            ("data", 0, "paragraphs", 0, "qas", 0, "answers", 1, "text"),
            ".data[0].paragraphs[0].qas[0].answers[1]",
        ),
        (
            ("data", 0, "paragraphs", 0, "qas", 1, "answers", 0),
            ".data[0].paragraphs[0].qas[1].answers",
        ),
    ],
)
def test_files_of_another_schema_are_refused(tmp_path, path, field):
    content = copy.deepcopy(official())
    remove(content, *path)
    file = write(tmp_path / "file.json", content)
    with refused(f"{file}{field}", code="missing") as caught:
        read_json(file)
    missing = path[-1]
    if isinstance(missing, str):
        assert missing not in caught.value.value
        assert repr(missing) in str(caught.value)


def test_files_that_are_not_json_or_not_there(tmp_path):
    (tmp_path / "cut.json").write_text('{"data": [')
    with refused("path", str(tmp_path / "cut.json"), "damaged"):
        read_json(tmp_path / "cut.json")
    with refused(str(tmp_path / "list.json"), "list", "type"):
        read_json(write(tmp_path / "list.json", []))
    with troubled("path", str(tmp_path / "none.json"), "resource"):
        read_json(tmp_path / "none.json")
