"""A curl that knows the metadata server of the machine it runs on."""

import os
import pathlib
import sys
import time
import urllib.parse

import cloud

BASE = "http://metadata.google.internal/computeMetadata/v1/instance/"


def main(argv):
    """Print a metadata value; with wait_for_change, once it has changed or the time is over."""
    words = list(argv)
    url = argv[-1]
    if (
        "Metadata-Flavor: Google" not in words
        or not url.startswith(BASE)
        or "--max-time" not in words
    ):
        cloud.refuse("curl: the metadata server wants its header, and a caller wants a limit")
    parts = urllib.parse.urlsplit(url.removeprefix(BASE))
    query = dict(urllib.parse.parse_qsl(parts.query))
    path = pathlib.Path(os.environ["FAKE_FOLDER"]) / "metadata" / parts.path.replace("/", "_")
    if not path.exists():
        sys.exit(22)
    value = path.read_text()
    if query.get("wait_for_change") == "true":
        deadline = time.monotonic() + int(query["timeout_sec"])
        while path.exists() and path.read_text() == value and time.monotonic() < deadline:
            time.sleep(0.2)
    sys.stdout.write(path.read_text() if path.exists() else value)


if __name__ == "__main__":
    main(sys.argv[1:])
