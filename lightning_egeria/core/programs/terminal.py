"""Text from elsewhere, on a terminal."""

from __future__ import annotations


def printable(text: object, keep: str = "") -> str:
    r"""Return a text without what a terminal would obey: each character that cannot be printed becomes ``?``.

    Args:
        text: anything; its `str`.
        keep: characters that stay, such as line ends.

    >>> printable("a\x1b[2Jb"), printable("two\nlines", keep="\n")
    ('a?[2Jb', 'two\nlines')
    """
    return "".join(letter if letter.isprintable() or letter in keep else "?" for letter in str(text))
