"""A cache of compiled programs on disk, so that a restart compiles almost nothing."""

from __future__ import annotations

import contextlib
import os
import pathlib
import time
import warnings

import jax

from lbopt import _jax_internals, paths

MIN_COMPILE_S = 0.2
"""Seconds of compilation from which a program is kept; JAX's own default is 1 s."""


def keep() -> None:
    """Let JAX keep compiled programs in `~/.cache/lbopt`, unless the user has set its cache.

    `JAX_COMPILATION_CACHE_DIR` names another folder, which may be gs://...;
    `JAX_ENABLE_COMPILATION_CACHE=false` disables the cache. JAX writes only from the first process
    of a job, so hosts profit from each other only if they share the folder.
    """
    # A program that cannot be kept is only compiled again. On a full disk, a warning about it would
    # hide the error that ends the run.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return

    with contextlib.suppress(OSError):  # without a home folder, every start compiles
        folder = paths.of_user(os.environ, "XDG_CACHE_HOME", ".cache") / "lbopt" / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
        _remove_incomplete(folder)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_S)


def _remove_incomplete(folder: pathlib.Path) -> None:
    """Remove programs that a killed process wrote only in part.

    JAX would warn about such a program at every start and never replace it. Only programs that are
    newer than the last check are read.
    """
    stamp = folder / ".looked-at"
    last_check = stamp.stat().st_mtime if stamp.exists() else 0.0
    now = time.time()
    for entry in folder.glob("*-cache"):
        is_new = entry.stat().st_mtime >= last_check
        if is_new and not _jax_internals.is_whole_program(entry):
            entry.unlink(missing_ok=True)
    stamp.touch()
    os.utime(stamp, (now, now))
