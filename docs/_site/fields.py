"""Tables of fields from docstrings, defaults of configs, and noise scales of studies."""

import importlib
import inspect
import json
import pathlib
import re

from _site.markdown import table
from lbopt import config

ROOT = pathlib.Path(__file__).parents[2]
FACTS = ("attributes", "field_default", "noise_scales")


def attributes(place):
    """Return a table of the attributes of a class, from its docstring.

    Args:
      place: Module and name, "lbopt.config.SearchConfig" for instance.
    """
    module, _, name = place.rpartition(".")
    text = inspect.getdoc(getattr(importlib.import_module(module), name))
    listed = text.split("Attributes:\n")[1].split("\n\n")[0]
    entries = re.findall(r"^  (\w+): (.+(?:\n    .+)*)", listed, re.MULTILINE)
    rows = [(f"`{field}`", " ".join(meaning.split())) for field, meaning in entries]
    return table(("field", "meaning"), rows)


def field_default(field, kind="TrainConfig"):
    """Return the default of a field of a config as Python writes it.

    Args:
      field: Dotted name, "optimizer.b1" for instance.
      kind: "TrainConfig" or "SweepConfig".
    """
    entries = config.config_fields(getattr(config, kind))
    (found,) = (one.default for one in entries if one.name == field)
    return repr(found)


def noise_scales(name, target=False):
    """Return a table of each arm: the noise scale at the smallest batch beside the batch measured.

    Args:
      name: Name of a study in `configs/sweeps/`.
      target: Whether the measured batch is the critical batch of a target; False for the limit.
    """
    what = "critical batch" if target else "limit"
    lines = [f"| arm | noise scale | {what} | ratio |", "|---|---:|---:|---:|"]
    summary = json.loads((ROOT / "configs" / "sweeps" / f"{name}.json").read_text())
    for one in summary["arms"]:
        scale = one["points"][0]["noise_scale"]
        found = one["critical_batch"] if target else one["limit"]
        batch = found["critical_batch_size" if target else "global_batch_size"]
        lines.append(f"| {one['arm']} | {scale:.0f} | {batch:.0f} | {batch / scale:.1f} |")
    return "\n".join(lines)
