"""Types of arguments of commands, and of the texts in descriptions."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

LARGEST = 2**31 - 1  # fits into a database, a time and an array's length
PERIOD = r"[1-9][0-9]{0,6}[sm]|[1-9][0-9]{0,3}[hd]"
SIZE = r"[1-9][0-9]{0,5}(MB|GB|TB)"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "MB": 10**6, "GB": 10**9, "TB": 10**12}


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
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, got {text!r:.40}")
        return value

    return number


def positive_number(most: float = 2.0**30) -> Callable[[str], float]:
    """Return a type for argparse: numbers above 0 and below a bound.

    >>> positive_number()("0.5")
    0.5
    """

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value < most:
            raise argparse.ArgumentTypeError(f"expected a positive number below {most:g}, got {text!r:.40}")
        return value

    return number


def quantity(text: str) -> int:
    """Return the seconds of a text that matches `PERIOD`, or the bytes of one that matches `SIZE`.

    >>> quantity("90m"), quantity("16GB")
    (5400, 16000000000)
    """
    number, unit = re.fullmatch(r"([0-9]+)([A-Za-z]+)", text).groups()  # type: ignore[union-attr]  # it matches
    return int(number) * _UNITS[unit]


def period(text: str) -> int:
    """Return seconds; a type for argparse.

    >>> period("12h")
    43200
    """
    if not re.fullmatch(PERIOD, text):
        raise argparse.ArgumentTypeError(f"expected a period such as 30d or 12h, got {text!r:.40}")
    return quantity(text)
