"""Run the chosen command, and turn its errors into an exit code and one line."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence

from lbopt import __version__, _jax_internals, errors, paths
from lbopt._shown import one_line, show
from lbopt.cli import _process, _standard_streams
from lbopt.errors import EXIT_USER, EnvironmentProblem, Preempted, UserError, require_choice
from lbopt.job import (
    MEMBER_VARIABLE,
    Job,
    find_place,
    given_devices,
    given_job_flags,
    join_job,
    run_guarded,
)

COMMANDS = {
    "new": "write a small project of your own, which runs as it stands",
    "train": "train a recipe; the same command resumes",
    "evaluate": "evaluate a checkpoint on every example of the validation and test splits",
    "sweep": "run a batch-size-limit study; the same command resumes",
    "plan": "what a recipe costs on a TPU pod that is not here, by the TPU compiler",
    "check": "config, packages, data, batch and memory of a recipe, before it is trained",
    "scale": "a recipe for another batch size: every number that a rule changes, and the source",
    "suggest": "a learning rate, a warmup and batch sizes to begin with, measured in minutes",
    "critical": "the critical batch of a run, measured by branches at larger batches",
    "report": "draw report.html and PNGs from a training run or a study",
    "diff": "what has changed since a run began: config, your files, versions",
    "export": "write a checkpoint's network as safetensors or as a folder for transformers",
    "recipes": "list every config",
    "config": "list every field of a config: type, default, meaning and where it applies",
    "prepare": "download, convert or make a data set; says what you have to download",
    "tpu": "run a script for TPU machines, or copy the scripts into your project",
    "doctor": "check devices, versions, collectives, data and disk",
}

TOGETHER = ("train", "evaluate", "sweep", "doctor")
"""Commands that several processes can run as one job."""
COMPILING = (*TOGETHER, "check", "plan", "scale", "export", "suggest", "critical")
"""Commands that need JAX."""
RESUMED = ("train", "sweep")
"""Commands that save their state when they are asked to stop."""
FLAGS_OF_FIELDS = {name: f"--{name}" for name in ("workdir", "shard", "checkpoint", "profile")}
"""Arguments of the library that a command takes as flags: how its errors name them."""


def usage() -> str:
    """Return the help text."""
    usage = "usage: lbopt COMMAND [--flag=VALUE ...]"
    hint = "(lbopt COMMAND --help lists the flags; lbopt --version)"
    commands = [f"  {name:<10}{text}" for name, text in COMMANDS.items()]
    return "\n".join([f"{usage}     {hint}", "", *commands])


def main(argv: Sequence[str]) -> int:
    """Run a command line (without the program's name) and return its exit code."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        show(*usage().split("\n"))
        return 0 if argv else EXIT_USER
    if argv[0] in ("--version", "version"):
        show(f"lbopt {__version__}")
        return 0
    with _process.settings():
        return _run_command(argv)


def _run_command(argv: Sequence[str]) -> int:
    """Run a command as one process of its job; see `main`."""
    name = argv[0]
    job = join_job()
    try:
        require_choice("command", name, COMMANDS)
        _check_folder()
        if name in COMPILING:
            if job.count == 1:  # for a job of several, the guard has checked them
                _check_xla_flags()
            _check_jax()

        if name in TOGETHER and job.count == 1:
            place = find_place(given_job_flags(argv[1:]), os.environ)
            if place is not None:
                return run_guarded(place, argv, saves=name in RESUMED)
        if name in COMPILING and job.count == 1:
            _show_given_devices()

        with _system_errors():
            _run(name, argv[1:], job)
    except Preempted as error:
        if job.index == 0:  # all processes of a job stop together: the first one says so
            _print_error(name, error)
        return error.exit_code
    except (UserError, EnvironmentProblem) as error:
        _print_error(name, error)
        _leave(job, error.exit_code, one_line(str(error)))
        return error.exit_code
    except KeyboardInterrupt as error:
        if job.count == 1 and str(error):  # how to resume, from the command
            _print_error(name, error)
        _leave(job, 130, one_line(str(error)) or "was interrupted")
        raise
    except BaseException as error:
        if job.count > 1 and not isinstance(error, SystemExit):
            traceback.print_exc()
            _leave(job, 1, one_line(f"{type(error).__name__}: {error}"))
        raise
    return 0


def _print_error(name: str, error: BaseException) -> None:
    print(one_line(f"lbopt {name}: {one_line(str(error))}"), file=sys.stderr, flush=True)


def _run(name: str, argv: Sequence[str], job: Job) -> None:
    command = importlib.import_module(f"lbopt.cli._{name}")
    if name in (*RESUMED, "evaluate", "export", "suggest", "critical"):
        importlib.import_module("lbopt.cli._compilation_cache").keep()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # imports are over, see `run`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with errors.under("", **FLAGS_OF_FIELDS):
        if name in TOGETHER:
            command.run(list(argv), job)
        else:
            command.run(list(argv))


_SYSTEM_ERRORS = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EIO,
    errno.ESTALE,
    errno.ENOTCONN,
    errno.ENAMETOOLONG,
)


