"""The TPU compiler in the process of the tests, beside their CPU devices."""

import importlib.util

import pytest

from lbopt.plan import prepare_environment

if importlib.util.find_spec("libtpu") is None:  # it has no wheel for this machine
    collect_ignore = [
        "test_aggregation.py",
        "test_interconnect.py",
        "test_make.py",
        "test_program.py",
        "test_resnet.py",
        "test_suggest.py",
    ]


@pytest.fixture(scope="module", autouse=True)
def environment(cache_afterwards):
    if importlib.util.find_spec("libtpu") is not None:
        prepare_environment()
