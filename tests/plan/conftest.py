"""The TPU compiler in the process of the tests, beside their CPU devices."""

import pytest

from lbopt.plan import topology


@pytest.fixture(scope="session", autouse=True)
def environment():
    topology.prepare_environment()
