"""`lbopt tpu`: the scripts that run lbopt on TPU machines."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import signal
from collections.abc import Iterator, Sequence

from lbopt import __version__, _installed, paths
from lbopt._shown import shell_line, show
from lbopt.cli import _columns, _flags
from lbopt.errors import EnvironmentProblem, UserError, require, require_choice

FLAGS = {
    "copy": "folder of your project; gets a folder tpu/ with the scripts, which are yours to change"
}
SCRIPT = "SCRIPT"
"""The script to run, for instance `create`; everything after it goes to the script."""
_ONLY_HERE = ("__pycache__", "env")
"""What no copy gets: bytecode, and the settings of this checkout."""
_IGNORED = """\
# Not for the machines: prepared data, runs, and what Python makes.
tfds/
runs/
.venv/
__pycache__/
"""
"""The `.gitignore` of a project that has none."""


def run(argv: Sequence[str]) -> None:
    """List the scripts, copy them into a project, or become one of them.

    Args:
      argv: Arguments after the command: those in `FLAGS`, or a script and its arguments.

    Raises:
      UserError: If a flag is wrong, if there is no such script, or if it has no settings here.
      EnvironmentProblem: If the scripts cannot be copied, or if there is no bash.
    """
    if argv and not argv[0].startswith("-"):
        _become(argv[0], argv[1:])
    given, _ = _flags.parse("tpu", argv, FLAGS, words=(SCRIPT,))
    show(*(_copy(paths.local(given["copy"], "--copy")) if "copy" in given else _listed()))


def _folder() -> pathlib.Path:
    """Return the folder of the scripts: `tpu/` here, or else that of lbopt."""
    here = pathlib.Path("tpu")
    return here if (here / "common.sh").is_file() else _installed.shipped("tpu")


def _scripts(folder: pathlib.Path) -> dict[str, str]:
    """Return name -> first sentence of each script that a user starts."""
    found = {}
    for file in sorted([*folder.iterdir(), *folder.glob("gke/*")]):
        text = file.read_text() if file.is_file() else ""
        comment = re.match(r"#!.*\n((?:#.*\n)+)", text)
        name = file.relative_to(folder).as_posix()
        about = comment and re.match(rf"tpu/{name}: (.+?)[.:;] ", _unwrapped(comment[1]))
        if about:
            found[name] = about[1]
    return found


def _unwrapped(comment: str) -> str:
    return " ".join(line.lstrip("# ") for line in comment.splitlines()) + " "


def _listed() -> Iterator[str]:
    """Yield what there is, and where."""
    folder = _folder()
    yield "usage: lbopt tpu SCRIPT [--flag ...]     (lbopt tpu SCRIPT --help says more)"
    yield ""
    scripts = _scripts(folder)
    width = max(map(len, scripts)) + 2
    for name, about in scripts.items():
        yield from _columns.wrapped(f"  {name:<{width}}{about}", hanging=width + 2)
    yield ""
    yield f"scripts: {folder}, README.md and accelerators.tsv beside them"
    if folder.is_absolute():
        yield "lbopt tpu --copy=. puts them into tpu/ here, to fill in tpu/env and to change them"


def _become(name: str, argv: Sequence[str]) -> None:
    """Replace this process by a script, which then gets the signals of the terminal."""
    folder = _folder()
    require_choice(SCRIPT, name, _scripts(folder))
    if folder.is_absolute() and not any(_tells(word) for word in argv):
        fix = "there is no tpu/ here, which has the settings; lbopt tpu --copy=. makes it"
        raise UserError(SCRIPT, name, f"{fix} (or give --env=FILE)", code="missing")
    bash = shutil.which("bash")
    if bash is None:
        raise EnvironmentProblem("bash", reason="it is not on PATH; install it", code="missing")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and bash would too
    os.execv(bash, [bash, str(folder / name), *argv])


def _tells(word: str) -> bool:
    """Return whether an argument names the settings, or asks for none."""
    return word in ("--help", "-h") or word.startswith("--env=")


# ---- copies


def _copy(project: pathlib.Path) -> Iterator[str]:
    """Copy the scripts into a project, and yield what to do next."""
    folder = project / "tpu"
    fix = "it is there already; remove it, or give another folder"
    require(not folder.exists(), "--copy", str(folder), fix, code="exists")
    try:
        _write(folder)
        ignoring = _ignore(project / ".gitignore")
    except OSError as error:
        fix = f"it cannot be written ({error.strerror}); give another folder"
        raise EnvironmentProblem("--copy", str(folder), fix, code="resource") from error

    yield str(folder)
    yield ""
    text = (
        f"The machines install lbopt=={__version__} from the package index, as "
        "tpu/requirements.txt says; add the packages of your code to it. They get the committed "
        f"files of your project. {ignoring}"
    )
    yield from _columns.wrapped(text)
    yield ""
    if project != pathlib.Path():
        yield shell_line(["cd", str(project)])
    yield "cp tpu/env.example tpu/env"
    yield "lbopt tpu create --help"


def _write(folder: pathlib.Path) -> None:
    """Write a copy of the scripts that needs no checkout of lbopt."""
    source = _installed.shipped("tpu")
    constraints = _installed.shipped("scripts/constraints.txt")
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(*_ONLY_HERE))
    os.replace(folder / "gke/Dockerfile.project", folder / "gke/Dockerfile")
    shutil.copyfile(constraints, folder / "constraints.txt")
    (folder / "requirements.txt").write_text(f"lbopt=={__version__}\n")


def _ignore(file: pathlib.Path) -> str:
    """Keep data and runs out of a project's commits, and return what to tell the user.

    An existing `.gitignore` is the user's own and is not changed.
    """
    try:
        with file.open("x") as opened:
            opened.write(_IGNORED)
    except FileExistsError:
        return "Name prepared data and runs in your .gitignore, so that git does not commit them."
    return "The new .gitignore keeps prepared data (tfds/) and runs (runs/) out of the commits."
