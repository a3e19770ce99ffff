"""What is in a bucket is copied as a whole and once, and written so that a reader sees it whole."""

import concurrent.futures
import contextlib
import errno
import os
import subprocess
import sys
import time
from unittest import mock

import gcsfs
import memory_buckets
import pytest
from buckets import objects, read, remove, serving
from refusal import names_in, refused, troubled

from lbopt import _bucket_files, paths

PLACE = "gs://bucket/some/data"


@pytest.fixture
def buckets(tmp_path, monkeypatch):
    """Return buckets in memory; copies are kept below `tmp_path`."""
    monkeypatch.setenv("LBOPT_BUCKET_CACHE", str(tmp_path / "cache"))
    with memory_buckets.serving() as found:
        yield found


def test_a_folder_is_copied_once_and_anew_after_a_change(buckets, tmp_path):
    buckets.pipe_file(f"{PLACE}/a.txt", b"1")
    buckets.pipe_file(f"{PLACE}/deep/b.txt", b"2")
    buckets.pipe_file(f"{PLACE}-other/c.txt", b"its name begins with the folder's")

    folder = paths.readable(f"{PLACE}/", "path")
    assert folder.is_relative_to(tmp_path / "cache")
    assert folder.parts[-3:] == ("bucket", "some", "data")
    inside = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    assert inside == {"a.txt", "deep/b.txt"}
    assert (folder / "deep" / "b.txt").read_bytes() == b"2"

    assert paths.readable(PLACE, "path") == folder
    assert len(buckets.copied) == 2
    buckets.pipe_file(f"{PLACE}/a.txt", b"3")  # of the same size
    assert (paths.readable(PLACE, "path") / "a.txt").read_bytes() == b"3"
    assert (folder / "a.txt").read_bytes() == b"1", "a reader may still have it"


def test_two_readers_at_once_make_one_copy(buckets, monkeypatch):
    buckets.pipe_file(f"{PLACE}/a", b"1")
    get_file = buckets.get_file

    def slowly(source, target, **options):
        time.sleep(0.2)
        get_file(source, target, **options)

    monkeypatch.setattr(buckets, "get_file", slowly)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda _: paths.readable(PLACE, "path"), range(2)))
    assert found[0] == found[1]
    assert len(buckets.copied) == 1


def test_a_file_is_copied_with_the_files_that_belong_to_it(buckets):
    for name in ("vocab.txt", "vocab.txt.old", "settings.json", "large.bin"):
        buckets.pipe_file(f"{PLACE}/{name}", name.encode())
    file = paths.readable(f"{PLACE}/vocab.txt", "path", ["settings.json", "missing.json"])
    assert {entry.name for entry in file.parent.iterdir()} == {"vocab.txt", "settings.json"}
    assert file.read_bytes() == b"vocab.txt"
    with refused("path", f"{PLACE}/vocab", "missing"):
        paths.readable(f"{PLACE}/vocab", "path")


@pytest.mark.parametrize("name", ["../../outside", "a//b", "a/./b", "a\0b"])
def test_a_name_that_leaves_the_folder_is_refused(name, buckets, tmp_path):
    buckets.pipe_file(f"{PLACE}/a", b"1")
    buckets.store[f"/bucket/some/data/{name}"] = buckets.store["/bucket/some/data/a"]
    with refused("path", PLACE, "value"):
        paths.readable(PLACE, "path")
    assert buckets.copied == []


def test_a_copy_that_fails_leaves_nothing(buckets, tmp_path, monkeypatch):
    buckets.pipe_file(f"{PLACE}/a", b"1")
    buckets.pipe_file(f"{PLACE}/b", b"22")
    get_file = buckets.get_file

    def cut_off(source, target, **options):
        get_file(source, target, **options)
        if source.endswith("b"):
            os.truncate(target, 1)

    monkeypatch.setattr(buckets, "get_file", cut_off)
    with troubled("path", PLACE, "conflict"):
        paths.readable(PLACE, "path")
    assert list((tmp_path / "cache").iterdir()) == []

    monkeypatch.setattr(buckets, "get_file", get_file)
    usage = type(_bucket_files.shutil.disk_usage("/"))
    monkeypatch.setattr(_bucket_files.shutil, "disk_usage", lambda folder: usage(9, 7, 2))
    with troubled("path", PLACE, "resource") as caught:
        paths.readable(PLACE, "path")
    assert "LBOPT_BUCKET_CACHE" in names_in(caught)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("error", "advised"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), False),
        (FileNotFoundError("bucket/some/data/a"), False),
    ],
)
def test_whether_the_disk_or_the_bucket_is_at_fault(error, advised, buckets, monkeypatch):
    buckets.pipe_file(f"{PLACE}/a", b"1")
    monkeypatch.setattr(buckets, "get_file", mock.Mock(side_effect=error))
    with troubled("path", PLACE, "resource") as caught:
        paths.readable(PLACE, "path")
    assert ("LBOPT_BUCKET_CACHE" in names_in(caught)) == advised


