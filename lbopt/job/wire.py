"""JSON lines over sockets: all that hub, guards and members say to each other.

Between machines every line carries a code that only those who know the job's secret can make (`Keys`): nobody else can say
anything, say it again, or leave something out unseen. It is not enciphered.
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

from lbopt.errors import EnvironmentProblem

MOST_BYTES = 1 << 26
"""No line is longer, its code included: whoever sends more is none of ours."""
MOST_HELLO_BYTES = 2048
"""No message is longer as long as it is not known who is at the other end."""
CHANGED = "what comes from it is changed on the way"
"""What is wrong where a line has not its code."""
_CODE = 64
"""Length of a code: HMAC-SHA256 in hexadecimal."""


class Line(NamedTuple):
    """A message as it is sent, and its SHA-256, which is computed once however many it is sent to."""

    data: bytes
    digest: bytes


class Keys:
    """Codes of the lines of one direction of one connection, each for its place in the order.

    Args:
      key: for this direction of this connection alone.
    """

    def __init__(self, key: bytes):
        self._key, self._number = key, 0

    def code(self, line: Line) -> bytes:
        """Return the code of the next line."""
        number = self._number.to_bytes(8, "big")
        self._number += 1
        return hmac.new(self._key, number + line.digest, "sha256").hexdigest().encode()


class Wire:
    """One connection. Any thread may send; one thread receives.

    Args:
      connection: a connected stream socket.
      most_bytes: of a message.
    """

    _queues = False

    def __init__(self, connection: socket.socket, most_bytes: int = MOST_BYTES):
        self._socket = connection
        self._most_bytes = most_bytes
        self._rest = bytearray()
        self._sending = threading.Lock()
        self._keys: tuple[Keys, Keys] | None = None
        with contextlib.suppress(
            OSError
        ):  # only TCP has it: there a short line would wait 40 ms for the one before it
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self._socket.fileno()

    def settimeout(self, timeout_s: float | None) -> None:
        """See `socket.settimeout`."""
        self._socket.settimeout(timeout_s)

    def trust(self, sending: Keys, receiving: Keys) -> None:
        """From here on send codes, believe nothing without them, and take messages of any size that ours have."""
        self._keys, self._most_bytes = (sending, receiving), MOST_BYTES

    def send(self, **message: Any) -> bool:
        """Send a message; False if nobody is at the other end any more, or takes it within the connection's timeout: that is its end."""
        line = encode(**message)
        with self._sending:
            return self._send(line)

    def _send(self, line: Line) -> bool:
        try:
            self._socket.sendall(self._code(line) + line.data)
        except TimeoutError:  # nothing can come after a part of a line
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            return False
        except OSError:
            return False
        return True

    def _code(self, line: Line) -> bytes:
        return self._keys[0].code(line) if self._keys else b""

    def receive(self, or_wait: bool = False) -> list[dict[str, Any]] | None:
        """Wait for bytes and return the messages that they complete; None at the end.

        Args:
          or_wait: raise TimeoutError where the end is only that of the connection's timeout.

        Raises:
          ValueError: if it is no message of ours.
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
            raise ValueError("a message without end")
        return messages

    def _message(self, line: bytes) -> dict[str, Any]:
        if len(line) > self._most_bytes:
            raise ValueError("a message too long")
        if self._keys is not None:
            code, line = line[:_CODE], line[_CODE:]
            if not hmac.compare_digest(code, self._keys[1].code(_hashed(line + b"\n"))):
                raise ValueError("not one of this job's")
        try:
            message = json.loads(line)
        except RecursionError as error:
            raise ValueError("not a message") from error
        if not isinstance(message, dict):
            raise ValueError("not a message")
        return message

    def close(self) -> None:
        """Close the connection, waking who waits for it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class QueuedWire(Wire):
    """A connection on which sending never waits: what the other end does not take yet stays in a queue. For one thread."""

    _queues = True

    def __init__(self, connection: socket.socket, most_bytes: int = MOST_BYTES):
        super().__init__(connection, most_bytes)
        connection.setblocking(False)
        self._queue: deque[memoryview] = deque()
        self.queued_bytes = 0

    def send(self, **message: Any) -> bool:
        """Send a message, or the part of it that goes; False if nobody is at the other end any more."""
        return self._send(encode(**message))

    def send_line(self, line: Line) -> bool:
        """Send a message that `encode` has made: it is kept once, however many it is queued for."""
        return self._send(line)

    def _send(self, line: Line) -> bool:
        for part in (self._code(line), line.data):
            if part:
                self._queue.append(memoryview(part))
                self.queued_bytes += len(part)
        return self.flush()

    def flush(self) -> bool:
        """Send of the queue what goes; False if nobody is at the other end any more."""
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
    """Return a message as `QueuedWire.send_line` takes it.

    Raises:
      EnvironmentProblem: if it is longer than the other end takes.
    """
    data = json.dumps(message).encode() + b"\n"
    if len(data) > MOST_BYTES - _CODE:
        raise EnvironmentProblem(
            f"{len(data):,} bytes to tell the other processes of the job, of {MOST_BYTES - _CODE:,} at most; run it in one process"
        )
    return _hashed(data)


def _hashed(data: bytes) -> Line:
    return Line(data, hashlib.sha256(data).digest())
