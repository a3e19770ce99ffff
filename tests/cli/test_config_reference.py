"""`lbopt config` and `--help` say of every field what the config takes and refuses."""

import copy
import json
import operator
import re

import pytest
from refusal import refused

from lbopt.cli import _field_lists, call_get_config, load_config
from lbopt.config import SweepConfig, TrainConfig, check_flag, config_fields
from lbopt.errors import UserError

ROWS = ["digits_cnn.py:smoke", "bert_large_lamb.py:mixed", "sweeps/digits_limit.py"]


@pytest.mark.parametrize("kind", [TrainConfig, SweepConfig])
def test_every_field_has_a_meaning(kind):
    entries = config_fields(kind)
    assert [one.name for one in entries if not re.search(r"\w.*[.:]$", one.meaning)] == []
    assert len(entries) > 200
    assert len({one.name for one in entries}) == len(entries)


@pytest.mark.parametrize("row", ROWS)
def test_the_flags_of_a_config_give_that_config(configs, row):
    """A value is shown as a flag takes it."""
    file = str(configs / row)
    config = call_get_config(file)
    entries = [one for one in config_fields(config) if _field_lists.is_settable(one)]
    flags = [_field_lists.flag_of(one) for one in entries if one.applies]
    assert len(flags) > 50
    assert load_config(file, flags, (TrainConfig, SweepConfig)) == config


@pytest.mark.parametrize("row", ROWS)
def test_a_field_applies_where_a_flag_may_set_it(configs, row):
    config = call_get_config(str(configs / row))
    entries = [one for one in config_fields(config) if _field_lists.is_settable(one)]
    idle = 0
    for entry in entries:
        if type(entry.value) not in (bool, int, float):
            continue
        idle += not entry.applies
        changed = copy.deepcopy(config)
        group = operator.attrgetter(entry.group)(changed) if entry.group else changed
        setattr(group, entry.name.rpartition(".")[2], not entry.value)
        code = None
        try:
            check_flag(changed, entry.name, entry.value)
        except UserError as error:
            code = error.code
        assert code == (None if entry.applies else "unused"), entry.name
    assert idle > 20


def test_a_field_is_shown_with_its_value_unit_and_condition(lbopt, small):
    given = (*small, "--config.optimizer.b1=0.8")
    code, out, err = lbopt("config", *given, "optimizer.b1")
    assert (code, err) == (0, "")
    assert out == (
        "optimizer.b1: float = 0.9, here 0.8\n"
        "    Decay of the first moment, in [0, 1).\n"
        "    Applies where optimizer.name = 'adam', 'adamw', 'lamb' or 'lans'.\n"
    )
    (shown,) = json.loads(lbopt("config", *given, "--json", "schedule.warmup_steps")[1])
    assert (shown["unit"], shown["value"], shown["applies"]) == ("steps", None, True)
    (shown,) = json.loads(lbopt("config", *given, "--json", "optimizer.momentum")[1])
    assert (shown["default"], shown["applies"]) == (0.9, False)


@pytest.mark.parametrize("given", [False, True])
def test_every_field_is_listed(lbopt, configs, given):
    flags = [f"--config={configs / 'digits_cnn.py'}:smoke"] if given else []
    code, out, err = lbopt("config", *flags)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    listed = set(re.findall(r"^([\w.\[\]]+): \S", out, re.MULTILINE))
    wanted = {one.name for one in config_fields(TrainConfig)}
    if not given:
        wanted |= {one.name for one in config_fields(SweepConfig) if "." not in one.name}
    # The schedule of the second phase has the fields of the first one's.
    wanted = {name for name in wanted if not name.startswith("phase2.schedule.")}
    assert wanted <= listed


def test_the_fields_of_any_arm_and_of_one(lbopt, configs):
    file = f"--config={configs / 'sweeps' / 'digits_limit.py'}"
    everywhere = json.loads(lbopt("config", file, "--json", "arms.optimizer.name")[1])
    assert [one["value"] for one in everywhere] == ["momentum", "adam", "adamw", "lars", "lamb"]
    (one,) = json.loads(lbopt("config", file, "--json", "arms[3].optimizer.name")[1])
    assert one["value"] == "lars"
    (one,) = json.loads(lbopt("config", file, "--json", "train.seed")[1])
    assert not one["applies"]
    assert "search.seeds" in one["why_unused"]


@pytest.mark.parametrize(
    ("asked", "near"), [("b1", "optimizer.b1"), ("optimizer.weight_decy", "optimizer.weight_decay")]
)
def test_an_unknown_field_is_refused_with_near_names(refusing, asked, near):
    with refused("FIELD", asked, "choice") as caught:
        refusing("config", asked)
    assert near in str(caught.value)


def test_help_lists_the_fields_of_a_config(lbopt, configs, capsys):
    out = []
    for flags in ([], [f"--config={configs / 'digits_cnn.py'}:smoke"]):
        with pytest.raises(SystemExit):
            lbopt("train", *flags, "--help")
        out.append(capsys.readouterr().out)
    assert "with --config=FILE[:ROW], --help lists the fields" in out[0]
    assert "--config.optimizer.b1=0.9\n" not in out[0]
    assert "  --config.optimizer.b1=0.9\n      Decay of the first moment" in out[1]
    assert "--config.optimizer.momentum" not in out[1]
    assert max(map(len, "".join(out).splitlines())) <= 100
