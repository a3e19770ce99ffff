"""Compiled programs that outlive the process: a restart compiles next to nothing."""

from __future__ import annotations

import contextlib
import os
import pathlib
import time
import warnings

import jax
from jax._src import compilation_cache  # there is no public way to ask whether an entry can be read

from lbopt import paths

MIN_COMPILE_S = 0.2
"""Programs that took less are not kept; JAX's own default is a second."""


def keep() -> None:
    """Let JAX keep compiled programs in `~/.cache/lbopt`, unless the user has told JAX where, or not to.

    `JAX_COMPILATION_CACHE_DIR` names another folder, which may be gs://..., and `JAX_ENABLE_COMPILATION_CACHE=false` switches this off.
    Of the processes of a job only the first one writes (JAX): to spare all hosts the work, name a folder that all share.
    """
    # A program that cannot be kept is compiled again: no word about it beside what ends a run on a full disk.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    with contextlib.suppress(
        OSError
    ):  # where there is no home, programs are compiled at every start
        folder = paths.of_user(os.environ, "XDG_CACHE_HOME", ".cache") / "lbopt" / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
        _remove_torn(folder)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_S)


def _remove_torn(folder: pathlib.Path) -> None:
    """Remove what a killed process has left half written: JAX would warn of it at every start, and never write it again.

    Only programs that have come since the last look are looked at.
    """
    stamp = folder / ".looked-at"
    looked = stamp.stat().st_mtime if stamp.exists() else 0.0
    now = time.time()
    for entry in folder.glob("*-cache"):
        if entry.stat().st_mtime >= looked:
            try:
                compilation_cache.decompress_executable(entry.read_bytes())
            except Exception:  # of three libraries
                entry.unlink(missing_ok=True)
    stamp.touch()
    os.utime(stamp, (now, now))
