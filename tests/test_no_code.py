"""Input files cannot run code: no pickles, no eval, no unpacked archives, no names as paths."""

import ast
import pathlib

import pytest

from lbopt.cli import main

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted([*(ROOT / "lbopt").rglob("*.py"), *(ROOT / "tpu").rglob("*.py")])
MODULES = {
    "pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "torch",
    "tarfile",
    "zipfile",
}
CALLS = {"eval", "exec", "compile"}
ATTRIBUTES = {"load": {"np", "numpy", "yaml", "torch", "joblib"}, "unpack_archive": {"shutil"}}
LOADS_CONFIGS = "lbopt/_user_code.py"
"""Runs the config file, and the code, that the user names: `exec_module`."""
READS_ARRAYS = "lbopt/data/own/_columns.py"
"""Reads .npy and .npz files: `numpy.load` without pickles, and the list of a zip file's members."""


def imports(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


def calls(nodes):
    for node in nodes:
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in CALLS:
                yield node.func.id
            elif isinstance(node.func, ast.Attribute):
                name = ast.unparse(node.func.value)
                if name in ATTRIBUTES.get(node.func.attr, ()) and not refuses_pickles(node):
                    yield f"{name}.{node.func.attr}"
                if node.func.attr == "exec_module":
                    yield "exec_module"


def refuses_pickles(call):
    return "allow_pickle=False" in map(ast.unparse, call.keywords)


def test_no_file_of_ours_can_run_what_it_reads():
    found = {}
    for file in FILES:
        nodes = list(ast.walk(ast.parse(file.read_text())))
        name = str(file.relative_to(ROOT))
        found[name] = (set(imports(nodes)) & MODULES) | set(calls(nodes))
    found[LOADS_CONFIGS].remove("exec_module")
    found[READS_ARRAYS].remove("zipfile")
    assert not {name: what for name, what in found.items() if what}


def around(folder):
    return {
        file: file.stat().st_mtime_ns for file in folder.rglob("*") if "inside" not in file.parts
    }


@pytest.mark.everyday("*evil")
@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil-recipe"])
def test_the_name_of_a_recipe_is_no_path(name, tmp_path):
    workdir = tmp_path / "outer" / "inside"
    workdir.parent.mkdir()
    before = around(tmp_path)
    config = f"--config={ROOT / 'configs' / 'digits_cnn.py'}:smoke"
    small = ["--config.model.widths=(4,)", "--config.model.hidden=8", "--config.num_steps=5"]
    flags = [f"--config.name={name}", *small, f"--workdir={workdir / 'run'}"]
    assert main(["train", config, *flags]) == 0
    assert main(["report", flags[-1]]) == 0
    assert around(tmp_path).keys() == before.keys()
    assert not pathlib.Path("/tmp/evil-recipe").exists()


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil-corpus", "a/../../evil", ".."])
def test_the_name_of_a_corpus_is_no_path(name, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("Some words. And more of them.\n\nA second article.\n")
    (tmp_path / "inside").mkdir()
    before = around(tmp_path)
    code = main(
        [
            "prepare",
            "text",
            f"--folder={tmp_path}",
            f"--name={name}",
            f"--data_dir={tmp_path / 'inside'}",
        ]
    )
    assert code == 2
    assert "name" in capsys.readouterr().err
    assert around(tmp_path).keys() == before.keys()
