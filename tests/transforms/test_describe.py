"""Descriptions of variants, and of masks leaf by leaf."""

import importlib
import inspect
import json
import pathlib
import re
import textwrap
import typing

import jax
import jax.numpy as jnp
import optax
import pytest
from refusal import refused

import lbopt
from lbopt import types
from lbopt.linalg import _newton_schulz
from lbopt.transforms import MATRIX_VARIANTS, VARIANTS, _variants
from lbopt.transforms._matrix_variants import WITHOUT_VARIANTS

ROWS = [(optimizer, name) for optimizer, rows in VARIANTS.items() for name in rows]


@pytest.mark.parametrize(("optimizer", "name"), ROWS)
def test_a_row_is_printed_whole(optimizer, name, capsys):
    lbopt.describe(name, optimizer)
    printed = capsys.readouterr().out
    row = VARIANTS[optimizer][name]
    assert printed.startswith(f'{optimizer}, variant "{name}": {row.source}\n')
    options = dict(re.findall(r"^  [ *] (\w+) +(.+)$", printed, re.MULTILINE))
    assert options == {option: repr(value) for option, value in vars(row.options).items()}
    starred = set(re.findall(r"^  \* (\w+)", printed, re.MULTILINE))
    paper = VARIANTS[optimizer]["paper"].options
    assert starred == {
        option
        for option, value in vars(row.options).items()
        if repr(value) != repr(getattr(paper, option))
    }


@pytest.mark.parametrize("optimizer", VARIANTS)
def test_the_signature_shows_every_option_of_the_paper_and_the_docstring_every_variant(optimizer):
    alias = getattr(lbopt, optimizer)
    parameters = inspect.signature(alias).parameters
    shown = {
        name: parameter.default.value
        for name, parameter in parameters.items()
        if isinstance(parameter.default, types.Default)
    }
    assert shown == vars(VARIANTS[optimizer]["paper"].options)
    assert not [
        name for name, parameter in parameters.items() if "Any" in str(parameter.annotation)
    ]
    describe = importlib.import_module("lbopt.transforms._describe")
    # Python 3.13 takes the indentation of docstrings away.
    told = textwrap.indent(textwrap.dedent(describe.differences(optimizer)), "  ")
    assert told in inspect.cleandoc(alias.__doc__)
    names = getattr(_variants, f"{optimizer.capitalize()}Variant")
    assert typing.get_args(names) == tuple(VARIANTS[optimizer])


@pytest.mark.parametrize("optimizer", WITHOUT_VARIANTS)
def test_rows_without_variants_show_the_defaults(optimizer, capsys):
    lbopt.describe(optimizer=optimizer)
    assert capsys.readouterr().out.startswith(optimizer)
    parameters = inspect.signature(getattr(lbopt, optimizer)).parameters
    [row] = WITHOUT_VARIANTS[optimizer].values()
    for name, value in vars(row.options).items():
        default = parameters[name].default
        assert value == (default.value if isinstance(default, types.Default) else default)


@pytest.mark.parametrize("optimizer", MATRIX_VARIANTS)
def test_rows_of_matrix_optimizers_are_printed_and_their_signatures_show_them(optimizer, capsys):
    alias = getattr(lbopt, optimizer)
    parameters = inspect.signature(alias).parameters
    shown = {
        name: parameter.default.value
        for name, parameter in parameters.items()
        if isinstance(parameter.default, types.Default)
    }
    rows = MATRIX_VARIANTS[optimizer]
    first = rows[parameters["variant"].default]
    told = {name: getattr(first.options, name) for name in shown}
    assert shown == told
    hints = typing.get_type_hints(alias)
    assert typing.get_args(hints["variant"]) == tuple(rows)

    for name, row in rows.items():
        lbopt.describe(name, optimizer)
        printed = capsys.readouterr().out
        assert printed.startswith(f'{optimizer}, variant "{name}": {row.source}\n')
        options = dict(re.findall(r"^  [ *] (\w+) +(.+)$", printed, re.MULTILINE))
        assert options == {option: repr(value) for option, value in vars(row.options).items()}


