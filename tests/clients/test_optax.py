"""Optax's own tests of its `lamb` and `lars`, run on lbopt's."""

import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process


@pytest.mark.everyday("optax._src.sharding_test-6")
@pytest.mark.parametrize(
    ("module", "least"), [("optax._src.alias_test", 30), ("optax._src.sharding_test", 6)]
)
def test_optaxs_tests_pass_on_ours(module, least):
    pytest.importorskip(module.rpartition(".")[0])
    script = pathlib.Path(__file__).with_name("optax_tables.py")
    ended = subprocess.run(
        [sys.executable, script, module], capture_output=True, text=True, timeout=300
    )
    missing = re.search(r"ModuleNotFoundError: No module named '([\w.]+)'", ended.stderr)
    if missing and not missing[1].startswith("lbopt"):
        pytest.skip(f"this version of Optax brings no tests, or they need more: {missing[0]}")
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-1000:]
    assert int(re.search(r"^(\d+) tests$", ended.stdout, re.MULTILINE)[1]) >= least
