"""Taking secrets out of what a job prints, wherever its output is cut into pieces."""

from __future__ import annotations

import html
import json
import re
import urllib.parse
from collections.abc import Mapping

_SECRET_WORDS = {"TOK", "TOKEN", "TOKENS", "SECRET", "SECRETS", "PASS", "PASSWD", "PASSWORD", "PASSPHRASE", "PAT"}
_SECRET_WORDS |= {"KEY", "APIKEY", "CREDENTIAL", "CREDENTIALS", "COOKIE"}
_SECRET_ENDS = ("TOKEN", "SECRET", "PASS", "PASSWD", "PASSWORD", "PASSPHRASE", "APIKEY")  # as in PGPASSWORD
_SHORT = 3  # characters of what is no secret any more without the spaces around it
_LEAST = 8  # characters of a value that may be a secret


class Redactor:
    """Replaces secrets in a stream of bytes, as they are and in the ways of `forms_of`.

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
        self._starting: dict[int, list[bytes]] = {}  # by their first byte
        for value in self._values:
            self._starting.setdefault(value[0], []).append(value)
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
            rest = data[start:]
            if any(len(value) > len(rest) and value.startswith(rest) for value in self._starting.get(data[start], ())):
                # A whole secret that overlaps this place goes out in one piece.
                whole = [match.span() for match in self._pattern.finditer(data) if match.start() < start < match.end()]
                if not whole:
                    return start
        return len(data)

    def _name(self, match: re.Match[bytes]) -> bytes:
        return b"[" + self._names[match[0]].encode() + b"]"


def forms_of(value: str) -> set[bytes]:
    r"""Return a secret as it is, and as Python, JSON, YAML, CSV, SQL, shells, HTML and addresses write it.

    Python and JSON may stand within each other and within the others, as in an exception about an answer of a server.

    >>> b"a%2Fb%2B" in forms_of("a/b+"), b"a/b%2b" in forms_of("a/b+"), b"a\\/b+" in forms_of("a/b+")
    (True, True, True)
    """
    forms = set()
    # Programs take line ends off what they have read from a file, and terminals change them.
    bare = value.strip()
    for plain in {value, value.replace("\n", "\r\n")} | ({bare} if len(bare) > _SHORT else set()):
        for text in {plain} | _escaped(plain):
            forms |= {text} | _escaped(text) | _in_addresses(text) | _in_quotes(text) | _in_markup(text)
        forms |= {repr(plain.encode(errors="surrogateescape"))[2:-1]}
    return {form.encode(errors="surrogateescape") for form in forms if form}


def _escaped(value: str) -> set[str]:
    """Return a text within quotes, as Python and JSON write it."""
    written = {
        repr(value)[1:-1],
        repr(value + "\"'")[1:-4],  # as where quotes of both kinds stand beside it
        ascii(value)[1:-1],
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
    }
    written |= {form.replace("/", "\\/") for form in written}
    return written | {re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", form) for form in written}


def _in_addresses(value: str) -> set[str]:
    quoted = {
        change(value, safe=safe, errors="surrogateescape")
        for safe in ("", "/", "!'()*", "/!'()*")
        for change in (urllib.parse.quote, urllib.parse.quote_plus)
    }
    return quoted | {re.sub("%..", lambda found: found[0].lower(), form) for form in quoted}


def _in_quotes(value: str) -> set[str]:
    """Return a text as shells write it, and as YAML, SQL and CSV, which double quotes."""
    return {
        value.replace("'", "'\"'\"'"),
        value.replace("'", "'\\''"),
        re.sub(r"([^\w@%+=:,./-])", r"\\\1", value),
        re.sub(r'(["$`\\])', r"\\\1", value),
        value.replace("'", "''"),
        value.replace('"', '""'),
    }


def _in_markup(value: str) -> set[str]:
    escaped = html.escape(value)
    forms = {html.escape(value, quote=False), value.replace("&", "&amp;"), escaped, escaped.replace("&#x27;", "'")}
    forms |= {escaped.replace("&#x27;", other) for other in ("&#39;", "&apos;")}
    forms.add(escaped.replace("&#x27;", "&#39;").replace("&quot;", "&#34;"))
    lines = {"\t": "&#9;", "\n": "&#10;", "\r": "&#13;"}  # of an attribute in XML; ElementTree has &#09;
    forms |= {"".join(lines.get(letter, letter) for letter in form) for form in forms}
    return forms | {form.replace("&#9;", "&#09;") for form in forms}


def looks_secret(name: str, value: str) -> bool:
    """Return whether an undeclared environment variable looks like a secret.

    >>> looks_secret("WANDB_API_KEY", "0123456789"), looks_secret("TERM", "xterm-256color")
    (True, False)
    """
    words = re.split("[^A-Z0-9]+", name.upper())
    named = bool(_SECRET_WORDS & set(words)) or any(word.endswith(_SECRET_ENDS) for word in words)
    # Alone, PWD is the working folder.
    return len(value) >= _LEAST and (named or words[-1] == "AUTH" or (words[-1] == "PWD" and len(words) > 1))
