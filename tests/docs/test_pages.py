"""The README and the pages of the site are true: code runs, commands exist, messages are ours."""

import ast
import importlib
import io
import json
import os
import pathlib
import re
import runpy
import shlex
import signal
import subprocess
from contextlib import redirect_stdout

import matplotlib
import pytest
from _site import benchmarks, links, studies

from lbopt import errors
from lbopt.cli import _main, call_get_config, load_config
from lbopt.transforms._variants import VARIANTS

matplotlib.use("agg")  # as the notebooks of the site do
ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
PAGES = {
    str(path.relative_to(DOCS)): path.read_text()
    for path in sorted(DOCS.rglob("*.md"))
    if "_site" not in path.parts
}
CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = re.compile(
    r"^(?P<indent> *)```(?P<language>.*)\n(?P<fenced>(?s:.*?))^(?P=indent)```$"
    r"|(?P<indented>(?:^ {4}.*\n)+)",
    re.MULTILINE,
)
SHELL = ("", "bash", "console", "sh", "text")
COMMANDS = re.compile(r"^ *(?:\$ |(?:until|srun|\w+=).*?[\s'])?lbopt ([^;\n]*)", re.MULTILINE)
METHODS = {
    "LAMB": "layerwise adaptive moments",
    "LARS": "layerwise adaptive rate scaling",
    "LEGW": "linear-epoch gradual warmup",
}
RIDDLES = ("so many", "so often", "likewise", "whoever", "the former", "one that ", "as ever")


def test_the_loop_of_the_readme_prints_what_it_says():
    """The loop has 15 lines beside blank ones and a comment."""
    (code,) = CODE.findall(README)
    assert len(re.findall(r"^\s*[^\s#]", code, re.MULTILINE)) <= 15
    said = ast.literal_eval(re.search(r"applied last:\n\n((?: {4}.*\n)+)", README)[1].strip())
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(code, {})
    found = ast.literal_eval(printed.getvalue())
    assert found == pytest.approx(said, rel=0.01)


def test_the_readme_is_a_screen_and_a_half():
    lines = README.splitlines()
    assert len(lines) <= 150
    assert max(map(len, lines)) <= 100


def test_the_numbers_of_the_readme_are_those_of_the_study():
    summary = json.loads((ROOT / "configs" / "sweeps" / "digits_limit.json").read_text())
    last = {arm["arm"]: 100 * arm["points"][-1]["test_accuracy_mean"] for arm in summary["arms"]}
    best, second = sorted(last, key=last.get, reverse=True)[:2]
    assert best == "LAMB + LEGW"
    assert f"keeps {last[best]:.1f} %, {last[best] - last[second]:.1f} points more" in README

    limits = {arm["arm"]: arm["limit"]["global_batch_size"] for arm in summary["arms"]}
    assert max(limits, key=limits.get) == best
    assert summary["claims"][0]["verdict"] == "cannot be told"

    plans = list((ROOT / "configs" / "plans").glob("*.json"))
    counts = f"{len(VARIANTS['lamb'])} LAMBs", f"{len(VARIANTS['lars'])} LARS"
    assert ", ".join(counts) in README
    assert "All " + " and ".join(counts) in PAGES["guides/migrating.md"]
    small = runpy.run_path(str(ROOT / "scripts" / "make_plans.py"))["SMALL"]
    recipes = (ROOT / json.loads(plan.read_text())["recipe"] for plan in plans)
    published = [row for row in recipes if call_get_config(str(row)).about.paper != "-"]
    assert f"{len(published) - len(small)} published runs, compiled" in README


def test_the_readme_says_what_the_studies_on_fashion_mnist_found():
    arms = {one["arm"]: one["points"][-1] for one in studies.study("fashion_limit-mlp")["arms"]}
    assert {one["steps"] for one in arms.values()} == {20}
    accuracy = {name.split()[0]: one["test_accuracy_mean"] for name, one in arms.items()}
    assert re.search(
        rf"20 steps are left: Muon reaches {100 * accuracy['Muon']:.1f} %, LAMB "
        rf"{100 * accuracy['LAMB']:.1f} % and momentum\s+{100 * accuracy['Momentum']:.1f} %",
        README,
    )

    rows = re.findall(r"^\| (.*) \| (held|did not hold|cannot be told) \|$", README, re.MULTILINE)
    names = ("fashion_limit-mlp", "fashion_target-mlp", "rules_transfer")
    claims = [claim for name in names for claim in studies.study(name)["claims"]]
    verdicts = {(studies.CLAIMS[claim["claim"]], claim["verdict"]) for claim in claims}
    assert set(rows) == verdicts
    assert len(rows) == len(verdicts)

    rules = {one["arm"]: one["points"][-1] for one in studies.study("rules_transfer")["arms"]}
    costs = [
        rules["LEGW, searched"]["test_accuracy_mean"] - rules[f"as by {rule}"]["test_accuracy_mean"]
        for rule in ("sqrt", "SDE, half-lives")
    ]
    assert f"costs {100 * costs[0]:.1f} and {100 * costs[1]:.1f} points" in README
    assert rules["as by sqrt"]["global_batch_size"] == 4096


