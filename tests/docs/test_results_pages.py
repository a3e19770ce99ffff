"""The site's results are of the configs as they are, and what its prose says of them is true.

Numbers of these pages are made from the committed files when the site is built. Tested here is what
a page says in words.
"""

import copy
import functools
import itertools
import json
import pathlib
import re
import runpy

import numpy as np
import pytest
from _site import benchmarks, facts, studies
from scipy import optimize

from lbopt.cli import _sweep, load_config
from lbopt.config import SweepConfig
from lbopt.sweep.search import search_cost

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
TRIALS = sorted((ROOT / "configs" / "sweeps" / "trials").iterdir())
"""Workdirs of studies with all their trials."""
LIMITS = ("digits_limit", "digits_lstm_legw", "pydoc_lm_legw")


ALL_PAGES = pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)


@functools.cache
def _rendered(page):
    return facts.rendered(page.read_text(), page.relative_to(DOCS))


@ALL_PAGES
def test_the_expressions_of_a_page_can_be_evaluated(page):
    assert "{=" not in _rendered(page)


@ALL_PAGES
def test_no_bar_in_code_cuts_a_cell_of_a_table(page):
    lines = [line for line in _rendered(page).splitlines() if line.startswith("|")]
    cells = [cell for line in lines for cell in re.split(r"(?<!\\)\|", line)]
    assert [cell for cell in cells if cell.count("`") % 2] == []


@pytest.mark.parametrize("name", studies.STUDIES)
def test_a_summary_is_of_the_config_as_it_is(name):
    config, _, row = name.partition("-")
    flag = f"{ROOT}/configs/sweeps/{config}.py" + (f":{row}" if row not in ("", "sse4_2") else "")
    made = load_config(flag, [], SweepConfig)

    summary = studies.study(name)
    assert summary["complete"]
    assert made.about.status == "measured here"
    assert [
        (arm["arm"], point["global_batch_size"])
        for arm in summary["arms"]
        for point in arm["points"]
    ] == [(arm.name, size) for arm in made.arms for size in made.global_batch_sizes]

    costs = [search_cost(made.arm_search(index)) for index in range(len(made.arms))]
    least = sum(cost.trials + len(made.final_seeds) for cost in costs)
    most = least + sum(cost.extra for cost in costs)
    sizes = len(made.global_batch_sizes)
    assert least * sizes <= summary["num_trials"] <= most * sizes


def test_every_summary_and_figure_is_on_a_page():
    committed = {
        file.stem
        for file in (ROOT / "configs" / "sweeps").glob("*.json")
        if not file.stem.endswith("-plan")
    }
    assert committed == set(studies.STUDIES)
    shown = "".join(page.read_text() for page in (DOCS / "results" / "studies").glob("*.md"))
    for figure in (ROOT / "configs" / "sweeps").glob("*.png"):
        assert f"/{figure.name})" in shown, figure.name


@pytest.mark.parametrize("folder", TRIALS, ids=lambda folder: folder.name)
def test_a_summary_follows_from_its_trials(folder):
    """Its numbers are those of the lines, by NumPy; a study that has no summary yet can go on."""
    config, _, row = folder.name.partition("-")
    made = load_config(
        f"{ROOT}/configs/sweeps/{config}.py" + f":{row}" * bool(row), [], SweepConfig
    )
    saved = json.loads((folder / "config.json").read_text())
    assert _sweep.study_differences(made, saved) == []
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    if folder.name not in studies.STUDIES:
        return

    summary = studies.study(folder.name)
    assert summary["num_trials"] == len(rows)
    assert summary["machine"].endswith(saved["host"])
    score = summary["metric"]
    better = max if score == "accuracy" else min
    to_target = bool(made.train.target_metric)
    for arm in summary["arms"]:
        for place, point in enumerate(arm["points"]):
            cell = [
                one
                for one in rows
                if (one["arm"], one["global_batch_size"])
                == (arm["arm"], point["global_batch_size"])
            ]
            final = [one[f"test_{score}"] for one in cell if one["phase"] == "final"]
            searched = [one for one in cell if one["phase"] == "search" and not one["diverged"]]
            assert point[f"test_{score}_mean"] == pytest.approx(np.mean(final))
            assert point[f"test_{score}_std"] == pytest.approx(np.std(final, ddof=1))
            if not to_target:
                best = better(searched, key=lambda one: one[f"validation_{score}"])
                assert point["learning_rate"] == best["learning_rate"]
                continue

            reached = [one for one in searched if one["steps_to_target"]]
            if reached:
                best = min(
                    reached, key=lambda one: (one["steps_to_target"], one["validation_loss"])
                )
                assert point["learning_rate"] == best["learning_rate"]
            steps = [one["steps_to_target"] or np.inf for one in cell if one["phase"] == "final"]
            told = arm["scaling"]["points"][place]["steps"]
            assert (np.inf if told is None else told) == np.median(steps)