PUBLISHED = json.loads((pathlib.Path(__file__).parent / "published_rows.json").read_text())["rows"]
MATRIX_ROWS = [
    (optimizer, name)
    for optimizer, rows in {**MATRIX_VARIANTS, **WITHOUT_VARIANTS}.items()
    for name in rows
]
CITATION = re.compile(
    r"(?:arXiv:\d{4}\.\d{4,5}v\d+|[\w.-]+/[\w.-]+@(?:[0-9a-f]{40}|v[\d.]+):[\w./-]+)(?:, .+)?"
)


def as_published(options):
    """Return {field: value} with what an option that leaves a choice to others comes to."""
    values = dict(vars(options))
    if "coefficients" in values:
        chosen = _newton_schulz.resolve_coefficients(options.coefficients, options.steps)
        values["coefficients"] = [list(triple) for triple in chosen.triples]
        values["steps"] = chosen.steps
        values["norm_factor"] = chosen.norm_factor
    if "weight_decay_mask" in values and options.weight_decay_mask is None:
        values["weight_decay_mask"] = True
    if "rest_weight_decay" in values and options.rest_weight_decay is None:
        values["rest_weight_decay"] = options.weight_decay
    if "shampoo_b2" in values and options.shampoo_b2 is None:
        values["shampoo_b2"] = options.b2
    if "root" in values and options.root is None:
        values["root"] = 4 if options.side == "both" else 2
    return values


@pytest.mark.parametrize(("optimizer", "name"), MATRIX_ROWS)
def test_the_numbers_of_each_row_are_the_published_ones(optimizer, name):
    """Compare a row with published_rows.json, an independent transcription."""
    row = {**MATRIX_VARIANTS, **WITHOUT_VARIANTS}[optimizer][name]
    assert name in PUBLISHED.get(optimizer, {}), "transcribe the row's source"
    published = PUBLISHED[optimizer][name]
    assert all(CITATION.fullmatch(source) for source in published["source"])
    ours = as_published(row.options)
    theirs = published["values"]
    assert theirs.keys() | {*published["unsaid"]} == ours.keys()
    different = {field for field, value in theirs.items() if ours[field] != value}
    expected = published.get("differs", {}).keys()
    wrong = {field: (ours[field], theirs[field]) for field in different - expected}
    assert wrong == {}, "row against source"
    assert expected <= different, "said to differ, and does not"


def test_every_published_row_is_offered():
    rows = [(optimizer, name) for optimizer, names in PUBLISHED.items() for name in names]
    assert sorted(rows) == sorted(MATRIX_ROWS)


def test_a_name_that_both_have_is_printed_twice(capsys):
    lbopt.describe("nus")
    printed = capsys.readouterr().out
    assert 'lamb, variant "nus"' in printed
    assert 'lars, variant "nus"' in printed


def test_the_table_has_every_row(capsys):
    lbopt.describe()
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines if line]
    tables = {**VARIANTS, **WITHOUT_VARIANTS, **MATRIX_VARIANTS}
    assert names == [name for table, rows in tables.items() for name in (table, *rows)]
    lbopt.describe(optimizer="lars")
    assert capsys.readouterr().out.split()[0] == "lars"


LISTED = ["lamb: paper", "lars: paper", "normuon: paper", "soap: paper"]


@pytest.mark.parametrize(
    ("arguments", "field", "value", "listed"),
    [
        (("mine",), "variant", "mine", LISTED),
        ((["paper"],), "variant", ["paper"], LISTED),
        (("tfa", "lars"), "variant", "tfa", ["lars: paper"]),
        ((None, "adam"), "optimizer", "adam", []),
    ],
)
def test_unknown_names(arguments, field, value, listed):
    with refused(field, value, "choice") as caught:
        lbopt.describe(*arguments)
    assert re.findall(r"\w+: paper", caught.value.reason) == listed


def test_the_name_of_an_optimizer_is_no_variant():
    with refused("variant", "muonh", "choice") as caught:
        lbopt.describe("muonh")
    assert "describe(optimizer='muonh')" in caught.value.reason


def test_every_row_builds_with_its_defaults():
    params = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3), "ln": {"scale": jnp.ones(3)}}
    silent = [
        (optimizer, name)
        for optimizer, name in ROWS
        if (optimizer, name) not in (("lamb", "nus"), ("lars", "timm"))
    ]
    for optimizer, name in silent:
        tx = getattr(lbopt, optimizer)(0.1, variant=name)
        updates, _ = tx.update(params, tx.init(params), params)
        assert all(jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(updates)), name


