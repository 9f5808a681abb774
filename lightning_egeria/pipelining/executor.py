"""Running the actions of one rank in one step."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from lightning_egeria.errors import UnsupportedError
from lightning_egeria.pipelining.messages import FAILED, check_sendable, receive, send, wait
from lightning_egeria.pipelining.plan import Plan
from lightning_egeria.pipelining.schedules import Action, schedule
from lightning_egeria.pipelining.timeline import Span
from lightning_egeria.pipelining.tracing import TracedModel, seeded, tensors_of

Loss = Callable[[Any, Any], Tensor]
"""Called with the model's output and the micro-batch; returns the mean loss of its samples."""
Edge = tuple[int, int]
_NOTHING = torch.zeros(1)  # sent where a stage only waits for another


@dataclasses.dataclass
class StepResult:
    """What one rank has of a step: its part of the loss, its computations by its own clock, and what it raised."""

    loss: float = 0.0
    spans: list[Span] = dataclasses.field(default_factory=list)
    failure: Exception | None = None


@dataclasses.dataclass
class _Flying:
    """What is kept of a micro-batch between forward and backward."""

    inputs: dict[fx.Node, list[Tensor]]
    values: dict[fx.Node, Any]
    loss: Tensor | None


class StageExecutor:
    """Receives, computes and sends as the schedule of one rank says.

    Args:
        traced: the model's operations.
        plan: the plan.
        stage_of: the stage of each unit.
        loss_stage: the stage that has the output of the model.
        rank: this rank.
        seed: seeds the random numbers of operations, the same on all ranks.
    """

    def __init__(
        self, traced: TracedModel, plan: Plan, stage_of: dict[str, int], loss_stage: int, rank: int, seed: int
    ) -> None:
        self._traced, self._plan, self._rank, self._seed = traced, plan, rank, seed
        self._stage, _ = plan.place(rank)
        self._learns = plan.learns[self._stage]
        self._has_loss = self._stage == loss_stage
        held: list[list[fx.Node]] = [[] for _ in plan.stages]
        for node, unit in traced.unit_of.items():
            held[stage_of[unit]].append(node)
        held[loss_stage].append(traced.output)
        self._sent: dict[Edge, list[fx.Node]] = {edge: [] for edge in plan.edges}
        for stage, wanted in enumerate(held):
            units = [unit for unit, home in stage_of.items() if home == stage]
            computed, received = traced.needed(wanted, units)
            for node in received:
                self._sent[stage_of[traced.unit_of[node]], stage].append(node)
            if stage == self._stage:
                self._computed = computed
        self.parameters = {id(weight) for node in self._computed for weight in traced.weights(node)}
        self._forms: dict[Any, dict[fx.Node, tuple[list[Tensor], Any]]] = {}
        self._schedules: dict[int, tuple[Plan, list[Action]]] = {}

    # forms of what is received

    def knows(self, batch: Any) -> bool:
        """Whether micro-batches of these shapes were seen before."""
        return form_of(batch) in self._forms

    def learn_forms(self, batch: Any) -> Exception | None:
        """Run one forward, stage by stage, so that each rank knows the form of what it will receive.

        All ranks must call it with the same micro-batch.

        Returns:
            What this rank raised, or None.
        """
        failure: Exception | None = None
        values: dict[fx.Node, Any] = {}
        for stage in self._plan.inputs(self._stage):
            for node in self._sent[stage, self._stage]:
                values[node] = receive(self._plan.ranks(stage)[0])
        failed = any(value is FAILED for value in values.values())
        if not failed:
            try:
                with torch.no_grad():
                    self._compute(values, batch, (0, 0))
                for edge, nodes in self._sent.items():
                    if edge[0] == self._stage:
                        for node in nodes:
                            check_sendable(values[node])
            except Exception as error:  # of the user's model; told to all ranks by the caller
                failure, failed = error, True
        if self._rank == self._plan.ranks(self._stage)[0]:
            for stage in self._plan.outputs(self._stage):
                for node in self._sent[self._stage, stage]:
                    for rank in self._plan.ranks(stage):
                        send(FAILED if failed else values[node], rank)
        if not failed:
            flat = {node: pytree.tree_flatten(value) for node, value in values.items() if node in self._traced.unit_of}
            self._forms[form_of(batch)] = {
                node: ([leaf.to("meta") for leaf in leaves if isinstance(leaf, Tensor)], spec)
                for node, (leaves, spec) in flat.items()
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
            self._schedules[len(parts)] = plan, schedule(plan)[self._rank]
        plan, actions = self._schedules[len(parts)]
        step = _Step(self, plan, parts, loss, number)
        for action in actions:
            step.do(action)
        step.finish()
        return step.result

    def _compute(self, values: dict[fx.Node, Any], batch: Any, moment: tuple[int, int]) -> None:
        for node in self._computed:
            if node in self._traced.random:
                with seeded(self._seed, *moment, self._traced.nodes.index(node)):
                    values[node] = self._traced.evaluate(node, values, batch)
            else:
                values[node] = self._traced.evaluate(node, values, batch)


class _Step:
    """One step of one rank."""

    def __init__(
        self, owner: StageExecutor, plan: Plan, parts: Sequence[tuple[Any, float]], loss: Loss, number: int
    ) -> None:
        self.result = StepResult()
        self._owner, self._plan, self._parts, self._loss, self._number = owner, plan, parts, loss, number
        self._stage = owner._stage
        self._received: dict[tuple[str, int], list[tuple[int, list[Tensor], list[Any]]]] = {}
        self._flying: dict[int, _Flying] = {}
        self._back: dict[int, dict[fx.Node, list[Tensor]]] = {}
        self._sending: dict[tuple[str, int], list[tuple[Any, Tensor, int]]] = {}
        self._forms = [owner._forms[form_of(batch)] for batch, _ in parts]

    def do(self, action: Action) -> None:
        if action.kind in ("RF", "RB"):
            self._receive(action)
        elif action.kind in ("SF", "SB"):
            self._send(action)
        else:
            arrived = [(stage, tensors) for stage, tensors, works in self._arrived(action)]
            if self.result.failure is not None:
                return
            started = time.perf_counter()
            try:
                (self._forward if action.kind == "F" else self._backward)(action.micro_batch, dict(arrived))
            except Exception as error:  # of the user's model or loss; told to all ranks at the end of the step
                self.result.failure = error
            self.result.spans.append(Span(action, started, time.perf_counter()))

    def finish(self) -> None:
        """Wait until everything is sent."""
        for key in list(self._sending):
            self._finish(key)

    def _finish(self, key: tuple[str, int]) -> None:
        for work, _, rank in self._sending.pop(key, []):
            wait(work, rank)

    # transfers

    def _tensors(self, action: Action) -> list[Tensor]:
        """Return the forms of what an action transfers: of gradients, floating-point ones only."""
        assert action.stage is not None, "a transfer has another side"
        pair = (self._stage, action.stage)
        edge = pair if action.kind in ("SF", "RB") else (pair[1], pair[0])
        forms = self._forms[action.micro_batch]
        leaves = [leaf for node in self._owner._sent[edge] for leaf in forms[node][0]]
        if action.kind.endswith("B"):
            leaves = [leaf for leaf in leaves if leaf.is_floating_point()]
        return leaves or [_NOTHING]

    def _tag(self, action: Action) -> int:
        return action.micro_batch * 2 + action.kind.endswith("B")

    def _receive(self, action: Action) -> None:
        assert action.stage is not None, "a transfer has another side"
        rank = self._plan.rank(action.stage, action.micro_batch)
        buffers = [torch.empty(form.shape, dtype=form.dtype) for form in self._tensors(action)]
        works = [(dist.irecv(buffer, rank, tag=self._tag(action)), rank) for buffer in buffers]
        self._received.setdefault((action.kind[1], action.micro_batch), []).append((action.stage, buffers, works))

    def _arrived(self, action: Action) -> list[tuple[int, list[Tensor], list[Any]]]:
        found = self._received.pop((action.kind, action.micro_batch), [])
        for _, _, works in found:
            for work, rank in works:
                wait(work, rank)
        return found

    def _send(self, action: Action) -> None:
        assert action.stage is not None, "a transfer has another side"
        rank = self._plan.rank(action.stage, action.micro_batch)
        forms = self._tensors(action)
        tensors = [torch.zeros(form.shape, dtype=form.dtype) for form in forms]
        if self.result.failure is None:
            found = self._activations(action) if action.kind == "SF" else self._gradients(action)
            if [(one.shape, one.dtype) for one in found] == [(one.shape, one.dtype) for one in forms]:
                tensors = found
            else:
                self.result.failure = UnsupportedError(
                    f"a module returns shapes {[tuple(one.shape) for one in found]} and returned "
                    f"{[tuple(one.shape) for one in forms]} for a micro-batch of the same shape"
                )
        key = (action.kind, action.micro_batch)
        for tensor in tensors:
            sent = tensor.detach().contiguous()
            self._sending.setdefault(key, []).append((dist.isend(sent, rank, tag=self._tag(action)), sent, rank))
        if not self._owner._learns:  # nobody tells this stage to wait
            ahead = self._plan.in_flight_of_a_device(self._stage) * self._plan.stages[self._stage].width
            self._finish(("SF", action.micro_batch - ahead))

    def _activations(self, action: Action) -> list[Tensor]:
        flying = self._flying[action.micro_batch]
        nodes = self._owner._sent[self._stage, action.stage or 0]
        found = [leaf for node in nodes for leaf in tensors_of(flying.values[node])]
        if not self._owner._learns and action.stage == self._plan.outputs(self._stage)[-1]:
            del self._flying[action.micro_batch]
        return found or [_NOTHING]

    def _gradients(self, action: Action) -> list[Tensor]:
        inputs = self._back[action.micro_batch]
        leaves = [leaf for node in self._owner._sent[action.stage or 0, self._stage] for leaf in inputs[node]]
        found = [leaf for leaf in leaves if leaf.is_floating_point()]
        return [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in found] or [_NOTHING]

    # computing

    def _forward(self, number: int, arrived: dict[int, list[Tensor]]) -> None:
        owner, (batch, weight) = self._owner, self._parts[number]
        inputs: dict[fx.Node, list[Tensor]] = {}
        values: dict[fx.Node, Any] = {}
        for stage, tensors in arrived.items():
            left = iter(tensors)
            for node in owner._sent[stage, self._stage]:
                leaves, spec = self._forms[number][node]
                inputs[node] = [next(left) for _ in leaves]
                for leaf in inputs[node]:
                    leaf.requires_grad_(self._plan.learns[stage] and leaf.is_floating_point())
                values[node] = pytree.tree_unflatten(inputs[node], spec)
        with torch.set_grad_enabled(owner._learns):
            owner._compute(values, batch, (self._number, number))
            loss = None
            if owner._has_loss:
                with seeded(owner._seed, self._number, number, -1):
                    loss = self._loss(values[owner._traced.output], batch)
                if not _is_scalar(loss):
                    raise UnsupportedError(f"loss_fn must return a tensor with one number, got {type(loss).__name__}")
                self.result.loss += float(loss.detach()) * weight
        kept = {node: values[node] for nodes in owner._sent.values() for node in nodes if node in values}
        self._flying[number] = _Flying(inputs, kept, loss)

    def _backward(self, number: int, arrived: dict[int, list[Tensor]]) -> None:
        self._finish(("SF", number))
        flying = self._flying.pop(number)
        ends, gradients = list[Tensor](), list[Tensor]()
        if flying.loss is not None and flying.loss.requires_grad:
            ends.append(flying.loss)
            gradients.append(torch.full_like(flying.loss, self._parts[number][1]))
        for stage, tensors in arrived.items():
            nodes = self._owner._sent[self._stage, stage]
            leaves = [leaf for node in nodes for leaf in tensors_of(flying.values[node]) if leaf.is_floating_point()]
            for leaf, gradient in zip(leaves, tensors, strict=False):
                if leaf.requires_grad:
                    ends.append(leaf)
                    gradients.append(gradient)
        if ends:
            torch.autograd.backward(ends, gradients)
        self._back[number] = flying.inputs


def form_of(batch: Any) -> tuple[Any, ...]:
    """Return shapes and dtypes of a batch."""
    return tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in tensors_of(batch))


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1
