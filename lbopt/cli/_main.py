"""Choose the command and turn what went wrong into an exit code and one line."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence

from lbopt import __version__, paths
from lbopt._shown import one_line, show
from lbopt.cli import _process, _streams
from lbopt.errors import EXIT_USER, EnvironmentProblem, Preempted, UserError, require_choice
from lbopt.job import MEMBER_VARIABLE, Job, find_place, given_job_flags, join_job, run_guarded

COMMANDS = {
    "train": "train a recipe; the same command resumes",
    "evaluate": "evaluate a checkpoint on every example of the validation and test splits",
    "sweep": "run a batch-size-limit study; the same command resumes",
    "plan": "what a recipe costs on a TPU pod that is not here, by the TPU compiler",
    "report": "draw report.html and PNGs from a training run or a study",
    "export": "write a checkpoint's network as safetensors or as a folder for transformers",
    "recipes": "list every config",
    "prepare": "download, convert or make a data set; says what you have to download",
    "doctor": "check devices, versions, collectives, data and disk",
}

TOGETHER = ("train", "evaluate", "sweep", "doctor")
"""The commands that several processes run as one job."""
COMPILING = (*TOGETHER, "plan", "export")
"""Those that cannot do without JAX."""
RESUMED = ("train", "sweep")
"""Those that save what they have when they are asked to stop."""


def usage() -> str:
    """Return the help text."""
    lines = [f"  {name:<10}{text}" for name, text in COMMANDS.items()]
    return (
        "usage: lbopt COMMAND [--flag=VALUE ...]     (lbopt COMMAND --help says which; lbopt --version)\n\n"
        + "\n".join(lines)
    )


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
            if job.count == 1:  # the guard of a process of several has looked
                _check_xla_flags()
            _check_jax()
        if name in TOGETHER and job.count == 1:
            place = find_place(given_job_flags(argv[1:]), os.environ)
            if place is not None:
                return run_guarded(place, argv, saves=name in RESUMED)
        with _refusals_of_the_system():
            _run(name, argv[1:], job)
    except (UserError, EnvironmentProblem, Preempted) as error:
        line = one_line(str(error))
        if (
            not isinstance(error, Preempted) or job.index == 0
        ):  # all of a job stop together: one says so
            print(one_line(f"lbopt {name}: {line}"), file=sys.stderr, flush=True)
        if not isinstance(error, Preempted):
            _leave(job, error.exit_code, line)
        return error.exit_code
    except BaseException as error:
        if job.count > 1 and not isinstance(error, SystemExit):
            if isinstance(error, KeyboardInterrupt):
                _leave(job, 130, "was interrupted")
            traceback.print_exc()
            _leave(job, 1, one_line(f"{type(error).__name__}: {error}"))
        raise
    return 0


def _run(name: str, argv: Sequence[str], job: Job) -> None:
    command = importlib.import_module(f"lbopt.cli._{name}")
    if name in (*RESUMED, "evaluate", "export"):
        importlib.import_module("lbopt.cli._compiled").keep()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see run
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if name in TOGETHER:
        command.run(list(argv), job)
    else:
        command.run(list(argv))


_REFUSALS = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EIO,
    errno.ESTALE,
    errno.ENOTCONN,
    errno.ENAMETOOLONG,
)


@contextlib.contextmanager
def _refusals_of_the_system() -> Iterator[None]:
    """Turn into `EnvironmentProblem` what may be refused anywhere: memory, and files, which any look at a path may meet.

    `Path.is_file` raises it for a file below a folder that may not be entered, or where a shared disk is gone.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSALS or error.filename is None:
            raise
        raise EnvironmentProblem(
            f"{error.filename}: {error.strerror}; mend that, or give another path"
        ) from error
    except MemoryError as error:
        said = f" ({error})" if str(error) else ""
        raise EnvironmentProblem(
            f"this process has too little memory{said}; free some, or raise its limit (ulimit -v)"
        ) from error
    except RuntimeError as error:
        if type(error).__name__ != "JaxRuntimeError" or "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise EnvironmentProblem(
            f"the devices have too little memory ({str(error).splitlines()[0][:200]}); raise config.parallel.num_microsteps, "
            "lower config.eval_global_batch_size, or take more devices"
        ) from error