def test_the_growth_of_a_critical_batch_follows_from_its_evaluations():
    """At each milestone SciPy's fit to the median steps is that of the summary."""
    name = "fashion_target-mlp"
    folder = next(folder for folder in TRIALS if folder.name == name)
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    grown = [arm for arm in studies.study(name)["arms"] if arm["critical_growth"]]
    assert len(grown) >= 3

    for arm in grown:
        reached = [point for point in arm["scaling"]["points"] if point["steps"] is not None]
        sizes = np.array([point["global_batch_size"] for point in reached], float)
        for one in arm["critical_growth"]["milestones"]:
            medians = [
                np.median([steps_until(run, one["value"]) for run in finals(rows, arm, size)])
                for size in sizes
            ]
            (_, fitted), _ = optimize.curve_fit(
                lambda size, log_least, log_critical: (
                    log_least + np.log1p(np.exp(log_critical) / size)
                ),
                sizes,
                np.log(medians),
                p0=(np.log(medians[-1]), np.log(1000.0)),
            )
            told_size = one["critical_batch"]["critical_batch_size"]
            assert told_size == pytest.approx(np.exp(fitted), rel=1e-4)


def finals(rows, arm, size):
    """Return the evaluations of the final runs of an arm at a batch size."""
    cell = (arm["arm"], size, "final")
    return [
        one["evaluations"]
        for one in rows
        if (one["arm"], one["global_batch_size"], one["phase"]) == cell
    ]


def steps_until(evaluations, value):
    """Return the steps, between two evaluations, at which the accuracy passes a value."""
    pairs = list(zip(evaluations["step"], evaluations["validation_accuracy"], strict=True))
    for (before, low), (after, high) in itertools.pairwise(pairs):
        if high >= value:
            return before + (after - before) * (value - low) / (high - low)
    return np.inf


def told(name):
    """Return the finding that compares a study's arms at the largest batch."""
    size = studies.study(name)["arms"][0]["points"][-1]["global_batch_size"]
    return studies.finding(name, f"At batch {size}:")


def limits(name):
    return {
        arm["arm"]: arm["limit"].get("global_batch_size") for arm in studies.study(name)["arms"]
    }


def test_lamb_is_ahead_at_the_largest_batch_in_all_three_and_told_apart_in_two():
    assert [studies.ahead(name)[0] for name in LIMITS] == 3 * ["LAMB + LEGW"]
    assert ["do not tell" in told(name) for name in LIMITS] == [True, False, False]
    assert "the seeds tell LAMB + LEGW apart from LARS + LEGW (" in told("digits_limit")


def test_nobody_is_shown_to_go_further():
    for name in LIMITS:
        found = studies.claim("layerwise_legw_goes_further", name)
        assert found["verdict"] == "cannot be told", name
    digits = limits("digits_limit")
    assert max(digits, key=digits.get) == "LAMB + LEGW"
    lstm = limits("digits_lstm_legw")
    assert min(lstm, key=lstm.get) == "LAMB + LEGW"
    assert not any(limits("pydoc_lm_legw").values())


def test_the_noise_scale_is_below_every_limit_and_critical_batch():
    """Their ratios lie on both sides of three, which `lbopt suggest` takes."""
    limit = ("limit", "global_batch_size")
    measured = {
        "digits_limit": limit,
        "digits_lstm_legw": limit,
        "digits_limit-target": ("critical_batch", "critical_batch_size"),
    }
    ratios = [
        arm[what][size] / arm["points"][0]["noise_scale"]
        for name, (what, size) in measured.items()
        for arm in studies.study(name)["arms"]
    ]
    assert min(ratios) >= 1
    assert min(ratios) < 3 < max(ratios)


def test_what_fails_past_the_limit():
    """The LSTMs on digits lose at most a tenth of a point of training accuracy."""
    for arm in studies.study("digits_lstm_legw")["arms"]:
        assert arm["failure"]["kind"] == "generalise"
        assert arm["failure"]["train_lost"] < 0.1
    kinds = {arm["failure"]["kind"] for arm in studies.study("pydoc_lm_legw")["arms"]}
    assert kinds == {"optimise"}


