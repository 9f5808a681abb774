"""Bytes made of other bytes, by a generator with a seed."""

import json
import random
import re
import struct
from collections.abc import Sequence
from typing import Any

NUMBERS = (0, 1, 2, 3, 4, 7, 24, 64, 127, 128, 255, 256, 2**16, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40)
NUMBERS += (2**47, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
TEXTS = (
    *(b"-1", b"0", b"1", b"2", b"3", b"24", b"1e400", b"-1e308", b"NaN", b"Infinity", b"9" * 30, b"9" * 5000, b"0.5"),
    *(
        b"true",
        b"null",
        b'""',
        b'"x"',
        b"[]",
        b"{}",
        b"[[]]",
        b"[" * 5000,
        b'{"a":' * 3000,
        b'"\\ud800"',
        b'"\\u001b[2J"',
    ),
    *(
        b"[0,0]",
        b"[-1,-1]",
        b"1048577",
        b"268435457",
        b"1099511627776",
        b'"' + b"x" * 3000 + b'"',
        b"\xff",
        b"\xef\xbb\xbf",
    ),
    *(
        b'"qint8"',
        b'"float64"',
        b'"_inductor"',
        b'"O"',
        b'"<U9999999"',
        b'"(1,2"',
        b'"absent"',
        b'"opaque"',
        b'"plain"',
        b'"tensor"',
    ),
    *(b'"array"', b'"bytes"', b'"torch.bool"', b'"torch.float16"', b'"../../x"', b'"/etc/passwd"'),
)
VALUES = tuple(
    json.dumps(value)
    for value in (
        *(
            None,
            True,
            False,
            0,
            1,
            -1,
            2,
            3,
            10**30,
            2**63,
            0.5,
            -0.0,
            1e308,
            float("nan"),
            float("inf"),
            "",
            "x",
            "\x1b[2J",
        ),
        *("\ud800", "../../x", "torch.bool", "x" * 2000, [], {}, [[]], [0, 0], [-1, -1], {"": None}, [None] * 50),
    )
)
_NUMBER = re.compile(rb"-?\d+(\.\d+)?")


def mutated(generator: random.Random, seeds: Sequence[bytes], json_from: int | None, edits: float) -> bytes:
    """One of ``seeds``, changed in one to four places; now and then as it is.

    Args:
        generator: of random numbers.
        seeds: to choose from.
        json_from: where a JSON text begins in them, behind its length; None: there is none.
        edits: share of the results in which values of that text are edited, and bytes are not.
    """
    data = bytearray(generator.choice(seeds))
    if generator.random() < 0.01:
        return bytes(data)
    if json_from is not None and generator.random() < edits:
        end = json_from + int.from_bytes(data[:json_from], "little") if json_from else len(data)
        text = edited(generator, bytes(data[json_from:end]))
        return len(text).to_bytes(json_from, "little") + text + data[end:] if json_from else text
    if generator.random() < 0.02:
        return generator.randbytes(generator.randrange(200))
    for _ in range(generator.choice((1, 1, 2, 4))):
        generator.choice(_CHANGES)(generator, data, seeds)
    return bytes(data)


def edited(generator: random.Random, data: bytes) -> bytes:
    """A JSON text with one or two of its values replaced, removed or doubled."""
    try:
        whole = [json.loads(data)]
    except (ValueError, RecursionError):
        return data
    for _ in range(generator.choice((1, 1, 2))):
        places: list[tuple[Any, Any]] = []
        _collect(whole, places)
        container, key = generator.choice(places)
        draw = generator.random()
        if draw < 0.7:
            container[key] = json.loads(generator.choice(VALUES))
        elif draw < 0.8 and len(whole) == 1 and container is not whole:
            del container[key]
        elif isinstance(container, dict):
            container[generator.choice(("", "x", "format", "version", "__class__"))] = json.loads(
                generator.choice(VALUES)
            )
        else:
            container.append(json.loads(generator.choice(VALUES)) if container is not whole else None)
    return json.dumps(whole[0]).encode()


def _collect(container: Any, places: list[tuple[Any, Any]]) -> None:
    for key, value in container.items() if isinstance(container, dict) else enumerate(container):
        places.append((container, key))
        if isinstance(value, (dict, list)) and len(places) < 500:
            _collect(value, places)


def _place(generator: random.Random, data: bytearray) -> int:
    return int(generator.random() * len(data))


def _flip(generator: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    if data:
        data[_place(generator, data)] ^= 1 << generator.randrange(8)


def _set(generator: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    if data:
        data[_place(generator, data)] = generator.randrange(256)


def _truncate(generator: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    del data[_place(generator, data) :]


def _remove(generator: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    start = _place(generator, data)
    del data[start : start + generator.choice((1, 2, 4, 8, 64))]


def _insert(generator: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    start = _place(generator, data)
    data[start:start] = generator.choice((generator.randbytes(4), generator.choice(TEXTS), bytes(64)))


def _double(generator: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    start = _place(generator, data)
    data[start:start] = data[start : start + generator.choice((1, 8, 64, 256))]


def _splice(generator: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    """A part of another seed, in the same place as a rule: a part of another version, say."""
    other = generator.choice(seeds)
    start, end = sorted((_place(generator, data), _place(generator, data)))
    if generator.random() < 0.3:
        start, end = 0, len(data)
    data[start:end] = other[start:end]


def _number(generator: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    """A number of four or eight bytes."""
    kind = generator.choice(("<I", "<Q", "<Q"))
    size = struct.calcsize(kind)
    start = _place(generator, data) // size * size
    value = generator.choice(NUMBERS)
    data[start : start + size] = struct.pack(kind, value & (2 ** (8 * size) - 1))


def _written_number(generator: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    """A number, or another value, in a text."""
    found = list(_NUMBER.finditer(data[:4096]))
    if found:
        start, end = generator.choice(found).span()
        data[start:end] = generator.choice(TEXTS)


_CHANGES = (_flip, _flip, _set, _truncate, _remove, _insert, _double, _splice, _number, _number, _written_number)
