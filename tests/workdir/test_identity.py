"""A workdir knows the content of the user's source and data files."""

import json
import os
import time

import numpy as np
import pytest
from refusal import refused

from lbopt import _user_code
from lbopt.report import _page
from lbopt.workdir import _data_files, _identity, _sources, open_workdir, own_files

CODE = {
    "mine/net.py": "import numpy, helper\nfrom pkg.layers import Layer\nNet = Layer\n",
    "mine/helper.py": "def late():\n    import lazy\n",
    "mine/lazy.py": "import common, shared\n",
    "mine/pkg/__init__.py": "",
    "mine/pkg/layers.py": "from . import more\nclass Layer: pass\n",
    "mine/pkg/more.py": "import equinox\n",
    "mine/unused.py": "import numpy\n",
    "common.py": "",
    "on_path/shared.py": "",
    "named/optimizer.py": "import json\n",
}
CONFIG = {"name": "a", "model": {"name": "net.py:Net"}, "optimizer": {"name": "named.optimizer:o"}}
"""The config of a run whose code is `CODE`."""


@pytest.fixture
def code(tmp_path, monkeypatch):
    """Write `CODE` for a config in the folder `mine`, and work in the folder above."""
    for name, text in CODE.items():
        file = tmp_path / "code" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.chdir(tmp_path / "code")
    monkeypatch.syspath_prepend(tmp_path / "code" / "on_path")
    monkeypatch.setattr(_user_code, "_config_folders", [str(tmp_path / "code" / "mine")])
    return tmp_path / "code" / "mine"


def opened(folder, config=CONFIG, **given):
    own = own_files(config, **given)
    with open_workdir(folder, "train", config, lambda saved: [], own=own):
        return json.loads((folder / "config.json").read_text())


def test_what_the_code_imports_is_found_and_nothing_else(code, tmp_path, monkeypatch):
    found = _sources.read_sources(CONFIG)
    inside = {f"mine/{name}" for name in ("net.py", "helper.py", "lazy.py")}
    inside |= {f"mine/pkg/{name}.py" for name in ("__init__", "layers", "more")}
    names = {name.removeprefix("mine/") for name in inside} | {
        "../common.py",
        "named/optimizer.py",
        "shared.py",
    }
    assert found.files.keys() == names
    assert found.files["lazy.py"] == CODE["mine/lazy.py"].encode()
    assert found.packages >= {"numpy"}
    assert _sources.versions_of({"numpy"}) == {"numpy": np.__version__}

    # The names are the same wherever the folder is, and from whichever one lbopt is run.
    elsewhere = tmp_path / "moved"
    code.parent.rename(elsewhere)
    monkeypatch.syspath_prepend(elsewhere / "on_path")
    monkeypatch.chdir("/")
    _user_code.look_beside([str(elsewhere / "mine"), str(elsewhere)])
    assert _sources.read_sources(CONFIG).files == found.files


@pytest.mark.parametrize(
    ("now", "same"),
    [
        ("# why\n\ndef f(x):\n  'Say.'\n  return x + 1\n", True),
        ("def f(x):\n    return x + 1\ndef get_config(arg): return 3\n", True),
        ("def f(x):\n    return x + 2\n", False),
        ("def f(x):\n    return x +\n", False),
    ],
)
def test_comments_layout_and_the_config_itself_are_no_change(now, same):
    assert _sources.is_same_code(b"def f(x):\n    return x + 1\n", now.encode()) is same


def test_a_changed_file_is_refused_by_name_until_it_is_accepted(code, tmp_path):
    first = opened(tmp_path / "run")
    assert len(first["sources"]) == 9
    (code / "lazy.py").write_text("import common, shared  # for later\n")
    assert opened(tmp_path / "run") == first

    (code / "pkg/more.py").write_text("import equinox\nWIDTH = 9\n")
    (code / "helper.py").unlink()
    before = sorted((tmp_path / "run").iterdir())
    with refused("workdir", str(tmp_path / "run"), "mismatch") as caught:
        opened(tmp_path / "run", accepted="pkg/more.py")
    assert str(caught.value).endswith("--accept=../common.py,helper.py,lazy.py,shared.py")
    with refused("--accept", "more.py", "choice"):
        opened(tmp_path / "run", accepted="more.py")
    assert sorted((tmp_path / "run").iterdir()) == before

    accepted = "helper.py,lazy.py,pkg/more.py,../common.py,shared.py"
    saved = opened(tmp_path / "run", accepted=accepted)
    assert opened(tmp_path / "run") == saved
    assert {**saved, "resumed": None} == {**first, "resumed": None}
    text = _page.environment_text(saved, "lbopt train")
    assert "resumed with ../common.py changed, helper.py changed, lazy.py changed, pkg/" in text
    kept = _identity.kept_sources(tmp_path / "run")
    assert {first["sources"]["pkg/more.py"], saved["resumed"][0]["sources"]["pkg/more.py"]} <= set(
        kept
    )


