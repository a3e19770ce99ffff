"""HTML pages that are complete in one file, without scripts, fonts and requests."""

from __future__ import annotations

import base64
import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lbopt._shown import printable
from lbopt.errors import MissingPackage
from lbopt.workdir import environment_changes, write_bytes, write_text

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{{ title }}</title>
<style>
  body {
    font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
    color: #222; background: #fff; overflow-wrap: break-word;
  }
  h1 { line-height: 1.2; } h2 { margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
  img { max-width: 100%; height: auto; }
  figure { margin: 1rem 0; overflow-x: auto; }
  figure img { display: block; width: 38rem; }
  figure.panels img { width: 46rem; }
  figcaption { font-size: 0.9rem; color: #555; }
  .wide { overflow-x: auto; }
  table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
  th, td {
    padding: 0.25rem 0.7rem; text-align: right; border-bottom: 1px solid #eee; white-space: nowrap;
  }
  th { white-space: normal; vertical-align: bottom; }
  th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; }
  li { margin: 0.3rem 0; }
  dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.2rem 1rem; }
  dt { color: #555; } dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
  pre { background: #f6f6f6; padding: 0.8rem; overflow-x: auto; }
  summary { cursor: pointer; padding: 0.4rem 0; }
  @media (max-width: 40rem) {
    figure.panels img { max-width: none; width: 34rem; }
    dl { display: block; } dd { margin-bottom: 0.5rem; }
    th:first-child, td:first-child {
      min-width: 6.5rem; max-width: 8rem; white-space: normal; overflow-wrap: anywhere;
    }
  }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p>{{ lead }}</p>
{% for section in sections %}
<h2>{{ section.heading }}</h2>
{% for paragraph in section.paragraphs %}<p>{{ paragraph }}</p>
{% endfor %}
{% if section.items %}<ul>
{% for item in section.items %}<li>{{ item }}</li>
{% endfor %}</ul>{% endif %}
{% if section.definitions %}<dl>
{% for term, text in section.definitions %}<dt>{{ term }}</dt><dd>{{ text }}</dd>
{% endfor %}</dl>{% endif %}
{% if section.links %}<ul>
{% for text, file in section.links %}<li><a href="{{ file|urlencode }}">{{ text }}</a></li>
{% endfor %}</ul>{% endif %}
{% if section.png -%}
<img alt="{{ section.heading }}" src="data:image/png;base64,{{ section.png }}">{% endif %}
{% for picture in section.pictures -%}
<figure{% if picture.wide %} class="panels" tabindex="0"{% endif %}>
<img alt="{{ picture.alt }}" src="data:image/png;base64,{{ picture.png }}">
{% if picture.caption %}<figcaption>{{ picture.caption }}</figcaption>{% endif %}</figure>
{% endfor %}
{% if section.folded %}<details><summary>{{ section.folded }}</summary>{% endif %}
{% if section.rows %}<div class="wide" tabindex="0"><table>
<thead><tr>{% for name in section.header %}<th>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in section.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>{% endif %}
{% if section.folded %}</details>{% endif %}
{% if section.code %}<pre>{{ section.code }}</pre>{% endif %}
{% endfor %}
</body>
</html>
"""


class Picture(NamedTuple):
    """A figure with its caption.

    Attributes:
      png: PNG file, in base64.
      alt: Text for readers who cannot see the figure.
      caption: Text below the figure.
      wide: Whether the figure keeps its width on a phone and scrolls; for figures with many panels.
    """

    png: str
    alt: str
    caption: str = ""
    wide: bool = False


class Section(NamedTuple):
    """A section of a page. Empty parts are not shown.

    Attributes:
      heading: Title of the section.
      paragraphs: Paragraphs of text.
      png: PNG file of a figure without caption, in base64.
      header: Names of the table's columns.
      rows: Rows of the table.
      code: Preformatted text.
      items: Items of a list below the paragraphs.
      pictures: Figures with captions.
      folded: Label that unfolds the table; empty if the table is always shown.
      definitions: Pairs of a term and its meaning, below the list.
      links: Pairs of a text and a file, whose path begins at the page's folder, below them.
    """

    heading: str
    paragraphs: Sequence[str] = ()
    png: str = ""
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    code: str = ""
    items: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    folded: str = ""
    definitions: Sequence[tuple[str, str]] = ()
    links: Sequence[tuple[str, str]] = ()


def write_page(file: pathlib.Path, title: str, lead: str, sections: Sequence[Section]) -> None:
    """Write a page; text is escaped.

    Args:
      file: File to write.
      title: Title of the page, also its heading.
      lead: First paragraph.
      sections: Sections below it, in their order.
    """
    jinja2 = need("jinja2")
    template = jinja2.Environment(autoescape=True, finalize=_shown).from_string(_TEMPLATE)
    write_text(file, template.render(title=title, lead=lead, sections=sections))


def _shown(value: Any) -> Any:
    return printable(value, keep="\n") if type(value) is str else value


def plain_label(text: str) -> str:
    """Escape a name so that matplotlib shows it letter by letter.

    Matplotlib sets text between two dollar signs as mathematics, and leaves labels that begin with
    an underscore out of legends.

    >>> plain_label("costs $2 $3"), plain_label("_base")
    ('costs \\\\$2 \\\\$3', ' _base')
    """
    shown = printable(text, keep="\n").replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def new_figure(width_inches: float = 8.0, height_inches: float = 4.8) -> tuple[Any, Any]:
    """Return a figure and its axes; no display is needed."""
    need("matplotlib")
    need("jinja2")
    from matplotlib.figure import Figure

    figure = Figure((width_inches, height_inches), dpi=144, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#eeeeee")
    axes.set_axisbelow(True)
    return figure, axes


def new_panels(
    rows: int, columns: int, width_inches: float, height_inches: float, **options: Any
) -> tuple[Any, list[list[Any]]]:
    """Return a figure and its panels, row by row; options are those of `Figure.subplots`."""
    need("matplotlib")
    from matplotlib.figure import Figure

    figure = Figure((width_inches, height_inches), dpi=144, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options).tolist()


def save_figure(figure: Any, file: pathlib.Path) -> str:
    """Write a PNG and return it in base64 for a page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    write_bytes(file, buffer.getvalue())
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def environment_text(saved: Mapping[str, Any], command: str) -> str:
    """Return the command, versions and devices of a run, and what changed when it was resumed.

    Args:
      saved: The run's `config.json`.
      command: The command line.
    """
    versions = "\n".join(
        f"{name} {version}" for name, version in saved["versions"].items() if version is not None
    )
    revision = (
        f"git {saved['git_revision']}\n"
        if saved.get("git_revision")
        else "git revision not recorded\n"
    )
    if saved.get("code_revision"):
        revision += f"git {saved['code_revision']} of the config's folder\n"
    resumed = "".join(f"\nresumed with {change}" for change in environment_changes(saved))
    devices = f"{saved['num_devices']} x {saved['device_kind']}"
    return f"{command}\n\n{versions}\n{revision}{devices}{resumed}"


def need(package: str) -> Any:
    """Import a package of the `demo` extra.

    Raises:
      EnvironmentProblem: If it is not installed; the message has the command that installs it.
    """
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError as error:
        fix = "the report needs it, and it is not installed: pip install 'lbopt[demo]'"
        raise MissingPackage(package, reason=fix) from error
