"""The secret that the processes of a job share: where it is found, and how each side proves it.

The secret itself is never sent. The hub sends a nonce on every new connection; the guard answers
with an HMAC-SHA256 (RFC 2104) keyed by the secret; the hub proves in the same way that it knows the
secret. Both nonces together give the keys that authenticate all later lines (`lbopt.job._wire`):

    hub    {"lbopt": 1, "nonce": H}
    guard  {"index": ..., "count": ..., "where": ..., "nonce": G,
            "proof": HMAC of "guard", H, G, index, count, where}
    hub    {"proof": HMAC of "hub", H, G}
    guard  {"here": true}, the first line with an authentication code
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

from lbopt import _unfinished, paths
from lbopt._regular import open_regular
from lbopt.errors import NO_VALUE, EnvironmentProblem, UserError, require
from lbopt.job._wire import Keys, Wire

VARIABLE = "LBOPT_JOB_SECRET"
FILE_VARIABLE = "LBOPT_JOB_SECRET_FILE"
FILE_FLAG = "job_secret_file"
HOW = f"give all processes the same {VARIABLE} or --{FILE_FLAG}"
PROTOCOL = 1
_LEAST_BYTES = 16
_MOST_BYTES = 4096
_LONGEST_WHERE = 200
"""Characters of a process's host name and id that are sent, at most."""


def find(flags: Mapping[str, str], environ: MutableMapping[str, str]) -> bytes:
    """Return the job's secret, and remove it from the environment that child processes inherit.

    The secret comes from the file in --job_secret_file or LBOPT_JOB_SECRET_FILE, from
    LBOPT_JOB_SECRET, or else from ~/.config/lbopt/job_secret, which is created if missing: hosts
    that share a home folder need no setting.

    Args:
      flags: The flags of the job, from `given_job_flags`.
      environ: The environment variables, `os.environ`.

    Raises:
      UserError: If the file cannot be read, others may read it, or the secret has a wrong length.
      EnvironmentProblem: If no secret is given and none can be created.
    """
    from_variable = environ.pop(VARIABLE, None)
    if FILE_FLAG in flags:
        return _read(f"--{FILE_FLAG}", flags[FILE_FLAG])
    if (file := environ.get(FILE_VARIABLE)) is not None:
        require(
            not from_variable,
            FILE_VARIABLE,
            file,
            f"{VARIABLE} is set too; unset one of them",
            code="conflict",
        )
        return _read(FILE_VARIABLE, file)
    if from_variable is not None:
        return _checked(VARIABLE, NO_VALUE, os.fsencode(from_variable))
    return _of_user(environ)


def _read(field: str, file: str) -> bytes:
    path = paths.local(file, field)
    try:
        with open_regular(path) as stream:
            # The mode of the file that is read: the path may lead to another one a moment later.
            mode = os.fstat(stream.fileno()).st_mode
            text = stream.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UserError(
            field,
            file,
            f"{error.strerror}; name a file with the job's secret, the same for all processes",
            code="missing" if isinstance(error, FileNotFoundError) else "damaged",
        ) from error

    require(
        not mode & 0o077,
        field,
        file,
        f"other users may read it, its mode is {mode & 0o777:03o}; chmod 600 it",
    )
    return _checked(field, file, text)


def _checked(field: str, file: str, text: bytes) -> bytes:
    """Return the secret without white space around it, if its length is right.

    Args:
      field: The flag or variable that gave it.
      file: The file that it came from; `NO_VALUE` for a variable, since the secret is not shown.
      text: The secret.
    """
    text = text.strip()
    require(
        _LEAST_BYTES <= len(text) <= _MOST_BYTES,
        field,
        file,
        f"the secret has {len(text)} characters; give {_LEAST_BYTES} to {_MOST_BYTES}: "
        "openssl rand -hex 32",
    )
    return text


