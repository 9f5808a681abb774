"""Messages over a stream of bytes: each part follows its length."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

_LENGTH = struct.Struct("<Q")
_PIECE_BYTES = 16 * 2**20


def write_parts(stream: Any, parts: Sequence[Any]) -> None:
    """Write the parts of a message, each a buffer of bytes.

    >>> import io
    >>> stream = io.BytesIO()
    >>> write_parts(stream, [b"one", b"two"])
    >>> _ = stream.seek(0)
    >>> bytes(read_part(stream)), bytes(read_part(stream))
    (b'one', b'two')
    """
    for part in parts:
        stream.write(_LENGTH.pack(len(part)))
        stream.write(part)
    stream.flush()


def read_part(stream: Any) -> bytearray:
    """Read one part.

    Raises:
        EOFError: if the stream ends first.
    """
    (length,) = _LENGTH.unpack(_read_exactly(stream, _LENGTH.size))
    return _read_exactly(stream, length)


def _read_exactly(stream: Any, length: int) -> bytearray:
    """Grow the buffer as bytes arrive: a library that prints to the stream would look like a huge length."""
    data = bytearray()
    filled = 0
    while filled < length:
        if filled == len(data):
            data += bytes(min(_PIECE_BYTES, length - filled))
        count = stream.readinto(memoryview(data)[filled:])
        if not count:
            raise EOFError
        filled += count
    return data
