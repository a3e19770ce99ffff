"""Every test process has four fake CPU devices; set before jax is imported."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import pytest


@pytest.fixture(scope="module")
def quickly_compiled():
    """Compile as fast as can be while a file's tests run, and keep nothing so compiled: its bits are not those of another process."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
