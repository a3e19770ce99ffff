"""The README is true: its example runs, its commands exist, its tables are the studies'."""

import json
import pathlib
import re

import jax
import pytest

import lbopt
from lbopt.cli import _main, load_config
from lbopt.config import SweepConfig
from lbopt.sweep.search import search_cost
from lbopt.transforms._describe import variants_table

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_example_trains():
    code, *others = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(others) == 7
    for other in others:
        exec(other, {})
    assert len([line for line in code.splitlines() if line.strip()]) <= 32
    space = {}
    exec(code, space)
    assert space["accuracy"] > 0.95
    assert {"learning_rate", "trust_ratio/head/kernel"} <= set(
        lbopt.optimizer_metrics(space["opt_state"])
    )


def test_every_exported_name_is_in_the_readme():
    for name in lbopt.__all__:
        assert f"`{name}`" in README or f"lbopt.{name}" in README, name


def test_every_command_is_in_the_readme():
    for name in _main.COMMANDS:
        assert f"    lbopt {name}" in README, name


def test_files_that_are_linked_exist():
    for path in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / path).exists(), path


def test_the_table_is_the_shipped_study():
    """`configs/sweeps/digits_limit.json` is the summary.json of the command in the README."""
    study = json.loads((ROOT / "configs" / "sweeps" / "digits_limit.json").read_text())
    assert study["complete"]

    expected = []
    for arm in study["arms"]:
        means = [f"{100 * point['test_accuracy_mean']:.2f}" for point in arm["points"]]
        limit, low, high = (arm["limit"][name] for name in ("global_batch_size", "low", "high"))
        shown = f"{limit:.0f} ({low:.0f} to {high:.0f})"
        expected.append(f"| {arm['arm']} | {' | '.join(means)} | {shown} |")

    sizes = [str(point["global_batch_size"]) for point in study["arms"][0]["points"]]
    header = f"| test accuracy, % | {' | '.join(sizes)} | limit |"
    start = README.splitlines().index(header)
    assert README.splitlines()[start + 2 : start + 2 + len(expected)] == expected

    best, *others = sorted(
        (arm["points"][-1] for arm in study["arms"]), key=lambda point: -point["test_accuracy_mean"]
    )
    ahead = 100 * (best["test_accuracy_mean"] - others[0]["test_accuracy_mean"])
    assert (
        f"{100 * best['test_accuracy_mean']:.1f} %, {ahead:.1f} points more than the next arm"
        in README
    )
    assert f"worst seed ({100 * best['test_accuracy_min']:.1f})" in README

    further = study["claims"][0]["sentence"].split("larger in ")[1].split(" of the resamples")[0]
    assert f"in only {further} of the resamples" in README


def test_another_rounding_gives_limits_within_the_intervals():
    """The second study ran with `XLA_FLAGS=--xla_cpu_max_isa=SSE4_2`."""
    first, second = (
        {arm["arm"]: arm["limit"] for arm in summary_of(name)["arms"]}
        for name in ("digits_limit", "digits_limit-sse4_2")
    )
    assert first.keys() == second.keys()
    for arm in first:
        for one, other in ((first[arm], second[arm]), (second[arm], first[arm])):
            assert one["low"] <= other["global_batch_size"] <= one["high"], arm

    lamb, lars = (
        f"{second[arm]['global_batch_size']:.0f} instead of {first[arm]['global_batch_size']:.0f}"
        for arm in ("LAMB + LEGW", "LARS + LEGW")
    )
    assert f"(LAMB's is {lamb}, LARS's {lars})" in README


@pytest.mark.parametrize("optimizer", ["lamb", "lars"])
def test_the_tables_of_variants_are_the_rows(optimizer):
    header, *rows = (re.split(r"\s{2,}", line) for line in variants_table(optimizer).splitlines())
    lines = README.splitlines()
    start = lines.index(f"| {' | '.join(header)} |")
    expected = [f"| `{name}` | {' | '.join(rest)} |" for name, *rest in rows]
    assert lines[start + 2 : start + 2 + len(rows)] == expected
    assert not lines[start + 2 + len(rows)]


def test_the_summary_of_masks_is_what_is_printed(capsys):
    shapes = {
        "head": {"kernel": (64, 10), "bias": (10,)},
        "layers": {"kernel": (24, 64, 64), "bias": (24, 64), "ln_gain": (24, 64)},
    }
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, "float32"),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )
    lbopt.summarize_masks(
        params, lbopt.lamb(0.1, weight_decay=0.01, stacked=lbopt.stacked_paths("^layers/"))
    )
    assert capsys.readouterr().out in README


