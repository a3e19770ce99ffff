"""The user's code is found beside the config, and its errors name their line."""

import pytest
from refusal import refused

from lbopt import _user_code


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A config's folder with a package and modules; the current folder is another."""
    files = {
        "pkg/__init__.py": "",
        "pkg/net.py": "import json, helper\nfrom . import layers\nNet = layers.Layer\n",
        "pkg/layers.py": "import numpy as np\nclass Layer: pass\n",
        "helper.py": "HELP = 1\n",
        "broken.py": "x = 1\ny = [\n",
        "late.py": "def make():\n    x = {}\n    return x['absent']\n",
    }
    for name, text in files.items():
        file = tmp_path / "mine" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(_user_code, "_config_folders", [str(tmp_path / "mine")])
    return tmp_path / "mine"


def test_a_module_or_a_file_is_found_beside_the_config(folder):
    layer = _user_code.load("pkg.net:Net", "model")
    assert layer.__module__ == "pkg.layers"
    assert _user_code.load("late.py:make", "model") is _user_code.load("late.py:make", "model")


@pytest.mark.parametrize(
    ("place", "code", "words"),
    [
        ("broken.py:make", "damaged", "broken.py, line 2: SyntaxError"),
        ("broken.py:make", "damaged", "in 'y = ['; correct it"),
        ("pkg.layers:Net", "missing", "Layer"),
        ("pkg.absent:Net", "missing", "pkg.absent"),
        ("absent.py:Net", "missing", "absent.py"),
        ("no place", "value", "module:name"),
    ],
)
def test_what_cannot_be_loaded_is_refused(folder, place, code, words):
    with refused("model", place, code) as caught:
        _user_code.load(place, "model")
    assert words in str(caught.value)


def test_an_error_names_the_last_line_of_the_users_code(folder, monkeypatch):
    make = _user_code.load("late.py:make", "model")
    named = _user_code.naming_errors("model", "late.py:make")
    with refused("model", "late.py:make", "damaged") as caught, named:
        make()
    assert f"{folder / 'late.py'}, line 3: KeyError: 'absent'" in str(caught.value)

    # An error that met none of it is told without a line.
    monkeypatch.setattr(_user_code, "is_of_user", lambda file: False)
    named_anew = _user_code.naming_errors("model", "late.py:make")
    with refused("model", "late.py:make", "damaged") as caught, named_anew:
        make()
    assert "KeyError: 'absent'; correct it" in str(caught.value)
    assert "line 3" not in str(caught.value)
