"""Buckets in the memory of the test process, in place of those of Google Cloud Storage."""

import contextlib
from unittest import mock

from fsspec.implementations.memory import MemoryFileSystem

from lbopt import _bucket_files


class MemoryBuckets(MemoryFileSystem):
    """fsspec's file system in memory under gs://; each instance begins empty."""

    protocol = ("gs", "gcs")
    cachable = False

    def __init__(self):
        super().__init__()
        self.store = {}
        self.pseudo_dirs = [""]
        self.copied = []

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("gs://", "memory://"))

    def find(self, path, detail=False, **options):
        """Return all objects whose names begin with `path`, as gcsfs did for that of a file."""
        place = self._strip_protocol(path)
        found = {name: self.info(name) for name in self.store if name.startswith(place)}
        return found if detail else list(found)

    def get_file(self, rpath, lpath, **options):
        self.copied.append(rpath)
        super().get_file(rpath, lpath, **options)

    def fill(self, address, folder):
        """Copy a folder of this machine to an address, byte for byte."""
        for file in filter(lambda entry: entry.is_file(), folder.rglob("*")):
            self.pipe_file(f"{address}/{file.relative_to(folder).as_posix()}", file.read_bytes())

    def names(self):
        return sorted(name.lstrip("/") for name in self.store)


@contextlib.contextmanager
def serving():
    """Let lbopt read and write the returned buckets; a workdir in a bucket needs a real client."""
    buckets = MemoryBuckets()
    with mock.patch.object(_bucket_files, "_client", return_value=buckets):
        yield buckets


@contextlib.contextmanager
def forbidding():
    """Let every request to a bucket fail, and yield the mock that counts them."""
    client = mock.MagicMock()
    refusal = PermissionError("Forbidden: the caller has no access")
    client.configure_mock(**{f"{name}.side_effect": refusal for name in _REQUESTS})
    with mock.patch.object(_bucket_files, "_client", return_value=client):
        yield client


_REQUESTS = ("find", "get", "info", "pipe_file", "put_file", "rm_file")
