"""Folders that the processes of a test run share, so that what is costly is made once."""

import contextlib
import fcntl
import os


@contextlib.contextmanager
def shared_folder(tmp_path_factory, name):
    """Yield a folder of the test run, which no other process enters until the block ends."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # every worker has a folder of its own in it
    folder = root / f"shared-{name}"
    folder.mkdir(exist_ok=True)
    with open(root / f"shared-{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