def test_the_measured_numbers_of_the_readme_are_those_of_the_benchmarks():
    update = benchmarks.measurement("update", "LAMB: accessed, TPU v3")
    assert f"| {update['ours']:.1f}; Optax {update['peer']:.1f} | `scripts/bench update`" in README

    loop = [row["ratio"] for row in measured("step", "hand-written jit loop")]
    assert f"| {min(loop):.2f} to {max(loop):.2f} | `scripts/bench step`" in README

    rows = measured("sweep", "one process per trial")
    large = [row["ratio"] for row in rows if row["name"].endswith(", 180 trials")]
    assert f"| {min(large):.0f} to {max(large):.0f} | `scripts/bench sweep`" in README

    (quickstart,) = [row for row in rows if "digits_limit.py" in row["name"]]
    trials = int(quickstart["name"].split()[-2])
    assert trials / quickstart["ours"] / 60 < 5  # and the start, the report and a slower day
    assert "study five optimizers on real digits, 5 minutes on 2 cores" in README
    assert "takes about five minutes on two" in PAGES["start/first-run.md"]


def test_the_tested_numbers_of_the_readme_are_those_of_the_tests():
    kills = constant("train/test_many_kills.py", "KILLS")
    assert f"| {kills} times `kill -9`, then resumed" in README
    limit = constant("transforms/test_variants.py", "IN_FLOAT64_WITHIN")
    assert f"beside their sources | to {limit:.0e} |" in README


