"""Graphs of the kinds of networks that the paper measures, built small, with costs counted instead of measured.

A node's forward costs its multiplications at `RATE` of them a second, its backward twice as much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_egeria.methods.pipelining.graph import ComputationGraph, Node

RATE = 1e12  # multiplications and additions a second
BYTES = 4  # of a number in float32
STATES = 4  # numbers kept for each weight: itself, its gradient, and two of Adam


class _Builder:
    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._nodes: list[Node] = []
        self._edges: list[tuple[int, int]] = []

    def add(self, name: str, weights: int, inside: int, output: int, reads: Sequence[int], repeats: int = 1) -> int:
        """Add a node; ``inside`` and ``output`` are numbers for each sample, ``repeats`` the uses of a weight."""
        forward = self._samples * weights * repeats / RATE
        self._nodes.append(
            Node(
                name,
                forward,
                2 * forward,
                BYTES * self._samples * inside,
                BYTES * STATES * weights,
                BYTES * self._samples * output,
            )
        )
        self._edges += [(other, len(self._nodes) - 1) for other in reads]
        return len(self._nodes) - 1

    def layers(self, name: str, count: int, width: int, tokens: int, reads: Sequence[int]) -> int:
        """Add transformer layers; returns the last one."""
        last, weights = list(reads), 12 * width * width
        for number in range(count):
            added = self.add(f"{name}.{number}", weights, 16 * tokens * width, tokens * width, last, tokens)
            last = [added]
        return last[0]

    def dense(self, name: str, count: int, width: int, reads: Sequence[int], first: int | None = None) -> int:
        """Add linear layers with an activation; returns the last one."""
        last = list(reads)
        for number in range(count):
            inputs = (first or width) if number == 0 else width
            last = [self.add(f"{name}.{number}", inputs * width, 2 * width, width, last)]
        return last[0]

    def graph(self) -> ComputationGraph:
        return ComputationGraph(tuple(self._nodes), tuple(self._edges))


def multi_modal_transformer(branches: int = 4, layers: int = 8, samples: int = 8) -> ComputationGraph:
    """Return one transformer for each modality, then layers over all of them.

    >>> len(multi_modal_transformer().nodes)
    37
    """
    builder, width, tokens = _Builder(samples), 1024, 256
    ends = [builder.layers(f"modality{branch}", layers, width, tokens, []) for branch in range(branches)]
    fused = builder.layers("fusion", 4, width, tokens, ends)
    builder.add("head", width * 1000, width, 1000, [fused])
    return builder.graph()


def dlrm(tables: int = 7, samples: int = 64) -> ComputationGraph:
    """Return a recommendation model: dense layers and towers over sparse features, their interaction, dense layers.

    >>> len(dlrm().nodes)
    45
    """
    builder, width = _Builder(samples), 4096
    ends = [builder.dense("dense", 4, width, [])]
    for table in range(tables):
        found = builder.add(f"table{table}", 100_000, width, width, [])
        ends.append(builder.dense(f"tower{table}", 4, width, [found]))
    mixed = builder.add("interaction", width * width, width * (tables + 1), width, ends)
    builder.dense("top", 5, width, [mixed])
    return builder.graph()


def candle_uno(branches: int = 7, samples: int = 64) -> ComputationGraph:
    """Return a model of drug response: dense layers for each kind of feature, then for all of them.

    >>> len(candle_uno().nodes)
    33
    """
    builder, width = _Builder(samples), 4192
    ends = [builder.dense(f"feature{branch}", 4, width, []) for branch in range(branches)]
    joined = builder.add("join", width * width * 2, width * branches, width, ends)
    builder.dense("top", 4, width, [joined])
    return builder.graph()


EXAMPLES: dict[str, Callable[[], ComputationGraph]] = {
    "candle-uno": candle_uno,
    "dlrm": dlrm,
    "multi-modal": multi_modal_transformer,
}
