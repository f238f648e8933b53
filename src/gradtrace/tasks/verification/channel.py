"""Messages between our own processes: JSON with its length in front, over a socket.

Standard library only, and no imports of ours: keepers start with it.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

LENGTH = struct.Struct("!I")
LONGEST = 256 << 20
"""Bytes of a message; who claims more is not one of ours."""
Message = dict[str, Any]


class ClosedError(Exception):
    """The other side is gone, or does not speak our language."""


class Channel:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    @staticmethod
    def pair() -> tuple[Channel, Channel]:
        left, right = socket.socketpair()
        return Channel(left), Channel(right)

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: Message) -> None:
        # Lone surrogates, which a byte-level tokenizer can produce, survive as JSON escapes.
        payload = json.dumps(message).encode("ascii")
        try:
            self.connection.sendall(LENGTH.pack(len(payload)) + payload)
        except OSError as error:
            raise ClosedError from error

    def receive(self) -> Message:
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        if length > LONGEST:
            raise ClosedError
        message: Message = json.loads(self._exactly(length))
        return message

    def close(self) -> None:
        self.connection.close()

    def _exactly(self, count: int) -> bytes:
        parts = []
        while count:
            try:
                part = self.connection.recv(min(count, 1 << 20))
            except OSError as error:
                raise ClosedError from error
            if not part:
                raise ClosedError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)
