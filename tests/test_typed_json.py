"""JSON is read by type and within bounds; an error is one line that names the field."""

import json
import re
from typing import TypedDict

import pytest
from refusal import raised, troubled

from lbopt import _typed_json

DEEP = 10**5
TYPES = {"object", "list", "str", "int", "float", "bool", "null"}


@pytest.mark.parametrize(
    "nested",
    ["[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "[" * 900 + "NaN" + "]" * 900],
)
def test_deep_nesting_is_refused(nested):
    with raised(ValueError, numbers=[64]):
        _typed_json.decode(nested.encode())


def test_a_field_keeps_its_name_in_a_message():
    """msgspec's messages call a list an array; only types are renamed."""
    with raised(ValueError) as caught:
        _typed_json.convert({"arrays": 1}, TypedDict("Named", {"arrays": list}))
    assert field_and_types(caught) == ("arrays", ["list", "int"])
    with raised(ValueError, names={"arrays"}):
        _typed_json.convert({}, TypedDict("Named", {"arrays": list}))


def test_as_deep_as_is_allowed():
    nested = "[" * 64 + "[]" + "]" * 64
    assert _typed_json.decode(nested.encode()) == json.loads(nested)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff\xfe\x00", b"\x00\x00", b"[1,]", b"9" * 5000, b'{"a" 1}']
)
def test_what_is_no_json(data):
    with raised(ValueError, names={"JSON"}) as caught:
        _typed_json.decode(data)
    assert isinstance(caught.value.__cause__, ValueError)  # the error of Python's own reader


@pytest.mark.parametrize(
    "text",
    [
        '{"a": Infinity, "b": -Infinity}',
        '"\\udcff"',
        "1e999",
        str(10**30),
        '{"a": 1, "a": 2}',
        "1.0",
    ],
)
def test_what_python_writes_is_read_as_python_reads_it(text):
    assert _typed_json.decode(text.encode()) == json.loads(text)


class Inner(TypedDict):
    sizes: list[int]


class Outer(TypedDict, total=False):
    inner: Inner
    rate: float


@pytest.mark.parametrize(
    ("data", "field", "types", "word"),
    [
        ({"inner": {"sizes": [1, "x"]}}, "inner.sizes[1]", ["int", "str"], "got"),
        ({"inner": {}}, "inner", ["object"], "sizes"),
        ({"rate": None}, "rate", ["float", "null"], "got"),
        ({"rate": True}, "rate", ["float", "bool"], "got"),
        ({"rate": 10**400}, "rate", [], "range"),
        ([], "", ["object", "list"], "got"),
    ],
)
def test_another_type_names_the_field(data, field, types, word):
    with raised(ValueError, names={word}) as caught:
        _typed_json.decode(json.dumps(data).encode(), Outer)
    assert field_and_types(caught) == (field, types)


def field_and_types(caught):
    """Return the field with which a caught error's message begins, and the types in their order."""
    *field, reason = str(caught.value).split(": ", 1)
    return "".join(field), [word for word in re.findall(r"\w+", reason) if word in TYPES]


def test_data_are_given_out_as_they_are():
    data = {"rate": 1, "of a later version": [None, {"b": 1.5}]}
    assert repr(_typed_json.decode(json.dumps(data).encode(), Outer)) == repr(data)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    file = tmp_path / "sparse.json"
    with file.open("wb") as stream:
        stream.truncate(1 << 40)
    with raised(ValueError, numbers=[1 << 26]):
        _typed_json.read_file(file)


def test_a_mark_of_utf8_is_passed_over(tmp_path):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert _typed_json.read_file(tmp_path / "a.json") == {"a": 1}


def test_a_record_names_what_it_lacks():
    found = _typed_json.records({"a": [{"b": 1}]}, "config.json", "restore it")
    assert found == {"a": [{"b": 1}]}
    assert found["a"][0].get("c") is None
    with troubled("config.json: a[0]", code="damaged"):
        found["a"][0]["c"]
