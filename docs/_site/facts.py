"""Numbers and tables of the site, read from the files that measured them.

A page writes `{= EXPRESSION =}` where such a fact belongs. The names that an expression can use are
the functions of this module in `__all__`. A name or key that does not exist ends the build.
"""

import functools
import json
import pathlib
import re
import tomllib

import jinja2

ROOT = pathlib.Path(__file__).parents[2]

__all__ = ["extras", "percent", "study", "supported", "version"]


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
    return environment


@functools.cache
def study(name):
    """Return the summary of a study in `configs/sweeps/`."""
    return json.loads((ROOT / "configs" / "sweeps" / f"{name}.json").read_text())


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
