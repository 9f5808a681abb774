"""Taking secrets out of what a job prints, wherever its output is cut into pieces."""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Mapping


class Redactor:
    """Replaces secrets in a stream of bytes, as they are and as Python, JSON and addresses write them.

    Args:
        secrets: value of each secret by its name; empty values are none.

    >>> redactor = Redactor({"TOKEN": "abc123"})
    >>> redactor.feed(b"key=ab"), redactor.feed(b"c123!"), redactor.end()
    (b'key=', b'[TOKEN]!', b'')
    """

    def __init__(self, secrets: Mapping[str, str]) -> None:
        self._names = {
            form.encode(errors="surrogateescape"): name
            for name, value in secrets.items()
            for form in _forms(value)
            if form
        }
        # The longest first, if one secret begins as another does.
        self._values = sorted(self._names, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(re.escape(value) for value in self._values)) if self._values else None
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return what can be shown so far: all but an end that may be the beginning of a secret."""
        if self._pattern is None:
            return data
        data = self._held + data
        cut = self._first_open(data)
        self._held = data[cut:]
        return self._pattern.sub(self._name, data[:cut])

    def end(self) -> bytes:
        """Return the rest."""
        held, self._held = self._held, b""
        return self._pattern.sub(self._name, held) if self._pattern is not None else held

    def _first_open(self, data: bytes) -> int:
        """Return where a secret begins that may end in later data."""
        assert self._pattern is not None
        first = max(len(data) - len(self._values[0]) + 1, 0)
        for start in range(first, len(data)):
            if any(len(value) > len(data) - start and value.startswith(data[start:]) for value in self._values):
                # A whole secret that overlaps this place goes out in one piece.
                whole = [match.span() for match in self._pattern.finditer(data) if match.start() < start < match.end()]
                if not whole:
                    return start
        return len(data)

    def _name(self, match: re.Match[bytes]) -> bytes:
        return b"[" + self._names[match[0]].encode() + b"]"


def _forms(value: str) -> set[str]:
    quoted = urllib.parse.quote(value, safe="", errors="surrogateescape")
    return {value, repr(value)[1:-1], json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], quoted}
