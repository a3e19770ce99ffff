"""The workdir of a run from Python: the caller's, or a temporary one."""

from __future__ import annotations

import contextlib
import html
import pathlib
import shutil
import tempfile
import weakref
from collections.abc import Iterator

from lbopt import paths
from lbopt.errors import require
from lbopt.job import SoloJob
from lbopt.workdir import local_workdir, write_text


class Folder:
    """A folder that is kept as long as this object, or for good if the caller named it.

    Args:
      workdir: The caller's folder; None for a temporary one.
    """

    def __init__(self, workdir: paths.GivenPath | None):
        if workdir is None:
            self.name = tempfile.mkdtemp(prefix="lbopt-")
            weakref.finalize(self, shutil.rmtree, self.name, ignore_errors=True)
        else:
            self.name = paths.local_or_bucket(workdir, "workdir")

    @contextlib.contextmanager
    def opened(self) -> Iterator[str]:
        """Yield the folder on this machine, while a run writes into it."""
        with local_workdir(self.name, SoloJob()) as folder:
            yield folder


def write_page(page: str, path: paths.GivenPath) -> pathlib.Path:
    """Write a page to a file, or to report.html in a folder, and return the file."""
    file = paths.local(path, "path")
    file = file / "report.html" if file.is_dir() else file
    fix = "its folder does not exist; make it, or give another path"
    require(file.parent.is_dir(), "path", str(path), fix, code="missing")
    write_text(file, page)
    return file


def framed(page: str) -> str:
    """Return HTML that shows a page, with its figures, in a cell of a notebook."""
    content = html.escape(page)
    style = "width: 100%; height: 40rem; border: 1px solid #ddd"
    return f'<iframe srcdoc="{content}" style="{style}"></iframe>'
