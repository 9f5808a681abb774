"""A model before it is planned: traced, checked against itself and measured on one micro-batch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_egeria.core.snapshots.random_state import preserved_random_state
from lightning_egeria.errors import UnsupportedError
from lightning_egeria.methods.pipelining.costs import learning_now, measured_graph
from lightning_egeria.methods.pipelining.graph import ComputationGraph
from lightning_egeria.methods.pipelining.tracing import Forward, TracedModel, tensors_of
from lightning_egeria.methods.pipelining.training_step import TrainingStep
from lightning_egeria.methods.pipelining.units import find_units


@dataclasses.dataclass(frozen=True)
class PreparedModel:
    """What is known of a model before it is planned.

    Attributes:
        model: the model.
        traced: its operations.
        groups: the units of each node of its graph.
        has_statistics: whether a forward changes buffers, as batch normalisation does.
        measured: its graph, with what trained when it was measured.
    """

    model: nn.Module
    traced: TracedModel
    groups: list[list[str]]
    has_statistics: bool
    measured: ComputationGraph

    def graph(self, recompute: bool) -> ComputationGraph:
        """Return the graph with what trains now."""
        graph = learning_now(self.measured, self.groups, self.traced, self.model)
        return graph.recomputed() if recompute else graph


def prepared(
    model: nn.Module, call: Forward, example: Any, stages: Mapping[str, Sequence[str]] | None, processes: int
) -> PreparedModel:
    """Trace, check and measure a model, and leave it as it was.

    Args:
        model: the model.
        call: its forward.
        example: one micro-batch.
        stages: module paths of each stage, by its name; None for units that `find_units` finds.
        processes: how many share the model.

    Raises:
        UnsupportedError: if the model cannot be traced, or the trace computes something else.
    """
    buffers = list(model.buffers())
    with unchanged(buffers):
        traced = _traced(model, call, example, stages, processes)
    if not traced.reads(traced.output):
        raise UnsupportedError("the output of the model depends on no module with parameters. Return it from forward")
    with unchanged(buffers):
        expected = call.expected(example) if isinstance(call, TrainingStep) else call(model, example)
    before = [buffer.clone() for buffer in buffers]
    with unchanged(buffers):
        _check_alike(expected, traced.find_random(example))
        has_statistics = not all(torch.equal(old, new) for old, new in zip(before, buffers, strict=True))
        measured, groups = measured_graph(traced, model, example)
    return PreparedModel(model, traced, groups, has_statistics, measured)


def _traced(
    model: nn.Module, call: Forward, example: Any, stages: Mapping[str, Sequence[str]] | None, processes: int
) -> TracedModel:
    def trace(units: list[str]) -> TracedModel:
        cut = call.cut(units, example) if isinstance(call, TrainingStep) else None
        return TracedModel(model, call, units, cut)

    if stages is not None:
        return trace([path for paths in stages.values() for path in paths])
    total = sum(parameter.numel() for parameter in model.parameters())
    try:  # with parts as small as torch.fx allows
        return trace(find_units(model, total // (4 * processes)))
    except UnsupportedError:
        return trace(find_units(model, total))


def _check_alike(expected: Any, traced: Any) -> None:
    pairs = list(zip(tensors_of(expected), tensors_of(traced), strict=False))
    if not pairs or not all(torch.allclose(*pair, rtol=1e-4, atol=1e-6, equal_nan=True) for pair in pairs):
        raise UnsupportedError(
            "the traced model does not compute the same as the model: code between modules changes a tensor in place, "
            "depends on values or draws random numbers. Move this code into a module, and name the module in stages"
        )


@contextlib.contextmanager
def unchanged(buffers: Sequence[Tensor]) -> Iterator[None]:
    """Restore buffers and random numbers after the body."""
    kept = [(buffer, buffer.clone()) for buffer in buffers]
    with preserved_random_state():
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in kept:
                    buffer.copy_(before)
