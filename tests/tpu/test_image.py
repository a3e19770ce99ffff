"""The image's install steps, read from the Dockerfile, work in a plain environment.

No container engine is needed. The test is slow: half a minute with pip's cache, and longer without,
since it downloads libtpu (200 MB).
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

ROOT = pathlib.Path(__file__).parents[2]
DOCKERFILE = ROOT / "tpu" / "gke" / "Dockerfile"


@pytest.mark.slow
def test_install_steps(tmp_path):
    image = tmp_path / "image"
    image.mkdir()
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)

    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV", "EXTRAS")
    }
    environment["PATH"] = f"{tmp_path / 'venv/bin'}:{os.environ['PATH']}"
    environment["PIP_COMPILE"] = "0"  # to bytecode, for a second time that never comes

    copied = run = 0
    for word, rest in _instructions():
        if word == "ARG":
            environment.setdefault(*rest.split("=", 1))
        elif word == "COPY":
            *sources, target = rest.split()
            for source in sources:
                _copy(ROOT / source, image / target)
            copied += 1
        elif word == "RUN":
            # The container engine creates users; a test must not.
            steps = [step for step in rest.split(" && ") if not step.startswith("useradd ")]
            subprocess.run(
                ["bash", "-o", "pipefail", "-ec", " && ".join(steps)],
                cwd=image,
                env=environment,
                check=True,
            )
            run += 1

    assert (copied, run) == (4, 2)
    # The entry point runs lbopt from the folder of COPY, at the pinned versions.
    environment |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    done = subprocess.run(
        [image / "tpu/gke/entrypoint", "lbopt", "recipes"],
        cwd=image,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "resnet50_lamb" in done.stdout

    where = subprocess.run(
        ["python", "-c", "import lbopt, libtpu; print(lbopt.__file__)"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert pathlib.Path(where.stdout.strip()).is_relative_to(image), where

    constraints = (ROOT / "scripts/constraints.txt").read_text()
    freeze = subprocess.run(
        ["python", "-m", "pip", "freeze", "--exclude-editable"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    pinned = set(re.findall(r"^[\w.-]+==[^\s;]+", constraints.lower().replace("_", "-"), re.M))
    loose = [
        line
        for line in freeze.lower().replace("_", "-").split()
        if "==" in line and line not in pinned and not line.startswith("libtpu==")
    ]
    assert not loose, "scripts/constraints.txt has no line for these"


def _instructions():
    """Return the Dockerfile's instructions as (word, rest)."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.M).replace("\\\n", " ")
    return [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]


def _copy(source, target):
    """Copy as COPY does, into a folder or a folder's content, except what .dockerignore lists."""
    ignored = [
        line
        for line in pathlib.Path(f"{DOCKERFILE}.dockerignore").read_text().splitlines()
        if not line.startswith("#")
    ]
    if source.is_dir():
        ignore = shutil.ignore_patterns(*(line.removeprefix("**/") for line in ignored))
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=ignore)
    else:
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
