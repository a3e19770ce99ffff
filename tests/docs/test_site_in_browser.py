"""Every page of the built site in a real browser, on a desktop and on a phone, light and dark."""

import json
import os
import pathlib
import subprocess
import sys

import browser as browsers
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(browsers.find() is None, reason="no Chromium on PATH"),
]

ROOT = pathlib.Path(__file__).parents[2]
PHONE = 375
DESKTOP = 1280
RULES = ["color-contrast", "image-alt", "label", "link-name", "button-name", "document-title"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as scripts/docs builds it but with outputs of notebooks of an earlier run."""
    pytest.importorskip("sphinx", reason="the extra docs has Sphinx")
    folder = tmp_path_factory.mktemp("site")
    # Pages without an earlier run are executed as readers do it: on one device, optimized.
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run(
        [sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet", "docs", folder],
        cwd=ROOT,
        env=env,
        check=True,
    )
    return sorted(path for path in folder.rglob("*.html") if "_static" not in path.parts)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = browsers.Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.mark.parametrize("width", [PHONE, DESKTOP], ids=["phone", "desktop"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_page_is_sound(browser, site, width, scheme):
    """No message on the console, no request that leaves, nothing wider than the screen.

    axe checks that texts stand out from their background, that pictures, fields and links have a
    text, and that pages have a title.
    """
    browser.prefer(scheme)
    faults = []
    for page in site:
        browser.open(page.as_uri(), width)
        told = [each for each in browser.complaints if each.get("type") != "log"]
        found = [f"console: {json.dumps(each)[:200]}" for each in told]
        found += [f"asks for {url}" for url in browser.requests if not _stays(url)]
        wide = browser.evaluate("document.documentElement.scrollWidth")
        if wide > width:
            found.append(f"{wide} pixels wide")
        found += browser.axe(RULES)
        faults += [f"{page.name}: {fault}" for fault in found]
    assert not faults, "\n".join(faults)


def test_the_search_finds_a_page(browser, site):
    (page,) = (path for path in site if path.name == "search.html")
    browser.open(f"{page.as_uri()}?q=citation", DESKTOP)
    results = "[...document.querySelectorAll('#search-results li a')].map((one) => one.textContent)"
    waited = f"""
    new Promise((resolve) => {{
      const look = () => {{
        const found = {results};
        found.length ? resolve(found) : setTimeout(look, 50);
      }};
      look();
      setTimeout(() => resolve([]), 10000);
    }})
    """
    assert any("Licence and citation" in title for title in browser.evaluate(waited))


def test_the_table_of_recipes_is_filtered_by_words(browser, site):
    (page,) = (path for path in site if path.parts[-2:] == ("recipes", "index.html"))
    browser.open(page.as_uri(), DESKTOP)
    shown = """
    [...document.querySelectorAll(".filtered tbody tr")]
      .filter((row) => row.offsetHeight).map((row) => row.textContent.toLowerCase())
    """
    everything = browser.evaluate(shown)
    found = browser.evaluate(f"""
    (() => {{
      const field = document.querySelector("input.filter");
      field.value = "LARS 32768";
      field.dispatchEvent(new Event("input"));
      return {shown.strip()};
    }})()
    """)
    assert 0 < len(found) < len(everything)
    assert found == [row for row in everything if "lars" in row and "32768" in row]


def _stays(url):
    return url.startswith(("file:", "data:"))
