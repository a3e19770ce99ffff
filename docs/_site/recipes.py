"""Tables of the recipes, from `lbopt recipes --json`, and of what the small ones reached."""

import ast
import functools
import json
import pathlib
import statistics
import subprocess
import sys

from _site import studies
from _site.markdown import table

ROOT = pathlib.Path(__file__).parents[2]
FACTS = (
    "config_docstring",
    "config_rows",
    "families",
    "family_score",
    "family_table",
    "num_recipes",
    "recipe_table",
    "small_runs",
)
FAMILIES = {
    "resnet": ("resnet50_lamb", "resnet50_lars", "resnet50_mlperf"),
    "efficientnet": ("efficientnet",),
    "bert": ("bert_large_lamb", "bert_mlperf", "squad"),
    "decoder-lm": ("decoder_lm",),
    "lstm": ("lstm_legw",),
    "small": (
        "digits_cnn",
        "digits_lstm",
        "digits_resnet",
        "digits_efficientnet",
        "pydoc_bert",
        "pydoc_lstm",
        "mnist1d",
        "fashion_mnist",
        "mnist",
        "cifar10",
    ),
}
"""The page of each config file."""


@functools.cache
def all_recipes():
    """Return every recipe as `lbopt recipes --json` prints it."""
    command = [sys.executable, "-m", "lbopt", "recipes", "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def num_recipes(status=""):
    """Return how many recipes there are with a status, "smoke" rows and studies left out."""
    return sum(
        not one["config"].endswith(":smoke")
        and "/sweeps/" not in one["config"]
        and one["status"].startswith(status)
        for one in all_recipes()
    )


def recipe_table():
    """Return the table of all recipes and studies but the tiny ones, linked to their pages."""
    rows = [
        (_link(one["config"]), *_cells(one), one["source"])
        for one in all_recipes()
        if not one["config"].endswith(":smoke")
    ]
    return table(("config", *_HEADER, "source"), rows)


_HEADER = (
    "batch",
    "optimizer",
    "status",
    "published result",
    "hardware",
    "time",
    "result here",
)


def _cells(one):
    status = {"planned by the TPU compiler": "planned", "measured here": "measured"}
    return (
        one["batch"],
        one["optimizer"],
        status.get(one["status"], one["status"]),
        one["published_result"],
        one["hardware"],
        one["time"],
        _result_here(one),
    )


def _result_here(one):
    """Return what a recipe reached here with its split, "-" if it was not run.

    The study `digits_limit` measured the rows of digits_cnn, in its search, and scripts/families
    the other small ones.
    """
    stem, _, row = one["config"].removeprefix("configs/").partition(".py")
    row = row.removeprefix(":")
    if one["status"] != "measured here" or row == "smoke":
        return "-"
    if stem.startswith("sweeps/"):
        return f"[its page](../results/studies/{stem.removeprefix('sweeps/')}.md)"
    if stem == "digits_cnn":
        optimizer, _, size = row.partition("-")
        return f"{100 * _searched(optimizer, int(size)):.1f} % (validation)"

    found = [run for run in families()["runs"] if run["config"] == one["config"]]
    if len(found) > 1:
        scores = [100 * run["test/accuracy"] for run in found]
        mean, spread = statistics.mean(scores), statistics.stdev(scores)
        return f"{mean:.1f} % (test), {len(found)} seeds, standard deviation {spread:.1f}"
    return f"{_score(found[0], 'test')} (test)"


def _searched(optimizer, size):
    """Return the mean validation accuracy of digits_limit at a cell's own learning rate."""
    (arm,) = (
        one for one in studies.study("digits_limit")["arms"] if _optimizer_of(one) == optimizer
    )
    point = studies.point("digits_limit", arm["arm"], size)
    (found,) = (one for one in point["search"] if one["learning_rate_factor"] == 1)
    return found["validation_accuracy_mean"]


def _optimizer_of(arm):
    return arm["arm"].partition(" ")[0].lower()


def _link(config):
    name = config.removeprefix("configs/")
    stem = pathlib.Path(name.partition(":")[0]).stem
    if name.startswith("sweeps/"):
        place = "../results/studies.md"
    else:
        place = f"{page_of(stem)}.md#{stem}"
    return f"[`{name.replace('.py', '')}`]({place})"


def page_of(stem):
    """Return the page of a config file, without `.md`."""
    (page,) = (page for page, stems in FAMILIES.items() if stem in stems)
    return page


def config_rows(stem):
    """Return the table of the rows of one config file; what all have in common stands above it."""
    found = [one for one in all_recipes() if one["config"].startswith(f"configs/{stem}.py")]
    sources = {one["source"] for one in found}
    header = ("row", *_HEADER, *(["source"] if len(sources) > 1 else []), "note")
    rows = [
        (
            f"`{one['config'].partition(':')[2] or '(none)'}`",
            *_cells(one),
            *([one["source"]] if len(sources) > 1 else []),
            one["note"] or "-",
        )
        for one in found
    ]
    columns = [place for place, name in enumerate(header) if any(row[place] != "-" for row in rows)]
    shown = table(
        [header[place] for place in columns], [[row[place] for place in columns] for row in rows]
    )
    above = f"Source: {sources.pop()}.\n\n" if len(sources) == 1 else ""
    return above + shown


def config_docstring(stem):
    """Return the docstring of a config file as a block of text."""
    text = ast.get_docstring(ast.parse((ROOT / "configs" / f"{stem}.py").read_text()))
    return f"````text\n{text}\n````"


@functools.cache
def families():
    """Return what the small recipes of each family reached, by scripts/families."""
    return json.loads((ROOT / "docs" / "results" / "families.json").read_text())


def family_score(config):
    """Return a run of `families`, by its config: "digits_resnet:lamb-64"."""
    flag = f"configs/{config.replace(':', '.py:')}"
    (found,) = (one for one in families()["runs"] if one["config"] == flag)
    return found


_FAMILIES = {
    "digits_resnet": ("ResNet-18, a quarter as wide, digits of 8 x 8", "10 % (chance)"),
    "digits_efficientnet": (
        "EfficientNet-B0, a quarter as wide and half as deep, digits of 32 x 32",
        "10 % (chance)",
    ),
    "pydoc_bert": ("BERT-tiny, masked tokens of Python's help topics", None),
    "pydoc_lstm": ("LSTM language model, 2 x 200, the same text", None),
}


def family_table():
    """Return the table of what each model family reaches at a small and a large batch size."""
    counted = families()["baselines"]
    masked = f"{100 * counted['masked_accuracy']:.1f} % (the most frequent token)"
    trigram = f"perplexity {counted['perplexity']:.1f} (interpolated trigram)"
    baselines = {"pydoc_bert": masked, "pydoc_lstm": trigram}

    runs = {stem: ["", ""] for stem in _FAMILIES}
    for one in families()["runs"]:
        stem, _, row = one["config"].removeprefix("configs/").partition(".py:")
        optimizer, _, batch = row.partition("-")
        if stem in runs and optimizer == "lamb":
            runs[stem][int(batch) > 64] = f"{batch}: {_score(one, 'test').partition(',')[0]}"
    rows = [
        (model, f"`{stem}`", *runs[stem], baseline or baselines[stem])
        for stem, (model, baseline) in _FAMILIES.items()
    ]
    return table(("model and data", "config", "small batch", "large batch", "baseline"), rows)


def small_runs(stem):
    """Return the table of what the rows of a small config reached, by scripts/families."""
    rows = [
        (
            f"`{one['config'].partition(':')[2]}`{_seed(one)}",
            one["step"],
            _score(one, "validation"),
            _score(one, "test"),
            one["cpu_seconds"] or "-",
        )
        for one in families()["runs"]
        if one["config"].startswith(f"configs/{stem}.py")
    ]
    header = ("row", "steps", "validation", "test", "CPU seconds")
    return table(header, rows)


def _seed(one):
    """Return ", seed N" for a run of several seeds."""
    return f", seed {one['seed']}" if "seed" in one else ""


def _score(one, split):
    perplexity = one.get(f"{split}/perplexity")
    if perplexity is not None:
        return f"perplexity {perplexity:.2f}"
    text = f"{100 * one[f'{split}/accuracy']:.1f} %"
    next_sentence = one.get(f"{split}/next_sentence_accuracy")
    return text if next_sentence is None else f"{text}, next sentence {100 * next_sentence:.1f} %"
