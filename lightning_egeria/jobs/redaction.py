"""Taking secrets out of what a job prints, wherever its output is cut into pieces."""

from __future__ import annotations

import html
import json
import re
import urllib.parse
from collections.abc import Mapping

_SECRET_WORDS = {"TOK", "TOKEN", "TOKENS", "SECRET", "SECRETS", "PASS", "PASSWD", "PASSWORD", "PASSPHRASE", "PAT"}
_SECRET_WORDS |= {"KEY", "APIKEY", "CREDENTIAL", "CREDENTIALS", "COOKIE"}
_LEAST = 8  # characters of a value that may be a secret


class Redactor:
    """Replaces secrets in a stream of bytes, as they are and as Python, JSON, shells, HTML and addresses write them.

    Args:
        secrets: value of each secret by its name; empty values are none.

    >>> redactor = Redactor({"TOKEN": "abc123"})
    >>> redactor.feed(b"key=ab"), redactor.feed(b"c123!"), redactor.end()
    (b'key=', b'[TOKEN]!', b'')
    """

    def __init__(self, secrets: Mapping[str, str]) -> None:
        self._names = {form: name for name, value in secrets.items() for form in forms_of(value)}
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

    def text(self, text: str) -> str:
        """Return a whole text without secrets."""
        if self._pattern is None:
            return text
        return self._pattern.sub(self._name, text.encode(errors="surrogateescape")).decode(errors="surrogateescape")

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


def forms_of(value: str) -> set[bytes]:
    r"""Return a secret as it is, and as Python, JSON, shells, HTML and addresses write it.

    >>> b"a%2Fb%2B" in forms_of("a/b+"), b"a/b%2b" in forms_of("a/b+"), b"a\\/b+" in forms_of("a/b+")
    (True, True, True)
    """
    quoted = {
        change(value, safe=safe, errors="surrogateescape")
        for safe in ("", "/", "!'()*", "/!'()*")
        for change in (urllib.parse.quote, urllib.parse.quote_plus)
    }
    quoted |= {re.sub("%..", lambda found: found[0].lower(), form) for form in quoted}
    written = {
        repr(value)[1:-1],
        ascii(value)[1:-1],
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
    }
    written |= {form.replace("/", "\\/") for form in written}
    written |= {html.escape(value), html.escape(value, quote=False), html.escape(value).replace("&#x27;", "&#39;")}
    written.add(html.escape(value).replace("&#x27;", "&#39;").replace("&quot;", "&#34;"))
    written |= {value.replace("'", "'\"'\"'"), value.replace("'", "'\\''"), re.sub(r"([^\w@%+=:,./-])", r"\\\1", value)}
    return {form.encode(errors="surrogateescape") for form in {value} | quoted | written if form} | _in_bytes(value)


def _in_bytes(value: str) -> set[bytes]:
    """Return a secret as Python writes it within bytes."""
    return {repr(value.encode(errors="surrogateescape"))[2:-1].encode()} - {b""}


def looks_secret(name: str, value: str) -> bool:
    """Return whether an environment variable that nobody has declared looks like a secret.

    >>> looks_secret("WANDB_API_KEY", "0123456789"), looks_secret("TERM", "xterm-256color")
    (True, False)
    """
    return len(value) >= _LEAST and bool(_SECRET_WORDS & set(re.split("[^A-Z0-9]+", name.upper())))
