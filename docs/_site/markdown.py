"""Markdown that pages of the site are made of."""


def table(header, rows):
    """Return a table in Markdown; vertical bars inside a cell are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(value):
    return str(value).replace("|", "\\|")