def test_the_five_optimizers_at_the_full_batch():
    points = {arm["arm"]: arm["points"][-1] for arm in studies.study("digits_limit")["arms"]}
    lamb = points.pop("LAMB + LEGW")
    assert lamb["test_accuracy_min"] > max(one["test_accuracy_mean"] for one in points.values())
    assert lamb["learning_rate_factor"] == 1
    assert {one["learning_rate_factor"] for one in points.values()} == {0.25}
    assert studies.limits_within("digits_limit", "digits_limit-sse4_2")


@pytest.mark.parametrize(("high", "shown"), [(1234.5, "1,234"), (None, "infinity")])
def test_a_critical_batch_is_shown_with_the_interval_that_its_summary_has(high, shown, monkeypatch):
    found = copy.deepcopy(studies.study("digits_limit-target"))
    first = found["arms"][0]["critical_batch"]
    first["intervals"] = {"critical_batch_size": [80.4, high]}
    monkeypatch.setattr(studies, "study", lambda name: found)
    lines = studies.steps_table("any").splitlines()
    interval = f"{first['critical_batch_size']:,.0f} (80 to {shown})"
    assert [interval in line.replace("\N{NO-BREAK SPACE}", " ") for line in lines].count(True) == 1


def test_steps_to_the_target():
    critical = {
        arm["arm"]: arm["critical_batch"]["critical_batch_size"]
        for arm in studies.study("digits_limit-target")["arms"]
    }
    assert max(critical, key=critical.get) == "LARS + LEGW"
    studies.finding("digits_limit-target", "The median run did not reach the target: LARS")
    diffusion = studies.claim("diffusion_is_logarithmic", "digits_limit-target")["sentence"]
    assert "but for LAMB + LEGW it is a power of t" in diffusion


def test_the_language_model():
    """Linear scaling is last, and the searched rates end where arms still improve."""
    last = {
        arm["arm"]: arm["points"][-1]["test_perplexity_mean"]
        for arm in studies.study("pydoc_lm_legw")["arms"]
    }
    assert max(last, key=last.get) == "SGD + linear"
    edges = {
        arm["arm"]: {one["global_batch_size"] for one in arm["points"] if one["at_edge_of_grid"]}
        for arm in studies.study("pydoc_lm_legw")["arms"]
    }
    assert edges["SGD + LEGW"] == {16, 32, 64}
    assert edges["LAMB + LEGW"] == {256}


def test_what_each_part_of_a_recipe_adds():
    plain, searched, trust_first = (
        studies.study(f"waterfall_digits{row}")["waterfall"]["steps"]
        for row in ("", "-searched", "-trust-first")
    )
    helps = [step["arm"] for step in plain[1:] if step["told_apart"] and step["gain"] > 0]
    assert helps == ["+ polynomial decay", "+ LEGW"]
    costs = [step["arm"] for step in plain[1:] if step["told_apart"] and step["gain"] < 0]
    assert costs == ["+ label smoothing"]

    apart = [(step["arm"], step["gain"] < 0) for step in searched[1:] if step["told_apart"]]
    assert apart == [("+ label smoothing", True)]
    assert all(step["gain"] < 0 for step in trust_first[1:3])


def test_the_laws_of_diffusion():
    cells = [
        (arm["arm"], point["global_batch_size"], point["diffusion"])
        for arm in studies.study("diffusion_digits")["arms"]
        for point in arm["points"]
    ]
    lamb = [found for arm, _, found in cells if "LAMB" in arm]
    assert all(found["power_r2"] > 0.95 > found["log_r2"] for found in lamb)

    others = [(size, found) for arm, size, found in cells if "LAMB" not in arm]
    assert all(found["log_r2"] > 0.95 for size, found in others if size == 16)
    assert all(found["log_r2"] > found["power_r2"] for _, found in others)
    slower = [found["log_r2"] < 0.95 for size, found in others if size > 16]
    assert sum(slower) > len(slower) / 2


def test_the_bits_that_a_sum_needs():
    """4 bits with APS are as good as the best arm, 4 without lose more at each larger batch."""
    _, apart = told("precision_digits").split("the seeds tell ")
    assert "4 bits (e3m0), 3 bits (e2m0) and" in apart
    assert '"4 bits (e3m0), APS"' not in apart
    lost = [
        studies.point("precision_digits", "32 bits", size)["test_accuracy_mean"]
        - studies.point("precision_digits", "4 bits (e3m0)", size)["test_accuracy_mean"]
        for size in (64, 256, 1024)
    ]
    assert lost == sorted(lost)
    for label in ("3 bits (e2m0)", "3 bits (e2m0), APS"):
        assert not studies.point("precision_digits", label, 64)["learned"]
    widest = re.search(r'"4 bits \(e3m0\), APS" \(\S+ to \+(\d)', told("precision_digits"))
    assert widest[1] == "4"  # points, as the page says


