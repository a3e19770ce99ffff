"""Types of fields, differences of configs, and their conversion to JSON."""

import dataclasses
import json

import numpy as np
import pytest
from refusal import refused

from lbopt.config import Arm, SweepConfig, TrainConfig, config_to_json, json_differences
from lbopt.config._checks import check_types


@dataclasses.dataclass
class Inner:
    rate: float = 0.5


@dataclasses.dataclass
class Outer:
    flag: bool = False
    count: int = 1
    rate: float = 1.0
    text: str = "a"
    sizes: tuple[int, ...] = (1, 2)
    pair: tuple[float, float] | None = None
    limit: int | None = None
    inner: Inner = dataclasses.field(default_factory=Inner)
    many: tuple[Inner, ...] = ()


GOOD = [
    ("rate", 3),
    ("sizes", ()),
    ("sizes", [3, 4]),
    ("pair", (0, 1.5)),
    ("pair", None),
    ("limit", 3),
    ("limit", None),
    ("many", (Inner(), Inner(2))),
    ("rate", float("nan")),
]
BAD = [
    ("flag", 1, "bool"),
    ("flag", "True", "bool"),
    ("count", 1.0, "int"),
    ("count", True, "int"),
    ("count", None, "int"),
    ("count", np.int32(1), "int"),
    ("rate", "1", "float"),
    ("rate", False, "float"),
    ("rate", None, "float"),
    ("text", 1, "str"),
    ("sizes", 3, "tuple"),
    ("sizes", "12", "tuple"),
    ("sizes", (1, 2.0), "tuple"),
    ("sizes", (True,), "tuple"),
    ("pair", (1.0,), "tuple"),
    ("pair", (1.0, 2.0, 3.0), "tuple"),
    ("pair", ("low", "high"), "tuple"),
    ("limit", 1.5, "int"),
    ("inner", {"rate": 1.0}, "Inner"),
    ("many", (Inner(), 3), "Inner"),
]


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_a_value_of_the_type_is_taken(name, value):
    check_types(Outer(**{name: value}))


@pytest.mark.parametrize(("name", "value", "kind"), BAD)
def test_a_value_of_another_type_is_refused(name, value, kind):
    with refused(name, value, "type") as caught:
        check_types(Outer(**{name: value}))
    assert kind in caught.value.reason  # the reason is the type


def test_what_lies_within_is_named_in_full():
    with refused("inner.rate", "x", "type"):
        check_types(Outer(inner=Inner("x")))
    with refused("many[1].rate", "x", "type"):
        check_types(Outer(many=(Inner(), Inner("x"))))


def test_the_defaults_have_their_types():
    check_types(Outer())
    check_types(TrainConfig())
    check_types(SweepConfig(arms=(Arm(),)))
    TrainConfig().validate()


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({}, {}, []),
        ({"a": 1}, {"a": 1.0}, []),
        ({"a": 1}, {}, ["a is None there and 1 here"]),
        ({}, {"a": {"b": 1}}, ["a is {...} there and None here"]),
        (
            {"b": 1, "a": "x"},
            {"b": 2, "a": "y"},
            ["a is 'y' there and 'x' here", "b is 2 there and 1 here"],
        ),
        (
            {"a": {"b": {"c": [1]}}},
            {"a": {"b": {"c": [1, 2]}}},
            ["a.b.c is [1, 2] there and [1] here"],
        ),
        ({"a": {"b": 1}}, {"a": 1}, ["a is 1 there and {...} here"]),
    ],
)
def test_differences_are_listed_by_field(ours, theirs, expected):
    assert json_differences(ours, theirs) == expected


def test_json_is_plain_and_stays_the_same():
    config = SweepConfig(arms=(Arm("a"), Arm("b")), global_batch_sizes=(1, 2))
    data = config_to_json(config)
    assert data["global_batch_sizes"] == [1, 2]
    assert [arm["name"] for arm in data["arms"]] == ["a", "b"]
    assert data["train"]["model"]["widths"] == [16, 32]
    assert json.loads(json.dumps(data)) == data
    assert config_to_json(config) == data
    assert data.keys() == {field.name for field in dataclasses.fields(SweepConfig)}


def test_every_changed_field_of_a_config_is_seen():
    """If a change were missed, a workdir would be resumed with another config."""
    first = config_to_json(TrainConfig())
    for name, value in {"seed": 3, "num_epochs": 3.5, "name": "x"}.items():
        assert json_differences(config_to_json(TrainConfig(**{name: value})), first) == [
            f"{name} is {first[name]!r} there and {value!r} here"
        ]
