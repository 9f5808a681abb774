"""Numbers that name computations.

The key of a node stands for the whole computation behind it: the operation, its arguments that are no tensors, and the
keys of its arguments that are. Leaves are named by what they are and not by what they hold: tensor ``n`` of a sample,
or tensor ``n`` from outside. So equal keys promise the same function of the samples, in this batch and in all others,
and nothing about values: entries are found by key and sample, and `outside` and `frozen` see to what else they depend
on.

Tensors from outside are numbered in the order in which keys are asked for. A program that asks in another order gets
other keys, which costs a miss. Numbers hold within a run; `Keys.describe` is the form that another run can compare.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Keys:
    """Numbers for computations: equal numbers, equal computations.

    >>> keys = Keys()
    >>> first, second = keys.number(("row", 0)), keys.number(("row", 1))
    >>> keys.number(("row", 0)) == first, first == second
    (True, False)
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._parts: list[tuple[Any, ...]] = []

    def number(self, parts: tuple[Any, ...]) -> int:
        """Return the number of a computation. The keys among its parts come wrapped in `Of`."""
        number = self._numbers.get(parts)
        if number is None:
            number = self._numbers[parts] = len(self._parts)
            self._parts.append(parts)
        return number

    def describe(self, number: int) -> str:
        """Return the computation in words, the same in each process; long."""
        lines: dict[int, str] = {}
        for at in self._behind(number):
            words = [f"%{list(lines).index(p.key)}" if isinstance(p, Of) else repr(p) for p in self._parts[at]]
            lines[at] = " ".join(words)
        return "\n".join(lines.values())

    def _behind(self, number: int) -> list[int]:
        found: set[int] = set()
        waiting = [number]
        while waiting:
            at = waiting.pop()
            if at not in found:
                found.add(at)
                waiting += [part.key for part in self._parts[at] if isinstance(part, Of)]
        return sorted(found)


class Of(NamedTuple):
    """The key of an argument, among the parts of a key."""

    key: int
