"""What a fault is, what it must not change, and how often that held."""

import dataclasses
import functools
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.job import Job
from faults.processes import lines_of, run


class NotHeldError(Exception):
    """What had to happen did not."""


class CannotError(Exception):
    """The fault cannot be made here."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One way in which things go wrong.

    Attributes:
        where: what it happens to.
        what: happens.
        must: follow from it.
        inject: does it with a random generator and an empty folder, and raises `NotHeldError`; may return how often.
    """

    where: str
    what: str
    must: str
    inject: Callable[[random.Random, Path], int | None]

    @property
    def name(self) -> str:
        """Of the function."""
        return self.inject.__name__


FAULTS: list[Fault] = []


def fault(where: str, what: str, must: str) -> Callable[[Any], Any]:
    """Mark a function as the injection of a fault."""

    def mark(inject: Callable[[random.Random, Path], int | None]) -> Callable[[random.Random, Path], int | None]:
        FAULTS.append(Fault(where, what, must, inject))
        return inject

    return mark


def check(holds: bool, otherwise: str) -> None:
    """See that something holds, also where assertions are off."""
    if not holds:
        raise NotHeldError(otherwise)


def once(told: list[str], text: str) -> None:
    """See that exactly one warning has a text in it."""
    found = [line for line in told if text in line]
    check(len(found) == 1, f"{len(found)} warnings with {text!r} instead of one, in {told}")


@functools.cache
def baseline(**arguments: Any) -> dict[str, Any]:
    """What a job gives without a fault, and without the cache."""
    return _alone(lambda folder: run(Job(folder, cached=False, **arguments)).result)


@functools.cache
def lines(background: bool = False) -> int:
    """Of the package in a job with the cache; where it waits for a worker, no two have quite as many."""
    return _alone(lambda folder: lines_of(Job(folder, background=background)))


def _alone(make: Callable[[Path], Any]) -> Any:
    folder = Path(tempfile.mkdtemp())
    try:
        found = make(folder)
    finally:
        shutil.rmtree(folder)
    if found is None:
        raise NotHeldError("the job does not run without a fault")
    return found
