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
from contextlib import redirect_stdout

import matplotlib
import pytest
from _site import benchmarks

from lbopt.cli import _main, load_config
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
    assert f"{len(plans) - len(small)} published TPU runs" in README


def test_the_measured_numbers_of_the_readme_are_those_of_the_benchmarks():
    update = benchmarks.measurement("update", "LAMB: accessed, TPU v3")
    assert f"| {update['ours']:.1f}; Optax {update['peer']:.1f} | `scripts/bench update`" in README

    loop = [row["ratio"] for row in measured("step", "hand-written jit loop")]
    assert f"| {min(loop):.2f} to {max(loop):.2f} x | `scripts/bench step`" in README

    rows = measured("sweep", "one process per trial")
    large = [row["ratio"] for row in rows if row["name"].endswith(", 180 trials")]
    assert f"| {min(large):.0f} to {max(large):.0f} x | `scripts/bench sweep`" in README

    (quickstart,) = [row for row in rows if row["name"].endswith("digits_limit.py, 630 trials")]
    assert round(630 / quickstart["ours"] / 60) == 3
    assert "study five optimizers on real digits, 3 minutes on 2 cores" in README
    assert "takes about three minutes on two" in PAGES["start/first-run.md"]


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