@contextlib.contextmanager
def _system_errors() -> Iterator[None]:
    """Turn errors that any line can meet into `EnvironmentProblem`: no memory, no access to a file.

    Even `Path.is_file` raises an error if a folder above the file may not be entered, or if a
    shared disk is gone.
    """
    try:
        yield
    except OSError as error:
        # Any other one is a bug, and keeps its traceback.
        if error.errno not in _SYSTEM_ERRORS or error.filename is None:
            raise
        fix = f"{error.strerror}; make it accessible or give another path"
        raise EnvironmentProblem(str(error.filename), reason=fix, code="resource") from error

    except MemoryError as error:
        cause = f" ({error})" if str(error) else ""
        fix = f"this process has too little{cause}; free some, or raise its limit (ulimit -v)"
        raise EnvironmentProblem("memory", reason=fix, code="resource") from error

    except RuntimeError as error:
        # By its name, because a command that needs no JAX does not import it.
        if type(error).__name__ != "JaxRuntimeError" or "RESOURCE_EXHAUSTED" not in str(error):
            raise
        fix = (
            f"the devices have too little ({str(error).splitlines()[0][:200]}); "
            "raise config.parallel.num_microsteps, lower config.eval_global_batch_size, "
            "or take more devices"
        )
        raise EnvironmentProblem("device memory", reason=fix, code="resource") from error


def _check_xla_flags() -> None:
    """Raise `EnvironmentProblem` if XLA does not accept `XLA_FLAGS`."""
    flags = os.environ.get("XLA_FLAGS", "")
    if all(_DEVICES.fullmatch(flag) for flag in flags.split()):
        return
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # no child: XLA may end us
        refusal = _read_by_xla(flags)
        if refusal is not None:
            fix = f"XLA does not accept it{refusal}; remove that flag, or unset the variable"
            raise EnvironmentProblem("XLA_FLAGS", flags, fix)


@functools.cache
def _read_by_xla(flags: str) -> str | None:
    """Return XLA's message about flags that it refuses, in parentheses; None if it accepts them.

    XLA ends the process in which it reads a wrong flag, so a child process reads them.
    """
    ended = subprocess.run(
        [sys.executable, "-c", _jax_internals.READ_XLA_FLAGS],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_READING_S,
    )
    if not ended.returncode or "parse_flags_from_env" not in ended.stderr:
        return None
    found = _REFUSED.search(ended.stderr)
    return f" ({found[0]})" if found else ""


_DEVICES = re.compile(r"--xla_force_host_platform_device_count=\d{1,4}")
"""A common flag that needs no check."""
_REFUSED = re.compile(
    r"Unknown flags? in XLA_FLAGS: .*|Couldn't interpret value .*|Could not open file \".*?\""
)
_READING_S = 60
"""Seconds for a child process to import jaxlib and read the flags."""


