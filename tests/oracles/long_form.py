"""Some tests take more rounds of the same where LBOPT_LONG_TESTS=1: what README states of them."""

import os


def rounds(long, short):
    """Return how many rounds a test takes."""
    return long if os.environ.get("LBOPT_LONG_TESTS") == "1" else short
