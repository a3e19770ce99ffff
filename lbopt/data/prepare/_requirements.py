"""What a data set needs before hours go into it: archives got by hand, packages, room on the disk, a network."""

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
from lbopt.errors import EnvironmentProblem

_PATIENCE_S = 20.0


class Archives(NamedTuple):
    """Files that people have to fetch.

    Attributes:
      sizes: name -> bytes.
      origin: where they are, and what it takes to get them.
    """

    sizes: dict[str, int]
    origin: str


ARCHIVES = {
    # As in TFDS's own list of checksums and its instructions.
    "imagenet2012": Archives(
        {"ILSVRC2012_img_train.tar": 147_897_477_120, "ILSVRC2012_img_val.tar": 6_744_924_160},
        "https://image-net.org/download-images (after registration)",
    )
}
_READ_BY_TENSORFLOW = ("cifar10", "cifar100", "fashion_mnist", "imagenet2012", "mnist")
"""TFDS reads their archives through `tf.io`, and says so only when it has downloaded them."""
PACKAGES = {
    **{name: {"tensorflow": "tensorflow"} for name in _READ_BY_TENSORFLOW},
    "wikipedia": {
        "apache_beam": "apache-beam",
        "mwparserfromhell": "mwparserfromhell",
        "mwxml": "mwxml",
    },
}
"""What preparing takes beside TFDS: the name to import -> the name for pip."""


def check(builder: Any, root: pathlib.Path, manual_dir: pathlib.Path) -> None:
    """Check all of it.

    Args:
      builder: of TFDS.
      root: folder of data sets.
      manual_dir: where files got by hand are.

    Raises:
      EnvironmentProblem: saying what to do.
    """
    todo = [step for step in (_by_hand(builder, manual_dir), _packages(builder)) if step]
    if todo:
        raise EnvironmentProblem(f"{config_name(builder)}: {'; and '.join(todo)}")
    _check_room(builder, root)
    if not builder.MANUAL_DOWNLOAD_INSTRUCTIONS:
        _check_network(builder, root)


def _by_hand(builder: Any, manual_dir: pathlib.Path) -> str:
    archives, instructions = ARCHIVES.get(builder.name), builder.MANUAL_DOWNLOAD_INSTRUCTIONS
    if archives is not None:
        missing = [
            f"{name} ({size / 2**30:.0f} GiB)"
            for name, size in archives.sizes.items()
            if not _is_whole(manual_dir / name, size)
        ]
        return (
            f"put {' and '.join(missing)} from {archives.origin} into {manual_dir}"
            if missing
            else ""
        )
    if instructions and not (manual_dir.is_dir() and any(manual_dir.iterdir())):
        return f"{manual_dir} is empty or not there, and this has to be fetched by hand: {' '.join(instructions.split())}"
    return ""


def _is_whole(file: pathlib.Path, size: int) -> bool:
    if not file.is_file():
        return False
    if (found := file.stat().st_size) < size:
        raise EnvironmentProblem(
            f"{file} has {found} of {size} bytes: it was cut short; fetch it again"
        )
    return True


def _packages(builder: Any) -> str:
    needed = PACKAGES.get(builder.name, {})
    missing = [
        package for module, package in needed.items() if importlib.util.find_spec(module) is None
    ]
    fix = f"pip install {' '.join(missing)} (in any environment: preparing takes it, training does not)"
    return fix if missing else ""


def needed_bytes(builder: Any) -> int:
    """Return how much room it takes at least, 0 if nothing is known.

    The files' sizes stand for what is downloaded, or, for archives of photographs got by hand, for what is written.
    """
    total = int(builder.info.download_size or 0) + int(builder.info.dataset_size or 0)
    if total or builder.BUILDER_CONFIGS:  # the list of files is one for all configurations
        return total
    return sum(int(info.size) for info in (builder.url_infos or {}).values())


def _check_room(builder: Any, root: pathlib.Path) -> None:
    place = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    needed, free = needed_bytes(builder), shutil.disk_usage(place).free
    if needed > free:
        raise EnvironmentProblem(
            f"{config_name(builder)} takes at least {needed / 2**30:.1f} GiB and {root} has {free / 2**30:.1f} GiB free; "
            "free some, or give another --data_dir"
        )


def _check_network(builder: Any, root: pathlib.Path) -> None:
    """Ask for one of the files: TFDS itself tries for minutes before it gives up."""
    address = next((url for url in builder.url_infos or {} if url.startswith("http")), None)
    downloads = (root / "downloads" / builder.name).glob("*")
    if address is None or any(".tmp." not in file.name for file in downloads):
        return  # there is nothing to ask for, or some of it is there already
    try:
        urllib.request.urlopen(address, timeout=_PATIENCE_S).close()
    except urllib.error.HTTPError:
        pass  # somebody answered
    except OSError as error:
        if isinstance(getattr(error, "reason", None), ssl.SSLError):
            return  # likewise, and TFDS brings its own certificates
        name, host = config_name(builder), urllib.parse.urlsplit(address).hostname
        raise EnvironmentProblem(
            f"{name} cannot be downloaded: {host} does not answer ({error}); mend the network or HTTPS_PROXY, "
            f"or copy a prepared {name} into {root}"
        ) from error
