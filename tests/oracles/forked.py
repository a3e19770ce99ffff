"""`subprocess.Popen` for Python programs that need not import JAX and lbopt anew.

`Forked` starts a program as a fork of a server. A test process has one server, which has imported
what `lbopt` commands import, has initialised no backend and runs no threads. A start then costs a
few hundredths of a second of CPU instead of two seconds. A program whose environment changes what
imports do runs as an ordinary process.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import os
import pathlib
import pickle
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types

_IMPORTED = (
    *("flax.linen", "google.cloud.storage", "grain", "optax", "orbax.checkpoint"),
    *(
        "lbopt.cli._compilation_cache",
        "lbopt.cli._doctor",
        "lbopt.cli._evaluate",
        "lbopt.cli._main",
    ),
    *("lbopt.cli._sweep", "lbopt.cli._train", "lbopt.recipes", "lbopt.sweep", "lbopt.train"),
    "lbopt.workdir._tensorboard",
)
_SETTINGS = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")
"""Variables that JAX reads at its import; a fork sets their values in `jax.config`."""
_READ_WHEN_USED = (
    *("COLUMNS", "JAX_COORDINATOR_", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "LBOPT_", "LINES"),
    *("MLFLOW_", "PYTEST_", "WANDB_", "XLA_FLAGS"),
    # Set by libraries that the test process itself imports or uses.
    *(
        "ALLOW_MULTIPLE_LIBTPU_LOAD",
        "CRC32C_SW_MODE",
        "HF_HUB_OFFLINE",
        "TORCHINDUCTOR_CACHE_DIR",
        "TPU_",
    ),
    *("GOOGLE_AUTH_TOKEN_FOR_TESTING", "STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"),
)
"""Beginnings of the names of variables that no import reads."""
_SIZE = struct.Struct("q")
_MOST_DESCRIPTORS = 64
_PR_SET_CHILD_SUBREAPER = 36


class Forked(subprocess.Popen):
    """A Python program as a child of this process; takes the arguments of `subprocess.Popen`."""

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *settings
    ):
        _, _, shell, *pipes = settings[:9]
        *_, new_session, group = settings
        request = {
            "arguments": [str(argument) for argument in args],
            "descriptors": [0, 1, 2, *pass_fds],
            "environment": dict(os.environ if env is None else env),
            "folder": os.getcwd() if cwd is None else str(cwd),
            "ignores_interrupts": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
            "new_session": new_session,
            "parent": os.getpid(),
            "prepare": preexec_fn,
        }
        plain = close_fds and group == -1 and not (executable or shell)
        plain &= preexec_fn is None or preexec_fn.__module__.startswith("lbopt.")
        if not plain or not _can_fork(request):
            super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *settings
            )
            return

        given = (pipes[0], pipes[3], pipes[5])
        standard = [own if pipe == -1 else pipe for own, pipe in enumerate(given)]
        self.pid = _ask(_server(), request, [*standard, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)


def _can_fork(request):
    """Return whether a fork of the server does what an ordinary process would do."""
    padded = [*request["arguments"], "", ""]
    executable, first = padded[:2]
    if executable != sys.executable or (first.startswith("-") and first not in ("-c", "-m")):
        return False
    theirs = request["environment"]
    ours = _state["environment"]
    changed = {name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name)}
    return all(name in _SETTINGS or name.startswith(_READ_WHEN_USED) for name in changed)


_state = {"environment": dict(os.environ)}
"""The environment in which the server imports, and the connection to the server once it runs."""


def _server():
    """Return the connection to this process's server, which is started at the first call."""
    if "connection" not in _state:
        ours, theirs = socket.socketpair()
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env={
                **_state["environment"],
                "OPENBLAS_NUM_THREADS": "1",
            },  # NumPy's library starts threads
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        _state["connection"] = ours
        atexit.register(_end, ours, process)
    return _state["connection"]


def _end(connection, process):
    connection.close()
    process.wait()


