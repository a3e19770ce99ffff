"""`lbopt config`: every field of a config, with type, default, meaning and where it applies."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence

from lbopt._shown import show
from lbopt.cli import _field_lists, _flags
from lbopt.config import FieldEntry, SweepConfig, TrainConfig, config_fields
from lbopt.errors import UserError

FLAGS = {
    "config": "FILE[:ROW] whose values to show, then --config.field.sub=VALUE to override",
    "json": "print a list of objects",
}
FIELD = "FIELD"
"""The field, group or beginning of a name to show, for instance `optimizer.b1`."""


def run(argv: Sequence[str]) -> None:
    """Print every field of a config, or those that a name means.

    Args:
      argv: Arguments after the command: flags, see `FLAGS`, and a field's name.

    Raises:
      UserError: If a flag is wrong, a config cannot be loaded, or there is no such field.
    """
    given, overrides = _flags.parse("config", argv, FLAGS, words=(FIELD,))
    if "config" in given:
        config = _flags.load_config(given["config"], overrides, (TrainConfig, SweepConfig))
        entries = config_fields(config)
    else:
        if overrides:
            name, _, value = overrides[0].partition("=")
            fix = "it changes the config of a file; give --config=FILE too"
            raise UserError(name, value, fix, code="unused")
        entries = [*config_fields(TrainConfig), *config_fields(SweepConfig)]

    if FIELD in given:
        entries = _meant(entries, given[FIELD])
    if "json" in given:
        show(*json.dumps(_field_lists.as_json(entries), indent=1).split("\n"))
    else:
        show(*_field_lists.reference(entries))


def _meant(entries: Sequence[FieldEntry], name: str) -> list[FieldEntry]:
    """Return the fields that a name means: a field, a group with all in it, or all that begin so.

    Raises:
      UserError: If there is none.
    """
    asked = name.removeprefix("--").removeprefix("config.").rstrip(".")
    below = re.compile(re.escape(_any_arm(asked, asked)) + r"($|[.\[])")
    found = [one for one in entries if below.match(_any_arm(one.name, asked))]
    if asked and not found:
        found = [one for one in entries if _any_arm(one.name, asked).startswith(asked)]
    if found:
        return found

    names = list(dict.fromkeys(entry.name for entry in entries))
    last = asked.rpartition(".")[2]
    near = [each for each in names if each.rpartition(".")[2] == last]
    near = (near or difflib.get_close_matches(asked, names, n=3, cutoff=0.5))[:3]
    hint = f"did you mean {' or '.join(near)}?" if near else "lbopt config lists all"
    raise UserError(FIELD, name, f"there is no such field; {hint}", code="choice")


def _any_arm(name: str, asked: str) -> str:
    """Return a field's name without the number of its arm, unless the question has a number."""
    return name if "[" in asked else re.sub(r"\[\w+\]", "", name)
