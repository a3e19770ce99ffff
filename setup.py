"""What the wheel has beside the modules of `lbopt`, and the project's page on a package index.

`pyproject.toml` has everything else.
"""

import pathlib
import re
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py

HOME = "https://github.com/lbopt/lbopt"
RAW = "https://raw.githubusercontent.com/lbopt/lbopt"
SHIPPED = ("CITATION.cff", "configs/**/*.py", "scripts/constraints.txt", "tpu/**/*")
"""Files that the wheel has in `lbopt/_shipped/`; `lbopt._installed.shipped` finds them there."""
_NOT_SHIPPED = re.compile(r"(?!env\.example$)(env.*|.*\.pyc)")
"""Names of files that are not the project's: settings of the user, and bytecode."""


def shipped_files() -> list[pathlib.Path]:
    """Return the files for `lbopt/_shipped/`, as paths from the checkout's folder."""
    found = {file for pattern in SHIPPED for file in pathlib.Path().glob(pattern)}
    return sorted(
        file for file in found if file.is_file() and not _NOT_SHIPPED.fullmatch(file.name)
    )


class BuildPackage(build_py):
    """Adds the shipped files, except to an editable install, which finds them in the checkout."""

    def run(self):
        """Copy the modules and the shipped files, with their modes."""
        super().run()
        if self.editable_mode:
            return

        # An earlier build in the same folder may have left files that are gone.
        shutil.rmtree(self._folder(), ignore_errors=True)
        for file, target in self._copies().items():
            self.mkpath(str(pathlib.Path(target).parent))
            self.copy_file(file, target)

    def get_outputs(self, include_bytecode=True):
        """Return the files of the build."""
        return [*super().get_outputs(include_bytecode), *self._copies().values()]

    def get_source_files(self):
        """Return the files that the source distribution needs."""
        return [*super().get_source_files(), *self._copies()]

    def _copies(self):
        return {str(file): str(self._folder() / file) for file in shipped_files()}

    def _folder(self):
        return pathlib.Path(self.build_lib, "lbopt", "_shipped")


_LINK = re.compile(
    r"(?P<code>^(?P<fence>```+|~~~+)(?s:.*?)^(?P=fence)|`[^`\n]+`)"
    r"|(?P<before>\]\(<?|^\[[^\]\n]+\]:[ ]*<?|\b(?:src|href|srcset)=\")"
    r"(?:\./)?(?P<path>(?![a-z][a-z+.-]*:|[/#.])[^)\s>\"]*[./][^)\s>\"]*)",
    re.MULTILINE,
)
"""A piece of code, or a link of Markdown or HTML to a path of the repository."""
_IMAGE = re.compile(r".*\.(png|svg|jpe?g|gif|webp)", re.IGNORECASE)


def absolute_links(text: str, version: str) -> str:
    """Return Markdown whose links to files of the repository are addresses.

    A package index shows the README without the files beside it.

    Args:
      text: The Markdown.
      version: Version whose tag `v<version>` has the files.
    """

    def absolute(found: re.Match[str]) -> str:
        if found["code"]:
            return found[0]
        path = found["path"]
        start = f"{RAW}/v{version}" if _IMAGE.fullmatch(path) else f"{HOME}/blob/v{version}"
        return f"{found['before']}{start}/{path}"

    return _LINK.sub(absolute, text)


def version() -> str:
    """Return `lbopt.__version__`, without importing the package and what it needs."""
    (found,) = re.findall(r'^__version__ = "(.+)"$', _text("lbopt/__init__.py"), re.MULTILINE)
    return found


def _text(file: str) -> str:
    return pathlib.Path(file).read_text(encoding="utf-8")


if __name__ == "__main__":
    setup(
        cmdclass={"build_py": BuildPackage},
        long_description=absolute_links(_text("README.md"), version()),
        long_description_content_type="text/markdown",
    )
