"""What commands print: text from elsewhere on a terminal, and JSON for programs."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import textwrap
from collections.abc import Iterable, Mapping
from shutil import get_terminal_size
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


def say(text: str) -> None:
    """Print a line to standard error. It is lost if the disk is full, say; the program continues."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def width_of_terminal() -> int | None:
    """Return the columns of the terminal that the output goes to; None if it goes elsewhere, where all is wanted."""
    return get_terminal_size().columns if sys.stdout.isatty() else None


def shortened(text: str, width: int) -> str:
    """Return a text in a number of columns, without its middle if it is longer: names of a sweep differ at the end.

    >>> shortened("a-long-name.17", 10)
    'a-long….17'
    """
    if len(text) <= width:
        return text
    end = max(width // 3, 0)
    return text[: max(width - end - 1, 0)] + "…" + text[len(text) - end :]


def wrapped(text: str, width: int, first: str = "", then: str = "  ") -> str:
    """Return a text in lines of at most a number of columns. Words and paths stay whole.

    >>> print(wrapped("a message of several words", 20))
    a message of several
      words
    """
    wrapping = textwrap.TextWrapper(
        max(width, 20), initial_indent=first, subsequent_indent=then, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join("\n".join(wrapping.wrap(line)) for line in text.split("\n"))


def printable(text: object, keep: str = "") -> str:
    r"""Return a text without what a terminal would obey: each character that cannot be printed becomes ``?``.

    Args:
        text: anything; its `str`.
        keep: characters that stay, such as line ends.

    >>> printable("a\x1b[2Jb"), printable("two\nlines", keep="\n")
    ('a?[2Jb', 'two\nlines')
    """
    return "".join(letter if letter.isprintable() or letter in keep else "?" for letter in str(text))
