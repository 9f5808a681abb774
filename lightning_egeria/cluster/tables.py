"""CSV files: every row has a field for each column, and every number lies in the domain of its column."""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_egeria.core.programs.files import read_text, write_whole
from lightning_egeria.errors import TraceError

Numbers = NDArray[np.float64]
Table = dict[str, Numbers]
Row = tuple[int, dict[str, str]]  # the number of its line, and its fields by column
_LARGEST_FILE = 2**24  # bytes, which take up to 150 times as much memory
_LARGEST = 1e30  # no sum, product or quotient of a few numbers overflows


@dataclasses.dataclass(frozen=True)
class _Column:
    """The domain of a column: in words, and as a mask of a whole table. ``number`` reads one field."""

    words: str
    holds: Callable[[Table, str], NDArray[np.bool_]]
    number: Callable[[str], float] = float


def _between(least: float, most: float) -> _Column:
    return _Column(f"expected a number from {least:g} to {most:g}", lambda table, name: _lies(table[name], least, most))


def _lies(values: Numbers, least: float, most: float) -> NDArray[np.bool_]:
    return (least <= values) & (values <= most)


def _whole(table: Table, name: str) -> NDArray[np.bool_]:
    return _lies(table[name], 1, 1e9) & np.equal(np.floor(table[name]), table[name])


def _rises(table: Table, name: str) -> NDArray[np.bool_]:
    return _lies(table[name], 0, 1e12) & (np.diff(table[name], prepend=0) > 0)


def _placement(text: str) -> float:
    """Return the least rotation of a placement: 13 for 31."""
    if not re.fullmatch(r"[1-9]{1,15}", text):
        raise ValueError
    return float(min(text[at:] + text[:at] for at in range(len(text))))


_COUNT = _Column("expected a whole number from 1 to 1e9", _whole)
_RISING = _Column("expected a number from 0 to 1e12 that is larger than in the line before", _rises)
# The noise of a gradient is a quotient: one that was recorded as 0 would divide by 0 where the norm is 0 too.
_DOMAINS = {
    "placement": _Column("expected digits from 1 to 9, one for each node", lambda t, name: t[name] > 0, _placement),
    "num_nodes": _COUNT,
    "num_replicas": _Column(
        "expected a whole number from 1 to 1e9, and not below num_nodes",
        lambda table, name: _whole(table, name) & (table[name] >= table["num_nodes"]),
    ),
    "local_bsz": _COUNT,
    "step_time": _between(1e-9, 1e6),
    "sync_time": _Column(
        "expected at least 0 and less than step_time",
        lambda table, name: (table[name] >= 0) & (table[name] < table["step_time"]),
    ),
    "progress": _RISING,
    "iteration": _RISING,
    "metric": _between(-_LARGEST, _LARGEST),
    "grad_sqr": _between(0, _LARGEST),
    "grad_var": _between(1 / _LARGEST, _LARGEST),
}


def read_rows(path: Path, columns: Sequence[str]) -> list[Row]:
    """Read a CSV file with a header that names these columns, and maybe others.

    Raises:
        TraceError: the file cannot be read, a column is missing or stands there twice, there is no line, or a line has
            more or fewer fields than the header.
    """
    try:
        reader = csv.reader(io.StringIO(read_text(path, _LARGEST_FILE).removeprefix("\ufeff"), newline=""))
        header = next(reader, [])
        rows = [(reader.line_num, fields) for fields in reader if fields]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path} cannot be read as CSV: {error}") from error
    if not rows:
        raise TraceError(f"{path} has no lines: expected the columns {', '.join(columns)} and at least one line")
    for column in columns:
        if header.count(column) != 1:
            raise TraceError(f"line 1 of {path} has {header.count(column)} columns named {column}, expected one")
    for line, fields in rows:
        if len(fields) != len(header):
            raise TraceError(f"line {line} of {path} has {len(fields)} fields, expected {len(header)}")
    return [(line, dict(zip(header, fields, strict=True))) for line, fields in rows]


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV file with a header."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    write_whole(path, file.getvalue())


def read_table(path: Path, columns: Sequence[str], keys: int = 0) -> Table:
    """Read columns of numbers.

    Args:
        path: of a CSV file with a header.
        columns: each has a domain.
        keys: number of first columns whose numbers identify a line; no two lines may share them.

    Raises:
        TraceError: as `read_rows`, or a number is not in its domain. The message names the line.
    """
    rows = read_rows(path, columns)
    table = {}
    for column in columns:
        table[column] = np.array([_number(row[column], _DOMAINS[column]) for _, row in rows])
    for column in columns:
        domain = _DOMAINS[column]
        wrong = np.flatnonzero(~domain.holds(table, column))  # not a number is in no domain
        if len(wrong):
            line, row = rows[wrong[0]]
            raise TraceError(f"line {line} of {path}: {column} is {row[column]!r}, {domain.words}")
    first: dict[tuple[float, ...], int] = {}
    for (line, _), key in zip(rows, zip(*(table[column] for column in columns[:keys]), strict=True), strict=False):
        if first.setdefault(key, line) != line:
            raise TraceError(f"lines {first[key]} and {line} of {path} have the same {', '.join(columns[:keys])}")
    return table


def _number(text: str, domain: _Column) -> float:
    try:
        return domain.number(text)
    except ValueError:
        return np.nan
