"""Dynamic programming over the parts of a graph: fast enough stages with the fewest micro-batches in flight."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_egeria.methods.pipelining.decomposition import Leaf, Parallel, Series, Tree

MOST_BRANCHES = 7  # up to here, all ways to group branches are tried; of more, those next to each other by cost
NEVER = math.inf


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Costs of nodes together: seconds and kept bytes of one micro-batch, and bytes of parameters."""

    seconds: float
    kept_bytes: int
    parameter_bytes: int

    def __add__(self, other: Sizes) -> Sizes:
        return Sizes(
            self.seconds + other.seconds,
            self.kept_bytes + other.kept_bytes,
            self.parameter_bytes + other.parameter_bytes,
        )


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the tree with its costs. Parts with the same `shape` are alike, and have one solution."""

    nodes: tuple[int, ...]
    sizes: Sizes
    is_series: bool
    parts: tuple[Part, ...]
    shape: int


def parts_of(tree: Tree, sizes: Sequence[Sizes]) -> Part:
    """Return a tree with costs.

    Args:
        tree: the tree.
        sizes: costs of each node.
    """
    shapes: dict[object, int] = {}

    def part(tree: Tree) -> Part:
        if isinstance(tree, Leaf):
            own = sizes[tree.node]
            return Part(tree.nodes, own, False, (), shapes.setdefault(own, len(shapes)))
        parts = tuple(map(part, tree.parts))
        if isinstance(tree, Parallel):
            parts = tuple(sorted(parts, key=lambda one: (-one.sizes.seconds, one.shape)))
        total = Sizes(0, 0, 0)
        for one in parts:
            total += one.sizes
        key = (isinstance(tree, Series), tuple(one.shape for one in parts))
        nodes = tuple(node for one in parts for node in one.nodes)
        return Part(nodes, total, isinstance(tree, Series), parts, shapes.setdefault(key, len(shapes)))

    return part(tree)


class Search:
    """Finds the stages with the fewest micro-batches in flight, among those that are fast enough and fit into memory.

    Args:
        devices: number of devices, at most.
        micro_batches: number of parts of a batch.
        group: forwards in a row.
        max_width: devices of one stage, at most; None for no limit.
        memory_bytes: memory of a device; None for no limit.
        bound_s: seconds of the slowest stage for one micro-batch, at most.
    """

    def __init__(
        self,
        devices: int,
        micro_batches: int,
        group: int,
        max_width: int | None,
        memory_bytes: int | None,
        bound_s: float,
    ) -> None:
        self._devices, self._micro_batches, self._group = devices, micro_batches, group
        self._widest = min(micro_batches, devices, max_width or devices)
        self._memory, self._bound = memory_bytes, bound_s
        self._solved: dict[tuple[object, ...], tuple[float, object]] = {}

    def stages(self, root: Part) -> list[tuple[tuple[int, ...], int]] | None:
        """Return nodes and devices of each stage, front to back within a series; None if there are none."""
        if self._part(root, self._devices, 0) == NEVER:
            return None
        return list(self._read_part(root, self._devices, 0))

    def _needed(self, seconds: float) -> int:
        """Return the fewest devices that can do the work of ``seconds`` in time."""
        return math.ceil(seconds / self._bound * (1 - 1e-12))

    def _width(self, sizes: Sizes, most: int, below: float) -> int | None:
        """Return the fewest devices on which nodes are fast enough and fit as one stage; None if there are none.

        ``below`` may depend on nothing here, so that more devices never make it smaller.
        """
        for width in range(max(1, self._needed(sizes.seconds)), min(most, self._widest) + 1):
            if self._fits(sizes, width, below):
                return width
        return None

    def _fits(self, sizes: Sizes, width: int, below: float) -> bool:
        if sizes.seconds * math.ceil(self._micro_batches / width) / self._micro_batches > self._bound:
            return False
        if self._memory is None:
            return True
        flying = math.ceil(min(below + self._group * width, self._micro_batches) / width)
        return sizes.parameter_bytes + flying * sizes.kept_bytes <= self._memory

    def _part(self, part: Part, devices: int, below: float) -> float:
        """Return the micro-batches in flight at the front of a part, at least; `NEVER` if it does not work out.

        Args:
            part: the part.
            devices: devices for it, at most.
            below: micro-batches in flight right behind it.
        """
        if part.sizes.seconds > self._bound * devices * (1 + 1e-12):
            return NEVER
        if part.is_series:
            return self._series(part, 0, devices, below)
        if part.parts:
            return self._parallel(part, (1 << len(part.parts)) - 1, devices, below)
        width = self._width(part.sizes, devices, below)
        return NEVER if width is None else below + self._group * width

    def _series(self, part: Part, start: int, devices: int, below: float) -> float:
        """Return the same for the parts of a series from ``start`` on."""
        count = len(part.parts)
        if start == count:
            return below
        key = (part.shape, start, devices, below)
        if key in self._solved:
            return self._solved[key][0]
        best: float = NEVER
        choice: tuple[object, ...] | None = None
        rest = self._needed(sum(one.sizes.seconds for one in part.parts[start:]))
        if rest <= devices:
            for value, option in self._series_options(part, start, devices, below):
                if value < best:
                    best, choice = value, option
        self._solved[key] = best, choice
        return best

    def _series_options(
        self, part: Part, start: int, devices: int, below: float
    ) -> Iterator[tuple[float, tuple[object, ...]]]:
        behind = list(itertools.accumulate((one.sizes.seconds for one in reversed(part.parts[start:])), initial=0.0))[
            ::-1
        ]
        sizes = Sizes(0, 0, 0)
        for end in range(start + 1, len(part.parts) + 1):
            sizes += part.parts[end - 1].sizes
            most = devices - self._needed(behind[end - start])
            if self._needed(sizes.seconds) > self._widest:
                break
            for width in range(max(1, self._needed(sizes.seconds)), min(most, self._widest) + 1):
                after = self._series(part, end, devices - width, below)
                if after == NEVER:
                    break  # with fewer devices it does not get better
                if self._fits(sizes, width, after):
                    yield after + self._group * width, ("stage", end, width)
                    break  # a wider stage has more in flight
        first = part.parts[start]
        if first.parts:
            for share in range(self._needed(first.sizes.seconds), devices - self._needed(behind[1]) + 1):
                after = self._series(part, start + 1, devices - share, below)
                if after != NEVER:
                    yield self._part(first, share, after), ("part", share, after)

    def _parallel(self, part: Part, left: int, devices: int, below: float) -> float:
        """Return the same for those parts of a parallel whose bits are in ``left``."""
        if not left:
            return below
        key = (part.shape, ~left, devices, below)
        if key in self._solved:
            return self._solved[key][0]
        best: float = NEVER
        choice: tuple[object, ...] | None = None
        if self._needed(self._sum(part, left).seconds) <= devices:
            first = left & -left
            number = first.bit_length() - 1
            one = part.parts[number]
            rest = self._needed(self._sum(part, left ^ first).seconds)
            for share in range(max(1, self._needed(one.sizes.seconds)), devices - rest + 1):
                value = max(self._part(one, share, below), self._parallel(part, left ^ first, devices - share, below))
                if value < best:
                    best, choice = value, ("part", number, share)
            for together in self._groups(part, left):
                width = self._width(self._sum(part, together), devices, below)
                if width is None:
                    continue
                others = self._parallel(part, left ^ together, devices - width, below)
                value = max(below + self._group * width, others)
                if value < best:
                    best, choice = value, ("stage", together, width)
        self._solved[key] = best, choice
        return best

    @staticmethod
    def _sum(part: Part, mask: int) -> Sizes:
        total = Sizes(0, 0, 0)
        for number, one in enumerate(part.parts):
            if mask >> number & 1:
                total += one.sizes
        return total

    @staticmethod
    def _groups(part: Part, left: int) -> Iterator[int]:
        """Yield sets of at least two of the parts in ``left``, with the first one in each."""
        numbers = [number for number in range(len(part.parts)) if left >> number & 1]
        if len(part.parts) > MOST_BRANCHES:
            mask = 1 << numbers[0]
            for number in numbers[1:]:
                mask |= 1 << number
                yield mask
            return
        for size in range(1, len(numbers)):
            for others in itertools.combinations(numbers[1:], size):
                yield sum(1 << number for number in others) | 1 << numbers[0]

    def _read_part(self, part: Part, devices: int, below: float) -> Iterator[tuple[tuple[int, ...], int]]:
        if part.is_series:
            start = 0
            while start < len(part.parts):
                choice = self._choice((part.shape, start, devices, below))
                if choice[0] == "stage":
                    _, end, width = choice
                    yield tuple(node for one in part.parts[start:end] for node in one.nodes), width
                    start, devices = end, devices - width
                else:
                    _, share, after = choice
                    yield from self._read_part(part.parts[start], share, after)
                    start, devices = start + 1, devices - share
        elif part.parts:
            left = (1 << len(part.parts)) - 1
            while left:
                kind, which, count = self._choice((part.shape, ~left, devices, below))
                if kind == "stage":
                    chosen = [one for number, one in enumerate(part.parts) if which >> number & 1]
                    yield tuple(node for one in chosen for node in one.nodes), count
                    left ^= which
                else:
                    yield from self._read_part(part.parts[which], count, below)
                    left ^= 1 << which
                devices -= count
        else:
            width = self._width(part.sizes, devices, below)
            assert width is not None, "a solved part has devices"
            yield part.nodes, width

    def _choice(self, key: tuple[object, ...]) -> tuple[Any, ...]:
        choice = self._solved[key][1]
        assert isinstance(choice, tuple), "only solved parts are read"
        return choice
