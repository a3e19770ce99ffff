"""Run the `lamb` and `lars` tests of Optax's wheel on lbopt's.

python optax_tables.py MODULE ...
"""

import functools
import importlib
import os
import sys
import unittest

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"  # as `sharding_test` has it

import jax
import optax
from optax._src import alias

import lbopt

EVERYWHERE = {
    "trust_ratio_mask": None,
    "weight_decay_mask": None,
}  # the tables' parameters are arrays without names
OURS = {name: functools.partial(getattr(lbopt, name), **EVERYWHERE) for name in ("lamb", "lars")}


def main(modules):
    """Replace the factories, then import the tests, whose tables call them."""
    for name, factory in OURS.items():
        setattr(optax, name, factory)
        setattr(alias, name, factory)
    if jax.__version__.startswith("0.1"):  # they compare versions as strings: 0.10 < 0.7
        jax.__version__ = f"0.9{jax.__version__}"
    suite = unittest.TestSuite()
    for module in modules:
        for case in _cases(
            unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(module))
        ):
            shown = str(case)
            ours = any(f"'{name}'" in shown or case.id().endswith(f"_{name}") for name in OURS)
            if ours:
                suite.addTest(case)
    print(f"{suite.countTestCases()} tests")
    return unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(suite).wasSuccessful()


def _cases(suite):
    for entry in suite:
        yield from _cases(entry) if isinstance(entry, unittest.TestSuite) else [entry]


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
