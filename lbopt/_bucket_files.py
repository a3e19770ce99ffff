"""Files and folders of buckets of Google Cloud Storage: copied to this machine, and written.

What is read is copied as a whole, so that every reader, also one that maps memory, sees a path of
this machine. `lbopt.paths` decides which paths are addresses of buckets.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lbopt import _unfinished, errors
from lbopt.errors import EnvironmentProblem, MissingPackage, UserError, require

CACHE_VARIABLE = "LBOPT_BUCKET_CACHE"
"""Environment variable with the folder in which copies are kept from process to process."""
_SCHEME = "gs://"
_VERSIONS = ("size", "generation", "md5Hash", "etag", "updated", "created")
"""Fields of an object's description that tell one content from another."""
_LAST = "config.json"
"""File that tells readers what a folder is; it is written last."""


def copied(
    address: str, field: str, cache: pathlib.Path | None, beside: Sequence[str] = ()
) -> pathlib.Path:
    """Return the path of a copy of a file or folder in a bucket.

    The name of a copy depends on the versions of its objects: it is made anew after a change, and
    shared otherwise. It appears when it is complete.

    Args:
      address: gs://BUCKET/PATH.
      field: Flag, field or argument that holds it, for errors.
      cache: Folder of the copies; None for one that is removed when this process ends.
      beside: Names of files in the same folder that are copied too, if they exist.

    Raises:
      UserError: If nothing is there, or if the name of an object is none on this machine.
      EnvironmentProblem: If the bucket cannot be read, or this machine's disk not be written.
    """
    with client_errors(field, address, "read"):
        client = _client(field, address)
        found = _objects(client, address)
        require(found, field, address, "nothing is there; correct the address", code="missing")
        around = address.rpartition("/")[0]
        for name in beside:
            found |= _objects(client, f"{around}/{name}")

    versions = {name: [info.get(key) for key in _VERSIONS] for name, info in found.items()}
    state = json.dumps([address, versions], sort_keys=True, default=str)
    kept = _of_this_process() if cache is None else cache
    copy = kept / hashlib.sha256(state.encode()).hexdigest()[:16]
    if not copy.is_dir():
        with (
            client_errors(field, address, "read"),
            _disk_errors(field, address, kept),
            _alone(kept),
        ):
            if not copy.is_dir():  # another process may have made it meanwhile
                _copy(client, found, copy, field, address)
    errors.show_original(f"{copy}/", _SCHEME)
    return copy / address.removeprefix(_SCHEME)


def exists(address: str, field: str) -> bool:
    """Return whether a file or folder is at an address."""
    with client_errors(field, address, "read"):
        client = _client(field, address)
        client.invalidate_cache()  # another process may have written since
        try:
            client.info(address)
            return True
        except FileNotFoundError:
            return False


def names_below(address: str, field: str) -> list[str]:
    """Return the paths of all files of a folder in a bucket, without the folder; [] for none."""
    with client_errors(field, address, "read"):
        found = _objects(_client(field, address), address)
    folder = address.removeprefix(_SCHEME) + "/"
    return [name.removeprefix(folder) for name in found if name.startswith(folder)]


@contextlib.contextmanager
def written(address: str, field: str) -> Iterator[pathlib.Path]:
    """Yield a path of this machine, and write the file or folder that is made there to a bucket.

    An object appears when it is complete. After an error none of them is left.

    Raises:
      EnvironmentProblem: If the bucket cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="lbopt-bucket-") as folder:
        made = pathlib.Path(folder) / address.rpartition("/")[2]
        yield made
        files = {address: made}
        if made.is_dir():
            inside = [file for file in sorted(made.rglob("*")) if file.is_file()]
            inside.sort(key=lambda file: file.name == _LAST)
            files = {f"{address}/{file.relative_to(made).as_posix()}": file for file in inside}
        with client_errors(field, address, "written"):
            _upload(_client(field, address), files, whole=not made.is_dir())


def check_writable(address: str, field: str) -> None:
    """Raise `EnvironmentProblem` unless an object can be written beside an address."""
    with client_errors(field, address, "written"):
        client = _client(field, address)
        probe = f"{address}.{uuid.uuid4().hex}"
        client.pipe_file(probe, b"")
        client.rm_file(probe)


def _client(field: str, address: str) -> Any:
    """Return fsspec's file system of the buckets."""
    import_client(field, address)
    import fsspec

    # With the options of epath, so that both share one cache of listings.
    return fsspec.filesystem("gcs", finalize_on_close=True)


