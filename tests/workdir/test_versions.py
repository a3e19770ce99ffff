"""A workdir remembers every environment that worked in it."""

import json
import os

from lbopt.report import _page
from lbopt.workdir import _versions, open_workdir


def opened(folder, num_devices=1):
    with open_workdir(folder, "train", {"name": "a"}, lambda saved: [], num_devices, "lbopt train"):
        return (folder / "config.json").read_text()


def test_a_restart_under_the_same_environment_changes_nothing(tmp_path):
    assert opened(tmp_path) == opened(tmp_path)


def test_a_restart_under_another_environment_is_kept_once_and_reported(tmp_path, monkeypatch):
    first = json.loads(opened(tmp_path))
    other = _versions.describe_environment(1)
    other["versions"] = {**other["versions"], "jax": "9.9"}
    monkeypatch.setattr(
        _versions, "describe_environment", lambda num_devices: {**other, "num_devices": num_devices}
    )

    opened(tmp_path)
    opened(tmp_path)
    saved = json.loads(opened(tmp_path, num_devices=4))
    resumed = saved.pop("resumed")

    assert saved == first
    assert [(now["versions"]["jax"], now["num_devices"]) for now in resumed] == [
        ("9.9", 1),
        ("9.9", 4),
    ]
    cores = f"1 x cpu; host: {os.cpu_count()} cores"
    text = _page.environment_text(first, "lbopt train")
    assert any(line.startswith(cores) for line in text.splitlines())
    assert _page.environment_text({**saved, "resumed": resumed}, "lbopt train").splitlines()[
        -2:
    ] == [
        f"resumed with jax {first['versions']['jax']} -> 9.9",
        "resumed with num_devices 1 -> 4",
    ]

    monkeypatch.undo()
    back = json.loads(opened(tmp_path))
    assert back["resumed"][-1] == _versions.describe_environment(1)