def test_a_workdir_without_a_record_of_files_is_not_compared(code, tmp_path):
    saved = opened(tmp_path / "run")
    del saved["sources"]
    (tmp_path / "run" / "config.json").write_text(json.dumps(saved))
    (code / "net.py").write_text("")
    assert opened(tmp_path / "run") == saved


def arrays(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, size in files.items():
        (folder / f"{name}.npy").write_bytes(bytes(size))
    return {"name": "a", "data": {"name": "arrays", "path": str(folder)}}


def overwrite(file, at):
    times = file.stat()
    with open(file, "r+b") as stream:
        stream.seek(at)
        stream.write(b"x")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_changed_data_are_refused_and_touched_data_are_not(tmp_path):
    data = tmp_path / "data"
    config = arrays(data, x=3_000_000, y=100)
    saved = opened(tmp_path / "run", config)
    assert saved["data"][str(data)]["bytes"] == 3_000_100

    os.utime(data / "x.npy", (1, 1))
    (data / ".hidden").write_text("")
    assert opened(tmp_path / "run", config) == saved

    overwrite(data / "y.npy", 50)
    with refused("workdir", code="mismatch") as caught:
        opened(tmp_path / "run", config)
    assert str(caught.value).endswith(f"--accept={data}")
    assert "has another y.npy; lbopt diff" in str(caught.value)
    opened(tmp_path / "run", config, accepted=str(data))
    opened(tmp_path / "run", config)

    arrays(data, z=1)
    with refused("workdir", code="mismatch") as caught:
        opened(tmp_path / "run", config)
    assert "z.npy is new" in str(caught.value)


def test_files_that_options_name_are_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("one")
    for folder in ("parts", "sets/mine/v2", "mode"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "vector.npy").write_text("")
    options = {"text": "text.txt", "other": "none.txt", "parts": ["parts"], "sep": "/", "length": 3}
    config = {
        "train": {"data": {"name": "data.py:load", "options": options}},
        "model": {"options": {"table": "vector.npy", "mode": "mode"}},
        "eval": {"data": {"builder": "mine/v2:1.0.0", "data_dir": "sets", "vocab_file": "vocab"}},
    }
    (tmp_path / "vocab").write_text("a")
    (tmp_path / "sets/mine/v2/1.0.0").mkdir()
    before = _data_files.read_data(config, False)
    assert set(before) == {"text.txt", "parts", "vector.npy", "vocab", "sets/mine/v2/1.0.0"}
    (tmp_path / "text.txt").write_text("two")
    assert _data_files.differences(
        before["text.txt"], _data_files.read_data(config, False)["text.txt"]
    )


def test_a_prepared_text_is_named_without_the_folder_of_data_sets(tmp_path, monkeypatch):
    tokens = tmp_path / "sets" / "lbopt_text" / "books" / "tokens.bin"
    tokens.parent.mkdir(parents=True)
    tokens.write_text("one")
    config = {"train": {"data": {"name": "text_lm", "builder": "books", "data_dir": None}}}
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "sets"))
    before = _data_files.read_data(config, False)
    assert set(before) == {"lbopt_text/books"}

    moved = (tmp_path / "sets").rename(tmp_path / "moved")
    monkeypatch.setenv("TFDS_DATA_DIR", str(moved))
    assert _data_files.read_data(config, False) == before
    (moved / "lbopt_text" / "books" / "tokens.bin").write_text("two")
    now = _data_files.read_data(config, False)["lbopt_text/books"]
    assert _data_files.differences(before["lbopt_text/books"], now) == ["has another content"]

    monkeypatch.setenv("TFDS_DATA_DIR", "gs://bucket/sets")  # is not read where a folder is given
    assert _data_files.read_data(config, False) == {}
    config["train"]["data"]["data_dir"] = str(moved)
    assert set(_data_files.read_data(config, False)) == {f"{moved}/lbopt_text/books"}


def test_a_byte_between_the_samples_is_found_on_request(tmp_path):
    config = arrays(tmp_path / "data", x=3_000_000)
    saved = opened(tmp_path / "run", config)
    whole = opened(tmp_path / "run", config, checksum="whole")
    assert whole["resumed"][0]["data"] != saved["data"]
    assert not list(_page.environment_changes(whole))

    overwrite(tmp_path / "data" / "x.npy", 100_000)
    assert opened(tmp_path / "run", config) == whole
    with refused("workdir", code="mismatch"):
        opened(tmp_path / "run", config, checksum="whole")


def test_the_identity_of_large_data_takes_seconds(tmp_path):
    folder = tmp_path / "data"
    for number in range(4):
        (folder / str(number)).mkdir(parents=True)
        for name in range(50):
            (folder / str(number) / f"{name}.png").touch()
    for name in range(10):
        with open(folder / f"large-{name}.npy", "wb") as stream:
            stream.truncate(5 * 2**30)
    (folder / "circle").symlink_to(folder)

    begin = time.process_time()
    found = _data_files.read_data({"data": {"path": str(folder)}}, whole=False)[str(folder)]
    assert time.process_time() - begin < 2
    assert (found["files"], found["bytes"]) == (210, 50 * 2**30)
    assert len(found["samples"]) == 128
