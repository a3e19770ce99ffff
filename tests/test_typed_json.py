"""JSON is read by type and within bounds; an error is one line that names the field."""

import json
from typing import TypedDict

import pytest
from refusal import troubled

from lbopt import _typed_json

DEEP = 10**5


@pytest.mark.parametrize(
    "nested",
    ["[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "[" * 900 + "NaN" + "]" * 900],
)
def test_deep_nesting_is_refused(nested):
    with pytest.raises(ValueError, match="nested deeper than 64"):
        _typed_json.decode(nested.encode())


def test_a_field_keeps_its_name_in_a_message():
    with pytest.raises(ValueError, match="arrays: expected list, got int"):
        _typed_json.convert({"arrays": 1}, TypedDict("Named", {"arrays": list}))
    with pytest.raises(ValueError, match="missing required field arrays"):
        _typed_json.convert({}, TypedDict("Named", {"arrays": list}))


def test_as_deep_as_is_allowed():
    nested = "[" * 64 + "[]" + "]" * 64
    assert _typed_json.decode(nested.encode()) == json.loads(nested)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff\xfe\x00", b"\x00\x00", b"[1,]", b"9" * 5000, b'{"a" 1}']
)
def test_what_is_no_json(data):
    with pytest.raises(ValueError, match=r"^not JSON: ") as refused:
        _typed_json.decode(data)
    assert "\n" not in str(refused.value)


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
    ("data", "said"),
    [
        ({"inner": {"sizes": [1, "x"]}}, r"^inner.sizes\[1\]: expected int, got str$"),
        ({"inner": {}}, r"^inner: object missing required field sizes$"),
        ({"rate": None}, "^rate: expected float, got null$"),
        ({"rate": True}, "^rate: expected float, got bool$"),
        ({"rate": 10**400}, "^rate: number out of range$"),
        ([], "^expected object, got list$"),
    ],
)
def test_another_type_names_the_field(data, said):
    with pytest.raises(ValueError, match=said):
        _typed_json.decode(json.dumps(data).encode(), Outer)


def test_data_are_given_out_as_they_are():
    data = {"rate": 1, "of a later version": [None, {"b": 1.5}]}
    assert repr(_typed_json.decode(json.dumps(data).encode(), Outer)) == repr(data)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    file = tmp_path / "sparse.json"
    with file.open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(ValueError, match="it has more than 67108864 bytes"):
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
