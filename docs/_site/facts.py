"""Numbers and tables of the site, read from the files that measured them.

A page writes `{= EXPRESSION =}` where such a fact belongs. The names that an expression can use are
the functions of this module in `__all__`, and those of its neighbours in their
`FACTS`. A name or key that does not exist ends the build.
"""

import functools
import hashlib
import pathlib
import re
import tomllib

import jinja2
from packaging.requirements import Requirement

from _site import benchmarks, fields, plans, recipes, studies
from _site.api import api, api_table
from _site.command import commands, flags, job_flags
from _site.config_fields import field_groups
from _site.markdown import table
from lbopt.cli._extras import EXTRAS
from lbopt.schedules import RULES
from lbopt.transforms import VARIANTS
from lbopt.transforms._describe import variants_table

ROOT = pathlib.Path(__file__).parents[2]

__all__ = [
    "api",
    "api_table",
    "bibtex",
    "commands",
    "extras",
    "field_groups",
    "flags",
    "job_flags",
    "newest",
    "scaling_rules",
    "scaling_sources",
    "supported",
    "variant_entries",
    "variant_source",
    "variants",
    "version",
]


def fill_in(app, page, source):
    """Replace the expressions in the source of a page; Sphinx calls this as it reads the page."""
    if "{=" in source[0]:
        app.env.note_reread()  # the files behind a page change without it
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
    for module in (benchmarks, fields, plans, recipes, studies):
        environment.globals.update({name: getattr(module, name) for name in module.FACTS})
    return environment


def bibtex():
    """Return the BibTeX entry of this version; a page cannot write braces around an expression."""
    return f"""@software{{lbopt,
  author  = {{{{The lbopt authors}}}},
  title   = {{lbopt: training with very large batches in {{JAX}}}},
  version = {{{version()}}},
  year    = {{2026}},
  url     = {{https://github.com/lbopt/lbopt}}
}}"""


def variants(optimizer):
    """Return the table of all variants of "lamb" or "lars" in Markdown, without their sources.

    Each name links to the variant's entry; see `variant_entries`.
    """
    lines = [re.split(r"\s{2,}", line)[:-1] for line in variants_table(optimizer).splitlines()]
    header, *rest = lines
    linked = [[f"[`{name}`](#{optimizer}-{name})", *cells] for name, *cells in rest]
    return table(["variant", *header[1:]], linked)


def scaling_rules():
    """Return the table of scaling rules in Markdown: what each changes, and where it holds."""
    regimes = {"noise": "noise dominates", "below critical": "below the critical batch", "": ""}
    rows = []
    for rule in RULES.values():
        changes = [f"`{one.number}` {one.formula}" for one in rule.changes if one.formula != "x"]
        stays = [f"`{one.number}`" for one in rule.changes if one.formula == "x"]
        kept = [f"{', '.join(stays)} stays"] if stays else []
        optimizers = ", ".join(f"`{name}`" for name in rule.optimizers) or "any"
        cells = ["<br>".join([*changes, *kept]) or "nothing", optimizers, regimes[rule.regime]]
        rows.append([f"`{rule.name}`: {rule.about}", *cells])
    return table(["rule", "changes", "optimizers", "holds where"], rows)


def scaling_sources():
    """Return the public source of each scaling rule, as a list in Markdown."""
    return "\n".join(f"- `{rule.name}`: {rule.source}" for rule in RULES.values() if rule.changes)


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


def extras(others):
    """Return a table of the extras in pyproject.toml.

    Args:
      others: What the extras are for that lbopt itself never names.

    Raises:
      ValueError: If an extra has no purpose, or is not in pyproject.toml.
    """
    found = _project()["optional-dependencies"]
    purposes = {name: packages.purpose for name, packages in EXTRAS.items()} | others
    if found.keys() != purposes.keys():
        raise ValueError(f"extras(): describe exactly {sorted(found.keys() - EXTRAS.keys())}")
    rows = [
        (f"`{name}`", purpose, ", ".join(f"`{_package(one)}`" for one in found[name]))
        for name, purpose in purposes.items()
    ]
    return table(("extra", "what it is for", "what it installs"), rows)


def _package(requirement):
    """Return a requirement without its conditions."""
    return requirement.partition(";")[0].strip()


def supported(package):
    """Return the oldest supported version of a package that every install needs."""
    (version,) = (
        found[1]
        for one in _project()["dependencies"]
        if (found := re.fullmatch(rf"{package}>=([\w.]+)", one))
    )
    return version


def newest(package, python):
    """Return the newest version of a package that is tested on a Python, "3.12" for instance."""
    text = (ROOT / "scripts" / "constraints.txt").read_text()
    pins = [Requirement(line) for line in text.splitlines() if line.startswith(f"{package}==")]
    (version,) = (
        pin.specifier
        for pin in pins
        if pin.marker is None or pin.marker.evaluate({"python_version": python})
    )
    return str(version).removeprefix("==")


@functools.cache
def _project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def version():
    """Return lbopt's version."""
    import lbopt

    return lbopt.__version__


def revision():
    """Return a digest of lbopt and its configs: outputs of notebooks are kept for as long as it."""
    digest = hashlib.sha256()
    for folder in ("lbopt", "configs"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
