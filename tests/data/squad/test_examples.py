"""Questions from records and from the official file: what is kept as it is, and what is refused."""

import copy
import json

import numpy as np
import pytest

from lbopt.data.squad import Question
from lbopt.data.squad._examples import questions_from_records, read_json
from lbopt.errors import EnvironmentProblem, UserError

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
    answers = [{"text": "Köln", "answer_start": 14}, {"text": "near the river", "answer_start": 20}]
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


@pytest.mark.parametrize(
    ("record", "message"),
    [
        *(
            (without(name), rf"^records\[1\] = \[.*\]: there is no '{name}'; ")
            for name in without("title")
        ),
        (
            {**RECORD, "answers": {"text": [b"a"]}},
            r"records\[1\].answers = \['text'\]: there is no 'answer_start'",
        ),
        (
            {**RECORD, "answers": {"answer_start": [1]}},
            r"records\[1\].answers = .* there is no 'text'",
        ),
        (
            {**RECORD, "answers": [{"text": "a", "answer_start": 0}]},
            r"records\[1\].answers = 'list': a mapping",
        ),
        (
            {**RECORD, "answers": {"text": [], "answer_start": []}},
            r"records\[1\].answers = 0: .* one answer",
        ),
        (
            {**RECORD, "answers": {"text": ["a"], "answer_start": [0, 1]}},
            r"answer_start = 2: there are 1 texts",
        ),
        (
            {**RECORD, "answers": {"text": "a", "answer_start": [0]}},
            r"answers.text = 'str': a list is needed",
        ),
        (
            {**RECORD, "answers": {"text": ["a"], "answer_start": [0.5]}},
            r"answer_start\[0\] = 0.5: a whole number",
        ),
        (
            {**RECORD, "answers": {"text": [7], "answer_start": [0]}},
            r"records\[1\].answers.text\[0\] = 7: text is",
        ),
        ({**RECORD, "context": b"\xff\xfe"}, r"records\[1\].context = b'\\xff\\xfe': not UTF-8"),
        ({**RECORD, "question": None}, r"records\[1\].question = None: text is needed"),
        (["id"], r"records\[1\] = 'list': a mapping is needed"),
    ],
)
def test_records_of_another_schema_are_refused(record, message):
    with pytest.raises(UserError, match=message) as caught:
        questions_from_records([RECORD, record])
    assert "\n" not in str(caught.value)


def remove(content, *path):
    for step in path[:-1]:
        content = content[step]
    del content[path[-1]]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (("data",), r"file.json = \['version'\]: there is no 'data'"),
        (("data", 1, "paragraphs"), r"file.json.data\[1\] = \['title'\]: there is no 'paragraphs'"),
        (("data", 0, "paragraphs", 0, "context"), r"data\[0\].paragraphs\[0\] = .* no 'context'"),
        (
            ("data", 0, "paragraphs", 0, "qas", 1, "question"),
            r"paragraphs\[0\].qas\[1\] = .* no 'question'",
        ),
        (
            ("data", 0, "paragraphs", 0, "qas", 0, "answers", 1, "text"),
            r"qas\[0\].answers\[1\] = .* no 'text'",
        ),
        (
            ("data", 0, "paragraphs", 0, "qas", 1, "answers", 0),
            r"qas\[1\].answers = 0: a question has one answer",
        ),
    ],
)
def test_files_of_another_schema_are_refused(tmp_path, path, message):
    content = copy.deepcopy(official())
    remove(content, *path)
    with pytest.raises(UserError, match=message):
        read_json(write(tmp_path / "file.json", content))


def test_files_that_are_not_json_or_not_there(tmp_path):
    (tmp_path / "cut.json").write_text('{"data": [')
    with pytest.raises(UserError, match=r"cut.json: not JSON"):
        read_json(tmp_path / "cut.json")
    with pytest.raises(UserError, match=r"list.json = 'list': a mapping is needed"):
        read_json(write(tmp_path / "list.json", []))
    with pytest.raises(EnvironmentProblem, match=r"none.json: cannot be read"):
        read_json(tmp_path / "none.json")