def _check_xla_flags() -> None:
    """Raise EnvironmentProblem if XLA does not take its flags: it ends the process that has it read them, so another one does first."""
    flags = os.environ.get("XLA_FLAGS", "")
    if all(_DEVICES.fullmatch(flag) for flag in flags.split()):
        return
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # then XLA itself may speak
        ended = subprocess.run(
            [sys.executable, "-c", _READ_FLAGS],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_READING_S,
        )
        if ended.returncode and "parse_flags_from_env" in ended.stderr:
            found = _REFUSED.search(ended.stderr)
            said = f" ({found[0]})" if found else ""
            raise EnvironmentProblem(
                f"XLA_FLAGS = {flags!r}: XLA does not take it{said}; take that out, or unset it"
            )


_DEVICES = re.compile(r"--xla_force_host_platform_device_count=\d{1,4}")
"""What is used everywhere, and needs no look."""
_READ_FLAGS = "from jaxlib._jax import CompileOptions; CompileOptions().executable_build_options.debug_options"
_REFUSED = re.compile(
    r"Unknown flags? in XLA_FLAGS: .*|Couldn't interpret value .*|Could not open file \".*?\""
)
_READING_S = 60


def _check_jax() -> None:
    """Import JAX, and raise EnvironmentProblem naming the variable if the environment gives it a setting that cannot be."""
    try:
        import jax
    except ValueError as error:
        named = [name for name in os.environ if _names(str(error), name)]
        if not named:
            raise
        raise EnvironmentProblem(
            f"{named[0]} = {os.environ[named[0]]!r}: JAX does not take it; unset it, or give another value"
        ) from error
    values = jax.config.values
    for name in ("jax_compilation_cache_dir", "jax_dump_ir_to"):
        place = values.get(name)
        if place and paths.is_address(place) and not re.match(_BUCKETS, place):
            raise EnvironmentProblem(
                f"{name.upper()} = {place!r}: give a folder of this machine, or gs://..."
            )
    for name, ends, why in _UNUSABLE:
        value = values.get(name)
        if value and ends in (None, value):
            raise EnvironmentProblem(f"{name.upper()} = {value}: {why}; unset it")
    dump = values.get("jax_dump_ir_to")
    if dump and not re.match(_BUCKETS, dump):
        try:
            paths.local(dump, "JAX_DUMP_IR_TO").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EnvironmentProblem(
                f"JAX_DUMP_IR_TO = {dump!r}: {error.strerror}; unset it, or give a folder"
            ) from error


_BUCKETS = "(gs|s3)://[^/]"
_UNUSABLE = (
    ("jax_disable_jit", None, "steps are compiled here"),
    ("jax_no_execution", None, "steps are run here"),
    ("jax_no_tracing", None, "steps are compiled here"),
    ("jax_transfer_guard", "disallow_explicit", "batches have to come onto the devices"),
    ("jax_array_garbage_collection_guard", "fatal", "JAX itself would end the process"),
    ("jax_random_seed_offset", None, "seeds are those of the config"),
)
"""Settings of JAX, the value that cannot be (None: any but the default), and why."""


def _names(said: str, name: str) -> bool:
    """Return whether what JAX says about its settings is about a variable; of a number it says only that it is none."""
    if not name.startswith(("JAX_", "JAX2TF_")):
        return f"'{name}'" in said
    return name in said.upper().replace(".", "_") or f"base 10: {os.environ[name]!r}" in said


def _leave(job: Job, code: int, line: str) -> None:
    """End a process of a job at once: an orderly exit of JAX would wait for the others, who are not coming."""
    if job.count > 1:
        job.fail(code, line)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _check_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise EnvironmentProblem(
            "the current folder has been removed; change to another one"
        ) from error


def run() -> None:
    """Entry point of the `lbopt` command."""
    _streams.outlive_readers()
    # Libraries that are interrupted while they are imported abort, or say much; of a member its guard wants to hear.
    if (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
        and MEMBER_VARIABLE not in os.environ
    ):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:
        signal.signal(
            signal.SIGINT, signal.SIG_DFL
        )  # asked twice, it does not wait for JAX to end in order
        code = 130
    except SystemExit as ended:  # of --help, or of a process that did the work
        if not isinstance(ended.code, int | None):
            raise
        code = ended.code or 0
    sys.exit(_streams.exit_code(code))