def _check_jax() -> None:
    """Import JAX, and check the settings that it takes from the environment.

    Raises:
      EnvironmentProblem: Naming the variable, if JAX does not accept a setting or if lbopt cannot
        work under it.
    """
    # JAX reads its settings when it is imported, and does not name the variable in its error.
    try:
        import jax
    except ValueError as error:
        named = [name for name in os.environ if _names(str(error), name)]
        if not named:
            raise
        fix = "JAX does not accept it; unset it, or give another value"
        raise EnvironmentProblem(named[0], os.environ[named[0]], fix) from error

    values = jax.config.values
    for name in ("jax_compilation_cache_dir", "jax_dump_ir_to"):
        folder = values.get(name)
        if folder and paths.is_address(folder) and not re.match(_BUCKETS, folder):
            fix = "give a folder of this machine, or gs://..."
            raise EnvironmentProblem(name.upper(), folder, fix)
    for name, unusable, why in _UNUSABLE:
        value = values.get(name)
        if value and unusable in (None, value):
            raise EnvironmentProblem(name.upper(), value, f"{why}; unset it", code="conflict")

    dump = values.get("jax_dump_ir_to")
    if dump and not re.match(_BUCKETS, dump):
        try:
            paths.local(dump, "JAX_DUMP_IR_TO").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fix = f"{error.strerror}; unset it, or give a folder"
            raise EnvironmentProblem("JAX_DUMP_IR_TO", dump, fix, code="resource") from error


def _show_given_devices() -> None:
    """Show JAX the GPUs in `JAX_LOCAL_DEVICE_IDS` alone: it reads the variable in a job only."""
    own = given_devices(os.environ)
    if own is not None:
        import jax

        for name in ("jax_cuda_visible_devices", "jax_rocm_visible_devices"):
            jax.config.update(name, ",".join(map(str, own)))


_BUCKETS = "(gs|s3)://[^/]"
_UNUSABLE = (
    ("jax_disable_jit", None, "lbopt compiles its steps"),
    ("jax_no_execution", None, "lbopt runs its steps"),
    ("jax_no_tracing", None, "lbopt compiles its steps"),
    ("jax_transfer_guard", "disallow_explicit", "lbopt transfers batches to the devices"),
    ("jax_array_garbage_collection_guard", "fatal", "JAX itself would end the process"),
    ("jax_random_seed_offset", None, "seeds come from the config"),
)
"""Settings of JAX, the unusable value (None: every value but the default), and the reason."""


def _names(message: str, name: str) -> bool:
    """Return whether a message of JAX is about an environment variable.

    For a variable that must be a number, JAX's message has only the value.
    """
    if not name.startswith(("JAX_", "JAX2TF_")):
        return f"'{name}'" in message
    return name in message.upper().replace(".", "_") or f"base 10: {os.environ[name]!r}" in message


def _leave(job: Job, code: int, line: str) -> None:
    """End a process of a job at once.

    JAX would wait at exit for the other processes, which are not coming.
    """
    if job.count > 1:
        job.fail(code, line)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _check_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        fix = "the folder has been removed; change to another one"
        raise EnvironmentProblem("current folder", reason=fix, code="missing") from error


def run() -> None:
    """Entry point of the `lbopt` command."""
    _standard_streams.outlive_readers()
    # Libraries that are interrupted during their import abort or print much, so Ctrl-C ends the
    # process until then. A member of a job keeps the exception: it reports to its guard.
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler and MEMBER_VARIABLE not in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C does not wait for JAX
        code = 130
    except SystemExit as ended:  # from --help, or from a child process that did the work
        if not isinstance(ended.code, int | None):
            raise
        code = ended.code or 0
    sys.exit(_standard_streams.exit_code(code))
