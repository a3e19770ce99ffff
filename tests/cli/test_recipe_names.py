"""`--config=NAME[:ROW]`: the recipes that come with lbopt, and files that take their place."""

import json
import subprocess

import pytest
from refusal import names_in, refused

from lbopt import _installed
from lbopt.cli import _config_files, call_get_config, config_files
from lbopt.workdir import _versions

OWN = """
from lbopt.config import TrainConfig

def get_config(row=""):
    return TrainConfig(name=f"own:{row}", num_steps=8)
"""


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch):
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("digits_cnn:lamb-1024", "digits_cnn:lamb-1024"),
        ("sweeps/digits_limit:smoke", "digits_limit:smoke"),
        ("digits_limit:smoke", "digits_limit:smoke"),
    ],
)
def test_a_name_is_a_recipe_of_lbopt(flag, name):
    assert call_get_config(flag).name == name


@pytest.mark.parametrize(
    "own", ["digits_cnn.py", "configs/digits_cnn.py", "configs/a/digits_cnn.py"]
)
def test_a_file_here_wins(empty, own):
    file = empty / own
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(OWN)
    assert call_get_config("digits_cnn:lamb-1024").name == "own:lamb-1024"


def test_a_folder_or_a_helper_of_that_name_does_not(empty):
    (empty / "digits_cnn").mkdir()
    (empty / "configs").mkdir()
    (empty / "configs/digits_cnn.py").write_text("x = 1\n")
    assert call_get_config("digits_cnn:lamb-1024").name == "digits_cnn:lamb-1024"


def test_a_name_of_two_recipes_is_refused(empty):
    for folder in ("a", "b"):
        (empty / "configs" / folder).mkdir(parents=True)
        (empty / "configs" / folder / "x.py").write_text(OWN)
    with refused("--config", "x", "choice") as caught:
        call_get_config("x")
    assert {"a/x", "b/x"} <= names_in(caught)
    assert call_get_config("b/x").name == "own:"


@pytest.mark.parametrize(
    ("flag", "near"),
    [
        ("digits_cn:smoke", "digits_cnn"),
        ("sweep/digits_limits", "sweeps/digits_limit"),
        ("configs/digits_cnn.py:smoke", "--config=digits_cnn"),
        ("common", "lbopt recipes"),
        ("no/such_thing.py", "lbopt recipes"),
    ],
)
def test_a_wrong_name_is_refused_with_the_names_near(flag, near):
    with refused("--config", flag, "missing") as caught:
        call_get_config(flag)
    assert near in caught.value.reason


def test_every_recipe_has_a_name_of_one_word(configs):
    """A new file must not take the short name of another one."""
    for file in config_files(configs):
        assert _config_files.split_row(file.stem) == (str(file), "")


def test_the_table_loads_the_recipe_that_it_names(empty, lbopt):
    """A file of the same name here is another recipe."""
    (empty / "digits_cnn.py").write_text(OWN)
    recipes = json.loads(lbopt("recipes", "--json")[1])
    found = {recipe["config"] for recipe in recipes}
    assert "digits_lstm:smoke" in found
    assert "digits_cnn:smoke" not in found
    assert f"{_installed.shipped('configs')}/digits_cnn.py:smoke" in found


def test_a_workdir_is_compared_with_the_name_it_keeps(small, empty, lbopt, trained, monkeypatch):
    """The name means what it meant in the folder of the run."""
    place = empty / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    workdir = place / "run"
    workdir.mkdir()
    saved = json.loads((trained / "config.json").read_text())
    command = ["lbopt", "train", "--config=digits_cnn:smoke", *small[1:], "--workdir=run"]
    saved |= {"command": " ".join(command).replace("(4,)", "'(4,)'"), "folder": str(place)}
    (workdir / "config.json").write_text(json.dumps(saved))
    monkeypatch.chdir(empty)
    assert "config" not in lbopt("diff", workdir)[1]

    (place / "digits_cnn.py").write_text(OWN)
    assert "config.name" in lbopt("diff", workdir)[1]


@pytest.mark.process
def test_a_repository_around_an_installed_recipe_is_not_its_revision(empty, monkeypatch):
    """An environment often lies inside a repository of the user."""
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com"]
    (empty / "config.py").write_text(OWN)
    for command in (["init", "-q"], ["add", "config.py"], ["commit", "-qm", "."]):
        subprocess.run([*git, *command], check=True)
    call_get_config("config.py")
    assert _versions.describe_software()["code_revision"] is not None

    packages = empty / ".venv/site-packages/lbopt"
    recipes = packages / "_shipped/configs"
    recipes.mkdir(parents=True)
    (recipes / "own.py").write_text(OWN)
    monkeypatch.setattr(_installed, "__file__", str(packages / "_installed.py"))
    monkeypatch.setattr(_versions, "__file__", str(packages / "workdir/_versions.py"))
    (packages / "workdir").mkdir()
    (packages / "workdir/_versions.py").touch()

    assert call_get_config("own").name == "own:"
    software = _versions.describe_software()
    assert (software["git_revision"], software["code_revision"]) == (None, None)
