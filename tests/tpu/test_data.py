"""The data of a run: mounted on every worker, handed to the command, checked before it starts."""

import re
import shlex
import subprocess
import tomllib

import pytest

from lbopt.cli import load_config
from lbopt.config import TrainConfig

pytestmark = pytest.mark.process


def with_data(cloud, data_dir):
    command = "python stand_in.py $WORKDIR 5 --data=$DATA_DIR"
    cloud.set(ACCELERATOR="v4-8", DATA_DIR=data_dir, COMMAND=command)
    return cloud


def seen(cloud):
    """Run the stand-in, and return the data folder that it was given twice."""
    assert cloud.tpu("run").returncode == 0
    cloud.until(lambda: cloud.said(0).startswith("done"))
    return (cloud.workdir / "data").read_text().split()


def test_a_bucket_is_mounted(cloud):
    folder = cloud.root / "buckets/data/tfds/digits"
    folder.mkdir(parents=True)
    (folder / "one").write_text("1")
    with_data(cloud, "gs://data/tfds").ready()
    done = cloud.tpu("preflight")
    assert done.returncode == 0, done
    place = cloud.worker(0) / "lbopt/mnt"
    assert (place / "digits/one").read_text() == "1"
    assert seen(cloud) == [str(place), str(place)]


def test_a_disk_is_attached_and_mounted(cloud, tmp_path):
    disk = tmp_path / "disk"
    (disk / "tfds").mkdir(parents=True)
    (disk / "tfds/one").write_text("1")
    cloud.environment["DATA_DISK"] = str(disk)
    with_data(cloud, "disk:imagenet/tfds").ready()
    (call,) = cloud.calls("gcloud", "compute", "tpus", "queued-resources", "create")
    source = "source=projects/my-project/zones/us-central2-b/disks/imagenet,mode=read-only"
    assert f"--data-disk={source}" in call
    place = str(cloud.worker(0) / "lbopt/mnt/tfds")
    assert seen(cloud) == [place, place]


def test_a_folder_without_data_is_named(cloud, tmp_path):
    (tmp_path / "empty").mkdir()
    with_data(cloud, str(tmp_path / "empty"))
    assert cloud.tpu("create").returncode == 0
    done = cloud.tpu("setup")
    assert done.returncode == 3
    assert "there is nothing in it" in done.stderr
    done = cloud.tpu("preflight")
    assert done.returncode == 3
    assert "is not mounted; tpu/setup" in done.stderr


@pytest.mark.parametrize("value", ["s3://data", "disk:", "gs://", "relative/folder", "/a b"])
def test_an_address_that_is_none(cloud, value):
    cloud.set(DATA_DIR=value)
    done = cloud.tpu("create")
    assert done.returncode == 2
    assert f"DATA_DIR='{value}'" in done.stderr
    assert cloud.calls("gcloud") == []


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("lbopt train --config=good.py --workdir=$WORKDIR", 0, "config ok"),
        ("A=1 python -m lbopt train --config bad.py --workdir=$WORKDIR", 2, "batch"),
        ('A="b c" venv/bin/python3.11 -m lbopt train --config=bad.py', 2, "batch"),
        ("venv/bin/lbopt train --config=bad.py", 2, "batch"),
        ("lbopt train --config=missing.py --workdir=$WORKDIR", 3, "data"),
        ("python stand_in.py $WORKDIR 5", 0, "config not checked"),
    ],
)
def test_the_preflight_checks_the_config(cloud, command, code, said):
    """The stand-in for lbopt answers by the name of the config; it never trains."""
    cloud.set(ACCELERATOR="v4-8", COMMAND=command)
    cloud.ready()
    done = cloud.tpu("preflight")
    assert done.returncode == code, f"{done}\n{cloud.everything()}"
    assert said in done.stdout + done.stderr
    assert not cloud.workdir.exists()


@pytest.mark.parametrize("command", ["   ", "sleep 5", "echo hello", "lbopt train 'x", "make run"])
def test_a_command_that_is_none(cloud, command):
    cloud.set(COMMAND=command)
    done = cloud.tpu("create")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "COMMAND=" in done.stderr
    assert cloud.calls("gcloud") == []


def test_the_example_installs_what_its_recipe_needs(checkout):
    """Photographs in a TFDS data set, in a bucket, on TPUs."""
    text = (checkout / "tpu/env.example").read_text()
    lines = re.findall(r"^[A-Z].*", text, re.MULTILINE)
    values = dict(shlex.split(line, comments=True)[0].partition("=")[::2] for line in lines)
    (flag,) = re.findall(r"--config=(\S+)", values["COMMAND"])
    config = load_config(flag, [], TrainConfig)
    assert (config.data.name, config.data.builder) == ("images", "imagenet2012")
    assert values["DATA_DIR"].startswith("gs://")

    extras = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    extras = extras["optional-dependencies"]
    installed = values["EXTRAS"].split(",")
    for extra in installed:  # grows
        installed += re.findall(r"lbopt\[(\w+)\]", " ".join(extras[extra]))
    assert {"tpu", "gcs", "tfds", "images"} <= {*installed}
    shell = "source tpu/settings.sh; echo ${DEFAULTS[EXTRAS]}"
    done = subprocess.run(["bash", "-c", shell], cwd=checkout, capture_output=True, text=True)
    assert done.stdout == "tpu,gcs,data\n"
