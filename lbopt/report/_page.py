"""HTML pages that are complete in one file, without scripts, fonts and requests."""

from __future__ import annotations

import base64
import io
import pathlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from lbopt._shown import printable
from lbopt.errors import MissingPackage
from lbopt.report._colours import GREY, GRID, INK, PAPER, SOFT_INK, dark_colours
from lbopt.report._template import PAGE, STYLE
from lbopt.workdir import environment_changes, machine_text, write_bytes, write_text


class Picture(NamedTuple):
    """A figure with its caption.

    Attributes:
      svg: SVG file, in base64.
      alt: Text for readers who cannot see the figure.
      caption: Text below the figure.
      wide: Whether the figure keeps its width on a phone and scrolls; for figures with many panels.
    """

    svg: str
    alt: str
    caption: str = ""
    wide: bool = False


class Section(NamedTuple):
    """A section of a page, folded below its heading. Empty parts are left out.

    Attributes:
      heading: Title of the section.
      paragraphs: Paragraphs of text.
      header: Names of the table's columns.
      rows: Rows of the table.
      code: Preformatted text.
      items: Items of a list below the paragraphs.
      pictures: Figures with captions.
      definitions: Pairs of a term and its meaning, below the list.
      links: Pairs of a text and a file, whose path begins at the page's folder, below them.
      note: Text below the table.
      best: Places (row, column) of the table's bold cells.
      colours: Colour of a square before the first cell of a row, by the cell's text.
      shown: Whether the section is unfolded at first.
    """

    heading: str
    paragraphs: Sequence[str] = ()
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    code: str = ""
    items: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    definitions: Sequence[tuple[str, str]] = ()
    links: Sequence[tuple[str, str]] = ()
    note: str = ""
    best: Collection[tuple[int, int]] = ()
    colours: Mapping[str, str] = {}
    shown: bool = False


class DataFile(NamedTuple):
    """A file that the page contains, for download.

    Attributes:
      name: Name of the file.
      kind: MIME type.
      content: The file, in base64.
    """

    name: str
    kind: str
    content: str

    @classmethod
    def of(cls, name: str, text: str) -> DataFile:
        """Return the file of a text; its name ends in .csv, .json or .jsonl."""
        kind = "text/csv" if name.endswith(".csv") else "application/json"
        data = text.encode("utf-8", "backslashreplace")
        return cls(name, kind, base64.b64encode(data).decode("ascii"))


def write_page(
    file: pathlib.Path,
    title: str,
    lead: str,
    sections: Sequence[Section],
    top: Section | None = None,
    files: Sequence[DataFile] = (),
) -> None:
    """Write a page; text is escaped.

    Args:
      file: File to write.
      title: Title of the page, also its heading.
      lead: First paragraph.
      sections: Folded sections, in their order.
      top: Table, note and figures above them, always shown.
      files: Files that the page contains.
    """
    jinja2 = need("jinja2")
    template = jinja2.Environment(autoescape=True, finalize=_shown).from_string(PAGE)
    taken: set[str] = set()
    shown = [_Placed(section, _anchor(section.heading, taken)) for section in sections]
    text = template.render(
        title=title,
        lead=lead,
        style=jinja2.utils.markupsafe.Markup(STYLE),
        sections=shown,
        top=top and _Placed(top, ""),
        files=files,
    )
    # As in `printable`, no letter of the file is an unusual space.
    for space in (_DIGIT_SPACE, _POINT_SPACE):
        text = text.replace(space, f"&#{ord(space)};")
    write_text(file, text.lstrip())


def _shown(value: Any) -> Any:
    return printable(value, keep="\n") if type(value) is str else value


def _anchor(heading: str, taken: set[str]) -> str:
    """Return the address of a section within its page, and add it to those taken."""
    words = "-".join(re.findall(r"[a-z0-9]+", heading.lower())) or "section"
    anchor = words
    while anchor in taken:
        anchor = f"{words}-{len(taken)}"
    taken.add(anchor)
    return anchor


# ---- tables

_STARTS_AS_NUMBER = re.compile(r"[<>+-]?\s?\d")
_NUMBER = re.compile(r"[+-]?[\d,]+(?:\.(\d+))?")
_LONG = 40
"""Letters from which the text of a cell may be broken into lines."""
_DIGIT_SPACE = "\u2007"
_POINT_SPACE = "\u2008"


class _ShownCell(NamedTuple):
    """A cell of a table as the template shows it; `pad` is space that aligns decimal points."""

    text: str
    pad: str
    best: bool
    chip: str


class _Placed:
    """A section with its anchor and its table's cells; other attributes are the section's."""

    def __init__(self, section: Section, anchor: str) -> None:
        self._section = section
        self._kinds = [_kind(column) for column in zip(*section.rows, strict=True)]
        self.anchor = anchor
        self.cells = self._cells()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._section, name)

    def kind(self, column: int) -> str:
        """Return the CSS class of a column: "number", "long" or ""."""
        return self._kinds[column]

    def _cells(self) -> list[list[_ShownCell]]:
        section = self._section
        columns = [decimal_pads(column) for column in zip(*section.rows, strict=True)]
        return [
            [
                _ShownCell(
                    text,
                    pads[place] if kind == "number" else "",
                    (place, column) in section.best,
                    section.colours.get(text, "") if column == 0 else "",
                )
                for column, (text, pads, kind) in enumerate(
                    zip(row, columns, self._kinds, strict=True)
                )
            ]
            for place, row in enumerate(section.rows)
        ]


