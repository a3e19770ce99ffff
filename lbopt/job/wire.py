"""JSON lines over sockets: all that hub, guards and members say to each other."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any

MOST_BYTES = 1 << 26
"""No message is longer: whoever sends more is none of ours."""


class Wire:
    """One connection. Any thread may send; one thread receives.

    Args:
      connection: a connected stream socket.
    """

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._rest = b""
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def settimeout(self, timeout_s: float | None) -> None:
        """See `socket.settimeout`."""
        self._socket.settimeout(timeout_s)

    def send(self, **message: Any) -> bool:
        """Send a message; False if nobody is at the other end any more."""
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError:
            return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """Wait for bytes and return the messages that they complete; None at the end.

        Raises:
          ValueError: if it is no message.
        """
        try:
            data = self._socket.recv(1 << 16)
        except OSError:
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MOST_BYTES:
            raise ValueError("a message without end")
        try:
            messages = [json.loads(line) for line in lines]
        except RecursionError as error:
            raise ValueError("not a message") from error
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("not a message")
        return messages

    def close(self) -> None:
        """Close the connection, waking who waits for it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
