"""Which methods may train in one run. Imports neither torch nor Lightning, so a job can be checked before it runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from lightning_egeria.errors import UnsupportedError

METHODS = ("freezing", "caching", "selecting", "partial", "tuning", "goodput", "pipelining")

_REASONS = {
    frozenset({"selecting", "goodput"}): "selected samples bias the gradient noise scale",
    frozenset({"partial", "goodput"}): "the gradient noise scale needs the gradients of all ranks for every layer",
    frozenset({"tuning", "goodput"}): "both set the batch size and the learning rate",
    frozenset({"tuning", "selecting"}): "trials of settings train on every sample so far",
}


def reason_against(one: str, other: str) -> str | None:
    """Return why two methods cannot train in one run; None if they can.

    Args:
        one: a method of `METHODS`.
        other: another one.

    >>> reason_against("freezing", "caching")
    >>> reason_against("goodput", "tuning")
    'both set the batch size and the learning rate'
    """
    if "pipelining" in (one, other) and one != other:
        return "a graph pipeline runs without other methods"
    return _REASONS.get(frozenset({one, other}))


def check_combination(names: Iterable[str]) -> None:
    """Check that methods may train in one run.

    Args:
        names: methods of `METHODS`.

    Raises:
        UnsupportedError: if two of them may not.
    """
    for one, other in itertools.combinations(sorted(set(names), key=METHODS.index), 2):
        reason = reason_against(one, other)
        if reason is not None:
            raise UnsupportedError(f"{one} and {other} cannot train in one run: {reason}. Remove one of them")


def methods_of(trainer: Any) -> Iterator[str]:
    """Yield the methods in a Trainer."""
    for part in parts_of(trainer):
        yield type(part).egeria_method


def parts_of(trainer: Any) -> Iterator[Any]:
    """Yield what brings a method into a Trainer: its strategy, its callbacks and its nested data modules.

    A class belongs to a method if its attribute ``egeria_method`` names one of `METHODS`.
    """
    parts = [getattr(trainer, "strategy", None), *getattr(trainer, "callbacks", ())]
    datamodule = getattr(trainer, "datamodule", None)
    while datamodule is not None:
        parts.append(datamodule)
        datamodule = vars(datamodule).get("datamodule")
    yield from (part for part in parts if getattr(type(part), "egeria_method", None) in METHODS)