def _kind(column: Sequence[str]) -> str:
    """Return "number" for a column mostly of numbers, "long" for one of sentences, else ""."""
    told = [text for text in column if text]
    numbers = sum(bool(_STARTS_AS_NUMBER.match(text)) for text in told)
    if told and 2 * numbers >= len(told):
        return "number"
    return "long" if any(len(text) > _LONG for text in told) else ""


def decimal_pads(column: Sequence[str]) -> list[str]:
    """Return space after each cell that aligns the decimal points of a column of numbers.

    >>> [len(pad) for pad in decimal_pads(["1.25", "10", "", "never", "0.5"])]
    [0, 3, 0, 0, 1]
    """
    found = [_NUMBER.fullmatch(text) for text in column]
    places = [len(one[1] or "") if one else 0 for one in found]
    most = max(places, default=0)
    pads = []
    for one, count in zip(found, places, strict=True):
        point = _POINT_SPACE if not count else ""
        pads.append(point + _DIGIT_SPACE * (most - count) if one and most else "")
    return pads


def plain_label(text: str) -> str:
    """Escape a name so that matplotlib shows it letter by letter.

    Matplotlib sets text between two dollar signs as mathematics, and leaves labels that begin with
    an underscore out of legends.

    >>> plain_label("costs $2 $3"), plain_label("_base")
    ('costs \\\\$2 \\\\$3', ' _base')
    """
    shown = printable(text, keep="\n").replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


# ---- figures

WIDTH = 5.0
"""Width of a figure in inches; text of 10 points stays readable on a phone of 340 pixels."""
_TEXT = {
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.titlecolor": INK,
    "xtick.color": SOFT_INK,
    "ytick.color": SOFT_INK,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.labelcolor": INK,
    "grid.color": GRID,
    "axes.facecolor": PAPER,
    "figure.facecolor": PAPER,
}


def new_figure(width_inches: float = 8.0, height_inches: float = 4.8) -> tuple[Any, Any]:
    """Return a figure and its axes; no display is needed."""
    need("jinja2")
    figure, ((axes,),) = new_panels(1, 1, width_inches, height_inches)
    tidy(axes)
    return figure, axes


def new_panels(
    rows: int, columns: int, width_inches: float, height_inches: float, **options: Any
) -> tuple[Any, list[list[Any]]]:
    """Return a figure and its panels, row by row; options are those of `Figure.subplots`."""
    matplotlib = need("matplotlib")
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_TEXT):
        figure = Figure((width_inches, height_inches), dpi=144, layout="constrained")
        return figure, figure.subplots(rows, columns, squeeze=False, **options).tolist()


def tidy(axes: Any) -> None:
    """Draw a grid behind an axes, and no frame at its top and right."""
    axes.grid(True, color=GRID)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


def save_figure(figure: Any, file: pathlib.Path) -> str:
    """Write a PNG and return the figure as SVG for a page, in base64.

    The SVG has colours of its own for dark mode. Letters are outlines, so that it needs no font.
    """
    matplotlib = need("matplotlib")
    buffer = io.BytesIO()
    drawn = io.BytesIO()
    with matplotlib.rc_context(_TEXT | {"svg.hashsalt": file.stem, "svg.fonttype": "path"}):
        figure.savefig(buffer, format="png", metadata={"Software": None})
        write_bytes(file, buffer.getvalue())
        _without_black(figure)
        figure.set_layout_engine("none")  # the panels stay where the PNG has them
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    return base64.b64encode(with_dark_mode(drawn.getvalue().decode()).encode()).decode("ascii")


def _without_black(figure: Any) -> None:
    """Draw black texts and lines, matplotlib's default, in the colour that dark mode exchanges."""
    for one in figure.findobj(lambda artist: hasattr(artist, "get_color")):
        colour = one.get_color()
        if isinstance(colour, str) and colour in ("black", "k", "#000000"):
            one.set_color(INK)


def with_dark_mode(svg: str) -> str:
    """Add a style sheet to an SVG of matplotlib that exchanges its colours in dark mode."""
    rules = [
        f'[style*="{part}: {light}"] {{ {part}: {dark} !important }}'
        for light, dark in dark_colours().items()
        for part in ("fill", "stroke")
        if f"{part}: {light}" in svg
    ]
    style = "<style>@media (prefers-color-scheme: dark) {\n" + "\n".join(rules) + "\n}</style>"
    head, tag, body = svg.partition("<defs>")
    return f"{head}{style}{tag}{_COORDINATES.sub(_rounded, body)}"


_COORDINATES = re.compile(r' (?:d|x|y|points)="[^"]*"')
_DECIMALS = re.compile(r"(\.\d\d)\d+")


def _rounded(attribute: re.Match[str]) -> str:
    """Return coordinates with two decimals, a hundredth of a point."""
    return _DECIMALS.sub(r"\1", attribute[0])


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
    return f"{command}\n\n{versions}\n{revision}{machine_text(saved)}{resumed}"


def need(package: str) -> Any:
    """Import a package of the `demo` extra.

    Raises:
      MissingPackage: If it is not installed; the message has the command that installs it.
    """
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError as error:
        fix = "the report needs it, and it is not installed: pip install 'lbopt[demo]'"
        raise MissingPackage(package, reason=fix) from error