def test_how_arms_on_images_fail():
    arms = [
        arm for name in ("digits_limit", "digits_lstm_legw") for arm in studies.study(name)["arms"]
    ]
    kinds = [arm["failure"]["kind"] for arm in arms]
    assert (kinds.count("generalise"), len(kinds)) == (6, 8)
    shares = [arm["failure"]["train_share"] for arm in arms]
    assert sum(share < 0.5 for share in shares) == 6  # "less than half as much"
    for arm in studies.study("digits_limit")["arms"]:  # the CNN, at the full batch
        first, *_, last = [point["train_accuracy_mean"] for point in arm["points"]]
        assert first - last > 0.02


def test_the_benchmarks_are_those_of_the_script():
    """Each has a section on the page, and a file with the agreed keys."""
    names = set(benchmarks.benchmarks())
    page = (DOCS / "results" / "benchmarks.md").read_text()
    assert set(re.findall(r'{= benchmark\("(\w+)"\) =}', page)) == names

    keys = {"name", "unit", "ours", "peer", "peer_name", "ratio", "aim", "met"}
    files = list(benchmarks.FOLDER.iterdir())
    assert {file.name for file in files} == {f"{name}.json" for name in names}
    for file in files:
        for row in json.loads(file.read_text()):
            assert keys | {"command", "device", "versions", "git_revision"} == set(row)
            assert row["command"] == f"scripts/bench {file.stem}"


def test_the_table_of_a_benchmark(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmarks, "FOLDER", tmp_path)
    row = {"name": "CNN", "unit": "images/s", "ours": 23456.7, "peer": 23000.0, "ratio": 1.0199}
    row |= {
        "peer_name": "loop",
        "aim": ["ratio", ">=", 3.0],
        "met": False,
        "command": "scripts/bench step",
    }
    row |= {"device": "2 CPU cores", "versions": {"jax": "0.10.2"}, "git_revision": "a" * 40}
    (tmp_path / "step.json").write_text(json.dumps([row]))
    found = benchmarks.benchmark("step")
    assert "| CNN | images/s | 23,457 | 23,000 | loop | 1.02 | ratio ≥ 3 | **no** |" in found
    assert "Machine: 2 CPU cores. Versions: JAX 0.10.2. Revision: aaaaaaaa." in found


def test_what_the_page_of_benchmarks_says_of_the_tables():
    def rows(name, *words):
        named = {row["name"]: row for row in benchmarks.measurements(name)}
        found = [row for title, row in named.items() if all(word in title for word in words)]
        assert found, (name, words)
        return found

    large = "BERT-Large, batch 65536 x 128, no dropout"
    whole, sharded = (
        benchmarks.measurement("models", f"{large}{update}, v3:32x32: step")["ours"]
        for update in ("", ", sharded update")
    )
    assert sharded < 0.9 * whole  # "a large part"

    shares = rows("pod", "optimizer's HBM traffic, beside a whole one's")
    assert len(shares) == 5
    assert all(row["met"] for row in shares)  # 1/N and the small arrays

    for row in rows("aggregators", ": time, "):
        assert row["ratio"] < 1
    for row in rows("aggregators", "sent by a core"):
        promised = row["aim"][2]
        assert row["ours"] < 1.005 * promised or row["name"].startswith("agvm")
    slower = [row["name"] for row in rows("update", "LARS: estimate, ") if row["ratio"] < 1]
    assert slower == ["LARS: estimate, TPU v6e"]
    assert all(row["ratio"] > 1 for row in rows("update", "LARS: HBM, "))
    faster = [row["name"] for row in rows("matrices", "beside the ideal") if row["ratio"] > 1]
    assert faster == ["Muon, v5e:4x4: dealt, beside the ideal"]
    for what in ("HBM", "estimate"):
        assert all(row["ratio"] > 1 for row in rows("update", f"LAMB: {what}, "))
        behind = [row["name"] for row in rows("update", "four", f"{what}, ") if not row["met"]]
        assert behind == [f"LAMB, four 1024 x 4096 matrices: {what}, TPU v6e"] * (what == "HBM")
    loops = [row for row in rows("step", "1 device") if "momentum" in row["name"]]
    ratios = [row["ratio"] for row in loops]  # at batches 64, 256 and 1,024
    assert ratios == sorted(ratios)
    assert ratios[-1] < 1


