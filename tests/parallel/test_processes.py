"""The connection of JAX's processes, with a runtime that fails."""

import jax
import pytest
from refusal import troubled

from lbopt.job import MemberJob, SoloJob
from lbopt.parallel import connect_processes


@pytest.fixture
def job(monkeypatch):
    """A job of two processes; the settings of this process's JAX stay as they are."""
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    found = object.__new__(MemberJob)
    found.index = 0
    found.count = 2
    found.jax_address = found.jax_bind_address = "host-0:1235"
    found.start_timeout_s = 60.0
    found.local_device_ids = None
    return found


def test_a_process_that_is_alone_connects_to_nothing(monkeypatch):
    monkeypatch.delattr(jax.distributed, "initialize")
    connect_processes(SoloJob())


def test_a_runtime_that_cannot_connect_is_told_by_its_address(job, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("DEADLINE_EXCEEDED:\n  two lines")

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    with troubled("jax_address", "host-0:1235", "resource"):
        connect_processes(job)


def test_a_runtime_of_other_processes_is_told_by_their_number(job, monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *arguments, **options: None)
    with troubled("jax.process_count()", 1, "mismatch"):
        connect_processes(job)