def _ask(connection, request, descriptors):
    """Let a server fork a program, as a child of this process, and return its id."""
    content = pickle.dumps(request)
    libc = ctypes.CDLL(None)
    # The program is forked by a process that ends at once, and so becomes a child of this one.
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        socket.send_fds(connection, [_SIZE.pack(len(content))], descriptors)
        connection.sendall(content)
        return _SIZE.unpack(connection.recv(_SIZE.size, socket.MSG_WAITALL))[0]
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _serve(connection):
    """Fork a program for each request until the connection ends; return only in the programs.

    Returns:
      The request, and the descriptors that came with it.
    """
    while True:
        head, descriptors, _, _ = socket.recv_fds(connection, _SIZE.size, _MOST_DESCRIPTORS)
        if not head:
            os._exit(0)
        content = connection.recv(_SIZE.unpack(head)[0], socket.MSG_WAITALL)
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            os.close(reading)
            program = os.fork()
            if program == 0:
                os.close(writing)
                connection.close()
                return pickle.loads(content), descriptors
            os.write(writing, _SIZE.pack(program))
            os._exit(0)

        os.close(writing)
        os.waitpid(between, 0)
        connection.sendall(os.read(reading, _SIZE.size))
        for descriptor in (reading, *descriptors):
            os.close(descriptor)


def _become(request, descriptors, set_by_imports):
    """Make this fork a process such as `subprocess.Popen` would have started."""
    # The parent's death is a signal to a process that asked for it, and the parent still changes.
    while os.getppid() != request["parent"]:
        time.sleep(0.001)

    free = 1 + max([*descriptors, *request["descriptors"]])
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, free) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for copy, wanted in zip(copies, request["descriptors"], strict=True):
        os.dup2(copy, wanted)
        os.close(copy)

    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"] | set_by_imports)
    if not request["ignores_interrupts"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["new_session"]:
        os.setsid()
    if request["prepare"] is not None:
        request["prepare"]()
    if "coverage" in sys.modules:  # this fork's lines belong to the test that started it
        measuring = sys.modules["coverage"].Coverage.current()
        if measuring is not None:
            measuring.switch_context(os.environ.get("LBOPT_REACHING_TEST", ""))
    for name in _SETTINGS:
        value = os.environ.get(name)
        if value is not None:
            jax.config.update(name.lower(), {"true": True, "false": False}.get(value, value))


def _fork_own_server():
    """Let the `lbopt` processes that this one starts be forks too, from a server of its own.

    It is forked before this process has threads.
    """
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nowhere, descriptor)
        os.close(nowhere)
        return _serve(theirs)

    theirs.close()
    _state["connection"] = ours
    subprocess.Popen = Forked
    return None


def _run(arguments):
    """Run a program as `python` does, given the arguments of `python`."""
    kind, *arguments = arguments
    if kind in ("-c", "-m"):
        what, *arguments = arguments
    else:
        what = kind
    sys.path[0] = {"-c": "", "-m": os.getcwd()}.get(kind, os.path.dirname(os.path.abspath(what)))
    sys.argv = [kind, *arguments]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return

    program = types.ModuleType("__main__")
    sys.modules["__main__"] = program
    if kind != "-c":
        program.__file__ = what
    text = what if kind == "-c" else pathlib.Path(what).read_text()
    exec(compile(text, "<string>" if kind == "-c" else what, "exec"), program.__dict__)


def _exit(code):
    """End this process as Python does, but without freeing one by one the objects of imports."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _main(connection):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, and they end this process
    before = dict(os.environ)
    for name in _IMPORTED:
        importlib.import_module(name)
    _process.import_tensorboard_writer()
    set_by_imports = {k: v for k, v in os.environ.items() if before.get(k) != v}
    gc.collect()
    gc.freeze()

    request, descriptors = _serve(connection)
    _become(request, descriptors, set_by_imports)
    own = request["arguments"][1:3] == ["-m", "lbopt"] and _fork_own_server()
    if own:
        request, descriptors = own
        _become(request, descriptors, {})
    try:
        _run(request["arguments"][1:])
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        _exit(ended.code or 0)
    _exit(0)


if __name__ == "__main__":
    import jax

    from lbopt.cli import _process

    _main(socket.socket(fileno=int(sys.argv[1])))
