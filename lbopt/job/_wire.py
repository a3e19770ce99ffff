"""JSON lines over sockets, by which hub, guards and members talk to each other.

Between machines every line carries an authentication code that only holders of the job's secret
can make (`Keys`): nobody else can send, repeat or drop a line unnoticed. Lines are not encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
import threading
from collections import deque
from typing import Any, NamedTuple

from lbopt.errors import NO_VALUE, EnvironmentProblem

MOST_BYTES = 1 << 26
"""Longest line, its code included; a longer one does not come from this job."""
MOST_HELLO_BYTES = 2048
"""Longest message while the other end has not proven that it belongs to the job."""
CHANGED = "its messages are altered on the way"
"""The reason given when a line does not match its code."""
_CODE_LENGTH = 64
"""Length of an authentication code: HMAC-SHA256 in hexadecimal."""


class Line(NamedTuple):
    """A message as it is sent, and its SHA-256, computed once for all receivers."""

    data: bytes
    digest: bytes


class Keys:
    """Authentication codes for one direction of one connection; they cover the order of the lines.

    Args:
      key: The HMAC key, used for this direction of this connection only.
    """

    def __init__(self, key: bytes):
        self._key = key
        self._number = 0

    def code(self, line: Line) -> bytes:
        """Return the code of the next line."""
        number = self._number.to_bytes(8, "big")
        self._number += 1
        return hmac.new(self._key, number + line.digest, "sha256").hexdigest().encode()


class Wire:
    """One connection. Any thread may send; one thread receives.

    Args:
      connection: The connected stream socket.
      most_bytes: Longest message to accept.
    """

    _queues = False

    def __init__(self, connection: socket.socket, most_bytes: int = MOST_BYTES):
        self._socket = connection
        self._most_bytes = most_bytes
        self._rest = bytearray()
        self._sending = threading.Lock()
        self._keys: tuple[Keys, Keys] | None = None
        # On TCP a short line would wait 40 ms for the previous one; other sockets lack the option.
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self._socket.fileno()

    def settimeout(self, timeout_s: float | None) -> None:
        """Limit how long sending and receiving may block, as `socket.settimeout` does."""
        self._socket.settimeout(timeout_s)

    def trust(self, sending: Keys, receiving: Keys) -> None:
        """Authenticate all later lines, and accept messages up to `MOST_BYTES`.

        Args:
          sending: The codes of the lines that this end sends.
          receiving: The codes of the lines that it receives.
        """
        self._keys = (sending, receiving)
        self._most_bytes = MOST_BYTES

    def send(self, **message: Any) -> bool:
        """Send a message and return whether it went out.

        A message that the other end does not take within the timeout ends the connection.
        """
        line = encode(**message)
        with self._sending:
            return self._send(line)

    def _send(self, line: Line) -> bool:
        try:
            self._socket.sendall(self._code(line) + line.data)
        except TimeoutError:  # nothing can follow an incomplete line
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            return False
        except OSError:
            return False
        return True

    def _code(self, line: Line) -> bytes:
        return self._keys[0].code(line) if self._keys else b""

    def receive(self, or_wait: bool = False) -> list[dict[str, Any]] | None:
        """Wait for bytes and return the messages that they complete; None if the connection ended.

        Args:
          or_wait: Whether to raise TimeoutError, instead of returning None, after the timeout.

        Raises:
          ValueError: If a line is too long, malformed, or has a wrong authentication code.
        """
        try:
            data = self._socket.recv(1 << 16)
        except OSError as error:
            if or_wait and isinstance(error, TimeoutError):
                raise
            return [] if self._queues and isinstance(error, BlockingIOError) else None
        if not data:
            return None
        self._rest += data
        messages = []
        if b"\n" in data:
            *lines, rest = self._rest.split(b"\n")
            self._rest = rest
            messages = [self._message(bytes(line)) for line in lines]
        if len(self._rest) > self._most_bytes:
            raise ValueError(f"a message has more than {self._most_bytes} bytes")
        return messages

    def _message(self, line: bytes) -> dict[str, Any]:
        if len(line) > self._most_bytes:
            raise ValueError("a message is too long")
        if self._keys is not None:
            code = line[:_CODE_LENGTH]
            line = line[_CODE_LENGTH:]
            if not hmac.compare_digest(code, self._keys[1].code(_hashed(line + b"\n"))):
                raise ValueError("a message does not match its authentication code")
        try:
            message = json.loads(line)
        except RecursionError as error:
            raise ValueError("not a message") from error
        if not isinstance(message, dict):
            raise ValueError("not a message")
        return message

    def close(self) -> None:
        """Close the connection and wake the threads that wait for it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class QueuedWire(Wire):
    """A connection that queues bytes until the other end takes them, so that sending never blocks.

    It is for use by one thread.
    """

    _queues = True

    def __init__(self, connection: socket.socket, most_bytes: int = MOST_BYTES):
        super().__init__(connection, most_bytes)
        connection.setblocking(False)
        self._queue: deque[memoryview] = deque()
        self.queued_bytes = 0

    def send(self, **message: Any) -> bool:
        """Queue a message, then `flush`; return False if the connection has ended."""
        return self._send(encode(**message))

    def send_line(self, line: Line) -> bool:
        """Send a line from `encode`, whose memory is shared by all queues that hold it."""
        return self._send(line)

    def _send(self, line: Line) -> bool:
        for data in (self._code(line), line.data):
            if data:
                self._queue.append(memoryview(data))
                self.queued_bytes += len(data)
        return self.flush()

    def flush(self) -> bool:
        """Send queued bytes until the other end takes no more; False if the connection ended."""
        try:
            while self._queue:
                sent = self._socket.send(self._queue[0])
                self.queued_bytes -= sent
                if sent < len(self._queue[0]):
                    self._queue[0] = self._queue[0][sent:]
                else:
                    self._queue.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._queue.clear()
            self.queued_bytes = 0
            return False
        return True


def encode(**message: Any) -> Line:
    """Return a message as a line that `QueuedWire.send_line` takes.

    Raises:
      EnvironmentProblem: If the line is longer than the other end accepts.
    """
    data = json.dumps(message).encode() + b"\n"
    most = MOST_BYTES - _CODE_LENGTH
    if len(data) > most:
        raise EnvironmentProblem(
            "message",
            NO_VALUE,
            f"{len(data):,} bytes to send to the other processes, of {most:,} at most; "
            "run it in one process",
            code="resource",
        )
    return _hashed(data)


def _hashed(data: bytes) -> Line:
    return Line(data, hashlib.sha256(data).digest())
