"""Numbers and tables of the site, read from the files that measured them.

A page writes `{= EXPRESSION =}` where such a fact belongs. The names that an expression can use are
the functions of this module in `__all__`, and those of `_site.fields` in its `FACTS`. A name or
key that does not exist ends the build.
"""

import functools
import json
import pathlib
import re
import tomllib

import jinja2

from _site import fields
from _site.api import api, api_table
from _site.command import commands, flags, job_flags
from _site.config_fields import field_groups
from lbopt.transforms import VARIANTS
from lbopt.transforms._describe import variants_table

ROOT = pathlib.Path(__file__).parents[2]

__all__ = [
    "api",
    "api_table",
    "arm",
    "claim",
    "collectives",
    "commands",
    "extras",
    "field_groups",
    "finding",
    "flags",
    "gain",
    "job_flags",
    "number",
    "percent",
    "plan",
    "scores",
    "study",
    "supported",
    "variant_entries",
    "variant_source",
    "variants",
    "version",
]


def fill_in(app, page, source):
    """Replace the expressions in the source of a page; Sphinx calls this as it reads the page."""
    source[0] = rendered(source[0], page)


def rendered(text, page):
    """Return the text of a page with its expressions replaced.

    Raises:
      RuntimeError: Naming the page and the line, if an expression cannot be evaluated.
    """
    try:
        return _environment().from_string(text).render()
    except (jinja2.TemplateError, LookupError, TypeError, ValueError, OSError) as error:
        line = getattr(error, "lineno", None) or "?"
        raise RuntimeError(f"docs/{page}, line {line}: {error}") from error


