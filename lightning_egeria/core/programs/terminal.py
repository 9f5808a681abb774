"""What commands print: text from elsewhere on a terminal, and JSON for programs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from typing import Any


def takes_json(parser: argparse.ArgumentParser, of: str = "a line") -> None:
    """Add the flag ``--json``, which `tell` obeys."""
    parser.add_argument("--json", action="store_true", help=f"print one JSON object {of}")


def tell(options: argparse.Namespace, found: Iterable[Mapping[str, Any]], text: Iterable[str]) -> None:
    """Print what a command has found, done or decided: an object a line with ``--json``, else lines of text.

    >>> tell(argparse.Namespace(json=True), [{"id": 1, "state": "done"}], ["1  done"])
    {"id": 1, "state": "done"}
    """
    for line in map(json.dumps, found) if options.json else text:
        print(line)


def printable(text: object, keep: str = "") -> str:
    r"""Return a text without what a terminal would obey: each character that cannot be printed becomes ``?``.

    Args:
        text: anything; its `str`.
        keep: characters that stay, such as line ends.

    >>> printable("a\x1b[2Jb"), printable("two\nlines", keep="\n")
    ('a?[2Jb', 'two\nlines')
    """
    return "".join(letter if letter.isprintable() or letter in keep else "?" for letter in str(text))