def test_a_cache_that_cannot_be_written(buckets, tmp_path, monkeypatch):
    buckets.pipe_file(f"{PLACE}/a", b"1")
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("LBOPT_BUCKET_CACHE", str(tmp_path / "file"))
    with troubled("path", PLACE, "resource") as caught:
        paths.readable(PLACE, "path")
    assert {"LBOPT_BUCKET_CACHE", str(tmp_path / "file")} <= names_in(caught)


@pytest.mark.process
def test_copies_without_a_cache_end_with_the_process(tmp_path):
    """A fork that ends first leaves them."""

    program = """
import os, sys
import memory_buckets
from lbopt import paths
with memory_buckets.serving() as buckets:
    buckets.pipe_file("gs://bucket/a", b"1")
    file = paths.readable("gs://bucket/a", "path")
child = os.fork()
if not child:
    sys.exit()
os.waitpid(child, 0)
print(file, file.read_text())
"""

    variables = {name: value for name, value in os.environ.items() if "BUCKET" not in name}
    variables["PYTHONPATH"] = os.pathsep.join(sys.path)
    variables["TMPDIR"] = str(tmp_path)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(tmp_path))
    assert done.stdout.endswith("/bucket/a 1\n")
    assert list(tmp_path.iterdir()) == []


def test_beside_tensorflow_a_bucket_keeps_its_client(tmp_path):
    """Where TensorFlow is installed, epath would read buckets with TensorFlow's client."""
    (tmp_path / "tensorflow.py").write_text("raise AssertionError('imported')")
    program = """
from lbopt.workdir import bucket_path
print((bucket_path("gs://bucket/run") / "config.json").exists())
"""
    with serving() as (_, variables):
        variables["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_folder_is_written_with_its_description_last(buckets, monkeypatch):
    order = []
    put_file = buckets.put_file
    monkeypatch.setattr(
        buckets, "put_file", lambda file, to: (order.append(to), put_file(file, to))
    )
    with paths.written(PLACE, "--output") as made:
        (made / "deep").mkdir(parents=True)
        for name in ("config.json", "model.safetensors", "deep/vocab.txt"):
            (made / name).write_text(name)
        assert order == []
    assert order[-1] == f"{PLACE}/config.json"
    assert buckets.cat_file(f"{PLACE}/deep/vocab.txt") == b"deep/vocab.txt"
    assert len(buckets.names()) == 3


def test_what_cannot_be_written_whole_is_not_left(buckets, monkeypatch):
    put_file = buckets.put_file

    def full(file, to):
        if to.endswith("b"):
            raise OSError("quota exceeded")
        put_file(file, to)

    monkeypatch.setattr(buckets, "put_file", full)
    with troubled("--output", PLACE, "resource"), paths.written(PLACE, "--output") as made:
        made.mkdir()
        (made / "a").write_text("1")
        (made / "b").write_text("2")
    assert buckets.names() == []
    with contextlib.suppress(KeyError), paths.written(PLACE, "--output") as made:
        made.write_text("half")
        raise KeyError
    assert buckets.names() == []


@pytest.mark.process
def test_with_the_client_of_google_cloud_storage(tmp_path, monkeypatch):
    monkeypatch.setenv("LBOPT_BUCKET_CACHE", str(tmp_path))
    with serving() as (address, variables):
        for name in ("STORAGE_EMULATOR_HOST", "GOOGLE_AUTH_TOKEN_FOR_TESTING"):
            monkeypatch.setenv(name, variables[name])
        gcsfs.GCSFileSystem.clear_instance_cache()
        try:
            _check_client(address)
        finally:
            gcsfs.GCSFileSystem.clear_instance_cache()


def _check_client(address):
    assert not paths.exists_in_bucket(PLACE, "--output")
    with refused("path", PLACE, "missing"):
        paths.readable(PLACE, "path")

    with paths.written(PLACE, "--output") as made:
        made.mkdir()
        (made / "a.txt").write_text("1")
        (made / "empty").write_text("")
    assert paths.exists_in_bucket(PLACE, "--output")
    assert sorted(paths.names_below(PLACE, "path")) == ["a.txt", "empty"]
    assert (paths.readable(PLACE, "path") / "a.txt").read_text() == "1"

    for text in ("2", "3"):  # an object is replaced
        assert paths.writable(f"{PLACE}/a.txt", "--output") == f"{PLACE}/a.txt"
        paths.write_text(f"{PLACE}/a.txt", text, "--output")
        assert paths.readable(f"{PLACE}/a.txt", "path").read_text() == text
    assert read(address, "some/data/a.txt") == "3"
    assert set(objects(address)) == {"some/data/a.txt", "some/data/empty"}

    paths.write_text(f"{PLACE}/a.txt.old", "4", "--output")  # the client lists it too
    file = paths.readable(f"{PLACE}/a.txt", "path", ["empty"])
    assert {entry.name for entry in file.parent.iterdir()} == {"a.txt", "empty"}
    assert "a.txt" in paths.names_below(PLACE, "path")
    for name in objects(address):  # as another process would
        remove(address, name)
    assert not paths.exists_in_bucket(f"{PLACE}/a.txt", "--output")
    assert paths.names_below(PLACE, "path") == []

    for use in (paths.readable, paths.writable, paths.exists_in_bucket, paths.names_below):
        with troubled("field", "gs://bucket/forbidden/x", "resource"):
            use("gs://bucket/forbidden/x", "field")
