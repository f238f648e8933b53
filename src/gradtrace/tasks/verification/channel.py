"""Messages between our own processes: JSON with its length in front, over a socket; and values in them.

Plain data crosses as it is, everything else as a handle. An object of the candidate's own class stays with the
candidate, and with it whatever its `__eq__` claims; the examiner gets a handle, which equals nothing but itself.

Standard library only, and no imports of ours: keepers, candidates and examiners start with it.
"""

from __future__ import annotations

import json
import socket
import struct
from collections import deque
from collections.abc import Callable
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


Encoded = Any
SMALL = 2**53
SEQUENCES: dict[str, type] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}


def encode(value: Any, handle: Callable[[Any], Encoded]) -> Encoded:
    """A JSON value. `handle` is asked for what is no plain data."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__index__(value)
        return number if abs(number) < SMALL else ["int", hex(number)]  # hex has no limit on digits
    if isinstance(value, float):
        return ["float", float.__repr__(value)]
    if isinstance(value, complex):
        return ["complex", repr(value.real), repr(value.imag)]
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, dict):
        return ["dict", [[encode(k, handle), encode(v, handle)] for k, v in dict.items(value)]]
    for name, kind in SEQUENCES.items():
        if isinstance(value, kind):
            return [name, [encode(part, handle) for part in kind.__iter__(value)]]  # type: ignore[attr-defined]
    if isinstance(value, range):
        return ["range", [value.start, value.stop, value.step]]
    # By name, since importing them would cost every program milliseconds and few have any.
    module, name = type(value).__module__, type(value).__name__
    if (module, name) == ("decimal", "Decimal"):
        return ["Decimal", str(value)]
    if (module, name) == ("fractions", "Fraction"):
        return ["Fraction", [encode(value.numerator, handle), encode(value.denominator, handle)]]
    if module == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), handle)
    return handle(value)


def decode(value: Encoded, resolve: Callable[[Encoded], Any]) -> Any:
    """The data again; `resolve` turns handles into what stands for them."""
    if not isinstance(value, list):
        if isinstance(value, dict):
            return resolve(value)
        return value
    kind, content = value[0], value[1]
    if kind in SEQUENCES:
        return SEQUENCES[kind](decode(part, resolve) for part in content)
    if kind == "dict":
        return {decode(k, resolve): decode(v, resolve) for k, v in content}
    if kind == "int":
        return int(content, 16)
    if kind == "float":
        return float(content)
    if kind == "complex":
        return complex(float(content), float(value[2]))
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "range":
        return range(*content)
    if kind == "Decimal":
        from decimal import Decimal

        return Decimal(content)
    if kind == "Fraction":
        from fractions import Fraction

        return Fraction(*(decode(part, resolve) for part in content))
    raise ValueError(f"unknown kind of value {kind!r}")
