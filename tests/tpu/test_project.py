"""A user's project with a copy of the scripts, made by `lbopt tpu --copy`."""

import pathlib
import shutil
import subprocess

import pytest

from lbopt.cli import main

pytestmark = pytest.mark.process

HERE = pathlib.Path(__file__).parent


@pytest.fixture
def project(tmp_path, cloud):
    """Return a project that has a program and the scripts; the cloud's commands are its own."""
    folder = tmp_path / "project"
    folder.mkdir()
    shutil.copy(HERE / "stand_in.py", folder)
    # What a user has here must not be taken for what lbopt has.
    (folder / "pyproject.toml").write_text("[project]\nname = 'mine'\nversion = '1'\n")
    assert main(["tpu", f"--copy={folder}"]) == 0
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    cloud.checkout = folder
    return folder


def commit(folder):
    subprocess.run(["git", "add", "."], cwd=folder, check=True)
    user = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    subprocess.run(["git", *user, "commit", "-qm", "."], cwd=folder, check=True)


def test_machines_get_the_project_and_install_lbopt_from_the_index(cloud, project):
    commit(project)
    cloud.ready()
    source = cloud.worker(0) / "lbopt/source"
    assert (source / "stand_in.py").read_text() == (project / "stand_in.py").read_text()
    calls = (cloud.root / "pip.txt").read_text().splitlines()
    assert len(calls) == 2
    requirements = f"--requirement {source}/tpu/requirements.txt lbopt[tpu]"
    constraints = f"--constraint {source.parent}/constraints.txt"
    assert any(call.endswith(f"{constraints} {requirements}") for call in calls)

    cloud.set(COMMAND="python stand_in.py $WORKDIR 4")
    assert cloud.tpu("run").returncode == 0
    cloud.until(lambda: len(cloud.metrics()) >= 4)


def test_a_project_is_committed_first(cloud, project):
    done = cloud.tpu("create")
    assert done.returncode == 3
    assert "commit your project's files: git init" in done.stderr
    assert done.stderr.count("\n") == 1

    shutil.rmtree(project / ".git")
    done = cloud.tpu("create", "--dry-run")
    assert "(fatal: not a git repository" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not cloud.calls("gcloud", "compute", "tpus", "queued-resources", "create")


def test_data_in_the_project_belong_into_gitignore(cloud, project):
    commit(project)
    (project / "imagenet").mkdir()
    (project / "imagenet/record").touch()
    done = cloud.tpu("create", "--dry-run")
    assert done.returncode == 2
    assert "not committed (the first: imagenet/), which the machines would not get" in done.stderr
    assert "name data and runs in .gitignore" in done.stderr
    assert done.stderr.count("\n") == 1

    with (project / ".gitignore").open("a") as file:
        file.write("imagenet/\n")
    commit(project)
    assert cloud.tpu("create", "--dry-run").returncode == 0


def test_scripts_without_a_project_have_nothing_to_send(cloud, tmp_path):
    """So they lie in an installed lbopt, which may be inside a repository of the user."""
    installed = tmp_path / "repository/site-packages/lbopt/_shipped"
    shutil.copytree(HERE.parents[1] / "tpu", installed / "tpu")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path / "repository", check=True)
    commit(tmp_path / "repository")
    cloud.checkout = installed
    done = cloud.tpu("create")
    assert done.returncode == 2
    assert "lbopt tpu --copy=FOLDER" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not cloud.calls("gcloud", "compute", "tpus", "queued-resources", "create")