def _of_user(environ: Mapping[str, str]) -> bytes:
    """Return the secret in this user's configuration folder, created if missing."""
    path = pathlib.Path("~/.config/lbopt/job_secret")
    try:
        path = paths.of_user(environ, "XDG_CONFIG_HOME", ".config") / "lbopt" / "job_secret"
        _unfinished.remove(path.parent, re.compile(r"\.job_secret\.\d+(\.[0-9a-f]{8})?"))

        # The file gets its name when it is complete, so that no process reads half a secret.
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            temporary = _unfinished.beside(path)
            try:
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "w") as stream:
                    stream.write(secrets.token_hex(32) + "\n")
                # Processes that start together agree on the secret that is linked first.
                with contextlib.suppress(FileExistsError):
                    os.link(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise EnvironmentProblem(
            str(path),
            NO_VALUE,
            f"the secret of this user's jobs cannot be kept there ({error.strerror}); {HOW}",
            code="resource",
        ) from error
    return _read(f"--{FILE_FLAG}", str(path))


def challenge() -> tuple[str, dict[str, Any]]:
    """Return a fresh nonce, and the hub's first message, which contains it."""
    nonce = secrets.token_hex(32)
    return nonce, {"lbopt": PROTOCOL, "nonce": nonce}


def answer(
    secret: bytes, asked: str, index: int, count: int, where: str
) -> tuple[str, dict[str, Any]]:
    """Return a guard's nonce and its answer to the hub's challenge.

    Args:
      secret: The job's secret.
      asked: The hub's nonce.
      index: Index of the guard's process.
      count: Number of processes that this process was started with.
      where: Host name and process id, for messages.
    """
    nonce = secrets.token_hex(32)
    where = where[:_LONGEST_WHERE]
    proof = _proof(secret, "guard", asked, nonce, index, count, where)
    return nonce, {"index": index, "count": count, "where": where, "nonce": nonce, "proof": proof}


def believed(secret: bytes, asked: str, hello: Mapping[str, Any]) -> bool | None:
    """Return whether a guard's answer was made with the secret; None if it is malformed."""
    index, count, where, nonce = (
        cast(Any, hello.get(name)) for name in ("index", "count", "where", "nonce")
    )
    right = type(index) is int and type(count) is int and 0 <= index < count
    if not (right and isinstance(where, str) and len(where) <= _LONGEST_WHERE):
        return None
    if not _is_nonce(nonce):
        return None
    return _equal(hello.get("proof"), _proof(secret, "guard", asked, nonce, index, count, where))


def reply(secret: bytes, asked: str, nonce: str) -> dict[str, Any]:
    """Return the hub's answer to a guard's nonce."""
    return {"proof": _proof(secret, "hub", asked, nonce)}


def is_hub(secret: bytes, asked: str, nonce: str, message: Mapping[str, Any]) -> bool:
    """Return whether the hub's answer was made with the secret."""
    return _equal(message.get("proof"), reply(secret, asked, nonce)["proof"])


def is_challenge(message: Mapping[str, Any]) -> bool:
    """Return whether a message is the first one of a hub of this protocol version."""
    return message.get("lbopt") == PROTOCOL and _is_nonce(message.get("nonce"))


def trust(wire: Wire, secret: bytes, asked: str, nonce: str, is_hub: bool) -> None:
    """Authenticate all later lines of a connection, with a key for each direction.

    Args:
      wire: The connection.
      secret: The job's secret.
      asked: The hub's nonce.
      nonce: The guard's nonce.
      is_hub: Whether this end is the hub.
    """
    from_hub, from_guard = (
        Keys(bytes.fromhex(_proof(secret, f"from the {who}", asked, nonce)))
        for who in ("hub", "guard")
    )
    if is_hub:
        wire.trust(sending=from_hub, receiving=from_guard)
    else:
        wire.trust(sending=from_guard, receiving=from_hub)


def _is_nonce(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64


def _equal(given: Any, right: str) -> bool:
    return isinstance(given, str) and hmac.compare_digest(
        given.encode(errors="replace"), right.encode()
    )


def _proof(secret: bytes, *fields: str | int) -> str:
    return hmac.new(secret, json.dumps(fields).encode(), "sha256").hexdigest()
