"""Cleaning of text: characters, white space, marks that stand alone, and Wikipedia's markup."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from lbopt.errors import MissingPackage

_DOUBLED = re.compile(r"([;?!]|(?<=\w)\.) (?:\1)(?= |$)")
_BEFORE = re.compile(r" ([,.;:?!)\]}]|''|'(?= |$))")
_AFTER = re.compile(r"([(\[{]|``|(?<= )`|^`) ")
_INVISIBLE = ("Cc", "Cf", "Co", "Cs")
"""Unicode categories of characters that are not text. Unassigned ones are none of them: a later
version of Unicode, and so of Python, may assign them."""
_JOINERS = "\u200c\u200d"
"""Format characters that belong to the spelling of words: zero-width non-joiner and joiner."""
_EMPTY_BRACKETS = re.compile(r"\s*\((?:[\s,;:/]|or|and|from)*\)")
_BEFORE_MARK = re.compile(r"\s+(?=[,.;:])")
_LEFT_OVER = re.compile(r"^\s*[|!]|\|\||\|\}|\{\||\{\{|\}\}|\[\[|\]\]|''|</?\w|__[A-Z]+__")
"""Markup in a line where an article does not close what it opens, a table for instance."""
_NO_TEXT_LINK = re.compile(r"\s*(file|image|media|category|[a-z]{2,3})\s*:", re.IGNORECASE)
"""Beginning of a link to a picture, a category or another language."""
_NO_TEXT = frozenset(
    ("ref", "table", "gallery", "math", "timeline", "imagemap", "score", "syntaxhighlight")
)
"""Tags of Wikipedia whose content is no running text."""
_LAST_SECTIONS = frozenset(
    (
        "see also",
        "notes",
        "footnotes",
        "references",
        "notes and references",
        "references and notes",
        "sources",
        "citations",
        "bibliography",
        "further reading",
        "external links",
    )
)


def clean_lines(text: str) -> list[str]:
    """Return the lines of a text that have one, with single spaces.

    Characters are composed (Unicode's NFC). Control characters, characters for private use and lone
    surrogates are removed, and so are format characters except U+200C and U+200D, which belong to
    the spelling of words in Persian or Hindi, for instance.

    >>> clean_lines("Cafe\\u0301\\u00a0 no\\u00adir \\x02\\n\\n  Tea")
    ['Café noir', 'Tea']
    """
    lines = (_visible(line).split() for line in unicodedata.normalize("NFC", text).splitlines())
    return [" ".join(words) for words in lines if words]


def _visible(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(
        character
        for character in line
        if character.isspace()
        or character in _JOINERS
        or unicodedata.category(character) not in _INVISIBLE
    )


def joined_marks(words: Sequence[str]) -> str:
    """Return words and punctuation marks as text.

    Quotation marks are `` and ''. In the Brown corpus the marks ";", "?" and "!" stand twice, and a
    full stop follows the one of an abbreviation.

    >>> joined_marks("`` Why ? ? '' asked ( it is Tom's ) Bo Jr. .".split())
    '"Why?" asked (it is Tom\\'s) Bo Jr.'
    """
    text = _DOUBLED.sub(r"\1", " ".join(words))
    text = _AFTER.sub(r"\1", _BEFORE.sub(r"\1", text))
    return text.replace("``", '"').replace("''", '"').replace("`", "'")


def plain_article(markup: str) -> str:
    """Return the text of an article of Wikipedia, up to its last sections.

    Templates, tables, notes, pictures, categories and formulas are left out, and so are brackets
    that have no content without them. Links leave their text. A line whose markup is malformed is
    left out.

    Args:
      markup: Wikitext.

    Raises:
      EnvironmentProblem: If the package `mwparserfromhell` is not installed.

    >>> plain_article("'''Tea''' ({{zh}}) is a [[Drink|drink]].<ref>X</ref>\\n== Notes ==\\nY")
    'Tea is a drink.'
    """
    try:
        import mwparserfromhell
    except ImportError as error:
        fix = "it reads Wikipedia's markup, and is not installed: pip install 'lbopt[text]'"
        raise MissingPackage("mwparserfromhell", reason=fix) from error
    code = mwparserfromhell.parse(_body(markup))
    # Emptied, not removed, for which the library would search the whole article each time.
    for tag in code.filter_tags(matches=lambda tag: str(tag.tag).lower() in _NO_TEXT):
        tag.contents = ""
    for link in code.filter_wikilinks(matches=_is_no_text):
        link.title = link.text = ""
    text = str(code.strip_code(normalize=True, collapse=True))
    lines = (line.lstrip("*#:; ") for line in text.split("\n") if not _LEFT_OVER.search(line))
    return "\n".join(_BEFORE_MARK.sub("", _EMPTY_BRACKETS.sub("", line)) for line in lines)


def _body(markup: str) -> str:
    """Return an article up to the first of its last sections."""
    for heading in re.finditer(r"^==([^=].*?)==\s*$", markup, re.MULTILINE):
        if heading[1].strip().casefold() in _LAST_SECTIONS:
            return markup[: heading.start()]
    return markup


def _is_no_text(link: Any) -> bool:
    """Return whether a link is a picture, a category or one to another language."""
    return _NO_TEXT_LINK.match(str(link.title)) is not None
