"""Some tests take more rounds of the same where LBOPT_LONG_TESTS=1: what README states of them."""

import os

import pytest

in_the_long_form = pytest.mark.skipif(
    os.environ.get("LBOPT_LONG_TESTS") != "1", reason="LBOPT_LONG_TESTS=1 runs it"
)


def rounds(long, short):
    """Return how many rounds a test takes."""
    return long if os.environ.get("LBOPT_LONG_TESTS") == "1" else short
