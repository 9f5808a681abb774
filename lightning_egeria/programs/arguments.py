"""Types of arguments of commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable

LARGEST = 2**31 - 1  # fits into a database, a time and an array's length


def whole_number(least: int = 0, most: int = LARGEST) -> Callable[[str], int]:
    """Return a type for argparse: whole numbers within bounds.

    >>> whole_number(1)("12")
    12
    """

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, got {text!r}")
        return value

    return number
