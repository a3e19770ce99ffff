"""Tables of the benchmarks, from what `scripts/bench NAME --json=FILE` wrote."""

import ast
import json
import pathlib
import re
import runpy

from _site.markdown import table

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "results" / "benchmarks"
FACTS = ("benchmark", "benchmark_list", "benchmarks", "measurement", "measurements", "ratios")


def benchmarks():
    """Return {name: what it measures} of all benchmarks, from scripts/benchmarks/run.py."""
    return runpy.run_path(str(ROOT / "scripts" / "benchmarks" / "run.py"))["BENCHMARKS"]


def benchmark_list():
    """Return the table of all benchmarks."""
    rows = [(f"[`{name}`](#{name})", text) for name, text in benchmarks().items()]
    return table(("benchmark", "what it measures"), rows)


def benchmark(name):
    """Return what a benchmark does, and its table."""
    described = _paragraphs(name)
    command = f"scripts/bench {name} --json=docs/results/benchmarks/{name}.json"
    rows = measurements(name)
    shown = table(
        ("what", "unit", "lbopt", "peer", "peer is", "ratio", "wanted", "met"),
        [_cells(one) for one in rows],
    )
    return f"{described}\n\n{_circumstances(rows[0], command)}\n\n{shown}"


def measurements(name):
    """Return the rows of a benchmark: dicts of "name", "ours", "peer", "ratio" and so on."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def measurement(name, row):
    """Return a row of a benchmark by its name."""
    (found,) = [one for one in measurements(name) if one["name"] == row]
    return found


def ratios(name, *words, peer, digits=0):
    """Return "LOW to HIGH", the rounded ratios to a peer of the rows whose names have all words."""
    found = [
        row["ratio"]
        for row in measurements(name)
        if row["peer_name"] == peer and all(word in row["name"] for word in words)
    ]
    return f"{min(found):.{digits}f} to {max(found):.{digits}f}"


def _cells(one):
    figures = {
        key: "-" if one[key] is None else _figure(one[key]) for key in ("ours", "peer", "ratio")
    }
    return (
        one["name"],
        one["unit"],
        figures["ours"],
        figures["peer"],
        one["peer_name"] or "-",
        figures["ratio"],
        *_wanted(one),
    )


def _wanted(one):
    """Return what a row should reach, and whether it does."""
    if one["aim"] is None:
        return "-", "-"
    of, sign, value = one["aim"]
    sign = {">=": "≥", "<=": "≤"}[sign]
    return f"{of} {sign} {_figure(value)}", "yes" if one["met"] else "**no**"


def _figure(value):
    """Return a number with four digits that count, and no exponent where it is large."""
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _circumstances(one, command):
    """Return the command, the machine and the versions behind a table."""
    versions = one["versions"]
    named = ", ".join(
        f"{label} {versions[name]}"
        for name, label in (("python", "Python"), ("jax", "JAX"), ("libtpu", "libtpu"))
        if versions.get(name)
    )
    revision = one["git_revision"][:8]
    return f"`{command}`  \nMachine: {one['device']}. Versions: {named}. Revision: {revision}."


def _paragraphs(name):
    """Return the docstring of a benchmark's file, with its code in Markdown."""
    file = ROOT / "scripts" / "benchmarks" / f"bench_{name}.py"
    text = ast.get_docstring(ast.parse(file.read_text()))
    return re.sub(r"(?<![`\n])\n(?!\n)", " ", text)