def test_the_commands_of_what_is_measured_exist():
    text = (DOCS / "project" / "measured.md").read_text()
    paths = re.findall(r"(?<![\w/])(?:tests|scripts|examples|tpu)(?:/[\w.]+)*", text)
    assert len(paths) > 50
    for path in paths:
        assert (ROOT / path).exists(), path
    benches = re.findall(r"scripts/bench (\w+)", text)
    assert set(benches) <= set(benchmarks.benchmarks())


def test_the_families_are_those_of_the_script():
    wanted = runpy.run_path(str(ROOT / "scripts" / "train_families.py"))["ALL"]
    found = json.loads((DOCS / "results" / "families.json").read_text())
    assert [(run["config"], run.get("seed")) for run in found["runs"]] == list(wanted)


def test_published_accuracies_are_met():
    scores = {}
    for run in json.loads((DOCS / "results" / "families.json").read_text())["runs"]:
        scores.setdefault(run["config"], []).append(100 * run.get("test/accuracy", 0.0))
    recipes = runpy.run_path(str(ROOT / "configs" / "mnist1d.py"))
    for row, (*_, published) in recipes["TABLE"].items():
        found = scores[f"configs/mnist1d.py:{row}"]
        assert len(found) == 5
        assert abs(np.mean(found) - published) <= 2
        said = f"{np.mean(found):.1f} ({np.std(found, ddof=1):.1f})"
        assert re.search(rf"^    {row} .* {re.escape(said)}$", recipes["__doc__"], re.MULTILINE)
    # zalandoresearch/fashion-mnist@55506a9, README: two convolutions with pooling.
    assert min(scores["configs/fashion_mnist.py:quarter-adam"]) >= 87.6


def test_what_is_said_of_the_limit_on_fashion_mnist():
    name = "fashion_limit-mlp"
    arms = {one["arm"]: one["points"] for one in studies.study(name)["arms"]}
    assert (len(arms), arms["Muon + LEGW"][-1]["steps"]) == (10, 20)
    for place in range(6):
        means = {arm: points[place]["test_accuracy_mean"] for arm, points in arms.items()}
        assert max(means, key=means.get) == "Muon + LEGW"
    factors = {arm: [one["learning_rate_factor"] for one in arms[arm]] for arm in arms}
    assert set(factors["LAMB + LEGW"]) == {0.5}
    others = [value for arm in arms if arm != "LAMB + LEGW" for value in factors[arm]]
    assert (min(others), max(others)) == (1 / 32, 2)
    edges = [arm for arm, points in arms.items() if points[-1]["at_edge_of_grid"]]
    assert edges == ["Momentum + linear"]

    assert {one["failure"]["kind"] for one in studies.study(name)["arms"]} == {"optimise"}
    at_the_full_batch = [
        arms[arm][-1]["test_accuracy_mean"]
        for arm in ("Momentum + linear", "LARS + LEGW", "LAMB + LEGW")
    ]
    assert at_the_full_batch == sorted(at_the_full_batch)
    apart = studies.finding(name, "At batch 50000").partition("tell Muon + LEGW apart from")[2]
    assert all(arm in apart for arm in arms if arm != "Muon + LEGW")
    goes = studies.claim("lamb_legw_goes_further", name)
    assert goes["verdict"] == "did not hold"
    small = studies.claim("lamb_legw_goes_further", "fashion_limit-small")
    assert (small["verdict"], "MuonH + LEGW is left out" in small["sentence"]) == ("held", True)


