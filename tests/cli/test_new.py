"""`lbopt new`: the project that it writes runs as it stands."""

import runpy

from lbopt.cli import load_config, main
from lbopt.config import SweepConfig
from lbopt.sweep import make_cells, make_problems


def test_the_project_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "mine/spirals"]) == 0
    monkeypatch.chdir(tmp_path / "mine/spirals")
    words = ["--config=config.py", "--workdir=runs/one"]
    assert main(["train", *words, "--config.num_epochs=4"]) == 0
    assert main(["evaluate", *words, "--config.num_epochs=4"]) == 0
    runpy.run_path("test_project.py")["test_the_run_learns"]()

    study = load_config("study.py", [], SweepConfig)
    study.validate()
    assert len(make_cells(study, make_problems(study))) == 6


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "kept.txt").write_text("mine")
    for folder, name in ((tmp_path, tmp_path), (tmp_path / "kept.txt",) * 2):
        assert main(["new", str(folder)]) == 2
        assert str(name) in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept.txt"]
