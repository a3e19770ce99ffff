"""Every test process has four fake CPU devices; set before jax is imported."""

import atexit
import collections
import contextlib
import fnmatch
import gc
import os
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = (
    "0"  # nobody reads where an operation was written; noting it takes time
)

# What one process has compiled no other one compiles again: for the workers of one run of the tests, and what they start.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="lbopt-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import jax
import pytest
from jax._src import compiler  # there is no public way to give options to all that is compiled
from jax.experimental.compilation_cache import compilation_cache

gc.set_threshold(50_000, 20, 50)  # tracing makes many objects and little garbage


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark as slow the cases that the `everyday` mark of their function does not name."""
    unknown = collections.defaultdict(set)
    for item in items:
        everyday = item.get_closest_marker("everyday")
        if everyday is None:
            continue
        function, case = (item.path, item.originalname), item.callspec.id
        if function not in unknown:
            unknown[function] = set(everyday.args)
        named = {name for name in everyday.args if fnmatch.fnmatchcase(case, name)}
        unknown[function] -= named
        if not named:
            item.add_marker(pytest.mark.slow)

    # A name that no case has any longer would let a feature go untested every day.
    collected_whole = not any("::" in argument for argument in config.args)
    for (path, function), names in unknown.items():
        if names and collected_whole:
            raise pytest.UsageError(f"{path}: {function} has no cases {sorted(names)}")


@pytest.fixture(scope="module")
def cache_afterwards():
    """Switch JAX's cache on again when a file's tests have planned."""
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


QUICKLY = {"xla_cpu_use_fusion_emitters": False}  # a third to a half of the time at LLVM's level 0


@pytest.fixture(scope="session")
def quick_options():
    """Return what compiles faster still, of the compiler's own options, as far as this version of it knows them."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.jit(lambda: 0, compiler_options=QUICKLY)()
        return QUICKLY
    return {}


@pytest.fixture(scope="module")
def quickly_compiled():
    """Compile as fast as can be while a file's tests run, and keep nothing so compiled: its bits are not those of another process."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()


@pytest.fixture(scope="module")
def most_quickly_compiled(quick_options, quickly_compiled):
    """Compile faster still, for tests that look at no number closely: all is rounded otherwise."""

    def options(*given, env_options_overrides=None, **named):
        return whole(
            *given,
            env_options_overrides={**quick_options, **(env_options_overrides or {})},
            **named,
        )

    whole = compiler.get_compile_options
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", options)
        yield