def test_what_is_said_of_steps_to_a_target_on_fashion_mnist():
    arms = studies.study("fashion_target-mlp")["arms"]
    steps = {
        one["arm"].split()[0]: [point["steps"] for point in one["scaling"]["points"]]
        for one in arms
    }
    muon = steps.pop("Muon")
    assert all(one[-1] is None for one in steps.values())
    assert all(muon[place] < min(one[place] for one in steps.values()) for place in range(4))
    ratios = sorted(one[0] / muon[0] for one in steps.values())
    assert (round(ratios[0], 1), round(ratios[-1], 1)) == (4.5, 7.2)
    assert abs(muon[3] - muon[4]) <= 1

    fits = {one["arm"].split()[0]: one["critical_batch"] for one in arms}
    sizes = {arm: fit["critical_batch_size"] for arm, fit in fits.items()}
    bounds = {arm: fit["intervals"]["critical_batch_size"] for arm, fit in fits.items()}
    assert min(sizes, key=sizes.get) == "Muon"
    assert max(bounds["LAMB"][0], bounds["Momentum"][0]) < bounds["Muon"][1]
    assert bounds["Shampoo"][0] > max(high for arm, (_, high) in bounds.items() if arm != "Shampoo")
    shown = {}
    for one in arms:
        factors = [point["learning_rate_factor"] for point in one["points"]]
        reached = [point["steps"] is not None for point in one["scaling"]["points"]]
        kept = sorted(factor for factor, found in zip(factors, reached, strict=True) if found)
        shown[one["arm"].split()[0]] = (round(kept[0], 2), round(kept[-1], 2))
    assert (shown["LAMB"], shown["Momentum"]) == ((0.31, 0.44), (0.09, 0.89))
    (momentum,) = (one for one in arms if one["arm"].startswith("Momentum"))
    last = momentum["points"][-1]
    assert (last["search_trials"], last["search_beyond_edges"]) == (14, 4)
    chance = [one for one in last["search"] if one["validation_accuracy_mean"] < 0.15]
    assert len(chance) == 9  # one of these beyond the ten
    assert round(last["learning_rate_factor"], 2) == 0.07
    assert round(last["validation_accuracy_mean"], 3) == 0.818
    claim = studies.claim("noise_scale_predicts_critical_batch", "fashion_target-mlp")
    assert "6.9 to 106 times the noise scale" in claim["sentence"]
    growth = {one["arm"].split()[0]: one["critical_growth"] for one in arms}
    above_0 = [arm for arm, one in growth.items() if one and one["interval"][0] > 0]
    assert above_0 == ["AdamW", "LAMB", "Shampoo"]
    assert growth["Momentum"]["interval"][0] < 0 < growth["Momentum"]["interval"][1]
    assert growth["Muon"] is None


def test_what_is_said_of_the_batch_of_a_language_model():
    arms = {one["arm"].split()[0]: one for one in studies.study("lm_critical-small")["arms"]}
    losses = {
        arm: [point["test_loss_mean"] for point in one["points"]] for arm, one in arms.items()
    }
    adamw = losses["AdamW"]
    muonh = losses["MuonH"]
    assert (muonh[1] <= muonh[0], round(adamw[1] - adamw[0], 1)) == (True, 0.2)
    behind = [theirs - ours for ours, theirs in zip(muonh, adamw, strict=True)]
    assert (round(behind[0], 2), round(behind[1], 1)) == (0.08, 0.3)
    assert round(min(behind[2:]), 1) == 0.8
    assert round(muonh[2] - adamw[0], 2) == 0.06
    factors = {
        arm: [point["learning_rate_factor"] for point in one["points"]] for arm, one in arms.items()
    }
    assert factors["MuonH"] == [1, 1, 1, 0.25]
    assert (factors["AdamW"][0], factors["AdamW"][-1]) == (4, 1)

    spread = [
        point["test_loss_std"] / point["test_loss_mean"]
        for arm in arms.values()
        for point in arm["points"]
    ]
    assert round(100 * np.sqrt(np.mean(np.square(spread)))) == 1  # percent, in the config's head
    limit = arms["MuonH"]["limit"]["global_batch_size"]
    assert round(128 * limit, -2) == 1600
    scales = [point["noise_scale"] for point in arms["MuonH"]["points"]]
    assert (round(scales[0] / limit), max(scales)) == (4, scales[0])


def test_what_is_said_of_rules_without_a_search():
    name = "rules_transfer"
    arms = {one["arm"]: one["points"] for one in studies.study(name)["arms"]}
    rates = {arm: [one["learning_rate"] for one in points] for arm, points in arms.items()}
    assert rates["sqrt, searched"] == rates["as by sqrt"] == [0.002, 0.008, 0.016]
    assert rates["LEGW, searched"] == [0.002, 0.016, 0.032]
    steps = {arm: [one["warmup_steps"] for one in points] for arm, points in arms.items()}
    assert steps["as by sqrt"][-1] == 1
    assert set(steps["as by LEGW"]) == {39}
    verdicts = {one["claim"]: one["verdict"] for one in studies.study(name)["claims"]}
    assert verdicts.pop("rule_needs_no_search_linear") == "did not hold"
    assert set(verdicts.values()) == {"held"}
