"""Running the schedule of one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from lightning_egeria.core.batches.tree import tensor_leaves
from lightning_egeria.methods.pipelining.messages import FAILED, check_sendable, receive, send
from lightning_egeria.methods.pipelining.plan import Plan
from lightning_egeria.methods.pipelining.preparation import unchanged
from lightning_egeria.methods.pipelining.schedules import Action, schedule
from lightning_egeria.methods.pipelining.stage_step import Forms, Loss, StageStep, StepResult
from lightning_egeria.methods.pipelining.stages import StageWork


class StageExecutor:
    """Receives, computes and sends as the schedule of one rank says.

    Args:
        work: the share of the rank.
    """

    def __init__(self, work: StageWork) -> None:
        self._work, self._plan, self._stage = work, work.plan, work.stage
        self._forms: dict[Any, Forms] = {}
        self._schedules: dict[int, tuple[Plan, list[Action]]] = {}

    def learn_forms(self, batch: Any) -> Exception | None:
        """Run one forward, stage by stage, so that each rank knows the form of what it will receive.

        All ranks must call it with the same micro-batch.

        Returns:
            What this rank raised, or None.
        """
        failure: Exception | None = None
        values: dict[fx.Node, Any] = {}
        for stage in self._plan.inputs(self._stage):
            for node in self._work.sent[stage, self._stage]:
                values[node] = receive(self._plan.ranks(stage)[0])
        failed = any(value is FAILED for value in values.values())
        if not failed:
            try:
                with unchanged(self._work.buffers()), torch.no_grad():
                    self._work.compute(values, batch, (0, 0))
                torch.clear_autocast_cache()  # of casts without gradients
                for edge, nodes in self._work.sent.items():
                    if edge[0] == self._stage:
                        for node in nodes:
                            check_sendable(values[node])
            except Exception as error:  # of the user's model; told to all ranks by the caller
                failure, failed = error, True
        if self._work.rank == self._plan.ranks(self._stage)[0]:
            for stage in self._plan.outputs(self._stage):
                for node in self._work.sent[self._stage, stage]:
                    for rank in self._plan.ranks(stage):
                        send(FAILED if failed else values[node], rank)
        if not failed:
            self._forms[form_of(batch)] = {
                node: pytree.tree_map_only(Tensor, lambda leaf: leaf.to("meta"), value)
                for node, value in values.items()
                if node in self._work.traced.unit_of
            }
        return failure

    # one step

    def step(self, parts: Sequence[tuple[Any, float]], loss: Loss, number: int) -> StepResult:
        """Run forwards and backwards of all micro-batches of this rank.

        Args:
            parts: micro-batches and their weights in the loss.
            loss: computes the loss of a micro-batch.
            number: number of the step.

        Returns:
            The result. After a failure, this rank still receives, and sends zeros, so that no other one waits for ever.

        Raises:
            PipelineError: if the connection to another rank is lost.
        """
        if len(parts) not in self._schedules:
            plan = dataclasses.replace(self._plan, micro_batches=len(parts))
            self._schedules[len(parts)] = plan, schedule(plan)[self._work.rank]
        plan, actions = self._schedules[len(parts)]
        forms = [self._forms[form_of(batch)] for batch, _ in parts]
        step = StageStep(self._work, plan, parts, loss, number, forms)
        for action in actions:
            step.do(action)
        step.finish()
        return step.result


def form_of(batch: Any) -> tuple[Any, ...]:
    """Return shapes and dtypes of a batch, and those that autocast gives to what is computed from it."""
    leaves = list(tensor_leaves(batch))
    kinds = {leaf.device.type for leaf in leaves}
    casts = [(kind, str(torch.get_autocast_dtype(kind))) for kind in sorted(kinds) if torch.is_autocast_enabled(kind)]
    return (*((tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves), *casts)