def import_client(field: str, address: str) -> None:
    """Import the buckets' client without its support for hierarchical namespaces.

    That support needs a permission on the bucket itself, and lbopt needs only the bucket's objects.
    gcsfs reads the variable once, when it is imported; a program that set it, or imported gcsfs
    before, keeps its own choice.

    Paths in buckets use this client too where TensorFlow is installed, unless EPATH_USE_TF says
    otherwise: TensorFlow's own client signs in and reports errors in another way.

    Raises:
      EnvironmentProblem: If the client is not installed.
    """
    os.environ.setdefault("EPATH_USE_TF", "false")
    variable = "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"
    chosen = variable in os.environ
    if not chosen:
        os.environ[variable] = "false"
    try:
        import gcsfs  # noqa: F401
        from etils import epath  # noqa: F401
    except ImportError as error:
        fix = "gcsfs is not installed; run pip install 'lbopt[gcs]'"
        raise MissingPackage(field, address, fix) from error
    finally:
        if not chosen:
            del os.environ[variable]


@contextlib.contextmanager
def client_errors(field: str, address: str, doing: str) -> Iterator[None]:
    """Turn errors of the buckets' client into an `EnvironmentProblem` of one line.

    Args:
      field: Flag, field or argument that holds the address.
      address: The address.
      doing: "read" or "written", for the message.
    """
    try:
        yield
    except (UserError, EnvironmentProblem):
        raise
    except Exception as error:  # of many classes: HTTP, credentials, DNS
        reason = " ".join((str(error) or type(error).__name__).split())[:200]
        fix = (
            f"cannot be {doing} ({reason}); give this machine's account the right to read and "
            "write its objects, or use another bucket"
        )
        raise EnvironmentProblem(field, address, fix, code="resource") from error


@contextlib.contextmanager
def _alone(cache: pathlib.Path) -> Iterator[None]:
    """Wait until no other process copies into a folder; without locks, both make the same copy."""
    cache.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(cache, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _disk_errors(field: str, address: str, cache: pathlib.Path) -> Iterator[None]:
    """Turn errors of this machine's disk into an `EnvironmentProblem`."""
    try:
        yield
    except OSError as error:
        of_network = isinstance(error, ConnectionError | TimeoutError)
        if error.errno is None or type(error).__module__ != "builtins" or of_network:
            raise  # an error of the buckets' client
        fix = (
            f"its copy in {cache} cannot be written ({error.strerror}); name another folder by "
            f"{CACHE_VARIABLE}"
        )
        raise EnvironmentProblem(field, address, fix, code="resource") from error


def _objects(client: Any, address: str) -> dict[str, Mapping[str, Any]]:
    """Return the objects at an address and below it: BUCKET/PATH -> description."""
    place = address.removeprefix(_SCHEME)
    listed: Mapping[str, Mapping[str, Any]] = {}
    with contextlib.suppress(FileNotFoundError):
        listed = client.find(address, detail=True)
    found = {name.lstrip("/"): info for name, info in listed.items()}
    # For a file the client also lists those whose names begin with its name. A name with a slash
    # at its end marks a folder.
    return {
        name: info
        for name, info in found.items()
        if (name == place or name.startswith(f"{place}/")) and not name.endswith("/")
    }


def _copy(
    client: Any,
    found: Mapping[str, Mapping[str, Any]],
    copy: pathlib.Path,
    field: str,
    address: str,
) -> None:
    """Copy objects into a new folder, under their names with those of their buckets."""
    for name in found:
        fix = f"object {name!r} has no name on this machine; copy it under another name"
        is_name = not {"", ".", ".."} & set(name.split("/")) and "\0" not in name
        require(is_name, field, address, fix)

    needed = sum(info["size"] for info in found.values())
    free = shutil.disk_usage(copy.parent).free
    if needed > free:
        fix = (
            f"its copy takes {needed / 1e9:.1f} GB, and {copy.parent} has {free / 1e9:.1f} GB "
            f"free; name another folder by {CACHE_VARIABLE}"
        )
        raise EnvironmentProblem(field, address, fix, code="resource")

    with _unfinished.folder(copy) as partial:
        files = {name: partial / name for name in found}
        for file in files.values():
            file.parent.mkdir(parents=True, exist_ok=True)
        client.get([_SCHEME + name for name in files], [str(file) for file in files.values()])
        for name, file in files.items():
            if file.stat().st_size != found[name]["size"]:
                fix = f"object {name!r} changed while it was copied; run the same command again"
                raise EnvironmentProblem(field, address, fix, code="conflict")
            with open(file, "rb") as stream:  # a kept copy is not checked again
                os.fsync(stream.fileno())
        try:
            partial.rename(copy)
        except OSError:
            if not copy.is_dir():  # without locks
                raise


def _upload(client: Any, files: Mapping[str, pathlib.Path], whole: bool) -> None:
    """Write files to their addresses; after an error remove them, unless one replaced another."""
    done = []
    try:
        for address, file in files.items():
            client.put_file(str(file), address)
            done.append(address)
    except BaseException:
        for address in () if whole else done:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                client.rm_file(address)
        raise


@functools.cache
def _of_this_process() -> pathlib.Path:
    """Return a new folder that is removed when this process ends."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="lbopt-bucket-"))
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: pathlib.Path, process: int) -> None:
    if os.getpid() == process:  # a fork has the function too
        shutil.rmtree(folder, ignore_errors=True)