# ---- summarize_masks

SHAPES = {
    "head": {
        "kernel": jax.ShapeDtypeStruct((8, 3), "float32"),
        "bias": jax.ShapeDtypeStruct((3,), "float32"),
    },
    "layers": {
        "kernel": jax.ShapeDtypeStruct((4, 8, 8), "bfloat16"),
        "gain": jax.ShapeDtypeStruct((4, 8), "float32"),
    },
}


def summary(tx, capsys):
    """Return {name: (role, decayed, adapted, layers)} and the line of sums."""
    lbopt.summarize_masks(SHAPES, tx)
    lines = capsys.readouterr().out.splitlines()[: len(jax.tree.leaves(SHAPES)) + 2]
    cells = [re.split(r"\s{2,}", line) for line in lines[1:-1]]
    return {name: (role, *rest) for name, _, role, _, *rest in cells}, lines[-1]


def test_summary_of_a_stacked_lamb(capsys):
    stacked = lbopt.stacked_paths("^layers/")
    rows, last = summary(
        lbopt.lamb(0.1, weight_decay=0.1, variant="nvlamb", stacked=stacked), capsys
    )
    assert rows == {
        "head/bias": ("bias", "no", "yes", "-"),
        "head/kernel": ("weight", "yes", "yes", "-"),
        "layers/gain": ("vector", "yes", "yes", "4"),
        "layers/kernel": ("weight", "yes", "yes", "4"),
    }
    assert last == "4 parameters (315 numbers): 3 decayed (312), 4 adapted (315)"


ONLY_DECAYED = [
    (optimizer, name)
    for optimizer, name in ROWS
    if not VARIANTS[optimizer][name].options.adapt_undecayed
]


@pytest.mark.parametrize(("optimizer", "name"), ONLY_DECAYED)
def test_summary_of_variants_that_adapt_only_what_they_decay(optimizer, name, capsys):
    assert len(ONLY_DECAYED) == 5
    build = getattr(lbopt, optimizer)
    rows, _ = summary(build(0.1, variant=name, weight_decay=0.1), capsys)
    assert all(adapted == decayed for _, decayed, adapted, _ in rows.values())
    assert rows["head/kernel"][1:3] == ("yes", "yes")
    with pytest.warns(UserWarning, match=rf'{optimizer}\(variant="{name}"\).* weight_decay\b'):
        rows, _ = summary(build(0.1, variant=name, weight_decay=0.0), capsys)
    assert {row[1:3] for row in rows.values()} == {("no", "no")}


WRAPPERS = {
    "chain": lambda tx: optax.chain(optax.identity(), tx),
    "multi_steps": lambda tx: optax.MultiSteps(tx, 2),
    "skip": lambda tx: lbopt.skip_bad_updates(tx),
    "inject": lambda tx: optax.inject_hyperparams(lambda learning_rate: tx)(learning_rate=0.1),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_summary_under_wrappers(wrapper, capsys):
    plain = summary(lbopt.lamb(0.1, weight_decay=0.1), capsys)
    assert summary(WRAPPERS[wrapper](lbopt.lamb(0.1, weight_decay=0.1)), capsys) == plain
    assert plain[0]["head/bias"] == ("bias", "no", "no", "-")


def test_summary_of_groups(capsys):
    labels = {
        "head": {"kernel": "lars", "bias": "sgd"},
        "layers": {"kernel": "lamb", "gain": "lamb"},
    }
    groups = {
        "lars": lbopt.lars(0.1, weight_decay_mask=False),
        "lamb": lbopt.lamb(0.1, weight_decay=0.1, trust_ratio_mask=lbopt.select_paths("kernel")),
        "sgd": optax.sgd(0.1),
    }
    rows, _ = summary(optax.multi_transform(groups, labels), capsys)
    assert {name: row[1:3] for name, row in rows.items()} == {
        "head/bias": ("-", "-"),
        "head/kernel": ("no", "yes"),
        "layers/gain": ("yes", "no"),
        "layers/kernel": ("yes", "yes"),
    }