def constant(file, name):
    """Return a constant of a test file, whose module is not imported."""
    for node in ast.parse((ROOT / "tests" / file).read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    raise LookupError(name)


def measured(name, peer):
    """Return the rows of a benchmark beside one peer."""
    return [row for row in benchmarks.measurements(name) if row["peer_name"] == peer]


def test_links_of_the_readme_and_its_pictures_exist():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert len(links) > 10
    for path in links:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if CODE.search(text)])
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    """The blocks of a page run one after another in one namespace, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    space = {"__name__": "__page__"}
    for code in CODE.findall(PAGES[page]):
        if "# not run" not in code:
            exec(compile(code, page, "exec"), space)


@pytest.mark.parametrize("page", ["README.md", *PAGES])
def test_the_commands_of_a_page_exist(page):
    for command in _commands(README if page == "README.md" else PAGES[page]):
        _check_command(command)


def test_commands_are_found_behind_a_prompt_and_behind_variables():
    for page in ("reference/command.md", "guides/gpu-slurm.md", "guides/many-hosts.md"):
        assert len(_commands(PAGES[page])) > 3


def _commands(text):
    """Return what follows `lbopt` in the blocks of a page."""
    blocks = [block for block in BLOCKS.finditer(text) if (block["language"] or "") in SHELL]
    lines = [(block["fenced"] or block["indented"]).replace("\\\n", " ") for block in blocks]
    return COMMANDS.findall("\n".join(lines))


def _check_command(command):
    """Check a command, the names of its flags, its recipe with the changed fields, its script."""
    if command.count("'") % 2:  # the end of COMMAND='...'
        command = command.removesuffix("'")
    name, *words = shlex.split(command, comments=True)
    assert name in (*_main.COMMANDS, "--version", "--help", "COMMAND"), command
    if name == "tpu" and not words[0].startswith("--"):
        assert os.access(ROOT / "tpu" / words[0], os.X_OK), command
    elif name in _main.COMMANDS:
        overrides = [word for word in words if word.startswith("--config.")]
        given = [word[2:] for word in words if word.startswith("--") and word not in overrides]
        values = dict(word.partition("=")[::2] for word in given)
        known = getattr(importlib.import_module(f"lbopt.cli._{name}"), "FLAGS", {})
        assert known == {} or values.keys() <= {*known, "help"}, command
        if re.fullmatch(r"[\w/]+(:[\w.-]+)?", values.get("config", "")):
            load_config(values["config"], overrides, object)


@pytest.mark.parametrize("page", ["README.md", *PAGES])
def test_a_page_is_plain_english(page):
    text = (README if page == "README.md" else PAGES[page]).lower()
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert [words for words in RIDDLES if words in re.sub(r"\s+", " ", prose)] == []


@pytest.mark.parametrize("page", ["README.md", "examples/README.md", *PAGES])
def test_methods_are_spelled_out_where_a_page_names_them_first(page):
    """Or they are links to the glossary. Titles and code do not count."""
    text = PAGES[page] if page in PAGES else (ROOT / page).read_text()
    no_prose = r"^#.*?$|^```.*?^```|\{=.*?=\}|(\{term\})?`[^`]+`"
    found = re.sub(no_prose, lambda part: part[0] if part[1] else "", text, flags=re.S | re.M)
    prose = " ".join(found.split())
    for name, meaning in METHODS.items():
        first = re.search(rf"(?<![\w-])`?{name}\b", prose)
        if first and not prose[: first.start()].endswith("{term}"):
            around = prose[max(0, first.start() - 60) : first.end() + 120]
            assert meaning in around.replace("*", "").lower(), around


def test_a_spoilt_site_is_found_out(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "sound.html").write_text('<p id="here"><a href="deep/spoilt.html#top">there</a>')
    (tmp_path / "deep" / "spoilt.html").write_text(
        '<p id="top"><a href="../sound.html#here">sound</a><a href="../sound.html#gone"></a>'
        '<a href="missing.html"></a><a href="http://example.com"></a>'
        '<img src="a.png"><script src="https://example.com/a.js"></script>'
    )
    assert links.faults(tmp_path) == [
        f"deep/spoilt.html: {fault}"
        for fault in (
            "an image without a text: a.png",
            "fetched from another server: https://example.com/a.js",
            "no such place: ../sound.html#gone",
            "no such file: missing.html",
            "not a secure address: http://example.com",
        )
    ]


def test_the_settings_of_the_page_are_those_of_the_scripts():
    """Their names, and their defaults but for the one that is made of other settings."""
    script = """
    source tpu/settings.sh
    for name in "${REQUIRED[@]}"; do echo "$name"; done
    for name in "${!DEFAULTS[@]}"; do echo "$name=${DEFAULTS[$name]:-empty}"; done
    """
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True)
    known = dict(line.partition("=")[::2] for line in done.stdout.splitlines())

    rows = re.findall(r"^\| (`[A-Z_`, ]+`) \|(.*?)\|", PAGES["reference/tpu-env.md"], re.MULTILINE)
    shown = {
        name: cell.strip(" `") for names, cell in rows for name in re.findall("[A-Z_]+", names)
    }
    assert shown.keys() == known.keys()
    assert shown["WORKDIR"] == "$BUCKET/runs/$NAME"
    named = {name: value for name, value in known.items() if value and name != "WORKDIR"}
    assert named == {name: shown[name] for name in named}


def test_the_exit_codes_of_the_page_are_those_of_the_code():
    codes = re.findall(r"^\| (\d+) \|", PAGES["reference/exit-codes.md"], re.MULTILINE)
    of_errors = {errors.EXIT_USER, errors.EXIT_ENVIRONMENT, errors.EXIT_PREEMPTED}
    of_signals = {128 + signal.SIGINT, 128 + signal.SIGTERM}
    assert {*map(int, codes)} == {0, 1} | of_errors | of_signals


def test_messages_of_the_troubleshooting_page_are_in_the_code():
    files = (ROOT / "lbopt").rglob("*.py")
    texts = {text for file in files for text in _texts(ast.parse(file.read_text()))}
    shown = re.findall(r"^```none\n(.*?)^```", PAGES["help/troubleshooting.md"], re.S | re.M)
    messages = [
        " ".join(message.split())
        for block in shown
        for message in re.split(r"\n(?=lbopt \w+:)", block)
    ]
    assert len(messages) > 15
    for message in messages:
        assert any(_is_in(message, text) for text in texts), message


def _is_in(message, pattern):
    """Return whether a message has the words of a pattern, and not only what they leave open."""
    found = pattern.search(message)
    return found and len(pattern.pattern.replace(".*", "")) > 0.1 * len(found[0])


def _texts(tree):
    """Yield the messages of a module as patterns; what is filled in matches anything."""
    for node in ast.walk(tree):
        parts = getattr(node, "values", [node])
        if isinstance(node, (ast.JoinedStr, ast.Constant)):
            words = [part.value if isinstance(part, ast.Constant) else "{0}" for part in parts]
            text = "".join(map(str, words))
            if len(re.sub(r"{\w+}", "", text)) > 8 and " " in text and len(text) < 300:
                pattern = re.sub(r"\\{\w+\\}", ".*", re.escape(text))
                yield re.compile(f": {pattern}$")


@pytest.mark.parametrize("name", _main.COMMANDS)
def test_every_command_has_a_section_with_its_flags_and_an_example(name):
    section = re.search(
        rf"^## `lbopt {name}`\n(.*?)(?=^## |^\(|\Z)", PAGES["reference/command.md"], re.S | re.M
    )
    assert section, f"docs/reference/command.md needs a section '## `lbopt {name}`'"
    assert f'{{= flags("{name}"' in section[1]
    assert re.search(rf"```(?:bash|console)\n(?:\$ )?lbopt {name}\b", section[1])
    assert len(re.sub(r"(?s)```.*?```|{=.*?=}", "", section[1]).split()) > 10
