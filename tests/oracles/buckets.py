"""A small bucket server on this machine, for Orbax's and gcsfs's Google Cloud Storage clients."""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request

from forked import Forked

SERVER = pathlib.Path(__file__).with_name("bucket_server.py")


@contextlib.contextmanager
def serving():
    """Yield (address of a server, environment that points clients to it)."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]

    process = subprocess.Popen(
        [sys.executable, str(SERVER), str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"

    try:
        _wait_for(port)
        variables = {
            "STORAGE_EMULATOR_HOST": address,
            "TENSORSTORE_GCS_HTTP_URL": address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
        }
        yield address, {**os.environ, **variables}
    finally:
        process.kill()
        process.wait()


def start_lbopt(variables, *arguments):
    """Start `lbopt` in the environment of a server."""
    command = [sys.executable, "-m", "lbopt", *arguments]
    return Forked(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _wait_for(port):
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)


def objects(address):
    with urllib.request.urlopen(f"{address}/storage/v1/b/bucket/o?maxResults=1000") as answer:
        return {item["name"]: item for item in json.load(answer).get("items", [])}


def remove(address, name):
    place = f"{address}/storage/v1/b/bucket/o/{urllib.parse.quote(name, safe='')}"
    urllib.request.urlopen(urllib.request.Request(place, method="DELETE")).close()


def read(address, name):
    place = f"{address}/storage/v1/b/bucket/o/{urllib.parse.quote(name, safe='')}?alt=media"
    with urllib.request.urlopen(place) as answer:
        return answer.read().decode()
