"""Only regular files are opened; others are refused without waiting."""

import errno
import os
import socket

import pytest
from refusal import raised

from lbopt._regular import open_regular, read_regular


@pytest.mark.parametrize("mode", ["rb", "ab", "a+b", "r", "wb"])
def test_a_fifo_or_a_device_is_refused_at_once(tmp_path, mode):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for name, kind in {"fifo": "FIFO", "link": "device", "socket": "socket"}.items():
            with raised(OSError, names={kind}) as caught:
                open_regular(tmp_path / name, mode)
            error = caught.value
            assert (error.errno, error.filename) == (errno.EINVAL, str(tmp_path / name))


def test_regular_files_and_links_to_them_are_opened_as_ever(tmp_path):
    with open_regular(tmp_path / "new", "w", encoding="utf-8") as stream:
        stream.write("\u00e9")
    with open_regular(tmp_path / "new", "ab") as stream:
        stream.write(b"!")
    (tmp_path / "link").symlink_to("new")
    assert read_regular(tmp_path / "link") == "\u00e9!".encode()
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path)
