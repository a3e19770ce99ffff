"""The report in a real browser: no errors, no requests, nothing wider than the screen."""

import json

import browser as browsers
import pytest
import synthetic
from synthetic import Truth, legw

from lbopt.config import TrainConfig, config_to_json
from lbopt.report import write_training_report
from lbopt.report.study import write_study_report

pytestmark = pytest.mark.skipif(browsers.find() is None, reason="no Chromium on PATH")

PHONE = 375
DESKTOP = 1280
SPOILT = """<!doctype html><title>t</title><img src="http://example.org/a.png">
<div style="width: 900px">wide</div>
<p style="color: #999; background: #fff">pale</p>
<script>console.error("no")</script>"""
PALE = """(() => {
    const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
    const luminance = colour => {
        const [r, g, b] = numbers(colour).slice(0, 3).map(c => c / 255).map(
            c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = element => {
        for (let one = element; one; one = one.parentElement) {
            const colour = getComputedStyle(one).backgroundColor;
            if (numbers(colour)[3] !== 0) return colour;
        }
        return "rgb(255, 255, 255)";
    };
    const found = [];
    for (const one of document.body.querySelectorAll("*")) {
        const said = [...one.childNodes].some(
            node => node.nodeType === 3 && node.textContent.trim());
        if (!said || one.className === "pad") continue;
        const pair = [getComputedStyle(one).color, behind(one)].map(luminance).sort();
        if ((Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05) < 4.5)
            found.push(one.textContent.trim().slice(0, 40));
    }
    return found;
})()"""
"""Texts whose contrast is below 4.5."""
UNFOLD = "document.querySelectorAll('details').forEach(one => one.open = true), 1"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = browsers.Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(autouse=True)
def light(browser):
    """Leave no preference of one test to the next."""
    yield
    browser.call("Emulation.setEmulatedMedia", media="", features=[])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A page of a training run with layers of long names."""
    workdir = tmp_path_factory.mktemp("run")
    names = [f"train/trust_ratio/block_{place}/a_layer_with_a_long_name" for place in range(6)]
    lines = [
        {
            "step": step,
            "examples_seen": 64 * step,
            "train/loss": 1 / step,
            "train/accuracy": 1 - 0.5 / step,
            "train/learning_rate": 0.1,
            "eval/accuracy": 1 - 0.6 / step,
            "eval/loss": 1.5 / step,
            "perf/examples_per_s": 1000.0,
            "perf/elapsed_s": 0.1 * step,
            **dict.fromkeys(names, 1.0),
        }
        for step in range(1, 31)
    ]

    with open(workdir / "metrics.jsonl", "w") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in lines)
    config = config_to_json(TrainConfig(name="run"))
    made = {"versions": {"jax": "0.0"}, "num_devices": 1, "device_kind": "cpu", "command": "lbopt"}
    return write_training_report(workdir, {"config": config, **made}).as_uri()


@pytest.fixture(params=["study", "run"])
def page(request):
    """Each kind of page."""
    return request.getfixturevalue(request.param)


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
def test_the_report_asks_for_nothing_and_complains_of_nothing(browser, page, width):
    browser.open(page, width)
    assert browser.requests[0] == page
    assert all(url.startswith("data:") for url in browser.requests[1:])
    assert browser.complaints == []


@pytest.mark.parametrize("unfolded", [False, True])
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_the_report_is_no_wider_than_the_screen(browser, page, width, unfolded):
    browser.open(page, width)
    if unfolded:
        browser.evaluate(UNFOLD)
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth") <= width


def test_every_figure_is_drawn_and_says_what_it_shows(browser, study):
    browser.open(study, DESKTOP)
    browser.evaluate(UNFOLD)
    images = browser.evaluate("[...document.images].map(i => [i.naturalWidth, i.alt])")
    assert len(images) >= 11
    assert all(width > 300 and len(alt) > 20 for width, alt in images)
    assert len({alt for _, alt in images}) == len(images)


def test_single_figures_fit_a_phone_and_panels_scroll_in_their_box(browser, study):
    browser.open(study, PHONE)
    browser.evaluate(UNFOLD)
    widths = "[...document.querySelectorAll('{}')].map(e => e.getBoundingClientRect().width)"
    assert max(browser.evaluate(widths.format("figure:not(.panels) img"))) <= PHONE
    assert min(browser.evaluate(widths.format("figure.panels img"))) > PHONE
    assert max(browser.evaluate(widths.format("figure"))) <= PHONE


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_are_read_in_both_schemes(browser, page, scheme):
    browser.prefer(scheme)
    browser.open(page, DESKTOP)
    browser.evaluate(UNFOLD)
    assert browser.evaluate(PALE) == []


def test_axe_finds_nothing(browser, page):
    browser.open(page, PHONE)
    browser.evaluate(UNFOLD)
    assert browser.axe(["wcag2a", "wcag2aa", "best-practice"]) == []


def test_figures_follow_the_scheme(browser, page):
    corners = []
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        browser.open(page, DESKTOP)
        corners += browser.pixels("header img", [(0.01, 0.01)])
    assert corners == [[255, 255, 255], [0x16, 0x18, 0x1D]]


def test_a_link_of_the_contents_unfolds_its_section(browser, page):
    browser.open(page, DESKTOP)
    count = "[...document.querySelectorAll('details')].filter(one => one.open).length"
    before = browser.evaluate(count)
    browser.evaluate("document.querySelector('nav li:last-child a').click(), 1")
    assert browser.evaluate(count) == before + 1


def test_print_shows_what_is_folded(browser, page):
    browser.open(page, DESKTOP)
    height = "document.querySelector('details:not([open])').getBoundingClientRect().height"
    folded = browser.evaluate(height)
    browser.print()
    assert browser.evaluate(height) > folded + 50
    assert browser.evaluate("document.querySelector('nav').offsetHeight") == 0


def test_a_spoilt_page_is_found_out(browser, tmp_path):
    file = tmp_path / "spoilt.html"
    file.write_text(SPOILT)
    browser.open(file.as_uri(), PHONE)
    assert "http://example.org/a.png" in browser.requests
    assert browser.complaints
    assert browser.evaluate(PALE) == ["pale"]
    assert any(fault.startswith("image-alt") for fault in browser.axe(["wcag2a"]))
    assert browser.evaluate("document.documentElement.scrollWidth") > PHONE
