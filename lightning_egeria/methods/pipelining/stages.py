"""What one stage computes, receives and sends."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, fx, nn

from lightning_egeria.methods.pipelining.plan import Plan
from lightning_egeria.methods.pipelining.seeding import seeded
from lightning_egeria.methods.pipelining.tracing import TracedModel

Edge = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the operations of a model run.

    Attributes:
        traced: the operations.
        plan: the plan.
        stage_of: the stage of each unit.
        loss_stage: the stage that has the output of the model, and computes the loss.
    """

    traced: TracedModel
    plan: Plan
    stage_of: dict[str, int]
    loss_stage: int


class StageWork:
    """The share of one rank in the operations of a model.

    Args:
        placement: where operations run.
        rank: the rank.
        seed: seeds the random numbers of operations, the same on all ranks.
        recompute: keep only what is received, and repeat the forward before the backward.

    Attributes:
        stage: number of the stage.
        learns: whether it has a backward.
        has_loss: whether it computes the loss.
        sent: for each pair of stages, the operations whose values the first sends to the second.
        parameters: ids of the parameters that it reads.
        recomputes: whether forwards are repeated. The stage of the loss has its backward right after its forward, and
            keeps what it needs.
    """

    def __init__(self, placement: Placement, rank: int, seed: int, recompute: bool = False) -> None:
        self.placement, self.rank, self.seed = placement, rank, seed
        traced, plan = placement.traced, placement.plan
        self.traced, self.plan = traced, plan
        self.stage, _ = plan.place(rank)
        self.learns = plan.learns[self.stage]
        self.has_loss = self.stage == placement.loss_stage
        self.recomputes = recompute and self.learns and not self.has_loss
        held: list[list[fx.Node]] = [[] for _ in plan.stages]
        for node, unit in traced.unit_of.items():
            held[placement.stage_of[unit]].append(node)
        held[placement.loss_stage].append(traced.output)
        self.sent: dict[Edge, list[fx.Node]] = {edge: [] for edge in plan.edges}
        self._computed: list[fx.Node] = []
        for stage, wanted in enumerate(held):
            units = [unit for unit, home in placement.stage_of.items() if home == stage]
            computed, received = traced.needed(wanted, units)
            for node in received:
                self.sent[placement.stage_of[traced.unit_of[node]], stage].append(node)
            if stage == self.stage:
                self._computed = computed
        self._places = {node: place for place, node in enumerate(traced.nodes)}
        self.parameters = {id(weight) for node in self._computed for weight in traced.weights(node)}
        if self.has_loss:  # code behind the trace may read whatever belongs to no unit
            self.parameters |= {id(weight) for weight in traced.rest}

    def compute(self, values: dict[fx.Node, Any], batch: Any, moment: tuple[int, int]) -> None:
        """Add the values of all operations of this stage.

        Args:
            values: those that were received.
            batch: the micro-batch.
            moment: numbers of the step and of the micro-batch.
        """
        for node in self._computed:
            if node in self.traced.random:
                with seeded(self.seed, *moment, self._places[node]):
                    values[node] = self.traced.evaluate(node, values, batch)
            else:
                values[node] = self.traced.evaluate(node, values, batch)

    def buffers(self) -> list[Tensor]:
        """Return the buffers that a forward of this stage may change."""
        modules: Collection[nn.Module] = [
            self.traced.module(node) for node in self._computed if node.op == "call_module"
        ]
        found = {id(buffer): buffer for module in modules for buffer in module.buffers()}
        return list(found.values())


def rank_stages(placement: Placement, seed: int, recompute: bool) -> Sequence[StageWork]:
    """Return the shares of all ranks."""
    return [StageWork(placement, rank, seed, recompute) for rank in range(placement.plan.devices)]