def test_the_scaling_plan_is_what_is_printed(capsys):
    lbopt.scaling_plan(
        (512, 4096, 32768), 0.005, 512, 0.3125, num_examples=1_281_167, num_epochs=90
    )
    assert capsys.readouterr().out in README


STUDIES = {
    "digits_limit": "digits_limit",
    "digits_limit-target": "digits_limit:target",
    "digits_lstm_legw": "digits_lstm_legw",
    "pydoc_lm_legw": "pydoc_lm_legw",
    "waterfall_digits": "waterfall_digits",
    "waterfall_digits-searched": "waterfall_digits:searched",
    "waterfall_digits-trust-first": "waterfall_digits:trust-first",
    "diffusion_digits": "diffusion_digits",
    "diffusion_digits-epochs": "diffusion_digits:epochs",
    "precision_digits": "precision_digits",
    "precision_digits-same": "precision_digits:same",
}
VERDICTS = {
    "layerwise_legw_goes_further": (
        "LAMB or LARS with LEGW hold small-batch quality to a larger batch than the others"
    ),
    "layerwise_legw_goes_further_than_linear_scaling": (
        "the same, held against linear scaling alone"
    ),
    "constant_warmup_steps": "constant warmup *steps* are the right transfer (LEGW)",
    "lipschitz_peak_stays": (
        "the curvature along the gradient peaks near the same step at every batch "
        "(LEGW's explanation)"
    ),
    "noise_scale_predicts_limit": (
        "the gradient noise scale at the smallest batch predicts the limit"
    ),
}


@pytest.mark.parametrize("claim", VERDICTS)
def test_the_verdicts_on_claims_are_those_of_the_studies(claim):
    """A cell of the table begins with the verdict, or says that the study does not ask.

    All its numbers are in the study's sentence.
    """
    (line,) = (line for line in README.splitlines() if line.startswith(f"| {VERDICTS[claim]} |"))
    cells = line.strip("| ").split(" | ")[1:]
    for study, cell in zip(
        ("digits_limit", "digits_lstm_legw", "pydoc_lm_legw"), cells, strict=True
    ):
        found = {one["claim"]: one for one in summary_of(study)["claims"]}
        if claim not in found:
            assert cell == "not searched"
            continue
        verdict, _, numbers = cell.partition(":")
        assert verdict == found[claim]["verdict"], (study, cell)
        assert set(numbers_in(numbers)) <= set(numbers_in(found[claim]["sentence"])), (study, cell)


def summary_of(study):
    return json.loads((ROOT / "configs" / "sweeps" / f"{study}.json").read_text())


def numbers_in(text):
    """Return the numbers of a text, without signs."""
    return re.findall(r"\d+(?:[.,]\d+)*", text)


@pytest.mark.parametrize(("study", "config"), STUDIES.items())
def test_the_summaries_are_of_the_configs_as_they_are(study, config):
    """The README has the number of trials of each."""
    made = load_config(
        f"{ROOT / 'configs' / 'sweeps'}/{config.replace(':', '.py:')}"
        f"{'' if ':' in config else '.py'}",
        [],
        SweepConfig,
    )

    summary = summary_of(study)
    cells = [(arm.name, size) for arm in made.arms for size in made.global_batch_sizes]
    assert summary["complete"]

    assert [
        (arm["arm"], point["global_batch_size"])
        for arm in summary["arms"]
        for point in arm["points"]
    ] == cells

    runs = [
        search_cost(made.arm_search(index)).trials + len(made.final_seeds)
        for index in range(len(made.arms))
    ]
    assert summary["num_trials"] == sum(runs) * len(made.global_batch_sizes)

    assert re.search(rf"\| [^|]*\b{summary['num_trials']:,}\b[^|]* \| [^|]*\d+ (min|s)\b", README)
    assert made.about.status == "measured here"


