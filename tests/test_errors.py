import pickle

import pytest
from refusal import refused

from lbopt import errors
from lbopt.errors import NO_VALUE, EnvironmentProblem, UserError


def raised(*contexts, error):
    with pytest.raises(type(error)) as caught, nested(contexts):
        raise error
    return caught.value


def nested(contexts):
    stack = errors.contextlib.ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack


def test_prefixes_nest_and_renamed_fields_keep_what_comes_after_the_dot():
    error = UserError("group.0", 3, "with {size}, use less", also=["size"], code="conflict")
    inner = errors.under("aggregator", group="over")
    outer = errors.under("config")
    found = raised(outer, inner, error=error)
    assert found.field == "config.over.0"
    assert str(found) == "config.over.0 = 3: with config.aggregator.size, use less"
    assert found.code == "conflict"


def test_a_line_that_is_not_raised_names_the_place_that_an_error_would_get():
    found = raised(
        errors.under("config.train"),
        errors.under("data", {"lowercase"}, vocabulary="data.vocab_file"),
        error=UserError("lowercase", reason="mend it"),
    )
    with errors.under("config.train"):
        with errors.under("data", {"lowercase"}, vocabulary="data.vocab_file"):
            assert errors.place_of("lowercase") == found.field == "config.train.data.lowercase"
            assert errors.place_of("vocabulary") == "config.train.data.vocab_file"
        assert errors.place_of("lowercase") == "config.train.lowercase"
    assert errors.place_of("lowercase") == "lowercase"  # after an error, too


@pytest.mark.parametrize("rest", ["", ".0", "[0]", "/dense/bias", "/layers.0/w[1]"])
def test_a_renamed_field_keeps_the_place_inside_it(rest):
    for name, expected in (("mask", "weight_decay_mask"), ("params/mask", "params/mask")):
        error = UserError(f"{name}{rest}", reason="mend it")
        found = raised(errors.under("", mask="weight_decay_mask"), error=error)
        assert found.field == f"{expected}{rest}"


@pytest.mark.parametrize("field", ["--workdir", "params/dense/kernel", "batch", None])
def test_what_is_no_field_of_the_caller_keeps_its_name(field):
    found = raised(errors.under("config", {"rank"}), error=UserError(field, reason="mend it"))
    assert found.field == field


@pytest.mark.parametrize("kind", [UserError, EnvironmentProblem])
def test_an_error_survives_a_pickle(kind):
    error = kind("rank", reason="give {other}", also=["other"], code="missing")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) == "rank: give other"
    assert (copy.field, copy.value, copy.code) == ("rank", NO_VALUE, "missing")


def test_the_place_of_a_line_stands_once():
    with (
        refused("recipe.py: config.nesterov", True, "unused") as caught,
        errors.under("recipe.py: "),
    ):
        raise UserError("config.nesterov", True, "see {name}", code="unused", also=["name"])
    assert str(caught.value) == "recipe.py: config.nesterov = True: see name"


def test_braces_of_a_value_are_text():
    assert str(UserError("name", "{x}", "no such {name}")) == "name = '{x}': no such {name}"
    other = UserError("name", "x", "not in /data/{x}; see {other}", also={"other": "--other"})
    assert str(other) == "name = 'x': not in /data/{x}; see --other"


@pytest.mark.parametrize(
    ("names", "error", "expected"),
    [
        ((), UserError("pattern", "(", "close it"), ("modules", ("(",), "pattern = '(': close it")),
        ((), UserError("modules", "(", "close it"), ("modules", ("(",), "close it")),
        ((), UserError("mend it"), ("modules", ("(",), "mend it")),
        (("labels",), UserError("labels", "(", "close it"), ("modules", ("(",), "close it")),
        (("labels",), UserError("pattern", "(", "close it"), ("pattern", "(", "close it")),
    ],
)
def test_an_error_is_about_the_field_of_the_caller(names, error, expected):
    context = errors.about("modules", ("(",), *names, code="mismatch")
    found = raised(errors.under("config"), context, error=error)
    assert (found.field, found.value, found.reason) == (f"config.{expected[0]}", *expected[1:])
    assert found.code == ("mismatch" if found.field == "config.modules" else "value")


def test_a_field_that_a_whole_line_mentions_is_spelled_out():
    error = UserError("rank", 0, "or leave {name} 'aps'", also={"name": "aggregator.name"})
    found = raised(errors.about("arms", 2), error=error)
    assert str(found) == "arms = 2: rank = 0: or leave aggregator.name 'aps'"
