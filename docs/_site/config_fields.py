"""Tables of the fields of a config, read from the config dataclasses."""

import re

from _site import api
from lbopt.config import SweepConfig, TrainConfig, config_fields
from lbopt.errors import NO_VALUE

_CONFIGS = {"TrainConfig": TrainConfig, "SweepConfig": SweepConfig}


def field_groups(config):
    """Return the sections of a config: one heading and one table for each group of fields.

    Args:
      config: "TrainConfig" or "SweepConfig". A group that both have is listed with the first.
    """
    lines = []
    for group, entries in _groups(config).items():
        title = f"`{group}`" if group else "Fields of the config itself"
        lines += [f"({_anchor(config, group)})=", f"### {title}", ""]
        if group:
            lines += [f"Fields of `lbopt.config.{entries[0].kind}`.", ""]
        lines += ["```{eval-rst}", ".. list-table::", "   :class: fields", "   :header-rows: 1", ""]
        lines += ["   * - Field", "     - Type and default", "     - Meaning"]
        for entry in entries:
            lines += _row(entry, group, config)
        lines += ["```", ""]
    return "\n".join(lines)


def setup(app):
    """Register with Sphinx what lets other pages link to a field."""
    app.connect("doctree-read", _register)


def _register(app, doctree):
    """Make the anchors of fields known as labels: {ref}`b1 <config.optimizer.b1>`.

    Sphinx does not look for labels inside the cells of a table.
    """
    from docutils import nodes  # tests read the tables without Sphinx

    labels = app.env.get_domain("std").anonlabels
    for cell in doctree.findall(nodes.paragraph):
        for name in cell["names"]:
            if name.startswith(("config.", "study.")):
                labels[name] = app.env.docname, cell["ids"][0]


def _groups(config):
    """Return {dotted name of a group: its entries}, each dataclass once."""
    found = {}
    listed = {entry.kind for entry in config_fields(TrainConfig)} if config != "TrainConfig" else ()
    homes = {}
    # Groups of arms come last, as each arm may have a search like that of the study.
    for entry in sorted(config_fields(_CONFIGS[config]), key=lambda one: "[" in one.group):
        if homes.setdefault(entry.kind, entry.group) == entry.group and entry.kind not in listed:
            found.setdefault(entry.group, []).append(entry)
    return found


def _row(entry, group, config):
    """Yield the lines of a field in a list-table."""
    default = "" if entry.default is NO_VALUE else f" = ``{entry.default!r}``"
    unit = f" ({entry.unit})" if entry.unit else ""
    meaning = _cased(entry.meaning)
    notes = [f"Applies where {_conditions(entry.condition)}."] if entry.condition else []
    if entry.why_unused:
        notes = [f"Has no effect: {api.inline(entry.why_unused)}."]
    if entry.holds:
        notes.append(f"The fields are those of {_link(entry.holds)}.")

    yield f"   * - .. _{_label(entry.name, config)}:"
    yield ""
    yield f"       ``{entry.name}``"
    yield f"     - ``{entry.type}``{default}{unit}"
    yield f"     - {' '.join([api.inline(meaning), *notes])}"


def _label(name, config):
    """Return the anchor of a field: that of its flag, `config.optimizer.b1`, or `study.name`."""
    top = "config" if config == "TrainConfig" else "study"
    return f"{top}.{name}".lower().replace("[n]", "")


def _anchor(config, group):
    """Return the anchor of the section of a group."""
    return f"{config}.{group}".lower().replace("[n]", "").strip(".")


def _conditions(text):
    """Return a condition with its fields and assignments as code."""
    field = r"\b[a-z]\w*(?:\[N\])?(?:\.\w+)*"
    code = rf"{field} = (?:'[^']*'|\w+)|{field}(?= is )"
    return re.sub(code, lambda one: f"``{one[0]}``", text)


def _link(kind):
    """Return a link to the group in which the fields of a dataclass are listed."""
    for config in _CONFIGS:
        for group, entries in _groups(config).items():
            if entries[0].kind == kind:
                return f":ref:`{group or 'a run'} <{_anchor(config, group)}>`"
    raise ValueError(f"no group lists the fields of {kind}")


def _cased(text):
    return text if text.endswith(".") else f"{text}."
