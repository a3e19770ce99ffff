"""Checks before a data set is prepared, which can take hours.

They look for the archives that the user has to download, packages, disk space and a network.
"""

from __future__ import annotations

import importlib.util
import pathlib
import shutil
import ssl
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, NamedTuple

from lbopt.data.prepare._builders import config_name
from lbopt.data.prepare._idx import CHECKSUMS
from lbopt.errors import EnvironmentProblem

_TIMEOUT_S = 20.0


class Archives(NamedTuple):
    """Files that the user has to download.

    Attributes:
      sizes: Name of a file -> its bytes.
      origin: Address, and the condition for the download.
    """

    sizes: dict[str, int]
    origin: str


ARCHIVES = {
    # Sizes and names are from TFDS's list of checksums and its instructions.
    "imagenet2012": Archives(
        {"ILSVRC2012_img_train.tar": 147_897_477_120, "ILSVRC2012_img_val.tar": 6_744_924_160},
        "https://image-net.org/download-images (after registration)",
    )
}
_READ_BY_TENSORFLOW = ("cifar10", "cifar100", "fashion_mnist", "imagenet2012", "mnist")
"""Data sets whose archives TFDS reads through `tf.io`. It notices a missing TensorFlow only after
the download."""
PACKAGES = {
    **{name: {"tensorflow": "tensorflow"} for name in _READ_BY_TENSORFLOW},
    "wikipedia": {
        "apache_beam": "apache-beam",
        "mwparserfromhell": "mwparserfromhell",
        "mwxml": "mwxml",
    },
}
"""Data set -> packages that preparing it needs beside TFDS: module -> name for pip."""


def check(builder: Any, root: pathlib.Path, manual_dir: pathlib.Path) -> None:
    """Raise `EnvironmentProblem` with the next steps unless a data set can be prepared.

    Args:
      builder: Builder of TFDS.
      root: Folder of data sets.
      manual_dir: Folder of the files that the user downloaded.
    """
    steps = [_missing_files(builder, manual_dir), _missing_packages(builder)]
    if any(steps):
        fix = "; and ".join(step for step in steps if step) + _or_files(builder)
        also = ["idx_dir"]
        raise EnvironmentProblem("name", config_name(builder), fix, code="missing", also=also)
    check_disk_space(config_name(builder), needed_bytes(builder), root)
    if not builder.MANUAL_DOWNLOAD_INSTRUCTIONS:
        _check_network(builder, root)


def _missing_files(builder: Any, manual_dir: pathlib.Path) -> str:
    """Return instructions for the files that the user has to download; "" if they are there."""
    archives = ARCHIVES.get(builder.name)
    if archives is not None:
        missing = [
            f"{name} ({size / 2**30:.0f} GiB)"
            for name, size in archives.sizes.items()
            if not _is_complete(manual_dir / name, size)
        ]
        put = f"put {' and '.join(missing)} from {archives.origin} into {manual_dir}"
        return put if missing else ""

    instructions = builder.MANUAL_DOWNLOAD_INSTRUCTIONS
    if instructions and not (manual_dir.is_dir() and any(manual_dir.iterdir())):
        return (
            f"{manual_dir} is empty or missing, and you have to download this yourself: "
            f"{' '.join(instructions.split())}"
        )
    return ""


def _is_complete(file: pathlib.Path, size: int) -> bool:
    """Return whether a file exists; raise `EnvironmentProblem` if it is too short."""
    if not file.is_file():
        return False
    found = file.stat().st_size
    if found < size:
        fix = f"it has {found} of {size} bytes, so it was cut short; download it again"
        raise EnvironmentProblem(str(file), reason=fix, code="damaged")
    return True


def _missing_packages(builder: Any) -> str:
    """Return the command that installs the missing packages; "" if none is missing."""
    needed = PACKAGES.get(builder.name, {})
    missing = [
        package for module, package in needed.items() if importlib.util.find_spec(module) is None
    ]
    fix = (
        f"pip install {' '.join(missing)} (in any environment: preparing needs it, training does "
        "not)"
    )
    return fix if missing else ""


def needed_bytes(builder: Any) -> int:
    """Return a lower bound of the disk space that a data set needs; 0 if nothing is known.

    The size of the files stands for the download or, for archives of photographs that the user
    downloads, for the prepared data set.
    """
    total = int(builder.info.download_size or 0) + int(builder.info.dataset_size or 0)
    if total or builder.BUILDER_CONFIGS:  # all configurations share one list of files
        return total
    return sum(int(info.size) for info in (builder.url_infos or {}).values())


def check_disk_space(name: str, needed: int, root: pathlib.Path) -> None:
    """Raise `EnvironmentProblem` unless a data set of at least `needed` bytes fits on the disk."""
    existing = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        fix = (
            f"it takes at least {needed / 2**30:.1f} GiB and {root} has {free / 2**30:.1f} GiB "
            "free; free some, or give another {data_dir}"
        )
        raise EnvironmentProblem("name", name, fix, code="resource", also=["data_dir"])


def _check_network(builder: Any, root: pathlib.Path) -> None:
    """Request one of the files. TFDS itself tries for minutes before it gives up."""
    address = next((url for url in builder.url_infos or {} if url.startswith("http")), None)
    downloads = (root / "downloads" / builder.name).glob("*")
    if address is None or any(".tmp." not in file.name for file in downloads):
        return  # there is nothing to download, or a part of it was downloaded before
    try:
        urllib.request.urlopen(address, timeout=_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        pass  # the server answered
    except OSError as error:
        if isinstance(getattr(error, "reason", None), ssl.SSLError):
            return  # the server answered, and TFDS brings its own certificates
        name = config_name(builder)
        host = urllib.parse.urlsplit(address).hostname
        fix = (
            f"it cannot be downloaded, because {host} does not answer ({error}); repair the "
            f"network or HTTPS_PROXY, or copy a prepared {name} into {root}{_or_files(builder)}"
        )
        also = ["idx_dir"]
        raise EnvironmentProblem("name", name, fix, code="resource", also=also) from error


def _or_files(builder: Any) -> str:
    """Return the way around a download and TensorFlow; "" for a data set without IDX files."""
    return (
        "; or give the folder of its IDX files with {idx_dir}" if builder.name in CHECKSUMS else ""
    )
