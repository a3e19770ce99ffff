"""Every test process has four fake CPU devices and compiles quickly; set before jax is imported."""

import atexit
import collections
import fnmatch
import functools
import gc
import mmap
import os
import pathlib
import shutil
import tempfile

import jaxlib


@functools.cache
def _is_known(flag):
    """Return whether this version of XLA has a flag; an unknown one ends the process."""
    library = pathlib.Path(jaxlib.__file__).with_name("libjax_common.so")
    if not library.exists():
        return False
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
        # The name alone is also in the schema of all options, those that are no flags any more too.
        return content.find(b"\0" + flag.encode() + b"\0") >= 0


DEVICES = "--xla_force_host_platform_device_count=4"
# Tests compile much and compute little. LLVM's level 0, without the emitters that compile each
# fusion by MLIR, takes a third of the time. Processes that tests start inherit both settings.
QUICKLY = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
FLAGS = [f"--{name}={value}".lower() for name, value in QUICKLY.items() if _is_known(name)]

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join([DEVICES, *FLAGS])
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
# No test reads source locations of operations, and recording them takes time.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

# A program that one process of a test run has compiled is not compiled by another.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="lbopt-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax_internals import compiler, mlir

# JAX makes a context for each program, which takes a fifth of the time that a small one needs.
mlir.make_ir_context = functools.cache(mlir.make_ir_context)
gc.set_threshold(50_000, 20, 50)  # tracing makes many objects and little garbage


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark as slow the cases that the `everyday` mark of their function does not name."""
    unknown = collections.defaultdict(set)
    for item in items:
        everyday = item.get_closest_marker("everyday")
        if everyday is None:
            continue
        function = (item.path, item.originalname)
        case = item.callspec.id
        if function not in unknown:
            unknown[function] = set(everyday.args)
        named = {name for name in everyday.args if fnmatch.fnmatchcase(case, name)}
        unknown[function] -= named
        if not named:
            item.add_marker(pytest.mark.slow)

    # The name of a missing case would silently drop a feature from the everyday suite.
    collected_whole = not any("::" in argument for argument in config.args)
    for (path, function), names in unknown.items():
        if names and collected_whole:
            raise pytest.UsageError(f"{path}: {function} has no cases {sorted(names)}")


@pytest.fixture(scope="module")
def cache_afterwards():
    """Re-enable JAX's cache after the planning tests of a file."""
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Compile for TPUs as users do: libtpu reads XLA_FLAGS too and rejects the CPU's flags."""
    if item.get_closest_marker("tpu_compiler"):
        os.environ["XLA_FLAGS"] = DEVICES
        jax.config.update("jax_disable_most_optimizations", False)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    if item.get_closest_marker("tpu_compiler"):
        os.environ["XLA_FLAGS"] = " ".join([DEVICES, *FLAGS])
        jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module")
def fusion_emitters():
    """Compile fusions by MLIR, as users do, while a file's tests run."""
    options = compiler.get_compile_options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", functools.partial(_emitting, options))
        jax.clear_caches()
        yield
    jax.clear_caches()


def _emitting(options, *given, env_options_overrides=None, **named):
    emitters = {flag: True for flag in QUICKLY if "emitters" in flag and _is_known(flag)}
    overrides = emitters | (env_options_overrides or {})
    return options(*given, env_options_overrides=overrides, **named)


@pytest.fixture(scope="module")
def optimized(fusion_emitters):
    """Compile as users do while a file's tests run."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
