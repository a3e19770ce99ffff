"""What the processes of a job know and strangers do not: where it is found, and how it is proven without being said.

Whoever connects to the hub is asked to answer a number that nobody has seen before, by HMAC-SHA256 (RFC 2104) with the secret as its
key; the hub answers one in turn. From both numbers come the keys of the codes that all later lines carry (`lbopt.job.wire`):

    hub    {"lbopt": 1, "nonce": H}
    guard  {"index": ..., "count": ..., "where": ..., "nonce": G, "proof": of "guard", H, G, index, count, where}
    hub    {"proof": of "hub", H, G}
    guard  {"here": true}, and from here on codes
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import pathlib
import re
import secrets
from collections.abc import Mapping, MutableMapping
from typing import Any, cast

from lbopt import paths, unfinished
from lbopt.errors import EnvironmentProblem, UserError, require
from lbopt.job.wire import Keys, Wire
from lbopt.regular import open_regular

VARIABLE = "LBOPT_JOB_SECRET"
FILE_VARIABLE = "LBOPT_JOB_SECRET_FILE"
FILE_FLAG = "job_secret_file"
HOW = f"give all processes the same {VARIABLE} or --{FILE_FLAG}"
PROTOCOL = 1
_LEAST, _MOST = 16, 4096
_WHERE = 200
"""The most characters of a host's name that are said."""


def find(flags: Mapping[str, str], environ: MutableMapping[str, str]) -> bytes:
    """Return the job's secret; take it out of the environment, which the processes that compute inherit.

    It comes from the file that --job_secret_file or LBOPT_JOB_SECRET_FILE names, from LBOPT_JOB_SECRET, or else from
    ~/.config/lbopt/job_secret, which is made where it is missing: hosts with one home folder need nothing else.

    Args:
      flags: from `place.given_flags`.
      environ: `os.environ`.

    Raises:
      UserError: if what is given is no secret, or others can read it.
      EnvironmentProblem: if there is none and none can be made.
    """
    said = environ.pop(VARIABLE, None)
    if FILE_FLAG in flags:
        return _read(f"--{FILE_FLAG}", flags[FILE_FLAG])
    if (file := environ.get(FILE_VARIABLE)) is not None:
        if said:
            raise UserError(f"{VARIABLE} and {FILE_VARIABLE} are both set; unset one of them")
        return _read(FILE_VARIABLE, file)
    if said is not None:
        return _checked(VARIABLE, os.fsencode(said))
    return _own(environ)


def _read(shown: str, given: str) -> bytes:
    path = paths.local(given, shown)
    try:
        with open_regular(path) as stream:
            mode = os.fstat(stream.fileno()).st_mode
            text = stream.read(_MOST + 1)
    except OSError as error:
        raise UserError(
            f"{shown} = {given!r}: {error.strerror}; name a file with the job's secret, the same for all processes"
        ) from error
    require(
        not mode & 0o077,
        shown,
        given,
        f"others may read it, its mode is {mode & 0o777:03o}; chmod 600 it",
    )
    return _checked(f"{shown} = {given!r}", text)


def _checked(shown: str, text: bytes) -> bytes:
    text = text.strip()
    if not _LEAST <= len(text) <= _MOST:  # and it is not shown
        raise UserError(
            f"{shown}: has {len(text)} characters; give from {_LEAST} to {_MOST}: openssl rand -hex 32"
        )
    return text


def _own(environ: Mapping[str, str]) -> bytes:
    """Return the secret of this user, made by whoever asks first."""
    path = pathlib.Path("~/.config/lbopt/job_secret")
    try:
        path = paths.of_user(environ, "XDG_CONFIG_HOME", ".config") / "lbopt" / "job_secret"
        unfinished.remove(path.parent, re.compile(r"\.job_secret\.\d+(\.[0-9a-f]{8})?"))
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            part = unfinished.beside(path)
            try:
                descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "w") as stream:
                    stream.write(secrets.token_hex(32) + "\n")
                with contextlib.suppress(FileExistsError):  # another was faster: its secret holds
                    os.link(part, path)
            finally:
                part.unlink(missing_ok=True)
    except OSError as error:
        raise EnvironmentProblem(
            f"{path}: the secret by which the processes of a job know each other cannot be kept there ({error.strerror}); {HOW}"
        ) from error
    return _read("the job's secret", str(path))


def challenge() -> tuple[str, dict[str, Any]]:
    """Return a number that was never used, and the hub's first message with it."""
    nonce = secrets.token_hex(32)
    return nonce, {"lbopt": PROTOCOL, "nonce": nonce}


def answer(
    secret: bytes, asked: str, index: int, count: int, where: str
) -> tuple[str, dict[str, Any]]:
    """Return a guard's number and its answer to the hub's."""
    nonce, where = secrets.token_hex(32), where[:_WHERE]
    proof = _proof(secret, "guard", asked, nonce, index, count, where)
    return nonce, {"index": index, "count": count, "where": where, "nonce": nonce, "proof": proof}


def believed(secret: bytes, asked: str, hello: Mapping[str, Any]) -> bool | None:
    """Return whether an answer was made with the secret; None if it is none at all."""
    index, count, where, nonce = (
        cast(Any, hello.get(name)) for name in ("index", "count", "where", "nonce")
    )
    right = type(index) is int and type(count) is int and 0 <= index < count
    if not (right and isinstance(where, str) and len(where) <= _WHERE and _is_nonce(nonce)):
        return None
    return _equal(hello.get("proof"), _proof(secret, "guard", asked, nonce, index, count, where))


def reply(secret: bytes, asked: str, nonce: str) -> dict[str, Any]:
    """Return the hub's answer to a guard's number."""
    return {"proof": _proof(secret, "hub", asked, nonce)}


def is_hub(secret: bytes, asked: str, nonce: str, message: Mapping[str, Any]) -> bool:
    """Return whether the hub's answer was made with the secret."""
    return _equal(message.get("proof"), reply(secret, asked, nonce)["proof"])


def is_challenge(message: Mapping[str, Any]) -> bool:
    """Return whether this is a hub's first message."""
    return message.get("lbopt") == PROTOCOL and _is_nonce(message.get("nonce"))


def trust(wire: Wire, secret: bytes, asked: str, nonce: str, is_hub: bool) -> None:
    """Let a connection carry codes from here on, with keys of its own for each direction."""
    ways = [
        Keys(bytes.fromhex(_proof(secret, f"from the {who}", asked, nonce)))
        for who in ("hub", "guard")
    ]
    wire.trust(*ways if is_hub else reversed(ways))


def _is_nonce(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64


def _equal(given: Any, right: str) -> bool:
    return isinstance(given, str) and hmac.compare_digest(
        given.encode(errors="replace"), right.encode()
    )


def _proof(secret: bytes, *said: str | int) -> str:
    return hmac.new(secret, json.dumps(said).encode(), "sha256").hexdigest()
