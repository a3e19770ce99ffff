"""Check a built site: links and anchors lead somewhere, pictures have texts, nothing is fetched.

python -m _site.links FOLDER
"""

import html.parser
import pathlib
import sys
import urllib.parse

_FETCHED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src"}
_NOT_FETCHED = {"canonical", "search", "index", "next", "prev", "author"}


class Page(html.parser.HTMLParser):
    """Anchors, links and faults of a page.

    Args:
      text: The page as HTML.
    """

    def __init__(self, text):
        super().__init__()
        self.anchors = set()
        self.links = []
        self.faults = []
        self.feed(text)

    def has(self, fragment):
        """Return whether a link to this place of the page leads somewhere."""
        return not fragment or urllib.parse.unquote(fragment) in self.anchors

    def handle_starttag(self, tag, attributes):
        """Note what a tag says."""
        given = dict(attributes)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag == "img" and not given.get("alt"):
            self.faults.append(f"an image without a text: {given.get('src', '')[:80]}")
        fetched = given.get(_FETCHED.get(tag, ""), "") or ""
        if fetched.startswith(("http:", "https:", "//")) and given.get("rel") not in _NOT_FETCHED:
            self.faults.append(f"fetched from another server: {fetched}")


def faults(folder):
    """Return one line for each fault of the site in a folder."""
    pages = {path: Page(path.read_text()) for path in sorted(folder.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        told = [*page.faults, *_dead_links(path, page, pages)]
        found += [f"{path.relative_to(folder)}: {fault}" for fault in told]
    return found


def _dead_links(path, page, pages):
    """Yield the links of a page that lead nowhere inside the site."""
    for link in dict.fromkeys(page.links):
        address = urllib.parse.urlsplit(link)
        if address.scheme or address.netloc:
            if address.scheme not in ("https", "mailto", "data"):
                yield f"not a secure address: {link}"
            continue

        target = path
        if address.path:
            target = (path.parent / urllib.parse.unquote(address.path)).resolve()
        if not target.is_file():
            yield f"no such file: {link}"
        elif target in pages and not pages[target].has(address.fragment):
            yield f"no such place: {link}"


if __name__ == "__main__":
    problems = faults(pathlib.Path(sys.argv[1]).resolve())
    print(*problems, sep="\n", file=sys.stderr)
    sys.exit(1 if problems else 0)
