"""The numbers of planted studies equal those in `frozen_findings.json`; words may differ."""

import json
import pathlib
import re

import pytest
import synthetic
from frozen_studies import STUDIES

FROZEN = json.loads((pathlib.Path(__file__).parent / "frozen_findings.json").read_text())


def numbers(text):
    """Return all numbers in a sentence, in their order."""
    return [float(one.replace(",", "")) for one in re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)]


def assert_same(found, frozen, path=""):
    """Compare JSON data, numbers to nine digits."""
    if isinstance(frozen, dict):
        assert found.keys() == frozen.keys(), path
        for name, value in frozen.items():
            assert_same(found[name], value, f"{path}.{name}")
    elif isinstance(frozen, list):
        assert len(found) == len(frozen), path
        for place, value in enumerate(frozen):
            assert_same(found[place], value, f"{path}[{place}]")
    elif isinstance(frozen, float | int) and not isinstance(frozen, bool):
        assert found == pytest.approx(frozen, rel=1e-9, abs=1e-12), path
    else:
        assert found == frozen, path


@pytest.mark.parametrize("name", STUDIES)
def test_the_findings_of_a_study_are_what_they_were(name):
    found = json.loads(json.dumps(synthetic.summarize(*STUDIES[name]())))
    for claim in found["claims"]:
        claim["numbers"] = numbers(claim.pop("sentence"))
    found["findings"] = [numbers(sentence) for sentence in found["findings"]]
    for point in (point for arm in found["arms"] for point in arm["points"]):
        point["search"] = [list(candidate.values()) for candidate in point["search"]]
    assert_same(found, FROZEN[name])