def test_the_ablations_are_those_of_the_studies():
    """Checks the gain of each step, and that no step is said to help where all arms are tuned."""
    plain, searched = (
        summary_of(f"waterfall_digits{row}")["waterfall"]["steps"] for row in ("", "-searched")
    )
    assert (
        f"has {100 * plain[0]['mean']:.1f} %; "
        f"polynomial decay adds {plain[1]['gain']:.1f} points, LEGW {plain[2]['gain']:.1f}"
        in README
    )
    assert f"the trust ratio takes it to {100 * plain[4]['mean']:.1f}" in README
    assert [step["told_apart"] for step in plain[1:]] == [True, True, False, False, True, False]
    assert f"the same bare momentum has {100 * searched[0]['mean']:.1f} %" in README
    assert [step["arm"] for step in searched[1:] if step["told_apart"]] == ["+ label smoothing"]
    low = -searched[-1]["gain_high"]
    high = -searched[-1]["gain_low"]
    assert (
        f"label smoothing costs {-searched[-1]['gain']:.1f} points ({low:.2f} to {high:.1f})"
        in README
    )


def test_the_laws_of_diffusion_are_those_of_the_study():
    points = [
        (arm["arm"], point)
        for arm in summary_of("diffusion_digits")["arms"]
        for point in arm["points"]
    ]

    others = [point["diffusion"]["log_r2"] >= 0.95 for arm, point in points if "LAMB" not in arm]
    assert (
        f"(R^2 of at least 0.95) in {sum(others)} of {len(others)} cells, at batch 16 in all"
        in README
    )

    assert all(
        point["diffusion"]["log_r2"] >= 0.95
        for arm, point in points
        if "LAMB" not in arm and point["global_batch_size"] == 16
    )

    lamb = [point["diffusion"] for arm, point in points if "LAMB" in arm]
    exponents, fits = ([one[name] for one in lamb] for name in ("exponent", "power_r2"))
    assert (
        f"t^{min(exponents):.2f} to t^{max(exponents):.2f} (R^2 {min(fits):.3f} to {max(fits):.3f})"
        in README
    )

    (claim,) = (
        one
        for one in summary_of("digits_limit-target")["claims"]
        if one["claim"] == "diffusion_is_logarithmic"
    )
    assert "in 24 of 35 cells" in claim["sentence"]
    assert claim["verdict"] == "held"
    assert "but for LAMB + LEGW it is a power of t" in claim["sentence"]
    assert "with log t in 24 of 35 cells, but for LAMB, which goes like a power of t" in README


def test_the_table_of_bits_is_the_study():
    """This includes the text below the table."""
    arms = {
        arm["arm"]: [100 * point["test_accuracy_mean"] for point in arm["points"]]
        for arm in summary_of("precision_digits")["arms"]
    }

    (header,) = (
        line for line in README.splitlines() if line.startswith("| test accuracy, % | 3 bits")
    )
    forms = [
        re.findall(r"(\d+)(?: bits)?(?: \((\w+)\))?", cell)[0]
        for cell in header.strip("| ").split(" | ")[1:]
    ]

    for place, size in enumerate((64, 256, 1024)):
        for told, suffix in (("APS", ", APS"), ("without", "")):
            names = [
                f"{bits} bits ({form}){suffix}" if form else f"{bits} bits" for bits, form in forms
            ]
            means = " | ".join(f"{arms[name][place]:.2f}" for name in names)
            assert f"| batch {size:,}, {told} | {means} |" in README

    (found,) = (
        text
        for text in summary_of("precision_digits")["findings"]
        if text.startswith("At batch 1024")
    )
    assert '"4 bits (e3m0), APS" (-2.67 to +4.11 points)' in found
    assert re.search(
        r'the seeds tell "16 bits \(e8m7\), APS" apart '
        r'from 4 bits \(e3m0\), 3 bits \(e2m0\) and "3 bits',
        found,
    )

    same = {
        arm["arm"]: arm["points"][-1]["test_accuracy_mean"]
        for arm in summary_of("precision_digits-same")["arms"]
    }
    whole, bare = (100 * same[f"4 bits (e3m0){suffix}"] for suffix in (", APS", ""))
    assert f"the picture is the same: {whole:.2f} % and, without APS, {bare:.2f} %" in README


def test_the_critical_batches_are_those_of_the_study():
    summary = summary_of("digits_limit-target")
    (claim,) = (
        one for one in summary["claims"] if one["claim"] == "noise_scale_predicts_critical_batch"
    )
    assert "they are 2.94 to 27 times" in README
    assert "not related (correlation -0.50, one-sided p 0.82)" in README
    assert {"2.94", "27", "0.50", "0.82"} <= set(numbers_in(claim["sentence"]))
    (fitted,) = (text for text in summary["findings"] if text.startswith("To the target need"))
    batches = re.findall(r"critical batch of (\d+)", fitted)
    assert f"critical batches of {batches[0]} (momentum) to {max(batches, key=int)} (LARS" in README
