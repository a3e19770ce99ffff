"""The report in a real browser: no errors, no requests, nothing wider than the screen."""

import browser as browsers
import pytest
import synthetic
from synthetic import Truth, legw

from lbopt.report.study import write_study_report

pytestmark = pytest.mark.skipif(browsers.find() is None, reason="no Chromium on PATH")

PHONE = 375
DESKTOP = 1280
SPOILT = """<!doctype html><title>t</title><img src="http://example.org/a.png">
<div style="width: 900px">wide</div>
<script>console.error("no")</script>"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = browsers.Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A page of a study with every section, and with names too long for a phone."""
    layers = ("block/convolution_with_a_long_name/kernel", "head/kernel")
    common = {"growth": 0.5, "noise_scale": (90.0, 100.0, 200.0), "peak_step": lambda size: 4}
    truths = {
        "Momentum_with_an_unbreakable_name_of_its_own + linear": Truth(
            (0.98, 0.97, 0.6), (1.0, 1.0, 0.7), steps_to_target=(200.0, 100.0, None), **common
        ),
        "LAMB + LEGW": legw(
            (0.98, 0.98, 0.975), steps_to_target=(150.0, 50.0, 20.0), layers=layers, **common
        ),
    }
    workdir = tmp_path_factory.mktemp("study")
    config, rows = synthetic.make_study(
        truths, waterfall=tuple(truths), warmup_factors=[0.5, 1.0, 2.0]
    )
    written = write_study_report(workdir, synthetic.save_study(workdir, config, rows))
    return written.file.as_uri()


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_the_report_asks_for_nothing_and_complains_of_nothing(browser, study, width):
    browser.open(study, width)
    assert browser.requests[0] == study
    assert all(url.startswith("data:") for url in browser.requests[1:])
    assert browser.complaints == []


@pytest.mark.parametrize("unfolded", [False, True])
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_the_report_is_no_wider_than_the_screen(browser, study, width, unfolded):
    browser.open(study, width)
    browser.evaluate(f"document.querySelector('details').open = {str(unfolded).lower()}")
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth") <= width


def test_every_figure_is_drawn_and_says_what_it_shows(browser, study):
    browser.open(study, DESKTOP)
    images = browser.evaluate("[...document.images].map(i => [i.naturalWidth, i.alt])")
    assert len(images) >= 11
    assert all(width > 500 and len(alt) > 20 for width, alt in images)
    assert len({alt for _, alt in images}) == len(images)


def test_single_figures_fit_a_phone_and_panels_scroll_in_their_box(browser, study):
    browser.open(study, PHONE)
    widths = "[...document.querySelectorAll('{}')].map(e => e.getBoundingClientRect().width)"
    assert max(browser.evaluate(widths.format("figure:not(.panels) img"))) <= PHONE
    assert min(browser.evaluate(widths.format("figure.panels img"))) > PHONE
    assert max(browser.evaluate(widths.format("figure"))) <= PHONE


def test_a_spoilt_page_is_found_out(browser, tmp_path):
    file = tmp_path / "spoilt.html"
    file.write_text(SPOILT)
    browser.open(file.as_uri(), PHONE)
    assert "http://example.org/a.png" in browser.requests
    assert browser.complaints
    assert browser.evaluate("document.documentElement.scrollWidth") > PHONE