@functools.cache
def _environment():
    environment = jinja2.Environment(
        variable_start_string="{=",
        variable_end_string="=}",
        block_start_string="{%%",
        block_end_string="%%}",
        comment_start_string="{##",
        comment_end_string="##}",
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.globals.update({name: globals()[name] for name in __all__})
    environment.globals.update({name: getattr(fields, name) for name in fields.FACTS})
    return environment


@functools.cache
def study(name):
    """Return the summary of a study in `configs/sweeps/`."""
    return json.loads((ROOT / "configs" / "sweeps" / f"{name}.json").read_text())


@functools.cache
def plan(name):
    """Return a plan in `configs/plans/`."""
    return json.loads((ROOT / "configs" / "plans" / f"{name}.json").read_text())


def claim(name, of):
    """Return a claim of a study: a dict with `verdict` and `sentence`."""
    (found,) = (one for one in study(of)["claims"] if one["claim"] == name)
    return found


def finding(name, begins):
    """Return the finding of a study that begins so."""
    (found,) = (text for text in study(name)["findings"] if text.startswith(begins))
    return found


def gain(name, arm):
    """Return an arm of an ablation: a dict with `mean`, `gain` and the gain's interval."""
    (found,) = (step for step in study(name)["waterfall"]["steps"] if step["arm"] == arm)
    return found


def collectives(name, phase=1):
    """Return the exchanges in a step of a plan in Markdown, added up by purpose."""
    added = {}
    for one in plan(name)["collectives"]:
        if one.get("phase", 1) == phase:
            kind = (one["source"], one["op"], one["dtype"], f"{one['group_size']:,}")
            added[kind] = added.get(kind, 0) + one["bytes"]
    lines = [["purpose", "exchange", "dtype", "devices in a group", "MB a device"], ["---"] * 5]
    return "\n".join(
        map(_cells, lines + [[*kind, f"{size / 1e6:,.3f}"] for kind, size in added.items()])
    )


def variants(optimizer):
    """Return the table of all variants of "lamb" or "lars" in Markdown, without their sources.

    Each name links to the variant's entry; see `variant_entries`.
    """
    lines = [re.split(r"\s{2,}", line)[:-1] for line in variants_table(optimizer).splitlines()]
    header, *rest = lines
    linked = [[f"[`{name}`](#{optimizer}-{name})", *cells] for name, *cells in rest]
    return "\n".join(map(_cells, [["variant", *header[1:]], ["---"] * len(header), *linked]))


def _cells(cells):
    return f"| {' | '.join(cells)} |"


def variant_source(optimizer, name):
    """Return the source of a variant: a file at a commit, or a paper with its version."""
    return VARIANTS[optimizer][name].source


def variant_entries(optimizer):
    """Return a section for each variant of "lamb" or "lars": source, options, peculiarities."""
    return "\n\n".join(_entry(variant) for variant in VARIANTS[optimizer].values())


def _entry(variant):
    options = [f"`{name}={value!r}`" for name, value in variant.differences().items()]
    lines = [
        f"### {variant.optimizer.upper()} {variant.name}",
        f'Call: `lbopt.{variant.optimizer}(learning_rate, variant="{variant.name}")`',
        f"Source: {_linked(variant.source)}",
        f"Options that differ from the paper's: {', '.join(options) or 'none'}.",
        variant.about,
    ]
    return "\n\n".join(lines)


def _linked(source):
    """Return a source as Markdown: a file at a commit links to the repository at that commit."""
    paper = re.search(r"arXiv:([\d.]+v\d+)", source)
    if paper:
        return source.replace(paper[0], f"[{paper[0]}](https://arxiv.org/abs/{paper[1]})")
    repository, commit, place = re.fullmatch(r"([^@]+)@(\w+):(.*)", source).groups()
    return f"[{repository}@{commit[:7]}](https://github.com/{repository}/tree/{commit}), {place}"


def number(value, digits=0):
    """Return a number with separators of thousands."""
    return f"{value:,.{digits}f}"


def percent(share, digits=1):
    """Return a share as a percentage, without the sign."""
    return f"{100 * share:.{digits}f}"


def extras(purposes):
    """Return a table of the extras in pyproject.toml.

    Args:
      purposes: What each extra is for.

    Raises:
      ValueError: If an extra has no purpose, or is not in pyproject.toml.
    """
    found = _project()["optional-dependencies"]
    if found.keys() != purposes.keys():
        raise ValueError(f"extras(): describe exactly {sorted(found)}")
    lines = ["| extra | what it is for | what it installs |", "|---|---|---|"]
    for name, purpose in purposes.items():
        packages = ", ".join(f"`{one.partition(';')[0].strip()}`" for one in found[name])
        lines.append(f"| `{name}` | {purpose} | {packages} |")
    return "\n".join(lines)


def supported(package):
    """Return the oldest supported version of a package that every install needs."""
    (version,) = (
        found[1]
        for one in _project()["dependencies"]
        if (found := re.fullmatch(rf"{package}>=([\w.]+)", one))
    )
    return version


@functools.cache
def _project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def version():
    """Return lbopt's version."""
    import lbopt

    return lbopt.__version__


def arm(name, label):
    """Return an arm of a study by its label."""
    (found,) = (one for one in study(name)["arms"] if one["arm"] == label)
    return found


def scores(name):
    """Return a table of a study: the mean test accuracy of each arm at each batch, in percent."""
    arms = study(name)["arms"]
    sizes = [f"{point['global_batch_size']:,}" for point in arms[0]["points"]]
    lines = [["test accuracy, %", *sizes, "limit"], ["---", *["---:"] * (len(sizes) + 1)]]
    for one in arms:
        means = [percent(point["test_accuracy_mean"], 2) for point in one["points"]]
        lines.append([one["arm"], *means, _limit(one["limit"])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _limit(limit):
    """Return a limit with its interval in words."""
    if limit["outcome"] == "cannot_tell":
        return "cannot be told"
    low, high = (f"{end:.0f}" if end else "beyond" for end in (limit["low"], limit.get("high")))
    if limit["outcome"] == "not_reached":
        return f"not reached ({low} at least)"
    return f"{limit['global_batch_size']:.0f} ({low} to {high})"
