"""The wheel is whole: its files, its page on a package index, and what its user can do."""

import ast
import email
import json
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lbopt

pytestmark = pytest.mark.process

ROOT = pathlib.Path(__file__).parents[1]
SETUP = runpy.run_path(str(ROOT / "setup.py"))
NOT_IN_A_CHECKOUT = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", "build", "env")
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, "build_" + sys.argv[1])(sys.argv[2]))
"""
COMES_WITH = {"etils": "orbax", "fsspec": "gcsfs"}
"""Modules of packages that others need: the paths of Orbax, the file systems of gcsfs."""
TAG = f"v{lbopt.__version__}"
IMAGES = f"https://raw.githubusercontent.com/lbopt/lbopt/{TAG}"
PAGES = f"https://github.com/lbopt/lbopt/blob/{TAG}"


def build(kind, source, folder):
    """Build a wheel or an sdist of a source tree; return its file."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, kind, folder],
        cwd=source,
        check=True,
        capture_output=True,
        text=True,
    )
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Return a wheel, built from an sdist, built from a source tree without git."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("lbopt", "configs", "tpu", "scripts"):
        shutil.copytree(ROOT / name, source / name, ignore=NOT_IN_A_CHECKOUT)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "CITATION.cff"):
        shutil.copy(ROOT / name, source)
    (source / "tpu/env").write_text("PROJECT=private\n")

    sdist = build("sdist", source, folder)
    shutil.unpack_archive(sdist, folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return build("wheel", unpacked, folder)


def files_below(folder, pattern="*"):
    """Return the paths of a checkout's files; what else may lie there is left out."""
    files = [file for file in (ROOT / folder).rglob(pattern) if file.is_file()]
    paths = [file.relative_to(ROOT) for file in files]
    return {path.as_posix() for path in paths if not NOT_IN_A_CHECKOUT("", path.parts)}


def test_the_files_of_the_wheel(wheel):
    """They come through an sdist, and keep their modes."""
    with zipfile.ZipFile(wheel) as archive:
        modes = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
    info = f"lbopt-{lbopt.__version__}.dist-info"
    recorded = {name for name in modes if name.startswith(info)}
    assert f"{info}/licenses/LICENSE" in recorded

    shipped = {*files_below("configs", "*.py"), *files_below("tpu")}
    shipped |= {"CITATION.cff", "scripts/constraints.txt"}
    package = {*files_below("lbopt", "*.py"), *files_below("lbopt", "*.pyi")}
    package |= {"lbopt/CHANGELOG.md", "lbopt/py.typed"}
    assert modes.keys() - recorded == package | {f"lbopt/_shipped/{name}" for name in shipped}

    scripts = {name for name in shipped if os.access(ROOT / name, os.X_OK)}
    assert len(scripts) > 10
    assert {name for name in shipped if modes[f"lbopt/_shipped/{name}"] & 0o111} == scripts


def test_the_page_on_a_package_index(wheel):
    """A relative link would lead nowhere there."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))

    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert len(metadata.get_all("Project-URL")) == 4

    page = re.sub(r"```.*?```|`[^`\n]+`", "", metadata.get_payload(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)|(?:src|href)=\"([^\"]+)", page)
    links = [markdown or html for markdown, html in links]
    assert links
    assert [link for link in links if not re.match("https?://|#", link)] == []
    for link in links:
        for start in (IMAGES, PAGES):
            if link.startswith(f"{start}/"):
                path = link.removeprefix(f"{start}/").partition("#")[0]
                assert (ROOT / path).exists(), link


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("![A [b]](configs/a.png)", f"![A [b]]({IMAGES}/configs/a.png)"),
        ("[![A](./a.svg)](docs/b.md#c)", f"[![A]({IMAGES}/a.svg)]({PAGES}/docs/b.md#c)"),
        ('<img alt="a" src="a/b.PNG">', f'<img alt="a" src="{IMAGES}/a/b.PNG">'),
        ('<a href="LICENSE.md">', f'<a href="{PAGES}/LICENSE.md">'),
        ('[a](examples/ "title")', f'[a]({PAGES}/examples/ "title")'),
        ("[a]: docs/a.md", f"[a]: {PAGES}/docs/a.md"),
        ("[`lbopt`](tpu/README.md)", f"[`lbopt`]({PAGES}/tpu/README.md)"),
        *(
            (same, same)
            for same in (
                "[a](https://example.org/a.png) [b](mailto:a@b.c) [c](#design)",
                "```python\nx = tree[0](a.b)\n```",
                "write `[a](b.md)`",
                "x[0](y)",
            )
        ),
    ],
)
def test_links_become_addresses(text, expected):
    assert SETUP["absolute_links"](text, lbopt.__version__) == expected


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0"
    assert cited["version"] == lbopt.__version__ == SETUP["version"]()
    assert cited["license"] == "Apache-2.0"
    assert cited["authors"] == [{"name": "The lbopt authors"}]
    assert {"message", "title", "type"} <= cited.keys()


def test_every_import_is_of_a_package_that_is_asked_for():
    """Tests run with all packages, and would not see that one is missing in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    for_work_on_lbopt = ("bench", "dev", "docs", "test")
    asked = {
        canonicalize_name(Requirement(line).name)
        for extra in extras.keys() - set(for_work_on_lbopt)
        for line in extras[extra]
    }

    homes = packages_distributions()
    missing = set()
    for file in (ROOT / "lbopt").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            for name in {name.partition(".")[0] for name in names}:
                found = homes.get(COMES_WITH.get(name, name), [name])
                packages = {canonicalize_name(home) for home in found}
                if name not in sys.stdlib_module_names and not packages & asked:
                    missing.add((name, str(file.relative_to(ROOT))))
    assert missing == set()


# ---- installed


class Installed:
    """The wheel in an environment of its own, used in an empty folder."""

    def __init__(self, wheel, folder):
        """Install the wheel and the packages that it names, from the package index."""
        self.folder = folder / "empty"
        self.folder.mkdir()
        venv = folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        self.python = venv / "bin/python"
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet"]
        versions = ["--no-compile", "--constraint", ROOT / "scripts/constraints.txt"]
        subprocess.run([*pip, *versions, f"{wheel}[demo]"], check=True)

        self.environment = {
            name: value for name, value in os.environ.items() if name != "PYTHONPATH"
        }
        self.environment["PATH"] = f"{venv / 'bin'}:{os.environ['PATH']}"

    def run(self, *command):
        """Run a command in the empty folder."""
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=1800,  # mypy reads all of jax and flax
        )

    def lbopt(self, *arguments):
        """Run `lbopt`, which must succeed; return its output."""
        done = self.run("lbopt", *arguments)
        assert done.returncode == 0, done
        return done.stdout


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Return the installed wheel."""
    return Installed(wheel, tmp_path_factory.mktemp("installed"))


@pytest.mark.slow
def test_a_user_of_the_wheel(installed):
    where = installed.run("python", "-c", "import lbopt; print(lbopt.__file__, lbopt.lamb)")
    assert where.stdout.startswith(str(installed.python.parents[1])), where
    assert installed.lbopt("--version") == f"lbopt {lbopt.__version__}\n"

    recipes = json.loads(installed.lbopt("recipes", "--json"))
    named = {recipe["config"] for recipe in recipes}
    assert {"digits_cnn:lamb-1024", "sweeps/digits_limit:smoke", "sweeps/digits_limit"} <= named
    assert len(named) == len(recipes) > 100
    assert "ok    devices" in installed.lbopt("doctor")

    training = ("train", "--config=digits_cnn:smoke", "--workdir=run")
    assert '"step": 16' in installed.lbopt(*training)
    assert "\nnothing differs" in "\n" + installed.lbopt("diff", "run")
    assert '"step": 16' in installed.lbopt(*training)  # resumes a run that is done
    installed.lbopt("report", "--workdir=run")
    assert (installed.folder / "run/report.html").exists()

    saved = json.loads((installed.folder / "run/config.json").read_text())
    assert (saved["git_revision"], saved["code_revision"]) == (None, None)
    assert saved["versions"]["lbopt"] == lbopt.__version__


@pytest.mark.slow
def test_a_study_of_the_wheel(installed):
    study = ("--config=digits_limit:smoke", "--workdir=study", "--config.final_seeds=(100,)")
    assert "report.html" in installed.lbopt("sweep", *study)
    assert (installed.folder / "study/results.jsonl").exists()
    assert installed.lbopt("diff", "study") == "nothing differs\n"


@pytest.mark.slow
def test_tpu_scripts_of_the_wheel(installed):
    assert "\n  create " in installed.lbopt("tpu")
    assert installed.lbopt("tpu", "create", "--help").startswith("tpu/create: ")
    installed.lbopt("tpu", "--copy=project")
    copied = installed.folder / "project/tpu"
    assert installed.run(copied / "create", "--help").stdout.startswith("tpu/create: ")
    assert (copied / "requirements.txt").read_text() == f"lbopt=={lbopt.__version__}\n"


MYPY = """
[mypy]
[mypy-optax.*]
follow_untyped_imports = True
"""
"""Settings of a user: Optax has no `py.typed`."""


@pytest.mark.slow
def test_types_reach_a_users_file(installed):
    (installed.folder / "mypy.ini").write_text(MYPY)
    (installed.folder / "user.py").write_text(
        "import lbopt\n"
        "reveal_type(lbopt.lamb(0.1))\n"
        "lbopt.lamb(0.1, weight_dekay=1.0)\n"
        "lbopt.scale_learning_rate('a', 1, 2)\n"
    )
    python = f"--python-executable={installed.python}"
    done = installed.run(sys.executable, "-m", "mypy", python, "user.py")
    assert re.search(r"user\.py:2: .* \"tuple\[.*\boptax\..*GradientTransformation", done.stdout), (
        done
    )
    assert re.search(r"user\.py:3: error: .*\"weight_dekay\"", done.stdout), done
    assert re.search(r"user\.py:4: error: .*\"str\"", done.stdout), done
    assert "Found 2 errors" in done.stdout
